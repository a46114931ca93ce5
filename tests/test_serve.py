"""serve.py: many clients get score.py's numbers, and bad requests are refused, within limits."""

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
import urllib.request

import aiohttp
import jax
import numpy as np
import pytest
import tiny
from conftest import ENVIRONMENT, ROOT, call_script, read_lines, run_script, write_lines

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
  """Raises the number of files that this process may open, often 1,024: connections are files."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
  yield
  resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def scorer(prm_run):
  """The scorer of `prm_run` on one device."""
  return Scorer.load(prm_run, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def pool(arithmetic_data):
  """Solutions of about three steps, and of about a hundred."""
  lines = read_lines(arithmetic_data / "candidates.jsonl")[:24]
  pool = [{key: line[key] for key in ("problem", "steps")} for line in lines]
  return pool + [{"problem": s["problem"], "steps": s["steps"] * 30} for s in pool[::12]]


class Server:
  """A running serve.py."""

  def __init__(self, prm_run):
    self.log = tempfile.NamedTemporaryFile()  # noqa: SIM115 - as long as the process
    # As from a shell that allows few open files.
    command = ["bash", "-c", 'ulimit -Sn 256; exec "$@"', "-", sys.executable]
    command += [str(ROOT / "scripts" / "serve.py"), f"--checkpoint={prm_run}", "--port=0"]
    self.process = subprocess.Popen(
      command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=self.log, text=True
    )
    self.line = self.process.stdout.readline()  # ends if the process does
    assert self.line.startswith("serving"), self.errors()
    self.url = re.search(r"http://\S+", self.line)[0]

  def errors(self) -> str:
    """Its standard error so far."""
    return pathlib.Path(self.log.name).read_text()

  def memory(self) -> float:
    """Its resident memory in MB."""
    status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s*(\d+)", status)[1]) / 1e3


@pytest.fixture(scope="module")
def servers():
  """The servers that tests have started; only the last may be running."""
  servers = []
  yield servers
  for server in servers:
    server.process.kill()
    server.process.communicate()


@pytest.fixture
def server(prm_run, servers):
  """A running server that tests share."""
  if not servers or servers[-1].process.poll() is not None:
    servers.append(Server(prm_run))
  return servers[-1]


@contextlib.contextmanager
def in_thread(scorer, limits=LIMITS, listener=None):
  """A service in a thread of this process, and its URL."""
  served, listener = service.Service(scorer, "tiny", limits), listener or service.listen(*ANY)
  thread = threading.Thread(target=asyncio.run, args=[served.serve(listener)])
  thread.start()
  wait(lambda: served.address)
  try:
    yield served, f"http://127.0.0.1:{served.address[1]}"
  finally:
    served.stop()
    thread.join()


def wait(condition):
  """Waits until `condition()` is true."""
  end = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.01)


async def post(session, url, body):
  """The status and the answer of POST /score."""
  async with session.post(f"{url}/score", json=body) as response:
    return response.status, await response.json()


def ask(url, *bodies):
  """The status and the answer of POST /score for each body; all are sent at once."""

  async def run():
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
      return await asyncio.gather(*(post(session, url, body) for body in bodies))

  return asyncio.run(run())


def health(server):
  """The answer of GET /health."""
  with urllib.request.urlopen(f"{server.url}/health") as response:
    return json.load(response)


def raw(url, *parts, seconds=60.0):
  """The status, headers and JSON of the answer to bytes; stops sending when the server does."""
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
  """The bytes of an HTTP request; `length` is the length that it claims, by default the body's."""
  length = len(body) if length is None else length
  head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n{headers}\r\n"
  return head.encode() + body


def encoded(*solutions):
  """The body of POST /score with these solutions, each a problem and its steps."""
  return json.dumps({"solutions": [{"problem": p, "steps": s} for p, s in solutions]}).encode()


def check(status, answer, expected):
  """Asserts that an answer has the numbers of score.py's records, and no other keys."""
  assert status == 200, answer
  numbers = []
  for score, record in zip(answer["scores"], expected, strict=True):
    assert sorted(score) == ["prm_score", "rating_probs"]
    numbers.append((score["prm_score"], record["prm_score"]))
    for mine, exact in zip(score["rating_probs"], record["rating_probs"], strict=True):
      assert mine.keys() == exact.keys()
      numbers += [(mine[name], exact[name]) for name in mine]
  # Other batches round float32 differently.
  np.testing.assert_allclose(*zip(*numbers), rtol=0, atol=1e-6)


