"""The data of an experiment: a pool of solutions to label, and candidates of test problems.

Both come from the embedded domain or from files of candidates, and are used in the same way.
"""

import collections
import dataclasses
import itertools
import pathlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from prm_jax.datasets import arithmetic
from prm_jax.evaluation.answers.normal_form import normal_form
from prm_jax.runtime import json_lines
from prm_jax.scoring import candidates
from prm_jax.supervision import synthetic
from prm_jax.types import StepTree


@dataclasses.dataclass(frozen=True)
class Solution:
  steps: tuple[str, ...]
  correct: bool  # the final answer is right
  answer: str | None  # equal answers vote together; None: no answer, never picked
  ratings: tuple[int, ...] | None = None  # the exact rating of every step, if known

  @property
  def right_until_error(self) -> list[bool]:
    """Returns whether each step is right, up to the first that is wrong; nothing if unknown."""
    right = [rating >= 0 for rating in self.ratings or ()]
    return right[: right.index(False) + 1] if False in right else right


@dataclasses.dataclass(frozen=True)
class Problem:
  text: str
  level: str | None
  solutions: tuple[Solution, ...]  # distinct by their steps
  samples: tuple[int, ...]  # [M] index of each sample's solution

  @property
  def times(self) -> np.ndarray:
    """Returns the number of samples of each solution, `[solutions]`."""
    return np.bincount(self.samples, minlength=len(self.solutions))


@dataclasses.dataclass(frozen=True)
class Task:
  pool: tuple[Problem, ...]  # to choose from, to label and to train on
  test: tuple[Problem, ...]  # other problems


def problem(text: str, level: Any, samples: Iterable[Solution]) -> Problem:
  """Returns a problem with its samples; those with equal steps share the first one's solution."""
  distinct: dict[tuple[str, ...], int] = {}
  kept, order = [], []
  for sample in samples:
    if sample.steps not in distinct:
      distinct[sample.steps] = len(kept)
      kept.append(sample)
    order.append(distinct[sample.steps])
  return Problem(text, None if level is None else str(level), tuple(kept), tuple(order))


@dataclasses.dataclass(frozen=True)
class Embedded:
  """Sizes of a task of the embedded domain."""

  pool_problems: int = 400
  pool_samples: int = 500  # as many as of a test problem: the paper's selector scores 1,000
  test_problems: int = 100
  test_samples: int = 500

  def task(self, seed: int, setting: arithmetic.Setting) -> Task:
    """Returns the problems and solutions of one seed; no problem is in both parts."""
    stream = arithmetic.distinct_problems(seed, self.test_problems + self.pool_problems, setting)
    rng = np.random.default_rng([seed, *b"task"])
    test = [sampled(next(stream), self.test_samples, rng) for _ in range(self.test_problems)]
    return Task(tuple(sampled(each, self.pool_samples, rng) for each in stream), tuple(test))


def sampled(exercise: arithmetic.Problem, count: int, rng: np.random.Generator) -> Problem:
  """Returns a problem of the embedded domain with samples of its solver."""
  answer, drawn = exercise.answer, (arithmetic.solve(exercise, rng) for _ in range(count))
  samples = [Solution(x.steps, x.answer == answer, str(x.answer), x.ratings) for x in drawn]
  return problem(exercise.text, exercise.level, samples)


def labelled(
  seed: int,
  problems: int,
  setting: arithmetic.Setting,
  objective: str = "process",
  blind: float = 0.0,
) -> list[StepTree]:
  """Returns two solutions of each problem, labelled exactly or by a critic with blind spots.

  Args:
    objective: "process" for ratings up to the first error; "outcome" for whether all steps are
      right.
    blind: share of the critic's blind spots (`believed`); 0: exact labels.
  """
  trees = []
  rng = np.random.default_rng([seed, *b"labelled"])
  for each in arithmetic.distinct_problems(seed, problems, setting):
    for sample in (arithmetic.solve(each, rng), arithmetic.solve(each, rng)):
      ratings = believed(each, sample, blind)
      if objective == "outcome":
        trees.append(synthetic.outcome(each.text, sample.steps, min(ratings) >= 0))
      else:
        trees.append(synthetic.process(each.text, sample.steps, ratings))
  return trees


