"""Generative judges: parsers of verdicts, votes, and requests to a chat server."""

import collections
import dataclasses
import itertools
import json
import math
import re
import threading
import time

import fake_server
import jobs
import numpy as np
import pytest
import test_sampler
from conftest import call_script, read_lines, write_lines
from hypothesis import given
from hypothesis import strategies as st
from scored_files import ranked

from prm_jax.datasets import arithmetic, prepare
from prm_jax.evaluation import process_bench, step_benchmarks, step_comparison
from prm_jax.evaluation.scored_samples import read_scored_samples
from prm_jax.evaluation.verdicts import NONE_WRONG, labels, plurality
from prm_jax.generation import prompts
from prm_jax.generation.engines import Limits
from prm_jax.generation.sampling import Sampling
from prm_jax.generation.server import Server
from prm_jax.supervision import judge
from prm_jax.supervision.judge_templates import QUESTION, TEMPLATES

TWO = ("p", ("a", "b"))  # a solution of two steps
YES, NO = (f"<output>\n**Judgement**: $\\boxed{{{word}}}$\n</output>\n" for word in ("Yes", "No"))
RIGHT, WRONG = (f"Step: so. The step is \\boxed{{{word}}}\n" for word in ("correct", "incorrect"))
SAYS_YES, SAYS_NO = "</think>\nIs the solution correct? Yes", "Is the solution correct? **No**"


def answer(name: str, first: int, count: int) -> str:
  """An answer in a template's form: step `first` of `count` is the first wrong one, -1: none."""
  if name == "critic":
    return f"The formula is \\boxed{{x^{{2}}}}, so the index is \\boxed{{{first}}}."
  right, wrong = (RIGHT, WRONG) if name == "thinkprm" else (YES, NO)
  text = right * count if first < 0 else right * first + wrong
  return text + (SAYS_YES if first < 0 else SAYS_NO) * (name == "thinkprm")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("first", range(-1, 4))
def test_a_good_answer_has_its_verdict(name, first):
  """Each template's parser finds the first wrong step of an answer in the template's form."""
  assert TEMPLATES[name].verdict(answer(name, first, 4), 4) == first


@pytest.mark.parametrize(
  "name, text, expected",
  [
    ("critic", "", None),
    ("critic", "All is well.", None),
    ("critic", "\\boxed{0} or rather \\boxed{ 1 }", 1),  # the last one counts
    ("critic", "\\boxed{\\text{-1}}", -1),
    ("critic", "\\boxed{+1}", 1),
    ("critic", "\\boxed{2}", None),  # out of range
    ("critic", "\\boxed{-2}", None),
    ("critic", "\\boxed{999999999999999999999999}", None),
    ("critic", "\\boxed{1} \\boxed{one}", None),
    ("critic", "\\boxed{1} \\boxed{", None),
    ("critic", "\\boxed{1.0}", None),
    ("critic", "\\boxed{\u0661}", None),  # a digit, of another script
    ("thinkprm", RIGHT + WRONG, 1),  # nobody asks for the last line
    ("thinkprm", RIGHT * 2 + RIGHT + SAYS_YES, -1),  # more steps than there are
    ("thinkprm", RIGHT * 2 + WRONG + SAYS_NO, None),  # the first error is among them
    ("thinkprm", RIGHT + SAYS_YES, None),  # too few
    ("thinkprm", RIGHT * 2 + SAYS_NO, None),  # contradicts itself
    ("thinkprm", RIGHT + WRONG + SAYS_YES, None),
    ("thinkprm", RIGHT * 2 + SAYS_NO + " Wait. " + SAYS_YES, -1),
    ("thinkprm", WRONG + RIGHT, 0),
    ("thinkprm", SAYS_YES, None),
    ("thinkprm", SAYS_NO, None),
    ("thinkprm", "Step 1: The step is \\boxed{correct/incorrect} " + RIGHT * 2, -1),
    ("thinkprm", RIGHT + WRONG + "Is the solution correct? Yes/No", 1),  # repeats the prompt
    ("thinkprm", "\\boxed{\\text{correct}} \\boxed{ incorrect }", 1),
    ("genprm", YES + NO, 1),
    ("genprm", YES, None),
    ("genprm", YES * 2 + NO, None),
    ("genprm", YES * 3, -1),
    ("genprm", NO + YES, 0),
    ("genprm", "```python\nprint(1)\n```\n\\boxed{Yes|No} \\boxed{5}" + YES * 2, -1),
    ("genprm", "\\boxed{yes} \\boxed{no}", 1),
    ("genprm", "\\boxed{Yes, no}", None),
    ("genprm", "\\boxed{Yes} \\boxed{No}</think>\\boxed{Yes} then \\boxed{Yes}", -1),  # thoughts
  ],
)
def test_the_rules_of_each_parser(name, text, expected):
  """An answer in another form has a verdict only if it is clear; the solution has two steps."""
  assert TEMPLATES[name].verdict(text, 2) == expected


