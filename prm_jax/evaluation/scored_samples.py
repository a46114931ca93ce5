"""Reads scored candidate solutions into arrays: JSON lines, in the form of OpenAI's release.

One line is one candidate, with the keys of `scored-test-samples.jsonl` of openai/prm800k:
`problem`, `steps`, `answer`, `is_correct`, `rating_probs` (`{"-1": p, "0": p, "1": p}` per step),
`prm_score`, `orm_score`, and optionally `level`, `subject`, `unique_id`.  Lines are streamed and
their text is not kept: `read_solutions` fetches the few that a page shows.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
import tqdm

from prm_jax import json_lines
from prm_jax.json_lines import BadLine, show

STRICT = ("rating_probs", "orm_score", "answer", "unique_id")  # on every line or on none


@dataclasses.dataclass(frozen=True)
class ScoredSamples:
  """Candidates by problem; [P, M] arrays are padded where a problem has fewer than M."""

  files: tuple[pathlib.Path, ...]
  problems: tuple[str, ...]  # [P] texts
  levels: tuple[str | None, ...]  # [P]
  subjects: tuple[str | None, ...]  # [P]
  sizes: np.ndarray  # [P] candidates in the files
  lines: np.ndarray  # [P, M] line number from 1; 0: padding
  offsets: np.ndarray  # [files, P, M] where that line begins, in (decompressed) bytes
  correct: np.ndarray  # [P, M] bool
  valid: np.ndarray  # [P, M] bool; False: padding, or no answer: such are never chosen
  answer_ids: np.ndarray | None  # [P, M] equal strings of a problem have equal numbers
  step_probs: np.ndarray | None  # [T, 3] of the ratings -1, 0, 1, all solutions' steps in a row
  step_slots: np.ndarray | None  # [T] the solution of each step, as p * M + m
  orm: np.ndarray | None  # [P, M]; NaN: padding
  prm_score: np.ndarray  # [P, M] as the file gives it; NaN: not given

  def where(self, p: int, m: int) -> str:
    """The file and line of a candidate, for messages."""
    return f"{self.files[0]}:{self.lines[p, m]}"


def read_scored_samples(paths: Sequence[pathlib.Path | str], progress: bool = False):
  """Reads one or more files of scored samples; a name ending in .gz is decompressed.

  Several files hold the same candidates in the same order, scored by different models: their keys
  are merged, and a key that two of them hold must be equal.  Candidates are grouped by `unique_id`,
  or by the problem's text where no line has one.  `rating_probs`, `orm_score`, `answer` and
  `unique_id` are each on every line or on none.  An `answer` of null or "" marks a candidate that
  never reached one.

  Args:
    paths: the files.
    progress: show a progress bar, if standard error is a terminal.

  Returns:
    ScoredSamples.

  Raises:
    BadLine: a line is not JSON, lacks a key, holds a wrong value or contradicts another.
    OSError: a file cannot be read.
  """
  paths = tuple(pathlib.Path(path) for path in paths)
  table = _Table(paths)
  with contextlib.ExitStack() as stack:
    readers = [stack.enter_context(contextlib.closing(_records(p, progress))) for p in paths]
    for records in itertools.zip_longest(*readers):
      merged = _merge(paths, records)
      table.add(records[0][0], merged, [offset for _, offset, _ in records])
  return table.arrays()


def read_solutions(samples: ScoredSamples, slots: Sequence[tuple[int, int]]) -> list[dict]:
  """The full records of a few candidates (p, m), read again from where they stand."""
  records = [{} for _ in slots]
  for path, offsets in zip(samples.files, samples.offsets):
    with json_lines.opened(path) as (file, _):
      for i in sorted(range(len(slots)), key=lambda i: offsets[slots[i]]):
        file.seek(offsets[slots[i]])
        records[i].update(json.loads(file.readline()))
  return records


def _records(path: pathlib.Path, progress: bool) -> Iterator[tuple[int, int, dict]]:
  """As `json_lines.read`, with a progress bar; an empty file is an error."""
  hidden = None if progress else True  # None: hidden unless standard error is a terminal
  bar = tqdm.tqdm(
    total=path.stat().st_size, desc=path.name, unit="B", unit_scale=True, disable=hidden
  )
  empty = True
  with bar:
    for line in json_lines.read(path, lambda done: bar.update(done - bar.n)):
      empty = False
      yield line
  if empty:
    raise BadLine(f"{path}: empty")


def _merge(paths, records) -> dict:
  """One record of every file's; None: the file has ended."""
  if None in records:
    ended = paths[records.index(None)]
    path, line = next((p, r[0]) for p, r in zip(paths, records) if r is not None)
    raise BadLine(f"{ended}: ends before the candidate at {path}:{line}")
  (_, _, merged), *others = records
  for path, (line, _, record) in zip(paths[1:], others):
    for key in merged.keys() & record.keys():
      if merged[key] != record[key]:
        raise BadLine(
          f'{path}:{line}: "{key}" is {show(record[key])}, but {show(merged[key])} for the same '
          "candidate of an earlier input: the files must hold the same candidates"
        )
    merged = merged | record
  return merged


