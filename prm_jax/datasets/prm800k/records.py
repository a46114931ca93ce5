"""The format of PRM800K: one labelled solution on each line of a file, as JSON.

The classes below are the format, as upstream's README and files show it, with upstream's names.
Parsing ignores other keys; the stored bytes keep them.  A value may be null where upstream has
nulls.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import msgspec

from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import NotBlank
from prm_jax.types import RATINGS

UNFINISHED = ("give_up", "bad_problem")  # finish reasons of labelers who could not go on

Rating = Annotated[int, msgspec.Meta(ge=min(RATINGS), le=max(RATINGS))]


class Completion(msgspec.Struct, omit_defaults=True):
  """A candidate for a step, written by the model that solves the problem."""

  text: NotBlank
  rating: Rating | None
  flagged: bool | None
  rating_probs: dict[str, float] | None = None  # written by a model that evaluate.py judges


class HumanCompletion(msgspec.Struct):
  """A step that the labeler wrote (phase 1)."""

  text: NotBlank
  rating: Rating | None = None
  corrected_rating: Rating | None = None
  source: str | None = None
  flagged: bool | None = None
  rating_probs: dict[str, float] | None = None


class Step(msgspec.Struct):
  """The candidates for a step, and the one that the solution continues with."""

  completions: list[Completion] | None
  human_completion: HumanCompletion | None
  chosen_completion: int | None  # index into `completions`; null: none chosen

  @property
  def chosen(self) -> Completion | HumanCompletion | None:
    """Returns the candidate that the solution continues with: the human one if none was chosen."""
    chosen = self.chosen_completion
    return self.human_completion if chosen is None else self.completions[chosen]

  def __post_init__(self):
    count = len(self.completions or ())
    if self.chosen_completion is not None and not 0 <= self.chosen_completion < count:
      raise ValueError(f"chosen_completion is {self.chosen_completion}, of {count} completions")


class Question(msgspec.Struct):
  """A problem of MATH, and in phase 2 the solution that was to be labelled."""

  problem: NotBlank
  ground_truth_answer: str | None
  ground_truth_solution: str | None = None
  pre_generated_steps: list[NotBlank] | None = None
  pre_generated_answer: str | None = None
  pre_generated_verifier_score: float | None = None


class Label(msgspec.Struct):
  """A labeler's work on a solution.  Only the last step of an unfinished one may be empty."""

  steps: list[Step]
  total_time: float | None  # milliseconds
  finish_reason: Literal["solution", "found_error", "give_up", "bad_problem"]

  def __post_init__(self):
    unfinished = self.finish_reason in UNFINISHED
    if not self.steps and not unfinished:
      raise ValueError("expected at least one step")
    for i, step in enumerate(self.steps):
      empty = not step.completions and step.human_completion is None
      if empty and not (unfinished and i == len(self.steps) - 1):
        raise ValueError(f"steps[{i}] is empty: it has neither completions nor a human completion")


class LabelledSolution(msgspec.Struct):
  """A line of a PRM800K file."""

  labeler: str
  timestamp: str
  generation: int | None  # round of the collection; null in phase 1
  is_quality_control_question: bool
  is_initial_screening_question: bool
  question: Question
  label: Label


@dataclasses.dataclass(frozen=True)
class Record:
  """A line of a file: its JSON, its parsed content and its origin."""

  json: bytes
  solution: LabelledSolution
  source: str  # FILE:LINE, such as "phase2_train.jsonl:17"


def parse(line: bytes, source: str, where: str | None = None) -> Record:
  """Parses one line; a BadLine names `where`, or `source` if that is None."""
  line = line.strip()
  return Record(line, json_lines.decode(line, LabelledSolution, where or source), source)


def read_records(
  path: str | pathlib.Path, skipped: list[str] | None = None, **part: int
) -> Iterator[Record]:
  """Yields the records of a JSON lines file, in order.

  Args:
    skipped: list to which the message of each bad record is appended; None raises at the first one.
    part: `start`, `stop` and `first` of a part of the file, as in `json_lines.lines`.

  Raises:
    BadLine: names file, line, field and value.  A file of another format raises in any case.
  """
  name = pathlib.Path(path).name
  for number, _, line in json_lines.lines(path, **part):
    try:
      yield parse(line, f"{name}:{number}", f"{path}:{number}")
    except json_lines.BadLine as error:
      if skipped is None:
        raise
      skipped.append(str(error))


def numbered(objects: Iterable[dict[str, Any]], name: str) -> Iterator[Record]:
  """Yields generated JSON objects as records, checked as if they were lines of a file `name`."""
  for number, value in enumerate(objects, 1):
    yield parse(json.dumps(value).encode(), f"{name}:{number}")
