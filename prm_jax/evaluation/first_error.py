"""Finding the first wrong step: the protocol of ProcessBench (arXiv:2412.06559, section 3).

The model predicts the first step that scores below a threshold, or "all right" if no step does.
The prediction is right for the thresholds in one interval, low < t <= high: high is the smallest
score before the first wrong step, and low the smallest score up to and including it.  A judge's
verdict is the prediction at every threshold.
"""

from collections.abc import Sequence

import numpy as np

from prm_jax.evaluation.judged import Judged, by_group

CURVE = np.round(np.linspace(0, 1, 101), 2)  # thresholds of the reported curve
MEASURES = ("error_accuracy", "correct_accuracy", "f1")


def intervals(judged: Sequence[Judged]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns which solutions have an error, bool `[n]`, and the ends low and high `[n]`."""
  errors, low, high = [], [], []
  for each in judged:
    error, smallest = each.first_error, np.minimum.accumulate(each.scores)
    errors.append(error >= 0)
    if each.verdict is not None:
      low.append(-np.inf if each.verdict == error else np.inf)
      high.append(np.inf)
    elif error >= 0:
      low.append(smallest[error])
      high.append(smallest[error - 1] if error else np.inf)
    else:
      low.append(-np.inf)
      high.append(smallest[-1])
  return np.array(errors, bool), np.array(low, float), np.array(high, float)


def sums(judged: Sequence[Judged], threshold: float | np.ndarray) -> np.ndarray:
  """Returns four indicators of each solution by threshold `[n, 4, ...]`.

  They are: it has an error; its error is found; it has none; it has none, and none is predicted.
  """
  errors, low, high = intervals(judged)
  threshold = np.asarray(threshold)
  shape = (-1,) + (1,) * threshold.ndim
  right = (low.reshape(shape) < threshold) & (threshold <= high.reshape(shape))
  errors = np.broadcast_to(errors.reshape(shape), right.shape)
  return np.stack([errors, errors & right, ~errors, ~errors & right], axis=1).astype(float)


def accuracies(sums: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
  """Returns accuracies with and without an error, and their harmonic mean, from totals of `sums`.

  The totals are `[4, ...]`, or four arrays.  A result is NaN where there is no such solution.
  """
  with np.errstate(invalid="ignore", divide="ignore"):
    errors, correct = sums[1] / sums[0], sums[3] / sums[2]
    f1 = 2 * errors * correct / (errors + correct)
  f1 = np.where((errors == 0) & (correct == 0), 0.0, f1)
  return dict(zip(MEASURES, (errors, correct, f1)))


def best_threshold(judged: Sequence[Judged]) -> float:
  """Returns the threshold of the best F1, midway between neighbouring scores.

  Of several it is the one nearest to 0.5.

  Raises:
    ValueError: the solutions all have an error, or none has.
  """
  errors, low, high = intervals(judged)
  if errors.all() or not errors.any():
    raise ValueError("a threshold is found on solutions with and without an error: both are needed")
  edges = np.unique(np.clip(np.concatenate([low, high]), 0, 1))
  middles = np.unique(np.concatenate([(edges[1:] + edges[:-1]) / 2, [0.0, 1.0]]))
  # The intervals around t are those that have begun before t, less those that have ended before t.
  right = lambda mask: (
    np.searchsorted(np.sort(low[mask]), middles, "left")
    - np.searchsorted(np.sort(high[mask]), middles, "left")
  )
  f1 = accuracies((errors.sum(), right(errors), (~errors).sum(), right(~errors)))["f1"]
  best = middles[f1 >= f1.max() - 1e-12]
  return float(best[np.abs(best - 0.5).argmin()])


def curve(judged: Sequence[Judged]) -> dict[str, list | dict]:
  """Returns `accuracies` of each group at the thresholds of `CURVE`."""
  columns, out = sums(judged, CURVE), {}
  plain = lambda values: [None if np.isnan(x) else float(x) for x in values]
  for group, members in by_group(judged).items():
    values = accuracies(columns[members].sum(0))
    out[group] = {name: plain(value) for name, value in values.items()}
  return {"threshold": CURVE.tolist(), "groups": out}
