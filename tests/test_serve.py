"""serve.py: many clients get score.py's numbers, and what is wrong is refused, within bounds."""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import aiohttp
import jax
import numpy as np
import pytest
import tiny
from conftest import ENVIRONMENT, ROOT, call_script, run_script

from prm_jax.scoring import batching, service
from prm_jax.scoring.rater import MAX_TOKENS
from prm_jax.scoring.request_queue import RequestQueue
from prm_jax.scoring.reward_function import RewardFunction
from prm_jax.scoring.scorer import Scorer

GOOD = {"solutions": [{"problem": "A 1 + 2", "steps": ["A 3", "# Answer"]}]}
LIMITS = service.Limits()
ANY = ("127.0.0.1", 0)  # address


@pytest.fixture(scope="module", autouse=True)
def connections():
  """Lets this process have a thousand connections: often it may open 1,024 files."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
  yield
  resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def scorer(prm_run):
  return Scorer.load(prm_run, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def pool(arithmetic_data):
  """Solutions, of three steps and of a hundred."""
  lines = (arithmetic_data / "candidates.jsonl").read_text().splitlines()[:32]
  pool = [{key: json.loads(line)[key] for key in ("problem", "steps")} for line in lines]
  return pool + [{"problem": s["problem"], "steps": s["steps"] * 30} for s in pool[::4]]


class Server:
  """serve.py in a process of its own."""

  def __init__(self, prm_run):
    self.log = tempfile.NamedTemporaryFile()  # noqa: SIM115 - as long as the process
    # As from a shell that allows few open files.
    command = ["bash", "-c", 'ulimit -Sn 256; exec "$@"', "-", sys.executable]
    command += [str(ROOT / "scripts" / "serve.py"), f"--checkpoint={prm_run}", "--port=0"]
    self.process = subprocess.Popen(
      command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=self.log, text=True
    )
    self.line = self.process.stdout.readline()  # ends if the process does
    assert self.line.startswith("serving"), self.said()
    self.url = re.search(r"http://\S+", self.line)[0]

  def said(self) -> str:
    return pathlib.Path(self.log.name).read_text()

  def memory(self) -> float:
    """Its resident memory in MB."""
    status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s*(\d+)", status)[1]) / 1e3


@pytest.fixture(scope="module")
def servers():
  """The servers that were started, of which the last may be running."""
  servers = []
  yield servers
  for each in servers:
    each.process.kill()
    each.process.communicate()


@pytest.fixture
def server(prm_run, servers):
  """A running server, which other tests have used or will use."""
  if not servers or servers[-1].process.poll() is not None:
    servers.append(Server(prm_run))
  return servers[-1]


@contextlib.contextmanager
def in_thread(scorer, limits=LIMITS, listener=None):
  """(service, URL) of a service in a thread of this process."""
  served, listener = service.Service(scorer, "tiny", limits), listener or service.listen(*ANY)
  thread = threading.Thread(target=asyncio.run, args=[served.serve(listener)])
  thread.start()
  wait(lambda: served.address)
  try:
    yield served, f"http://127.0.0.1:{served.address[1]}"
  finally:
    served.stop()
    thread.join()


def wait(there):
  """Waits until `there()` is true."""
  end = time.monotonic() + 60
  while not there():
    assert time.monotonic() < end
    time.sleep(0.01)


async def post(session, url, body):
  """Status and answer."""
  async with session.post(f"{url}/score", json=body) as response:
    return response.status, await response.json()


def ask(url, *bodies):
  """Status and answer of each body; all are sent at once."""

  async def run():
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
      return await asyncio.gather(*(post(session, url, body) for body in bodies))

  return asyncio.run(run())


def health(server):
  """The answer of GET /health."""

  async def run():
    async with (
      aiohttp.ClientSession() as session,
      session.get(f"{server.url}/health") as response,
    ):
      return await response.json()

  return asyncio.run(run())


def raw(url, *parts, seconds=60.0):
  """Status, headers and JSON of the answer to bytes; what follows the answer is not sent."""
  host, port = url.removeprefix("http://").split(":")
  with socket.create_connection((host, int(port)), seconds) as connection:
    with contextlib.suppress(ConnectionError):  # the server need not read to the end
      for part in parts:
        connection.sendall(part)
    response = b""
    while b"\r\n\r\n" not in response or not response.endswith(b"}"):
      part = connection.recv(2**16)
      assert part, response
      response = (response + part).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
  head, _, body = response.partition(b"\r\n\r\n")
  return int(head.split()[1]), head.decode(), json.loads(body)


def request(body=b"", length=None, path="/score", method="POST", headers=""):
  length = len(body) if length is None else length
  head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n{headers}\r\n"
  return head.encode() + body


def check(status, answer, expected):
  """Asserts that an answer has score.py's numbers of these records."""
  assert status == 200, answer
  numbers = []
  for score, record in zip(answer["scores"], expected, strict=True):
    assert sorted(score) == ["prm_score", "rating_probs"]
    numbers.append((score["prm_score"], record["prm_score"]))
    for found, wanted in zip(score["rating_probs"], record["rating_probs"], strict=True):
      assert found.keys() == wanted.keys()
      numbers += [(found[name], wanted[name]) for name in found]
  # rounding of float32 in other batches
  np.testing.assert_allclose(*zip(*numbers), rtol=0, atol=1e-6)


