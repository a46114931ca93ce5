"""Solutions whose steps are labelled, and what a model says of them.

All step benchmarks are judged from a list of `Judged`, whether a model has just read the solutions
or somebody's scores come from a file.
"""

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from prm_jax.aggregation.intervals import resample_counts
from prm_jax.runtime import json_lines
from prm_jax.runtime.progress import Progress
from prm_jax.scoring.scorer import Scorer
from prm_jax.types import CLASSES, RATINGS, RIGHT_RATINGS, problem_key

RESAMPLES = 2_000
LEVEL = 0.95  # of intervals


@dataclasses.dataclass(frozen=True)
class Labelled:
  """A solution of a benchmark, with S steps."""

  id: str
  group: str  # subset or class of error, by which results are broken down
  problem: str
  steps: Sequence[str]
  labels: Sequence[int | None]  # 1 right, 0 neutral, -1 wrong; None: not labelled
  answer_is_right: bool | None = None
  parents: Sequence[int] | None = None  # of the steps of a tree, as in `StepTree`; None: a chain

  @property
  def depths(self) -> list[int]:
    """Of each step, from 0."""
    depths = []
    for i in range(len(self.labels)):
      parent = i - 1 if self.parents is None else self.parents[i]
      depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths

  def paths(self) -> list[list[int]]:
    """The indices of the steps from the problem to each leaf."""
    count = len(self.labels)
    if self.parents is None:
      return [[*range(count)]]
    out = []
    for leaf in sorted({*range(count)} - {*self.parents}):
      path = [leaf]
      while self.parents[path[-1]] >= 0:
        path.append(self.parents[path[-1]])
      out.append(path[::-1])
    return out

  @property
  def first_error(self) -> int:
    """Index of the first wrong step; -1: there is none."""
    return first_below([-1 if label == -1 else 1 for label in self.labels], 0)


@dataclasses.dataclass(frozen=True)
class Judged(Labelled):
  """A labelled solution with the probabilities that a model gives its steps."""

  probs: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 3)))  # [S, 3]
  scores: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))  # [S] P(right)
  std: np.ndarray | None = None  # [S] of P(right) over the heads of an ensemble
  verdict: int | None = None  # of a judge: first wrong step, NONE_WRONG or UNDECIDED


def first_below(values: Sequence[float], threshold: float) -> int:
  """Index of the first value below the threshold; -1: none is."""
  return next((i for i, value in enumerate(values) if value < threshold), -1)


def score(scorer: Scorer, solutions: Sequence[Labelled]) -> tuple[list[Judged], dict[str, Any]]:
  """What a process model says of the solutions, and how fast, in tokens per second.

  Raises:
    ValueError: it is an outcome model; or a solution cannot be scored, named by its id.
  """
  contract = scorer.contract
  if contract.objective != "process":
    raise ValueError(f"an {contract.objective} model has no probabilities of steps")
  start, encoded = time.perf_counter(), {}
  for each in solutions:
    for pair in _pairs(each):
      try:
        encoded[pair] = encoded[pair] if pair in encoded else scorer.encode(*pair)
      except ValueError as error:
        raise ValueError(f"{each.id}: {error}") from error
  with Progress(desc="scoring", total=len(solutions), unit="solutions", leave=False) as bar:
    on_share = lambda share: bar.reach(share * len(solutions))
    read = scorer.read([*encoded.values()], [problem for problem, _ in encoded], on_share)
  seconds, by_pair = time.perf_counter() - start, dict(zip(encoded, read))
  columns, judged = [CLASSES["process"].index(name) for name in contract.classes], []
  for solution in solutions:
    heads = np.zeros((len(solution.labels), contract.heads, len(columns)))
    for path, pair in zip(solution.paths(), _pairs(solution)):
      heads[path] = by_pair[pair]
    right = heads[..., contract.right_classes].sum(-1)  # [S, K]
    probs = np.zeros((len(heads), len(RATINGS)))
    probs[:, columns] = heads.mean(1)
    std = right.std(1) if contract.heads > 1 else None
    judged.append(Judged(**vars(solution), probs=probs, scores=right.mean(1), std=std))
  tokens = sum(map(len, encoded.values()))
  speed = {"solutions": len(solutions), "tokens": tokens, "seconds": seconds}
  return judged, speed | {"tokens_per_second": tokens / seconds}


def _pairs(solution: Labelled) -> list[tuple[str, tuple[str, ...]]]:
  """Problem and steps of each path."""
  return [(solution.problem, tuple(solution.steps[i] for i in path)) for path in solution.paths()]


Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Scores(msgspec.Struct):
  """What a scored line has besides the benchmark's own keys: as score.py writes it, or scores."""

  rating_probs: list[dict[str, Probability]] | None = None
  step_scores: list[Probability] | None = None  # P(right), where there are no ratings
  step_std: list[Probability] | None = None


