"""generate.py with its own sampler, with searches, and with a loopback server as its engine."""

import contextlib
import functools
import json
import os
import pathlib
import sys
import threading
import time
import types

import fake_server
import jobs
import numpy as np
import pytest
import tokenizers as hf
import urllib3
from conftest import call_script, read_lines, run_script, write_lines

from prm_jax.generation import options, samples
from prm_jax.generation import prompts as prompts_lib
from prm_jax.generation.engines import Completion, Limits, Prompt, PromptError
from prm_jax.generation.sampler import Sampler
from prm_jax.generation.sampling import Sampling
from prm_jax.generation.server import Retry, Server
from prm_jax.input_pipeline import tokenizers
from prm_jax.runtime import command_line
from prm_jax.runtime import journal as journal_lib
from prm_jax.runtime.json_lines import BadLine
from prm_jax.scoring import candidates

PROMPTS = [Prompt("", f"p{i}", "\n", i) for i in range(6)]


def complete(body, _=0):
  """Returns the answer to a request: a text that depends on prompt and seed."""
  text = f"{body['prompt'].strip()} is {body['seed'] % 97}"
  log_probs = {"tokens": [text], "token_logprobs": [-0.5]}
  choice = {"text": text, "finish_reason": "stop", "logprobs": log_probs}
  return {"choices": [choice], "usage": {"completion_tokens": 3}}


@pytest.fixture
def loopback():
  """Returns a server of completions and its engine."""
  with fake_server.running(fake_server.Server(complete)) as server:
    yield server, Server(server.url, "m", concurrency=4)


SAMPLING, LIMITS = Sampling(0.7, top_k=5), Limits(9, ("!",))


def run(engine, n=3):
  """Returns `n` completions of each prompt, by the numbers of prompt and sample."""
  samples = {(x.prompt, x.sample): x for x in engine.generate(PROMPTS, n, SAMPLING, LIMITS)}
  assert sorted(samples) == [(i, k) for i in range(len(PROMPTS)) for k in range(n)]
  return samples


def texts(engine):
  """Returns the texts of the completions, by the numbers of prompt and sample."""
  return {key: x.text for key, x in run(engine).items()}


def test_a_request_has_every_setting_and_a_seed_of_its_own(loopback):
  """Each sample is a request with all settings and its own seed; a second run gives the same."""
  server, engine = loopback
  samples = run(engine)
  assert {x.token_count for x in samples.values()} == {3} and not engine.said
  assert {x.log_probs for x in samples.values()} == {(-0.5,)}
  assert len({body["seed"] for body in server.bodies}) == 18
  expected = {"model": "m", "max_tokens": 9, "temperature": 0.7, "top_k": 5, "stop": ["!"]}
  assert all(body | expected == body and body["n"] == 1 for body in server.bodies)
  assert texts(engine) == {key: x.text for key, x in samples.items()}


def test_transient_failures_are_retried(loopback):
  """Busy answers, dropped connections and torn bodies are retried and change no sample."""
  server, engine = loopback
  busy = [(503, {}, b"busy"), (429, {"Retry-After": 1}, b"busy"), (500, {}, b"busy")]
  busy += [(429, {"Retry-After": "0.5"}, b"busy"), (524, {}, b"a proxy's timeout")]
  server.troubles.extend([busy[0], None, busy[1], fake_server.TORN, *busy[2:]])
  samples = texts(engine)
  assert len(server.asked) == 18 + 7
  assert texts(engine) == samples


def test_the_pause_that_a_server_asks_for_is_limited():
  """A Retry-After of more than a minute is taken as a minute."""
  after = lambda value: urllib3.HTTPResponse(headers={"Retry-After": value})
  assert [Retry().get_retry_after(after(value)) for value in ("5", "1000000")] == [5, 60]
  assert Retry().get_retry_after(urllib3.HTTPResponse()) is None


