"""Requests for labels show no known labels, and answers are checked before they are used."""

import collections
import json
import math
import re

import msgspec
import pytest
from conftest import call_script, write_lines

from prm_jax.datasets import prepare
from prm_jax.evaluation import page
from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import BadLine
from prm_jax.supervision import label_answers, label_choice
from prm_jax.supervision import label_requests as lib


def items(count: int) -> list[lib.Item]:
  """Solutions of four steps to label."""
  steps, about = ["a", "b", "c", "d"], {"rule": "x"}
  return [lib.Item(f"p{i}", steps, is_correct=True, about=about) for i in range(count)]


KNOWN = [lib.Known(f"k{i}", ["a", "b"], labels=[1, -1] if i % 2 else [1, 1]) for i in range(4)]


def answers(asked, who: str, labels) -> list[tuple[str, label_answers.Answer]]:
  """One labeller's answers to every request; `labels(request, key)` gives the labels."""
  return [
    (f"answers.jsonl:{i}", label_answers.Answer(request.request, who, labels(request, key)))
    for i, (request, key) in enumerate(asked, 1)
  ]


def careful(request, key) -> list[int]:
  """The right labels."""
  return key.labels or [1, 0, -1]


def careless(request, key) -> list[int]:
  """The first step as wrong, whatever it is."""
  return [-1]


def test_requests_show_only_problem_and_steps():
  """A request does not show whether it is quality control, why it was chosen or its outcome."""
  asked = lib.requests(items(20), KNOWN, shared=0.25, seed=3)
  assert len({request.request for request, _ in asked}) == 24
  for request, key in asked:
    shown = json.loads(msgspec.json.encode(request))
    assert set(shown) == {"request", "problem", "steps"}
    assert key.kind not in request.request
  kinds = [key.kind for _, key in asked]
  assert collections.Counter(kinds) == {"shared": 5, "single": 15, "quality_control": 4}
  assert kinds != sorted(kinds)  # in random order
  assert asked == lib.requests(items(20), KNOWN, shared=0.25, seed=3)


@pytest.mark.parametrize("labels", [None, [1, None], [1, None, -1], [1], [1, 1, 1, 1]])
def test_quality_control_is_known_up_to_its_first_wrong_step(labels, tmp_path):
  """An item for quality control needs a label of each step up to its first wrong one."""
  line = {"problem": "k", "steps": ["a", "b", "c"], "labels": labels}
  path = write_lines(tmp_path / "known.jsonl", [line])
  ((_, item),) = json_lines.structs(path, lib.Item)
  assert item.labels == labels
  message = rf"known\.jsonl:1: the quality-control item 'k' has labels {re.escape(str(labels))}"
  with pytest.raises(BadLine, match=f"{message} for 3 steps; expected one for each"):
    list(json_lines.structs(path, lib.Known))
  ((_, key),) = lib.requests([], [lib.Known("k", ["a", "b", "c"], labels=[0, -1, None])])
  assert key.labels == [0, -1]


def test_answers_to_another_round_are_refused():
  """Requests of another round have other names, though the seed is the same."""
  asked = lib.requests(items(2), seed=0)
  later = lib.requests([lib.Item("other", ["a"])], seed=0)
  with pytest.raises(BadLine, match="was not made"):
    label_answers.collect(later, answers(asked, "ann", careful))


def test_labels_are_those_of_labellers_who_pass_quality_control():
  """A labeller who fails quality control is left out; steps after the first error have no label."""
  asked = lib.requests(items(10), KNOWN, seed=0)
  given = answers(asked, "bea", careful) + answers(asked, "carl", careless)
  lines, report = label_answers.collect(asked, given)
  assert len(lines) == report["labelled"] == 10
  assert all(line["labels"] == [1, 0, -1, None] and line["is_correct"] for line in lines)
  assert {line["provenance"]["labeller"] for line in lines} == {"bea"}
  assert lines[0]["provenance"] | {"request": ""} == {
    "method": "people",
    "request": "",
    "labeller": "bea",
    "rule": "x",
  }
  assert report["labellers"]["carl"]["left_out"] and not report["labellers"]["bea"]["left_out"]
  assert report["labellers"]["carl"]["quality_control"] == 0.0


def test_agreement_is_on_steps_that_both_labelled():
  """Shares and Cohen's kappa count the common steps of two labellers, 3 of 4 alike, as by hand."""
  asked = lib.requests(items(2), seed=0)
  first = dict(zip((request.request for request, _ in asked), ([1, -1], [1, -1])))
  second = dict(zip(first, ([1, -1], [0, 1, 1, 1])))
  given = answers(asked, "a", lambda r, _: first[r.request])
  given += answers(asked, "b", lambda r, _: second[r.request])
  agreement = label_answers.collect(asked, given)[1]["agreement"]
  assert (agreement["steps"], agreement["share"], agreement["share_of_ratings"]) == (4, 0.75, 0.5)
  assert agreement["kappa"] == pytest.approx((3 / 4 - 1 / 2) / (1 - 1 / 2))


