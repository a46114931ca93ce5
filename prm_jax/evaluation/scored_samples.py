"""Scored candidate solutions as arrays, and the bundle: all these arrays in one file.

A bundle is an uncompressed .npz file that loads in a fraction of a second, whatever its name:

* `header`: JSON in UTF-8 with `format`, `version`, the source files (`files`, `file_bytes`) and
  by problem `problems`, `levels` and `subjects`;
* the arrays of `ARRAYS`; an array of `OPTIONAL` is absent where it is not known.

Integers are stored in the smallest type that holds them, floats as float32 where that loses
nothing, else as float64.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import BadLine

FORMAT = "prm_jax score bundle"
VERSION = 2
# By name: dtype in memory, and shape.  F files, P problems, M candidates, T steps, 3 ratings,
# R solutions with steps.
ARRAYS = {
  "sizes": (np.int64, "P"),
  "lines": (np.int64, "PM"),
  "indices": (np.int64, "PM"),
  "offsets": (np.int64, "FPM"),
  "correct": (np.bool_, "PM"),
  "valid": (np.bool_, "PM"),
  "answer_ids": (np.int32, "PM"),
  "orm": (np.float64, "PM"),
  "prm_score": (np.float64, "PM"),
  "step_probs": (np.float64, "T3"),
  # Run-length encoding of `step_slots`: the steps of one solution follow each other.
  "run_slots": (np.int64, "R"),
  "run_lengths": (np.int64, "R"),
}
OPTIONAL = {"indices", "answer_ids", "orm", "step_probs", "run_slots", "run_lengths"}
TEXTS = ("problems", "levels", "subjects")
BLOCK = 2**16  # steps whose probabilities are checked at once: bounds temporary memory


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
  valid: np.ndarray  # [P, M] bool; False: padding or no answer: never chosen
  answer_ids: np.ndarray | None  # [P, M] equal answers of a problem have equal numbers
  step_probs: np.ndarray | None  # [T, 3] of the ratings -1, 0, 1; solutions in file order
  step_slots: np.ndarray | None  # [T] the solution of each step, as p * M + m
  orm: np.ndarray | None  # [P, M]; NaN: padding
  prm_score: np.ndarray  # [P, M] as the file gives it; NaN: not given

  def where(self, p: int, m: int) -> str:
    """The file and line of a candidate, for messages."""
    index = None if self.indices is None else int(self.indices[p, m])
    return place(self.files[0], int(self.lines[p, m]), index)


def place(path: pathlib.Path | str, line: int, index: int | None) -> str:
  """File and line of a candidate, for messages; `index` is its place in the line's "samples"."""
  return f"{path}:{line}" if index is None else f'{path}:{line}: "samples"[{index}]'


def first_bad_step(step_probs: np.ndarray) -> int | None:
  """The first step of `[T, 3]` whose numbers are no probabilities; None: all are."""
  for start in range(0, len(step_probs), BLOCK):
    minus, zero, plus = step_probs[start : start + BLOCK].T
    with np.errstate(invalid="ignore"):  # a NaN fails every comparison
      total = minus + zero + plus
      fine = (minus >= 0) & (zero >= 0) & (plus >= 0)
      # Probabilities that were rounded to bfloat16 may sum to 0.99 or 1.01.
      fine &= (total >= 0.99) & (total <= 1.01)
    if not fine.all():
      return start + int(fine.argmin())
  return None


