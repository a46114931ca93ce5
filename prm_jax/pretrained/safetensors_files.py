"""Tensors of a hub directory: one safetensors file, or shards with an index."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from prm_jax.runtime import json_lines

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEX_BYTES = 100_000_000
SHARD_BYTES = 5_000_000_000
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # that parameters can come in


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor of a file, not read yet."""

  path: pathlib.Path
  name: str  # in the file
  shape: tuple[int, ...]
  dtype: str  # numpy's name if it is one of DTYPES, else the file's code, such as "I8"

  def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
    """The values, or a slice of them; only that slice is copied into memory.

    The file is opened for each call: its pages do not stay in the process.
    """
    with _opened(self.path) as file:
      if index is None:
        return file.get_tensor(self.name)
      return file.get_slice(self.name)[index]


def _opened(path: pathlib.Path) -> Any:
  """The open file; its header has been checked against the file's size."""
  try:
    return safetensors.safe_open(path, framework="numpy")
  except safetensors.SafetensorError as error:
    raise ValueError(
      f"{path}: {error}: cut off in copying, or not a safetensors file; fetch it again"
    ) from error


def read_file(path: str | pathlib.Path) -> dict[str, Tensor]:
  """The tensors of one file.

  Raises:
    ValueError: not a safetensors file, or its header does not describe the file.
    OSError: the file cannot be read.
  """
  path, found = pathlib.Path(path), {}
  with _opened(path) as file:
    for name in file.keys():  # noqa: SIM118 (not a dict)
      view = file.get_slice(name)
      code = view.get_dtype()
      found[name] = Tensor(path, name, tuple(view.get_shape()), DTYPES.get(code, code))
  return found


def read_directory(directory: str | pathlib.Path) -> dict[str, Tensor]:
  """The tensors of a model's directory.

  Raises:
    ValueError: a file or the index is broken, or the weights are pickled, which are never opened.
    FileNotFoundError: there are no weights, or a shard is missing.
  """
  directory = pathlib.Path(directory)
  if not directory.is_dir():
    raise FileNotFoundError(f"{directory}: no such directory; expected a model's directory")
  if (directory / INDEX).is_file():
    return _sharded(directory)
  if (directory / SINGLE).is_file():
    return read_file(directory / SINGLE)
  if pickles := sorted(itertools.chain(directory.glob("*.bin"), directory.glob("*.pt*"))):
    raise ValueError(
      f"{directory}: the weights are pickled ({pickles[0].name}).  Opening a pickle runs the code "
      "in it, so none is ever opened here.  If you trust it, convert it once with transformers: "
      "AutoModel.from_pretrained(DIR).save_pretrained(NEW)"
    )
  raise FileNotFoundError(f"{directory}: neither {SINGLE} nor {INDEX} in it")


def _sharded(directory: pathlib.Path) -> dict[str, Tensor]:
  index = directory / INDEX
  if index.stat().st_size > MAX_INDEX_BYTES:
    raise ValueError(f"{index}: over {MAX_INDEX_BYTES:,} bytes")
  places = json_lines.parse(index.read_bytes(), str(index)).get("weight_map")
  if not isinstance(places, dict) or not places:
    raise ValueError(f"{index}: expected weight_map, an object of tensor names to files")
  for file in places.values():
    plain = isinstance(file, str) and file == pathlib.PurePath(file).name and "\\" not in file
    if not plain or not file.endswith(".safetensors"):
      shown = json_lines.show(file)
      raise ValueError(f"{index}: {shown} is not the name of a safetensors file of this directory")
  found: dict[str, Tensor] = {}
  for file in sorted(set(places.values())):
    if not (directory / file).is_file():
      raise FileNotFoundError(f"{directory / file}: missing, but named in {INDEX}")
    for name, tensor in read_file(directory / file).items():
      if places.get(name) != file:
        raise ValueError(f"{directory / file}: {json_lines.show(name)} is not in {INDEX}")
      found[name] = tensor
  if absent := sorted(places.keys() - found.keys()):
    raise ValueError(f"{index}: {len(absent):,} tensors are in no file: {', '.join(absent[:10])}")
  return found


def write_directory(
  directory: str | pathlib.Path,
  tensors: Iterable[tuple[str, np.ndarray]],
  limit: int = SHARD_BYTES,
) -> None:
  """Writes named tensors: one file, or shards of at most `limit` bytes each and their index.

  One shard is in memory at a time.  A tensor larger than `limit` has a shard of its own.

  Raises:
    OSError: a file cannot be written.
  """
  directory = pathlib.Path(directory)
  shards: list[list[str]] = []
  total = 0
  for shard in _shards(tensors, limit):
    path = directory / f"{len(shards)}.unfinished"  # the final name says how many there are
    safetensors.numpy.save_file(shard, path, metadata={"format": "pt"})  # transformers asks for it
    shards.append(list(shard))
    total += sum(tensor.nbytes for tensor in shard.values())
  count, places = len(shards), {}
  for i, names in enumerate(shards):
    file = SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
    (directory / file).touch()
    shutil.copymode(directory / file, directory / f"{i}.unfinished")  # the library's are private
    (directory / f"{i}.unfinished").replace(directory / file)
    places |= dict.fromkeys(names, file)
  if count > 1:
    index = {"metadata": {"total_size": total}, "weight_map": places}
    with json_lines.written(directory / INDEX) as file:
      json.dump(index, file, indent=2)


def _shards(
  tensors: Iterable[tuple[str, np.ndarray]], limit: int
) -> Iterator[dict[str, np.ndarray]]:
  shard: dict[str, np.ndarray] = {}
  room = limit
  for name, tensor in tensors:
    if shard and tensor.nbytes > room:
      yield shard
      shard, room = {}, limit
    shard[name] = np.ascontiguousarray(tensor)
    room -= tensor.nbytes
  yield shard