def test_a_thousand_requests_at_once_get_the_numbers_of_score_py(server, prm_run, pool, tmp_path):
  """Each of a thousand requests gets its own solutions' scores, in bounded memory."""
  source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
  write_lines(source, pool)
  flags = f"--checkpoint={prm_run}", f"--input={source}", f"--output={output}"
  call_script("score.py", *flags)
  expected = read_lines(output)
  assert np.std([line["prm_score"] for line in expected]) > 0.01
  rng = random.Random(0)
  drawn = [[rng.randrange(len(pool)) for _ in range(rng.randint(1, 4))] for _ in range(1000)]
  bodies = [{"solutions": [pool[i] for i in each]} for each in drawn]
  ask(server.url, *bodies[:200])  # memory grows with the programs that are compiled
  before = server.memory()
  for (status, answer), each in zip(ask(server.url, *bodies), drawn, strict=True):
    check(status, answer, [expected[i] for i in each])
  assert server.memory() - before < 300  # MB: a thousand requests hold 20 MB of bodies and tokens


SOLUTION = b'{"solutions": [{"problem": "p", "steps": ["s"]%s}]}'


@pytest.mark.parametrize(
  ("body", "message"),
  [
    (b"", "not JSON"),
    (b"problem=1&steps=2", "not JSON"),
    (b"[1]", "expected object, got array"),
    (b"{}", 'no "solutions"'),
    (b'{"solutions": 7}', '"solutions" is 7: expected array'),
    (b'{"solutions": []}', "length >= 1"),
    (b'{"solutions": ["s"]}', "\"solutions[0]\" is 's': expected object"),
    (b'{"solutions": [{"problem": "p"}]}', 'solutions[0]: no "steps" or "text"'),
    (SOLUTION[:-1] % b"" + b', "model": 1}', "unknown field model"),
    (b'{"solutions": [{"problem": "p", "steps": []}]}', 'solutions[0]: "steps" is []'),
    (b'{"solutions": [{"problem": "p", "text": "\\n"}]}', 'solutions[0]: "steps" is []'),
    (b'{"solutions": [{"problem": 1, "steps": ["s"]}]}', 'problem" is 1: expected str'),
    (b'{"solutions": [{"problem": "p", "steps": ["s", 7]}]}', '"solutions[0].steps[1]" is 7'),
    (SOLUTION % b', "x": NaN', "not JSON"),
    (b'{"solutions": [{"problem": "\xff", "steps": ["s"]}]}', "not JSON"),
    (b'{"solutions": [{"problem": "\\ud800", "steps": ["s"]}]}', "not JSON"),
    (SOLUTION % (b', "x": ' + b"[" * 10_000 + b"]" * 10_000), "nested 10003 deep"),
    (b"[" * LIMITS.body_bytes, "deep, expected at most 100"),
    (encoded(*[("p", ["s"])] * 257), "257 solutions; at most"),
    (encoded(("p", ["s"]), ("p", ["s" * 3 * 10**6])), "solutions[1]: a solution of 3,000,001 char"),
    (encoded(("p", ["s"]), ("1 " * 9000, ["s"])), f"at most {MAX_TOKENS} can be scored"),
    (encoded(*[("p", ["s"] * 10_000)] * 2), "20,000 steps"),
    (encoded(("p", ["s"] * 20_000)), f"at most {MAX_TOKENS} can be scored"),
  ],
)
def test_a_bad_body_is_refused_with_its_reason(server, body, message):
  """A bad body gets 400 with the place and the reason, and the next request is answered."""
  status, _, answer = raw(server.url, request(body))
  assert status == 400 and message in answer["error"] and len(answer["error"]) < 1000
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
  """Too long a body, one that never ends, a compressed one and unknown routes are refused."""
  answered, _, answer = raw(server.url, *parts)
  assert answered == status and message in answer["error"]
  assert ask(server.url, GOOD)[0][0] == 200