def test_a_thousand_requests_at_once_get_the_numbers_of_score_py(server, prm_run, pool, tmp_path):
  """None is lost or mixed up, whatever shares its batch; and memory is bounded afterwards."""
  source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
  source.write_text("".join(json.dumps(each) + "\n" for each in pool))
  done = run_script(
    "score.py", f"--checkpoint={prm_run}", f"--input={source}", f"--output={output}"
  )
  assert done.returncode == 0, done.stderr
  expected = [json.loads(line) for line in output.read_text().splitlines()]
  assert np.std([line["prm_score"] for line in expected]) > 0.01
  rng = random.Random(0)
  drawn = [[rng.randrange(len(pool)) for _ in range(rng.randint(1, 8))] for _ in range(1000)]
  bodies = [{"solutions": [pool[i] for i in each]} for each in drawn]
  ask(server.url, *bodies[:200])  # memory grows with the programs that are compiled
  before = server.memory()
  for (status, answer), each in zip(ask(server.url, *bodies), drawn, strict=True):
    check(status, answer, [expected[i] for i in each])
  assert server.memory() - before < 300  # MB: a thousand requests hold 20 MB of bodies and tokens


SOLUTION = b'{"solutions": [{"problem": "p", "steps": ["s"]%s}]}'


@pytest.mark.parametrize(
  ("body", "status", "message"),
  [
    (b"", 400, "not JSON"),
    (b"problem=1&steps=2", 400, "not JSON"),
    (b"[1]", 400, "expected object, got array"),
    (b"{}", 400, 'no "solutions"'),
    (b'{"solutions": 7}', 400, '"solutions" is 7: expected array'),
    (b'{"solutions": []}', 400, "length >= 1"),
    (b'{"solutions": ["s"]}', 400, "\"solutions[0]\" is 's': expected object"),
    (b'{"solutions": [{"problem": "p"}]}', 400, 'solutions[0]: no "steps"'),
    (b'{"solutions": [{"problem": "p", "steps": []}]}', 400, 'solutions[0]: "steps" is []'),
    (b'{"solutions": [{"problem": "p", "text": "\\n"}]}', 400, 'solutions[0]: "steps" is []'),
    (b'{"solutions": [{"problem": 1, "steps": ["s"]}]}', 400, 'problem" is 1: expected str'),
    (b'{"solutions": [{"problem": "p", "steps": ["s", 7]}]}', 400, '"solutions[0].steps[1]" is 7'),
    (SOLUTION % b', "x": NaN', 400, "not JSON"),
    (b'{"solutions": [{"problem": "\xff", "steps": ["s"]}]}', 400, "not JSON"),
    (b'{"solutions": [{"problem": "\\ud800", "steps": ["s"]}]}', 400, "not JSON"),
    (SOLUTION % (b', "x": ' + b"[" * 10_000 + b"]" * 10_000), 400, "nested 10003 deep"),
    (b"[" * LIMITS.body_bytes, 400, "deep, expected at most 100"),
    (json.dumps({"solutions": GOOD["solutions"] * 257}).encode(), 400, "257 solutions; at most"),
    (
      json.dumps({"solutions": [*GOOD["solutions"], {"problem": "p", "steps": ["s" * 3 * 10**6]}]}),
      400,
      "solutions[1]: a solution of 3,000,001 characters",
    ),
    (
      json.dumps({"solutions": [*GOOD["solutions"], {"problem": "1 " * 9000, "steps": ["s"]}]}),
      400,
      f"at most {MAX_TOKENS} can be scored",
    ),
    (json.dumps({"solutions": [{"problem": "p", "steps": ["s"] * 20_000}]}), 400, "20,000 steps"),
  ],
)
def test_a_bad_body_is_refused_with_its_reason(server, body, status, message):
  """The status is 400, and the message says where it is wrong; good requests go on."""
  given = body.encode() if isinstance(body, str) else body
  found, _, answer = raw(server.url, request(given))
  assert found == status and message in answer["error"] and len(answer["error"]) < 1000
  assert ask(server.url, GOOD)[0][0] == 200


