"""generate.py and the engine of other people's servers, on a loopback server."""

import collections
import contextlib
import dataclasses
import http.server
import json
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import tiny
from conftest import ENVIRONMENT, ROOT, run_script

from prm_jax import config as config_lib
from prm_jax.generation import prompts as prompts_lib
from prm_jax.generation import samples
from prm_jax.generation.engines import Limits, Prompt
from prm_jax.generation.sampling import Sampling
from prm_jax.generation.server import Server
from prm_jax.runtime.json_lines import BadLine
from prm_jax.training import loop

PROMPTS = [Prompt("", f"p{i}", "\n", i) for i in range(6)]


class Handler(http.server.BaseHTTPRequestHandler):
  """A server of completions: the text is a function of prompt and seed."""

  protocol_version = "HTTP/1.1"

  def log_message(self, *args):
    pass

  def do_POST(self):
    state = self.server.state
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    with state["lock"]:
      state["bodies"].append(body)
      trouble = state["troubles"].popleft() if state["troubles"] else None
    if trouble == "drop":
      self.close_connection = True
      return
    if isinstance(trouble, int):
      self.answer(trouble, b"busy")
    else:
      self.answer(200, json.dumps(state["make"](body)).encode())

  def answer(self, status, data):
    self.send_response(status)
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)


def complete(body):
  text = f"{body['prompt'].strip()} is {body['seed'] % 97}"
  log_probs = {"tokens": [text], "token_logprobs": [-0.5]}
  choice = {"text": text, "finish_reason": "stop", "logprobs": log_probs}
  return {"choices": [choice], "usage": {"completion_tokens": 3}}


@pytest.fixture
def loopback():
  """(state, engine): what the server is to do, and what it was asked."""
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
    httpd.state = {
      "lock": threading.Lock(),
      "bodies": [],
      "troubles": collections.deque(),
      "make": complete,
    }
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield httpd.state, Server(f"http://127.0.0.1:{httpd.server_port}/v1", "m", concurrency=4)
    httpd.shutdown()


SAMPLING, LIMITS = Sampling(0.7, top_k=5), Limits(9, ("!",))


def run(engine, n=3):
  found = {(x.prompt, x.sample): x for x in engine.generate(PROMPTS, n, SAMPLING, LIMITS)}
  assert sorted(found) == [(i, k) for i in range(len(PROMPTS)) for k in range(n)]
  return found


def test_a_server_is_asked_with_every_setting_and_each_sample_its_own_seed(loopback):
  state, engine = loopback
  found = run(engine)
  assert {x.token_count for x in found.values()} == {3} and not engine.said
  assert {x.log_probs for x in found.values()} == {(-0.5,)}
  assert len({body["seed"] for body in state["bodies"]}) == 18
  expected = {"model": "m", "max_tokens": 9, "temperature": 0.7, "top_k": 5, "stop": ["!"]}
  assert all(body | expected == body and body["n"] == 1 for body in state["bodies"])
  assert {key: x.text for key, x in run(engine).items()} == {k: x.text for k, x in found.items()}


def test_requests_are_repeated_until_trouble_passes(loopback):
  state, engine = loopback
  state["troubles"].extend([503, "drop", 429, 500])
  calm = run(engine)
  assert len(state["bodies"]) == 18 + 4
  assert {key: x.text for key, x in run(engine).items()} == {k: x.text for k, x in calm.items()}


def test_a_refused_request_is_an_error_with_the_servers_words(loopback):
  state, engine = loopback
  state["troubles"].extend([400] * 99)
  with pytest.raises(ValueError, match="status 400: 'busy'"):
    run(engine)


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"text": 3}]}, [1], "x"])
def test_an_answer_that_is_no_completion_is_an_error(answer, loopback):
  state, engine = loopback
  state["make"] = lambda body: answer
  with pytest.raises(ValueError, match=r"v1/completions|choices"):
    run(engine)


def test_a_server_that_is_not_there_is_an_error():
  with pytest.raises(OSError, match="no answer after 1 retries"):
    run(Server("http://127.0.0.1:9/v1", "m", retries=1))


