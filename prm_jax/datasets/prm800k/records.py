"""Raw PRM800K rows: reading JSON lines, and telling exactly what is wrong with a bad one.

A row is the parsed JSON object of one line, as described in the README of openai/prm800k: one
labelled solution.  Nothing is changed here.  Upstream's oddities are not errors: ratings, flags,
`chosen_completion`, `generation` and answers may be null, and the last step of a solution that the
labeler left may be empty (`"completions": null`).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from prm_jax.types import RATINGS

FINISH_REASONS = ("solution", "found_error", "give_up", "bad_problem")
UNFINISHED = ("give_up", "bad_problem")  # the labeler could not complete the task
MAX_LINE_BYTES = 16 * 2**20  # upstream's lines are a few kB; beyond this it is another format
MAX_DEPTH = 32  # of nested JSON; upstream's rows have 6 levels
MAX_EXAMPLES = 10  # bad records that a manifest quotes


class BadRecord(ValueError):
  """A record that is not a PRM800K row.  The message names file, line and value."""


@dataclasses.dataclass(frozen=True)
class Record:
  """A row and where it came from."""

  row: dict[str, Any]
  file: str  # name of the source file, e.g. "phase2_train.jsonl"
  line: int  # 1-based

  @property
  def source(self) -> str:
    return f"{self.file}:{self.line}"


@dataclasses.dataclass
class BadRecords:
  """Bad records that were skipped."""

  count: int = 0
  examples: list[str] = dataclasses.field(default_factory=list)

  def add(self, error: BadRecord) -> None:
    self.count += 1
    if len(self.examples) < MAX_EXAMPLES:
      self.examples.append(str(error))

  def update(self, later: BadRecords) -> None:
    self.count += later.count
    self.examples = (self.examples + later.examples)[:MAX_EXAMPLES]


@dataclasses.dataclass(frozen=True)
class Part:
  """Some whole lines of a file."""

  path: pathlib.Path
  start: int  # offset of the first byte
  stop: int  # and of the first byte after it
  line: int  # 1-based number of the first line


def parts(path: str | pathlib.Path, size: int) -> list[Part]:
  """The file at `path`, cut after the first line end at or beyond each `size` bytes."""
  found, start, line = [], 0, 1
  with open(path, "rb") as f:
    while chunk := f.read(size):
      if not chunk.endswith(b"\n"):
        chunk += f.readline()
      found.append(Part(pathlib.Path(path), start, start + len(chunk), line))
      start += len(chunk)
      line += chunk.count(b"\n")
  return found


def read_records(
  path: str | pathlib.Path | Part,
  name: str | None = None,
  skipped: BadRecords | None = None,
  on_bytes: Callable[[int], None] = lambda n: None,
) -> Iterator[Record]:
  """The rows of a JSON lines file, in order.  Blank lines are ignored.

  Args:
    path: the file, or a part of it.
    name: what to call it in records; its own name if None.
    skipped: bad records are counted here and passed over; if None the first one raises.
    on_bytes: called with the size of each line read (for a progress bar).

  Raises:
    BadRecord: names file, line, key and value.
  """
  part = path if isinstance(path, Part) else Part(pathlib.Path(path), 0, sys.maxsize, 1)
  path, position, number = part.path, part.start, part.line - 1
  name = name or path.name
  with open(path, "rb") as f:
    f.seek(position)
    while position < part.stop and (line := f.readline(MAX_LINE_BYTES + 1)):
      number += 1
      too_long = len(line) > MAX_LINE_BYTES
      size, rest = len(line), line
      while too_long and rest and not rest.endswith(b"\n"):
        rest = f.readline(MAX_LINE_BYTES)
        size += len(rest)
      position += size
      on_bytes(size)
      if not line.strip():
        continue
      try:
        if number == 1 and (other := _other_format(line)):
          raise BadRecord(f"{path}:1: {other}")
        if too_long:
          raise BadRecord(
            f"{path}:{number}: the line is longer than {MAX_LINE_BYTES} bytes, starting "
            f"{_show(line[:80])}; expected one JSON object a line"
          )
        yield Record(parse_line(line, str(path), number), name, number)
      except BadRecord as error:
        if skipped is None:
          raise
        skipped.add(error)


def parse_line(line: bytes, file: str, line_number: int) -> dict[str, Any]:
  """The row on one line, checked.

  Raises:
    BadRecord: `FILE:LINE: KEY is VALUE; expected WHAT`.
  """
  where = f"{file}:{line_number}: "
  try:
    text = line.decode("utf-8")
  except UnicodeDecodeError as error:
    raise BadRecord(
      f"{where}not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
    ) from None
  try:
    row = json.loads(text, parse_constant=_reject_constant)
  except json.JSONDecodeError as error:
    cut = error.pos >= len(text.rstrip()) - 1 or error.msg.startswith("Unterminated")
    hint = "; the line may be truncated" if cut else ""
    raise BadRecord(
      f"{where}not JSON: {error.msg} at column {error.colno}, after "
      f"{_show(text[max(0, error.pos - 40) : error.pos])}{hint}"
    ) from None
  except RecursionError:
    raise BadRecord(f"{where}not a PRM800K row: JSON nested too deeply") from None
  except ValueError as error:  # NaN, or an integer of thousands of digits
    raise BadRecord(f"{where}not JSON: {error}") from None
  try:
    check_row(row)
    _check_depth(row, MAX_DEPTH)
    if re.search(r"\\u[dD][89a-fA-F]", text):  # JSON can spell what is no Unicode text
      json.dumps(row, ensure_ascii=False).encode("utf-8")
  except UnicodeEncodeError as error:
    char = error.object[error.start]
    raise BadRecord(f"{where}unpaired surrogate {char!r}; expected Unicode text") from None
  except BadRecord as error:
    raise BadRecord(where + str(error)) from None
  return row


def check_row(row: Any) -> None:
  """Raises BadRecord (`KEY is VALUE; expected WHAT`) if `row` is not a PRM800K row.

  Keys that upstream does not have are allowed.
  """
  _expect(isinstance(row, dict), "the record", row, "a JSON object")
  _check(row, "", "labeler", str)
  _check(row, "", "timestamp", str)
  _check(row, "", "generation", int, null=True)
  _check(row, "", "is_quality_control_question", bool)
  _check(row, "", "is_initial_screening_question", bool)

  question = _check(row, "", "question", dict)
  problem = _check(question, "question.", "problem", str)
  _expect(problem.strip() != "", "question.problem", problem, "the text of a problem")
  _check(question, "question.", "ground_truth_answer", str, null=True)
  _check(question, "question.", "ground_truth_solution", str, null=True, needed=False)
  _check(question, "question.", "pre_generated_answer", str, null=True, needed=False)
  _check(question, "question.", "pre_generated_verifier_score", float, null=True, needed=False)
  key = "pre_generated_steps"
  for i, text in enumerate(_check(question, "question.", key, list, null=True, needed=False) or ()):
    _check_text(text, f"question.{key}[{i}]")

  label = _check(row, "", "label", dict)
  _check(label, "label.", "total_time", float, null=True)
  reason = _check(label, "label.", "finish_reason", str)
  expected = "one of " + ", ".join(FINISH_REASONS)
  _expect(reason in FINISH_REASONS, "label.finish_reason", reason, expected)
  steps = _check(label, "label.", "steps", list)
  _expect(bool(steps) or reason in UNFINISHED, "label.steps", steps, "at least one step")
  for i, step in enumerate(steps):
    # a labeler who gave up leaves the step they were at
    may_be_empty = reason in UNFINISHED and i == len(steps) - 1
    _check_step(step, f"label.steps[{i}]", may_be_empty)


def _check_step(step: Any, path: str, may_be_empty: bool) -> None:
  _expect(isinstance(step, dict), path, step, "an object")
  completions = _check(step, f"{path}.", "completions", list, null=True)
  human = _check(step, f"{path}.", "human_completion", dict, null=True)
  chosen = _check(step, f"{path}.", "chosen_completion", int, null=True)
  if not completions and human is None:
    expected = "completions or a human completion (the step is empty)"
    _expect(may_be_empty, f"{path}.completions", completions, expected)
  for i, completion in enumerate(completions or ()):
    here = f"{path}.completions[{i}]"
    _expect(isinstance(completion, dict), here, completion, "an object")
    _check_text(_check(completion, f"{here}.", "text", str), f"{here}.text")
    _check_rating(_check(completion, f"{here}.", "rating", int, null=True), f"{here}.rating")
    _check(completion, f"{here}.", "flagged", bool, null=True)
  if human is not None:
    here = f"{path}.human_completion."
    _check_text(_check(human, here, "text", str), here + "text")
    for key in ("rating", "corrected_rating"):
      _check_rating(_check(human, here, key, int, null=True, needed=False), here + key)
    _check(human, here, "source", str, null=True, needed=False)
    _check(human, here, "flagged", bool, null=True, needed=False)
  if chosen is not None:
    count = len(completions or ())
    expected = f"null or an index below {count}, the number of completions"
    _expect(0 <= chosen < count, f"{path}.chosen_completion", chosen, expected)


_NAMES = {
  str: "text",
  int: "an integer",
  float: "a number",
  bool: "true or false",
  list: "a list",
  dict: "an object",
}


def _check(obj: dict, path: str, key: str, kind: type, null: bool = False, needed: bool = True):
  """The value at `key`, of type `kind`; true and false are not numbers."""
  if key not in obj:
    if needed:
      raise BadRecord(f"{path}{key} is missing; expected {_NAMES[kind]}{' or null' * null}")
    return None
  value = obj[key]
  if value is None and null:
    return None
  kinds = (int, float) if kind is float else kind
  right = isinstance(value, kinds) and isinstance(value, bool) == (kind is bool)
  _expect(right, path + key, value, _NAMES[kind] + " or null" * null)
  return value


def _check_text(text: Any, path: str) -> None:
  _expect(isinstance(text, str), path, text, "text")
  _expect(text.strip() != "", path, text, "the text of a step (the step is empty)")


def _check_rating(rating: int | None, path: str) -> None:
  _expect(rating is None or rating in RATINGS, path, rating, "-1, 0, 1 or null")


def _expect(condition: bool, path: str, value: Any, expected: str) -> None:
  if not condition:
    raise BadRecord(f"{path} is {_show(value)}; expected {expected}")


def _show(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 80 else text[:77] + "..."


def _check_depth(value: Any, left: int) -> None:
  """Keys that upstream lacks are kept, so their depth must be bounded."""
  if left == 0:
    raise BadRecord(f"not a PRM800K row: JSON nested more than {MAX_DEPTH} deep")
  if isinstance(value, dict | list):
    for child in value.values() if isinstance(value, dict) else value:
      _check_depth(child, left - 1)


def _reject_constant(name: str):
  raise ValueError(f"{name} is not a JSON value")


def _other_format(line: bytes) -> str | None:
  """What a file is whose first line is not a JSON object; None if it may be JSON lines."""
  if line.startswith(b"version https://git-lfs.github.com/spec/"):
    return (
      "this is a Git LFS pointer, not the data; run `git lfs pull` where it was cloned, or leave "
      "the source out to download it"
    )
  for magic, kind in ((b"\x1f\x8b", "gzip"), (b"PAR1", "Parquet"), (b"PK\x03\x04", "zip")):
    if line.startswith(magic):
      return f"this is a {kind} file; expected JSON lines"
  if not line.lstrip(b"\xef\xbb\xbf \t").startswith(b"{") and line.strip():
    return f"the file starts with {_show(line[:60])}; expected JSON lines, one object a line"
  return None
