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

RESAMPLES = 2000
PERCENT = (2.5, 97.5)


@functools.cache
def resampled(
  count: tuple[int, int], crossed: bool = False, seed: int = 0, resamples: int = RESAMPLES
) -> np.ndarray:
  """Returns weights `[R, S, P]` of seeds and problems in each resample's mean; they add up to 1.

  Args:
    crossed: all seeds have the same problems, so a resample draws problems once for all seeds.
  """
  seeds, problems = count
  rng = np.random.default_rng(seed)
  weights = np.zeros((resamples, seeds, problems))
  for each in weights:
    draw = lambda: np.bincount(rng.integers(problems, size=problems), minlength=problems)
    same = draw()
    for s in rng.integers(seeds, size=seeds):
      each[s] += same if crossed else draw()
  return weights / (seeds * problems)


def intervals(values: np.ndarray, crossed: bool = False) -> dict[str, list]:
  """Returns the mean of `[S, P, K]`, its interval, `[K]` each, and the means by seed `[S, K]`."""
  means = np.einsum("rsp,spk->rk", resampled(values.shape[:2], crossed), values)
  low, high = np.percentile(means, PERCENT, axis=0)
  mean = values.mean((0, 1))
  return {
    "mean": mean.tolist(),
    "low": low.tolist(),
    "high": high.tolist(),
    "by_seed": values.mean(1).tolist(),
  }


def efficiency(
  arms: Mapping[str, np.ndarray],
  sizes: Mapping[str, Sequence[float]],
  base: str,
  crossed: bool = False,
  common: int = 0,
) -> dict[str, Any]:
  """Returns the data efficiency of each arm, relative to the arm `base`.

  A line, accuracy = a + b log2(size), is fitted to each arm by least squares (paper section 4.2,
  which compares slopes).  `slope_ratio` is b of the arm over b of `base`.  `data_ratio` is how many
  times the labels `base` needs for the same accuracy: 2 to the power of the mean horizontal
  distance of the lines, at the accuracies of the arm's sizes.

  Args:
    arms: `[S, P, K]` accuracies at K sizes.
    sizes: labelled solutions at each size.
    common: the number of first sizes at which all arms are the same model.  The lines begin there,
      but the horizontal distance is taken at the other sizes.

  Returns:
    Line, slope_ratio and data_ratio of each arm, the last two with intervals.  A ratio whose base
    has no positive slope in more than 2.5 % of the resamples has no limits (None).
  """
  weights = resampled(arms[base].shape[:2], crossed)
  x = {name: np.log2(sizes[name]) for name in arms}
  fit = lambda name, y: np.polyfit(x[name], y.T, 1)  # [2, R]: slopes and intercepts
  means = {name: np.einsum("rsp,spk->rk", weights, values) for name, values in arms.items()}
  boot = {name: fit(name, y) for name, y in means.items()}
  exact = {name: fit(name, values.mean((0, 1))[None])[:, 0] for name, values in arms.items()}

  def ratios(line: np.ndarray, to: np.ndarray, at: float) -> tuple[np.ndarray, np.ndarray]:
    (slope, intercept), (slope_to, intercept_to) = line, to
    with np.errstate(all="ignore"):
      distance = (intercept + slope * at - intercept_to) / slope_to - at
      rises = slope_to > 0
      return np.where(rises, slope / slope_to, np.nan), np.where(rises, 2**distance, np.nan)

  out = {}
  for name in arms:
    middle = x[name][common:].mean()
    slope, data = ratios(exact[name], exact[base], middle)
    slopes, data_ratios = ratios(boot[name], boot[base], middle)
    out[name] = {
      "slope": float(exact[name][0]),
      "intercept": float(exact[name][1]),
      "slope_ratio": interval(slope, slopes),
      "data_ratio": interval(data, data_ratios),
    }
  return out


def interval(value: Any, resamples: np.ndarray) -> dict[str, float | None]:
  """Returns a number with its 95 % percentile interval; None where it is not finite.

  A resample without a number counts as the lowest for the lower limit, and as the highest for the
  upper limit.
  """
  ends = (np.nan_to_num(resamples, nan=x, posinf=np.inf, neginf=-np.inf) for x in (-np.inf, np.inf))
  limits = [np.percentile(each, q, method="nearest") for each, q in zip(ends, PERCENT)]
  numbers = {"value": value, "low": limits[0], "high": limits[1]}
  return {key: float(x) if np.isfinite(x) else None for key, x in numbers.items()}
