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


def lines(changed=()):
  """Returns candidates of 40 problems whose steps are too sure; `changed` have other outcomes."""
  rng, out = np.random.default_rng(1), []
  for p in range(40):
    for m in range(4):
      logits = rng.normal(1, 1.5, 1 + m)
      right = bool((rng.random(len(logits)) < 1 / (1 + np.exp(-logits))).all())
      line = {"problem": f"p{p}", "steps": ["s"] * len(logits), "answer": "4", "finished": True}
      line["is_correct"] = right != (p in changed)
      over = 1 / (1 + np.exp(-(3 * logits + 2)))
      out.append(line | {"rating_probs": [{"-1": 1 - x, "0": 0.0, "1": x} for x in over.tolist()]})
  return out


def test_no_outcome_of_a_problem_changes_its_scores(tmp_path):
  """Outcomes of one problem change the scores of other folds only, and errors shrink."""
  path, scores, errors = tmp_path / "a.jsonl", [], []
  for changed in ((), (7,)):
    write_lines(path, lines(changed))
    found = comparison_files.read(path, {"m": path, "m:calibrated": path})
    scores.append(found.scores["m:calibrated"])
    errors.append([found.calibration[name]["ece"] for name in ("m", "m:calibrated")])
  same = (scores[0] == scores[1]).all(1)
  assert same[7] and [*same] == [p % 5 == 7 % 5 for p in range(40)]
  assert errors[0][1] < errors[0][0] / 2


@pytest.mark.parametrize("right", [True, False])
def test_certain_steps_and_equal_outcomes_have_finite_scores(tmp_path, right):
  """Probabilities of 0 and 1 and outcomes without a contrast give scores, not NaN."""
  line = {"problem": "p", "answer": "4", "finished": True, "is_correct": right, "steps": ["a", "b"]}
  sure = [{"-1": 1.0, "0": 0.0, "1": 0.0}, {"-1": 0.0, "0": 0.0, "1": 1.0}]
  given = [line | {"problem": p, "rating_probs": sure} for p in "pqrstu"]
  path = write_lines(tmp_path / "a.jsonl", given)
  scores = comparison_files.read(path, {"m:calibrated": path}).scores["m:calibrated"]
  assert np.isfinite(scores).all() and (scores <= 0).all()
