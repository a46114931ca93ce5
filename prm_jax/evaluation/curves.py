"""Curves over N with error bars, from how often each problem is solved.

Inputs are `[P, K]` arrays: the probability that a method solves problem p at the k-th value of N.
Outputs are dicts that JSON can store, NaN as null.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def curves_and_differences(
  solved: dict[str, np.ndarray],
  pairs: Sequence[tuple[str, str]],
  vote_error: dict[str, np.ndarray],
  band: str,
  generation_error: Callable[[str], np.ndarray | None],
  key: jax.Array,
  resamples: int,
) -> tuple[dict[str, dict], dict[str, dict]]:
  """Curves of all problems, and paired differences; all use the same bootstrap resamples.

  Args:
    solved: `[P, K]` by method.
    pairs: methods to compare, on the same problems.
    vote_error: `[P, K]` Monte-Carlo standard error by vote.
    band: what the curves' `low` and `high` are, of `INTERVALS`.
    generation_error: `[P, K]` jackknife error of a method, or None; for that band.
    key: random key of the resamples.
    resamples: of the problems.

  Returns:
    By method `accuracy`, and by "A - B" `difference`, each with `low`, `high` and
    `problem_standard_error` (analytic, over problems).  A vote and a difference with a sampled
    vote have `standard_error` too, the Monte-Carlo noise; a simultaneous band `critical_value`.
  """
  differences = {f"{a} - {b}": solved[a] - solved[b] for a, b in pairs}
  every = solved | differences
  bounds, critical = {}, {}
  if band == "simultaneous":
    for name, per_problem in every.items():
      low, high, value = agg.simultaneous_band(per_problem, key, resamples)
      bounds[name], critical[name] = (low, high), float(value)
  else:
    bootstrapped = every if band == "pointwise" else differences
    bounds = dict(zip(bootstrapped, _bootstrap(list(bootstrapped.values()), key, resamples)))
    if band == "generation":
      for name, per_problem in solved.items():
        bounds[name] = _generation(per_problem, generation_error(name))
  noise = {name: _mean_error(error) for name, error in vote_error.items()}
  for name, (a, b) in zip(differences, pairs):
    error = np.hypot(noise.get(a, 0), noise.get(b, 0))
    if np.any(error):
      noise[name] = error
  results = {}
  for (name, per_problem), error in zip(every.items(), _standard_errors(every)):
    key_of_mean = "accuracy" if name in solved else "difference"
    results[name] = _curve(key_of_mean, per_problem, *bounds[name], error)
    if name in critical:
      results[name]["critical_value"] = critical[name]
    if name in noise:
      results[name]["standard_error"] = noise[name].tolist()
  return {name: results[name] for name in solved}, {name: results[name] for name in differences}


def curves_by_group(
  solved: dict[str, np.ndarray],
  vote_error: dict[str, np.ndarray],
  groups: dict[str, np.ndarray],
) -> dict[str, dict]:
  """The curves over the problems of each group, with normal intervals: groups may be small.

  Args:
    groups: indices of the problems by name of the group.
  """
  results = {}
  for group, chosen in groups.items():
    each = {name: per_problem[chosen] for name, per_problem in solved.items()}
    curves = {}
    for (name, per_problem), error in zip(each.items(), _standard_errors(each)):
      mean, reach = per_problem.mean(axis=0), 1.96 * error
      curves[name] = _curve("accuracy", per_problem, mean - reach, mean + reach, error)
      if name in vote_error:
        curves[name]["standard_error"] = _mean_error(vote_error[name][chosen]).tolist()
    results[group] = {"problems": len(chosen), "curves": curves}
  return results


def _bootstrap(curves: list[np.ndarray], key: jax.Array, resamples: int) -> list:
  """(low, high), `[K]` each, of each `[P, K]` curve."""
  if not curves:
    return []
  columns = np.concatenate(curves, axis=1)
  parts = [
    agg.bootstrap(columns[:, start : start + COLUMNS], key, resamples)  # the same resamples
    for start in range(0, columns.shape[1], COLUMNS)
  ]
  low, high = np.concatenate([np.asarray(part) for part in parts], axis=1)
  return list(zip(np.split(low, len(curves)), np.split(high, len(curves))))


def _generation(per_problem: np.ndarray, error: np.ndarray | None) -> tuple:
  """(low, high) for other candidates of the same problems; NaN where that is not known."""
  mean = per_problem.mean(axis=0)
  reach = np.nan if error is None else 1.96 * _mean_error(error)
  return mean - reach, mean + reach


def _mean_error(per_problem: np.ndarray) -> np.ndarray:
  """`[K]` standard error of the mean over problems with independent errors `[P, K]`."""
  return np.sqrt(np.square(per_problem).sum(axis=0)) / len(per_problem)


def _standard_errors(solved: dict[str, np.ndarray]) -> np.ndarray:
  """`[curves, K]` standard errors of the means over problems."""
  columns = np.concatenate(list(solved.values()), axis=1)
  return np.asarray(agg.standard_error(columns)).reshape(len(solved), -1)


def _curve(key: str, per_problem: np.ndarray, low, high, error) -> dict:
  """A mean over problems and its bounds, under the names of report.json."""
  rows = {key: per_problem.mean(axis=0), "low": np.asarray(low), "high": np.asarray(high)}
  if key == "accuracy":  # normal intervals and control variates may leave 0..1
    rows = {name: np.clip(row, 0, 1) for name, row in rows.items()}
  rows["problem_standard_error"] = error
  return {
    name: [None if np.isnan(value) else float(value) for value in row] for name, row in rows.items()
  }
