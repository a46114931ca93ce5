"""Intervals over seeds and problems, and the data efficiency of one arm against another.

An array `[S, P, ...]` holds results of S seeds on P test problems each.  A bootstrap resample draws
seeds, and within each of them problems, with replacement: the 95 % percentile interval holds the
noise of data, training and test problems.  Arms of a seed share problems, so their differences are
resampled together.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prm_jax.aggregation.intervals import PERCENT

RESAMPLES = 2000


@functools.cache
def resampled(count: tuple[int, int], crossed: bool = False) -> np.ndarray:
  """Returns weights `[R, S, P]` of seeds and problems in each resample's mean; they add up to 1.

  Args:
    crossed: all seeds have the same problems, so a resample draws problems once for all seeds.
  """
  seeds, problems = count
  rng = np.random.default_rng(0)
  weights = np.zeros((RESAMPLES, seeds, problems))
  for each in weights:
    draw = lambda: np.bincount(rng.integers(problems, size=problems), minlength=problems)
    same = draw()
    for s in rng.integers(seeds, size=seeds):
      each[s] += same if crossed else draw()
  return weights / (seeds * problems)


def means(values: np.ndarray, crossed: bool = False) -> np.ndarray:
  """Returns the mean of `[S, P, K]` over seeds and problems, and its resamples: `[1 + R, K]`."""
  drawn = np.einsum("rsp,spk->rk", resampled(values.shape[:2], crossed), values)
  return np.concatenate([values.mean((0, 1))[None], drawn])


def ratios(part: np.ndarray, whole: np.ndarray, crossed: bool = False) -> np.ndarray:
  """Returns the ratio of two `means`, `[1 + R, K]`; NaN where the whole is not positive."""
  part, whole = means(part, crossed), means(whole, crossed)
  with np.errstate(all="ignore"):
    return np.where(whole > 0, part / whole, np.nan)


def efficiency(
  arms: Mapping[str, np.ndarray],
  sizes: Mapping[str, Sequence[float]],
  base: str,
  crossed: bool = False,
) -> dict[str, Any]:
  """Returns the data efficiency of each arm, relative to the arm `base`.

  A line, accuracy = a + b log2(size), is fitted to each arm by least squares (paper section 4.2,
  which compares slopes).  `slope_ratio` is b of the arm over b of `base`.  `data_ratio` is how many
  times the labels `base` needs for the same accuracy: 2 to the power of the mean horizontal
  distance of the lines, at the accuracies of the arm's sizes.

  Args:
    arms: `[S, P, K]` accuracies at K sizes.  At the first size all arms are the same model: the
      lines begin there, but the horizontal distance is taken at the other sizes.
    sizes: labelled solutions at each size.

  Returns:
    Line, slope_ratio and data_ratio of each arm, the last two with intervals.  A ratio whose base
    has no positive slope in more than 2.5 % of the resamples has no limits (None).
  """
  x = {name: np.log2(sizes[name]) for name in arms}
  lines = {name: np.polyfit(x[name], means(arms[name], crossed).T, 1) for name in arms}
  out, (slope_to, intercept_to) = {}, lines[base]
  for name, (slope, intercept) in lines.items():  # [1 + R] each
    at = x[name][1:].mean()
    with np.errstate(all="ignore"):
      distance = (intercept + slope * at - intercept_to) / slope_to - at
      by_slope, by_data = np.where(slope_to > 0, [slope / slope_to, 2**distance], np.nan)
    out[name] = {
      "slope": float(slope[0]),
      "intercept": float(intercept[0]),
      "slope_ratio": ratio_interval(by_slope),
      "data_ratio": ratio_interval(by_data),
    }
  return out


def ratio_interval(ratios: np.ndarray) -> dict[str, float | None]:
  """Returns the first of `[1 + R]` ratios with the interval of the others; None: not finite.

  A resample without a number counts as the lowest for the lower limit, and as the highest for the
  upper limit.
  """
  ends = (
    np.nan_to_num(ratios[1:], nan=x, posinf=np.inf, neginf=-np.inf) for x in (-np.inf, np.inf)
  )
  limits = [np.percentile(each, q, method="nearest") for each, q in zip(ends, PERCENT)]
  numbers = {"value": ratios[0], "low": limits[0], "high": limits[1]}
  return {key: float(x) if np.isfinite(x) else None for key, x in numbers.items()}