def test_what_a_server_does_not_honour_is_said_once(loopback, capsys):
  """No log-probabilities, no usage, stop strings left out, text that goes on after one."""
  state, engine = loopback
  state["make"] = lambda body: {
    "choices": [{"text": "a", "finish_reason": "stop", "stop_reason": "!"}]
  }
  assert {x.text for x in run(engine).values()} == {"a!"}
  state["make"] = lambda body: {"choices": [{"text": "", "finish_reason": "abort"}]}
  assert {(x.text, x.end) for x in run(engine).values()} == {("", "length")}
  state["make"] = lambda body: {"choices": [{"text": "a!b", "finish_reason": "length"}]}
  assert {(x.text, x.end) for x in run(engine).values()} == {("a!", "stop")}
  said = capsys.readouterr().err.splitlines()
  assert len(said) == len(engine.said) == 5


SETTINGS = samples.Settings(2, Sampling(), Limits(9), seed=0, form="plain", steps="lines")


def write_problems(path, count=5):
  lines = [json.dumps({"problem": f"p{i}", "level": i, "answer": "7"}) + "\n" for i in range(count)]
  path.write_text("".join(lines))


def test_samples_keep_the_problems_keys_and_have_those_of_scored_samples(loopback, tmp_path):
  """One line a sample, in the order of the problems; a sample that was cut off has no answer."""
  path, out = tmp_path / "problems.jsonl", tmp_path / "samples.jsonl"
  write_problems(path)
  state, engine = loopback
  text = "one\n\ntwo\n\\boxed{7}"
  ends = {"p0\n": "length"}
  state["make"] = lambda body: {
    "choices": [{"text": text, "finish_reason": ends.get(body["prompt"], "stop")}]
  }
  problems = samples.read(path)
  with contextlib.closing(samples.Journal(samples.journal_path(out, 0), {"a": 1})) as journal:
    samples.generate(problems, engine, prompts_lib.maker("plain", None), SETTINGS, journal)
  lines = samples.write(out, problems, 1, {"a": 1})
  assert lines == [json.loads(line) for line in out.read_text().splitlines()]
  assert [(x["problem"], x["level"], x["sample"]) for x in lines] == [
    (f"p{i}", i, k) for i in range(5) for k in range(2)
  ]
  assert all(x["steps"] == ["one", "two", "\\boxed{7}"] for x in lines)
  assert [x["answer"] for x in lines] == [None] * 2 + ["7"] * 8
  assert {x["ground_truth_answer"] for x in lines} == {"7"}
  assert [x["finished"] for x in lines] == [False] * 2 + [True] * 8
  assert not [*tmp_path.glob("*journal*")]


def test_a_journal_of_another_run_is_refused(tmp_path):
  path = tmp_path / "j"
  samples.Journal(path, {"seed": 0, "n": 2}).close()
  with pytest.raises(ValueError, match=r"another run \(seed differ\)"):
    samples.Journal(path, {"seed": 1, "n": 2})


def test_steps_are_lines_or_paragraphs():
  text = "a\nb\n\nc \n"
  assert prompts_lib.split(text, "lines") == ["a", "b", "c"]
  assert prompts_lib.split(text, "paragraphs") == ["a\nb", "c"]


def test_worked_examples_come_before_the_problem():
  example = prompts_lib.Example("1+1", ["One and one.", "# Answer\n\n2"])
  prompt = prompts_lib.maker("few_shot", None, examples=[example])("2+2", 7)
  assert prompt.text == (
    "Problem:\n1+1\n\nSolution:\nOne and one.\n# Answer\n\n2\n\nProblem:\n2+2\n\nSolution:\n"
  )
  assert prompts_lib.solution("a\nb\n\nProblem:\nmore", "few_shot") == "a\nb"
  with pytest.raises(ValueError, match="--examples"):
    prompts_lib.maker("few_shot", None)


def test_a_line_without_a_problem_names_its_place(tmp_path):
  path = tmp_path / "p.jsonl"
  path.write_text('{"problem": "a"}\n{"text": "b"}\n')
  with pytest.raises(BadLine, match=r"p.jsonl:2: no \"problem\""):
    samples.read(path)


