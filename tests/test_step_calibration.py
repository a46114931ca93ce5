"""Step probabilities are calibrated to the outcomes of other problems' solutions."""

import numpy as np
import pytest
from conftest import write_lines

from prm_jax.experiments import comparison_files, step_calibration


def test_the_fit_finds_the_line_that_outcomes_follow():
  """With outcomes drawn from a x + b, the fit returns a and b."""
  rng = np.random.default_rng(0)
  solution_of = np.repeat(np.arange(20_000), rng.integers(1, 7, 20_000))
  x = rng.normal(size=solution_of.size)
  right_step = rng.random(x.size) < 1 / (1 + np.exp(-(0.5 * x + 2)))
  correct = np.bincount(solution_of, ~right_step) == 0
  assert step_calibration.fit(x, solution_of, correct) == pytest.approx((0.5, 2), abs=0.05)


def graded(finished, right):
  """Returns the keys of a candidate that tell its outcome."""
  answer = ("4" if right else "5") if finished else None
  return {"answer": answer, "finished": finished, "is_correct": finished and right}


def lines(changed=()):
  """Returns candidates of 40 problems whose steps are too sure; `changed` have other outcomes."""
  rng, out = np.random.default_rng(1), []
  for p in range(40):
    for m in range(5):
      logits = rng.normal(1, 1.5, 1 + m)
      right = bool((rng.random(len(logits)) < 1 / (1 + np.exp(-logits))).all())
      line = {"problem": f"p{p}", "steps": ["s"] * len(logits)}
      line |= graded(m > 0, right != (p in changed))
      one = (1 / (1 + np.exp(-(3 * logits + 2)))).tolist()
      ratings = [{"-1": 0.75 * (1 - x), "0": 0.25 * (1 - x), "1": x} for x in one]
      out.append(line | {"rating_probs": ratings})
  return out


@pytest.mark.parametrize("neutral", ["positive", "negative"])
def test_a_score_is_the_product_of_steps_on_the_line_of_other_folds(tmp_path, neutral):
  """The score of p3 is that of the line fitted on the answers of all problems but 3, 8, 13, ..."""
  given = lines()
  path = write_lines(tmp_path / "a.jsonl", given)
  found = comparison_files.read(path, {"m:calibrated": path}, neutral=neutral)
  right = [[x["1"] + x["0"] * (neutral == "positive") for x in y["rating_probs"]] for y in given]
  log_odds = [[min(np.log(x / (1 - x)), 15) for x in each] for each in right]
  others = [i for i, line in enumerate(given) if (i // 5) % 5 != 3 and line["answer"]]
  x, of = zip(*((x, i) for i in others for x in log_odds[i]))
  a, b = step_calibration.fit(np.array(x), np.array(of), np.array([y["is_correct"] for y in given]))
  wanted = [-np.log1p(np.exp(-(a * np.array(each) + b))).sum() for each in log_odds[15:20]]
  np.testing.assert_allclose(found.scores["m:calibrated"][3], wanted)
  assert found.lines["m:calibrated"][3] == pytest.approx((a, b))


def test_no_outcome_of_a_problem_changes_its_scores(tmp_path):
  """Outcomes of one problem change the scores of other folds only, and errors shrink."""
  path, scores, errors = tmp_path / "a.jsonl", [], []
  for changed in ((), (7,)):
    write_lines(path, lines(changed))
    found = comparison_files.read(path, {"m": path, "m:calibrated": path})
    scores.append(found.scores["m:calibrated"])
    errors.append([found.calibration[name]["ece"] for name in ("m", "m:calibrated")])
  same = (scores[0] == scores[1]).all(1)
  assert [*same] == [p % 5 == 7 % 5 for p in range(40)]
  assert errors[0][1] < errors[0][0] / 2 and not found.notices()


def test_probabilities_that_mean_nothing_give_a_notice(tmp_path):
  """If higher probabilities go with wrong solutions, a notice says that the score counts steps."""
  given = lines()
  for line in given:
    doubtful = min(x["1"] for x in line["rating_probs"]) < 0.9
    line |= graded(line["finished"], doubtful)
  path = write_lines(tmp_path / "a.jsonl", given)
  found = comparison_files.read(path, {"m:calibrated": path})
  (notice,) = found.notices()
  assert notice.startswith("m:calibrated only counts steps in 5 of 5 folds")


def test_the_same_steps_in_another_order_tie(tmp_path):
  """Solutions with equal steps share the pick, in whatever order they are added."""
  given = [x for x in lines() if len(x["steps"]) == 5]
  turned = [x | {"rating_probs": x["rating_probs"][::-1], "is_correct": False} for x in given]
  both = [line for pair in zip(given, turned) for line in pair]
  path = write_lines(tmp_path / "a.jsonl", both)
  scores = comparison_files.read(path, {"m:calibrated": path}).scores["m:calibrated"]
  assert (scores[:, 0] == scores[:, 1]).all() and len(np.unique(scores)) > 10


@pytest.mark.parametrize("right", [True, False])
def test_certain_steps_and_equal_outcomes_have_finite_scores(tmp_path, right):
  """Probabilities of 0 and 1 and outcomes without a contrast give scores, not NaN."""
  line = {"problem": "p", "answer": "4", "finished": True, "is_correct": right, "steps": ["a", "b"]}
  sure = [{"-1": 1.0, "0": 0.0, "1": 0.0}, {"-1": 0.0, "0": 0.0, "1": 1.0}]
  given = [line | {"problem": p, "rating_probs": sure} for p in "pqrstu"]
  path = write_lines(tmp_path / "a.jsonl", given)
  scores = comparison_files.read(path, {"m:calibrated": path}).scores["m:calibrated"]
  assert np.isfinite(scores).all() and (scores <= 0).all()
