"""A reward model as labeller: step labels and outcomes from its probabilities.

Source: *Let's Verify Step by Step* (arXiv 2305.20050), section 4 and appendix H, where a large PRM
labels the data of many small ones.
"""

import collections
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from prm_jax.scoring import candidates
from prm_jax.scoring.scorer import Scorer
from prm_jax.types import RATINGS, StepTree

Ratings = tuple[int, ...]  # of the steps up to the first wrong one, or of all


def label(probabilities: np.ndarray, threshold: float, classes: Sequence[int] = RATINGS) -> Ratings:
  """Returns a labeller's ratings of one solution.

  Args:
    probabilities: `[steps, C]` of the ratings.
    threshold: a step is wrong if the probability of -1 exceeds it; otherwise it has the likeliest
      of the other ratings.  The paper's is 0.2, and it calls that arbitrary.
    classes: the ratings, -1 first.
  """
  wrong = np.flatnonzero(probabilities[:, 0] > threshold)
  end = wrong[0] if len(wrong) else len(probabilities)
  ratings = [classes[1 + i] for i in probabilities[:end, 1:].argmax(-1)]
  return (*ratings, *([-1] if len(wrong) else []))


def process(problem: str, steps: Sequence[str], ratings: Sequence[int]) -> StepTree:
  """Returns a solution with its ratings, cut after the first -1 or else the last rating."""
  end = ratings.index(-1) + 1 if -1 in ratings else len(ratings)
  return StepTree(problem, tuple(steps[:end]), tuple(range(-1, end - 1)), tuple(ratings[:end]))


def outcome(problem: str, steps: Sequence[str], right: bool) -> StepTree:
  """Returns a solution with an outcome and no step labels, on which an outcome model trains."""
  count = len(steps)
  parents, labels = tuple(range(-1, count - 1)), (None,) * count
  return StepTree(problem, tuple(steps), parents, labels, bool(right))


def errors(given: Sequence[Ratings], exact: Sequence[Sequence[int]]) -> dict[str, Any]:
  """Compares a labeller's labels with the exact ratings of the same solutions.

  Args:
    exact: the ratings of every step of each solution, also past the first error.

  Returns:
    Counts and shares.  Of the steps that both label, up to the first error of either: wrong steps
    missed and right steps called wrong.  Of the solutions: first errors found at the exact step,
    and outcomes (no step is wrong) that differ.
  """
  counts = dict.fromkeys(("steps", "wrong", "missed", "right", "false_alarms"), 0)
  first_errors = found = outcomes = 0
  for labels, ratings in zip(given, exact, strict=True):
    first = next((i for i, rating in enumerate(ratings) if rating < 0), len(ratings))
    for mine, true in zip(labels, ratings[: first + 1]):
      counts["steps"] += 1
      counts["wrong"] += true < 0
      counts["missed"] += true < 0 <= mine
      counts["right"] += true >= 0
      counts["false_alarms"] += mine < 0 <= true
    if first < len(ratings):
      first_errors += 1
      found += len(labels) == first + 1 and -1 in labels
    outcomes += (-1 in labels) != (first < len(ratings))
  share = lambda part, whole: part / whole if whole else None
  return counts | {
    "missed_share": share(counts["missed"], counts["wrong"]),
    "false_alarm_share": share(counts["false_alarms"], counts["right"]),
    "solutions": len(given),
    "first_errors": first_errors,
    "first_errors_found": share(found, first_errors),
    "outcomes_wrong": share(outcomes, len(given)),
  }


def annotated(
  path: pathlib.Path,
  scorer: Scorer,
  name: str,
  threshold: float,
  counts: collections.Counter[str],
  outcome_by_labeller: bool = False,
) -> Iterator[dict[str, Any]]:
  """Yields the candidates of a file with a model's labels, in the form of `datasets.stepwise`.

  Args:
    name: of the model, for the provenance.
    counts: updated with counts of the labels, for `table`.
    outcome_by_labeller: take `is_correct` from the labeller, even if a line has an outcome.

  Raises:
    ValueError: the scorer is an outcome model, which labels no steps; or as `candidates.rated`.
  """
  if scorer.contract.objective != "process":
    raise ValueError(f"a model of the {scorer.contract.objective} objective labels no steps")
  about = {"method": "model", "labeller": name, "step": scorer.step, "threshold": threshold}
  for line in candidates.rated(path, scorer, "labelling"):
    ratings = label(line.probabilities.mean(1), threshold, scorer.contract.labels)
    given, passes = candidates.outcome(line.record), -1 not in ratings
    counts.update(map(str, ratings))
    counts.update(solutions=1, right=passes)
    if given is not None:
      counts.update(answers=1, agree=given == passes)
    known = given is not None and not outcome_by_labeller
    yield line.record | {
      "problem": line.problem,
      "steps": line.steps,
      "labels": [*ratings, *[None] * (len(line.steps) - len(ratings))],
      "is_correct": given if known else passes,
      "provenance": about | {"outcome": "answer" if known else "labeller"},
    }


def table(counts: collections.Counter[str]) -> list[str]:
  """Returns the counts of `annotated` as lines of text."""
  names = sorted((name for name in counts if name.lstrip("-").isdigit()), key=int)
  labels = ", ".join(f"{counts[name]:,} {name}" for name in names)
  lines = [f"{counts['solutions']:,} solutions, labels: {labels}"]
  lines.append(f"every step passes in {counts['right']:,}")
  if counts["answers"]:
    share = 100 * counts["agree"] / counts["answers"]
    lines[-1] += f"; the final answer agrees on {share:.1f} % of {counts['answers']:,}"
  return lines
