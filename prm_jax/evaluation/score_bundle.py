"""A score bundle: all arrays of scored samples in one file that loads in a fraction of a second.

An uncompressed .npz file, which `numpy.load(path, allow_pickle=False)` opens, of these arrays (P
problems, M candidates, T steps, R runs of steps of one solution):

* `format`, `version`: FORMAT and VERSION below; `names`: of all the other arrays, sorted.
* `files_bytes`, `files_ends`, `files_given`: the source files' absolute paths, as UTF-8 one after
  the other, the end of each, and False where there is none, which for a path is nowhere; likewise
  `problems_...`, `levels_...` and `subjects_...`.
* `file_bytes`: the source files' sizes.
* `sizes` [P], and [P, M] `lines`, `correct`, `valid`, `prm_score`, and where they are known
  `indices`, `answer_ids`, `orm`; `offsets` [files, P, M]: the fields of `ScoredSamples`.
* where steps are known `step_probs` [T, 3], and for each run `run_slots` [R] and `run_lengths` [R]:
  its solution, as p * M + m, and its number of steps.

Integers are stored in the smallest type that holds them, numbers as float32 where that loses
nothing, else as float64.
"""

from __future__ import annotations

import pathlib
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np

from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import BadLine, show

if TYPE_CHECKING:
  from prm_jax.evaluation.scored_samples import ScoredSamples

FORMAT = "prm_jax score bundle"
VERSION = 1

# The [P, M] fields of `ScoredSamples`, and their types in memory.
CANDIDATES = {
  "lines": np.int64,
  "indices": np.int64,
  "correct": np.bool_,
  "valid": np.bool_,
  "answer_ids": np.int32,
  "orm": np.float64,
  "prm_score": np.float64,
}
OPTIONAL = {"indices", "answer_ids", "orm"}
BLOCK = 2**16  # steps that are checked at a time


def write_bundle(samples: ScoredSamples, path: pathlib.Path | str) -> None:
  """Writes a bundle, from which `read_scored_samples` gives the same samples.

  The texts of the solutions are not in it: `read_solutions` finds them in the source files for as
  long as these are where they were, and unchanged.

  Args:
    samples: what to write.
    path: the file; it takes its name only when it is whole.

  Raises:
    OSError: a file cannot be written there.
  """
  arrays = {
    "format": np.array(FORMAT),
    "version": np.array(VERSION),
    **_packed("files", [str(file.absolute()) for file in samples.files]),
    "file_bytes": np.array(samples.file_bytes, np.int64),
    **_packed("problems", samples.problems),
    **_packed("levels", samples.levels),
    **_packed("subjects", samples.subjects),
    "sizes": _small(samples.sizes),
    "offsets": _small(samples.offsets),
  }
  for name in CANDIDATES:
    column = getattr(samples, name)
    if column is not None:
      arrays[name] = _small(column)
  if samples.step_probs is not None:
    starts = np.flatnonzero(np.diff(samples.step_slots, prepend=-1))
    arrays["run_slots"] = _small(samples.step_slots[starts])
    arrays["run_lengths"] = _small(np.diff(starts, append=len(samples.step_slots)))
    arrays["step_probs"] = _small(samples.step_probs)
  arrays["names"] = np.array(sorted(arrays))
  with json_lines.written(path, "wb") as file:
    np.savez(file, allow_pickle=False, **arrays)


def is_bundle(path: pathlib.Path) -> bool:
  """Whether the file begins as an .npz file does, and JSON does not."""
  try:
    with json_lines.opened(path) as (file, _):
      return file.read(2) == b"PK"
  except json_lines.BROKEN_GZIP:
    return False  # who reads the lines says where it is broken


def read_bundle(path: pathlib.Path) -> dict[str, Any]:
  """The fields of `ScoredSamples`.

  Raises:
    BadLine: the file is not a bundle of this version, or is damaged.
  """
  with json_lines.opened(path) as (file, _):
    try:
      with np.load(file, allow_pickle=False) as stored:
        for member in stored.zip.infolist():
          if member.compress_type != zipfile.ZIP_STORED:  # a few bytes could become many
            raise ValueError(f"{member.filename} is compressed")
        return _fields(stored)
    except Exception as error:  # a damaged file makes zipfile and numpy raise a dozen kinds
      reason = error.args[0] if isinstance(error, KeyError) else error
      raise BadLine(f"{path}: not a score bundle, or damaged: {reason}") from None


