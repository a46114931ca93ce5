"""Curves over N with error bars, from how often each problem is solved.

Inputs are `[P, K]` arrays: the probability that a method solves problem p at the k-th value of N.
Outputs are dicts that JSON can store, NaN as null.
"""

from __future__ import annotations

import jax
import numpy as np

from prm_jax import aggregation as agg

COLUMNS = 2048  # bootstrapped at once: memory is resamples x columns
INTERVALS = {
  "pointwise": "95 % percentile bootstrap over problems, each N by itself",
  "simultaneous": "95 % bootstrap band over problems that holds for all N of a curve at once "
  "(sup-t)",
  "generation": "1.96 jackknife standard errors either side: the same problems with candidates "
  "generated anew, where N is at most a fifth of them; none for votes",
}
GROUP_INTERVAL = (
  "1.96 standard errors over the group's problems either side (no width where these all agree, "
  "though other problems might not)"
)


def curves(
  solved: dict[str, np.ndarray],
  noise: dict[str, np.ndarray],
  bounds: dict[str, tuple] | None = None,
  mean_key: str = "accuracy",
) -> dict[str, dict]:
  """The mean over problems of each method or difference, with its errors.

  Args:
    solved: `[P, K]` by name.
    noise: `[K]` Monte-Carlo standard error of the mean, by name of a vote.
    bounds: of `bounds`; default: 1.96 standard errors either side, as groups may be small.
    mean_key: "accuracy" of methods, "difference" of pairs.

  Returns:
    By name: the mean, `low`, `high` and `problem_standard_error` (analytic, over problems).  A vote
    has `standard_error` too, the Monte-Carlo noise; a simultaneous band `critical_value`.
  """
  if not solved:
    return {}
  errors = agg.standard_error(np.concatenate(list(solved.values()), axis=1))
  result = {}
  for (name, each), error in zip(solved.items(), np.asarray(errors).reshape(len(solved), -1)):
    mean = each.mean(axis=0)
    normal = mean - 1.96 * error, mean + 1.96 * error
    low, high, *critical = bounds[name] if bounds else normal
    rows = {mean_key: mean, "low": np.asarray(low), "high": np.asarray(high)}
    if mean_key == "accuracy":  # normal intervals and control variates may leave 0..1
      rows = {key: np.clip(row, 0, 1) for key, row in rows.items()}
    rows["problem_standard_error"] = error
    if name in noise:
      rows["standard_error"] = noise[name]
    result[name] = {
      key: [None if np.isnan(value) else float(value) for value in row] for key, row in rows.items()
    }
    if critical:
      result[name]["critical_value"] = float(critical[0])
  return result


def bounds(
  solved: dict[str, np.ndarray],
  differences: dict[str, np.ndarray],
  band: str,
  generation_error: dict[str, np.ndarray],
  key: jax.Array,
  resamples: int,
) -> dict[str, tuple]:
  """(low, high), `[K]` each, of methods and differences, all by the same bootstrap resamples.

  Args:
    solved: `[P, K]` by method.
    differences: `[P, K]` by pair of methods.
    band: of `INTERVALS`.  Differences get the pointwise bootstrap for "generation".
    generation_error: `[P, K]` jackknife error by method, for that band; NaN without.
    key: random key of the resamples.
    resamples: of the problems.

  Returns:
    By name (low, high), and the critical value after them for "simultaneous".
  """
  every = solved | differences
  if band == "simultaneous":
    return {name: agg.simultaneous_band(x, key, resamples) for name, x in every.items()}
  columns = np.concatenate(list(every.values()), axis=1)
  parts = [
    agg.bootstrap(columns[:, start : start + COLUMNS], key, resamples)  # the same resamples
    for start in range(0, columns.shape[1], COLUMNS)
  ]
  low, high = np.concatenate([np.asarray(part) for part in parts], axis=1)
  result = dict(zip(every, zip(np.split(low, len(every)), np.split(high, len(every)))))
  if band == "generation":
    for name, each in solved.items():
      reach = 1.96 * mean_error(generation_error[name]) if name in generation_error else np.nan
      result[name] = each.mean(axis=0) - reach, each.mean(axis=0) + reach
  return result


def mean_error(per_problem: np.ndarray) -> np.ndarray:
  """`[K]` standard error of the mean over problems with independent errors `[P, K]`."""
  return np.sqrt(np.square(per_problem).sum(axis=0)) / len(per_problem)