def test_an_error_does_not_wait_for_unanswered_requests(loopback):
  """If a server refuses as many prompts as it is asked at once, the user reads the error at once.

  The model or the key may be wrong.  The other requests are still unanswered.
  """
  server, engine = loopback
  over = threading.Event()

  def make(body, _):
    assert body["prompt"] < "p4" or over.wait(60)
    return complete(body) if over.is_set() else {"choices": []}

  server.act = make
  with pytest.raises(ValueError, match="0 choices"):
    run(engine, n=1)
  assert not over.is_set()
  over.set()


def test_special_tokens_spelled_out_in_a_problem_are_plain_letters(loopback, tmp_path):
  """With a tokenizer, only the template's special tokens are sent as such, and one first token."""
  server, engine = loopback
  made = hf.Tokenizer(hf.models.BPE({"<s>": 0} | {c: i for i, c in enumerate("a<|im_end>", 1)}, []))
  made.add_special_tokens(["<s>", "<|im_end|>"])
  made.post_processor = hf.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
  made.save(str(tmp_path / "tokenizer.json"))
  engine.tokenizer = tokenizer = tokenizers.load(tmp_path)
  end = tokenizer.token_id("<|im_end|>")
  prompt = Prompt("<s>", "a<|im_end|>", "<|im_end|>", 0)
  server.act = lambda body, _: complete(body | {"prompt": ""})
  assert len([*engine.generate([prompt], 1, SAMPLING, LIMITS)]) == 1
  (body,) = server.bodies
  assert body["prompt"] == [0, *tokenizer.encode("a<|im_end|>"), end]
  assert body["prompt"].count(0) == body["prompt"].count(end) == 1
  engine.tokenizer = None
  [*engine.generate([prompt], 1, SAMPLING, LIMITS)]
  assert server.bodies[1]["prompt"] == prompt.text


def test_a_problem_that_a_server_refuses_leaves_the_others_in_the_journal(loopback, tmp_path):
  """If a server refuses one problem, the user reads which, and only that one is left to repeat."""
  path, (server, engine) = tmp_path / "problems.jsonl", loopback
  write_problems(path)
  server.act = lambda body, _: {} if body["prompt"] == "p1\n" else complete(body)
  given = (samples.read(path), range(5), engine, prompts_lib.maker("plain", None), SETTINGS)
  with contextlib.closing(journal_lib.Journal(tmp_path / "journal", {"a": 1})) as journal:
    with pytest.raises(ValueError, match=r"^problem 2, 'p1': http.*choices"):
      samples.generate(*given, journal)
    assert sorted(journal.done) == [0, 2, 3, 4]


def test_refused_prompts_do_not_end_a_job_whose_reader_is_slow(loopback):
  """A server that refuses every third prompt completes all others, however slowly they are read."""
  server, engine = loopback
  server.act = lambda body, _: {} if int(body["prompt"]) % 3 == 1 else complete(body)
  prompts, found = [Prompt("", str(i), "\n", i) for i in range(24)], []
  with pytest.raises(PromptError) as error:
    for completion in engine.generate(prompts, 2, SAMPLING, LIMITS):
      found.append((completion.prompt, completion.sample))
      time.sleep(0.1 * (len(found) == 1))
  assert sorted(found) == [(i, k) for i in range(24) if i % 3 != 1 for k in range(2)]
  assert sorted(error.value.refused) == [*range(1, 24, 3)]


NO_COMPLETION = "v1/completions|choices"


@pytest.mark.parametrize(
  ("answer", "message"),
  [
    ({}, NO_COMPLETION),
    ({"choices": []}, NO_COMPLETION),
    ({"choices": [{"text": 3}]}, NO_COMPLETION),
    ([1], NO_COMPLETION),
    ((400, {}, b"busy"), "status 400: 'busy'"),
  ],
)
def test_an_answer_that_is_no_completion_is_an_error(answer, message, loopback):
  """The error about JSON of another form names the URL or the key; else it has the answer."""
  server, engine = loopback
  server.act = lambda *_: answer
  with pytest.raises(ValueError, match=message):
    run(engine)