def from_record(
  solution: Labelled, record: dict[str, Any], where: str, neutral: str = "positive"
) -> Judged:
  """The solution with the scores of its line.

  `step_scores` count where there are no `rating_probs`, and are P(1); the rest is P(-1).  Raises
  BadLine if there are neither, or they are not of the solution's steps.
  """
  scores = json_lines.convert(record, Scores, where)
  if scores.rating_probs is None and scores.step_scores is None:
    raise json_lines.BadLine(f"{where}: neither rating_probs nor step_scores")
  count = len(solution.steps)
  for name, values in msgspec.structs.asdict(scores).items():
    if values is not None and len(values) != count:
      raise json_lines.BadLine(f"{where}: {len(values)} {name} of {count} steps")
  if scores.rating_probs is None:
    probs = [[1 - right, 0.0, right] for right in scores.step_scores]
  else:
    probs = [[each.get(name, 0.0) for name in CLASSES["process"]] for each in scores.rating_probs]
  for i, row in enumerate(probs):
    if not 0.99 <= sum(row) <= 1.01:
      values = json_lines.show(scores.rating_probs[i])
      raise json_lines.BadLine(f"{where}: rating_probs[{i}] is {values}: expected a sum of 1")
  probs = np.array(probs)
  right = probs[:, [RATINGS.index(rating) for rating in RIGHT_RATINGS[neutral]]].sum(-1)
  std = None if scores.step_std is None else np.array(scores.step_std)
  return Judged(**vars(solution), probs=probs, scores=right, std=std)


def stored(judged: Sequence[Judged]) -> list[dict[str, Any]]:
  """The solutions as JSON, without their texts: what comparing two models needs."""
  out = []
  for each in judged:
    entry = {"id": each.id, "group": each.group, "problem": short_hash(each.problem)}
    entry |= {"labels": [*each.labels], "answer_is_right": each.answer_is_right}
    entry["rating_probs"] = np.round(each.probs, 9).tolist()
    entry["scores"] = np.round(each.scores, 9).tolist()
    more = {} if each.std is None else {"std": np.round(each.std, 9).tolist()}
    more |= {} if each.verdict is None else {"verdict": each.verdict}
    out.append(entry | more | ({} if each.parents is None else {"parents": [*each.parents]}))
  return out


class Stored(msgspec.Struct):
  """An entry of `stored`."""

  id: str
  group: str
  problem: str
  labels: list[int | None]
  answer_is_right: bool | None
  rating_probs: list[list[Probability]]
  scores: list[float]
  std: list[float] | None = None
  verdict: int | None = None
  parents: list[int] | None = None


def read_stored(entries: Any, where: str) -> list[Judged]:
  """The solutions of a result file, with hashes for problems and no steps."""
  judged = []
  for i, entry in enumerate(entries):
    one = json_lines.convert(entry, Stored, f"{where}: solutions[{i}]")
    arrays = {"probs": np.array(one.rating_probs), "scores": np.array(one.scores)}
    std = None if one.std is None else np.array(one.std)
    about = (one.id, one.group, one.problem, [""] * len(one.labels), one.labels)
    about += (one.answer_is_right, one.parents)
    judged.append(Judged(*about, **arrays, std=std, verdict=one.verdict))
  return judged


def by_group(judged: Sequence[Labelled]) -> dict[str, np.ndarray]:
  """Which solutions are of each group, bool `[n]`, in the order in which groups appear."""
  groups = np.array([each.group for each in judged])
  return {group: groups == group for group in dict.fromkeys(groups.tolist())}


def short_hash(text: str) -> str:
  """A hash of the text of a problem that ignores white space."""
  return hashlib.sha256(problem_key(text).encode()).hexdigest()[:16]


def problem_weights(judged: Sequence[Labelled]) -> np.ndarray:
  """How often each resample of the problems has each solution `[1 + RESAMPLES, n]`.

  The first row is the sample itself, all ones.  Solutions of a problem come and go together.
  """
  names = {name: i for i, name in enumerate(dict.fromkeys(each.problem for each in judged))}
  times = resample_counts(len(names), RESAMPLES)
  return times[:, [names[each.problem] for each in judged]]


def with_intervals(measures: dict[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
  """Value and percentile interval of each measure, given over the rows of `problem_weights`."""
  out = {}
  for name, values in measures.items():
    known = values[1:][np.isfinite(values[1:])]
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(known, (tail, 100 - tail)) if len(known) else (None, None)
    entry = {"value": values[0], "low": low, "high": high}
    ok = lambda x: None if x is None or not np.isfinite(x) else float(x)
    out[name] = {key: ok(value) for key, value in entry.items()}
  return out