@pytest.mark.parametrize(
  "answer, message",
  [
    ({"request": "nobody", "labels": [1]}, "was not made"),
    ({"labels": [1]}, "1 labels for 4 steps"),
    ({"labels": [1] * 5}, "5 labels for 4 steps"),
    ({"labels": [-1, 1, 1]}, "go on after the first -1"),
    ({"labels": [2]}, "labels"),
    ({"labels": []}, "labels"),
  ],
)
def test_wrong_answers_name_file_line_and_value(answer, message, tmp_path):
  """An answer to no request, or with labels that do not fit its steps, is an error."""
  asked = lib.requests(items(1), seed=0)
  line = {"request": asked[0][0].request, "labeller": "bea"} | answer
  path = write_lines(tmp_path / "answers.jsonl", [line])
  with pytest.raises(BadLine, match=message) as error:
    label_answers.collect(asked, json_lines.structs(path, label_answers.Answer))
  assert f"{path}:1" in str(error.value)


def test_a_second_answer_is_an_error():
  """A labeller may answer each request once."""
  asked = lib.requests(items(1), seed=0)
  with pytest.raises(BadLine, match=r"answered request .* before"):
    label_answers.collect(asked, answers(asked, "a", careful) * 2)


def test_two_requests_of_one_name_are_an_error(tmp_path):
  """The labels of one would go to the other."""
  write_lines(tmp_path / "r.key.jsonl", [{"request": "a", "kind": "single"}])
  lines = [{"request": "a", "problem": problem, "steps": ["x"]} for problem in "pq"]
  path = write_lines(tmp_path / "r.jsonl", lines)
  with pytest.raises(BadLine, match=r"r\.jsonl:2: request a is in the file twice"):
    lib.read(path)


def write_scored(path, **changed):
  """Writes a scored line; returns the path."""
  line = {"problem": "p", "steps": ["a", "b"], "is_correct": True}
  ratings = [{"-1": 0.1, "0": 0, "1": 0.9}] * 2
  return write_lines(path, [line | {"rating_probs": ratings} | changed])


def test_scored_lines_may_be_undecided_or_cut_off(tmp_path):
  """An undecided answer counts as wrong; a solution that was cut off may have no scores."""
  path = write_scored(tmp_path / "a.jsonl", is_correct=None)
  good = path.read_text()
  path.write_text(good + good.replace('"rating_probs"', '"finished": false, "unread"'))
  (item,) = label_choice.choose(path, "convincing", 2, 0)
  assert item.steps == ["a", "b"] and item.is_correct is None
  with pytest.raises(BadLine, match=r"a.jsonl:1: .*1 step_std of 2 steps"):
    label_choice.choose(write_scored(path, step_std=[0.1]), "uncertain", 1, 0)
  with pytest.raises(BadLine, match=r'a.jsonl:1: "finished" is 0: expected bool'):
    label_choice.choose(write_scored(path, finished=0), "uncertain", 1, 0)
  with pytest.raises(
    BadLine, match=r"a.jsonl:1: .*expected probabilities"
  ):  # not read as a right step
    label_choice.choose(write_scored(path, rating_probs=[{"1": 0.5}] * 2), "convincing", 1, 0)


PERCENT = {"rating_probs": [{"-1": 3.0, "0": 16.0, "1": 81.0}] * 2}
NO_PROBABILITIES = [
  (PERCENT, r"rating_probs\[0\]\" is {.*: expected probabilities"),
  ({"rating_probs": [{"-1": -0.1, "0": 0.1, "1": 1.0}] * 2}, r"expected float >= 0"),
  ({"rating_probs": [{"wrong": 0.5, "right": 0.5}] * 2}, 'no "-1"|expected probabilities of -1, 0'),
  ({"step_std": [0.1, math.nan]}, r'"step_std\[1\]" is nan: expected float >= 0'),
  ({"step_std": [0.1, -5.0]}, r'"step_std\[1\]" is -5.0: expected float >= 0'),
]


@pytest.mark.parametrize(("changed", "message"), NO_PROBABILITIES)
def test_scores_that_are_no_probabilities_are_refused(changed, message, tmp_path):
  """Percentages, negative numbers and NaN are neither chosen from nor shown on a page.

  The user reads the file and the line.
  """
  path = write_scored(tmp_path / "a.jsonl", **changed)
  with pytest.raises(BadLine, match=f"a.jsonl:1: .*({message})"):
    label_choice.choose(path, "uniform", 1, 0)
  with pytest.raises(BadLine, match=f"a.jsonl:1: .*({message})"):
    list(json_lines.structs(path, page.Record))