def test_a_request_that_is_not_http_is_refused(server):
  """Chunks without a length get 400, and the next request is answered."""
  host, port = server.url.removeprefix("http://").split(":")
  with socket.create_connection((host, int(port)), 60) as connection:
    head = request(headers="Transfer-Encoding: chunked\r\n")
    connection.sendall(head.replace(b"Content-Length: 0\r\n", b"") + b"zz\r\n")
    assert b" 400 " in connection.recv(2**16).splitlines()[0]
  assert ask(server.url, GOOD)[0][0] == 200


def test_hostile_bodies_hold_no_memory(server):
  """Bodies that nest, repeat or claim too much do not make the process larger."""
  ask(server.url, *[GOOD] * 50)
  bodies = [b"[" * 10**6, b"[1," * 10**6]
  bodies += [encoded(("p", ["s" * 10**6]))]
  for body in bodies:
    raw(server.url, request(body))
  before = server.memory()
  for body in bodies * 10:
    assert raw(server.url, request(body))[0] == 400
  for _ in range(50):
    assert raw(server.url, request(length=10**9))[0] == 413
  assert server.memory() - before < 300  # MB; the bodies are 50 MB and claim 50 GB


def test_keys_that_are_not_read_hold_no_memory(server):
  """Millions of objects under other keys than a solution's own are skipped, not built."""
  body = SOLUTION % (b', "x": [' + b"{}," * (LIMITS.body_bytes // 3 - 100) + b"{}]")
  before = server.memory()

  async def send():
    async with aiohttp.ClientSession() as session:
      posts = (session.post(f"{server.url}/score", data=body) for _ in range(4))
      return [response.status for response in await asyncio.gather(*posts)]

  assert asyncio.run(send()) == [200] * 4
  assert server.memory() - before < 150  # MB; a body's objects would be 100


def test_health_describes_the_model_and_the_queue(server, scorer):
  """GET /health has the checkpoint's contract and step; answered requests leave the queue empty."""
  assert ask(server.url, GOOD)[0][0] == 200
  wait(lambda: not any(health(server)["queued"].values()))
  answer = health(server)
  assert answer["status"] == "ok" and answer["step"] == scorer.step
  assert answer["contract"]["classes"] == [*scorer.contract.classes]
  assert answer["contract"]["separator"] == scorer.contract.separator
  assert answer["served"]["solutions"] > 0
  assert "steps end with the separator '\\n'" in server.errors()


def test_text_is_split_as_score_py_does(server):
  """The answer to a solution given as text has the steps that it was split into."""
  text = {"problem": GOOD["solutions"][0]["problem"], "text": "A 3\n\n# Answer"}
  ((_, answer), (_, split)) = ask(server.url, GOOD, {"solutions": [text]})
  assert split["scores"][0].pop("steps") == GOOD["solutions"][0]["steps"]
  check(200, split, answer["scores"])


def test_the_example_of_the_documentation_runs(server):
  """The answer to the request in docs/serving.md has the keys that the page shows."""
  page = (ROOT / "docs" / "serving.md").read_text()
  body = json.loads(re.search(r"/score -d '(.*?)'", page, re.DOTALL)[1])
  ((status, answer),) = ask(server.url, body)
  assert status == 200
  first, second = answer["scores"]
  assert [*first] == ["rating_probs", "prm_score"] and len(first["rating_probs"]) == 3
  assert [*second] == ["steps", "rating_probs", "prm_score"]


def test_a_client_that_goes_away_is_dropped_from_the_queue(scorer, pool, monkeypatch):
  """The model does not score its solutions, and they no longer count as held."""
  read, seen, go_on = RequestQueue._read, [], threading.Event()

  def slow(self, batch):
    seen.extend(entry.problem for entry in batch)
    assert go_on.wait(60)
    return read(self, batch)

  with in_thread(scorer) as (served, _):
    monkeypatch.setattr(RequestQueue, "_read", slow)
    with socket.create_connection(served.address) as first:
      first.sendall(request(encoded(("first", ["s"]))))
      wait(lambda: seen)
      with socket.create_connection(served.address) as second:
        second.sendall(request(encoded(("gone", ["s"]))))
        wait(lambda: served.held["solutions"] == 2)
      wait(lambda: served.held["solutions"] == 1)
      go_on.set()
      assert b" 200 " in first.recv(2**16).splitlines()[0]
  assert "gone" not in seen


def test_sigterm_finishes_the_requests_that_were_accepted(server, pool):
  """After SIGTERM, accepted requests are answered, others are refused, and the exit code is 0."""
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
  refused = aiohttp.ClientConnectionError
  answered = [answer for answer in answers if not isinstance(answer, refused)]
  assert {status for status, _ in answered} <= {200, 503}
  scores = [answer["scores"] for status, answer in answered if status == 200]
  under_way = int(re.search(r"finishing (\d+) requests", server.errors())[1])
  assert 0 < under_way <= len(scores)
  assert f"stopped after {before + sum(map(len, scores)):,} solutions" in server.errors()
  with pytest.raises(aiohttp.ClientConnectorError):
    ask(server.url, GOOD)


def test_an_unfinished_body_does_not_delay_the_end(scorer):
  """A service that is stopped ends before the time for bodies is over; the body gets 408."""
  with in_thread(scorer, dataclasses.replace(LIMITS, seconds=1e6)) as (served, _):
    slow = socket.create_connection(served.address)
    slow.sendall(request(b"{", length=100))
    wait(lambda: served.held["bytes"])
  with slow:
    assert b" 408 " in slow.recv(2**16).splitlines()[0]


def test_a_full_queue_refuses_requests_until_it_has_room(scorer, pool):
  """A request that would overfill the queue gets 503 with Retry-After, and its retries succeed."""
  limits = dataclasses.replace(LIMITS, held_solutions=20)
  statuses = []

  async def retry(session, url, body):
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
      return await asyncio.gather(*(retry(session, url, body) for body in bodies))

  with in_thread(scorer, limits) as (served, url):
    answers = asyncio.run(run(url))
    assert 503 in statuses and statuses.count(200) == len(answers) == 40
    wait(lambda: not any(served.held.values()))


def test_bodies_that_arrive_are_bounded_together(scorer):
  """A body that would exceed the limit of bytes of all bodies gets 503."""
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


def test_a_slow_body_times_out(scorer):
  """A body that does not arrive in time gets 408, and others are answered meanwhile."""
  with in_thread(scorer, dataclasses.replace(LIMITS, seconds=1.0)) as (served, url):
    with socket.create_connection(served.address) as slow:
      slow.sendall(request(b"{", length=100))
      assert ask(url, GOOD)[0][0] == 200
      assert b" 408 " in slow.recv(2**16).splitlines()[0]
    wait(lambda: not any(served.held.values()))


@pytest.mark.parametrize("sent", [b"", b"POST /score HT"])
def test_a_silent_connection_is_closed(scorer, monkeypatch, sent):
  """A client that sends no whole request does not keep its connection."""
  monkeypatch.setattr(service, "IDLE", 0.2)
  with (
    in_thread(scorer) as (served, _),
    socket.create_connection(served.address, timeout=60) as silent,
  ):
    silent.sendall(sent)
    with contextlib.suppress(ConnectionResetError):
      while silent.recv(2**16):  # an answer to half a request
        pass


def test_a_client_that_reads_no_answer_times_out(scorer):
  """The answer to a client that does not read is dropped after the limit of seconds."""
  body = encoded(*[("p", ["s"] * 60)] * 256)
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
    received = iter(lambda: len(slow.recv(2**16)), 0)
    assert sum(received) < 2**20  # of 1.4 MB


@pytest.mark.parametrize("failure", ["exception", "NaN"])
def test_a_model_that_fails_fails_only_the_requests_of_its_batch(
  scorer, monkeypatch, capsys, failure
):
  """Requests get 500 if the model fails on their batch, the log says why; the next is answered."""
  read = RequestQueue._read

  def failing(self, batch):
    if not any(entry.problem == "bad" for entry in batch):
      return read(self, batch)
    if failure == "exception":
      raise RuntimeError("RESOURCE_EXHAUSTED")
    return [np.full((1, 1, 3), np.nan)] * len(batch)

  monkeypatch.setattr(RequestQueue, "_read", failing)
  with in_thread(scorer) as (served, url):
    bad = {"solutions": [{"problem": "bad", "steps": ["s"]}]}
    assert ask(url, bad)[0] == (500, {"error": "the model failed; the server's log says how"})
    assert {"exception": "RESOURCE_EXHAUSTED", "NaN": "NaN in place of"}[
      failure
    ] in capsys.readouterr().err
    assert ask(url, GOOD)[0][0] == 200
    wait(lambda: not any(served.held.values()))


def test_requests_share_their_common_beginnings(scorer, pool, monkeypatch):
  """Equal solutions, and common first steps of a problem's solutions, are computed once a batch."""
  slots, run = [], batching._run

  def counted(packed, *args):
    slots.append(sum(len(tree) for tree in packed.trees))
    return run(packed, *args)

  async def read(solutions):
    queue = RequestQueue(scorer)
    trees = await queue.encode(solutions)
    running = asyncio.create_task(queue.run())
    requests = [queue.read([tree], [p]) for tree, (p, _) in zip(trees, solutions)]
    answers = await asyncio.gather(*requests)
    running.cancel()
    queue.close()
    return [probabilities for (probabilities,) in answers]

  solutions = [(s["problem"], tuple(s["steps"])) for s in pool]
  expected = scorer.by_head(solutions)
  monkeypatch.setattr(batching, "_run", counted)
  scorer.by_head(solutions)
  once = sum(slots)
  slots.clear()
  for answer, exact in zip(asyncio.run(read(solutions * 3)), expected * 3, strict=True):
    np.testing.assert_allclose(answer, exact, atol=1e-6)
  assert sum(slots) == once


@pytest.mark.slow
def test_the_benchmark_measures_each_number_of_connections(tmp_path, arithmetic_data):
  """`benchmark.py serving` writes a row for score.py and one for each number of connections."""
  tiny.public(tmp_path / "model", 320, arithmetic_data / "tokenizer.model")
  flags = (f"--model={tmp_path}/model", "--quick", f"--json={tmp_path}/figures.json")
  run_script("benchmark.py", "serving", *flags)
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
    (["--checkpoint=none", "--host=a.invalid"], 1, "--host=a.invalid --port=8000: "),
  ],
)
def test_wrong_flags_are_errors_without_a_traceback(flags, code, message):
  """A wrong flag is named in a message, before a model is loaded."""
  done = call_script("serve.py", *flags, code=code)
  assert message in done.stderr