def test_deviations_of_a_server_are_corrected_and_reported_once(loopback, capsys):
  """Missing stop strings and text after them are corrected; each deviation is reported once."""
  server, engine = loopback
  server.act = lambda body, _: {
    "choices": [{"text": "a", "finish_reason": "stop", "stop_reason": "!"}]
  }
  assert {x.text for x in run(engine).values()} == {"a!"}
  server.act = lambda body, _: {"choices": [{"text": "", "finish_reason": "abort"}]}
  assert {(x.text, x.end) for x in run(engine).values()} == {("", "length")}
  for text in ("a!b", "a!"):  # the log-probabilities are of the whole text
    choice = {"text": text, "finish_reason": "length", "logprobs": {"token_logprobs": [-1, -1]}}
    answer = {"choices": [choice], "usage": {"completion_tokens": None}}
    server.act = lambda *_, answer=answer: answer
    found = {(x.text, x.end, x.log_probs, x.token_count) for x in run(engine).values()}
    assert found == {("a!", "stop", None if text == "a!b" else (-1, -1), 2)}
  said = capsys.readouterr().err.splitlines()
  assert len(said) == len(engine.said) == 5


SETTINGS = samples.Settings(2, Sampling(), Limits(9), seed=0, form="plain", steps="lines")


def write_problems(path, count=5):
  """Writes problems p0, p1, ... whose answers are 7."""
  write_lines(path, [{"problem": f"p{i}", "level": i, "answer": "7"} for i in range(count)])


def test_samples_keep_the_problems_keys_and_order(loopback, tmp_path):
  """Each sample is a line with its problem's keys, in order; an unfinished one has no answer."""
  path, out = tmp_path / "problems.jsonl", tmp_path / "samples.jsonl"
  write_problems(path)
  server, engine = loopback
  text = "one\n\ntwo\n\\boxed{7}"
  ends = {"p0\n": "length"}
  server.act = lambda body, _: {
    "choices": [{"text": text, "finish_reason": ends.get(body["prompt"], "stop")}]
  }
  problems = samples.read(path)
  with contextlib.closing(journal_lib.Journal(journal_lib.path(out, 0), {"a": 1})) as journal:
    make = prompts_lib.maker("plain", None)
    samples.generate(problems, range(5), engine, make, SETTINGS, journal)
  lines = journal_lib.write(out, 5, 1, {"a": 1})
  assert lines == read_lines(out)
  assert [(x["problem"], x["level"], x["sample"]) for x in lines] == [
    (f"p{i}", i, k) for i in range(5) for k in range(2)
  ]
  assert all(x["steps"] == ["one", "two", "\\boxed{7}"] for x in lines)
  assert [x["answer"] for x in lines] == [None] * 2 + ["7"] * 8
  assert {x["ground_truth_answer"] for x in lines} == {"7"}
  assert [x["finished"] for x in lines] == [False] * 2 + [True] * 8
  assert not [*tmp_path.glob("*journal*")]


def test_a_journal_of_another_run_is_refused(tmp_path):
  """A journal of other settings is an error that names the setting and both values."""
  path = tmp_path / "j"
  journal_lib.Journal(path, {"seed": 0, "n": 2}).close()
  with pytest.raises(ValueError, match=r"another run \(seed: 0, now 1\)"):
    journal_lib.Journal(path, {"seed": 1, "n": 2})


def test_journals_of_another_number_of_hosts_are_refused(tmp_path):
  """The journal of any other number of hosts is an error, as is the missing journal of a host."""
  out = tmp_path / "out.jsonl"
  journal_lib.Journal(journal_lib.path(out, 1), {"hosts": 2}).close()
  with pytest.raises(ValueError, match=r"hosts: 2, now 1"):
    journal_lib.run(out, 0, {}, work=None)
  with pytest.raises(OSError, match=r"out\.jsonl\.journal: the journal of host 0 is not on this"):
    journal_lib.check_shared(out, 2)
  with pytest.raises(OSError, match="host 0"):
    journal_lib.write(out, 0, 2, {"hosts": 2})
  assert not out.exists()


