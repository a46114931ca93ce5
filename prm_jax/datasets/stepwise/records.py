"""The forms in which step labels are published, one labelled solution on each line.

  {"prompt": TEXT, "completions": [TEXT, ...], "labels": [true, false, ...]}     TRL
  {"input": "PROBLEM Step 1: ... ки\\nStep 2: ... ки", "label": "... +\\n... -"}   Math-Shepherd
  {"problem": TEXT, "steps": [TEXT, ...], "labels": [...]}

`is_correct` may say whether the final answer is right; other keys are ignored.  A label of null
leaves its step as context.  All labels of a file are of one kind:

  binary   true and false, or 1 and 0: right and wrong
  ratings  1, 0 and -1: positive, neutral and negative, as PRM800K's
  soft     the probability that the step is right, 0 to 1
  counts   [k, n] or "k of n": k of n rollouts from here were right
"""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

import msgspec

from prm_jax.runtime import json_lines
from prm_jax.types import StepTree

Kind = Literal["binary", "ratings", "soft", "counts"]
KINDS = frozenset(get_args(Kind))
TAG = "ки"  # Math-Shepherd puts it after each step
FIRST_STEPS = "Step 1:", "step 1:"  # Math-Shepherd's text after the problem
Value = bool | int | float | str | list[int] | None
Steps = Annotated[list[json_lines.Text], msgspec.Meta(min_length=1)]
EXPECTED = (
  "expected one kind of labels: binary (false, true or 0, 1), ratings (-1, 0, 1), soft (0 to 1) or "
  "counts ([3, 8]); see docs/data.md"
)
MAX_ROLLOUTS = 2**24  # float32 holds every count up to this exactly
OF_ANNOTATE: dict[str, Kind] = {  # by annotate.py's name of the labels that it writes
  "hard": "binary",
  "soft": "soft",
  "tolerant": "soft",
  "counts": "counts",
}


class Stored(msgspec.Struct):
  """A labelled solution as the dataset stores it, with labels as in `StepTree`."""

  problem: str
  steps: tuple[str, ...]
  labels: tuple[int | tuple[float, float] | None, ...]
  is_correct: bool | None = None


class Labelled(msgspec.Struct):
  """A labelled solution with the labels of its line, of any kind."""

  problem: json_lines.Text
  steps: Steps
  labels: list[Value]
  is_correct: bool | None = None
  provenance: Any = None

  @property
  def said(self) -> Kind | None:
    """Returns the kind of labels that annotate.py declared; None if it did not write the line."""
    labels = self.provenance.get("labels") if isinstance(self.provenance, dict) else None
    return OF_ANNOTATE.get(labels) if isinstance(labels, str) else None

  def __post_init__(self):
    if len(self.labels) != len(self.steps):
      raise ValueError(f"{len(self.labels)} labels of {len(self.steps)} steps")
    for i, value in enumerate(self.labels, 1):
      if not kinds(value):
        raise ValueError(_unexpected(i, value))


def parse(record: dict[str, Any], where: str) -> tuple[Labelled, bool]:
  """Returns the solution of a line, its labels unchanged, and whether 0 means wrong.

  In the last form, and in a file with -1, a label of 0 may mean neutral.

  Raises:
    BadLine: the line has none of the forms, or a wrong value.
  """
  if "completions" in record:
    names = {"prompt": "problem", "completions": "steps"}
    record = record | {name: record[key] for key, name in names.items() if key in record}
    return json_lines.convert(record, Labelled, where), True
  if isinstance(record.get("input"), str) and isinstance(record.get("label"), str):
    problem, steps, labels = _untagged(record["input"], record["label"], where)
    record = record | {"problem": problem, "steps": steps, "labels": labels}
    return json_lines.convert(record, Labelled, where), True
  if "steps" not in record:
    raise json_lines.BadLine(
      f'{where}: no labelled solution: expected "problem", "steps" and "labels"; TRL\'s "prompt", '
      f'"completions" and "labels"; or Math-Shepherd\'s "input" and "label"; found the keys '
      f"{json_lines.show([*record])}"
    )
  return json_lines.convert(record, Labelled, where), False


