"""A reward model as labeller: its rule, its errors, and the lines that it writes."""

import collections

import numpy as np
import pytest
from conftest import call_script, write_lines
from hypothesis import given
from hypothesis import strategies as st

from prm_jax.datasets import prepare, prm800k
from prm_jax.supervision import retrospective, synthetic

ROW = st.tuples(*[st.integers(1, 20)] * 3).map(lambda x: np.array(x) / sum(x))


@given(rows=st.lists(ROW, min_size=1, max_size=5), threshold=st.sampled_from([0.1, 0.2, 0.5]))
def test_a_step_is_wrong_above_the_threshold_and_labels_end_there(rows, threshold):
  """A step is -1 above the threshold and ends the labels; other steps are 1 or 0, the likelier."""
  expected = []
  for wrong, neutral, right in rows:
    if wrong > threshold:
      expected.append(-1)
      break
    expected.append(1 if right > neutral else 0)
  found = synthetic.label(np.array(rows), threshold)
  assert found == tuple(expected)


def test_two_classes_have_no_neutral():
  """Without a neutral class, a step that is not wrong is right."""
  rows = np.array([[0.1, 0.9], [0.3, 0.7], [0.0, 1.0]])
  assert synthetic.label(rows, 0.2, (-1, 1)) == (1, -1)


def test_errors_of_a_labeller_are_counted_to_the_first_error_of_either():
  """Missed errors and false alarms are counted up to the first -1 of either side, as by hand.

  The solutions have one missed error, one false alarm, one error found and no error.
  """
  given = [(1, 1), (-1,), (1, -1), (1, 0)]
  exact = [(1, -1), (1, 1), (1, -1), (1, 1)]
  found = synthetic.errors(given, exact)
  assert (found["wrong"], found["missed"]) == (2, 1)
  assert (found["right"], found["false_alarms"]) == (5, 1)
  assert found["missed_share"] == 0.5 and found["false_alarm_share"] == 0.2
  assert found["first_errors_found"] == 0.5 and found["outcomes_wrong"] == 0.5


class Oracle:
  """A scorer for which a step with "x" in it is wrong."""

  directory, step = None, 7

  class contract:
    objective, separator, labels, recipe = "process", "\n", (-1, 0, 1), "paper"

  def by_head(self, solutions, on_share=None):
    probabilities = lambda step: [[0.9, 0.0, 0.1]] if "x" in step else [[0.1, 0.2, 0.7]]
    return [np.array([probabilities(step) for step in steps]) for _, steps in solutions]


def test_annotated_lines_can_be_prepared_and_have_their_provenance(tmp_path):
  """prepare_data.py reads the labelled lines, and a known `is_correct` is kept unless overruled."""
  path = tmp_path / "samples.jsonl"
  rows = [
    {"problem": "p", "text": "a\nx\nb", "is_correct": True, "note": 1},
    {"problem": "q", "steps": ["a", "b"]},
    {"problem": "r", "steps": ["a"], "is_correct": None, "final_answer_correct": False},
  ]
  write_lines(path, rows)
  given = (path, Oracle(), "runs/prm", 0.2)
  lines = list(synthetic.annotated(*given, counts := collections.Counter()))
  assert [line["labels"] for line in lines] == [[1, -1, None], [1, 1], [1]]
  assert [line["is_correct"] for line in lines] == [True, True, False]
  outcomes = [line["provenance"]["outcome"] for line in lines]
  assert outcomes == ["answer", "labeller", "answer"]  # ProcessBench's name is read too
  assert {line["provenance"]["labeller"] for line in lines} == {"runs/prm"}
  assert lines[0]["note"] == 1 and lines[0]["provenance"]["threshold"] == 0.2
  assert "0.0 % of 2" in synthetic.table(counts)[1]
  overruled = synthetic.annotated(*given, collections.Counter(), outcome_by_labeller=True)
  assert [line["is_correct"] for line in overruled] == [False, True, True]
  out = write_lines(tmp_path / "labels.jsonl", lines)
  manifest = prepare.prepare_stepwise(tmp_path / "data", prepare.Stepwise(), source=out)
  assert manifest["splits"]["train"]["rows"]["kept"] == 3


@pytest.mark.shared_data
def test_the_retrospective_reports_generations_and_scores(prm800k_sample):
  """Rows with a generation and a score are grouped; rows without are counted as lacking them."""
  done = call_script("retrospective.py", f"--source={prm800k_sample}")
  assert "generation 6" in done.stdout
  records = [
    r for path in sorted(prm800k_sample.glob("phase*")) for r in prm800k.read_records(path)
  ]
  report = retrospective.report(records)
  assert report["records"] == 940 and report["lacking"] == {"generation": 932, "score": 932}
  sixth = report["groups"]["phase 2, generation 6"]
  assert sixth["answers"] == {"wrong": 1} and sixth["labels"] == {"-1": 1, "0": 1, "1": 8}
  assert sixth["scores"]["wrong"]["q50"] == pytest.approx(0.0011546110201324836)
  assert any("generation 6" in line for line in retrospective.table(report))
