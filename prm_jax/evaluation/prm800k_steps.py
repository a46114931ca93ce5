"""PRM800K's test split and other labelled steps: step metrics, and the first wrong step.

The step metrics count every labelled step, alternatives included (`trees`).  The first wrong step
is sought on each solution's own path (`paths`).
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from prm_jax import step_metrics
from prm_jax.datasets import labelled
from prm_jax.datasets.prm800k import recipes
from prm_jax.datasets.prm800k import records as prm800k_records
from prm_jax.datasets.stepwise import records as stepwise_records
from prm_jax.evaluation import diagnostics, first_error, judged
from prm_jax.evaluation.judged import Judged, Labelled, from_record, problem_weights, with_intervals
from prm_jax.runtime import json_lines
from prm_jax.scoring.scorer import Scorer
from prm_jax.types import RATINGS, StepTree

ALL = "all"  # the group of every solution
PAPER = recipes.RECIPES["paper"]
OWN_PATH = recipes.Recipe("own path", alternatives="drop")
OF_STEPS = ("steps", "labels", "parents", "probs", "scores", "std")  # fields with one for each step


def read(directory: str | pathlib.Path, split: str) -> tuple[list[Labelled], list[Labelled]]:
  """Returns the paths and trees of a split of a prepared dataset; none if no step has a label."""
  paths, _ = labelled.step_trees(directory, split, "process", alternatives=False)
  trees, _ = labelled.step_trees(directory, split, "process")
  return [_labelled(x) for x in paths], [_labelled(x) for x in trees]


def _labelled(tree: StepTree) -> Labelled:
  """Rounds soft labels and counts to the likelier of right and wrong; a tie is right."""
  hard = lambda x: (1 if x[1] >= x[0] else -1) if isinstance(x, tuple) else x
  labels = [hard(label) for label in tree.labels]
  return Labelled(tree.source, ALL, tree.problem, tree.steps, labels, tree.outcome, tree.parents)


def scored(path: str | pathlib.Path, neutral: str) -> tuple[list[Judged], list[Judged]]:
  """Returns the paths and trees of a file of labelled lines with probabilities.

  A line has PRM800K's format, with `rating_probs` in each completion; or is `problem`, `steps`,
  `labels` of one `_kind` in the whole file, and `rating_probs` or `step_scores`.

  Raises:
    BadLine: a line has neither form or labels of another kind, or a probability is missing.
    ValueError: there is no labelled step.
  """
  records = [*json_lines.records(path)]
  trees, paths = (solutions(records, neutral, recipe) for recipe in (PAPER, OWN_PATH))
  if not paths:
    raise ValueError(f"{path}: no labelled step")
  return paths, trees


def solutions(
  records: Sequence[tuple[str, dict[str, Any]]],
  neutral: str | None,
  recipe: recipes.Recipe = OWN_PATH,
) -> list[Any]:
  """Returns the solutions of (FILE:LINE, record) pairs that have a label.

  Args:
    neutral: how a neutral step counts in the scores of `Judged`; None: read no scores, and return
      `Labelled`.
    recipe: which lines of PRM800K are dropped, and whether alternatives of steps are included.

  Raises:
    BadLine: as `scored`.
  """
  kind = _kind(records)
  made = (_solution(record, where, recipe, kind, neutral) for where, record in records)
  return [solution for solution in made if solution]


def _kind(records: Sequence[tuple[str, dict[str, Any]]]) -> stepwise_records.Kind:
  """Returns the kind of all labels of plain lines, given as (FILE:LINE, record) pairs.

  Where 0 may mean wrong or neutral, numbers are ratings if all are integers or one is negative, and
  probabilities otherwise.  Raises BadLine if the labels are of several kinds.
  """
  lines = [
    (*stepwise_records.parse(record, where), where)
    for where, record in records
    if "question" not in record
  ]
  values = [x for solution, _, _ in lines for x in solution.labels if x is not None]
  if not values:
    return "binary"
  given = "auto"
  open_to_zero = not any(zero_is_wrong or solution.said for solution, zero_is_wrong, _ in lines)
  if open_to_zero and all(type(x) in (int, float) for x in values):
    given = "ratings" if min(values) < 0 or all(type(x) is int for x in values) else "soft"
    if given == "ratings" and {*values} <= {0, 1} and 0 in values:
      text = "all labels are 0 or 1; 0 counts as neutral.  Write false and true if it means wrong"
      print(f"warning: {lines[0][2]} and others: {text}", file=sys.stderr)
  return stepwise_records.kind_of(lines, given)


def _solution(
  record: dict[str, Any],
  where: str,
  recipe: recipes.Recipe,
  kind: stepwise_records.Kind,
  neutral: str | None,
) -> Labelled | None:
  """Returns a line's solution as `solutions` does, or None.

  Args:
    kind: of the labels of a plain line.
  """
  if "verdicts" in record and neutral is not None:  # the line's scores are read as well
    raise json_lines.BadLine(f"{where}: its labels are those of the judge that gave its scores")
  if "question" not in record:
    parsed, _ = stepwise_records.parse(record, where)
    labelled_steps = [i for i, label in enumerate(parsed.labels) if label is not None]
    if not labelled_steps:
      return None
    solution = _labelled(stepwise_records.tree(stepwise_records.stored(parsed, kind), where))
    end = labelled_steps[-1] + 1  # later steps play no part, as in training
  else:
    parsed = prm800k_records.parse(json.dumps(record).encode(), where)
    dropped = recipes.dropping_rule(parsed, recipe)
    if dropped or not (nodes := recipes.nodes(parsed, recipe)[0]):
      return None
    candidates, parents, labels = zip(*nodes)
    texts = [candidate.text for candidate in candidates]
    problem = parsed.solution.question.problem
    solution = Labelled(where, ALL, problem, texts, labels, None, parents)
    record = {"rating_probs": [candidate.rating_probs or {} for candidate in candidates]}
    end = len(nodes)
  if neutral is not None:
    solution = from_record(solution, record, where, neutral)
  given = {name: vars(solution).get(name) for name in OF_STEPS}
  cut = {name: values[:end] for name, values in given.items() if values is not None}
  return dataclasses.replace(solution, **cut)


def measures(
  paths: Sequence[Judged], threshold: float, trees: Sequence[Judged]
) -> dict[str, np.ndarray]:
  """Returns the measures that have an interval, by row of `problem_weights`.

  For the steps these are AUROC, accuracy, negative log-likelihood and F1 by class; for the first
  wrong step `first_error.MEASURES`.
  """
  steps, weights = diagnostics.steps_of(trees), problem_weights(trees)
  rows, labels, probs = steps["solution"], steps["label"], steps["probs"]
  target = np.searchsorted(RATINGS, labels)
  predicted, likelihood = probs.argmax(1), probs[np.arange(len(target)), target]
  columns = [
    np.ones(len(target)),
    predicted == target,
    -np.log(np.maximum(likelihood, step_metrics.TINY)),
  ]
  for c in range(len(RATINGS)):
    columns += [(predicted == c) & (target == c), (predicted == c) != (target == c)]
  by_tree = np.zeros((len(trees), len(columns)))
  np.add.at(by_tree, rows, np.stack(columns, axis=1).astype(float))
  count, hits, nll, *classes = (weights @ by_tree).T
  out = {
    "auroc": weighted_auroc(steps["not_wrong"], labels >= 0, rows, weights),
    "accuracy": hits / count,
    "nll": nll / count,
  }
  with np.errstate(invalid="ignore"):
    for rating, both, one in zip(RATINGS, classes[::2], classes[1::2]):
      out[f"f1/{rating}"] = 2 * both / (2 * both + one)
  first = first_error.accuracies((problem_weights(paths) @ first_error.sums(paths, threshold)).T)
  return out | {f"first_error/{name}": values for name, values in first.items()}


def weighted_auroc(
  scores: np.ndarray, positive: np.ndarray, trees: np.ndarray, weights: np.ndarray
) -> np.ndarray:
  """Returns `step_metrics.auroc` for each row of weights; NaN where a class is absent.

  Args:
    scores, positive, trees: of each step `[n]`; its tree is a column of the weights `[R, trees]`.
  """
  order = np.argsort(scores, kind="stable")
  scores, positive, trees = scores[order], positive[order], trees[order]
  starts = np.flatnonzero(np.diff(scores, prepend=-np.inf))  # of runs of equal scores
  out = []
  for row in weights:  # one at a time, as R x n numbers would take gigabytes
    drawn = row[trees]
    right = np.add.reduceat(drawn * positive, starts)
    wrong = np.add.reduceat(drawn, starts) - right
    below = np.cumsum(wrong) - wrong / 2
    with np.errstate(invalid="ignore"):
      out.append((right * below).sum() / (right.sum() * wrong.sum()))
  return np.array(out)


def evaluate(paths: Sequence[Judged], threshold: float, trees: Sequence[Judged]) -> dict[str, Any]:
  """Returns the numbers of the steps and of the first wrong steps, with intervals over problems.

  These are the keys of `step_metrics.step_metrics`; `f1_by_class`; `first_error`, the fractions of
  ProcessBench; `intervals`; and `curve`.
  """
  steps = diagnostics.steps_of(trees)
  intervals = with_intervals(measures(paths, threshold, trees))
  first = {"n": len(paths), "errors": sum(path.first_error >= 0 for path in paths)}
  for name in first_error.MEASURES:
    first[name] = intervals[f"first_error/{name}"]["value"]
  return {
    "solutions_judged": len(trees),
    **step_metrics.step_metrics(steps["probs"], steps["label"]),
    "f1_by_class": {str(rating): intervals[f"f1/{rating}"]["value"] for rating in RATINGS},
    "first_error": first,
    "intervals": intervals,
    "curve": first_error.curve(paths),
  }


def evaluate_outcomes(scorer: Scorer, directory: str | pathlib.Path, split: str) -> dict[str, Any]:
  """Returns `step_metrics.step_metrics` of an outcome model, read at the end of each solution."""
  contract = scorer.contract
  solutions, _ = labelled.step_trees(directory, split, contract.objective)
  if not solutions:
    raise ValueError(f"{directory}, split {split}: no {contract.objective} example")
  pairs = [(tree.problem, tree.steps) for tree in solutions]
  read, _ = judged.rate(scorer, pairs, [tree.source for tree in solutions])
  probs = np.concatenate(read).mean(1)
  right = np.array([bool(tree.outcome) for tree in solutions])
  metrics = step_metrics.step_metrics(probs, right.astype(int), contract.labels)
  return metrics | {"calibration": step_metrics.calibration(probs[:, 1], right)["bins"]}


def check_recipe(scorer: Scorer, directory: str | pathlib.Path) -> None:
  """Raises ValueError if another recipe made the model's PRM800K training data."""
  data, model = labelled.read_manifest(directory).meaning["recipe"], scorer.contract.recipe
  if model != data and all(name.partition("(")[0] in recipes.RECIPES for name in (model, data)):
    raise ValueError(
      f"{directory} was prepared with --recipe={data}, the model's training data with "
      f"{model}: their labels mean different things"
    )


