"""The results of an experiment: one JSON file, from which figure, tables and page are made."""

import collections
import dataclasses
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
    """The caption, and the rows in columns, for a terminal."""
    rows = [list(self.header), *map(list, self.rows)]
    width = max(map(len, rows))
    rows = [row + [""] * (width - len(row)) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(width)]
    return [self.caption] + [
      "  " + "  ".join(cell.ljust(size) for cell, size in zip(row, widths)).rstrip() for row in rows
    ]


@dataclasses.dataclass(frozen=True)
class Results:
  """What the models of all seeds gave."""

  experiment: str
  scale: str
  plan: dict[str, Any]
  seeds: list[int]
  info: list[dict[str, Any]]  # by seed: `workspace.problems_of`
  runs: list[dict[str, Any]]  # each with its "seed" and its name, "run"

  @property
  def n(self) -> list[int]:
    """The values of N."""
    return self.info[0]["n"]

  @property
  def crossed(self) -> bool:
    """Whether all seeds are tested on the same problems."""
    return len(self.seeds) > 1 and len({each["test_hash"] for each in self.info}) == 1

  def intervals(self, values: np.ndarray) -> dict[str, list]:
    """`intervals.intervals` of `[S, P, K]`; of differences of two arms, it pairs them."""
    return intervals.intervals(values, self.crossed)

  def of(self, run: str) -> list[dict[str, Any]]:
    """The results of that name, in the order of the seeds."""
    found = {each["seed"]: each for each in self.runs if each["run"] == run}
    return [found[seed] for seed in self.seeds]

  def accuracy(self, run: str) -> np.ndarray:
    """`[S, P, K]` best-of-N of a run."""
    return np.array([each["accuracy"] for each in self.of(run)])

  def problems(self, name: str) -> np.ndarray:
    """`[S, P, K]` of a baseline: "majority" or "oracle"."""
    return np.array([each[name] for each in self.info])

  def mean(self, run: str, key: str) -> float:
    """Mean over seeds of a number."""
    return float(np.mean([each[key] for each in self.of(run)]))

  def values(self, run: str, key: str) -> list[float]:
    """A number of each seed, where there is one."""
    return [each[key] for each in self.of(run) if each.get(key) is not None]

  def has(self, run: str, key: str) -> bool:
    return all(each.get(key) is not None for each in self.of(run))

  def labels(self, run: str) -> dict[str, int]:
    """Labels by value, over all seeds."""
    total = collections.Counter()
    for each in self.of(run):
      total.update(each["labels"])
    return dict(total)

  def breakdown(self, names: Sequence[str], kind: str) -> dict[str, dict[str, Any]]:
    """Best-of-N at the largest N of each run, and of voting, by level or by fifth of difficulty.

    Difficulty: fifths of a seed's problems by the share of their samples that is right, 1 the
    easiest (paper appendix G).  The problems of all seeds are together.
    """
    groups = collections.defaultdict(list)
    for s, info in enumerate(self.info):
      if kind == "difficulty":
        of = reranking.by_difficulty(np.array(info["pass_rate"]))
      else:
        known = {level for level in info["level"] if level is not None}
        of = {level: np.flatnonzero(np.array(info["level"]) == level) for level in known}
      for key, members in of.items():
        groups[key] += [(s, p) for p in members.tolist()]
    curves = [self.accuracy(name)[:, :, -1] for name in names]
    curves.append(self.problems("majority")[:, :, -1])
    return {
      key: {
        "problems": len(places),
        "accuracy": [float(np.mean([curve[place] for place in places])) for curve in curves],
      }
      for key, places in sorted(groups.items())
    }


def percent(found: dict[str, list], sign: bool = False, at: int = -1) -> str:
  """A mean with its interval, as "81.2 (78.0 to 84.1)"."""
  form = "+.1f" if sign else ".1f"
  mean, low, high = (format(100 * found[key][at], form) for key in ("mean", "low", "high"))
  return f"{mean} ({low} to {high})"


def mean(values: Iterable[float | None]) -> float | None:
  """The mean of the numbers that are there; None if there are none."""
  known = [value for value in values if value is not None]
  return float(np.mean(known)) if known else None


def percentage(values: Iterable[float | None]) -> str:
  """Their mean in %."""
  found = mean(values)
  return "none" if found is None else f"{100 * found:.1f}"
