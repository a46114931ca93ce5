"""Arrays of scored samples, and the bundle that stores them.

A bundle is an .npz file with the fields of `ScoredSamples`; it loads in a fraction of a second.
"""

import contextlib
import dataclasses
import io
import json
import pathlib
from typing import BinaryIO

import numpy as np

from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import BadLine

FORMAT = {"format": "prm_jax score bundle", "version": 4}
IN_MEMORY = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}  # dtypes by kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredSamples:
  """The C candidates of P problems, up to M each, with T steps in all, read from F files.

  `[P, M]` arrays are padded where a problem has fewer than M candidates.
  """

  files: tuple[pathlib.Path, ...]  # where the texts are; a bundle names the files it was made from
  file_bytes: tuple[int, ...]  # sizes of the files when they were read
  problems: tuple[str, ...]  # [P] texts
  levels: tuple[str | None, ...]  # [P]
  subjects: tuple[str | None, ...]  # [P]
  sizes: np.ndarray  # [P] candidates that were generated: `drawn`, or the number in the files
  places: np.ndarray  # [P, M, F, 3] `Place` in each file; padding: line 0
  correct: np.ndarray  # [P, M] bool
  valid: np.ndarray  # [P, M] bool; False for padding and candidates without an answer
  answer_ids: np.ndarray | None = None  # [P, M] equal answers of a problem have equal numbers
  orm: np.ndarray | None = None  # [P, M]; NaN: padding
  score_names: tuple[str, ...] = ()  # [S] columns that the caller named as scores
  scores: np.ndarray | None = None  # [S, P, M] their numbers; NaN: padding
  prm_score: np.ndarray  # [P, M] as the file gives it; NaN: not given
  slots: np.ndarray  # [C] p * M + m of each candidate, in file order
  step_counts: np.ndarray | None = None  # [C] steps of each candidate
  step_probs: np.ndarray | None = None  # [T, 3] of the ratings -1, 0, 1, in file order

  def check(self) -> None:
    """Raises ValueError, or IndexError, if the fields do not belong together."""
    (P, M), C, F = self.correct.shape, len(self.slots), len(self.files)
    S = len(self.score_names)
    if not P * M * C:
      raise ValueError("no candidates")
    T = 0 if self.step_counts is None else int(self.step_counts.sum())
    shapes = {"sizes": (P,), "places": (P, M, F, 3), "slots": (C,), "step_counts": (C,)}
    shapes |= {"step_probs": (T, 3), **dict.fromkeys(("problems", "levels", "subjects"), (P,))}
    shapes |= {"score_names": (S,), "scores": (S, P, M)}
    kinds = {"correct": "b", "valid": "b"}
    kinds |= dict.fromkeys(("orm", "prm_score", "scores", "step_probs"), "f")
    for name, value in vars(self).items():
      if isinstance(value, np.ndarray) and value.dtype.kind != kinds.get(name, "i"):
        raise ValueError(f"{name} is of dtype {value.dtype}")
      expected = shapes.get(name, (P, M))
      if value is not None and not name.startswith("file") and np.shape(value) != expected:
        raise ValueError(f"{name} is {np.shape(value)}, expected {expected}")
    filled = np.zeros(P * M, bool)
    filled[self.slots] = True  # IndexError if a slot is out of range
    present = filled.reshape(P, M).sum(axis=1)
    if filled.sum() < C or (self.slots < 0).any() or self.valid.ravel()[~filled].any():
      raise ValueError("slots are not those of the candidates")
    if (self.sizes > M).any() or (self.sizes < np.maximum(present, 1)).any():
      raise ValueError(f"sizes are {self.sizes.min()} to {self.sizes.max()}, of {M} candidates")
    if self.orm is not None and not np.isfinite(self.orm[self.valid]).all():
      raise ValueError("an orm_score is not finite")
    if len(set(self.score_names)) < S or bool(S) != (self.scores is not None):
      raise ValueError(f"scores of {self.score_names}")
    if S and not np.isfinite(self.scores[:, self.valid]).all():
      raise ValueError("a score is not finite")
    if self.step_probs is not None and not np.allclose(self.step_probs.sum(axis=1), 1, atol=0.011):
      raise ValueError("probabilities of a step do not add up to 1")

  def where(self, p: int, m: int) -> str:
    """Returns the file and line of a candidate, for messages."""
    return place(self.files[0], *self.places[p, m, 0, :2])


