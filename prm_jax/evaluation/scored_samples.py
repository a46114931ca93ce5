"""Reads scored candidate solutions into arrays.

Three forms are told apart by their content:

* JSON lines of one candidate each, with the keys of `scored-test-samples.jsonl` of openai/prm800k:
  `problem`, `steps`, `answer`, `is_correct`, `rating_probs` (`{"-1": p, "0": p, "1": p}` per step),
  `prm_score`, `orm_score`, and optionally `level`, `subject`, `unique_id`;
* JSON lines of one problem each, `{"problem", "samples": [{...}, ...]}`: a sample has such keys
  too, the line those that all its samples share.  A sample's bare `score` is a score of the whole
  solution, and counts as its `orm_score`;
* a score bundle, which `score_bundle.write_bundle` makes of either for the next time.

Lines are streamed and their text is not kept: `read_solutions` fetches the few that a page shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import stat
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tqdm

from prm_jax.evaluation import score_bundle
from prm_jax.evaluation.candidate_table import GroupAnswers, Table, by_text, place
from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import BadLine, show


class MissingSource(OSError):
  """A file that solutions were scored from is gone, or is not as it was."""


@dataclasses.dataclass(frozen=True)
class ScoredSamples:
  """Candidates by problem; [P, M] arrays are padded where a problem has fewer than M."""

  files: tuple[pathlib.Path, ...]  # where the texts are; of a bundle: the files it was made of
  file_bytes: tuple[int, ...]  # their sizes when they were read
  problems: tuple[str, ...]  # [P] texts
  levels: tuple[str | None, ...]  # [P]
  subjects: tuple[str | None, ...]  # [P]
  sizes: np.ndarray  # [P] candidates in the files
  lines: np.ndarray  # [P, M] line number from 1; 0: padding
  indices: np.ndarray | None  # [P, M] place in the line's "samples", from 0; None: no such lines
  offsets: np.ndarray  # [files, P, M] where that line begins, in (decompressed) bytes
  correct: np.ndarray  # [P, M] bool
  valid: np.ndarray  # [P, M] bool; False: padding, or no answer: such are never chosen
  answer_ids: np.ndarray | None  # [P, M] answers of a problem that are the same have equal numbers
  step_probs: np.ndarray | None  # [T, 3] of the ratings -1, 0, 1, all solutions' steps in a row
  step_slots: np.ndarray | None  # [T] the solution of each step, as p * M + m
  orm: np.ndarray | None  # [P, M]; NaN: padding
  prm_score: np.ndarray  # [P, M] as the file gives it; NaN: not given

  def where(self, p: int, m: int) -> str:
    """The file and line of a candidate, for messages."""
    index = None if self.indices is None else int(self.indices[p, m])
    return place(self.files[0], int(self.lines[p, m]), index)


def read_scored_samples(
  paths: Sequence[pathlib.Path | str],
  progress: bool = False,
  group_answers: GroupAnswers = by_text,
) -> ScoredSamples:
  """Reads one or more files of scored samples; a name ending in .gz is decompressed.

  Several files hold the same candidates in the same order, scored by different models: their keys
  are merged, and a key that two of them hold must be equal.  Candidates are grouped by `unique_id`,
  or by the problem's text where none has one.  `rating_probs`, `orm_score`, `answer` and
  `unique_id` are each on every candidate or on none.  An `answer` of null or "" marks a candidate
  that never reached one.

  Args:
    paths: the files, all with one candidate a line or all with one problem a line; or one bundle.
    progress: show a progress bar, if standard error is a terminal.
    group_answers: takes the distinct answers of a problem in order of first appearance, and gives
      an integer for each: equal ones are the same answer.  Default: equal texts.

  Returns:
    ScoredSamples.

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
    if score_bundle.is_bundle(path):
      if len(paths) > 1:
        raise BadLine(f"{path}: is a score bundle, which is read alone: it holds all the scores")
      if group_answers is not by_text:
        raise ValueError(f"{path}: is a score bundle: group its answers before it is written")
      return ScoredSamples(**score_bundle.read_bundle(path))
  sizes = tuple(path.stat().st_size for path in paths)
  table = Table(paths[0], len(paths))
  with contextlib.ExitStack() as stack:
    readers = [stack.enter_context(contextlib.closing(_candidates(p, progress))) for p in paths]
    try:
      if len(readers) == 1:
        for line, offset, index, record in readers[0]:
          table.add(line, index, record, (offset,))
      else:
        for records in itertools.zip_longest(*readers):
          merged = _merge(paths, records)
          table.add(records[0][0], records[0][2], merged, [offset for _, offset, _, _ in records])
    except BadLine:
      table.check_steps()  # an earlier mistake, if there is one, is the one to report
      raise
  return ScoredSamples(files=paths, file_bytes=sizes, **table.columns(group_answers))