def write_bundle(samples: ScoredSamples, path: pathlib.Path | str) -> None:
  """Writes a bundle, from which `read_bundle` gives the same samples.

  The texts of the solutions are not in it: `sample_files.read_solutions` finds them in the source
  files for as long as these are where they were, and unchanged.

  Args:
    samples: what to write.
    path: the file; it takes its name only when it is whole.

  Raises:
    OSError: a file cannot be written there.
  """
  header = {"format": FORMAT, "version": VERSION}
  header["files"] = [str(file.absolute()) for file in samples.files]
  header["file_bytes"] = samples.file_bytes
  header |= {name: getattr(samples, name) for name in TEXTS}
  arrays = {name: getattr(samples, name, None) for name in ARRAYS}
  if samples.step_slots is not None:
    starts = np.flatnonzero(np.diff(samples.step_slots, prepend=-1))
    arrays["run_slots"] = samples.step_slots[starts]
    arrays["run_lengths"] = np.diff(starts, append=len(samples.step_slots))
  stored = {name: _smallest(array) for name, array in arrays.items() if array is not None}
  stored["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
  with json_lines.written(path, "wb") as file:
    np.savez(file, allow_pickle=False, **stored)


def is_bundle(path: pathlib.Path) -> bool:
  """Whether the file begins as an .npz file does, and JSON does not."""
  try:
    with json_lines.opened(path) as (file, _):
      return file.read(2) == b"PK"
  except json_lines.BROKEN_GZIP:
    return False  # the reader of its lines reports where it is broken


def read_bundle(path: pathlib.Path) -> ScoredSamples:
  """Reads a bundle; shapes, dtypes and ranges are checked, nothing is unpickled.

  Raises:
    BadLine: the file is not a bundle of this version, or is damaged.
  """
  with json_lines.opened(path) as (file, _):
    try:
      with np.load(file, allow_pickle=False) as stored:
        return _from_arrays(stored)
    except Exception as error:  # a damaged file makes zipfile and numpy raise a dozen kinds
      reason = error.args[0] if isinstance(error, KeyError) else error
      raise BadLine(
        f"{path}: not a score bundle of version {VERSION}, or damaged: {reason}"
      ) from None


def _from_arrays(stored: Any) -> ScoredSamples:
  """The samples of a bundle's arrays; ValueError or KeyError if they do not fit each other."""
  header = json.loads(stored["header"].tobytes())
  for key, expected in (("format", FORMAT), ("version", VERSION)):
    if header[key] != expected:
      raise ValueError(f'"{key}" is {header[key]!r}, expected {expected!r}')
  if unknown := sorted(set(stored.files) - ARRAYS.keys() - {"header"}):
    raise ValueError(f"unknown arrays {', '.join(unknown)}")
  dimensions = {"F": len(header["files"]), "P": len(header["problems"]), "3": 3}
  fields: dict[str, Any] = {}
  for name, (dtype, letters) in ARRAYS.items():
    absent = name in OPTIONAL and name not in stored
    fields[name] = None if absent else _checked(name, stored[name], dtype, letters, dimensions)
  sizes, slots = fields["sizes"], fields.pop("run_slots")
  if sizes.min() < 1 or sizes.max() != dimensions["M"]:
    raise ValueError(f'"sizes" is within {sizes.min()}..{sizes.max()}, expected 1..M')
  lengths, fields["step_slots"] = fields.pop("run_lengths"), None
  if fields["step_probs"] is not None:
    if slots.min() < 0 or slots.max() >= fields["lines"].size or lengths.min() < 1:
      raise ValueError('"run_slots" or "run_lengths" is out of range')
    fields["step_slots"] = np.repeat(slots, lengths)
    if lengths.sum() != dimensions["T"]:
      raise ValueError(f'"run_lengths" adds up to {lengths.sum()} of {dimensions["T"]} steps')
    if (bad := first_bad_step(fields["step_probs"])) is not None:
      shown = fields["step_probs"][bad].tolist()
      raise ValueError(f'"step_probs" of step {bad}, from 0, is {shown}')
  return ScoredSamples(
    files=tuple(map(pathlib.Path, header["files"])),
    file_bytes=tuple(header["file_bytes"]),
    **{name: tuple(header[name]) for name in TEXTS},
    **fields,
  )


def _checked(
  name: str, column: np.ndarray, dtype: Any, letters: str, dimensions: dict[str, int]
) -> np.ndarray:
  """The array in its dtype in memory; a dimension that is met first is noted in `dimensions`."""
  if len(letters) == column.ndim and np.can_cast(column.dtype, dtype, "same_kind"):
    shape = [dimensions.setdefault(letter, n) for letter, n in zip(letters, column.shape)]
    if list(column.shape) == shape:
      return column.astype(dtype, copy=False)
  known = [dimensions.get(letter, letter) for letter in letters]
  raise ValueError(
    f'"{name}" is {column.dtype} {list(column.shape)}, expected {np.dtype(dtype)} {known}'
  )


def _smallest(column: np.ndarray) -> np.ndarray:
  """The same values in the smallest dtype that holds them all."""
  if column.dtype == np.float64:
    with np.errstate(over="ignore"):  # to infinity: not equal
      single = column.astype(np.float32)
    return single if np.array_equal(single, column, equal_nan=True) else column
  if column.dtype.kind == "i" and column.size:
    return column.astype(np.result_type(*map(np.min_scalar_type, (column.min(), column.max()))))
  return column