def _fields(stored) -> dict[str, Any]:
  if "format" not in stored or stored["format"].tolist() != FORMAT:
    raise ValueError(f'its "format" is not "{FORMAT}"')
  if stored["version"].tolist() != VERSION:
    raise ValueError(f"version {stored['version'].tolist()}, and this program reads {VERSION}")
  if sorted(set(stored.files) - {"names"}) != stored["names"].tolist():
    raise ValueError(f'its arrays are not those of "names", but {show(stored.files)}')
  files = _unpacked(stored, "files")
  problems = _unpacked(stored, "problems")
  sizes = _column(stored, "sizes", np.int64, (len(problems),))
  if not len(sizes) or sizes.min() < 1:
    raise ValueError(f'"sizes" is {show(sizes.tolist())}')
  shape = (len(sizes), int(sizes.max()))
  fields = {
    "files": tuple(pathlib.Path(file) for file in files),
    "file_bytes": tuple(_column(stored, "file_bytes", np.int64, (len(files),)).tolist()),
    "problems": problems,
    "levels": _unpacked(stored, "levels", len(problems)),
    "subjects": _unpacked(stored, "subjects", len(problems)),
    "sizes": sizes,
    "offsets": _column(stored, "offsets", np.int64, (len(files), *shape)),
  }
  for name, dtype in CANDIDATES.items():
    absent = name in OPTIONAL and name not in stored
    fields[name] = None if absent else _column(stored, name, dtype, shape)
  _check_candidates(fields)
  fields["step_probs"] = fields["step_slots"] = None
  if "step_probs" in stored:
    slots = _column(stored, "run_slots", np.int64, None)
    lengths = _column(stored, "run_lengths", np.int64, slots.shape)
    if len(slots) and not (slots.min() >= 0 and slots.max() < shape[0] * shape[1]):
      raise ValueError(f'"run_slots" is not within 0..{shape[0] * shape[1] - 1}')
    if lengths.min(initial=1) < 1:
      raise ValueError(f'"run_lengths" has {lengths.min()}')
    steps = (int(lengths.sum()), 3)
    fields["step_probs"] = _column(stored, "step_probs", np.float64, steps)
    fields["step_slots"] = np.repeat(slots, lengths)
    if not np.array_equal(np.sort(slots), np.flatnonzero(fields["lines"])):
      raise ValueError('"run_slots" does not name each candidate once')
    _check_steps(fields["step_probs"])
  return fields


def _check_candidates(fields: dict[str, Any]) -> None:
  """What reading JSON lines makes sure of, or a ValueError."""
  there, valid, orm = fields["lines"] > 0, fields["valid"], fields["orm"]
  expected = np.arange(there.shape[1]) < fields["sizes"][:, None]
  ids = fields["answer_ids"]
  for wrong, message in (
    ((there != expected) | (fields["lines"] < 0), '"lines" does not fit "sizes"'),
    (valid & ~there, '"valid" is true where "lines" has no candidate'),
    (fields["correct"] & ~valid, '"correct" is true where "valid" is not'),
    (ids is not None and valid & (ids < 0), '"answer_ids" is negative for a valid candidate'),
    (orm is not None and there & ~np.isfinite(orm), '"orm" is not finite for a candidate'),
  ):
    if np.any(wrong):
      p, m = np.argwhere(wrong)[0].tolist()
      raise ValueError(f"{message}: problem {p}, candidate {m}, from 0")


def _check_steps(step_probs: np.ndarray) -> None:
  """As `candidate_table` does: a ValueError for three that are no probabilities."""
  for start in range(0, len(step_probs), BLOCK):
    minus, zero, plus = step_probs[start : start + BLOCK].T
    with np.errstate(invalid="ignore"):  # a NaN fails every comparison
      total = minus + zero + plus
      fine = (minus >= 0) & (zero >= 0) & (plus >= 0) & (total >= 0.99) & (total <= 1.01)
    if not fine.all():
      step = start + int(fine.argmin())
      raise ValueError(f'"step_probs" of step {step}, from 0, is {step_probs[step].tolist()}')


def _small(column: np.ndarray) -> np.ndarray:
  """The same values in the smallest type that holds them all."""
  if column.dtype == np.float64:
    with np.errstate(over="ignore"):  # to infinity: not equal
      single = column.astype(np.float32)
    return single if np.array_equal(single, column, equal_nan=True) else column
  if column.dtype.kind == "i" and column.size:
    return column.astype(np.result_type(*map(np.min_scalar_type, (column.min(), column.max()))))
  return column


def _column(stored, name: str, dtype, shape) -> np.ndarray:
  """An array of the bundle in its type in memory; `shape` None: any with one dimension."""
  column = stored[name]
  if not np.can_cast(column.dtype, dtype, "same_kind"):
    raise ValueError(f'"{name}" is of type {column.dtype}')
  if column.shape != shape and (shape is not None or column.ndim != 1):
    raise ValueError(f'"{name}" has shape {column.shape}, not {shape or "one dimension"}')
  return column.astype(dtype, copy=False)


def _packed(name: str, texts) -> dict[str, np.ndarray]:
  """Texts as bytes one after the other, and where each ends."""
  encoded = [(text or "").encode() for text in texts]
  return {
    f"{name}_bytes": np.frombuffer(b"".join(encoded), np.uint8),
    f"{name}_ends": _small(np.cumsum([len(text) for text in encoded])),
    f"{name}_given": np.array([text is not None for text in texts]),
  }


def _unpacked(stored, name: str, count: int | None = None) -> tuple:
  ends = _column(stored, f"{name}_ends", np.int64, None if count is None else (count,))
  given = _column(stored, f"{name}_given", np.bool_, ends.shape)
  data = _column(stored, f"{name}_bytes", np.uint8, None).tobytes()
  starts = np.concatenate([[0], ends[:-1]])
  if len(ends) and ((ends < starts).any() or ends[-1] != len(data)):
    raise ValueError(f'"{name}_ends" does not fit "{name}_bytes"')
  return tuple(
    data[a:b].decode() if known else None for a, b, known in zip(starts, ends, given.tolist())
  )
