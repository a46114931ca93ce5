"""Requests for labels go out without what is known, and answers come back checked."""

import json

import pytest
from conftest import call_script

from prm_jax.datasets import prepare
from prm_jax.runtime.json_lines import BadLine
from prm_jax.supervision import label_requests as lib


def items(count: int) -> list[lib.Item]:
  return [
    lib.Item(f"p{i}", ["a", "b", "c"], is_correct=True, about={"rule": "x"}) for i in range(count)
  ]


KNOWN = [lib.Item(f"k{i}", ["a", "b"], labels=[1, -1] if i % 2 else [1, 1]) for i in range(4)]


def answers(asked, who: str, of) -> list[tuple[str, lib.Answer]]:
  """One labeller's answers to every request; `of(request, key)` gives the labels."""
  return [
    (f"answers.jsonl:{i}", lib.Answer(request.request, who, of(request, key)))
    for i, (request, key) in enumerate(asked, 1)
  ]


def careful(request, key) -> list[int]:
  return key.labels or [1, 0, -1]


def careless(request, key) -> list[int]:
  return [-1]


def test_requests_show_only_problem_and_steps():
  """A labeller cannot tell quality control, what was chosen and why, or the answer's worth."""
  asked = lib.requests(items(20), KNOWN, shared=0.25, seed=3)
  assert len({request.request for request, _ in asked}) == 24
  for request, key in asked:
    shown = json.loads(lib.msgspec.json.encode(request))
    assert set(shown) == {"request", "problem", "steps"}
    assert key.kind not in request.request
  kinds = [key.kind for _, key in asked]
  assert (kinds.count("shared"), kinds.count("single"), kinds.count("quality_control")) == (
    5,
    15,
    4,
  )
  assert kinds != sorted(kinds)  # in random order
  assert asked == lib.requests(items(20), KNOWN, shared=0.25, seed=3)


@pytest.mark.parametrize("labels", [None, [1, None], [1, None, -1], [1], [1, 1, 1, 1]])
def test_quality_control_is_known_up_to_its_first_wrong_step(labels):
  """An item that is not wholly labelled would fail labellers who are right."""
  item = lib.Item("k", ["a", "b", "c"], labels=labels)
  with pytest.raises(ValueError, match="of 3 steps; expected one of each"):
    lib.requests(items(1), [item])
  ((_, key),) = lib.requests([], [lib.Item("k", ["a", "b", "c"], labels=[0, -1, None])])
  assert key.labels == [0, -1]


def test_answers_to_another_round_are_refused():
  """The next round's requests of the same seed have other names."""
  asked = lib.requests(items(2), seed=0)
  later = lib.requests([lib.Item("other", ["a"])], seed=0)
  with pytest.raises(BadLine, match="was not made"):
    lib.collect(later, answers(asked, "ann", careful))


def test_labels_come_back_without_careless_labellers():
  """Who fails quality control is left out, whatever else he says."""
  asked = lib.requests(items(10), KNOWN, seed=0)
  given = answers(asked, "bea", careful) + answers(asked, "carl", careless)
  lines, report = lib.collect(asked, given)
  assert len(lines) == report["labelled"] == 10
  assert all(line["labels"] == [1, 0, -1] and line["is_correct"] for line in lines)
  assert {line["provenance"]["labeller"] for line in lines} == {"bea"}
  assert lines[0]["provenance"] | {"request": ""} == {
    "method": "people",
    "request": "",
    "labeller": "bea",
    "rule": "x",
  }
  assert report["labellers"]["carl"]["left_out"] and not report["labellers"]["bea"]["left_out"]
  assert report["labellers"]["carl"]["quality_control"] == 0.0


def test_labels_end_at_the_first_error():
  """Steps without a label are null, as in the form that prepare_data.py reads."""
  asked = lib.requests(items(1), seed=0)
  lines, _ = lib.collect(asked, answers(asked, "bea", lambda *_: [1, -1]))
  assert lines[0]["labels"] == [1, -1, None]


