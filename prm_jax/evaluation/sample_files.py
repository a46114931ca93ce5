"""Reads files of scored candidate solutions into arrays.

Three forms are told apart by their content:

* JSON lines of one candidate each, with the keys of `scored-test-samples.jsonl` of openai/prm800k:
  the fields of `Candidate` and `RatedCandidate`; other keys are kept for `read_solutions` only;
* JSON lines of one problem each, `{"problem", "samples": [{...}, ...]}`: a sample has such keys
  too, the line those that all its samples share.  A sample's bare `score` is a score of the whole
  solution, and counts as its `orm_score`;
* a bundle, which `scored_samples.write_bundle` makes of either for the next time.

Lines are streamed and their text is not kept: `read_solutions` fetches the few that a page shows.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import math
import pathlib
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import tqdm

from prm_jax.evaluation import scored_samples
from prm_jax.evaluation.scored_samples import ScoredSamples, place
from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import BadLine, Text, show

STRICT = ("rating_probs", "orm_score", "answer", "unique_id")  # on every candidate or on none
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
GroupAnswers = Callable[[Sequence[str]], Sequence[int]]
# Line number, place in the line's "samples" or None, byte offset in each file, record.
Located = tuple[int, int | None, tuple[int, ...], dict[str, Any]]


class Candidate(msgspec.Struct, gc=False, kw_only=True):
  """A scored candidate solution."""

  problem: Text
  is_correct: bool
  answer: str | None = None  # null or "": the solution never reached an answer
  orm_score: Finite = math.nan  # of an outcome model, higher is better
  prm_score: Finite = math.nan  # of a process model; only compared with `rating_probs`
  level: Any = None  # a number or a text
  subject: Any = None
  unique_id: str | msgspec.UnsetType = msgspec.UNSET  # of the problem; default: its text


class Rating(msgspec.Struct, gc=False):
  """Probabilities of a step's ratings."""

  wrong: float = msgspec.field(name="-1")
  neutral: float = msgspec.field(name="0")
  right: float = msgspec.field(name="1")


class RatedCandidate(Candidate, gc=False, kw_only=True):
  """A candidate whose steps a process model rated."""

  steps: Annotated[list[str], msgspec.Meta(min_length=1)]
  rating_probs: list[Rating]  # one for each step


class MissingSource(OSError):
  """A file that solutions were scored from is gone, or is not as it was."""


def by_text(answers: Sequence[str]) -> Sequence[int]:
  """Groups a problem's answers by equal texts: each distinct text is an answer of its own."""
  return range(len(answers))


def read_scored_samples(
  paths: Sequence[pathlib.Path | str],
  progress: bool = False,
  group_answers: GroupAnswers = by_text,
) -> ScoredSamples:
  """Reads one or more files of scored samples; a name ending in .gz is decompressed.

  Several files hold the same candidates in the same order, scored by different models: their keys
  are merged, and a key that two of them hold must be equal.  Candidates are grouped by `unique_id`,
  or by the problem's text where none has one.  `rating_probs`, `orm_score`, `answer` and
  `unique_id` are each on every candidate or on none.

  Args:
    paths: the files, all with one candidate a line or all with one problem a line; or one bundle.
    progress: show a progress bar, if standard error is a terminal.
    group_answers: takes the distinct answers of a problem in order of first appearance, and gives
      an integer for each: equal ones are the same answer.  Default: equal texts.

  Raises:
    BadLine: a line is not JSON, lacks a key, holds a wrong value or contradicts another; a bundle
      is damaged.
    ValueError: `group_answers` gives no integer for each answer, or is given for a bundle, whose
      answers have been grouped.
    OSError: a file cannot be read.
  """
  paths = tuple(pathlib.Path(path) for path in paths)
  for path in paths:
    if path.exists() and not path.is_file():
      raise OSError(f"{path}: is a folder or a pipe: only a file can be read more than once")
    if scored_samples.is_bundle(path):
      if len(paths) > 1:
        raise BadLine(f"{path}: is a score bundle, which is read alone: it holds all the scores")
      if group_answers is not by_text:
        raise ValueError(f"{path}: is a score bundle: group its answers before it is written")
      return scored_samples.read_bundle(path)
  sizes = tuple(path.stat().st_size for path in paths)
  table = _Table(paths[0], len(paths))
  try:
    for candidate in _merged(paths, progress):
      table.add(*candidate)
  except BadLine:
    table.check_steps()  # a mistake on an earlier line is the one to report
    raise
  return ScoredSamples(files=paths, file_bytes=sizes, **table.columns(group_answers))