def test_one_process_at_a_time_has_a_journal(tmp_path):
  """An open journal cannot be opened again until it is closed."""
  path = tmp_path / "j"
  with (
    contextlib.closing(journal_lib.Journal(path, {"a": 1})),
    pytest.raises(ValueError, match="another process is working"),
  ):
    journal_lib.Journal(path, {"a": 1})
  journal_lib.Journal(path, {"a": 1}).close()


def test_a_kill_while_journals_are_deleted_loses_no_sample(tmp_path, monkeypatch):
  """If a kill left all or some of the journals, nothing of the complete output is made again."""
  out, facts, made = tmp_path / "out.jsonl", {"a": 1}, []

  def work(journal, left):
    for i in left:
      made.append(i)
      journal.add(i, [{"i": i}])

  def unlink(path, **options):
    if path.name.endswith("journal"):
      raise KeyboardInterrupt
    os.unlink(path) if path.exists() else None

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(pathlib.Path, "unlink", unlink)
    journal_lib.run(out, 3, facts, work)
  whole = read_lines(out)
  for host in (1, 0):
    assert journal_lib.run(out, 3, facts, work) == whole == [{"i": 0}, {"i": 1}, {"i": 2}]
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]
    journal_lib.Journal(journal_lib.path(out, host), facts | {"hosts": 1}).close()
  assert made == [0, 1, 2]
  journal_lib.run(out, 3, facts, work)  # the last journal, of host 0, is not of this output
  assert made == [0, 1, 2] * 2


def test_a_deeply_nested_problem_survives_the_journal(tmp_path):
  """A problem nested as deeply as a line may be is read back from the journal unchanged."""
  path, journal = tmp_path / "p.jsonl", tmp_path / "j"
  deep = "[" * 99 + "]" * 99
  path.write_text(f'{{"problem": "p", "deep": {deep}}}\n')
  (problem,) = samples.read(path)
  sample = samples.record(problem, Completion(0, 0, "a", "stop"), SETTINGS)
  with contextlib.closing(journal_lib.Journal(journal, {})) as opened:
    opened.add(0, [sample])
  with contextlib.closing(journal_lib.Journal(journal, {})) as opened:
    assert opened.done == {0: [sample]}


def error_of(*flags) -> str:
  """Runs generate.py, which must end with exit code 1 or 2; returns its error output."""
  return call_script("generate.py", *flags, code=(1, 2)).stderr


def test_the_output_is_checked_before_the_model_is_loaded(tmp_path):
  """A finished output and an impossible path are errors before the model is loaded.

  A user's file whose name begins as a journal's is none.
  """
  path, out = tmp_path / "problems.jsonl", tmp_path / "new" / "folder" / "out.jsonl"
  write_problems(path)
  journal_lib.check_output(out)
  out.write_text("")
  out.with_name("out.jsonl.journal.bak").touch()
  flags = (f"--input={path}", "--model=nowhere")
  assert "out.jsonl exists and is finished; delete it" in error_of(f"--output={out}", *flags)
  error = error_of(f"--output={out / 'x'}", *flags)
  assert "out.jsonl" in error and "nowhere" not in error


def test_a_sample_has_no_verdict_or_score_of_another_solution():
  """Problems may come from a file of graded and scored solutions; samples are other solutions."""
  other = {"final_answer_correct": True, "label": -1, "prm_score": 0.5, "spent": {"read": 9}}
  done = Completion(0, 0, "2\n", "stop", None, None, 1)
  sample = samples.record({"problem": "1+1", "id": "a", "steps": ["3"]} | other, done, SETTINGS)
  assert not other.keys() & sample.keys()
  assert (sample["id"], sample["steps"]) == ("a", ["2"])


