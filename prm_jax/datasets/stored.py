"""TFDS datasets of published benchmarks, and reading back what prepare_data.py wrote."""

import itertools
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import tensorflow_datasets as tfds

from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import Struct

Steps = Annotated[list[str], msgspec.Meta(min_length=1)]
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
TEXT = tfds.features.Text()
FEATURES = {  # by the type of a field of a benchmark's lines
  str: TEXT,
  json_lines.Text: TEXT,
  Int32: np.int32,
  bool | None: np.bool_,
  Steps: tfds.features.Sequence(TEXT),
  list[Int32]: tfds.features.Sequence(np.int32),
}


def info(builder: tfds.core.DatasetBuilder, features: dict[str, Any]) -> tfds.core.DatasetInfo:
  """Returns the description of a dataset with these features, whose examples keep their order."""
  features = tfds.features.FeaturesDict(features)
  return builder.dataset_info_from_configs(features=features, disable_shuffling=True)


class BenchmarkBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Base of the builders of published benchmarks, whose examples are the lines of their files."""

  VERSION = tfds.core.Version("1.0.0")
  LINE: type[msgspec.Struct]  # the format of a line

  def __init__(self, *, source: str | pathlib.Path | None = None, **kwargs):
    """Takes the arguments of TFDS's builders and `source`, a folder with the benchmark's files."""
    self.source = source  # None: upstream's, downloaded
    self.paths: dict[str, pathlib.Path] = {}  # source files by name; empty before the build
    super().__init__(file_format="array_record", **kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    fields = msgspec.structs.fields(self.LINE)
    return info(self, {field.name: FEATURES[field.type] for field in fields})

  def _generate_examples(self, paths: Iterable[pathlib.Path]):
    lines = itertools.chain.from_iterable(json_lines.structs(path, self.LINE) for path in paths)
    for i, (where, line) in enumerate(lines):
      example = msgspec.structs.asdict(line)
      if nulls := [name for name, value in example.items() if value is None]:
        raise json_lines.BadLine(f'{where}: no "{nulls[0]}"')  # a dataset has no null
      yield i, example


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
    builder = opened(directory)
    if split not in builder.info.splits:
      names = ", ".join(sorted(builder.info.splits))
      raise ValueError(
        f"no split {split!r} in {directory}; there are: {names}.  To evaluate on one of them while "
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
    except Exception as error:  # array_record's errors name no file
      ends = itertools.accumulate(file.examples_in_shard for file in self._files)
      name = next(file.filename for file, end in zip(self._files, ends) if i < end)
      damage = f"record {i} of the split is damaged, or of another dataset: {error}"
      raise ValueError(f"{name}: {damage}; write the dataset again") from error


def read(
  directory: str | pathlib.Path,
  kind: type[Struct],
  local: Callable[[str | pathlib.Path], Iterable[pathlib.Path]],
) -> list[Struct]:
  """Returns a benchmark's examples from a folder: prepare_data.py's output, or published files.

  Args:
    local: returns the published files in a folder; raises FileNotFoundError if it has none.
  """
  if not any(pathlib.Path(directory).rglob("dataset_info.json")):
    return [struct for path in local(directory) for _, struct in json_lines.structs(path, kind)]
  decode = lambda example: msgspec.convert({k: _plain(v) for k, v in example.items()}, kind)
  splits = opened(directory).info.splits
  return [struct for split in splits for struct in Examples(directory, split, decode)]


def _plain(value: Any) -> Any:
  """Converts a feature's value to types of Python, bytes to text."""
  if isinstance(value, bytes):
    return value.decode()
  if isinstance(value, list | np.ndarray):
    return [_plain(item) for item in value]
  return value.item() if isinstance(value, np.generic) else value


def opened(directory: str | pathlib.Path) -> tfds.core.DatasetBuilder:
  """Opens the one dataset below a folder; FileNotFoundError if it has none, or several."""
  roots = [path.parent for path in pathlib.Path(directory).rglob("dataset_info.json")]
  if len(roots) != 1:
    raise FileNotFoundError(f"{len(roots)} datasets below {directory}; prepare_data.py writes one")
  return tfds.builder_from_directory(roots[0])