@pytest.mark.parametrize(
  "neutral, score, chosen", [("positive", 0.81, "a"), ("negative", 0.64, "b")]
)
def test_rules_count_the_neutral_class_as_they_are_told(neutral, score, chosen, tmp_path):
  """The score of a solution counts P(neutral) as right or wrong, like the model's prm_score."""
  path, lines = tmp_path / "a.jsonl", []
  for text, probabilities in (("a", (0.1, 0.8, 0.1)), ("b", (0.2, 0, 0.8))):
    rating = dict(zip(("-1", "0", "1"), probabilities))
    lines.append({"problem": "p", "steps": [text] * 2, "is_correct": False})
    lines[-1]["rating_probs"] = [rating] * 2
  write_lines(path, lines)
  out = tmp_path / "out.jsonl"
  call_script("label_requests.py", f"--input={path}", f"--output={out}", f"--neutral={neutral}")
  assert json.loads(out.read_text())["steps"] == [chosen] * 2
  assert json.loads(lib.key(out).read_text())["about"]["score"] == pytest.approx(score)


@pytest.mark.parametrize(
  "flags, message",
  [
    (["--input={a}"], "is an input: give another name"),
    (["--answers={a}", "--requests=b.jsonl"], "is an input: give another name"),
    (["--answers=b.jsonl", "--requests=c.jsonl", "--rule=uniform"], "--rule goes with --input"),
  ],
)
def test_flags_that_do_not_go_together_are_errors(flags, message, tmp_path):
  """An input is not overwritten, and reading answers takes no flag of asking."""
  path = write_scored(tmp_path / "a.jsonl")
  before = path.read_text()
  done = call_script(
    "label_requests.py", *(x.format(a=path) for x in flags), f"--output={path}", code=1
  )
  assert message in done.stderr
  assert path.read_text() == before


@pytest.mark.parametrize("flag", ["count=-1", "count=0", "shared=5", "shared=-1", "seed=-1"])
def test_numbers_out_of_range_are_errors(flag, tmp_path):
  """A count below 1, a share outside 0 to 1 and a negative seed are errors that name the value."""
  path = write_scored(tmp_path / "a.jsonl")
  out = tmp_path / "out.jsonl"
  flags = (f"--input={path}", f"--output={out}", f"--{flag}")
  assert f"args.{flag}" in call_script("label_requests.py", *flags, code=2).stderr
  assert not out.exists()


def test_label_requests_py_makes_requests_and_turns_answers_into_a_dataset(tmp_path):
  """A scored file gives requests, and their answers give labels that prepare_data.py reads.

  A later round with --labelled asks for no solution that has labels.
  """
  scored = tmp_path / "scored.jsonl"
  rows = [
    {
      "problem": f"p{p}",
      "steps": ["a", f"b{s}"],
      "is_correct": s == 0,
      "rating_probs": [{"-1": 0.1 * s, "0": 0, "1": 1 - 0.1 * s}] * 2,
    }
    for p in range(5)
    for s in range(4)
  ]
  write_lines(scored, rows)
  # The best of p0 is known, so it is not asked for once more.
  best = {"problem": "p0", "steps": ["a", "b0"], "labels": [1, 1]}
  known = write_lines(tmp_path / "known.jsonl", [best])
  script = lambda *flags: call_script("label_requests.py", *flags).stdout
  requests = tmp_path / "requests.jsonl"
  flags = [f"--input={scored}", f"--output={requests}", "--count=2", f"--quality_control={known}"]
  assert "10 solutions to label, 1 for quality control" in script(*flags)
  asked = lib.read(requests)
  chosen = [request for request, key in asked if key.kind != "quality_control"]
  assert ("p0", "b0") not in {(request.problem, request.steps[1]) for request in chosen}
  assert {request.steps[1] for request in chosen} <= {"b0", "b1", "b2"}  # best, or most convincing
  given = write_lines(
    tmp_path / "answers.jsonl",
    [
      {"request": request.request, "labeller": "bea", "labels": key.labels or [1, -1]}
      for request, key in asked
    ],
  )
  labels = tmp_path / "labels.jsonl"
  text = script(f"--answers={given}", f"--requests={requests}", f"--output={labels}")
  assert "10 labelled solutions" in text and "100 % of quality control" in text
  wrong = [{"request": r.request, "labeller": "carl", "labels": [-1]} for r, _ in asked]
  write_lines(tmp_path / "wrong.jsonl", wrong)
  bad = (f"--answers={tmp_path / 'wrong.jsonl'}", f"--output={tmp_path / 'none.jsonl'}")
  done = call_script("label_requests.py", *bad, f"--requests={requests}", code=1)
  assert "left out, under 75 %" in done.stdout and "no answer gives a label" in done.stderr
  assert not (tmp_path / "none.jsonl").exists()
  again = tmp_path / "again.jsonl"
  text = script(*flags[:1], *flags[2:], "--labelled", labels, f"--output={again}")
  assert "9 solutions to label" in text
  solutions = lambda path: {
    (request.problem, tuple(request.steps))
    for request, key in lib.read(path)
    if key.kind != "quality_control"
  }
  assert not solutions(again) & solutions(requests)
  manifest = prepare.prepare_stepwise(tmp_path / "data", prepare.Stepwise(), source=labels)
  assert manifest["labels"] == "ratings"
