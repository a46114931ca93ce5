"""Reads back the TFDS datasets that prepare_data.py wrote."""

import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow_datasets as tfds


def info(builder: tfds.core.DatasetBuilder, features: dict[str, Any]) -> tfds.core.DatasetInfo:
  """Returns the description of a dataset with these features, whose examples keep their order."""
  features = tfds.features.FeaturesDict(features)
  return builder.dataset_info_from_configs(features=features, disable_shuffling=True)


class Examples(Sequence):
  """A sequence of a split's examples.  `examples[i]` raises ValueError if example i is damaged."""

  def __init__(
    self, directory: str | pathlib.Path, split: str, decode: Callable[[dict[str, Any]], Any]
  ):
    """Opens the dataset below a prepare_data output.

    Args:
      decode: makes an item of the sequence from a TFDS example.

    Raises:
      FileNotFoundError: the directory does not hold exactly one dataset.
      ValueError: the dataset has no such split.
    """
    roots = [path.parent for path in pathlib.Path(directory).rglob("dataset_info.json")]
    if len(roots) != 1:
      raise FileNotFoundError(
        f"{len(roots)} datasets below {directory}; expected one, as prepare_data.py writes it"
      )
    builder = tfds.builder_from_directory(roots[0])
    if split not in builder.info.splits:
      names = ", ".join(sorted(builder.info.splits))
      raise ValueError(
        f"no split {split!r} in {directory}; its splits are {names}.  To evaluate on one of them "
        "during training: --config.data.eval_split=NAME"
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
    except Exception as error:  # array_record's errors name no file
      ends = itertools.accumulate(file.examples_in_shard for file in self._files)
      name = next(file.filename for file, end in zip(self._files, ends) if i < end)
      damage = f"record {i} of the split is damaged, or of another dataset: {error}"
      raise ValueError(f"{name}: {damage}; prepare the dataset again") from error