def believed(
  exercise: arithmetic.Problem, sample: arithmetic.Solution, blind: float
) -> tuple[int, ...]:
  """Returns the ratings of a critic who takes mistakes for right steps at some table entries.

  Args:
    blind: share of the entries, each an operation, its operand and the value before it.
  """

  def sees(state: tuple[int, int, int] | None) -> bool:
    if state is None:
      return True
    clause = exercise.clauses[state[0]]
    entry = f"{clause.operation}{clause.operand} {state[1]}"
    return zlib.crc32(entry.encode()) % 1000 >= 1000 * blind

  pairs = zip(sample.ratings, sample.states)
  return tuple(rating if rating >= 0 or sees(state) else 1 for rating, state in pairs)


class Candidate(msgspec.Struct):
  """The keys of a candidate's record that are read beside `problem` and `steps` or `text`."""

  is_correct: bool | None  # null counts as wrong, as in rerank.py
  finished: bool | None = None  # false: it was cut off, and has no answer
  answer: str | msgspec.UnsetType | None = msgspec.UNSET
  level: str | int | None = None
  labels: list[Annotated[int, msgspec.Meta(ge=-1, le=1)] | None] | None = None  # exact ratings


def read(
  path: str | pathlib.Path, separator: str, problems: int = 0, most: int = 0
) -> list[Problem]:
  """Reads the problems of a file of candidates, one a line.

  A line has `problem`, `steps` or `text`, and the keys of `Candidate`; lines with equal `problem`
  are of one problem.  Records of ProcessBench are candidates too: they have `final_answer_correct`,
  and `label` for the first error.

  Args:
    separator: between the steps of a `text`.
    problems: limit of problems, the first ones; 0: all.
    most: limit of samples of each problem, the first ones; 0: all.

  Raises:
    BadLine: a record lacks a key or has a wrong value.
    OSError: the file cannot be read.
  """
  samples, levels = collections.defaultdict(list), {}
  for where, record in json_lines.records(path):
    text, steps = candidates.solution(record, separator, where)
    candidate = json_lines.convert(_process_bench(record), Candidate, where)
    if candidate.labels is not None and len(candidate.labels) != len(steps):
      raise json_lines.BadLine(f"{where}: {len(candidate.labels)} labels of {len(steps)} steps")
    levels.setdefault(text, candidate.level)
    if candidate.finished is False:
      answer = None
    elif candidate.answer is msgspec.UNSET:
      answer = separator.join(steps)  # votes for itself alone
    else:
      answer = normal_form(candidate.answer or "") or None  # blank is no answer, as in rerank.py
    ratings = _ratings(candidate.labels)
    samples[text].append(Solution(steps, candidate.is_correct is True, answer, ratings))
  kept = itertools.islice(samples.items(), problems or None)
  return [problem(text, levels[text], each[: most or None]) for text, each in kept]


def _ratings(labels: list[int | None] | None) -> tuple[int, ...] | None:
  """Returns the ratings of every step; None if they are not known up to the first error."""
  known = list(itertools.takewhile(lambda label: label is not None, labels or ()))
  if -1 in known:
    known += [-1] * (len(labels) - len(known))
  return tuple(known) if known and len(known) == len(labels) else None


def _process_bench(record: dict[str, Any]) -> dict[str, Any]:
  """Returns a record of ProcessBench with the keys of a candidate, and any other unchanged."""
  if "final_answer_correct" not in record or not isinstance(label := record.get("label"), int):
    return record
  steps = len(record.get("steps", ()))
  right = steps if label < 0 else label
  labels = [1] * right + [-1] * (steps - right)
  return record | {"is_correct": record["final_answer_correct"], "labels": labels}


def from_files(pool: Sequence[Problem], test: Sequence[Problem], seed: int) -> Task:
  """Returns the task of candidates from files.

  Without test problems, half of the pool's are held out, the same half for all seeds.  The pool
  leaves out test problems, and solutions without an answer, on which selection and outcomes depend.
  The seed sets the order of the pool's samples.

  Raises:
    ValueError: no problem is left in one of the parts.
  """
  if not test:
    order = np.random.default_rng(0).permutation(len(pool))
    test = [pool[i] for i in sorted(order[: len(pool) // 2])]
  held_out = {each.text for each in test}
  rng = np.random.default_rng([seed, *b"pool"])
  kept = []
  for each in pool:
    if each.text not in held_out:
      samples = (each.solutions[i] for i in rng.permutation(each.samples))
      if answers := [x for x in samples if x.answer is not None]:
        kept.append(problem(each.text, each.level, answers))
  if not kept or not test:
    raise ValueError(f"{len(kept)} problems to train on, {len(test)} to test on: expected both")
  return Task(tuple(kept), tuple(test))
