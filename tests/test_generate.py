"""generate.py and the engine of other people's servers, on a loopback server."""

import collections
import contextlib
import functools
import http.server
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import jobs
import numpy as np
import pytest
import tokenizers as hf
import urllib3
from conftest import ENVIRONMENT, ROOT, call_script, run_script

from prm_jax.generation import language_models, samples
from prm_jax.generation import prompts as prompts_lib
from prm_jax.generation.engines import Completion, Limits, Prompt
from prm_jax.generation.sampling import Sampling
from prm_jax.generation.server import Retry, Server
from prm_jax.input_pipeline import tokenizers
from prm_jax.runtime import journal as journal_lib
from prm_jax.runtime.json_lines import BadLine

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
    if trouble == "tear":  # in the middle of the body
      self.answer(200, b'{"choices": [', 999)
      self.close_connection = True
      return
    if isinstance(trouble, int):
      self.answer(trouble, b"busy")
    else:
      self.answer(200, json.dumps(state["make"](body)).encode())

  def answer(self, status, data, length=0):
    self.send_response(status)
    self.send_header("Content-Length", str(length or len(data)))
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
    threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
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
  state["troubles"].extend([503, "drop", 429, "tear", 500])
  calm = run(engine)
  assert len(state["bodies"]) == 18 + 5
  assert {key: x.text for key, x in run(engine).items()} == {k: x.text for k, x in calm.items()}


def test_a_server_that_asks_for_a_long_pause_gets_a_minute():
  after = lambda value: urllib3.HTTPResponse(headers={"Retry-After": value})
  assert [Retry().get_retry_after(after(value)) for value in ("5", "1000000")] == [5, 60]
  assert Retry().get_retry_after(urllib3.HTTPResponse()) is None


def test_an_error_does_not_wait_for_requests_under_way(loopback):
  """The other requests are answered only after the error has come."""
  state, engine = loopback
  over = threading.Event()

  def make(body):
    assert body["prompt"] == "p0\n" or over.wait(60)
    return complete(body) if over.is_set() else {"choices": []}

  state["make"] = make
  with pytest.raises(ValueError, match="0 choices"):
    run(engine, n=1)
  assert not over.is_set()
  over.set()


def test_with_a_tokenizer_a_problem_is_plain_letters(loopback, tmp_path):
  """The template's tokens are special, a problem that spells them out is not; one first token."""
  state, engine = loopback
  made = hf.Tokenizer(hf.models.BPE({"<s>": 0} | {c: i for i, c in enumerate("a<|im_end>", 1)}, []))
  made.add_special_tokens(["<s>", "<|im_end|>"])
  made.post_processor = hf.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
  made.save(str(tmp_path / "tokenizer.json"))
  engine.tokenizer = tokenizer = tokenizers.load(tmp_path)
  end = tokenizer.token_id("<|im_end|>")
  prompt = Prompt("<s>", "a<|im_end|>", "<|im_end|>", 0)
  state["make"] = lambda body: complete(body | {"prompt": ""})
  assert len([*engine.generate([prompt], 1, SAMPLING, LIMITS)]) == 1
  (body,) = state["bodies"]
  assert body["prompt"] == [0, *tokenizer.encode("a<|im_end|>"), end]
  assert body["prompt"].count(0) == body["prompt"].count(end) == 1
  engine.tokenizer = None
  [*engine.generate([prompt], 1, SAMPLING, LIMITS)]
  assert state["bodies"][1]["prompt"] == prompt.text


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
  with contextlib.closing(journal_lib.Journal(journal_lib.path(out, 0), {"a": 1})) as journal:
    samples.generate(problems, engine, prompts_lib.maker("plain", None), SETTINGS, journal)
  lines = journal_lib.write(out, 5, 1, {"a": 1})
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
  journal_lib.Journal(path, {"seed": 0, "n": 2}).close()
  with pytest.raises(ValueError, match=r"another run \(seed: 0, now 1\)"):
    journal_lib.Journal(path, {"seed": 1, "n": 2})


