"""Chooses solutions of a scored file for people to label."""

import collections
import pathlib
from collections.abc import Iterable

import msgspec
import numpy as np

from prm_jax.evaluation import candidate_table
from prm_jax.evaluation.step_scores import ScoredSteps
from prm_jax.runtime import json_lines
from prm_jax.supervision import active
from prm_jax.supervision.label_requests import Item, Steps

Solution = tuple[str, tuple[str, ...]]  # problem and steps


class Scored(ScoredSteps, kw_only=True):
  """The keys of a scored line that selection reads."""

  problem: json_lines.Text
  steps: Steps
  is_correct: bool | None  # None: undecided, counts as wrong
  rating_probs: candidate_table.Ratings
  finished: bool | None = None

  def __post_init__(self):
    self.check(self.steps)


def choose(
  path: pathlib.Path,
  rule: str,
  count: int,
  seed: int,
  globally: bool = False,
  labelled: Iterable[Item] = (),
  neutral: str = "positive",
) -> list[Item]:
  """Chooses solutions of a scored file by `active.select`, except those in `labelled`.

  Leaves out solutions that were cut off and not scored (score.py --skip_cut_off).

  Args:
    neutral: how the neutral class counts in P(right), "positive" or "negative".

  Raises:
    BadLine: a line has no `is_correct`, no scores, or scores that are not probabilities.
    ValueError: the rule is "uncertain" and the file has no `step_std`, which only ensembles write.
  """
  done = {(item.problem, tuple(item.steps)) for item in labelled}
  times: collections.Counter[Solution] = collections.Counter()
  lines: dict[Solution, Scored] = {}
  numbers: dict[str, int] = {}  # of problems
  for where, record in json_lines.records(path):
    if record.get("finished") is False and "rating_probs" not in record:
      continue
    line = json_lines.convert(record, Scored, where)
    solution = line.problem, tuple(line.steps)
    if solution in done:
      continue
    times[solution] += 1
    lines.setdefault(solution, line)
    numbers.setdefault(line.problem, len(numbers))
    if rule == "uncertain" and line.step_std is None:
      raise ValueError(f"{where}: no step_std: --rule=uncertain needs an ensemble (loss.heads)")
  pool = active.Pool(
    problems=np.array([numbers[problem] for problem, _ in lines]),
    correct=np.array([bool(line.is_correct) for line in lines.values()]),
    steps=[steps for _, steps in lines],
    times=np.array([times[solution] for solution in lines]),
    right=[_heads(line, neutral) for line in lines.values()],
  )
  scored, items = list(lines.values()), []
  for i in active.select(pool, rule, count, seed, not globally):
    line, about = scored[i], {"rule": rule, "score": float(np.exp(pool.scores[i]))}
    items.append(Item(line.problem, line.steps, is_correct=line.is_correct, about=about))
  return items


def _heads(line: Scored, neutral: str) -> np.ndarray:
  """Returns P(right) of each step as two heads with the ensemble's mean and deviation."""
  probs = np.array([msgspec.structs.astuple(each) for each in line.rating_probs])
  right = 1 - probs[:, : 1 + (neutral == "negative")].sum(1) / probs.sum(1)
  spread = np.zeros(len(right)) if line.step_std is None else np.array(line.step_std)
  return np.stack([right - spread, right + spread], axis=1)