def test_rewards_over_http_are_those_of_the_reward_function(scorer):
  """POST /rewards gives many clients the sums and steps of `RewardFunction`, or 400.

  The client in docs/rewards.md gets the same sums, also of more solutions, steps or bytes than one
  request may have.
  """
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

      return await asyncio.gather(
        post(1, form="x"), post(1, forms=""), *(post(times) for times in range(1, 40))
      )

  with in_thread(scorer) as (_, url):
    (status, refused), misspelt, *answers = asyncio.run(ask(url))
    code = {}
    exec(example.replace("http://127.0.0.1:8000", url), code)
    many = code["prm_reward"](["Solve"] * 300, completions * 100, question=prompts * 100)
    long = ["A\n" * 600] * 30 + ["A\n" * 20_000, "A" * 10**6] + ["A" * 10**5] * 40
    columns = {"question": np.array(["x"] * len(long))}
    most = code["prm_reward"](["Solve"] * len(long), long, **columns)
  sums = function(prompts, completions)
  for times, (good, answer) in enumerate(answers, 1):
    assert good == 200
    np.testing.assert_allclose(answer["rewards"], sums * times, atol=1e-6)
    assert [step["ends"] for step in answer["steps"]] == [step.ends for step in expected] * times
  assert status == 400 and "form='x'" in refused["error"]
  assert misspelt[0] == 400 and "unknown field forms" in misspelt[1]["error"]
  default = RewardFunction(scorer, "minimum")(prompts, completions)
  np.testing.assert_allclose(many, default * 100, atol=1e-6)
  longest = RewardFunction(scorer, "minimum")(["x"], long[:1])
  np.testing.assert_allclose(most, longest * 30 + [-1] * 42, atol=1e-5)
