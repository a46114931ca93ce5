"""A reward model as labeller: step labels and outcomes from its probabilities.

Source: *Let's Verify Step by Step* (arXiv 2305.20050), section 4 and appendix H, where a large PRM
labels the data of many small ones.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from prm_jax.scoring import candidates
from prm_jax.scoring.scorer import Scorer
from prm_jax.types import RATINGS, StepTree

THRESHOLD = 0.2  # a step is wrong if P(negative) is above it; the paper calls it arbitrary


@dataclasses.dataclass(frozen=True)
class Labels:
  """What a labeller says of a solution."""

  ratings: tuple[int, ...]  # of the steps up to the first wrong one, or of all
  outcome: bool  # every step passes


def label(
  probabilities: np.ndarray, threshold: float = THRESHOLD, classes: Sequence[int] = RATINGS
) -> Labels:
  """The labels of one solution.

  Args:
    probabilities: `[steps, C]` of the ratings.
    threshold: a step is wrong if the probability of -1 exceeds it; otherwise it has the likeliest
      of the other ratings.
    classes: the ratings, -1 first.
  """
  wrong = np.flatnonzero(probabilities[:, 0] > threshold)
  end = wrong[0] if len(wrong) else len(probabilities)
  ratings = [classes[1 + i] for i in probabilities[:end, 1:].argmax(-1)]
  return Labels((*ratings, *([-1] if len(wrong) else [])), not len(wrong))


def process(problem: str, steps: Sequence[str], ratings: Sequence[int]) -> StepTree:
  """A solution with its ratings up to and including the first of -1, cut after the last."""
  end = ratings.index(-1) + 1 if -1 in ratings else len(ratings)
  return StepTree(problem, tuple(steps[:end]), tuple(range(-1, end - 1)), tuple(ratings[:end]))


def outcome(problem: str, steps: Sequence[str], right: bool) -> StepTree:
  """A solution with an outcome and no step labels: what an outcome model trains on."""
  count = len(steps)
  parents, labels = tuple(range(-1, count - 1)), (None,) * count
  return StepTree(problem, tuple(steps), parents, labels, bool(right))


def errors(given: Sequence[Labels], exact: Sequence[Sequence[int]]) -> dict[str, Any]:
  """How far a labeller's labels are from the exact ratings of the same solutions.

  Args:
    exact: the ratings of every step of each solution, also past the first error.

  Returns:
    Counts and shares: of steps labelled by both (up to the first error of either), wrong steps
    missed and right ones called wrong; of solutions, first errors found at the exact step, and
    outcomes (all steps right) that differ.
  """
  counts = dict.fromkeys(("steps", "wrong", "missed", "right", "false_alarms"), 0)
  first_errors = found = outcomes = 0
  for labels, ratings in zip(given, exact, strict=True):
    first = next((i for i, rating in enumerate(ratings) if rating < 0), len(ratings))
    for mine, true in zip(labels.ratings, ratings[: first + 1]):
      counts["steps"] += 1
      counts["wrong"] += true < 0
      counts["missed"] += true < 0 <= mine
      counts["right"] += true >= 0
      counts["false_alarms"] += mine < 0 <= true
    if first < len(ratings):
      first_errors += 1
      found += len(labels.ratings) == first + 1 and not labels.outcome
    outcomes += labels.outcome != (first == len(ratings))
  share = lambda part, whole: part / whole if whole else None
  return counts | {
    "missed_share": share(counts["missed"], counts["wrong"]),
    "false_alarm_share": share(counts["false_alarms"], counts["right"]),
    "solutions": len(given),
    "first_errors": first_errors,
    "first_errors_found": share(found, first_errors),
    "outcomes_wrong": share(outcomes, len(given)),
  }


class Annotator:
  """Labels a file of candidates with a reward model, and counts what it did.

  Raises ValueError for an outcome model, which labels no steps.
  """

  def __init__(
    self, scorer: Scorer, name: str, threshold: float, outcome_by_labeller: bool = False
  ):
    """With `outcome_by_labeller`, `is_correct` is the labeller's also where a line has it.

    Args:
      name: of the model, for the provenance.
    """
    if scorer.contract.objective != "process":
      raise ValueError(f"a model of the {scorer.contract.objective} objective labels no steps")
    self._scorer, self._threshold, self._by_labeller = scorer, threshold, outcome_by_labeller
    self._name = name
    self.counts = collections.Counter()

  def lines(self, path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The candidates with their labels, in the form of `datasets.stepwise`; errors as `rated`."""
    scorer, counts = self._scorer, self.counts
    about = {"method": "model", "labeller": self._name}
    about |= {"step": scorer.step, "threshold": self._threshold}
    for line in candidates.rated(path, scorer, "labelling"):
      labels = label(line.probabilities.mean(1), self._threshold, scorer.contract.labels)
      given = line.record.get("is_correct")
      counts.update(str(rating) for rating in labels.ratings)
      counts.update(solutions=1, right=labels.outcome)
      if isinstance(given, bool):
        counts.update(answers=1, agree=given == labels.outcome)
      known = isinstance(given, bool) and not self._by_labeller
      missing = [None] * (len(line.steps) - len(labels.ratings))
      yield {
        **line.record,
        "problem": line.problem,
        "steps": line.steps,
        "labels": [*labels.ratings, *missing],
        "is_correct": given if known else labels.outcome,
        "provenance": about | {"outcome": "answer" if known else "labeller"},
      }

  def table(self) -> list[str]:
    """The counts as lines of text."""
    counts = self.counts
    names = sorted((name for name in counts if name.lstrip("-").isdigit()), key=int)
    labels = ", ".join(f"{counts[name]:,} {name}" for name in names)
    lines = [f"{counts['solutions']:,} solutions, labels: {labels}"]
    lines.append(f"every step passes in {counts['right']:,}")
    if counts["answers"]:
      share = 100 * counts["agree"] / counts["answers"]
      lines[-1] += f"; the final answer says the same of {share:.1f} % of {counts['answers']:,}"
    return lines
