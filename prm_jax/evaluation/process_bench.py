"""ProcessBench: how accurately a model finds the first wrong step, by subset."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from prm_jax.datasets.process_bench import SUBSETS, Solution
from prm_jax.evaluation import first_error
from prm_jax.evaluation.judged import (
  Judged,
  Labelled,
  by_group,
  from_record,
  problem_weights,
  with_intervals,
)
from prm_jax.evaluation.verdicts import NONE_WRONG, UNDECIDED, labels, plurality
from prm_jax.runtime import json_lines


class Votes(msgspec.Struct):
  """The keys that a generative judge adds to a line."""

  verdicts: list[Annotated[int, msgspec.Meta(ge=NONE_WRONG)] | None] | None = None


def solutions(
  records: Iterable[tuple[str, dict[str, Any]]], neutral: str | None
) -> Iterator[Labelled]:
  """Yields the solutions of (FILE:LINE, record) pairs.

  Steps before the first wrong one are right, later ones not labelled.  A line may also have
  `verdicts`: a generative judge's votes on the first wrong step.

  Args:
    neutral: how a neutral step counts in the scores of `Judged`; None: read no scores, and yield
      `Labelled`.

  Raises:
    BadLine: a line lacks a key, does not have one score for each step, or has a verdict on a step
      that does not exist.
  """
  for where, record in records:
    line = json_lines.convert(record, Solution, where)
    given = labels(line.label, len(line.steps))
    about = (line.id, line.subset, line.problem, line.steps, given, line.final_answer_correct)
    if neutral is None:
      yield Labelled(*about)
      continue
    judged = from_record(Labelled(*about), record, where, neutral)
    votes = json_lines.convert(record, Votes, where).verdicts
    if votes is not None:
      if (last := max((x for x in votes if x is not None), default=0)) >= len(line.steps):
        raise json_lines.BadLine(f"{where}: verdict {last} of {len(line.steps)} steps")
      verdict = plurality(votes)
      judged = dataclasses.replace(judged, verdict=UNDECIDED if verdict is None else verdict)
    yield judged


def measures(judged: Sequence[Judged], threshold: float) -> dict[str, np.ndarray]:
  """Returns accuracies by group ("GROUP/f1" and the like) and means, by row of `problem_weights`.

  "mean_f1" is the mean of the groups, as ProcessBench's paper has it; "weighted_f1" is weighted by
  their numbers of solutions, as huggingface's evaluation has it.
  """
  weights, columns = problem_weights(judged), first_error.sums(judged, threshold)
  out, sizes = {}, {}
  for group, members in by_group(judged).items():
    sizes[group] = weights[:, members].sum(1)
    values = first_error.accuracies((weights[:, members] @ columns[members]).T)
    out |= {f"{group}/{name}": value for name, value in values.items()}
  f1 = np.stack([out[f"{group}/f1"] for group in sizes])
  size = np.stack([*sizes.values()])
  return out | {"mean_f1": f1.mean(0), "weighted_f1": (f1 * size).sum(0) / size.sum(0)}


def evaluate(judged: Sequence[Judged], threshold: float) -> dict[str, Any]:
  """Returns the protocol's numbers at the threshold, as fractions, and the curve over thresholds.

  `subsets: {NAME: {n, errors, error_accuracy, correct_accuracy, f1}}`; `mean_f1`, the mean of the
  subsets; `weighted_f1`, weighted by their sizes; `intervals` of all of them, over problems.
  """
  intervals = with_intervals(measures(judged, threshold))
  errors, subsets = np.array([each.first_error >= 0 for each in judged]), {}
  for group, members in by_group(judged).items():
    values = {name: intervals[f"{group}/{name}"]["value"] for name in first_error.MEASURES}
    size = {"n": int(members.sum()), "errors": int(errors[members].sum())}
    subsets[group] = size | values
  means = {name: intervals[name]["value"] for name in ("mean_f1", "weighted_f1")}
  return {"subsets": subsets, **means, "intervals": intervals, "curve": first_error.curve(judged)}


def table(result: dict[str, Any]) -> list[str]:
  """Returns the result as lines for a terminal, in percent."""
  lines = [f"{'':14}{'n':>6}{'error acc':>11}{'correct acc':>13}{'F1':>8}   95 % interval"]
  cell = lambda x, width: f"{'n/a':>{width}}" if x is None else f"{100 * x:{width}.1f}"
  for name, part in result["subsets"].items():
    line = f"{name:14}{part['n']:6,}{cell(part['error_accuracy'], 11)}"
    line += f"{cell(part['correct_accuracy'], 13)}{cell(part['f1'], 8)}"
    lines.append(line + interval(result["intervals"][f"{name}/f1"]))
  names = {"mean_f1": "mean of the subsets", "weighted_f1": "weighted by their sizes"}
  for key, name in names.items():
    lines.append(f"{name:44}{cell(result[key], 8)}" + interval(result["intervals"][key]))
  if without := [name for name in SUBSETS if name not in result["subsets"]]:
    lines.append(f"without {', '.join(without)}: published means are of all four subsets")
  return lines


def interval(found: dict[str, float | None]) -> str:
  """Formats an interval in percent, to follow its value; "" if there is none."""
  if found["low"] is None:
    return ""
  return f"   {100 * found['low']:.1f} to {100 * found['high']:.1f}"
