"""Reads a prepared dataset of records in PRM800K's format."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Sequence

import tensorflow_datasets as tfds

from prm_jax.datasets.prm800k.records import Record, parse


class StoredRecords(Sequence[Record]):
  """The records of a split: `records[i]` reads one; ValueError if its file is damaged."""

  def __init__(self, builder: tfds.core.DatasetBuilder, split: str):
    self._files = builder.info.splits[split].file_instructions
    self._data_source = builder.as_data_source(split)

  def __len__(self) -> int:
    return len(self._data_source)

  def __getitem__(self, i):
    if not 0 <= i < len(self):
      raise IndexError(f"record {i} of {len(self)}")
    try:
      example = self._data_source[i]
      return parse(example["json"], example["source"].decode())
    except Exception as error:  # array_record's names no file
      ends = itertools.accumulate(file.examples_in_shard for file in self._files)
      name = next(file.filename for file, end in zip(self._files, ends) if i < end)
      raise ValueError(
        f"{name}: record {i} of the split cannot be read: {error}; the file is damaged: copy it "
        "again, or write the dataset again with scripts/prepare_data.py"
      ) from error


def find_dataset(directory: str | pathlib.Path) -> pathlib.Path:
  """The folder of the one TFDS dataset below `directory` (an output of prepare_data).

  Raises:
    FileNotFoundError: there is none, or more than one.
  """
  found = sorted(path.parent for path in pathlib.Path(directory).rglob("dataset_info.json"))
  if len(found) != 1:
    what = "no dataset" if not found else f"{len(found)} datasets ({', '.join(map(str, found))})"
    raise FileNotFoundError(
      f"{what} below {directory}; expected one, as scripts/prepare_data.py --output writes it"
    )
  return found[0]


def stored_records(directory: str | pathlib.Path, split: str) -> StoredRecords:
  """The records of `split` below a prepare_data output: a sequence with random access.

  Raises:
    FileNotFoundError: no dataset there.
    ValueError: it has no such split or is of an earlier version; reading a record of a damaged
      file raises it later.
  """
  builder = tfds.builder_from_directory(find_dataset(directory))
  if split not in builder.info.splits:
    raise ValueError(f"no split {split!r} in {directory}; there are {sorted(builder.info.splits)}")
  if "json" not in builder.info.features:
    raise ValueError(
      f"{directory} was written by an earlier version, in another form; write it again with "
      "scripts/prepare_data.py"
    )
  return StoredRecords(builder, split)
