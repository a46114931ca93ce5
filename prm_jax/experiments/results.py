"""The results of an experiment, the content of its JSON file; and the text of numbers in tables."""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from prm_jax.evaluation import reranking
from prm_jax.experiments import intervals


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
    return [self.caption, *(f"  {row}".rstrip() for row in rows)]


@dataclasses.dataclass(frozen=True)
class Results:
  """The results of all seeds: S seeds, P test problems each, K values of N."""

  experiment: str
  scale: str
  plan: dict[str, Any]
  seeds: list[int]
  info: list[dict[str, Any]]  # [S] of `Study.problems`
  runs: list[dict[str, Any]]  # each with its "seed" and its name, "run"

  @property
  def n(self) -> list[int]:
    """Returns the K values of N."""
    return self.info[0]["n"]

  @property
  def crossed(self) -> bool:
    """Returns whether all seeds are tested on the same problems."""
    return len(self.seeds) > 1 and len({each["test_hash"] for each in self.info}) == 1

  def intervals(self, values: np.ndarray) -> dict[str, list]:
    """Returns `intervals.intervals` of `[S, P, K]`; differences of two arms are paired."""
    return intervals.intervals(values, self.crossed)

  def of(self, run: str) -> list[dict[str, Any]]:
    """Returns the results of that name, in the order of the seeds."""
    by_seed = {each["seed"]: each for each in self.runs if each["run"] == run}
    return [by_seed[seed] for seed in self.seeds]

  def accuracy(self, run: str) -> np.ndarray:
    """Returns best-of-N of a run, `[S, P, K]`."""
    return np.array([each["accuracy"] for each in self.of(run)])

  def problems(self, name: str) -> np.ndarray:
    """Returns the accuracy of a baseline, "majority" or "oracle", `[S, P, K]`."""
    return np.array([each[name] for each in self.info])

  def mean(self, run: str, key: str) -> float:
    """Returns the mean of a number over seeds."""
    return float(np.mean([each[key] for each in self.of(run)]))

  def values(self, run: str, key: str) -> list[float]:
    """Returns a number of each seed that has it."""
    return [each[key] for each in self.of(run) if each.get(key) is not None]

  def has(self, run: str, key: str) -> bool:
    return all(each.get(key) is not None for each in self.of(run))

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
    curves = [self.accuracy(name)[:, :, -1] for name in names]
    curves.append(self.problems("majority")[:, :, -1])
    return {
      key: {
        "problems": len(places),
        "accuracy": [float(np.mean([curve[place] for place in places])) for curve in curves],
      }
      for key, places in sorted(groups.items())
    }


def percent(curve: dict[str, list], sign: bool = False, at: int = -1) -> str:
  """Returns a mean in % with its interval, as "81.2 (78.0 to 84.1)"."""
  form = "+.1f" if sign else ".1f"
  mean, low, high = (format(100 * curve[key][at], form) for key in ("mean", "low", "high"))
  return f"{mean} ({low} to {high})"


def ratio(interval: dict[str, float | None], digits: int = 2, scale: float = 1) -> str:
  """Returns a value of `intervals.interval` as "1.23 (1.04 to none)"."""
  value, low, high = (
    "none" if interval[key] is None else f"{scale * interval[key]:.{digits}f}"
    for key in ("value", "low", "high")
  )
  return f"{value} ({low} to {high})"


def mean(values: Iterable[float | None]) -> float | None:
  """Returns the mean of the values that are not None; None if there are none."""
  known = [value for value in values if value is not None]
  return float(np.mean(known)) if known else None


def percentage(values: Iterable[float | None]) -> str:
  """Returns `mean` of the values in %, or "none"."""
  average = mean(values)
  return "none" if average is None else f"{100 * average:.1f}"
