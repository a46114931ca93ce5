"""Columns of scored candidates that grow by a candidate at a time, checked as they come."""

from __future__ import annotations

import array
import math
import operator
import pathlib
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from prm_jax.runtime.json_lines import BadLine, show

STRICT = ("rating_probs", "orm_score", "answer", "unique_id")  # on every candidate or on none
BLOCK = 3 * 2**16  # probabilities that are checked at a time

GroupAnswers = Callable[[Sequence[str]], Sequence[int]]

_ratings = operator.itemgetter("-1", "0", "1")


def by_text(answers: Sequence[str]) -> Sequence[int]:
  """Groups a problem's answers by equal texts: each distinct text is an answer of its own."""
  return range(len(answers))


def place(path: pathlib.Path, line: int, index: int | None) -> str:
  """Where a candidate stands, for messages; `index` is its place in its line's "samples"."""
  return f"{path}:{line}" if index is None else f'{path}:{line}: "samples"[{index}]'


class Table:
  """Columns by candidate in the order of the file; steps are kept flat.

  A step's probabilities are checked in blocks: after an error elsewhere `check_steps` must be
  called, so that of two mistakes the first is reported.
  """

  def __init__(self, path: pathlib.Path, files: int):
    self.path = path  # the first file, which messages name
    self.files = files
    self.has: tuple[bool, ...] | None = None  # which of STRICT the first candidate has
    self.known: dict[str, tuple[int, tuple]] = {}  # number and traits by unique_id or text
    self.problems: list[str] = []
    self.levels: list[str | None] = []
    self.subjects: list[str | None] = []
    self.answers: list[dict[str, int]] = []  # by problem: number of each text
    self.integers = array.array("q")  # four each: line in the first file, problem, correct, answer
    self.index = array.array("q")  # its place in that line's "samples"; none: a line is a candidate
    self.scores = array.array("d")  # two each: orm_score, prm_score
    self.step_count = array.array("q")
    self.offsets = array.array("q")  # one a file
    self.step_probs = array.array("d")  # three a step
    self.checked = 0  # how many of step_probs are known to be fine

  def add(self, line: int, index: int | None, record: dict, offsets: Sequence[int]) -> None:
    """Adds a candidate.

    Args:
      line: its number in the first file.
      index: its place in that line's "samples"; None: the line is the candidate.
      record: its keys and values.
      offsets: where its line begins in each file.

    Raises:
      BadLine: a key is missing or holds a wrong value.
    """
    has = (  # in the order of STRICT; a loop over it takes three times as long
      "rating_probs" in record,
      "orm_score" in record,
      "answer" in record,
      "unique_id" in record,
    )
    if has != self.has:
      if self.has is not None:
        self._differs(line, index, has)
      self.has = has
    problem, correct = record.get("problem"), record.get("is_correct")
    if not isinstance(problem, str) or not problem:
      raise self._bad(line, index, f'"problem" is {show(problem)}: expected a text')
    if not isinstance(correct, bool):
      raise self._bad(line, index, f'"is_correct" is {show(correct)}: expected true or false')
    p = self._problem(line, index, problem, record)
    answer = record.get("answer")
    if type(answer) is not str:
      if answer is not None:
        message = f'"answer" is {show(answer)}: expected a text, or null for none'
        raise self._bad(line, index, message)
      answer = ""
    if correct and not answer and has[2]:
      message = f'"is_correct" is true, but "answer" is {show(record["answer"])}'
      raise self._bad(line, index, message)
    orm, prm_score = record.get("orm_score"), record.get("prm_score")
    if type(orm) is not float or orm - orm != 0:
      orm = self._number(line, index, record, "orm_score")
    if type(prm_score) is not float or prm_score - prm_score != 0:
      prm_score = self._number(line, index, record, "prm_score")
    if has[0]:
      self._steps(line, index, record)  # the last that can fail: columns stay of one length
    numbers = self.answers[p]
    number = numbers.setdefault(answer, len(numbers)) if answer else -1
    self.integers.extend((line, p, correct, number))
    self.scores.extend((orm, prm_score))
    self.offsets.extend(offsets)
    if index is not None:
      self.index.append(index)
    if len(self.step_probs) - self.checked >= BLOCK:
      self.check_steps()

  def check_steps(self) -> None:
    """Checks the probabilities that were added since the last time.

    Raises:
      BadLine: of the first step whose three are no probabilities.
    """
    if self.checked == len(self.step_probs):
      return
    block = np.frombuffer(self.step_probs, offset=8 * self.checked).reshape(-1, 3)
    minus, zero, plus = block.T
    with np.errstate(invalid="ignore"):  # a NaN fails every comparison
      total = minus + zero + plus
      fine = (minus >= 0) & (zero >= 0) & (plus >= 0)
      # Probabilities that were rounded to bfloat16 may sum to 0.99 or 1.01.
      fine &= (total >= 0.99) & (total <= 1.01)
    if not fine.all():
      first = int(fine.argmin())
      ends = np.cumsum(self.step_count)
      row = int(np.searchsorted(ends, self.checked // 3 + first, side="right"))
      step = self.checked // 3 + first - int(ends[row]) + self.step_count[row]
      line, index = self.integers[4 * row], self.index[row] if self.index else None
      rating = dict(zip(("-1", "0", "1"), block[first].tolist()))
      raise self._bad_step(line, index, step, rating)
    self.checked = len(self.step_probs)

  def columns(self, group_answers: GroupAnswers) -> dict[str, Any]:
    """The fields of `ScoredSamples` by candidate and step.

    Raises:
      ValueError: `group_answers` gives anything but an integer for each answer.
    """
    self.check_steps()
    line, problem, correct, answer_ids = np.frombuffer(self.integers, np.int64).reshape(-1, 4).T
    orm, prm_score = np.frombuffer(self.scores).reshape(-1, 2).T
    sizes = np.bincount(problem)
    shape = (len(sizes), int(sizes.max()))
    # A candidate's place among its problem's: its rank in a stable sort by problem.
    order = np.argsort(problem, kind="stable")
    rank = np.empty_like(problem)
    rank[order] = np.arange(len(problem)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    slot = problem * shape[1] + rank

    def padded(column, dtype, fill):
      result = np.full(shape, fill, dtype)
      result.flat[slot] = column
      return result

    has_steps, has_orm, has_answers, _ = self.has
    offsets = np.frombuffer(self.offsets, np.int64).reshape(-1, self.files).T
    answered = answer_ids >= 0 if has_answers else True
    answer_ids = np.maximum(answer_ids, 0)
    if has_answers and group_answers is not by_text:
      groups = [_grouped(group_answers, list(texts)) for texts in self.answers]
      starts = np.cumsum([0] + [len(ids) for ids in groups])[:-1]
      ids = np.concatenate([*groups, [0]])  # the 0: a problem may have no answer at all
      answer_ids = np.where(answered, ids[starts[problem] + answer_ids], 0)
    return {
      "problems": tuple(self.problems),
      "levels": tuple(self.levels),
      "subjects": tuple(self.subjects),
      "sizes": sizes,
      "lines": padded(line, np.int64, 0),
      "indices": padded(self.index, np.int64, -1) if self.index else None,
      "offsets": np.stack([padded(column, np.int64, -1) for column in offsets]),
      "correct": padded(correct, bool, False),
      "valid": padded(answered, bool, False),
      "answer_ids": padded(answer_ids, np.int32, 0) if has_answers else None,
      "step_probs": np.frombuffer(self.step_probs).reshape(-1, 3) if has_steps else None,
      "step_slots": np.repeat(slot, self.step_count) if has_steps else None,
      "orm": padded(orm, np.float64, np.nan) if has_orm else None,
      "prm_score": padded(prm_score, np.float64, np.nan),
    }

  def _bad(self, line: int, index: int | None, message: str) -> BadLine:
    return BadLine(f"{place(self.path, line, index)}: {message}")

  def _bad_step(self, line: int, index: int | None, step: int, rating: Any) -> BadLine:
    return self._bad(
      line,
      index,
      f'"rating_probs" of step {step} is {show(rating)}: expected probabilities of -1, 0 and 1',
    )

  def _differs(self, line: int, index: int | None, has: tuple[bool, ...]) -> None:
    key, here = next((k, h) for k, h, before in zip(STRICT, has, self.has) if h != before)
    raise self._bad(
      line,
      index,
      f'"{key}" is here, and on none of the lines before'
      if here
      else f'no "{key}", which the lines before have',
    )

  def _problem(self, line: int, index: int | None, text: str, record: dict) -> int:
    group = record.get("unique_id", text)
    if not isinstance(group, str):
      raise self._bad(line, index, f'"unique_id" is {show(group)}: expected a text')
    traits = (text, record.get("level"), record.get("subject"))
    known = self.known.get(group)
    if known is None:
      known = self.known[group] = (len(self.problems), traits)
      self.problems.append(text)
      self.levels.append(_text(traits[1]))
      self.subjects.append(_text(traits[2]))
      self.answers.append({})
    p, before = known
    if traits != before:
      for key, value, same in zip(("problem", "level", "subject"), traits, before):
        if _text(value) != _text(same):
          message = (
            f'"{key}" is {show(_text(value))}, but {show(_text(same))} before for the same problem'
          )
          raise self._bad(line, index, message)
    return p

  def _steps(self, line: int, index: int | None, record: dict) -> None:
    ratings, steps = record["rating_probs"], record.get("steps")
    if not isinstance(steps, list) or set(map(type, steps)) != {str}:
      message = f'"steps" is {show(steps)}: expected a list of texts, not empty'
      raise self._bad(line, index, message)
    if not isinstance(ratings, list) or len(ratings) != len(steps):
      raise self._bad(
        line,
        index,
        f'"rating_probs" is {show(ratings)}: expected one for each of {len(steps)} steps',
      )
    start = len(self.step_probs)
    try:
      self.step_probs.extend(chain.from_iterable(map(_ratings, ratings)))
    except (KeyError, TypeError, OverflowError):  # of an int too large for a float
      step = (len(self.step_probs) - start) // 3
      del self.step_probs[start:]
      raise self._bad_step(line, index, step, ratings[step]) from None
    self.step_count.append(len(steps))

  def _number(self, line: int, index: int | None, record: dict, key: str) -> float:
    """A finite number, or NaN where the key is absent."""
    if key not in record:
      return math.nan
    value = record[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise self._bad(line, index, f'"{key}" is {show(value)}: expected a number')
    try:
      number = float(value)
    except OverflowError:
      number = math.inf
    if not math.isfinite(number):
      raise self._bad(line, index, f'"{key}" is {show(value)}: expected a finite number')
    return number


def _text(value: Any) -> str | None:
  """A level or a subject: 5 and "5" are the same."""
  return None if value is None else str(value)


def _grouped(group_answers: GroupAnswers, texts: list[str]) -> np.ndarray:
  """A number from 0 for each text, in order of first appearance."""
  ids = list(group_answers(texts))
  if len(ids) != len(texts):
    raise ValueError(
      f"group_answers gave {len(ids)} numbers for {len(texts)} answers, {show(texts)}"
    )
  dense: dict[int, int] = {}
  result = np.empty(len(ids), np.int64)
  for i, (text, number) in enumerate(zip(texts, ids)):
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
      raise ValueError(f"group_answers gave {show(number)} for {show(text)}: expected an integer")
    result[i] = dense.setdefault(int(number), len(dense))
  return result