def test_steps_are_lines_or_paragraphs():
  """A text is split into steps at line breaks or at blank lines."""
  text = "a\nb\n\nc \n"
  assert prompts_lib.split(text, "lines") == ["a", "b", "c"]
  assert prompts_lib.split(text, "paragraphs") == ["a\nb", "c"]
  answer = "x \n# Answer\n\n5 "
  assert prompts_lib.split(answer, "lines") == ["x", "# Answer\n\n5"]
  assert candidates.split(answer, "\n") == (["x ", "# Answer\n\n5"], [1, 14])  # as rewards do
  headings = "# Answer\n" * 5000  # by a model that repeats itself
  assert prompts_lib.ends_step(headings, "lines") and len(prompts_lib.split(headings, "lines")) > 1


def test_stop_texts_of_flags_may_have_line_breaks(monkeypatch):
  r"""--stop '\n\n' ends a sample at a blank line, as --separator writes one."""
  monkeypatch.setattr(sys, "argv", ["generate.py", "--model=m", "--stop", r"\n\n", "Q:"])
  args = command_line.parse(options.Generator, "")
  assert args.stop == ("\n\n", "Q:") and args.limits.stop_end("a\n\nb") == 3


def test_worked_examples_come_before_the_problem():
  """A few-shot prompt has its examples before the problem and ends the solution at the next."""
  example = prompts_lib.Example("1+1", ["One and one.", "# Answer\n\n2"])
  prompt = prompts_lib.maker("few_shot", None, examples=[example])("2+2", 7)
  assert prompt.text == (
    "Problem:\n1+1\n\nSolution:\nOne and one.\n# Answer\n\n2\n\nProblem:\n2+2\n\nSolution:\n"
  )
  assert prompts_lib.solution("a\nb\n\nProblem:\nmore", "few_shot") == "a\nb"
  # With --steps=paragraphs, blank lines separate their steps too.
  prompt = prompts_lib.maker("few_shot", None, examples=[example], steps="paragraphs")("2+2", 7)
  assert "One and one.\n\n# Answer" in prompt.text


def chat(template, *system):
  """Returns the maker of prompts of a tokenizer with this chat template."""
  tokenizer = types.SimpleNamespace(settings={"chat_template": template})
  return prompts_lib.maker("chat", tokenizer, *system)


@pytest.mark.parametrize(
  ("template", "problem", "expected"),
  [
    (  # loops break; `tools` and `documents` are None
      "{% if tools is not none or documents is not none %}tools{% endif %}"
      "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'user' %}{% break %}"
      "{% endif %};{% endfor %}",
      "2+2",
      "system: s;user: 2+2",
    ),
    (  # replies are marked for training, as in SmolLM3's
      "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
      "{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
      "{% generation %}assistant:{% endgeneration %}",
      "2+2",
      "s;2+2;assistant:",
    ),
    ("<s>{{ messages[-1]['content'] | trim }} [/INST]", "\n a  b \n", "<s>a  b [/INST]"),
    ("<s>{{ messages[-1]['content'] }} [/INST]", "\n a  b \n", "<s>\n a  b \n [/INST]"),
    ("{{ strftime_now('%d %b %Y') }}: {{ messages[-1].content }}", "2+2", "26 Jul 2024: 2+2"),
    (
      "{{ strftime_now('%Y') if strftime_now is defined else 'own' }}: {{ messages[-1].content }}",
      "2+2",
      "own: 2+2",
    ),
  ],
)
def test_chat_templates_render_as_in_transformers(template, problem, expected):
  """A prompt is that of transformers, outer spaces included, and does not depend on the day."""
  assert chat(template, "s")(problem, 7).text == expected


def test_a_template_that_refuses_the_system_prompt_says_how_to_leave_it_out():
  """Gemma's template takes no system prompt: the error names the flag that leaves it out."""
  refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
  template = refuse + "{{ messages[0].content }}"
  with pytest.raises(ValueError, match=r"no system.*; --system= leaves the system prompt out"):
    chat(template)
  assert chat(template, "")("2+2", 7).text == "2+2"


