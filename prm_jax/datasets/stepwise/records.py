"""The forms in which step labels are published, one labelled solution on each line.

  {"prompt": TEXT, "completions": [TEXT, ...], "labels": [true, false, ...]}     TRL
  {"input": "PROBLEM Step 1: ... ки\\nStep 2: ... ки", "label": "... +\\n... -"}   Math-Shepherd
  {"problem": TEXT, "steps": [TEXT, ...], "labels": [...]}

Other keys are ignored, but for `is_correct`: whether the final answer is right.  A label of null
leaves its step as context.  The labels of a file are of one kind:

  binary   true and false, or 1 and 0: right and wrong
  ratings  1, 0 and -1: positive, neutral and negative, as PRM800K's
  soft     the probability that the step is right, 0 to 1
  counts   [k, n] or "k of n": k of n rollouts from here were right
"""

import math
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

import msgspec

from prm_jax.runtime import json_lines
from prm_jax.types import StepTree

Kind = Literal["binary", "ratings", "soft", "counts"]
KINDS = frozenset(get_args(Kind))
TAG = "ки"  # of Math-Shepherd, after each step
FIRST_STEP = "Step 1:"  # ends the problem in its text
Value = bool | int | float | str | list[int] | None
Steps = Annotated[list[json_lines.Text], msgspec.Meta(min_length=1)]
MAX_ROLLOUTS = 2**24  # float32 counts to there
OF_ANNOTATE: dict[str, Kind] = {  # kinds of the labels that annotate.py says it has written
  "hard": "binary",
  "soft": "soft",
  "tolerant": "soft",
  "counts": "counts",
}


class Stored(msgspec.Struct):
  """A labelled solution as it is stored, with labels as in `StepTree`."""

  problem: str
  steps: list[str]
  labels: list[int | list[float] | None]
  is_correct: bool | None = None


class Labelled(msgspec.Struct):
  """A labelled solution, with labels as its line has them."""

  problem: json_lines.Text
  steps: Steps
  labels: list[Value]
  is_correct: bool | None = None
  provenance: Any = None

  @property
  def said(self) -> Kind | None:
    """The kind of its labels, if annotate.py has written them."""
    labels = self.provenance.get("labels") if isinstance(self.provenance, dict) else None
    return OF_ANNOTATE.get(labels) if isinstance(labels, str) else None

  def __post_init__(self):
    if len(self.labels) != len(self.steps):
      raise ValueError(f"{len(self.labels)} labels of {len(self.steps)} steps")


def parse(record: dict[str, Any], where: str) -> tuple[Labelled, bool]:
  """The solution on a line, its labels unchanged, and whether a label of 0 can only mean wrong.

  In the last form, 0 may also mean neutral.

  Raises:
    BadLine: it has none of the forms, or a wrong value.
  """
  if "completions" in record:
    names = {"prompt": "problem", "completions": "steps", "labels": "labels"}
    record = {names.get(key, key): value for key, value in record.items() if key != "steps"}
    return json_lines.convert(record, Labelled, where), True
  if isinstance(record.get("input"), str) and isinstance(record.get("label"), str):
    problem, steps, labels = _untagged(record["input"], record["label"], where)
    record = {"problem": problem, "steps": steps, "labels": labels}
    return json_lines.convert(record, Labelled, where), True
  if "steps" not in record:
    raise json_lines.BadLine(
      f'{where}: no labelled solution: expected "problem", "steps" and "labels"; TRL\'s "prompt", '
      f'"completions" and "labels"; or Math-Shepherd\'s "input" and "label"; found the keys '
      f"{json_lines.show([*record])}"
    )
  return json_lines.convert(record, Labelled, where), False


