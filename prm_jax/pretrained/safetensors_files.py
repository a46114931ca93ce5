"""Reads and writes a hub directory's tensors: one safetensors file, or shards and their index."""

import dataclasses
import json
import math
import pathlib
import shutil
from collections.abc import Iterable
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from prm_jax.runtime import json_lines

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5_000_000_000
MAPPED_BYTES = 2**28  # bytes of a file mapped at a time; more only if one matrix row has more
DTYPES = ("F32", "BF16", "F16")  # dtypes that parameters may have, in the format's names


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor of a file, not read yet."""

  path: pathlib.Path
  name: str  # in the file
  shape: tuple[int, ...]
  dtype: str  # the format's name, such as "BF16"

  def read(self, rows: slice = slice(None), *columns: slice) -> np.ndarray:
    """Reads the values, or a slice of them along each axis; only the slice is copied into memory.

    The file is mapped for `MAPPED_BYTES` at a time: its pages do not stay in the process.
    """
    start, stop, _ = rows.indices(self.shape[0])
    step = max(MAPPED_BYTES // max(4 * math.prod(self.shape[1:]), 1), 1)
    parts = []
    for at in range(start, max(stop, 1), step):
      with _opened(self.path) as file:
        parts.append(file.get_slice(self.name)[slice(at, min(at + step, stop)), *columns])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _opened(path: pathlib.Path) -> Any:
  """Opens a file, which checks its header against its size."""
  try:
    return safetensors.safe_open(path, framework="numpy")
  except safetensors.SafetensorError as error:
    raise ValueError(
      f"{path}: {error}: truncated, or not a safetensors file; fetch it again"
    ) from error


def read_file(path: pathlib.Path) -> dict[str, Tensor]:
  """Returns the tensors of one file, not read yet, by name.

  Raises:
    ValueError: not a safetensors file, or its header does not describe the file.
    OSError: the file cannot be read.
  """
  with _opened(path) as file:
    views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return {n: Tensor(path, n, tuple(v.get_shape()), v.get_dtype()) for n, v in views.items()}


def read_directory(directory: str | pathlib.Path) -> dict[str, Tensor]:
  """Returns the tensors of a model's directory, not read yet, by name.

  Raises:
    ValueError: a file or the index is broken, or the weights are pickled: they are never opened.
    FileNotFoundError: there are no weights.
  """
  directory = pathlib.Path(directory)
  present = {path.name: path for path in sorted(directory.glob("*.safetensors"))}
  if SINGLE in present:  # transformers prefers it to an index
    return read_file(present[SINGLE])
  index = directory / INDEX
  if not index.is_file():
    if pickles := sorted([*directory.glob("*.bin"), *directory.glob("*.pt*")]):
      raise ValueError(
        f"{directory}: the weights are pickled ({pickles[0].name}).  Opening a pickle runs the "
        "code in it, so none is ever opened here.  If you trust it, convert it once with "
        "transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW), for a "
        "classifier AutoModelForTokenClassification; then copy the tokenizer's files"
      )
    raise FileNotFoundError(f"{directory}: not a model directory: no {SINGLE} and no {INDEX}")
  weight_map = json_lines.document(index).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(f"{index}: expected weight_map, an object of tensor names to files")
  files = sorted({str(file) for file in weight_map.values()})
  if absent := [file for file in files if file not in present]:
    raise ValueError(f"{index}: no safetensors file {json_lines.show(absent[0])} beside it")
  tensors = [tensor for file in files for tensor in read_file(present[file]).values()]
  differing = {(tensor.name, tensor.path.name) for tensor in tensors} ^ weight_map.items()
  if differing:
    name, file = min(differing)
    raise ValueError(f"{index} and its files differ in {len(differing)} tensors: {name} of {file}")
  return {tensor.name: tensor for tensor in tensors}


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
  shard: dict[str, np.ndarray] = {}
  shards: list[list[str]] = []
  total_size = 0

  def finish() -> None:
    path = directory / f"{len(shards)}.unfinished"  # the final name needs the number of shards
    safetensors.numpy.save_file(shard, path, metadata={"format": "pt"})  # transformers needs it
    shards.append(list(shard))
    shard.clear()

  for name, tensor in tensors:
    if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > limit:
      finish()
    shard[name] = np.ascontiguousarray(tensor)
    total_size += tensor.nbytes
  finish()
  count, weight_map = len(shards), {}
  for i, names in enumerate(shards):
    file = SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
    (directory / file).touch()  # with the usual permissions; the library's files are private
    shutil.copymode(directory / file, directory / f"{i}.unfinished")
    (directory / f"{i}.unfinished").replace(directory / file)
    weight_map |= dict.fromkeys(names, file)
  if count > 1:
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2))
