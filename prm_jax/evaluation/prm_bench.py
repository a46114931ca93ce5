"""PRMBench: step decisions against fine-grained errors, as upstream computes them.

mr_eval/tasks/prmtest_classified/task.py of github.com/ssmisya/PRMBench: a step scoring above the
threshold is decided right.  TP, FP, TN and FN count steps, "positive" being right.  The totals are
over the steps of all classes but the original solutions ("correct").  The PRM-Score (its notebooks'
`get_prmscore_from_current_res_dict`) is the mean of the F1 of right and of wrong steps; of
`multi_solutions`, where all steps are right, the former alone.
"""

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
  """Every step has a label."""
  labels = [-1 if i in solution.wrong else 1 for i in range(len(solution.steps))]
  return Labelled(solution.id, solution.classification, solution.problem, solution.steps, labels)


def read(directory: str | pathlib.Path) -> list[Labelled]:
  """The solutions of all classes."""
  return [labelled(solution) for solution in prm_bench.read(directory)]


def scored(path: str | pathlib.Path, neutral: str) -> Iterator[Judged]:
  """The solutions of a file of PRMBench's lines with scores of the steps of `modified_process`.

  Lines with `original_rating_probs` or `original_step_scores` also give their original solution, as
  `read` does.

  Raises:
    BadLine: a line is none, or has other steps than probabilities.
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
  """Of each solution: TP, FP, TN, FN; is its first error found, and has it one; `[n, 6]`."""
  rows = []
  for each in judged:
    right, said = np.array(each.labels) == 1, each.scores > threshold
    error = each.first_error
    counts = [said & right, said & ~right, ~said & ~right, ~said & right]
    rows.append([*(x.sum() for x in counts), error >= 0 and not said[error], error >= 0])
  return np.array(rows, float)


def step_differences(judged: Sequence[Judged]) -> list[Judged]:
  """Each step's score less that of the step before, as PRMBench reads Skywork's models."""
  values = lambda each: np.concatenate([each.scores[:1], np.diff(each.scores)])
  return [Judged(**vars(each) | {"scores": values(each)}) for each in judged]


def classes(judged: Sequence[Judged]) -> dict[str, np.ndarray]:
  """`by_group` with the original solutions last, and all others as "total"."""
  found = by_group(judged)
  correct = found.pop(CORRECT, np.zeros(len(judged), bool))
  return found | ({CORRECT: correct} if correct.any() else {}) | {"total": ~correct}


def measures(judged: Sequence[Judged], threshold: float, weights: np.ndarray) -> dict:
  """ "CLASS/f1" and the like, and "total/..." over all classes but "correct", by row of weights."""
  columns, out = decisions(judged, threshold), {}
  for group, members in classes(judged).items():
    tp, fp, tn, fn, found, errors = (weights[:, members] @ columns[members]).T
    with np.errstate(invalid="ignore", divide="ignore"):
      f1, negative = 2 * tp / (2 * tp + fp + fn), 2 * tn / (2 * tn + fn + fp)
      accuracy, first = (tp + tn) / (tp + fp + tn + fn), found / errors
    score = f1 if group == ALL_RIGHT else (f1 + negative) / 2 * (np.nan if group == CORRECT else 1)
    values = zip(MEASURES, (f1, negative, accuracy, first, score))
    out |= {f"{group}/{name}": value for name, value in values}
  return out


def evaluate(judged: Sequence[Judged], threshold: float) -> dict[str, Any]:
  """The benchmark's numbers by class, as fractions, with intervals over problems.

  `classes: {NAME: {n, steps, f1, negative_f1, accuracy, first_error_accuracy, prm_score}}`, and the
  same of `total`.  A measure without anything to measure is None, where upstream has -1.
  """
  found = with_intervals(measures(judged, threshold, problem_weights(judged)))
  steps, out = np.array([len(each.labels) for each in judged]), {}
  for group, members in classes(judged).items():
    values = {name: found[f"{group}/{name}"]["value"] for name in MEASURES}
    out[group] = {"n": int(members.sum()), "steps": int(steps[members].sum())} | values
  return {"classes": out, "total": out.pop("total"), "intervals": found}


def table(result: dict[str, Any]) -> list[str]:
  """Lines for a terminal, in percent."""
  heads = ("F1", "negative", "accuracy", "1st error", "PRM-Score")
  lines = [f"{'':22}{'n':>6}" + "".join(f"{head:>11}" for head in heads) + "   95 % interval"]
  cell = lambda x: f"{'-':>11}" if x is None else f"{100 * x:11.1f}"
  for name, part in (result["classes"] | {"total": result["total"]}).items():
    line = f"{name:22}{part['n']:6,}" + "".join(cell(part[measure]) for measure in MEASURES)
    lines.append(line + interval(result["intervals"][f"{name}/prm_score"]))
  return lines