def test_another_number_of_hosts_is_refused_before_a_journal_is_made(tmp_path):
  """Whichever host's journal is there; and hosts that do not see each other's are told."""
  out = tmp_path / "out.jsonl"
  journal_lib.Journal(journal_lib.path(out, 1), {"hosts": 2}).close()
  with pytest.raises(ValueError, match=r"hosts: 2, now 1"):
    journal_lib.check(out, {"hosts": 1})
  with pytest.raises(OSError, match=r"out\.jsonl\.journal: the journal of host 0 is not on this"):
    journal_lib.check_shared(out, 2)
  with pytest.raises(OSError, match="host 0"):
    journal_lib.write(out, 0, 2, {"hosts": 2})
  assert not out.exists()


def test_one_process_at_a_time_has_a_journal(tmp_path):
  path = tmp_path / "j"
  with (
    contextlib.closing(journal_lib.Journal(path, {"a": 1})),
    pytest.raises(ValueError, match="another process is working"),
  ):
    journal_lib.Journal(path, {"a": 1})
  journal_lib.Journal(path, {"a": 1}).close()


def test_a_kill_while_journals_are_deleted_costs_nothing(loopback, tmp_path, monkeypatch):
  """The next run asks for nothing, writes the same, and deletes them."""
  path, out = tmp_path / "problems.jsonl", tmp_path / "out.jsonl"
  write_problems(path)
  problems, (state, engine) = samples.read(path), loopback

  def sample():
    journal_lib.check_output(out)
    with contextlib.closing(journal_lib.Journal(journal_lib.path(out, 0), {"a": 1})) as journal:
      samples.generate(problems, engine, prompts_lib.maker("plain", None), SETTINGS, journal)
      journal_lib.write(out, 5, 1, {"a": 1})

  def unlink(path, **options):
    if path.name.endswith("journal"):
      raise KeyboardInterrupt
    os.unlink(path) if path.exists() else None

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(pathlib.Path, "unlink", unlink)
    sample()
  whole, asked = out.read_bytes(), len(state["bodies"])
  sample()
  assert (out.read_bytes(), len(state["bodies"])) == (whole, asked)
  assert sorted(each.name for each in tmp_path.iterdir()) == ["out.jsonl", "problems.jsonl"]
  with pytest.raises(FileExistsError, match="delete it to make it again"):
    sample()


def test_a_problem_as_deep_as_a_line_may_be_goes_through_the_journal(tmp_path):
  path, journal = tmp_path / "p.jsonl", tmp_path / "j"
  deep = "[" * 99 + "]" * 99
  path.write_text(f'{{"problem": "p", "deep": {deep}}}\n')
  (problem,) = samples.read(path)
  sample = samples.record(problem, Completion(0, 0, "a", "stop"), SETTINGS)
  with contextlib.closing(journal_lib.Journal(journal, {})) as opened:
    opened.add(0, [sample])
  with contextlib.closing(journal_lib.Journal(journal, {})) as opened:
    assert opened.done == {0: [sample]}


def refused(*flags) -> str:
  """What generate.py says as it ends with exit code 1 or 2."""
  done = call_script("generate.py", *flags)
  assert done.returncode in (1, 2)
  return done.stderr


def test_the_output_is_looked_at_before_the_model(tmp_path):
  """Its folder is made; a finished output, and a place that is none, are errors."""
  path, out = tmp_path / "problems.jsonl", tmp_path / "new" / "folder" / "out.jsonl"
  write_problems(path)
  journal_lib.check_output(out)
  out.write_text("")
  flags = (f"--input={path}", "--model=nowhere")
  done = run_script("generate.py", f"--output={out}", *flags)
  assert done.returncode == 1 and "out.jsonl is there and finished; delete it" in done.stderr
  said = refused(f"--output={out / 'x'}", *flags)
  assert "out.jsonl" in said and "nowhere" not in said


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


def asking(path, out, url) -> list[str]:
  """Flags of generate.py with a server."""
  args = [f"--input={path}", f"--output={out}", f"--url={url}", "--served_model=m", "--n=3"]
  return [*args, "--prompt=plain"]


def generate(*flags):
  """Runs generate.py, without an error."""
  done = run_script("generate.py", *flags)
  assert done.returncode == 0, done.stderr
  return done


@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=pytest.mark.slow)])
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
  generate(*asking(path, whole, engine.url))
  state["make"] = slowly
  rng, done, survived = random.Random(0), 0, 0
  while done < kills:
    before = len(state["bodies"])
    script = [sys.executable, str(ROOT / "scripts" / "generate.py"), "--concurrency=2"]
    process = subprocess.Popen([*script, *asking(path, out, engine.url)], env=ENVIRONMENT)
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
  generate(*asking(path, out, engine.url))
  assert len(state["bodies"]) - before == 3 * (4 * kills + 8 - known)
  assert out.read_bytes() == whole.read_bytes() and not journal.exists()