def read_solutions(samples: ScoredSamples, slots: Sequence[tuple[int, int]]) -> list[dict]:
  """The full records of a few candidates (p, m), read again from the source files.

  A sample of a problem's line has the keys of the line too.

  Raises:
    MissingSource: a file is gone, or has changed since it was read.
  """
  records = [{} for _ in slots]
  for path, size, offsets in zip(samples.files, samples.file_bytes, samples.offsets):
    try:
      about = path.stat()
      if not stat.S_ISREG(about.st_mode):  # a pipe or a device might never end
        raise OSError("is a folder, a pipe or a device")
      if about.st_size != size:
        raise ValueError(f"{about.st_size} bytes, not {size}")
      with json_lines.opened(path) as (file, _):
        for i in sorted(range(len(slots)), key=lambda i: offsets[slots[i]]):
          file.seek(offsets[slots[i]])
          line = file.readline(json_lines.MAX_LINE_BYTES)
          record = json_lines.parse(line, f"byte {offsets[slots[i]]}")
          if samples.indices is not None:
            index = int(samples.indices[slots[i]])
            record = _sample(record, record["samples"][index], place(path, 0, index))
          if record["problem"] != samples.problems[slots[i][0]]:
            raise ValueError("another problem")
          records[i].update(record)
    except OSError as error:
      raise MissingSource(f"{path}: cannot be read again: {error.strerror or error}") from None
    except (ValueError, LookupError, TypeError, *json_lines.BROKEN_GZIP) as error:
      raise MissingSource(f"{path}: has changed since it was read ({error})") from None
  return records


def _merged(paths: Sequence[pathlib.Path], progress: bool) -> Iterator[Located]:
  """The candidates of one file, or of several that are read side by side and merged."""
  with contextlib.ExitStack() as stack:
    readers = [stack.enter_context(contextlib.closing(_candidates(p, progress))) for p in paths]
    if len(readers) == 1:
      yield from readers[0]
      return
    for located in itertools.zip_longest(*readers):
      if None in located:
        ended = paths[located.index(None)]
        there = next(place(p, x[0], x[1]) for p, x in zip(paths, located) if x is not None)
        raise BadLine(f"{ended}: ends before the candidate at {there}")
      (first_line, first, *_), *_ = located
      merged = {}
      for path, (line, index, _, record) in zip(paths, located):
        here = place(path, line, index)
        if index != first:
          raise BadLine(
            f"{here}: the same candidate is at {place(paths[0], first_line, first)}: all files "
            "must have one candidate a line, or all the same samples on a line"
          )
        merged = _union(merged, record, here, "the same candidate of an earlier input")
      yield first_line, first, tuple(offset for _, _, (offset,), _ in located), merged


def _candidates(path: pathlib.Path, progress: bool) -> Iterator[Located]:
  """The candidates of one file."""
  hidden = None if progress else True  # None: hidden unless standard error is a terminal
  grouped, name, size = None, str(path), path.stat().st_size
  with tqdm.tqdm(total=size, desc=path.name, unit="B", unit_scale=True, disable=hidden) as bar:
    for line, offset, record in json_lines.read(path, lambda at: bar.update(at - bar.n)):
      if grouped is None:
        grouped = "samples" in record and "is_correct" not in record
      if not grouped:
        yield line, None, (offset,), record
        continue
      samples = record.get("samples")
      if not isinstance(samples, list) or not samples:
        raise BadLine(
          f'{path}:{line}: "samples" is {show(samples)}: expected a list of objects, not empty'
        )
      for index, sample in enumerate(samples):
        yield line, index, (offset,), _sample(record, sample, place(name, line, index))
  if grouped is None:
    raise BadLine(f"{path}: empty")


