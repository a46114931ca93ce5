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
from prm_jax.evaluation.judged import Judged, Labelled, from_record, problem_weights, with_intervals
from prm_jax.evaluation.process_bench import interval
from prm_jax.runtime import json_lines

CORRECT = "correct"
ALL_RIGHT = "multi_solutions"
MEASURES = ("f1", "negative_f1", "accuracy", "first_error_accuracy", "prm_score")


def labelled(solution: prm_bench.Solution) -> Labelled:
  """Every step has a label."""
  labels = [-1 if i in solution.wrong else 1 for i in range(len(solution.steps))]
  return Labelled(solution.id, solution.classification, solution.problem, solution.steps, labels)


def read(directory: str | pathlib.Path, split: str = "") -> list[Labelled]:
  """The solutions of all classes, or of the one named `split`."""
  found = [labelled(solution) for solution in prm_bench.read(directory)]
  return [each for each in found if split in ("", each.group)]


def scored(path: str | pathlib.Path, neutral: str) -> Iterator[Judged]:
  """The solutions of a file of PRMBench's lines with `rating_probs`, of `modified_process`.

  Lines with `original_rating_probs` also give their original solution, as `read` does.

  Raises:
    BadLine: a line is none, or has other steps than probabilities.
  """
  records = {}

  def rows():
    for where, record in json_lines.records(path):
      line = json_lines.convert(record, prm_bench.Line, where)
      records[id(line)] = where, record, line  # kept, so that the id stays its own
      yield line

  for line, solution in prm_bench.solutions(rows()):
    where, record, _ = records[id(line)]
    if solution.classification == CORRECT:
      if "original_rating_probs" not in record:
        continue
      record = {"rating_probs": record["original_rating_probs"]}
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


def measures(judged: Sequence[Judged], threshold: float, weights: np.ndarray) -> dict:
  """ "CLASS/f1" and the like, and "total/..." over all classes but "correct", by row of weights."""
  columns, out = decisions(judged, threshold), {}
  groups = np.array([each.group for each in judged])
  for group in [*dict.fromkeys(groups.tolist()), "total"]:
    members = groups != CORRECT if group == "total" else groups == group
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
  names = sorted(dict.fromkeys(each.group for each in judged), key=lambda name: name == CORRECT)
  classes = {}
  for group in [*names, "total"]:
    members = [x for x in judged if (x.group != CORRECT if group == "total" else x.group == group)]
    values = {name: found[f"{group}/{name}"]["value"] for name in MEASURES}
    size = {"n": len(members), "steps": sum(len(each.labels) for each in members)}
    classes[group] = size | values
  return {"classes": classes, "total": classes.pop("total"), "intervals": found}


def table(result: dict[str, Any]) -> list[str]:
  """Lines for a terminal, in percent."""
  heads = ("F1", "negative", "accuracy", "1st error", "PRM-Score")
  lines = [f"{'':22}{'n':>6}" + "".join(f"{head:>11}" for head in heads) + "   95 % interval"]
  cell = lambda x: f"{'-':>11}" if x is None else f"{100 * x:11.1f}"
  for name, part in (result["classes"] | {"total": result["total"]}).items():
    line = f"{name:22}{part['n']:6,}" + "".join(cell(part[measure]) for measure in MEASURES)
    lines.append(line + interval(result["intervals"][f"{name}/prm_score"]))
  return lines