def _untagged(text: str, tagged: str, where: str) -> tuple[str, list[str], list[bool]]:
  """Splits Math-Shepherd's two texts, which differ only in the tags: problem, steps, labels."""
  *steps, rest = text.split(TAG)
  labels, end = [], 0
  for step in steps:
    start, end = end, end + len(step)
    mark = tagged[end : end + 1]
    if not tagged.startswith(step, start) or mark not in ("+", "-"):
      break
    labels.append(mark == "+")
    end += 1
  if len(labels) < len(steps) or tagged[end:].strip() != rest.strip():
    raise json_lines.BadLine(
      f'{where}: "label" is not "input" with + or - in place of each {TAG}: they differ at '
      f"{json_lines.show(tagged[max(end - 20, 0) : end + 20])}"
    )
  first = next((each for each in FIRST_STEPS if steps and each in steps[0]), None)
  if rest.strip() or not first:
    raise json_lines.BadLine(
      f'{where}: "input" is {json_lines.show(text)}: expected a problem, "Step 1:", and {TAG} '
      "after each step"
    )
  if steps[0].count(first) > 1:
    raise json_lines.BadLine(
      f'{where}: "input" has {first!r} twice before its first {TAG}; expected it once, '
      "after the problem"
    )
  problem, _, end = steps[0].partition(first)
  steps[0] = first + end
  return problem.strip(), [step.strip() for step in steps], labels


def kinds(value: Value) -> frozenset[Kind]:
  """Returns the kinds of labels that can have this value."""
  if value is None:
    return KINDS
  if isinstance(value, bool):
    return frozenset({"binary"})
  if isinstance(value, list | str):
    return frozenset({"counts"} if _count(value) else ())
  if value == -1:
    return frozenset({"ratings"})
  if value in (0, 1):
    return frozenset({"binary", "soft", "ratings"})
  return frozenset({"soft"} if 0 < value < 1 else ())


def _unexpected(step: int, label: Value) -> str:
  """Says that the label of a step, counted from 1, is not of the expected kind."""
  return f"the label of step {step} is {json_lines.show(label)}: {EXPECTED}"


def _count(value: Any) -> tuple[int, int] | None:
  """Returns k and n of "k of n" or [k, n]; None if `value` is neither."""
  if isinstance(value, str):
    match = re.fullmatch(r"\s*(\d{1,8})\s+of\s+(\d{1,8})\s*", value)
    value = [int(x) for x in match.groups()] if match else []
  k, n = value if len(value) == 2 else (1, 0)
  return (k, n) if 0 <= k <= n and 0 < n <= MAX_ROLLOUTS else None


def stored(solution: Labelled, kind: Kind) -> Stored:
  """Converts a solution whose labels are of this kind."""
  labels = tuple(label(value, kind) for value in solution.labels)
  return Stored(solution.problem, tuple(solution.steps), labels, solution.is_correct)


def label(value: Value, kind: Kind) -> int | tuple[float, float] | None:
  """Converts a value of this kind to a label of `StepTree`."""
  if value is None:
    return None
  if kind == "counts":
    k, n = _count(value)
    return n - k, k
  if kind == "soft":
    return 1 - value, value
  return int(value) if kind == "ratings" else 1 if value else -1


def kind_of(solutions: Iterable[tuple[Labelled, bool, str]], given: str = "auto") -> Kind:
  """Returns the kind of all labels.

  Args:
    solutions: the results of `parse`, each with its FILE:LINE.
    given: the kind of the labels, or "auto" to infer it from their values.

  Raises:
    BadLine: a label is not of the kind of the others.
    ValueError: the kind is ambiguous (0 may mean wrong or neutral), or there is nothing to train
      on.
  """
  left, where = KINDS if given == "auto" else frozenset({given}), ""
  has_labels = has_outcomes = told = False
  for solution, zero_is_wrong, where in solutions:
    if solution.said in left:
      left = frozenset({solution.said})
    told |= zero_is_wrong
    has_labels |= any(value is not None for value in solution.labels)
    has_outcomes |= solution.is_correct is not None
    for i, value in enumerate(solution.labels, 1):
      possible = kinds(value)
      if not left & possible:
        so_far = f"labels are {' or '.join(sorted(left))}" + (" so far" if given == "auto" else "")
        raise json_lines.BadLine(f"{where}: {_unexpected(i, value)}; {so_far}")
      left &= possible
  if not has_labels and not has_outcomes:
    raise ValueError(f"{where}: no labelled step to train on, up to here")
  if not has_labels and given == "auto":
    return "binary"  # outcomes alone
  if told and len(left) > 1:
    left -= {"ratings"}
  if "ratings" in left and len(left) > 1:
    raise ValueError(
      f"{where}: all labels up to here are 0 and 1; 0 may mean wrong or neutral: say which with "
      "--stepwise.labels=binary (0 is wrong) or --stepwise.labels=ratings (0 is neutral)"
    )
  return "binary" if "binary" in left else next(iter(left))


def tree(s: Stored, source: str) -> StepTree:
  """Converts a stored solution to a chain."""
  parents = tuple(range(-1, len(s.steps) - 1))
  return StepTree(s.problem, s.steps, parents, s.labels, s.is_correct, source)