def test_agreement_is_on_steps_that_both_labelled():
  """Two labellers, 3 of 4 common steps alike; kappa by hand: (3/4 - 1/2) / (1 - 1/2)."""
  asked = lib.requests(items(2), seed=0)
  first = dict(zip((request.request for request, _ in asked), ([1, -1], [1, -1])))
  second = dict(zip(first, ([1, -1], [0, 1, 1])))
  given = answers(asked, "a", lambda r, _: first[r.request])
  given += answers(asked, "b", lambda r, _: second[r.request])
  found = lib.collect(asked, given)[1]["agreement"]
  assert found["steps"] == 4 and found["share"] == 0.75 and found["share_of_ratings"] == 0.5
  assert found["kappa"] == pytest.approx((3 / 4 - 1 / 2) / (1 - 1 / 2))


@pytest.mark.parametrize(
  "answer, message",
  [
    ({"request": "nobody", "labels": [1]}, "was not made"),
    ({"labels": [1]}, "1 labels of 3 steps"),
    ({"labels": [1, 1, 1, 1]}, "4 labels of 3 steps"),
    ({"labels": [-1, 1, 1]}, "go on after the first -1"),
    ({"labels": [2]}, "labels"),
    ({"labels": []}, "labels"),
  ],
)
def test_wrong_answers_name_file_line_and_value(answer, message, tmp_path):
  """An answer that cannot be used is an error, not a label."""
  asked = lib.requests(items(1), seed=0)
  path = tmp_path / "answers.jsonl"
  line = {"request": asked[0][0].request, "labeller": "bea"} | answer
  path.write_text(json.dumps(line) + "\n")
  with pytest.raises(BadLine, match=message) as error:
    lib.collect(asked, lib.read_answers(path))
  assert f"{path}:1" in str(error.value)


def test_a_second_answer_is_an_error():
  asked = lib.requests(items(1), seed=0)
  with pytest.raises(BadLine, match=r"answered request .* before"):
    lib.collect(asked, answers(asked, "a", careful) * 2)


def test_the_loop_with_people_in_it(tmp_path):
  """Scored file to requests, answers to labels: the script's two halves, and a dataset of them."""
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
  scored.write_text("".join(json.dumps(row) + "\n" for row in rows))
  known = tmp_path / "known.jsonl"
  # The best of p0 is known, so it is not asked for once more.
  known.write_text(json.dumps({"problem": "p0", "steps": ["a", "b0"], "labels": [1, 1]}) + "\n")

  def script(*flags) -> str:
    done = call_script("label_requests.py", *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout

  requests = tmp_path / "requests.jsonl"
  flags = [f"--input={scored}", f"--output={requests}", "--count=2", f"--quality_control={known}"]
  assert "10 solutions to label, 1 for quality control" in script(*flags)
  asked = lib.read(requests)
  chosen = [request for request, key in asked if key.kind != "quality_control"]
  assert ("p0", "b0") not in {(request.problem, request.steps[1]) for request in chosen}
  assert {request.steps[1] for request in chosen} <= {"b0", "b1", "b2"}  # best, or most convincing
  given = tmp_path / "answers.jsonl"
  with given.open("w") as out:
    for request, key in asked:
      labels = key.labels or [1, -1]
      answer = {"request": request.request, "labeller": "bea", "labels": labels}
      out.write(json.dumps(answer) + "\n")
  labels = tmp_path / "labels.jsonl"
  text = script(f"--answers={given}", f"--requests={requests}", f"--output={labels}")
  assert "10 labelled solutions" in text and "100 % of quality control" in text
  again = tmp_path / "again.jsonl"
  text = script(*flags[:1], *flags[2:], "--labelled", labels, f"--output={again}")
  assert "9 solutions to label" in text
  of = lambda path: {
    (request.problem, tuple(request.steps))
    for request, key in lib.read(path)
    if key.kind != "quality_control"
  }
  assert not of(again) & of(requests)
  manifest = prepare.prepare_stepwise(tmp_path / "data", prepare.Stepwise(), source=labels)
  assert manifest["labels"] == "ratings"