def place(path: pathlib.Path | str, line: int, index: int) -> str:
  """Returns FILE:LINE of a candidate; also its index in the line's "samples", unless that is -1."""
  return f"{path}:{line}" if index < 0 else f'{path}:{line}: "samples"[{index}]'


def write_bundle(samples: ScoredSamples, file: BinaryIO) -> None:
  """Writes a bundle that `read_scored_samples` reads as the same samples.

  Numbers are stored in the smallest dtype that holds them exactly.  The texts of the solutions stay
  in the source files: `read_solutions` needs these at the same paths and unchanged.
  """
  fields = vars(samples)
  header = FORMAT | {name: x for name, x in fields.items() if isinstance(x, tuple)}
  header["files"] = [str(file.absolute()) for file in samples.files]
  stored = {name: _smallest(x) for name, x in fields.items() if isinstance(x, np.ndarray)}
  stored["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
  seekable = io.BytesIO()  # a gzip file is not seekable
  np.savez(seekable, **stored)
  file.write(seekable.getbuffer())


def _smallest(column: np.ndarray) -> np.ndarray:
  """Returns the column in the smallest dtype that holds all its values exactly."""
  if column.dtype == np.float64:
    with np.errstate(over="ignore"):  # an overflow gives infinity, which is not equal
      single = column.astype(np.float32)
    return single if np.array_equal(single, column, equal_nan=True) else column
  if column.dtype == np.int64:
    smallest = np.result_type(*map(np.min_scalar_type, (column.min(), column.max())))
    return column if smallest == np.float64 else column.astype(smallest)  # of -1 and 2**32
  return column


def is_bundle(path: pathlib.Path) -> bool:
  """Returns whether a file begins with the magic bytes of an .npz file."""
  with contextlib.suppress(*json_lines.BROKEN_GZIP), json_lines.opened(path) as (file, _):
    return file.read(2) == b"PK"
  return False  # a broken gzip file: reading its lines reports where


def read_bundle(path: pathlib.Path) -> ScoredSamples:
  """Returns the samples of a bundle; raises BadLine if it is damaged or of another version.

  The file's checksums find damage, and nothing is unpickled.
  """
  try:
    with json_lines.opened(path) as (file, _), np.load(file, allow_pickle=False) as stored:
      members = stored.zip.infolist()
      size = sum(member.file_size for member in members)
      if any(member.compress_type for member in members) or size > 100 * path.stat().st_size:
        raise ValueError(f"compressed members, or {size:,} bytes in a far smaller file")
      arrays = dict(stored)
    header = json_lines.parse(arrays.pop("header").tobytes(), "header")
    if (found := {key: header.pop(key) for key in FORMAT}) != FORMAT:
      raise ValueError(f"expected {FORMAT}, not {json_lines.show(found)}")
    columns = {name: x.astype(IN_MEMORY[x.dtype.kind], copy=False) for name, x in arrays.items()}
    fields = {field.name for field in dataclasses.fields(ScoredSamples)}
    if unknown := (header | columns).keys() - fields:
      raise ValueError(f"unknown {json_lines.show(sorted(unknown))}")
    hook = lambda kind, value: kind(value) if kind is pathlib.Path else value  # arrays stay
    samples = json_lines.convert(header | columns, ScoredSamples, dec_hook=hook)
    samples.check()
    return samples
  except Exception as error:  # zipfile and numpy raise a dozen kinds for a damaged file
    raise BadLine(f"{path}: not a score bundle of this version, or damaged: {error}") from None
