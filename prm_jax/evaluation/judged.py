"""Solutions with labelled steps, and the probabilities that a model gives these steps.

Every step benchmark is computed from a list of `Judged`, whether a model has just scored the
solutions or the scores come from a file.
"""

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from prm_jax.aggregation.intervals import interval, resample_counts
from prm_jax.evaluation.step_scores import ScoredSteps
from prm_jax.runtime import json_lines
from prm_jax.runtime.progress import Progress
from prm_jax.scoring.rater import Solution, SolutionError
from prm_jax.scoring.scorer import Scorer
from prm_jax.types import CLASSES, RATINGS, RIGHT_RATINGS, problem_key

RESAMPLES = 2_000


@dataclasses.dataclass(frozen=True)
class Labelled:
  """A solution of a benchmark, with S steps."""

  id: str
  group: str  # subset or class of error, which results are broken down by
  problem: str
  steps: Sequence[str]
  labels: Sequence[int | None]  # 1 right, 0 neutral, -1 wrong; None: not labelled
  answer_is_right: bool | None = None
  parents: Sequence[int] | None = None  # of each step, as in `StepTree`; None: a chain
  cluster: str = ""  # names the problem if solutions of one problem word it differently

  @property
  def depths(self) -> list[int]:
    """The depth of each step, from 0."""
    depths = []
    for i in range(len(self.labels)):
      parent = i - 1 if self.parents is None else self.parents[i]
      depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths

  def paths(self) -> list[list[int]]:
    """Returns the indices of the steps on the path to each leaf."""
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
    """The index of the first wrong step, or -1."""
    return self.labels.index(-1) if -1 in self.labels else -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged(Labelled):
  """A labelled solution with the probabilities that a model gives its steps."""

  probs: np.ndarray  # [S, 3] of the ratings -1, 0, 1
  scores: np.ndarray  # [S] P(right)
  std: np.ndarray | None = None  # [S] of P(right) over the heads of an ensemble
  verdict: int | None = None  # of a generative judge: first wrong step, NONE_WRONG or UNDECIDED

  def __post_init__(self):
    steps, unit = len(self.labels), (self.probs >= 0) & (self.probs <= 1)
    if unit.shape != (steps, len(RATINGS)) or not unit.all():
      raise ValueError(
        f"probs: expected {len(RATINGS)} numbers from 0 to 1 for each of {steps} steps"
      )
    for name in ("scores", "std"):
      values = getattr(self, name)
      if values is not None and (values.shape != (steps,) or not np.isfinite(values).all()):
        raise ValueError(f"{name}: expected a number for each of {steps} steps")


def first_below(values: Sequence[float], threshold: float) -> int:
  """Returns the index of the first value below the threshold, or -1."""
  return next((i for i, value in enumerate(values) if value < threshold), -1)


def score(scorer: Scorer, solutions: Sequence[Labelled]) -> tuple[list[Judged], dict[str, Any]]:
  """Scores the solutions with a process model; also returns the speed, in tokens per second.

  Raises:
    ValueError: the model is an outcome model; or a solution cannot be scored, or its probabilities
      are not finite (the message names its id).
  """
  contract = scorer.contract
  if contract.objective != "process":
    raise ValueError(f"an {contract.objective} model has no probabilities of steps")
  paths = [(solution, path) for solution in solutions for path in solution.paths()]
  pairs = [(solution.problem, [solution.steps[i] for i in path]) for solution, path in paths]
  start = time.perf_counter()
  read, tokens = rate(scorer, pairs, [solution.id for solution, _ in paths])
  seconds, by_path = time.perf_counter() - start, iter(read)
  columns, judged = [CLASSES["process"].index(name) for name in contract.classes], []
  for solution in solutions:
    heads = np.zeros((len(solution.labels), contract.heads, len(columns)))
    for path in solution.paths():
      heads[path] = next(by_path)
    right = contract.right(heads)  # [S, K]
    probs = np.zeros((len(heads), len(RATINGS)))
    probs[:, columns] = heads.mean(1)
    std = right.std(1) if contract.heads > 1 else None
    judged.append(Judged(**vars(solution), probs=probs, scores=right.mean(1), std=std))
  speed = {"solutions": len(solutions), "tokens": tokens, "seconds": seconds}
  return judged, speed | {"tokens_per_second": tokens / seconds}


def rate(
  scorer: Scorer, solutions: Sequence[Solution], names: Sequence[str]
) -> tuple[list[np.ndarray], int]:
  """Returns `Rater.rate`; a ValueError begins with the name of a solution without scores."""
  with Progress(desc="scoring", total=len(solutions), unit="solutions", leave=False) as bar:
    try:
      return scorer.rate(solutions, lambda share: bar.reach(share * len(solutions)))
    except SolutionError as error:
      raise ValueError(f"{names[error.index]}: {error}") from error


def from_record(
  solution: Labelled, record: dict[str, Any], where: str, neutral: str = "positive"
) -> Judged:
  """Returns the solution with the scores of its line.

  Without `rating_probs`, a step score s gives P(1) = s and P(-1) = 1 - s.

  Raises:
    BadLine: the line has neither key, or not one score for each step.
  """
  # The steps are those of `solution`: a line of another form may use the key for something else.
  scores = json_lines.convert(record | {"steps": []}, ScoredSteps, where)
  scores.check(solution.steps, f"{where}: ")
  if scores.rating_probs is not None:
    probs = [msgspec.structs.astuple(each) for each in scores.rating_probs]
  elif scores.step_scores is not None:
    probs = [(1 - right, 0.0, right) for right in scores.step_scores]
  else:
    raise json_lines.BadLine(f"{where}: neither rating_probs nor step_scores")
  probs = np.array(probs)
  probs /= probs.sum(-1, keepdims=True)  # as `StepContract.right`
  right = probs[:, [RATINGS.index(rating) for rating in RIGHT_RATINGS[neutral]]].sum(-1)
  std = None if scores.step_std is None else np.array(scores.step_std)
  return Judged(**vars(solution), probs=probs, scores=right, std=std)


def stored(judged: Sequence[Judged]) -> list[dict[str, Any]]:
  """Returns the solutions for JSON, without their texts, for the comparison of two models."""
  bare = (dataclasses.replace(x, problem=short_hash(x.problem), steps=()) for x in judged)
  return [msgspec.to_builtins(each, enc_hook=lambda x: x.tolist()) for each in bare]


def by_group(judged: Sequence[Labelled]) -> dict[str, np.ndarray]:
  """Returns a mask of the solutions, bool `[n]`, for each group in order of appearance."""
  groups = np.array([each.group for each in judged])
  return {group: groups == group for group in dict.fromkeys(groups.tolist())}


def short_hash(text: str) -> str:
  """Returns a hash of a problem's text that ignores white space."""
  return hashlib.sha256(problem_key(text).encode()).hexdigest()[:16]


def problem_weights(judged: Sequence[Labelled]) -> np.ndarray:
  """Returns how often each bootstrap resample has each solution `[1 + RESAMPLES, n]`.

  The first row is the sample itself, all ones.  A resampled problem brings all its solutions.
  """
  problems = [each.cluster or each.problem for each in judged]
  index = {problem: i for i, problem in enumerate(dict.fromkeys(problems))}
  return resample_counts(len(index), RESAMPLES)[:, [index[problem] for problem in problems]]


def with_intervals(measures: dict[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
  """Returns value and percentile interval of each measure, given by row of `problem_weights`."""
  found = interval(np.stack([*measures.values()], axis=1))
  return {
    name: dict(zip(("value", "low", "high"), each))
    for name, *each in zip(measures, *found.values())
  }
