"""Datasets that prepare_data.py wrote, read back."""

import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow_datasets as tfds


class Examples(Sequence):
  """The examples of a split: `examples[i]` reads one, and raises ValueError if it is damaged."""

  def __init__(
    self,
    directory: str | pathlib.Path,
    split: str,
    decode: Callable[[dict[str, Any]], Any] = lambda example: example,
  ):
    """Opens the dataset below a prepare_data output.

    Args:
      decode: what an example is turned into.

    Raises:
      FileNotFoundError, ValueError: there is not one dataset; it has no such split.
    """
    builder = opened(directory)
    if split not in builder.info.splits:
      there = ", ".join(sorted(builder.info.splits))
      raise ValueError(
        f"no split {split!r} in {directory}; there are: {there}.  To evaluate on one of them while "
        f"training: --config.data.eval_split=NAME"
      )
    self._files = builder.info.splits[split].file_instructions
    self._data_source = builder.as_data_source(split)
    self._decode = decode

  def __len__(self) -> int:
    return len(self._data_source)

  def __getitem__(self, i):
    if not 0 <= i < len(self):
      raise IndexError(f"record {i} of {len(self)}")
    try:
      return self._decode(self._data_source[i])
    except Exception as error:  # array_record's names no file
      ends = itertools.accumulate(file.examples_in_shard for file in self._files)
      name = next(file.filename for file, end in zip(self._files, ends) if i < end)
      damage = f"record {i} of the split is damaged: {error}; write the dataset again"
      raise ValueError(f"{name}: {damage}") from error


def opened(directory: str | pathlib.Path) -> tfds.core.DatasetBuilder:
  """The one dataset below a folder; FileNotFoundError if there is none, or several."""
  found = [path.parent for path in pathlib.Path(directory).rglob("dataset_info.json")]
  if len(found) != 1:
    raise FileNotFoundError(f"{len(found)} datasets below {directory}; prepare_data.py writes one")
  return tfds.builder_from_directory(found[0])
