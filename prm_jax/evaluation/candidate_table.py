"""A table of candidates: checks their records and stores the keys of `Candidate` as columns."""

import array
import difflib
import itertools
import math
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from prm_jax import config as config_lib
from prm_jax.evaluation.sample_arrays import ScoredSamples, place
from prm_jax.evaluation.step_scores import Rating, ScoredSteps
from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import BadLine, Text, show

# Each of these keys is on all candidates or on none.  A candidate that was cut off may lack any of
# the scores (score.py --skip_cut_off): it is never picked.
KEYS = frozenset({"answer", "unique_id"})
SCORES = frozenset({"rating_probs", "step_scores", "orm_score"})
ABOUT = ("problem", "level", "subject", "drawn")  # all lines of a problem agree on these
# OpenAI generated 1,860 solutions of each problem and left out those that were cut off (README of
# openai/prm800k).  This number and the form of unique_id identify the release.
RELEASE_DRAWN, RELEASE_ID = 1860, re.compile(r"test/\w+/\d+\.json")
MAX_SLOTS = 20_000_000  # of [P, M] arrays that are mostly padding; a slot takes about 100 bytes
Ratings = Annotated[list[Rating], msgspec.Meta(min_length=1)]
Scores = Annotated[list[config_lib.Share], msgspec.Meta(min_length=1)]
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Drawn = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class Candidate(ScoredSteps, gc=False, kw_only=True):
  """A scored candidate solution."""

  problem: Text
  is_correct: bool | None  # null counts as wrong: the grader could not decide
  rating_probs: Ratings | msgspec.UnsetType = msgspec.UNSET  # one for each step
  step_scores: Scores | msgspec.UnsetType = msgspec.UNSET  # one for each of `steps`, if given
  answer: str | None = None  # null or blank: the solution never reached an answer
  finished: bool | None = None  # false: it was cut off, and has no answer
  orm_score: Finite = math.nan  # of an outcome model, higher is better
  prm_score: Finite = math.nan  # of a process model; only compared with `rating_probs`
  level: Any = None  # a number or a text
  subject: Any = None
  unique_id: str | None = None  # of the problem; default: its text
  drawn: Drawn | None = None  # candidates generated for the problem, those left out included


def union(known: dict, more: dict, owner: str, where: str = "") -> dict:
  """Returns the keys of both records; raises BadLine if they contradict each other.

  The message begins with `where`; `owner` says where `known` is from.
  """
  for key, b in more.items():
    a = known.get(key, b)
    if a != b and repr(a) != repr(b):  # NaN is not equal to itself
      raise BadLine(f'{where}"{key}" is {show(b)}, but {show(a)} {owner}')
  return known | more


def is_number(value: Any) -> bool:
  """Returns whether a value is a finite number that float64 holds.  Booleans are not numbers."""
  return type(value) in (float, int) and -sys.float_info.max <= value <= sys.float_info.max


def score(record: Mapping[str, Any], name: str, may_lack: bool, others_have: bool) -> float:
  """Returns a record's number in a column that the user named, or NaN.

  Args:
    may_lack: the candidate was cut off and needs no score.
    others_have: an earlier candidate has the column.
  """
  value = record.get(name)
  if is_number(value):
    return value
  if value is None and may_lack:
    return math.nan
  if name in record:
    of_steps = isinstance(value, list) and all(map(is_number, value))
    hint = '; a list of P(right) by step is read from "step_scores"' if of_steps else ""
    raise BadLine(f'"{name}" is {show(value)}: expected a finite number{hint}')
  if others_have:
    raise BadLine(
      f'no "{name}", which other candidates have: every candidate needs a score, unless it was cut '
      'off ("finished" is false)'
    )
  numeric = [key for key, value in record.items() if is_number(value)]
  near = difflib.get_close_matches(name, numeric, n=1, cutoff=0)
  hint = f"the nearest key with a number is {show(near[0])}" if near else "no key has a number"
  raise BadLine(f'no "{name}", which --score names; {hint}')