@pytest.mark.parametrize(
  ("parts", "status", "message"),
  [
    ([request(length=10**9)], 413, "over 4,194,304 bytes"),
    ([request(length=10**9, headers="Expect: 100-continue\r\n")], 413, "over 4,194,304 bytes"),
    (
      [request(headers="Transfer-Encoding: chunked\r\n").replace(b"Content-Length: 0\r\n", b"")]
      + [b"10000\r\n" + b" " * 2**16 + b"\r\n"] * 1000,
      413,
      "over 4,194,304 bytes",
    ),
    ([request(b"\x1f\x8b", headers="Content-Encoding: gzip\r\n")], 415, "send plain JSON"),
    ([request(path="/scores")], 404, "there are POST /score, POST /rewards and GET /health"),
    ([request(method="PUT")], 405, "PUT '/score': Method Not Allowed"),
    ([request(method="GET")], 405, "GET '/score': Method Not Allowed"),
  ],
)
def test_a_bad_request_is_refused_before_its_body_is_held(server, parts, status, message):
  """A claimed length, an endless body, and what is not served."""
  found, _, answer = raw(server.url, *parts)
  assert found == status and message in answer["error"]
  assert ask(server.url, GOOD)[0][0] == 200


def test_what_is_not_http_is_refused(server):
  """Chunks without a length: aiohttp's parser answers, in its own words."""
  host, port = server.url.removeprefix("http://").split(":")
  with socket.create_connection((host, int(port)), 60) as connection:
    head = request(headers="Transfer-Encoding: chunked\r\n")
    connection.sendall(head.replace(b"Content-Length: 0\r\n", b"") + b"zz\r\n")
    assert b" 400 " in connection.recv(2**16).splitlines()[0]
  assert ask(server.url, GOOD)[0][0] == 200


def test_what_is_hostile_holds_no_memory(server):
  """Hundreds of bodies that claim, nest or repeat too much leave the process as it was."""
  ask(server.url, *[GOOD] * 50)
  bodies = [b"[" * 10**6, SOLUTION % (b', "x": ' + b'{"a":1},' * 10**5), b"[1," * 10**6]
  bodies += [json.dumps({"solutions": [{"problem": "p", "steps": ["s" * 10**6]}]}).encode()]
  for body in bodies:
    raw(server.url, request(body))
  before = server.memory()
  for body in bodies * 10:
    assert raw(server.url, request(body))[0] == 400
  for _ in range(50):
    assert raw(server.url, request(length=10**9))[0] == 413
  assert server.memory() - before < 300  # MB; the bodies are 40 MB, what they claim 50 GB