def test_a_line_without_a_problem_is_an_error_with_its_place(tmp_path):
  path = tmp_path / "p.jsonl"
  path.write_text('{"problem": "a"}\n{"text": "b"}\n')
  with pytest.raises(BadLine, match=r"p.jsonl:2: no \"problem\""):
    samples.read(path)
  write_lines(path, [{"problem": "p", "answer": 204}])  # grade.py would refuse each sample
  with pytest.raises(BadLine, match=r':1: "answer" is 204: expected str'):
    samples.read(path)


def asking(path, out, url) -> list[str]:
  """Returns the flags of generate.py for three samples of each problem from a server."""
  args = [f"--input={path}", f"--output={out}", f"--url={url}", "--served_model=m", "--n=3"]
  return [*args, "--prompt=plain"]


@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_kills_lose_no_sample_of_a_server(kills, loopback, tmp_path):
  """A run killed at any moment and started again gives the file of an uninterrupted run.

  It does not request samples that are in the journal: those of p0 or p1, which ends first.
  """
  path, out, whole = (tmp_path / f"{name}.jsonl" for name in ("problems", "out", "whole"))
  write_problems(path, 14 * kills + 8)
  server, engine = loopback
  call_script("generate.py", *asking(path, whole, engine.url))
  server.act = lambda body, _: (time.sleep(0.05), complete(body))[1]  # time to be killed in
  flags = [*asking(path, out, engine.url), "--concurrency=2"]
  jobs.kill_again(kills, "generate.py", flags, out)
  assert out.read_bytes() == whole.read_bytes()
  prompts = [body["prompt"].strip() for _, body in server.asked]
  assert min(prompts.count(problem) for problem in ("p0", "p1")) == 2 * 3  # with the whole run's


def assert_same_samples(one, other):
  """Asserts that two files have equal lines, apart from rounding, which depends on the batch."""
  one, other = (read_lines(path) for path in (one, other))
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
  """Returns a function that runs generate.py with its own sampler, once for equal arguments.

  A process of its own compiles the programs that the killed processes then find in the cache.
  """

  @functools.cache
  def run(problems: int, search: tuple[str, ...] = ()):
    """Returns the flags without the output, the output's path, and the standard output."""
    folder = tmp_path_factory.mktemp("sampled")
    path, out = folder / "problems.jsonl", folder / "samples.jsonl"
    lines = [{"problem": f"{i}+1", "ground_truth_answer": str(i + 1)} for i in range(problems)]
    write_lines(path, lines)
    flags = [f"--checkpoint={text_run}", f"--input={path}", "--prompt=plain", "--n=3", "--batch=4"]
    flags += ["--max_new_tokens=32", *search, *([f"--prm={prm_run}"] if search else [])]
    done = run_script("generate.py", *flags, f"--output={out}")
    return flags, out, done.stdout

  return run


@pytest.mark.parametrize(
  "kills, search",
  [
    (1, ()),
    pytest.param(30, (), marks=pytest.mark.slow),
    pytest.param(30, SEARCH, marks=pytest.mark.slow),
  ],
)
def test_kills_lose_no_sample_of_the_own_sampler(kills, search, sampled, tmp_path):
  """A run killed while it loads, samples or writes, and started again, gives the same file."""
  flags, whole, _ = sampled(14 * kills + 8, search)
  out = tmp_path / "out.jsonl"
  jobs.kill_again(kills, "generate.py", flags, out)
  assert_same_samples(out, whole)


@pytest.mark.parametrize("search", [(), pytest.param(SEARCH, marks=pytest.mark.slow)])
def test_two_hosts_share_the_problems(search, sampled, tmp_path):
  """Two hosts write the output of one host and leave no journal."""
  flags, one, _ = sampled(22, search)
  two = tmp_path / "two.jsonl"
  jobs.finish(jobs.start("generate.py", *flags, f"--output={two}", hosts=2, devices=2))
  assert_same_samples(one, two)
  assert [each.name for each in tmp_path.iterdir()] == ["two.jsonl"]