def read_solutions(samples: ScoredSamples, slots: Sequence[tuple[int, int]]) -> list[dict]:
  """The full records of a few candidates (p, m), read again from where they stand.

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


def _candidates(
  path: pathlib.Path, progress: bool
) -> Iterator[tuple[int, int, int | None, dict[str, Any]]]:
  """(line number, byte offset, place in its "samples" or None, record) of each candidate."""
  grouped = None
  for line, offset, record in _records(path, progress):
    if grouped is None:
      grouped = "samples" in record and "is_correct" not in record
    if not grouped:
      yield line, offset, None, record
      continue
    samples = record.get("samples")
    if not isinstance(samples, list) or not samples:
      raise BadLine(
        f'{path}:{line}: "samples" is {show(samples)}: expected a list of objects, not empty'
      )
    for index, sample in enumerate(samples):
      yield line, offset, index, _sample(record, sample, place(path, line, index))
  if grouped is None:
    raise BadLine(f"{path}: empty")


def _merge(paths, records) -> dict[str, Any]:
  """One record of every file's; None: the file has ended."""
  if None in records:
    ended = paths[records.index(None)]
    there = next(place(p, r[0], r[2]) for p, r in zip(paths, records) if r is not None)
    raise BadLine(f"{ended}: ends before the candidate at {there}")
  (first_line, _, first, merged), *others = records
  for path, (line, _, index, record) in zip(paths[1:], others):
    here = place(path, line, index)
    if index != first:
      raise BadLine(
        f"{here}: the same candidate is at {place(paths[0], first_line, first)}: all files must "
        "have one candidate a line, or all the same samples on a line"
      )
    for key in merged.keys() & record.keys():
      if merged[key] != record[key]:
        raise BadLine(
          f'{here}: "{key}" is {show(record[key])}, but {show(merged[key])} for the same '
          "candidate of an earlier input: the files must hold the same candidates"
        )
    merged = merged | record
  return merged


def _sample(line: dict[str, Any], sample: Any, where: str) -> dict[str, Any]:
  """A sample's record: its own keys and its line's."""
  if not isinstance(sample, dict):
    raise BadLine(f"{where}: is {show(sample)}: expected an object")
  for key in line.keys() & sample.keys():
    if line[key] != sample[key]:
      raise BadLine(
        f'{where}: "{key}" is {show(sample[key])}, but {show(line[key])} for the whole line'
      )
  record = line | sample
  del record["samples"]
  if "score" in sample:
    if "orm_score" in record:
      raise BadLine(f'{where}: "score" and "orm_score" are both here: which ranks the solutions?')
    record["orm_score"] = record.pop("score")
  return record


def _records(path: pathlib.Path, progress: bool) -> Iterator[tuple[int, int, dict[str, Any]]]:
  """As `json_lines.read`, with a progress bar."""
  hidden = None if progress else True  # None: hidden unless standard error is a terminal
  size = path.stat().st_size
  with tqdm.tqdm(total=size, desc=path.name, unit="B", unit_scale=True, disable=hidden) as bar:
    yield from json_lines.read(path, lambda position: bar.update(position - bar.n))
