"""Reads files of scored candidate solutions into arrays (`ScoredSamples`).

The content of a file tells which of three kinds it is:

* JSON lines of one candidate each, with the keys of `scored-test-samples.jsonl` of openai/prm800k:
  the fields of `Candidate`, and the columns that the caller names as scores; only `read_solutions`
  returns other keys;
* JSON lines of one problem each, `{"problem", "samples": [{...}, ...]}`.  A sample has the keys of
  its line too.  Its bare `score` is a score of the whole solution: its `orm_score`, unless
  `score` is named as a column;
* a bundle (`sample_arrays`).

Lines are streamed and their texts are dropped; `read_solutions` reads the few that a page shows.
"""

import collections
import itertools
import pathlib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from prm_jax.evaluation.candidate_table import Candidate, Table, is_number, union
from prm_jax.evaluation.sample_arrays import ScoredSamples, is_bundle, place, read_bundle
from prm_jax.runtime import exits, json_lines
from prm_jax.runtime.json_lines import BadLine
from prm_jax.runtime.progress import Progress

BOOKKEEPING = ("sample", "tokens", "logprob", "search_score", "seed", "index", "id")
LOOKED_AT = 1000  # candidates in which `unused_numbers` looks for keys
Place = tuple[int, int, int]  # line number, index in its "samples" or -1, byte offset of the line


class Group(msgspec.Struct):
  """A problem's line with its samples."""

  samples: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]


def read_scored_samples(
  paths: Sequence[pathlib.Path | str],
  join: Callable[[list[Mapping[str, int]]], list[dict[str, int]]] | None = None,
  scores: Sequence[str] = (),
) -> ScoredSamples:
  """Reads one or more files of scored samples; a name ending in .gz is decompressed.

  Several files hold the same candidates in the same order, scored by different models: their keys
  are merged, and a key that two of them hold must be equal.  Candidates are grouped by `unique_id`,
  or by the problem's text where none has one.  `rating_probs`, `step_scores`, `orm_score`,
  `answer` and `unique_id` are each on every candidate or on none; a candidate that was cut off
  needs no scores.

  Args:
    paths: files of JSON lines, or one bundle.
    join: which answers are equal, as `Grader.classes`; None: equal strings.  A bundle ignores it:
      its answers were joined when it was written.
    scores: keys of numbers that score the whole solution, higher is better.  A bundle ignores them:
      it has the scores that it was written with.

  Raises:
    BadLine: a line is not JSON, lacks a key, holds a wrong value or contradicts another; a bundle
      is damaged.
    OSError: a file cannot be read.
  """
  paths = tuple(map(pathlib.Path, paths))
  for path in paths:
    if not path.is_file():  # `read_solutions` cannot read a pipe again
      raise FileNotFoundError(f"{path}: no such file, or not a regular file")
    if is_bundle(path):
      if len(paths) > 1:
        raise BadLine(f"{path}: is a score bundle, which is read alone, as it holds all scores")
      return read_bundle(path)
  table = Table(paths, dict.fromkeys(scores))
  for places, record in _merged(paths, True, "score" not in scores):
    table.add(places, record)
  return table.samples(join)