def test_generate_py_samples_from_a_run_on_text(tmp_path, text_run, sampled):
  """generate.py samples from a run on text, with log-probabilities, and grade.py reads the file."""
  _, out, printed = sampled(22)
  assert "66 samples" in printed
  assert Sampler.load(text_run).facts()["step"] == 2
  with pytest.raises(ValueError, match="no checkpoint is 7"):
    options.Generator(checkpoint=str(text_run), step="7").load()
  lines = read_lines(out)
  assert [line["problem"] for line in lines] == [f"{i}+1" for i in range(22) for _ in range(3)]
  assert all(line["logprob"] < 0 and 1 <= line["tokens"] <= 32 for line in lines)
  graded = tmp_path / "graded.jsonl"
  cache = f"--verdicts={tmp_path / 'verdicts'}"
  call_script("grade.py", f"--input={out}", f"--output={graded}", cache)


@pytest.mark.usefixtures("one_device")
def test_a_search_writes_scored_samples(tmp_path, text_run, prm_run):
  """generate.py with a search writes the steps and scores of score.py, and counts its tokens."""
  path, out, scored = (tmp_path / f"{name}.jsonl" for name in ("problems", "out", "scored"))
  lines = [{"problem": f"{i}+1", "ground_truth_answer": str(i + 1)} for i in range(2)]
  write_lines(path, lines)
  flags = [f"--checkpoint={text_run}", f"--input={path}", f"--output={out}", "--prompt=plain"]
  flags += ["--n=4", "--max_new_tokens=32", "--max_step_tokens=32", "--search=particles"]
  flags += [f"--prm={prm_run}"]
  done = call_script("generate.py", *flags)
  assert "the reward model read" in done.stdout and "if each prefix were read again" in done.stdout
  done = call_script("score.py", f"--checkpoint={prm_run}", f"--input={out}", f"--output={scored}")
  both = zip(*(each.read_text().splitlines() for each in (out, scored)))
  for found, again in (map(json.loads, pair) for pair in both):
    assert found["steps"] == again["steps"] and len(found["rating_probs"]) == len(found["steps"])
    assert abs(found["prm_score"] - again["prm_score"]) < 1e-5
    assert found["spent"]["scored"] <= found["spent"]["scored_from_start"]


def test_a_generator_is_trained_on_right_samples(loopback, arithmetic_data, tmp_path):
  """generate.py, grade.py and configs/generator.py train on the finished, right samples only."""
  server, engine = loopback
  path, out, graded, kept = (
    tmp_path / f"{name}.jsonl" for name in ("problems", "samples", "graded", "right")
  )
  write_problems(path, 4)  # all of answer 7
  answers = {"p0\n": "7", "p1\n": "8", "p2\n": "\\frac{14}{2}", "p3\n": "7"}
  server.act = lambda body, _: {
    "choices": [
      {
        "text": f"It is so.\n\n# Answer\n\n{answers[body['prompt']]}",
        "finish_reason": "length" if body["prompt"] == "p3\n" else "stop",
      }
    ]
  }
  call_script("generate.py", *asking(path, out, engine.url))
  flags = (f"--input={out}", f"--output={graded}", f"--right={kept}")
  done = call_script("grade.py", *flags, f"--verdicts={tmp_path / 'verdicts'}")
  lines = read_lines(kept)
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
  assert "6 texts" in done.stderr and "1 steps = 1.0 epochs" in done.stderr


