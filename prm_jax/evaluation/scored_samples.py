"""Scored candidate solutions: the readers of their files, and the arrays that these give.

Three kinds of file are told apart by their content:

* JSON lines of one candidate each, with the keys of `scored-test-samples.jsonl` of openai/prm800k:
  the fields of `Candidate`; other keys are kept for `read_solutions` only;
* JSON lines of one problem each, `{"problem", "samples": [{...}, ...]}`.  A sample has the keys of
  its line too.  Its bare `score` is a score of the whole solution: its `orm_score`;
* a bundle (`sample_arrays`).

Lines are streamed and their text is not kept: `read_solutions` fetches the few that a page shows.
"""

import array
import itertools
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from prm_jax.evaluation.sample_arrays import ScoredSamples, is_bundle, place, read_bundle
from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import BadLine, Text, show
from prm_jax.runtime.progress import Progress

# On all candidates or on none; but one that was cut off needs no scores (score.py --skip_cut_off).
KEYS, SCORES = frozenset({"answer", "unique_id"}), frozenset({"rating_probs", "orm_score"})
# OpenAI generated 1,860 solutions of each problem and left out those that were cut off (README of
# openai/prm800k); the release is recognised by that number and by the form of its unique_id.
RELEASE_DRAWN, RELEASE_ID = 1860, re.compile(r"test/\w+/\d+\.json")
MAX_SLOTS = 20_000_000  # of tables [P, M], which take about 100 bytes a slot, if padding fills most
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Probability = Annotated[float, msgspec.Meta(ge=0)]
Drawn = Annotated[int, msgspec.Meta(ge=1)]
Place = tuple[int, int, int]  # line number, index in its "samples" or -1, byte offset of the line


class Rating(msgspec.Struct, gc=False):
  """Probabilities of a step's ratings."""

  wrong: Probability = msgspec.field(name="-1")
  neutral: Probability = msgspec.field(name="0")
  right: Probability = msgspec.field(name="1")


Ratings = Annotated[list[Rating], msgspec.Meta(min_length=1)]


class Candidate(msgspec.Struct, gc=False, kw_only=True):
  """A scored candidate solution."""

  problem: Text
  is_correct: bool | None  # null: the grader could not decide, which counts as wrong
  steps: list[str] = []
  rating_probs: Ratings | msgspec.UnsetType = msgspec.UNSET  # one for each step
  answer: str | None = None  # null or "": the solution never reached an answer
  finished: bool | None = None  # false: it was cut off, and has no answer
  orm_score: Finite = math.nan  # of an outcome model, higher is better
  prm_score: Finite = math.nan  # of a process model; only compared with `rating_probs`
  level: Any = None  # a number or a text
  subject: Any = None
  unique_id: str | None = None  # of the problem; default: its text
  drawn: Drawn | None = None  # candidates generated for the problem, with those left out


class Group(msgspec.Struct):
  """A problem's line."""

  samples: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]


def read_scored_samples(
  paths: Sequence[pathlib.Path | str],
  progress: bool = False,
  join: Callable[[list[Mapping[str, int]]], list[dict[str, int]]] | None = None,
) -> ScoredSamples:
  """Reads one or more files of scored samples; a name ending in .gz is decompressed.

  Several files hold the same candidates in the same order, scored by different models: their keys
  are merged, and a key that two of them hold must be equal.  Candidates are grouped by `unique_id`,
  or by the problem's text where none has one.  `rating_probs`, `orm_score`, `answer` and
  `unique_id` are each on every candidate or on none; one that was cut off needs no scores.

  Args:
    paths: files of JSON lines, or one bundle.
    progress: show progress on standard error.
    join: which answers are equal, as `Grader.classes`; None: equal strings.  A bundle keeps those
      that it was written with.

  Raises:
    BadLine: a line is not JSON, lacks a key, holds a wrong value or contradicts another; a bundle
      is damaged.
    OSError: a file cannot be read.
  """
  paths = tuple(map(pathlib.Path, paths))
  for path in paths:
    if not path.is_file():  # a pipe cannot be read again for the solutions
      raise FileNotFoundError(f"{path}: no such file, or not a regular file")
    if is_bundle(path):
      if len(paths) > 1:
        raise BadLine(f"{path}: is a score bundle, which is read alone: it holds all the scores")
      return read_bundle(path)
  table = _Table(paths[0])
  try:
    for places, record in _merged(paths, progress):
      table.add(places, record)
  finally:
    table.check_steps()  # a mistake on an earlier line is the one to report
  sizes = tuple(path.stat().st_size for path in paths)
  return ScoredSamples(files=paths, file_bytes=sizes, **table.columns(len(paths), join))