class Table:
  """The numbers of all candidates, in the order of the files."""

  def __init__(self, paths: Sequence[pathlib.Path], scores: Sequence[str] = ()):
    self.paths = paths
    self.score_names = tuple(scores)  # columns that the user named
    self.found: set[str] = set()  # those of them that a candidate has
    self.keys: dict[frozenset[str], set[str]] = {}  # those of KEYS and SCORES that candidates have
    self.cut_off_scores: set[str] = set()  # those of SCORES on lines that were cut off
    # By problem: its number, the values of ABOUT, and the number of each answer.
    self.problems: dict[str, tuple[int, tuple, dict[str, int]]] = {}
    # A row for each candidate: problem, correct, answer or -1, orm_score, prm_score, number of
    # steps; its `Place` in each file; the columns that the user named.
    self.rows = array.array("d")
    self.step_probs = array.array("d")  # three for each step

  def add(self, places: Sequence[int], record: dict[str, Any]) -> None:
    """Adds a candidate; raises BadLine if a key is missing or holds a wrong value."""
    try:
      candidate = json_lines.convert(record, Candidate)
      cut_off = candidate.finished is False
      for kind in (KEYS, SCORES):
        keys = record.keys() & kind
        if kind is SCORES and cut_off:
          self.cut_off_scores |= keys
          continue
        if odd := keys ^ self.keys.setdefault(kind, keys):
          raise BadLine(f'"{min(odd)}" must be on all lines or on none; this one differs')
      about = (candidate.problem, candidate.level, candidate.subject, candidate.drawn)
      group = candidate.unique_id or candidate.problem
      p, known, answers = self.problems.setdefault(group, (len(self.problems), about, {}))
      if about != known:
        union(dict(zip(ABOUT, known)), dict(zip(ABOUT, about)), "before for the same problem")
      answer, needs_answer = candidate.answer, "answer" in self.keys[KEYS]
      answer = None if answer is not None and answer.isspace() else answer
      if candidate.is_correct and needs_answer and not (answer or cut_off):
        raise BadLine(f'"is_correct" is true, but "answer" is {show(candidate.answer)}')
      candidate.check(candidate.steps)
      named = [score(record, x, cut_off, x in self.found) for x in self.score_names]
    except BadLine as error:
      lacks = 'no "is_correct"'
      error, hint = str(error).replace(lacks, f"{lacks}, which grade.py adds", 1), ""
      if error.startswith('"step_scores['):
        hint = "; a step score is the probability in [0, 1] that the step is right: put logits "
        hint += "through 1 / (1 + exp(-x)), scale other scores to [0, 1]"
      raise BadLine(f"{self._where(places)}: {error}{hint}") from None
    if steps := candidate.rating_probs:
      self.step_probs.extend(itertools.chain.from_iterable(map(msgspec.structs.astuple, steps)))
    elif steps := candidate.step_scores or ():  # a step score s is the probabilities 1 - s, 0, s
      self.step_probs.extend(p for s in steps for p in (1 - s, 0.0, s))
    self.found.update(x for x, number in zip(self.score_names, named) if not math.isnan(number))
    missing = cut_off or (needs_answer and not answer)
    number = -1 if missing else answers.setdefault(answer, len(answers))
    correct = candidate.is_correct is True and not cut_off
    numbers = (p, correct, number, candidate.orm_score, candidate.prm_score, len(steps))
    self.rows.extend((*numbers, *places, *named))

  def _where(self, places: Sequence[int]) -> str:
    """Returns a candidate's place in each of the files, for messages."""
    return " and ".join(place(path, *places[3 * f :][:2]) for f, path in enumerate(self.paths))

  def _joined(self, join: Callable, problem: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """Renumbers the answers `[C]`: equal answers, as `join` has them, share a number; -1 stays."""
    texts = [answers for *_, answers in self.problems.values()]
    starts = np.cumsum([0, *map(len, texts)])
    index = starts[problem] + answer  # among the answers of all problems
    times = np.bincount(index[answer >= 0], minlength=starts[-1]).tolist()
    counts = [dict(zip(each, times[i : i + len(each)])) for each, i in zip(texts, starts.tolist())]
    numbers = np.array([n for each in join(counts) for n in each.values()], np.int64)
    return np.where(answer >= 0, numbers[index], -1) if len(numbers) else answer

  def _sizes(self, present: np.ndarray) -> np.ndarray:
    """Returns how many candidates of each problem were generated `[P]`, given those present."""
    generated = [drawn for _, (*_, drawn), _ in self.problems.values()]
    if present.max() == RELEASE_DRAWN and all(map(RELEASE_ID.fullmatch, self.problems)):
      generated = [RELEASE_DRAWN] * len(generated)
    for drawn, count, problem in zip(generated, present, self.problems):
      if drawn and drawn < count:
        raise BadLine(
          f'{self.paths[0]}: "drawn" is {drawn}, but {show(problem)} has {count} candidates'
        )
    return np.array([drawn or count for drawn, count in zip(generated, present)], np.int64)

  def samples(self, join: Callable | None) -> ScoredSamples:
    """Returns the candidates as arrays; `join` as in `read_scored_samples`."""
    named_from = 6 + 3 * len(self.paths)
    rows = np.frombuffer(self.rows).reshape(-1, named_from + len(self.score_names))
    numbers, places, named = np.split(rows, [6, named_from], axis=1)
    problem, correct, answer, orm, prm_score, counts = numbers.T
    problem, answer = problem.astype(np.int64), answer.astype(np.int64)
    keys = self.keys[KEYS] | self.keys.get(SCORES, self.cut_off_scores)
    if join and "answer" in keys:
      answer = self._joined(join, problem, answer)
    present = np.bincount(problem)
    sizes = self._sizes(present)
    shape = (len(sizes), int(sizes.max()))
    if math.prod(shape) > max(MAX_SLOTS, 4 * len(problem)):
      raise BadLine(
        f"{self.paths[0]}: {shape[0]:,} problems with up to {shape[1]:,} candidates, but "
        f"{len(problem):,} in all: rerank problems with many and with few candidates separately"
      )
    existing = np.arange(shape[1]) < present[:, None]
    slots = np.empty_like(problem)
    slots[np.argsort(problem, kind="stable")] = np.flatnonzero(existing)

    def padded(column, fill):
      result = np.full((existing.size, *column.shape[1:]), fill, column.dtype)
      result[slots] = column
      return result.reshape(*existing.shape, *column.shape[1:])

    text = lambda value: None if value is None or value != value else str(value)  # NaN is missing
    problems, levels, subjects, _ = zip(*(about for _, about, _ in self.problems.values()))
    has_steps = bool(keys & {"rating_probs", "step_scores"})
    scores = [padded(column, np.nan) for column in named.T]
    return ScoredSamples(
      files=tuple(self.paths),
      file_bytes=tuple(path.stat().st_size for path in self.paths),
      problems=problems,
      levels=tuple(map(text, levels)),
      subjects=tuple(map(text, subjects)),
      sizes=sizes,
      places=padded(places.reshape(-1, len(self.paths), 3).astype(np.int64), 0),
      correct=padded(correct == 1, False),
      valid=padded(answer >= 0, False),
      answer_ids=padded(np.maximum(answer, 0), 0) if "answer" in keys else None,
      orm=padded(orm, np.nan) if "orm_score" in keys else None,
      score_names=self.score_names,
      scores=np.stack(scores) if scores else None,
      prm_score=padded(prm_score, np.nan),
      slots=slots,
      step_counts=counts.astype(np.int64) if has_steps else None,
      step_probs=np.frombuffer(self.step_probs).reshape(-1, 3) if has_steps else None,
    )
