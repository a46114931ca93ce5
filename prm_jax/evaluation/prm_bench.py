"""PRMBench: step decisions against fine-grained errors, as upstream computes them.

Upstream is mr_eval/tasks/prmtest_classified/task.py of github.com/ssmisya/PRMBench.  A step that
scores above the threshold is decided right.  TP, FP, TN and FN count steps; right is positive.  The
totals count the steps of all classes except the original solutions ("correct").  The PRM-Score
(`get_prmscore_from_current_res_dict` in upstream's notebooks) is the mean of the F1 of right steps
and the F1 of wrong steps; for `multi_solutions`, where all steps are right, it is the F1 of right
steps.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from prm_jax.datasets.prm_bench import Line
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

CORRECT = "correct"  # class of the original solutions
WITH_ORIGINAL = "redundency"  # upstream takes original solutions from this class, and spells it so
ALL_RIGHT = "multi_solutions"
MEASURES = ("f1", "negative_f1", "accuracy", "first_error_accuracy", "prm_score")


def solutions(
  records: Iterable[tuple[str, dict[str, Any]]], neutral: str | None
) -> Iterator[Labelled]:
  """Yields the solutions that upstream judges, with arguments and errors as `process_bench` has.

  Each line yields its modified solution.  A line of the class with redundant steps first yields its
  original solution as a correct one; where scores are read, it does so only if it has
  `original_rating_probs` or `original_step_scores`.  Of lines with the same class and idx, only the
  first is used.
  """
  seen = set()
  for where, record in records:
    line = json_lines.convert(record, Line, where)
    wrong = [step - 1 for step in line.error_steps]
    parts = [(line.classification, line.modified_question, line.modified_process, wrong, record)]
    if line.classification == WITH_ORIGINAL:
      names = {f"original_{key}": key for key in ("rating_probs", "step_scores")}
      scores = {key: record[name] for name, key in names.items() if name in record}
      parts.insert(0, (CORRECT, line.original_question, line.original_process, [], scores))
    for group, problem, steps, wrong, scores in parts:
      if (name := f"{group}_{line.idx}") in seen:
        continue
      seen.add(name)
      labels = [-1 if i in wrong else 1 for i in range(len(steps))]
      solution = Labelled(name, group, problem, steps, labels, cluster=line.idx)
      if neutral is None:
        yield solution
      elif scores:
        yield from_record(solution, scores, where, neutral)


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
  same of `total`.  An undefined measure is None; upstream has -1.  F1 is 0 if no decision of its
  kind is right; upstream has -1 if precision and recall are both 0.
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