def test_keys_that_are_not_read_hold_no_memory(server):
  """Many bodies at once, of millions of objects in keys beside the solution's own, are skipped."""
  body = SOLUTION % (b', "x": [' + b"{}," * (LIMITS.body_bytes // 3 - 100) + b"{}]")
  before = server.memory()

  async def send():
    async with aiohttp.ClientSession() as session:
      posts = (session.post(f"{server.url}/score", data=body) for _ in range(4))
      return [each.status for each in await asyncio.gather(*posts)]

  assert asyncio.run(send()) == [200] * 4
  assert server.memory() - before < 150  # MB; a body's objects would be 100


def test_health_says_what_the_model_is_and_nothing_is_left_in_the_queue(server, scorer):
  """GET /health has the contract of the checkpoint, its step and the counts."""

  assert ask(server.url, GOOD)[0][0] == 200
  wait(lambda: not any(health(server)["queued"].values()))
  found = health(server)
  assert found["status"] == "ok" and found["step"] == scorer.step
  assert found["contract"]["classes"] == [*scorer.contract.classes]
  assert found["contract"]["separator"] == scorer.contract.separator
  assert found["served"]["solutions"] > 0
  assert "steps end with the separator '\\n'" in server.said()


def test_text_is_split_as_score_py_does(server):
  """A solution given as text is answered with the steps it was split into, and their scores."""
  text = {"problem": GOOD["solutions"][0]["problem"], "text": "A 3\n\n# Answer"}
  ((_, answer), (_, split)) = ask(server.url, GOOD, {"solutions": [text]})
  assert split["scores"][0].pop("steps") == GOOD["solutions"][0]["steps"]
  check(200, split, answer["scores"])


def test_the_example_of_the_documentation_runs(server):
  """The request of docs/serving.md is answered with the keys that stand below it."""
  page = (ROOT / "docs" / "serving.md").read_text()
  body = json.loads(re.search(r"/score -d '(.*?)'", page, re.DOTALL)[1])
  ((status, answer),) = ask(server.url, body)
  assert status == 200
  first, second = answer["scores"]
  assert [*first] == ["rating_probs", "prm_score"] and len(first["rating_probs"]) == 3
  assert [*second] == ["steps", "rating_probs", "prm_score"]


def test_a_client_that_goes_away_is_dropped_from_the_queue(scorer, pool, monkeypatch):
  """What it asked for is not read, and no longer counted."""
  read, seen, go_on = RequestQueue._read, [], threading.Event()

  def slow(self, batch):
    seen.extend(entry.problem for entry in batch)
    assert go_on.wait(60)
    return read(self, batch)

  with in_thread(scorer) as (served, _):
    monkeypatch.setattr(RequestQueue, "_read", slow)
    body = json.dumps(GOOD).encode()
    gone = json.dumps({"solutions": [{"problem": "gone", "steps": ["s"]}]}).encode()
    with socket.create_connection(served.address) as first:
      first.sendall(request(body))
      wait(lambda: seen)
      with socket.create_connection(served.address) as second:
        second.sendall(request(gone))
        wait(lambda: served.held["solutions"] == 2)
      wait(lambda: served.held["solutions"] == 1)
      go_on.set()
      assert b" 200 " in first.recv(2**16).splitlines()[0]
  assert "gone" not in seen


def test_sigterm_finishes_what_is_queued(server, pool):
  """Every request that has been taken on is answered, others are refused, and the code is 0."""
  before = health(server)["served"]["solutions"]
  bodies = [{"solutions": pool[i % 8 :: 8]} for i in range(200)]
  # A length that no other test sends: the others queue while its program is compiled.
  bodies[0] = {"solutions": [{"problem": "p", "steps": ["1 " * 700]}]}

  async def run():
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
      tasks = [asyncio.create_task(post(session, server.url, body)) for body in bodies]
      queued = 0
      while not queued:
        assert not all(task.done() for task in tasks)
        async with session.get(f"{server.url}/health") as response:
          queued = (await response.json())["queued"]["solutions"]
      server.process.send_signal(signal.SIGTERM)
      return await asyncio.gather(*tasks, return_exceptions=True)

  answers = asyncio.run(run())
  assert server.process.wait(60) == 0
  refused = [each for each in answers if isinstance(each, aiohttp.ClientConnectionError)]
  answered = [each for each in answers if each not in refused]
  assert {status for status, _ in answered} <= {200, 503}
  scores = [answer["scores"] for status, answer in answered if status == 200]
  under_way = int(re.search(r"finishing (\d+) requests", server.said())[1])
  assert 0 < under_way <= len(scores)
  assert f"stopped after {before + sum(map(len, scores)):,} solutions" in server.said()
  with pytest.raises(aiohttp.ClientConnectorError):
    ask(server.url, GOOD)


def test_a_body_on_its_way_does_not_put_off_the_end(scorer):
  """The service stops long before the time for bodies is over; the body's answer is 408."""
  with in_thread(scorer, dataclasses.replace(LIMITS, seconds=1e6)) as (served, _):
    slow = socket.create_connection(served.address)
    slow.sendall(request(b"{", length=100))
    wait(lambda: served.held["bytes"])
  with slow:
    assert b" 408 " in slow.recv(2**16).splitlines()[0]


def test_a_full_queue_is_said_and_a_client_that_comes_again_is_answered(scorer, pool):
  """503 with Retry-After, while requests that are in the queue are answered."""
  limits = dataclasses.replace(LIMITS, held_solutions=20)
  statuses = []

  async def persist(session, url, body):
    while True:
      async with session.post(f"{url}/score", json=body) as response:
        statuses.append(response.status)
        if response.status != 503:
          return await response.json()
        assert response.headers["Retry-After"] == "1"
        assert "the queue is full of solutions" in (await response.json())["error"]
      await asyncio.sleep(0.05)

  async def run(url):
    async with aiohttp.ClientSession() as session:
      bodies = [{"solutions": pool[:8]}] * 40
      return await asyncio.gather(*(persist(session, url, body) for body in bodies))

  with in_thread(scorer, limits) as (served, url):
    answers = asyncio.run(run(url))
    assert 503 in statuses and statuses.count(200) == len(answers) == 40
    wait(lambda: not any(served.held.values()))


def test_bodies_share_a_bound(scorer):
  """Bodies that arrive slowly are counted together: the one beyond the bound gets 503."""
  limits = dataclasses.replace(LIMITS, held_bytes=10_000)
  with in_thread(scorer, limits) as (served, url):
    host, port = served.address
    with socket.create_connection((host, port)) as slow:
      slow.sendall(request(b" " * 9_000, length=9_500))
      wait(lambda: served.held["bytes"] >= 9_000)
      status, head, answer = raw(url, request(b" " * 2_000))
      assert status == 503 and "Retry-After: 1" in head and "full of bytes" in answer["error"]
      assert ask(url, GOOD)[0][0] == 200
    wait(lambda: not served.held["bytes"])  # its client is gone


def test_a_slow_body_ends(scorer):
  """A body that does not arrive in time gets 408, and others are answered meanwhile."""
  with in_thread(scorer, dataclasses.replace(LIMITS, seconds=1.0)) as (served, url):
    with socket.create_connection(served.address) as slow:
      slow.sendall(request(b"{", length=100))
      assert ask(url, GOOD)[0][0] == 200
      assert b" 408 " in slow.recv(2**16).splitlines()[0]
    wait(lambda: not any(served.held.values()))


def test_a_client_that_takes_no_answer_ends(scorer):
  """What it was to get is held for a time only."""
  body = json.dumps({"solutions": [{"problem": "p", "steps": ["s"] * 60}] * 256}).encode()
  limits, listener = dataclasses.replace(LIMITS, seconds=1.0), service.listen(*ANY)
  listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # as of its connections
  with in_thread(scorer, limits, listener) as (served, url), socket.socket() as slow:
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(served.address)
    slow.sendall(request(body))
    wait(lambda: served.served["solutions"] == 256)
    assert served.held["solutions"] == 256
    assert ask(url, GOOD)[0][0] == 200
    wait(lambda: not any(served.held.values()))
    taken = iter(lambda: len(slow.recv(2**16)), 0)
    assert sum(taken) < 2**20  # of 1.4 MB


@pytest.mark.parametrize("trouble", ["raises", "is not a number"])
def test_an_error_of_the_model_is_of_its_requests_only(scorer, monkeypatch, trouble):
  """500 for the requests of a batch on which the model fails; the next one is answered."""
  read = RequestQueue._read

  def failing(self, batch):
    if not any(entry.problem == "bad" for entry in batch):
      return read(self, batch)
    if trouble == "raises":
      raise RuntimeError("RESOURCE_EXHAUSTED")
    return [np.full((1, 1, 3), np.nan)] * len(batch)

  monkeypatch.setattr(RequestQueue, "_read", failing)
  with in_thread(scorer) as (served, url):
    bad = {"solutions": [{"problem": "bad", "steps": ["s"]}]}
    assert ask(url, bad)[0] == (500, {"error": "the model failed; the server's log says how"})
    assert ask(url, GOOD)[0][0] == 200
    wait(lambda: not any(served.held.values()))


def test_what_requests_share_is_read_once(scorer, pool, monkeypatch):
  """Equal solutions, and what solutions of a problem share, take one place in the batch."""
  slots, run = [], batching._run

  def counted(packed, *args):
    slots.append(sum(len(tree) for tree in packed.trees))
    return run(packed, *args)

  async def read(solutions):
    queue = RequestQueue(scorer)
    trees = await queue.encode(solutions)
    running = asyncio.create_task(queue.run())
    several = [queue.read([tree], [p]) for tree, (p, _) in zip(trees, solutions)]
    found = await asyncio.gather(*several)
    running.cancel()
    queue.close()
    return [each for (each,) in found]

  solutions = [(s["problem"], tuple(s["steps"])) for s in pool]
  expected = scorer.by_head(solutions)
  monkeypatch.setattr(batching, "_run", counted)
  scorer.by_head(solutions)
  once = sum(slots)
  slots.clear()
  for found, wanted in zip(asyncio.run(read(solutions * 3)), expected * 3, strict=True):
    np.testing.assert_allclose(found, wanted, atol=1e-6)
  assert sum(slots) == once


def test_without_aiohttp_it_says_what_to_install():
  """A missing aiohttp is one line, before a model is loaded."""
  script = ROOT / "scripts" / "serve.py"
  code = "import runpy, sys; sys.modules['aiohttp'] = None; sys.argv = sys.argv[1:]; "
  code += "runpy.run_path(sys.argv[0], run_name='__main__')"
  command = [sys.executable, "-c", code, script, "--checkpoint=none"]
  done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
  assert done.returncode == 1 and "pip install 'prm_jax[serve]'" in done.stderr
  assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_benchmark(tmp_path, arithmetic_data):
  """Each number of connections has its row, beside score.py's."""
  tiny.public(tmp_path / "model", 320, arithmetic_data / "tokenizer.model")
  flags = (f"--model={tmp_path}/model", "--quick", f"--json={tmp_path}/figures.json")
  done = run_script("benchmark.py", "serving", *flags)
  assert done.returncode == 0, done.stderr
  rows = json.loads((tmp_path / "figures.json").read_text())["tables"]["Scores over HTTP"]
  assert [row["connections"] for row in rows] == ["score.py", 1, 64, 1000]
  assert all(row["solutions/s"] > 0 for row in rows)


@pytest.mark.parametrize(
  ("flags", "code", "message"),
  [
    ([], 1, "give one of --checkpoint=DIR and --model=DIR"),
    (["--checkpoint=a", "--readout=trl"], 1, "go with --model"),
    (["--checkpoint=none", "--port=0"], 1, "none: no finished checkpoint"),
    (["--checkpoint=none", "--port=70000"], 2, "70000"),
    (["--checkpoint=none", "--host=192.0.2.1"], 1, "--host=192.0.2.1 --port=8000: Cannot"),
  ],
)
def test_wrong_flags_are_errors_without_a_traceback(flags, code, message):
  """A mistake in a flag is said, before a model is loaded."""
  done = call_script("serve.py", *flags)
  assert done.returncode == code and message in done.stderr


def test_rewards_over_http_are_those_of_the_reward_function(scorer):
  """POST /rewards gives the sums and steps of `RewardFunction` to clients at once, with the example
  of docs/rewards.md; a bad form is refused."""
  prompts, completions = ["A 1 + 2", "A 1 + 2", "x"], ["A 3\n# Answer", "A 4", ""]
  function = RewardFunction(scorer, "minimum", separator="\n")
  expected = function.step_rewards(prompts, completions)
  page = (ROOT / "docs" / "rewards.md").read_text()
  example = re.search(r"## Over HTTP.*?```python\n(.*?)```", page, re.DOTALL)[1]
  given = {"prompts": prompts, "completions": completions, "form": "minimum", "separator": "\n"}

  async def ask(url):
    async with aiohttp.ClientSession() as session:

      async def post(times, **changes):
        body = given | {key: given[key] * times for key in ("prompts", "completions")}
        async with session.post(f"{url}/rewards", json=body | changes) as response:
          return response.status, await response.json()

      return await asyncio.gather(post(1, form="x"), *(post(times) for times in range(1, 40)))

  with in_thread(scorer) as (_, url):
    (status, refused), *answers = asyncio.run(ask(url))
    code = {}
    exec(example.replace("http://127.0.0.1:8000", url), code)
    many = code["prm_reward"](["Solve"] * 300, completions * 100, question=prompts * 100)
  for times, (good, found) in enumerate(answers, 1):
    assert good == 200
    wanted = function(prompts, completions) * times
    np.testing.assert_allclose(found["rewards"], wanted, atol=1e-6)
    assert [each["ends"] for each in found["steps"]] == [each.ends for each in expected] * times
  assert status == 400 and "form='x'" in refused["error"]
  default = RewardFunction(scorer, "minimum")(prompts, completions)
  np.testing.assert_allclose(many, default * 100, atol=1e-6)
