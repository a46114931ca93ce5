"""The results of an experiment, their intervals over seeds and problems, and tables of them.

An array `[S, P, ...]` holds results of S seeds on P test problems each.  A bootstrap resample draws
seeds, and within each of them problems, with replacement (once for all seeds that share the test).
The 95 % percentile interval thus covers the noise of data, training and test problems.  Arms of a
seed share problems, so their differences are resampled together.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from prm_jax.aggregation.intervals import PERCENT, interval
from prm_jax.evaluation import reranking
from prm_jax.runtime.json_lines import printable

RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Table:
  caption: str
  header: Sequence[str]
  rows: Sequence[Sequence[str]]

  def lines(self) -> list[str]:
    """Returns the caption and the aligned rows, for a terminal."""
    columns = [*itertools.zip_longest(self.header, *self.rows, fillvalue="")]
    widths = [max(map(len, column)) for column in columns]
    rows = ("  ".join(map(str.ljust, row, widths)) for row in zip(*columns))
    return [self.caption, *(f"  {printable(row)}".rstrip() for row in rows)]


@dataclasses.dataclass(frozen=True)
class Results:
  """The results of all seeds: S seeds, P test problems each, K values of N."""

  experiment: str
  scale: str
  plan: dict[str, Any]
  seeds: list[int]
  info: list[dict[str, Any]]  # [S] of `models.problems_of`
  runs: list[dict[str, Any]]  # each with its "seed" and its name, "run"

  @property
  def n(self) -> list[int]:
    """Returns the K values of N."""
    return self.info[0]["n"]

  def at(self, *n: int) -> list[int]:
    """Returns the indices of the given N, as far as they exist, and of the largest N."""
    return [k for k, each in enumerate(self.n) if each in (*n, self.n[-1])]

  @property
  def crossed(self) -> bool:
    """Returns whether all seeds are tested on the same problems."""
    return len(self.seeds) > 1 and len({each["test_hash"] for each in self.info}) == 1

  def intervals(self, values: np.ndarray) -> dict[str, list]:
    """Returns the mean of `[S, P, K]` and its interval; differences of two arms are paired."""
    return interval(means(values, self.crossed))

  def of(self, run: str) -> list[dict[str, Any]]:
    """Returns a run's result of each seed, in the order of the seeds."""
    by_seed = {each["seed"]: each for each in self.runs if each["run"] == run}
    return [by_seed[seed] for seed in self.seeds]

  def accuracy(self, run: str) -> np.ndarray:
    """Returns best-of-N of a run, or accuracy of "majority", `[S, P, K]`."""
    if run == "majority":
      return np.array([each[run] for each in self.info])
    return np.array([each["accuracy"] for each in self.of(run)])

  def curve(self, run: str) -> dict[str, list]:
    """Returns the `intervals` of a run's accuracy."""
    return self.intervals(self.accuracy(run))

  def minus(self, a: str, b: str) -> dict[str, list]:
    """Returns the `intervals` of the difference of two runs."""
    return self.intervals(self.accuracy(a) - self.accuracy(b))

  def mean(self, run: str, key: str) -> float | None:
    """Returns the mean of a key's number over the seeds that have it."""
    return mean(each.get(key) for each in self.of(run))

  def labels(self, run: str) -> dict[str, int]:
    """Returns the number of labels by value, over all seeds."""
    total = collections.Counter()
    for each in self.of(run):
      total.update(each["labels"])
    return dict(total)

  def breakdown(self, names: Sequence[str], kind: str) -> dict[str, dict[str, Any]]:
    """Returns best-of-N at the largest N of each run, and of voting, by "level" or "difficulty".

    Difficulty is the fifth of a seed's problems by the share of their samples that is right, 1 the
    easiest (paper appendix G).  The problems of all seeds are pooled.
    """
    groups = collections.defaultdict(list)
    for s, info in enumerate(self.info):
      if kind == "difficulty":
        for fifth, members in reranking.by_difficulty(np.array(info["pass_rate"])).items():
          groups[fifth] += [(s, p) for p in members.tolist()]
      else:
        for p, level in enumerate(info["level"]):
          if level is not None:
            groups[level].append((s, p))
    curves = [self.accuracy(name)[:, :, -1] for name in (*names, "majority")]
    return {
      key: {
        "problems": len(places),
        "accuracy": [float(np.mean([curve[place] for place in places])) for curve in curves],
      }
      for key, places in sorted(groups.items(), key=lambda item: (len(item[0]), item[0]))
    }


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


def ratio_interval(ratios: np.ndarray) -> dict[str, list[float | None]]:
  """Returns the first of `[1 + R]` ratios and the interval of the others, as `interval` does.

  A resample without a number counts as the lowest for the lower limit, and as the highest for the
  upper limit.  What is not finite is None.
  """
  ends = (
    np.nan_to_num(ratios[1:], nan=x, posinf=np.inf, neginf=-np.inf) for x in (-np.inf, np.inf)
  )
  limits = [np.percentile(each, q, method="nearest") for each, q in zip(ends, PERCENT)]
  numbers = {"mean": ratios[0], "low": limits[0], "high": limits[1]}
  return {key: [float(x) if np.isfinite(x) else None] for key, x in numbers.items()}


def percent(
  curve: dict[str, list], sign: bool = False, at: int = -1, scale: float = 100, digits: int = 1
) -> str:
  """Returns a value with its interval, times `scale`, as "81.2 (78.0 to 84.1)"; "-" if absent."""
  if curve["mean"][at] is None:
    return "-"
  values = (curve[key][at] for key in ("mean", "low", "high"))
  mean, low, high = (number(x, digits, scale, "none", "+" if sign else "") for x in values)
  return f"{mean} ({low} to {high})"


def over_n(
  labels: Mapping[Any, str], curve: Callable[[Any], dict], at: Iterable[int], sign: bool = False
) -> list[list[str]]:
  """Returns a row for each label: the values of its curve at these indices of N."""
  curves = ((label, curve(name)) for name, label in labels.items())
  return [[label, *(percent(each, sign, k) for k in at)] for label, each in curves]


def number(
  value: float | None, digits: int = 3, scale: float = 1, missing: str = "", sign: str = ""
) -> str:
  return missing if value is None else f"{scale * value:{sign}z.{digits}f}"


def mean(values: Iterable[float | None]) -> float | None:
  """Returns the mean of the values that are not None; None if there are none."""
  known = [value for value in values if value is not None]
  return float(np.mean(known)) if known else None