@pytest.mark.parametrize(
  "flags, message",
  [
    ((), "give one of --model=DIR and --checkpoint=DIR"),
    (("--url=http://127.0.0.1:9", "--served_model=m"), "no chat template"),
    (("--stop=",), "Expected `str` of length >= 1"),
    (("--checkpoint=run", "--examples=x.jsonl"), "--prompt=few_shot and --examples=FILE go"),
    (("--checkpoint=run", "--prompt=few_shot"), "--prompt=few_shot and --examples=FILE go"),
    (("--checkpoint=run", "--prompt=plain", "--system=x"), "--system is for --prompt=chat"),
    (("--checkpoint=run", "--search=beam"), "--search=RULE and --prm=DIR go together"),
    (("--checkpoint=run", "--search=beam", "--prm=run", "--n=6"), "n a multiple of expansions"),
    (("--checkpoint=run", "--search=beam", "--prm=run", "--batch=8"), "--batch=8 is below --n=16"),
    (("--checkpoint=run", "--max_steps=3"), "--max_steps is for a search"),
    (("--checkpoint=run", "--temperature=0"), "--n=16 samples at --temperature=0 are all equal"),
    (("--checkpoint=run", "--temperature=1e-40"), "samples at --temperature=0 are all equal"),
    (("--checkpoint=run", "--top_k=1"), "--n=16 samples at --top_k=1 are all equal"),
    (
      ("--checkpoint=run", "--search=beam", "--prm=run", "--lookahead=5"),
      "--lookahead has no effect with --search=beam",
    ),
    (
      ("--checkpoint=run", "--search=best_of_n", "--prm=run", "--expansions=2"),
      "--expansions has no effect with --search=best_of_n",
    ),
    (
      ("--checkpoint=run", "--search=beam", "--prm=run", "--readout=trl"),
      "--readout goes with a p",
    ),
    (("--checkpoint=run", "--dtype=bfloat16"), "--dtype has no effect with --checkpoint"),
    (("--model=m", "--concurrency=2"), "--concurrency has no effect with --model"),
    (("--model=m", "--step=best"), "--step has no effect with --model"),
    (("--url=http://x", "--served_model=m", "--batch=8"), "--batch has no effect with --url"),
    (("--url=http://x", "--served_model=m", "--tensor=2"), "--tensor has no effect with --url"),
  ],
)
def test_wrong_flags_are_errors(flags, message, tmp_path):
  """Flags that are missing, wrong or in conflict are an error, and nothing is written."""
  path = tmp_path / "problems.jsonl"
  write_problems(path)
  paths = (f"--input={path}", f"--output={tmp_path / 'o'}")
  assert message in error_of(*paths, *flags)
  assert [each.name for each in tmp_path.iterdir()] == ["problems.jsonl"]


def test_a_published_reward_model_of_a_search_has_dtype_and_readout(tmp_path):
  """With a run of train.py as language model, --dtype and --readout are of a published --prm."""
  path, prm = tmp_path / "problems.jsonl", tmp_path / "prm"
  write_problems(path)
  prm.mkdir()
  (prm / "config.json").write_text("{}")
  flags = (f"--input={path}", f"--output={tmp_path / 'o'}", "--search=beam", f"--prm={prm}")
  error = error_of(*flags, "--checkpoint=missing", "--dtype=bfloat16", "--readout=trl")
  assert "missing" in error and "effect" not in error and "--readout" not in error


def test_a_wrong_key_of_a_server_is_not_shown(tmp_path, monkeypatch):
  """A key that no header can hold is an error that does not print it."""
  path = tmp_path / "problems.jsonl"
  write_problems(path)
  monkeypatch.setenv("OPENAI_API_KEY", "secr\u00e9t")
  flags = ("--url=http://127.0.0.1:9", "--served_model=m", "--prompt=plain")
  message = error_of(f"--input={path}", f"--output={tmp_path / 'o'}", *flags)
  assert "OPENAI_API_KEY holds" in message and "secr" not in message


def test_an_empty_ground_truth_gives_way_to_the_answer():
  """The problem's answer is the ground truth of its samples if `ground_truth_answer` is null."""
  completion = Completion(0, 0, "1\n2", "stop")
  problem = {"problem": "p", "answer": "5", "ground_truth_answer": None}
  made = samples.record(problem, completion, SETTINGS)
  assert (made["ground_truth_answer"], made["answer"]) == ("5", "2")
