"""Safetensors files: read without trusting the header, written one tensor at a time.

Format: https://github.com/huggingface/safetensors#format.  A file is the length of the header (8
bytes, little-endian), the header (JSON: name to dtype, shape and place), and the tensors' bytes,
row-major, without holes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import struct
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np

from prm_jax.runtime import json_lines

MAX_HEADER_BYTES = 100_000_000  # as the format's own reader
MAX_DIMENSIONS = 8
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "I64": np.dtype(np.int64),
  "I32": np.dtype(np.int32),
  "I16": np.dtype(np.int16),
  "I8": np.dtype(np.int8),
  "U64": np.dtype(np.uint64),
  "U32": np.dtype(np.uint32),
  "U16": np.dtype(np.uint16),
  "U8": np.dtype(np.uint8),
  "BOOL": np.dtype(np.bool_),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
  "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
CODES = {dtype.name: code for code, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor of a file, not read yet."""

  path: pathlib.Path
  shape: tuple[int, ...]
  dtype: str  # numpy's name
  offset: int  # in the file

  def read(self) -> np.ndarray:
    """The values, mapped: only what is used is read, and the map goes with the array."""
    dtype = DTYPES[CODES[self.dtype]]
    if not math.prod(self.shape):
      return np.zeros(self.shape, dtype)
    nbytes = math.prod(self.shape) * dtype.itemsize
    data = np.asarray(np.memmap(self.path, np.uint8, "r", self.offset, nbytes))
    return data.view(dtype).reshape(self.shape)


def read_file(path: str | pathlib.Path) -> dict[str, Tensor]:
  """The tensors of one file.  Nothing is allocated for what the header claims and is not there.

  Raises:
    ValueError: not a safetensors file, or its header does not describe the file; names both.
    OSError: the file cannot be read.
  """
  path = pathlib.Path(path)
  size = path.stat().st_size
  with path.open("rb") as file:
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if length > MAX_HEADER_BYTES or length > size - 8:
      raise ValueError(
        f"{path}: claims a header of {length:,} bytes in a file of {size:,}: cut off in copying, "
        "or no safetensors file"
      )
    header = _json(path, file.read(length))
  header.pop("__metadata__", None)
  first, room, found, places = 8 + length, size - 8 - length, {}, []
  for name, entry in header.items():
    tensor, begin, end = _tensor(f"{path}: tensor {json_lines.show(name)}", path, entry, first)
    if end > room:
      raise ValueError(
        f"{path}: tensor {json_lines.show(name)} ends at byte {first + end:,}, and the file has "
        f"{size:,}: cut off in copying; fetch it again"
      )
    found[name] = tensor
    places.append((begin, end))
  at = 0
  for begin, end in sorted(places):
    if begin != at:
      raise ValueError(f"{path}: tensors overlap or leave a hole at byte {first + at:,}")
    at = end
  if at != room:
    raise ValueError(f"{path}: {room - at:,} bytes after the last tensor")
  return found


def _json(path: pathlib.Path, text: bytes) -> dict[str, Any]:
  def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
      raise ValueError("a name is there twice")
    return out

  try:
    value = json.loads(text.decode(), object_pairs_hook=unique)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path}: the header is not JSON ({error})") from None
  if not isinstance(value, dict):
    raise ValueError(f"{path}: the header is JSON, but no object: {json_lines.show(value)}")
  return value


def _tensor(where: str, path: pathlib.Path, entry: Any, first: int) -> tuple[Tensor, int, int]:
  """(tensor, where it begins and ends behind the header) of a checked entry of the header."""

  def whole(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)

  if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
    raise ValueError(f"{where}: expected dtype, shape and data_offsets: {json_lines.show(entry)}")
  dtype, shape, offsets = (entry[key] for key in ("dtype", "shape", "data_offsets"))
  if not isinstance(dtype, str) or dtype not in DTYPES:
    raise ValueError(f"{where}: dtype {json_lines.show(dtype)} is not known")
  if not whole(shape) or len(shape) > MAX_DIMENSIONS:
    raise ValueError(f"{where}: shape {json_lines.show(shape)}")
  if not whole(offsets) or len(offsets) != 2:
    raise ValueError(f"{where}: data_offsets {json_lines.show(offsets)}")
  begin, end = offsets
  if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
    raise ValueError(
      f"{where}: {dtype} {json_lines.show(shape)} does not fill data_offsets {offsets}"
    )
  return Tensor(path, tuple(shape), DTYPES[dtype].name, first + begin), begin, end