def read_solutions(samples: ScoredSamples, slots: Sequence[tuple[int, int]]) -> list[dict]:
  """The full records of a few candidates (p, m), read again from the source files.

  Raises:
    OSError: a file is gone, or has changed since it was read.
  """
  records = [{} for _ in slots]
  for f, (path, size) in enumerate(zip(samples.files, samples.file_bytes)):
    places = [samples.places[slot][f].tolist() for slot in slots]
    try:
      if path.stat().st_size != size:
        raise ValueError(f"expected {size} bytes")
      with json_lines.opened(path) as (file, _):
        for i in sorted(range(len(slots)), key=places.__getitem__):
          line, index, offset = places[i]
          file.seek(offset)
          record = json_lines.parse(file.readline(json_lines.MAX_LINE_BYTES), f"line {line}")
          if index >= 0:
            record = _samples(record, path, line)[index]
          if record["problem"] != samples.problems[slots[i][0]]:
            raise ValueError(f"line {line}: another problem")
          records[i] |= record
    except (OSError, ValueError, LookupError, *json_lines.BROKEN_GZIP) as error:
      raise OSError(f"{path}: gone, or changed since it was read: {error}") from None
  return records


def _merged(
  paths: Sequence[pathlib.Path], progress: bool
) -> Iterator[tuple[list[int], dict[str, Any]]]:
  """The candidates of the files, read side by side: places in all files, and merged record."""
  for located in itertools.zip_longest(*(candidates(path, progress) for path in paths)):
    if None in located:
      there = next(place(path, *at[0][:2]) for path, at in zip(paths, located) if at)
      raise BadLine(f"{paths[located.index(None)]}: ends before the candidate at {there}")
    places, merged = located[0]
    for path, (at, record) in zip(paths[1:], located[1:]):
      places += at
      merged = _union(merged, record, "in an earlier file", f"{place(path, *at[:2])}: ")
    yield places, merged


def candidates(path: pathlib.Path, progress: bool) -> Iterator[tuple[Place, dict[str, Any]]]:
  """Place and record of each candidate in a file of either form."""
  bytes_read = {"total": path.stat().st_size, "unit": "B", "unit_scale": True}
  with Progress(desc=f"reading {path.name}", **bytes_read, disable=not progress) as bar:
    for line, offset, record in json_lines.read(path, bar.reach):
      if "samples" not in record or "steps" in record or "is_correct" in record:
        yield (line, -1, offset), record
        continue
      for index, sample in enumerate(_samples(record, path, line)):
        yield (line, index, offset), sample


def _samples(line: dict[str, Any], path: pathlib.Path, number: int) -> list[dict[str, Any]]:
  """The records of a problem's line: each sample's own keys and the line's."""
  samples = json_lines.convert(line, Group, f"{path}:{number}").samples
  shared = {key: value for key, value in line.items() if key != "samples"}
  records = []
  for index, sample in enumerate(samples):
    where = f"{place(path, number, index)}: "
    record = _union(shared, sample, "on the whole line", where)
    if "score" in sample:
      record = _union(record, {"orm_score": sample["score"]}, "beside the sample's score", where)
    records.append(record)
  return records


def _union(known: dict, more: dict, owner: str, where: str = "") -> dict:
  """The keys of both records; BadLine if they contradict each other."""
  for key in known.keys() & more.keys():
    if known[key] != more[key]:
      raise BadLine(f'{where}"{key}" is {show(more[key])}, but {show(known[key])} {owner}')
  return known | more