def read_solutions(samples: ScoredSamples, slots: Sequence[tuple[int, int]]) -> list[dict]:
  """Returns the full records of a few candidates (p, m), read again from the source files.

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
            record = _samples(record, path, line, "score" not in samples.score_names)[index]
          problem = samples.problems[slots[i][0]]
          if record.get("problem", problem) != problem:  # one of several files may have none
            raise ValueError(f"line {line}: another problem")
          records[i] |= record
    except (OSError, ValueError, LookupError, *json_lines.BROKEN_GZIP) as error:
      raise OSError(f"{path}: gone, or changed since it was read: {error}") from None
  return records


def _merged(
  paths: Sequence[pathlib.Path], progress: bool, bare: bool
) -> Iterator[tuple[list[int], dict[str, Any]]]:
  """Yields each candidate of the files, read side by side: its places and its merged record."""
  for located in itertools.zip_longest(*(candidates(path, progress, bare) for path in paths)):
    if None in located:
      where = next(place(path, *each[0][:2]) for path, each in zip(paths, located) if each)
      raise BadLine(f"{paths[located.index(None)]}: ends before the candidate at {where}")
    places, merged = located[0]
    for path, (place_in_file, record) in zip(paths[1:], located[1:]):
      places += place_in_file
      where = place(path, *place_in_file[:2])
      merged = union(merged, record, "in an earlier file", f"{where}: ")
    yield places, merged


def candidates(
  path: pathlib.Path, progress: bool, bare: bool = True
) -> Iterator[tuple[Place, dict[str, Any]]]:
  """Yields the place and the record of each candidate in a file of JSON lines.

  Args:
    bare: the bare `score` of a sample is also its `orm_score`.
  """
  bytes_read = {"total": path.stat().st_size, "unit": "B", "unit_scale": True}
  with Progress(desc=f"reading {path.name}", **bytes_read, disable=not progress) as bar:
    for line, offset, record in json_lines.read(path, bar.reach):
      if "samples" not in record or "steps" in record or "is_correct" in record:
        yield (line, -1, offset), record
        continue
      for index, sample in enumerate(_samples(record, path, line, bare)):
        yield (line, index, offset), sample


def _samples(
  line: dict[str, Any], path: pathlib.Path, number: int, bare: bool
) -> list[dict[str, Any]]:
  """Returns a record for each sample of a problem's line: the sample's keys and the line's."""
  samples = json_lines.convert(line, Group, f"{path}:{number}").samples
  shared = {key: value for key, value in line.items() if key != "samples"}
  records = []
  for index, sample in enumerate(samples):
    where = f"{place(path, number, index)}: "
    record = union(shared, sample, "on the whole line", where)
    if bare and "score" in sample:
      record = union(record, {"orm_score": sample["score"]}, "beside the sample's score", where)
    records.append(record)
  return records


def warn_of_unused(
  paths: Sequence[pathlib.Path], samples: ScoredSamples, flag: str, standard: bool = True
) -> None:
  """Prints a line about `unused_numbers` to standard error, if there are any.

  Args:
    flag: the flag that ranks by a key, with "{}" in place of the key.
  """
  if unused := unused_numbers(paths, samples, standard):
    how = flag.format(shlex.quote(unused[0]))
    text = f"warning: no method uses the numbers {', '.join(unused)}; to rank by one: {how}"
    print(json_lines.printable(f"{exits.script()}: {text}"), file=sys.stderr)


def unused_numbers(
  paths: Sequence[pathlib.Path], samples: ScoredSamples, standard: bool = True
) -> list[str]:
  """Returns keys of numbers that may be scores, but by which no method ranks; none for a bundle.

  Only the first `LOOKED_AT` candidates are read.  Numbers that are equal for all candidates of a
  problem cannot rank them, and `BOOKKEEPING` keys are not scores.

  Args:
    standard: the methods rank by `orm_score` and step scores, where these are given.
  """
  if is_bundle(paths[0]):
    return []
  used = {*Candidate.__struct_fields__, *BOOKKEEPING, *samples.score_names}
  if not standard:
    used -= {"prm_score", "orm_score"}
  elif samples.step_probs is None:
    used.remove("prm_score")
  values, seen = collections.defaultdict(set), collections.Counter()
  merged = _merged(paths, False, standard and "score" not in samples.score_names)
  for _, record in itertools.islice(merged, LOOKED_AT):
    problem = record.get("unique_id") or record["problem"]
    seen[problem] += 1
    for key, value in record.items():
      bare = key == "score" and value == record.get("orm_score")
      if is_number(value) and key not in used and not bare and not key.endswith("_std"):
        values[key].add((problem, value))
  one_each = max(seen.values()) == 1
  return [key for key, pairs in values.items() if one_each or len(pairs) > len(dict(pairs))]