def table(result: dict[str, Any]) -> list[str]:
  """Returns the result as lines for a terminal; an outcome model's has no intervals."""
  number = lambda value: "n/a" if value is None else f"{value:.3f}"
  auroc = result.get("intervals", {}).get("auroc", {"low": None})
  between = "" if auroc["low"] is None else f" ({auroc['low']:.3f} to {auroc['high']:.3f})"
  lines = [
    f"{result['count']:,} labels",
    f"AUROC {number(result['auroc'])}{between}   accuracy {number(result['accuracy'])}   "
    f"log-likelihood {number(-result['nll'])} nats   calibration error {number(result['ece'])}",
    "class      labels  accuracy       F1",
  ]
  for name, count in result["count_by_class"].items():
    f1 = result.get("f1_by_class", {}).get(name)
    if not count and f1 is None:
      continue  # a class that no label has and the model never predicts
    accuracy = number(result["accuracy_by_class"][name])
    lines.append(f"{name:>5}{count:12,}{accuracy:>10}{number(f1):>9}")
  if first := result.get("first_error"):
    cell = lambda x: "n/a" if x is None else f"{100 * x:.1f}"
    f1 = result["intervals"]["first_error/f1"]
    between = "" if f1["low"] is None else f" ({cell(f1['low'])} to {cell(f1['high'])})"
    lines.append(
      f"first wrong step of {first['n']:,} solutions: error accuracy "
      f"{cell(first['error_accuracy'])}, correct accuracy {cell(first['correct_accuracy'])}, "
      f"F1 {cell(first['f1'])}{between}"
    )
  return lines