class _Table:
  """Columns by candidate, in the order of the files."""

  def __init__(self, path: pathlib.Path):
    self.path = path  # the first file, which messages name
    self.keys: set[str] = set()  # which of KEYS and SCORES candidates have
    self.decided: set[frozenset[str]] = set()  # KEYS, SCORES: once a candidate has told
    # By problem: its number, text, level and subject, and the number of each answer.
    self.problems: dict[str, tuple[int, dict[str, Any], dict[str, int]]] = {}
    self.places = array.array("q")  # three for each file
    self.integers = array.array("q")  # three: problem, correct, answer or -1
    self.scores = array.array("d")  # two: orm_score, prm_score
    self.step_counts = array.array("q")
    self.step_probs = array.array("d")  # three for each step

  def add(self, places: Sequence[int], record: dict[str, Any]) -> None:
    """Adds a candidate; BadLine if a key is missing or holds a wrong value."""
    try:
      candidate = json_lines.convert(record, Candidate)
      cut_off = candidate.finished is False
      for kind in (KEYS, SCORES):
        keys = record.keys() & kind
        if kind is SCORES and cut_off and not keys:
          continue
        if kind not in self.decided:
          self.keys |= keys
          self.decided.add(kind)
        if odd := keys ^ (self.keys & kind):
          raise BadLine(f'"{min(odd)}" must be on all lines or on none; this one differs')
      level, subject = candidate.level, candidate.subject
      about = {"problem": candidate.problem, "level": level, "subject": subject}
      about["drawn"] = candidate.drawn
      group = candidate.unique_id or candidate.problem
      p, known, answers = self.problems.setdefault(group, (len(self.problems), about, {}))
      if about != known:
        _union(known, about, "before for the same problem")
      answer, without = candidate.answer, "answer" not in self.keys
      if candidate.is_correct and not answer and not (without or cut_off):
        raise BadLine(f'"is_correct" is true, but "answer" is {show(answer)}')
      ratings = candidate.rating_probs or ()
      if "rating_probs" in record and len(ratings) != len(candidate.steps):
        raise BadLine(
          f'"rating_probs" is {show(record["rating_probs"])}: expected one for each of '
          f"{len(candidate.steps)} steps"
        )
    except BadLine as error:
      raise BadLine(f"{place(self.path, *places[:2])}: {error}") from None
    self.step_probs.extend(itertools.chain.from_iterable(map(msgspec.structs.astuple, ratings)))
    self.step_counts.append(len(ratings))
    missing = cut_off or not (answer or without)
    number = -1 if missing else answers.setdefault(answer, len(answers))
    self.integers.extend((p, candidate.is_correct is True and not cut_off, number))
    self.scores.extend((candidate.orm_score, candidate.prm_score))
    self.places.extend(places)

  def check_steps(self) -> None:
    """BadLine at the first step whose probabilities do not sum to 1."""
    probs = np.frombuffer(self.step_probs).reshape(-1, 3)
    total = probs.sum(axis=1)
    # Probabilities that were rounded to bfloat16 may sum to 0.99 or 1.01.
    bad = np.flatnonzero(~((total >= 0.99) & (total <= 1.01)))
    if len(bad):
      ends = np.cumsum(self.step_counts)
      row = int(np.searchsorted(ends, bad[0], side="right"))
      step = bad[0] - ends[row] + self.step_counts[row]
      at = self.places[row * (len(self.places) // len(ends)) :][:2]
      raise BadLine(
        f'{place(self.path, *at)}: "rating_probs[{step}]" is {show(probs[bad[0]].tolist())}: '
        "expected probabilities of -1, 0 and 1"
      )

  def _joined(self, join: Callable, problem: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """The answers' numbers `[C]` where equal answers have equal ones; -1 stays."""
    texts = [answers for *_, answers in self.problems.values()]
    starts = np.cumsum([0, *map(len, texts)])
    at = starts[problem] + answer  # of each answer among those of all problems
    given = np.bincount(at[answer >= 0], minlength=starts[-1])
    counts = [dict(zip(each, given[start:].tolist())) for each, start in zip(texts, starts)]
    numbers = np.array([n for each in join(counts) for n in each.values()], np.int64)
    return np.where(answer >= 0, numbers[at], -1) if len(numbers) else answer

  def _drawn(self, present: np.ndarray) -> np.ndarray:
    """`[P]` candidates that were generated, of which `present` are in the files."""
    said = [about["drawn"] for _, about, _ in self.problems.values()]
    if present.max() == RELEASE_DRAWN and all(map(RELEASE_ID.fullmatch, self.problems)):
      said = [RELEASE_DRAWN] * len(said)
    for drawn, there, problem in zip(said, present, self.problems):
      if drawn and drawn < there:
        raise BadLine(
          f'{self.path}: "drawn" is {drawn}, but {show(problem)} has {there} candidates'
        )
    return np.array([drawn or there for drawn, there in zip(said, present)], np.int64)

  def columns(self, files: int, join: Callable | None) -> dict[str, Any]:
    """The fields of `ScoredSamples` by problem, candidate and step."""
    problem, correct, answer = np.frombuffer(self.integers, np.int64).reshape(-1, 3).T
    if join and "answer" in self.keys:
      answer = self._joined(join, problem, answer)
    orm, prm_score = np.frombuffer(self.scores).reshape(-1, 2).T
    present = np.bincount(problem)
    sizes = self._drawn(present)
    shape = (len(sizes), int(sizes.max()))
    if math.prod(shape) > max(MAX_SLOTS, 4 * len(problem)):
      raise BadLine(
        f"{self.path}: {shape[0]:,} problems with up to {shape[1]:,} candidates, but "
        f"{len(problem):,} in all: rerank the problems with many and with few candidates apart"
      )
    existing = np.arange(shape[1]) < present[:, None]
    slots = np.empty_like(problem)
    slots[np.argsort(problem, kind="stable")] = np.flatnonzero(existing)

    def padded(column, fill):
      result = np.full((existing.size, *column.shape[1:]), fill, column.dtype)
      result[slots] = column
      return result.reshape(*existing.shape, *column.shape[1:])

    about = [about for _, about, _ in self.problems.values()]
    text = lambda value: None if value is None else str(value)
    keys = ("problem", "level", "subject")
    columns = {f"{key}s": tuple(text(each[key]) for each in about) for key in keys}
    columns |= {
      "sizes": sizes,
      "places": padded(np.frombuffer(self.places, np.int64).reshape(-1, files, 3), 0),
      "correct": padded(correct == 1, False),
      "valid": padded(answer >= 0, False),
      "prm_score": padded(prm_score, np.nan),
      "slots": slots,
    }
    if "answer" in self.keys:
      columns["answer_ids"] = padded(np.maximum(answer, 0), 0)
    if "orm_score" in self.keys:
      columns["orm"] = padded(orm, np.nan)
    if "rating_probs" in self.keys:
      columns["step_counts"] = np.frombuffer(self.step_counts, np.int64)
      columns["step_probs"] = np.frombuffer(self.step_probs).reshape(-1, 3)
    return columns