def _sample(line: dict[str, Any], sample: Any, where: str) -> dict[str, Any]:
  """A sample's record: its own keys and its line's."""
  if not isinstance(sample, dict):
    raise BadLine(f"{where}: is {show(sample)}: expected an object")
  record = _union(line, sample, where, "the whole line")
  del record["samples"]
  if "score" in sample:
    if "orm_score" in record:
      raise BadLine(f'{where}: "score" and "orm_score" are both here: which ranks the solutions?')
    record["orm_score"] = record.pop("score")
  return record


def _union(known: dict, more: dict, where: str, owner: str) -> dict:
  """The keys of both records, which must not contradict each other; `known` is of `owner`."""
  for key in known.keys() & more.keys():
    if known[key] != more[key]:
      raise BadLine(
        f'{where}: "{key}" is {show(more[key])}, but {show(known[key])} for {owner}: the same '
        "candidate has one value of each key"
      )
  return known | more


class _Table:
  """Columns by candidate, in the order of the files; steps are kept flat."""

  def __init__(self, path: pathlib.Path, files: int):
    self.path = str(path)  # the first file, which messages name
    self.files = files
    self.has: tuple[bool, ...] | None = None  # which of STRICT the first candidate has
    self.known: dict[str, tuple[int, tuple]] = {}  # number, text, level and subject of a problem
    self.answers: list[dict[str, int]] = []  # by problem: number of each text
    self.integers = array.array("q")  # five each: line, index, problem, correct, answer; -1: none
    self.scores = array.array("d")  # two each: orm_score, prm_score
    self.offsets = array.array("q")  # one a file
    self.step_count = array.array("q")
    self.step_probs = array.array("d")  # three a step

  def add(self, line: int, index: int | None, offsets: Sequence[int], record: dict) -> None:
    """Adds a candidate; BadLine if a key is missing or holds a wrong value.

    The sums of its probabilities are checked by `check_steps`, for many candidates at once.
    """
    has = (  # in the order of STRICT; a loop over it takes three times as long
      "rating_probs" in record,
      "orm_score" in record,
      "answer" in record,
      "unique_id" in record,
    )
    try:
      if has != self.has:
        self._check_keys(has)
      candidate = json_lines.convert(record, RatedCandidate if has[0] else Candidate)
      p = self._problem(candidate)
      answer = candidate.answer
      if candidate.is_correct and has[2] and not answer:
        raise BadLine(f'"is_correct" is true, but "answer" is {show(answer)}')
      if has[0] and len(candidate.rating_probs) != (steps := len(candidate.steps)):
        shown = show(record["rating_probs"])
        raise BadLine(f'"rating_probs" is {shown}: expected one for each of {steps} steps')
    except BadLine as error:
      raise BadLine(f"{place(self.path, line, index)}: {error}") from None
    if has[0]:
      ratings = candidate.rating_probs
      self.step_probs.extend(itertools.chain.from_iterable(map(msgspec.structs.astuple, ratings)))
      self.step_count.append(steps)
    numbers = self.answers[p]
    number = numbers.setdefault(answer, len(numbers)) if answer else -1
    index = -1 if index is None else index
    self.integers.extend((line, index, p, candidate.is_correct, number))
    self.scores.extend((candidate.orm_score, candidate.prm_score))
    self.offsets.extend(offsets)

  def check_steps(self) -> None:
    """BadLine of the first step whose numbers are no probabilities."""
    probs = np.frombuffer(self.step_probs).reshape(-1, 3)
    if (bad := scored_samples.first_bad_step(probs)) is None:
      return
    ends = np.cumsum(self.step_count)
    row = int(np.searchsorted(ends, bad, side="right"))
    step = bad - int(ends[row]) + self.step_count[row]
    line, index = self.integers[5 * row : 5 * row + 2]
    rating = dict(zip(("-1", "0", "1"), probs[bad].tolist()))
    raise BadLine(
      f'{place(self.path, line, None if index < 0 else index)}: "rating_probs[{step}]" is '
      f"{show(rating)}: expected probabilities of -1, 0 and 1"
    )

  def columns(self, group_answers: GroupAnswers) -> dict[str, Any]:
    """The fields of `ScoredSamples` by problem, candidate and step."""
    self.check_steps()
    integers = np.frombuffer(self.integers, np.int64).reshape(-1, 5).T
    line, index, problem, correct, answer = integers
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
    groups = [_grouped(group_answers, list(texts)) for texts in self.answers]
    starts = np.cumsum([0] + [len(ids) for ids in groups])[:-1]
    groups = np.concatenate([*groups, [0]])  # the 0: a problem may have no answer at all
    answer_ids = np.where(answer >= 0, groups[starts[problem] + np.maximum(answer, 0)], 0)
    offsets = np.frombuffer(self.offsets, np.int64).reshape(-1, self.files).T
    texts, levels, subjects = zip(*(about for _, about in self.known.values()))
    return {
      "problems": texts,
      "levels": tuple(map(_text, levels)),
      "subjects": tuple(map(_text, subjects)),
      "sizes": sizes,
      "lines": padded(line, np.int64, 0),
      "indices": padded(index, np.int64, -1) if index[0] >= 0 else None,
      "offsets": np.stack([padded(column, np.int64, -1) for column in offsets]),
      "correct": padded(correct, bool, False),
      "valid": padded(answer >= 0 if has_answers else True, bool, False),
      "answer_ids": padded(answer_ids, np.int32, 0) if has_answers else None,
      "step_probs": np.frombuffer(self.step_probs).reshape(-1, 3) if has_steps else None,
      "step_slots": np.repeat(slot, self.step_count) if has_steps else None,
      "orm": padded(orm, np.float64, np.nan) if has_orm else None,
      "prm_score": padded(prm_score, np.float64, np.nan),
    }

  def _check_keys(self, has: tuple[bool, ...]) -> None:
    """BadLine unless this is the first candidate, whose keys the others must have too."""
    for key, here, before in zip(STRICT, has, self.has or has):
      if here and not before:
        raise BadLine(f'"{key}" is here, and on none of the lines before')
      if before and not here:
        raise BadLine(f'no "{key}", which the lines before have')
    self.has = has

  def _problem(self, candidate: Candidate) -> int:
    """The number of the candidate's problem; BadLine if it differs from the lines before."""
    group = candidate.problem if candidate.unique_id is msgspec.UNSET else candidate.unique_id
    about = (candidate.problem, candidate.level, candidate.subject)
    known = self.known.get(group)
    if known is None:
      known = self.known[group] = (len(self.known), about)
      self.answers.append({})
    p, before = known
    if about != before:
      for key, value, same in zip(("problem", "level", "subject"), about, before):
        if (value := _text(value)) != (same := _text(same)):
          message = f"is {show(value)}, but {show(same)} before for the same problem"
          raise BadLine(f'"{key}" {message}')
    return p


def _text(value: Any) -> str | None:
  """A level or a subject: 5 and "5" are the same."""
  return None if value is None else str(value)


def _grouped(group_answers: GroupAnswers, texts: list[str]) -> np.ndarray:
  """A number from 0 for each text, in order of first appearance."""
  ids = np.array(group_answers(texts))
  if ids.shape != (len(texts),) or (texts and ids.dtype.kind not in "iu"):
    raise ValueError(
      f"group_answers gave {show(ids.tolist())} for {show(texts)}: expected an integer for each"
    )
  _, first, number = np.unique(ids, return_index=True, return_inverse=True)
  return np.argsort(np.argsort(first))[number]