def assert_same_samples(one, other):
  """Asserts equal lines, but for rounding, which depends on what is in a batch together."""
  one, other = ([json.loads(x) for x in path.read_text().splitlines()] for path in (one, other))
  numbers: list[list[float]] = []
  for lines in (one, other):
    numbers.append([])
    for line in lines:
      numbers[-1] += [line.pop(key) for key in [*line] if isinstance(line[key], float)]
      steps = line.get("rating_probs", [])
      numbers[-1] += [probability for step in steps for probability in step.values()]
      line["rating_probs"] = [[*step] for step in steps]
  np.testing.assert_allclose(*numbers, rtol=1e-5, atol=1e-7)
  assert one == other


SEARCH = ("--search=beam", "--expansions=3")


@pytest.fixture(scope="module")
def sampled(text_run, prm_run, tmp_path_factory):
  """Runs generate.py with the own sampler, once for all tests that ask for the same."""

  @functools.cache
  def run(problems: int, search: tuple[str, ...] = ()):
    """(flags but for the output, the output, what was printed)."""
    folder = tmp_path_factory.mktemp("sampled")
    path, out = folder / "problems.jsonl", folder / "samples.jsonl"
    lines = [{"problem": f"{i}+1", "ground_truth_answer": str(i + 1)} for i in range(problems)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [f"--checkpoint={text_run}", f"--input={path}", "--prompt=plain", "--n=3", "--batch=4"]
    flags += ["--max_new_tokens=64", *search, *([f"--prm={prm_run}"] if search else [])]
    return flags, out, generate(*flags, f"--output={out}").stdout

  return run


@pytest.mark.parametrize(
  "kills, search",
  [
    (1, ()),
    pytest.param(30, (), marks=pytest.mark.slow),
    pytest.param(30, SEARCH, marks=pytest.mark.slow),
  ],
)
def test_campaign_of_kills_of_the_own_sampler(kills, search, sampled, tmp_path):
  """Killed at any moment, while it loads, samples or writes, and run again: the same file."""
  flags, whole, _ = sampled(14 * kills + 8, search)
  out = tmp_path / "out.jsonl"
  journal = journal_lib.path(out, 0)
  start = lambda: jobs.start("generate.py", *flags, f"--output={out}")
  done = jobs.kill_again(kills, start, journal, out)
  assert done[0] and len({*done}) > kills // 2  # most of them came while it sampled
  if journal.exists() or not out.exists():
    generate(*flags, f"--output={out}")
  assert_same_samples(out, whole)
  assert not journal.exists()


@pytest.mark.parametrize("search", [(), pytest.param(SEARCH, marks=pytest.mark.slow)])
def test_two_hosts_share_the_problems(search, sampled, tmp_path):
  """Their output is that of one host; their journals are not taken for those of one."""
  flags, one, _ = sampled(22, search)
  two = tmp_path / "two.jsonl"
  jobs.finish(jobs.start("generate.py", *flags, f"--output={two}", hosts=2, devices=2))
  assert_same_samples(one, two)
  assert [each.name for each in tmp_path.iterdir()] == ["two.jsonl"]


def test_generate_py_samples_from_a_run_on_text(tmp_path, text_run, sampled):
  """From problems to samples that grade.py reads, with the model's own log-probabilities."""
  _, out, said = sampled(22)
  assert "66 samples" in said and "were cut off" in said
  assert language_models.load_checkpoint(str(text_run)).facts()["step"] == 2
  found = [json.loads(line) for line in out.read_text().splitlines()]
  assert [line["problem"] for line in found] == [f"{i}+1" for i in range(22) for _ in range(3)]
  assert all(line["logprob"] < 0 and 1 <= line["tokens"] <= 64 for line in found)
  graded = tmp_path / "graded.jsonl"
  cache = f"--verdicts={tmp_path / 'verdicts'}"
  done = run_script("grade.py", f"--input={out}", f"--output={graded}", cache)
  assert done.returncode == 0, done.stderr


def test_a_search_gives_scored_samples(tmp_path, text_run, prm_run):
  """Its scores are those of score.py, rerank.py reads it, and the screen says what it spent."""
  path, out, scored = (tmp_path / f"{name}.jsonl" for name in ("problems", "out", "scored"))
  lines = [{"problem": f"{i}+1", "ground_truth_answer": str(i + 1)} for i in range(2)]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  flags = [f"--checkpoint={text_run}", f"--input={path}", f"--output={out}", "--prompt=plain"]
  flags += ["--n=4", "--max_new_tokens=96", "--search=particles", f"--prm={prm_run}"]
  done = generate(*flags)
  assert "the reward model read" in done.stdout and "with each prefix read again" in done.stdout
  done = run_script("score.py", f"--checkpoint={prm_run}", f"--input={out}", f"--output={scored}")
  assert done.returncode == 0, done.stderr
  both = zip(*(each.read_text().splitlines() for each in (out, scored)))
  for found, again in (map(json.loads, pair) for pair in both):
    assert found["steps"] == again["steps"] and len(found["rating_probs"]) == len(found["steps"])
    assert abs(found["prm_score"] - again["prm_score"]) < 1e-5
    assert found["spent"]["scored"] <= found["spent"]["scored_from_start"]


def test_a_generator_is_trained_on_what_is_right(loopback, arithmetic_data, tmp_path):
  """generate.py, grade.py, one epoch of configs/generator.py: only right samples are learnt."""
  state, engine = loopback
  path, out, graded, kept = (
    tmp_path / f"{name}.jsonl" for name in ("problems", "samples", "graded", "right")
  )
  write_problems(path, 4)  # all of answer 7
  answers = {"p0\n": "7", "p1\n": "8", "p2\n": "\\frac{14}{2}", "p3\n": "7"}
  state["make"] = lambda body: {
    "choices": [
      {
        "text": f"It is so.\n\n# Answer\n\n{answers[body['prompt']]}",
        "finish_reason": "length" if body["prompt"] == "p3\n" else "stop",
      }
    ]
  }
  generate(*asking(path, out, engine.url))
  flags = (f"--input={out}", f"--output={graded}", f"--right={kept}")
  done = run_script("grade.py", *flags, f"--verdicts={tmp_path / 'verdicts'}")
  assert done.returncode == 0, done.stderr
  lines = [json.loads(line) for line in kept.read_text().splitlines()]
  completion = lambda answer: f"It is so.\n# Answer\n\n{answer}"
  assert lines == [
    {"prompt": prompt, "completion": completion(answers[prompt])}
    for prompt in ("p0\n", "p2\n")
    for _ in range(3)
  ]
  sizes = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "head_size": 8, "mlp_width": 24}
  data = {"text_train": kept, "text_eval": kept, "tokenizer": arithmetic_data / "tokenizer.model"}
  flags = [f"--config.model.{key}={value}" for key, value in sizes.items()]
  flags += [f"--config.data.{key}={value}" for key, value in data.items()]
  flags += ["--config.init.checkpoint=", "--config.data.row_length=256", "--config.train.steps=1"]
  flags += ["--config=configs/generator.py", f"--workdir={tmp_path / 'run'}"]
  done = run_script("train.py", *flags)
  assert done.returncode == 0, done.stderr
  assert "6 texts" in done.stderr and "1 steps = 1.0 epochs" in done.stderr


@pytest.mark.parametrize(
  "flags, message",
  [
    ((), "give one of --model=DIR and --checkpoint=DIR"),
    (("--url=http://127.0.0.1:9", "--served_model=m"), "no chat template"),
    (("--stop=",), "Expected `str` of length >= 1"),
    (("--checkpoint=run", "--search=beam"), "--search=RULE and --prm=DIR go together"),
    (("--checkpoint=run", "--search=beam", "--prm=run", "--n=6"), "n a multiple of expansions"),
    (("--checkpoint=run", "--search=beam", "--prm=run", "--batch=8"), "--batch=8 is below --n=16"),
    (("--checkpoint=run", "--max_steps=3"), "--max_steps is of a search"),
  ],
)
def test_wrong_flags_are_errors(flags, message, tmp_path):
  path = tmp_path / "problems.jsonl"
  write_problems(path)
  paths = (f"--input={path}", f"--output={tmp_path / 'o'}")
  assert message in refused(*paths, *flags)
  assert [each.name for each in tmp_path.iterdir()] == ["problems.jsonl"]