def read_directory(directory: str | pathlib.Path) -> dict[str, Tensor]:
  """The tensors of a model's directory: one file, or shards with an index.

  Raises:
    ValueError: a file or the index is broken, or the weights are pickled, which are never opened.
    FileNotFoundError: there are no weights, or a shard is missing.
  """
  directory = pathlib.Path(directory)
  if not directory.is_dir():
    raise FileNotFoundError(f"{directory}: no such directory; give a model's, or a .gguf file")
  if (directory / INDEX).is_file():
    return _sharded(directory)
  if (directory / SINGLE).is_file():
    return read_file(directory / SINGLE)
  pickles = [p.name for p in itertools.chain(directory.glob("*.bin"), directory.glob("*.pt*"))]
  if pickles:
    raise ValueError(
      f"{directory}: the weights are pickled ({pickles[0]}), and opening a pickle runs code of "
      "whoever made it: none is ever opened here.  Where you trust it, convert it once with "
      "transformers: AutoModel....from_pretrained(DIR).save_pretrained(NEW)"
    )
  raise FileNotFoundError(f"{directory}: neither {SINGLE} nor {INDEX} in it")


def _sharded(directory: pathlib.Path) -> dict[str, Tensor]:
  index = directory / INDEX
  if index.stat().st_size > MAX_HEADER_BYTES:
    raise ValueError(f"{index}: over {MAX_HEADER_BYTES:,} bytes")
  names = _json(index, index.read_bytes()).get("weight_map")
  if not isinstance(names, dict) or not names:
    raise ValueError(f"{index}: expected weight_map, an object of tensor names to files")
  for file in names.values():
    plain = isinstance(file, str) and file == pathlib.PurePosixPath(file).name and "\\" not in file
    if not plain or file == ".." or not file.endswith(".safetensors"):
      raise ValueError(f"{index}: {json_lines.show(file)} is no safetensors file of this directory")
  found: dict[str, Tensor] = {}
  for file in sorted(set(names.values())):
    if not (directory / file).is_file():
      raise FileNotFoundError(f"{directory / file}: missing, and {INDEX} names it")
    for name, tensor in read_file(directory / file).items():
      if names.get(name) != file:
        raise ValueError(f"{directory / file}: {json_lines.show(name)} is not there in {INDEX}")
      found[name] = tensor
  if absent := sorted(names.keys() - found.keys()):
    raise ValueError(f"{index}: {len(absent):,} tensors are in no file: {', '.join(absent[:10])}")
  return found


# (name, shape, dtype, function that gives the value): a tensor that need not be in memory yet
Listed = tuple[str, tuple[int, ...], np.dtype, Callable[[], np.ndarray]]


def write_directory(directory: str | pathlib.Path, tensors: Iterable[Listed], limit: int) -> None:
  """Writes tensors to `directory`, one in memory at a time.

  One file, or shards of at most `limit` bytes (a tensor larger than that has one of its own) and
  their index.

  Raises:
    OSError: a file cannot be written.
  """
  directory = pathlib.Path(directory)
  shards: list[list[Listed]] = []
  room = 0
  for each in tensors:
    nbytes = _nbytes(each)
    if not shards or nbytes > room:
      shards.append([])
      room = limit
    shards[-1].append(each)
    room -= nbytes
  if len(shards) == 1:
    _write(directory / SINGLE, shards[0])
    return
  places = {}
  for i, shard in enumerate(shards, 1):
    file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
    _write(directory / file, shard)
    places |= {name: file for name, *_ in shard}
  total = sum(map(_nbytes, itertools.chain(*shards)))
  index = {"metadata": {"total_size": total}, "weight_map": places}
  with json_lines.written(directory / INDEX) as file:
    json.dump(index, file, indent=2)


def _nbytes(listed: Listed) -> int:
  _, shape, dtype, _ = listed
  return math.prod(shape) * dtype.itemsize


def _write(path: pathlib.Path, tensors: list[Listed]) -> None:
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
  at = 0
  for each in tensors:
    name, shape, dtype, _ = each
    end = at + _nbytes(each)
    header[name] = {
      "dtype": CODES[dtype.name],
      "shape": list(shape),
      "data_offsets": [at, end],
    }
    at = end
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  with json_lines.written(path, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for _, shape, dtype, value in tensors:
      array = np.ascontiguousarray(value(), dtype)
      if array.shape != shape:
        raise ValueError(f"{path}: a tensor of shape {array.shape} where {shape} was announced")
      file.write(array.reshape(-1).view(np.uint8).data)
