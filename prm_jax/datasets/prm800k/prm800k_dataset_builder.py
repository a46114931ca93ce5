"""PRM800K as a TFDS dataset of whole labelled solutions; needs no TensorFlow.

Builder(source="prm800k/data", config="all", data_dir="out").download_and_prepare()
records = stored_records("out", "train")     # records[17].solution
"""

import functools
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow_datasets as tfds
from tensorflow_datasets.core import writer
from tensorflow_datasets.proto import tf_example_pb2

from prm_jax.datasets import download, stored
from prm_jax.datasets.prm800k.records import Record, numbered, parse, read_records
from prm_jax.runtime import json_lines


class RecordsBuilder(tfds.core.ShardBasedBuilder, skip_registration=True):
  """Writes records of PRM800K's format; each such dataset is a subclass named `Builder`.

  An example holds the record's JSON, byte for byte, and a few of its fields to search by.
  """

  VERSION = tfds.core.Version("1.0.0")

  def __init__(self, *, rows: Mapping[str, Iterable[dict[str, Any]]] | None = None, **kwargs):
    """Takes the arguments of TFDS's builders, and `rows`: the generated JSON objects by split."""
    self._rows = rows or {}
    super().__init__(file_format="array_record", **kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    names = ("json", "source", "problem", "finish_reason")
    return stored.info(self, {name: tfds.features.Text() for name in names})

  def _shard_iterators_per_split(self, dl_manager):
    return {
      split: [functools.partial(_examples, numbered(rows, f"{self.name}_{split}"))]
      for split, rows in self._rows.items()
    }

  def _example_writer(self) -> writer.ExampleWriter:
    return _DeterministicWriter(self.info.file_format)


class _DeterministicWriter(writer.ExampleWriter):
  """Writes the same bytes in every process, by sorting an example's features."""

  def write(self, path, examples):
    decode = tf_example_pb2.Example.FromString
    ordered = ((key, decode(data).SerializeToString(deterministic=True)) for key, data in examples)
    return super().write(path, ordered)


def _examples(records: Iterable[Record]) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields the TFDS key and features of each record."""
  for key, record in enumerate(records):
    example = {
      "json": record.json,
      "source": record.source,
      "problem": record.solution.question.problem,
      "finish_reason": record.solution.label.finish_reason,
    }
    yield key, example


def _part(path: pathlib.Path, skip: bool, part: dict[str, int]) -> Iterator[tuple[int, Any]]:
  """Yields the examples of a part of a source file; raises at a bad record unless `skip`."""
  return _examples(read_records(path, [] if skip else None, **part))


class Builder(RecordsBuilder):
  """PRM800K (Let's Verify Step by Step, Lightman et al. 2023).

  A shard is a part of one source file; TFDS holds one shard in memory while it writes it.
  """

  BUILDER_CONFIGS = [  # noqa: RUF012 - TFDS's convention
    tfds.core.BuilderConfig(name="all", description="both phases"),
    tfds.core.BuilderConfig(name="phase1", description="alternatives at every step; about 5 %"),
    tfds.core.BuilderConfig(name="phase2", description="labels up to the first error"),
  ]
  SHARD_BYTES = 32 * 2**20  # of a source file; 15 shards of train
  BASE_URL = "https://media.githubusercontent.com/media/openai/prm800k/main/prm800k/"

  def __init__(
    self, *, source: str | pathlib.Path | None = None, on_bad_record: str = "fail", **kwargs
  ):
    """Takes the arguments of TFDS's builders (`config`, `data_dir`) and two more.

    Args:
      source: folder with upstream's files or a part of their records, as `download.fetch` takes it.
      on_bad_record: "fail" raises BadLine at the first bad record; "skip" lists it in `skipped`.
    """
    self.source = source
    self._skip = on_bad_record == "skip"
    self.skipped: dict[str, list[str]] = {"train": [], "test": []}  # messages of bad records
    self.paths: dict[str, pathlib.Path] = {}  # source files by name; empty before the build
    super().__init__(**kwargs)

  def files(self) -> dict[str, list[str]]:
    """Returns upstream's files of each split, for this config."""
    name = self.builder_config.name
    phases = ("phase1", "phase2") if name == "all" else (name,)
    return {s: [f"data/{phase}_{s}.jsonl" for phase in phases] for s in ("train", "test")}

  def _download_and_prepare(self, dl_manager, download_config=None):
    files = [file for names in self.files().values() for file in names]
    self.paths = download.fetch(self, files, self.source, dl_manager.download_dir)
    for path in self.paths.values():
      next(json_lines.lines(path))  # raises BadLine if the file is empty
    try:
      super()._download_and_prepare(dl_manager, download_config)
    except Exception:
      if download_config.beam_runner:
        self._find_bad_records()  # raises the BadLine that Beam has wrapped
      raise
    if self._skip:
      self._find_bad_records()
    for path in pathlib.Path(self.data_dir).glob("*.shard_infos.json"):
      path.unlink()  # left by TFDS after a Beam pipeline
    for split, bad in self.skipped.items():
      if not self.info.splits[split].num_examples:
        raise ValueError(f"split {split!r} of {self.source} has no good record; bad: {bad[:1]}")

  def _find_bad_records(self):
    """Reads the source again: Beam's workers cannot fill `skipped`, and Beam wraps their errors."""
    for split, names in self.files().items():
      skipped = self.skipped[split] if self._skip else None
      for name in names:
        for _ in read_records(self.paths[name], skipped):
          pass

  def _shard_iterators_per_split(self, dl_manager):
    # On Beam, TFDS writes a split again with each later split, so the small split comes first.
    return {
      split: [
        functools.partial(_part, self.paths[name], self._skip, part)
        for name in names
        for part in cut(self.paths[name], self.SHARD_BYTES)
      ]
      for split, names in reversed(self.files().items())
    }


def cut(path: pathlib.Path, size: int) -> Iterator[dict[str, int]]:
  """Yields parts of whole lines, each of `size` bytes or a line more, for `read_records`.

  A line that is longer than `read_records` accepts may be in several parts.
  """
  start, first = 0, 1
  with open(path, "rb") as f:
    while chunk := f.read(size):
      if not chunk.endswith(b"\n"):
        chunk += f.readline(json_lines.MAX_LINE_BYTES)
      yield {"start": start, "stop": start + len(chunk), "first": first}
      start += len(chunk)
      first += chunk.count(b"\n")


def stored_records(directory: str | pathlib.Path, split: str) -> Sequence[Record]:
  """Returns the records of `split` below a prepare_data output; raises as `stored.Examples`."""
  return stored.Examples(
    directory, split, lambda example: parse(example["json"], example["source"].decode())
  )