def _untagged(text: str, tagged: str, where: str) -> tuple[str, list[str], list[bool]]:
  """Problem, steps and labels of Math-Shepherd's two texts, which differ in the tags alone."""
  parts = text.split(TAG)
  steps, rest = parts[:-1], parts[-1]
  labels, at = [], 0
  for step in steps:
    at += len(step)
    mark = tagged[at : at + 1]
    if not tagged.startswith(step, at - len(step)) or mark not in ("+", "-"):
      raise json_lines.BadLine(
        f'{where}: "label" is not "input" with + or - in place of each {TAG}: they differ at '
        f"{json_lines.show(tagged[max(at - 20, 0) : at + 20])}"
      )
    labels.append(mark == "+")
    at += 1
  if rest.strip() or not steps or FIRST_STEP not in steps[0]:
    raise json_lines.BadLine(
      f'{where}: "input" is {json_lines.show(text)}: expected a problem, {FIRST_STEP!r}, and {TAG} '
      "after each step"
    )
  problem, _, first = steps[0].partition(FIRST_STEP)
  steps[0] = FIRST_STEP + first
  return problem.strip(), [step.strip() for step in steps], labels


def kinds(value: Value, zero_is_wrong: bool) -> frozenset[Kind]:
  """The kinds of labels that have this value; `zero_is_wrong` as `parse` returns it."""
  if value is None:
    return KINDS
  if isinstance(value, bool):
    return frozenset({"binary"})
  if isinstance(value, list | str):
    return frozenset({"counts"} if _count(value) else ())
  if value == -1:
    return frozenset({"ratings"})
  if value in (0, 1):
    return frozenset({"binary", "soft"} | (set() if zero_is_wrong else {"ratings"}))
  return frozenset({"soft"} if 0 < value < 1 else ())


def _count(value: Any) -> tuple[int, int] | None:
  """k and n of "k of n" or [k, n]; None if it is neither."""
  if isinstance(value, str):
    found = re.fullmatch(r"\s*(\d{1,8})\s+of\s+(\d{1,8})\s*", value)
    value = [int(x) for x in found.groups()] if found else []
  k, n = value if len(value) == 2 else (1, 0)
  return (k, n) if 0 <= k <= n and 0 < n <= MAX_ROLLOUTS else None


def label(value: Value, kind: Kind) -> int | tuple[float, float] | None:
  """The label of `StepTree` that a value of this kind is."""
  if value is None:
    return None
  if kind == "counts":
    k, n = _count(value)
    return n - k, k
  if kind == "soft":
    return 1 - value, value
  return int(value) if kind == "ratings" else 1 if value else -1


def kind_of(solutions: Iterable[tuple[Labelled, bool, str]], given: str = "auto") -> Kind:
  """The kind of the labels of all solutions, each as `parse` returns it and with its FILE:LINE.

  Args:
    given: the kind, for files from which it cannot be told; "auto": it is told from the values.

  Raises:
    BadLine: a label that is not of the kind of the others, or of no kind.
    ValueError: the values do not tell: 0 may be wrong or neutral; or there is nothing to train on.
  """
  left, where = KINDS if given == "auto" else frozenset({given}), ""
  some = outcome = False
  for solution, zero_is_wrong, where in solutions:
    if solution.said in left:
      left = frozenset({solution.said})
    some |= any(value is not None for value in solution.labels)
    outcome |= solution.is_correct is not None
    for i, value in enumerate(solution.labels):
      found = kinds(value, zero_is_wrong and given == "auto")
      if isinstance(value, float) and not math.isfinite(value):
        found = frozenset()
      if not left & found:
        those = f"labels are {' or '.join(sorted(left))}" + (" so far" if given == "auto" else "")
        raise json_lines.BadLine(
          f"{where}: label {i} is {json_lines.show(value)}: expected one kind of labels (binary, "
          f"ratings, soft or counts: docs/data.md); {those}"
        )
      left &= found
  if not some and not outcome:
    raise ValueError(f"{where}: no labelled step to train on to here")
  if not some and given == "auto":
    return "binary"  # outcomes alone
  if "ratings" in left and len(left) > 1:
    raise ValueError(
      f"{where}: all labels to here are 0 and 1, and 0 may be wrong or neutral: say which with "
      "--stepwise.labels=binary (0 is wrong) or --stepwise.labels=ratings (0 is neutral)"
    )
  return "binary" if "binary" in left else next(iter(left))


def tree(solution: Stored, source: str) -> StepTree:
  """A stored solution as a chain."""
  labels = tuple(tuple(x) if isinstance(x, list) else x for x in solution.labels)
  parents = tuple(range(-1, len(labels) - 1))
  steps = tuple(solution.steps)
  return StepTree(solution.problem, steps, parents, labels, solution.is_correct, source)