class _Table:
  """Columns that grow by a line at a time; steps are kept flat."""

  def __init__(self, paths):
    self.paths = paths
    self.strict: dict[str, bool] = {}  # which of STRICT the first line has
    self.groups: dict[str, int] = {}  # problem number by unique_id or text
    self.problems: list[str] = []
    self.levels: list[str | None] = []
    self.subjects: list[str | None] = []
    self.answers: list[dict[str, int]] = []  # by problem: number of each answer
    self.line = array.array("q")  # its number in the first file, as all below
    self.problem = array.array("q")
    self.correct = array.array("b")
    self.answered = array.array("b")
    self.answer_id = array.array("q")
    self.orm = array.array("d")
    self.prm_score = array.array("d")
    self.step_count = array.array("q")
    self.offsets = array.array("q")  # one a file
    self.step_probs = array.array("d")  # three a step

  def add(self, line: int, record: dict, offsets: list[int]) -> None:
    def bad(message: str):
      return BadLine(f"{self.paths[0]}:{line}: {message}")

    for key in STRICT:
      has = key in record
      if self.strict.setdefault(key, has) != has:
        raise bad(
          f'no "{key}", which the lines before have'
          if not has
          else f'"{key}" is here, and on none of the lines before'
        )
    text = record.get("problem")
    if not isinstance(text, str) or not text:
      raise bad(f'"problem" is {show(text)}: expected a text')
    correct = record.get("is_correct")
    if not isinstance(correct, bool):
      raise bad(f'"is_correct" is {show(correct)}: expected true or false')

    p = self._problem(text, record, bad)
    self.line.append(line)
    self.problem.append(p)
    self.correct.append(correct)
    self.offsets.extend(offsets)
    self._answer(p, record, correct, bad)
    self.orm.append(_number(record, "orm_score", bad))
    self.prm_score.append(_number(record, "prm_score", bad))
    if self.strict["rating_probs"]:
      self._steps(record, bad)

  def _problem(self, text: str, record: dict, bad) -> int:
    group = record.get("unique_id", text)
    if not isinstance(group, str):
      raise bad(f'"unique_id" is {show(group)}: expected a text')
    level, subject = (
      None if record.get(key) is None else str(record[key]) for key in ("level", "subject")
    )
    p = self.groups.setdefault(group, len(self.problems))
    if p == len(self.problems):
      self.problems.append(text)
      self.levels.append(level)
      self.subjects.append(subject)
      self.answers.append({})
    for key, value, known in (
      ("problem", text, self.problems[p]),
      ("level", level, self.levels[p]),
      ("subject", subject, self.subjects[p]),
    ):
      if value != known:
        raise bad(f'"{key}" is {show(value)}, but {show(known)} before for the same problem')
    return p

  def _answer(self, p: int, record: dict, correct: bool, bad) -> None:
    answer = record.get("answer")
    if not isinstance(answer, str | None):
      raise bad(f'"answer" is {show(answer)}: expected a text, or null for none')
    answered = bool(answer) or not self.strict["answer"]
    if correct and not answered:
      raise bad(f'"is_correct" is true, but "answer" is {show(answer)}')
    self.answered.append(answered)
    numbers = self.answers[p]
    self.answer_id.append(numbers.setdefault(answer, len(numbers)) if answer else 0)

  def _steps(self, record: dict, bad) -> None:
    ratings, steps = record["rating_probs"], record.get("steps")
    if not isinstance(steps, list) or not steps or not all(isinstance(s, str) for s in steps):
      raise bad(f'"steps" is {show(steps)}: expected a list of texts, not empty')
    if not isinstance(ratings, list) or len(ratings) != len(steps):
      raise bad(f'"rating_probs" is {show(ratings)}: expected one for each of {len(steps)} steps')
    for i, rating in enumerate(ratings):
      try:
        minus, zero, plus = rating["-1"], rating["0"], rating["1"]
        # A NaN fails every comparison.  Probabilities that were rounded to bfloat16 may sum to
        # 0.99 or 1.01.
        fine = min(minus, zero, plus) >= 0 and 0.99 <= minus + zero + plus <= 1.01
      except (KeyError, TypeError, OverflowError):  # of an int too large for a float
        fine = False
      if not fine:
        raise bad(
          f'"rating_probs" of step {i} is {show(rating)}: expected probabilities of -1, 0 and 1'
        )
      self.step_probs.extend((minus, zero, plus))
    self.step_count.append(len(steps))

  def arrays(self) -> ScoredSamples:
    problem = np.array(self.problem)
    sizes = np.bincount(problem)
    shape = (len(sizes), int(sizes.max()))
    # A line's place among its problem's: its rank in a stable sort by problem.
    order = np.argsort(problem, kind="stable")
    place = np.empty_like(problem)
    place[order] = np.arange(len(problem)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    slot = problem * shape[1] + place

    def padded(column, dtype, fill):
      result = np.full(shape, fill, dtype)
      result.flat[slot] = column
      return result

    has = self.strict
    offsets = np.array(self.offsets).reshape(-1, len(self.paths)).T
    step_probs = np.array(self.step_probs).reshape(-1, 3)
    return ScoredSamples(
      files=self.paths,
      problems=tuple(self.problems),
      levels=tuple(self.levels),
      subjects=tuple(self.subjects),
      sizes=sizes,
      lines=padded(self.line, np.int64, 0),
      offsets=np.stack([padded(column, np.int64, -1) for column in offsets]),
      correct=padded(self.correct, bool, False),
      valid=padded(self.answered, bool, False),
      answer_ids=padded(self.answer_id, np.int32, 0) if has["answer"] else None,
      step_probs=step_probs if has["rating_probs"] else None,
      step_slots=np.repeat(slot, np.array(self.step_count)) if has["rating_probs"] else None,
      orm=padded(self.orm, np.float64, np.nan) if has["orm_score"] else None,
      prm_score=padded(self.prm_score, np.float64, np.nan),
    )


def _number(record: dict, key: str, bad) -> float:
  """A finite number, or NaN where the key is absent."""
  value = record.get(key, math.nan)
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise bad(f'"{key}" is {show(value)}: expected a number')
  try:
    number = float(value)
  except OverflowError:
    number = math.inf
  if key in record and not math.isfinite(number):
    raise bad(f'"{key}" is {show(value)}: expected a finite number')
  return number