PIECES = ("\\boxed{", "}", "-1", "0", "1", " ", "\n", "\\text{", "correct", "incorrect", "Yes")
PIECES += ("No", QUESTION, "Step 1: ", RIGHT, WRONG, YES, NO, "*", "<think>", "\ud800", "\0")
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join)


@given(name=st.sampled_from([*TEMPLATES]), text=TEXTS, count=st.integers(1, 4))
def test_any_text_gives_a_step_of_the_solution_or_no_verdict(name, text, count):
  """A parser raises no error and returns an index of a step, -1 or None."""
  assert TEMPLATES[name].verdict(text, count) in (None, *range(-1, count))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
  "piece", ["\\boxed{", "\\boxed{ ", " ", "\\boxed{\\text{correct", "\\boxed{1", QUESTION]
)
def test_megabytes_of_half_a_verdict_are_parsed_in_linear_time(name, piece):
  """A parser reads two megabytes of unfinished verdicts, which would take hours if quadratic."""
  many = piece * (2 * 2**20 // len(piece))
  assert TEMPLATES[name].verdict("\\boxed{" + many, 2) is None
  assert TEMPLATES[name].verdict(many + "x" + answer(name, 0, 2), 2) == 0


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_have_the_tokens_of_the_format(name):
  """A prompt has upstream's headings, tags and numbers and is not parsed as a verdict itself."""
  problem, steps = "What is {x} \\boxed{}?", ("Step 7: one {y}", "two\n\nlines")
  text = TEMPLATES[name].prompt(problem, steps)
  assert f"\n\n[Math Problem]\n\n{problem}\n\n[Solution]\n\n" in text
  first = {"critic": 0, "thinkprm": 1, "genprm": 1}[name]
  for i, step in enumerate(steps, first):
    tagged = f"<paragraph_{i}>\n{step}\n</paragraph_{i}>\n\n"
    numbered = f"Step {i}: {step.removeprefix('Step 7: ')}\n"
    assert (numbered if name == "thinkprm" else tagged) in text
  assert [TEMPLATES[name].verdict(text, count) for count in (1, 2)] == [None] * 2


VERDICTS = st.integers(1, 5).flatmap(
  lambda count: st.tuples(
    st.just(count), st.lists(st.none() | st.integers(-1, count - 1), min_size=1, max_size=9)
  )
)


@given(VERDICTS)
def test_the_product_of_the_scores_is_the_share_without_an_error(given):
  """The product of a solution's scores is the share of decided verdicts that find no error.

  Without a decided verdict it is 0.5.  The labels are those of the most frequent verdict.
  """
  count, verdicts = given
  right = judge.probabilities(verdicts, count)
  decided = [each for each in verdicts if each is not None]
  share = decided.count(-1) / len(decided) if decided else 0.5
  assert math.prod(right) == pytest.approx(share, abs=1e-12)
  assert len(right) == count and all(0 <= p <= 1 for p in right)
  first = plurality(verdicts)
  assert (first is None) == (not decided)
  assert all(decided.count(first) >= decided.count(each) for each in decided)
  found = labels(first, count)
  assert len(found) == count
  if first is not None:
    assert [i for i, label in enumerate(found) if label == -1] == [first] * (first >= 0)
    assert found.count(1) == (count if first < 0 else first)


def test_scores_by_hand():
  """Only verdicts whose first error is not before a step vote on that step, as by hand."""
  assert judge.probabilities([1, 1, 2, -1, None], 4) == pytest.approx([1, 1 / 2, 1 / 2, 1])
  assert judge.probabilities([0, 0], 3) == [0, 0.5, 0.5]
  assert judge.probabilities([None], 2) == [0.5**0.5] * 2


@pytest.mark.parametrize(
  "verdicts, expected",
  [((-1, -1, 2), -1), ((2, 1, 2, 1), 1), ((-1, 3, None), 3), ((None, None), None), ((None, 0), 0)],
)
def test_a_tie_goes_to_the_earliest_error(verdicts, expected):
  """Of equally frequent verdicts the earliest error wins, and an error wins over none."""
  assert plurality(verdicts) == expected


@pytest.fixture
def chat():
  """A local chat server, and an engine that asks it."""
  with fake_server.running(fake_server.Server(None)) as server:
    yield server, Server(server.url, "m", concurrency=4, chat=True)


def reply(content, end="stop", **message):
  """A whole answer of the server."""
  message = {"role": "assistant", "content": content} | message
  body = {"choices": [{"index": 0, "message": message, "finish_reason": end}]}
  return body | {"usage": {"completion_tokens": 5}}


def settings(name="critic", votes=2, tokens=99):
  """A judge's settings."""
  return judge.Settings(name, votes, Sampling(0.7, top_p=0.9), Limits(tokens), seed=3)


def judged(engine, solutions, **options):
  """The judgements of solutions, by number."""
  s = settings(**options)
  return {x.number: x for x in judge.judged(solutions, engine, judge.message, s)}


SOLUTIONS = {i: (f"problem {i}", [f"step {j} of {i}" for j in range(3)]) for i in range(5)}
ERRORS = dict(zip(SOLUTIONS, (0, 2, -1, 1, -1)))


def oracle(solutions, errors, name="critic"):
  """Answers of a server that knows the first error of each solution, found by its prompt."""
  known = {TEMPLATES[name].prompt(*each): i for i, each in solutions.items()}

  def act(body, _):
    i = known[body["messages"][-1]["content"]]
    return reply(answer(name, errors[i], len(solutions[i][1])))

  return act


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_server_judges(name, chat, capsys):
  """Each vote is a request of one message with a seed that follows from the solution and the vote.

  The seeds of some solutions alone are those that they have among all, so runs can be resumed.
  """
  server, engine = chat
  server.act = oracle(SOLUTIONS, ERRORS, name)
  judgements = judged(engine, SOLUTIONS, name=name)
  assert {i: x.verdicts for i, x in judgements.items()} == {i: (e, e) for i, e in ERRORS.items()}
  assert {x.tokens for x in judgements.values()} == {10}
  assert {path for path, _ in server.asked} == {"/v1/chat/completions"}
  bodies = server.bodies
  keys = {"model", "messages", "n", "max_tokens", "temperature", "top_p", "seed"}
  assert all(body.keys() == keys and len(body["messages"]) == 1 for body in bodies)
  assert bodies[0] | {"max_tokens": 99, "temperature": 0.7, "top_p": 0.9, "n": 1} == bodies[0]
  seeds = {body["seed"] for body in bodies}
  assert len(seeds) == 10 and not capsys.readouterr().err
  server.asked.clear()
  judged(engine, {i: SOLUTIONS[i] for i in (1, 4)}, name=name)
  assert len({body["seed"] for body in server.bodies} & seeds) == 4


def test_votes_stand_in_the_order_of_their_seeds(chat):
  """The order in which answers arrive does not change the order of the verdicts."""
  server, engine = chat
  over = threading.Event()

  def act(body, number):
    if number == 0:
      assert over.wait(60)
    elif number == 2:
      over.set()
    return by_seed(body)

  by_seed = lambda body, _=0: reply(f"\\boxed{{{body['seed'] % 2}}}")
  server.act = act
  (judgement,) = judged(engine, {7: TWO}, votes=3).values()
  sequential = dataclasses.replace(engine, concurrency=1)
  server.act = by_seed
  assert judged(sequential, {7: TWO}, votes=3)[7] == judgement


def test_a_slow_answer_does_not_hold_up_the_others(chat):
  """The other solutions are judged while one answer is under way."""
  server, engine = chat
  over, known = threading.Event(), oracle(SOLUTIONS, ERRORS)

  def act(body, number):
    assert number or over.wait(60)
    return known(body, number)

  server.act = act
  engine = dataclasses.replace(engine, concurrency=2)
  judgements = judge.judged(SOLUTIONS, engine, judge.message, settings())
  assert {next(judgements).number for _ in range(4)} < SOLUTIONS.keys()
  over.set()
  assert len([*judgements]) == 1


@pytest.mark.parametrize(
  "given",
  [
    reply(None),
    reply(None, end="length", reasoning="I think that \\boxed{1}"),
    reply("\\boxed{1}", end="length"),
    reply("\\boxed{1}", end="content_filter"),
    reply("\\boxed{7}"),
    reply("\\boxed{" * 2**18),
  ],
)
def test_an_answer_without_a_verdict_is_undecided(given, chat):
  """An answer that is null, cut off, filtered, out of range or garbage is no vote."""
  server, engine = chat
  server.act = lambda *_: given
  (judgement,) = judged(engine, {0: TWO}).values()
  assert judgement.verdicts == (None, None)
  assert judge.line({}, *TWO, judgement, {})["labels"] == [None, None]


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_the_thoughts_that_a_server_separates_are_read(key, chat):
  """ThinkPRM's judgements of steps are in its thoughts, which servers return under another key."""
  server, engine = chat
  server.act = lambda *_: reply(SAYS_NO, **{key: RIGHT + WRONG})
  (judgement,) = judged(engine, {0: TWO}, name="thinkprm").values()
  assert judgement.verdicts == (1, 1)


@pytest.mark.parametrize(
  "answer, message",
  [
    ((400, {}, b"too long"), "status 400: 'too long'"),
    (b"<html>" + b"x" * 2**20, "not JSON"),
    (b"\xff", "not JSON"),
    (b"[" * 2**20, "nested"),
    (b"{}", 'no "choices"'),
    (b'{"choices": []}', "0 choices"),
    (b'{"choices": [{}]}', 'no "text" and no "message"'),
    (b'{"choices": [{"message": {"content": ["a"]}}]}', "expected `?str"),
  ],
)
def test_an_answer_that_is_no_chat_completion_is_an_error_of_the_url(answer, message, chat):
  """The message has the URL and the reason, and is short whatever the server sends."""
  server, engine = chat
  server.act = lambda *_: answer if isinstance(answer, tuple) else (200, {}, answer)
  with pytest.raises(ValueError, match=f"^{re.escape(engine.url)}.*{message}") as error:
    judged(engine, {0: TWO})
  assert len(str(error.value)) < 500


def test_a_server_that_cannot_be_reached_or_hangs_up_is_an_error_of_the_url(chat):
  """The error comes after all retries."""
  server, engine = chat
  server.act = lambda *_: None
  absent = Server(f"http://{jobs.free_address()}/v1", "m", chat=True)
  for each in (engine, absent):
    with pytest.raises(OSError, match=f"^{each.url}/chat/completions: no answer after 1 retries"):
      judged(dataclasses.replace(each, retries=1), {0: TWO})


def test_the_sampler_of_the_project_can_be_the_judge():
  """Random weights give undecided verdicts, and their tokens are counted."""
  engine, make = test_sampler.sampler(), prompts.maker("plain", None)
  (judgement,) = judge.judged({5: TWO}, engine, make, settings(votes=3, tokens=4))
  assert (judgement.number, judgement.verdicts) == (5, (None,) * 3)
  assert 3 <= judgement.tokens <= 12


def test_a_line_has_the_keys_of_the_record_and_of_the_judge():
  """The judge's labels and scores replace others; a known `is_correct` is kept."""
  judgement = judge.Judgement(0, (1, 1, -1, None), 40)
  record = {"note": 1, "rating_probs": [], "step_std": [0.1, 0.2], "labels": [0]}
  record |= {"step_scores": [0.1, 0.2, 0.3]}
  about = {"judge": "m", "template": "critic"}
  line = judge.line(record | {"is_correct": True}, *TWO, judgement, about)
  assert (line["note"], line["problem"], line["steps"]) == (1, "p", ["a", "b"])
  assert line["labels"] == [1, -1] and line["verdicts"] == [1, 1, -1, None]
  assert [each["1"] for each in line["rating_probs"]] == pytest.approx([1, 1 / 3])
  assert line["prm_score"] == pytest.approx(1 / 3) and not {"step_std", "step_scores"} & {*line}
  assert line["is_correct"] is True
  for same in ({}, {"is_correct": None}):  # ProcessBench's name of the outcome
    known = judge.line(same | {"final_answer_correct": True}, *TWO, judgement, about)
    assert known["is_correct"] is True and known["provenance"]["outcome"] == "answer"
  counts = {"agreement": 2 / 3, "tokens": 40, "cut_off": 0}
  assert line["provenance"] == {"method": "judge"} | about | counts | {"outcome": "answer"}
  own = judge.line({}, *TWO, judgement, {})
  assert own["is_correct"] is False and own["provenance"]["outcome"] == "labeller"
  undecided = judge.line({}, *TWO, judge.Judgement(0, (None,), 1), {})
  assert undecided["is_correct"] is None and undecided["provenance"]["agreement"] is None
  text = "\n".join(judge.table([line, own, undecided]))
  assert "3 solutions, 9 verdicts, 33.3 % undecided" in text and "9 tokens a verdict" in text
  assert "2 -1, 2 1; 2 steps without one" in text
  assert "agree with the final answer on 0.0 % of 1 " in text
  assert json.loads(json.dumps(line)) == line


@pytest.fixture(scope="module")
def candidates():
  """Candidates of arithmetic problems, each with its first error."""
  rng, out = np.random.default_rng(0), []
  for problem in arithmetic.distinct_problems(0, 8):
    for solution in (arithmetic.solve(problem, rng) for _ in range(5)):
      first = next((i for i, rating in enumerate(solution.ratings) if rating < 0), -1)
      record = {"problem": problem.text, "steps": [*solution.steps], "answer": str(solution.answer)}
      record["is_correct"] = solution.answer == problem.answer
      out.append((record | {"ground_truth_answer": str(problem.answer)}, first))
  assert {first < 0 for _, first in out} == {True, False}
  return out


def judged_lines(chat, records, errors):
  """The lines of a judge that knows the errors."""
  server, engine = chat
  solutions = numbered(records)
  server.act = oracle(solutions, errors)
  judgements = judged(engine, solutions)
  return [judge.line(records[i], *solutions[i], judgements[i], {"judge": "m"}) for i in solutions]


def numbered(records):
  """The problem and steps of each record, by number."""
  return {i: (record["problem"], record["steps"]) for i, record in enumerate(records)}


def test_process_bench_scores_the_judge(candidates, chat, tmp_path):
  """evaluate.py scores the most frequent verdict; an undecided solution counts as wrong.

  A threshold has no effect on verdicts, and choosing one from them is refused.
  """
  records = [
    {"id": f"{'gsm8k' if i % 2 else 'math'}-{i}", "problem": x["problem"], "steps": x["steps"]}
    | {"label": first, "final_answer_correct": x["is_correct"], "generator": "solver"}
    for i, (x, first) in enumerate(candidates)
  ]
  firsts = [first for _, first in candidates]
  lines = judged_lines(chat, records, firsts)
  assert all(line["label"] == first for line, first in zip(lines, firsts))
  for i, line in enumerate(lines):
    # Of 2 to 2 the error wins, though P(right) is not below 0.5.
    votes = (None, None) if i % 2 else (firsts[i], NONE_WRONG) * 2
    line |= judge.line(line, line["problem"], line["steps"], judge.Judgement(i, votes, 0), {})
  path, out = tmp_path / "judged.jsonl", tmp_path / "result.json"
  write_lines(path, lines)
  flags = (f"--input={path}", "--benchmark=process_bench", f"--output={out}")
  done = call_script("evaluate.py", *flags)
  assert f"{len(lines[1::2])} of {len(lines)} solutions undecided" in done.stdout
  result = json.loads(out.read_text())
  for name, expected in (("math", 1), ("gsm8k", 0)):
    subset = result["subsets"][name]
    assert subset["error_accuracy"] == subset["correct_accuracy"] == subset["f1"] == expected
  again = process_bench.evaluate(step_comparison.read_result(out).solutions, 0.9)
  assert [again["subsets"][name]["f1"] for name in ("math", "gsm8k")] == [1, 0]
  again, _ = step_benchmarks.scored("process_bench", path)
  with pytest.raises(ValueError, match="the lines have verdicts, which decide"):
    step_benchmarks.choose_threshold(0.3, None, [], None, again)
  with pytest.raises(ValueError, match="jsonl:1: its labels are those of the judge"):
    step_benchmarks.scored("prm800k", path)


def test_candidates_are_reranked_by_the_judge(candidates, chat, tmp_path):
  """Reranking by the judge's scores takes a solution without an error where there is one."""
  records, errors = zip(*candidates)
  path = write_lines(tmp_path / "judged.jsonl", judged_lines(chat, records, errors))
  report, _ = ranked(read_scored_samples([path]), methods=["prm_product"])
  by_problem = collections.defaultdict(list)
  for record, first in candidates:
    by_problem[record["problem"]].append((first < 0, record["is_correct"]))
  best = [max(sound for sound, _ in each) for each in by_problem.values()]
  means = [
    np.mean([right for sound, right in each if sound == top])
    for each, top in zip(by_problem.values(), best)
  ]
  assert report["curves"]["prm_product"]["accuracy"][-1] == pytest.approx(np.mean(means), abs=1e-6)


def test_the_labels_of_a_judge_can_be_prepared(candidates, chat, tmp_path):
  """prepare_data.py --dataset=stepwise keeps every line of a judge and every label."""
  records, errors = zip(*candidates)
  path = write_lines(tmp_path / "judged.jsonl", judged_lines(chat, records, errors))
  options = prepare.Stepwise(test_share=0.0)
  manifest = prepare.prepare_stepwise(tmp_path / "data", options, source=path)
  counts = manifest["splits"]["train"]
  wrong = sum(first >= 0 for first in errors)
  right = sum(len(x["steps"]) if first < 0 else first for x, first in candidates)
  assert counts["rows"] == {"read": 40, "kept": 40}
  assert counts["labels"] == {"1": right, "0": 0, "-1": wrong}


def annotation(engine, records, folder):
  """The flags without --output with which annotate.py asks a judge, and the output's path."""
  path, out = folder / "samples.jsonl", folder / "judged.jsonl"
  write_lines(path, records)
  flags = ("--method=judge", f"--url={engine.url}", "--served_model=m", "--votes=2")
  return (*flags, f"--input={path}", "--concurrency=4"), out


def test_annotate_py_asks_a_judge_and_can_be_resumed(candidates, chat, tmp_path):
  """After a failure, annotate.py does not ask again about solutions that are in its journal."""
  records, errors = zip(*candidates)
  server, engine = chat
  flags, out = annotation(engine, records, tmp_path)
  good, seen = oracle(numbered(records), errors), itertools.count()
  server.act = lambda *asked: good(*asked) if next(seen) < 20 else (400, {}, b"no")
  done = call_script("annotate.py", *flags, f"--output={out}", code=1)
  assert "status 400" in done.stderr and not out.exists()
  asked = []
  server.act = lambda *given: (asked.append(1), good(*given))[1]
  done = call_script("annotate.py", *flags, f"--output={out}")
  assert "40 solutions, 80 verdicts, 0.0 % undecided" in done.stdout
  assert len(asked) < 80
  lines = read_lines(out)
  assert [line["verdicts"] for line in lines] == [[first] * 2 for first in errors]
  assert {line["provenance"]["template"] for line in lines} == {"critic"}


@pytest.mark.slow
def test_kills_lose_and_double_no_judgement(candidates, chat, tmp_path):
  """Killed 30 times at any moment and run again, a judge's job loses and doubles nothing."""
  server, engine = chat
  records = [record | {"number": i} for i in range(50) for record, _ in candidates]
  errors = [first for _ in range(50) for _, first in candidates]
  good = oracle(numbered(records), errors)

  def act(*asked):
    time.sleep(0.05)  # so that kills come while it works
    return good(*asked)

  server.act = act
  flags, out = annotation(engine, records, tmp_path)
  jobs.kill_again(30, "annotate.py", flags, out)
  lines = read_lines(out)
  assert [line["number"] for line in lines] == [record["number"] for record in records]
  assert [line["verdicts"] for line in lines] == [[first] * 2 for first in errors]