def command(path, out, url, *flags):
  args = (f"--input={path}", f"--output={out}", f"--url={url}", "--served_model=m", "--n=3")
  return [sys.executable, str(ROOT / "scripts" / "generate.py"), *args, "--prompt=plain", *flags]


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_campaign_of_kills(kills, loopback, tmp_path):
  """Killed at any moment and run again, the file is that of an uninterrupted run.

  A sample that stands in the journal is not asked for again.
  """
  path, out, whole = (tmp_path / f"{name}.jsonl" for name in ("problems", "out", "whole"))
  write_problems(path, 4 * kills + 8)
  state, engine = loopback

  def slowly(body):
    time.sleep(0.05)
    return complete(body)

  state["make"] = complete
  subprocess.run(command(path, whole, engine.url), env=ENVIRONMENT, check=True)
  state["make"] = slowly
  rng, done, survived = random.Random(0), 0, 0
  while done < kills:
    before = len(state["bodies"])
    flags = "--concurrency=2"
    process = subprocess.Popen(command(path, out, engine.url, flags), env=ENVIRONMENT)
    while len(state["bodies"]) == before and process.poll() is None:
      time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.5))
    process.send_signal(signal.SIGKILL)
    survived += process.wait() == 0
    done += 1
    assert not out.exists() or survived
    if survived:
      break
  before = len(state["bodies"])
  journal = out.with_name("out.jsonl.journal")
  known = journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0
  subprocess.run(command(path, out, engine.url), env=ENVIRONMENT, check=True)
  assert len(state["bodies"]) - before == 3 * (4 * kills + 8 - known)
  assert out.read_bytes() == whole.read_bytes() and not journal.exists()


@pytest.fixture(scope="module")
def text_run(arithmetic_data, tmp_path_factory):
  """The work directory of a language model of a few updates."""
  directory = tmp_path_factory.mktemp("text")
  (directory / "text.jsonl").write_text(json.dumps({"prompt": "2+2\n", "completion": "4"}) + "\n")
  given = tiny.experiment(arithmetic_data, config_lib.Loss())
  loss = config_lib.Loss(objective="language_model")
  texts = dict.fromkeys(("text_train", "text_eval"), str(directory / "text.jsonl"))
  data = dataclasses.replace(given.data, **texts)
  train = config_lib.Train(steps=2, batch_rows=1, log_every=2, eval_every=2, save_every=2)
  with tiny.first_device():
    loop.run(dataclasses.replace(given, data=data, train=train, loss=loss), directory / "run")
  return directory / "run"


def test_generate_py_samples_from_a_run_on_text(tmp_path, text_run):
  """From problems to samples that grade.py reads, with the model's own log-probabilities."""
  path, out = tmp_path / "problems.jsonl", tmp_path / "samples.jsonl"
  lines = [{"problem": f"{i}+1", "ground_truth_answer": str(i + 1)} for i in range(3)]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  flags = (f"--checkpoint={text_run}", f"--input={path}", f"--output={out}", "--prompt=plain")
  flags += ("--n=2", "--max_new_tokens=6", "--batch=4")
  done = run_script("generate.py", *flags)
  assert done.returncode == 0, done.stderr
  assert "6 samples" in done.stdout and "were cut off" in done.stdout
  found = [json.loads(line) for line in out.read_text().splitlines()]
  assert [line["problem"] for line in found] == [f"{i}+1" for i in range(3) for _ in range(2)]
  assert all(line["logprob"] < 0 and 1 <= line["tokens"] <= 6 for line in found)
  graded = tmp_path / "graded.jsonl"
  cache = f"--verdicts={tmp_path / 'verdicts'}"
  done = run_script("grade.py", f"--input={out}", f"--output={graded}", cache)
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
  "flags, message",
  [
    ((), "give one of --model=DIR and --checkpoint=DIR"),
    (("--url=http://127.0.0.1:9", "--served_model=m"), "no chat template"),
  ],
)
def test_wrong_flags_are_errors(flags, message, tmp_path):
  path = tmp_path / "problems.jsonl"
  write_problems(path)
  done = run_script("generate.py", f"--input={path}", f"--output={tmp_path / 'o'}", *flags)
  assert done.returncode == 1 and message in done.stderr
  assert [each.name for each in tmp_path.iterdir()] == ["problems.jsonl"]
