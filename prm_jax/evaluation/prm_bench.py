"""PRMBench: step decisions against fine-grained errors, as upstream computes them.

Upstream is mr_eval/tasks/prmtest_classified/task.py of github.com/ssmisya/PRMBench.  A step that
scores above the threshold is decided right.  TP, FP, TN and FN count steps; right is positive.  The
totals are over the steps of all classes but the original solutions ("correct").  The PRM-Score
(`get_prmscore_from_current_res_dict` in upstream's notebooks) is the mean of the F1 of right steps
and the F1 of wrong steps; for `multi_solutions`, where all steps are right, it is the F1 of right
steps.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from prm_jax.datasets import prm_bench
from prm_jax.evaluation.judged import (
  Judged,
  Labelled,
  by_group,
  from_record,
  problem_weights,
  with_intervals,
)
from prm_jax.evaluation.process_bench import interval
from prm_jax.runtime import json_lines

CORRECT = "correct"
ALL_RIGHT = "multi_solutions"
MEASURES = ("f1", "negative_f1", "accuracy", "first_error_accuracy", "prm_score")


def labelled(solution: prm_bench.Solution) -> Labelled:
  """Labels every step as right or wrong."""
  labels = [-1 if i in solution.wrong else 1 for i in range(len(solution.steps))]
  about = (solution.id, solution.classification, solution.problem, solution.steps, labels)
  return Labelled(*about, cluster=solution.idx)


def read(directory: str | pathlib.Path) -> list[Labelled]:
  """Returns the solutions of all classes."""
  return [labelled(solution) for solution in prm_bench.read(directory)]


def scored(path: str | pathlib.Path, neutral: str) -> Iterator[Judged]:
  """Yields the solutions of a file: lines of PRMBench with scores of `modified_process`'s steps.

  A line with `original_rating_probs` or `original_step_scores` also gives its original solution, as
  in `read`.

  Raises:
    BadLine: a line lacks a key, or has a number of scores that is not the number of steps.
  """
  rows = (
    ((where, record), json_lines.convert(record, prm_bench.Line, where))
    for where, record in json_lines.records(path)
  )
  for (where, record), solution in prm_bench.solutions(rows):
    if solution.classification == CORRECT:
      of_original = {
        key: record[f"original_{key}"]
        for key in ("rating_probs", "step_scores")
        if f"original_{key}" in record
      }
      if not of_original:
        continue
      record = of_original
    yield from_record(labelled(solution), record, where, neutral)


def decisions(judged: Sequence[Judged], threshold: float) -> np.ndarray:
  """Returns six numbers of each solution `[n, 6]`.

  They are TP, FP, TN, FN; whether its first error is found; and whether it has an error.
  """
  rows = []
  for each in judged:
    right, positive = np.array(each.labels) == 1, each.scores > threshold
    error = each.first_error
    counts = [positive & right, positive & ~right, ~positive & ~right, ~positive & right]
    rows.append([*(x.sum() for x in counts), error >= 0 and not positive[error], error >= 0])
  return np.array(rows, float)


def step_differences(judged: Sequence[Judged]) -> list[Judged]:
  """Subtracts the previous step's score from each step's, as PRMBench does for Skywork's models."""
  return [dataclasses.replace(each, scores=np.diff(each.scores, prepend=0)) for each in judged]


def classes(judged: Sequence[Judged]) -> dict[str, np.ndarray]:
  """Returns `by_group` with the original solutions last, and all others as "total"."""
  masks = by_group(judged)
  correct = masks.pop(CORRECT, np.zeros(len(judged), bool))
  return masks | ({CORRECT: correct} if correct.any() else {}) | {"total": ~correct}


def measures(judged: Sequence[Judged], threshold: float) -> dict[str, np.ndarray]:
  """Returns "CLASS/f1" and the like, and the same of "total", by row of `problem_weights`."""
  weights, columns, out = problem_weights(judged), decisions(judged, threshold), {}
  groups = classes(judged)
  all_right = {ALL_RIGHT} if groups.keys() - {CORRECT, "total", ALL_RIGHT} else {ALL_RIGHT, "total"}
  for group, members in groups.items():
    tp, fp, tn, fn, found, errors = (weights[:, members] @ columns[members]).T
    with np.errstate(invalid="ignore", divide="ignore"):
      f1, negative = 2 * tp / (2 * tp + fp + fn), 2 * tn / (2 * tn + fn + fp)
      accuracy, first = (tp + tn) / (tp + fp + tn + fn), found / errors
    score = f1 if group in all_right else (f1 + negative) / 2 * (np.nan if group == CORRECT else 1)
    values = zip(MEASURES, (f1, negative, accuracy, first, score))
    out |= {f"{group}/{name}": value for name, value in values}
  return out


def evaluate(judged: Sequence[Judged], threshold: float) -> dict[str, Any]:
  """Returns the benchmark's numbers by class, as fractions, with intervals over problems.

  `classes: {NAME: {n, steps, f1, negative_f1, accuracy, first_error_accuracy, prm_score}}`, and the
  same of `total`.  An undefined measure is None, where upstream has -1; F1 is 0 if
  no decision of its kind is right, where upstream has -1 if precision and recall are both 0.
  """
  intervals = with_intervals(measures(judged, threshold))
  steps, out = np.array([len(each.labels) for each in judged]), {}
  for group, members in classes(judged).items():
    values = {name: intervals[f"{group}/{name}"]["value"] for name in MEASURES}
    out[group] = {"n": int(members.sum()), "steps": int(steps[members].sum())} | values
  return {"classes": out, "total": out.pop("total"), "intervals": intervals}


def table(result: dict[str, Any]) -> list[str]:
  """Returns the result as lines for a terminal, in percent."""
  heads = ("F1", "negative", "accuracy", "1st error", "PRM-Score")
  lines = [f"{'':22}{'n':>6}" + "".join(f"{head:>11}" for head in heads) + "   95 % interval"]
  cell = lambda x: f"{'n/a':>11}" if x is None else f"{100 * x:11.1f}"
  for name, part in (result["classes"] | {"total": result["total"]}).items():
    line = f"{name:22}{part['n']:6,}" + "".join(cell(part[measure]) for measure in MEASURES)
    lines.append(line + interval(result["intervals"][f"{name}/prm_score"]))
  return lines
