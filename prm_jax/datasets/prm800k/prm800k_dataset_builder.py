"""PRM800K as a TFDS dataset of whole labelled solutions: array_record, no TensorFlow.

    builder = Builder(source="prm800k/data", config="all", data_dir="out")
    builder.download_and_prepare()
    rows = read_rows("out", "train")     # rows[17].row is upstream's JSON object

Without `source` the files are downloaded from github.com/openai/prm800k and verified.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow_datasets as tfds
from tensorflow_datasets.core import writer
from tensorflow_datasets.proto import tf_example_pb2

from prm_jax.datasets import download
from prm_jax.datasets.prm800k import codec
from prm_jax.datasets.prm800k.records import (
  BadRecord,
  BadRecords,
  Part,
  Record,
  check_row,
  parts,
  read_records,
)

ON_BAD_RECORD = ("fail", "skip")


class RowsBuilder(tfds.core.ShardBasedBuilder, skip_registration=True):
  """Writes rows in PRM800K's format.  A dataset of such rows is a subclass named `Builder`.

  TFDS holds one shard in memory while it writes it.  Rows stay in the order in which they are
  given, shard after shard.
  """

  VERSION = tfds.core.Version("1.0.0")

  def __init__(self, *, splits: Mapping[str, Iterable[Record]] | None = None, **kwargs):
    """Args: splits: the records of each split; needed to write, not to read."""
    self._splits = splits
    super().__init__(file_format="array_record", **kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    return self.dataset_info_from_configs(features=codec.features(), disable_shuffling=True)

  def _example_writer(self) -> writer.ExampleWriter:
    return _Writer(self.info.file_format)

  def _shard_iterators_per_split(self, dl_manager):
    del dl_manager
    if self._splits is None:
      raise ValueError(f"{self.name}: no rows to write; give splits=")
    shards = {}
    for split, records in self._splits.items():
      records = iter(records)
      first = next(records, None)
      if first is None:
        raise ValueError(f"{self.name}: split {split!r} has no rows")
      shards[split] = [functools.partial(_examples, itertools.chain([first], records))]
    return shards


class _Writer(writer.ExampleWriter):
  """Stores the same bytes for the same rows: an example is a map, whose order varies by process."""

  def write(self, path, examples):
    return super().write(path, ((key, _in_order(example)) for key, example in examples))


def _in_order(example: bytes) -> bytes:
  return tf_example_pb2.Example.FromString(example).SerializeToString(deterministic=True)


def _examples(records: Iterable[Record]) -> Iterator[tuple[int, dict[str, Any]]]:
  for i, record in enumerate(records):
    yield i, codec.encode(record)


@dataclasses.dataclass(frozen=True)
class _Shard:
  """The examples of a part of a file.  Apache Beam sends it to the process that writes the shard.

  What is bad in it comes back as files, as that process may be anywhere: `note`.json has the
  BadRecords that were skipped, `note`.error the one that was not.
  """

  part: Part
  name: str  # of the file, in records
  skip: bool  # bad records; otherwise the first one raises
  note: pathlib.Path
  on_bytes: Callable[[int], None]

  def __call__(self) -> Iterator[tuple[int, dict[str, Any]]]:
    skipped = BadRecords() if self.skip else None
    try:
      yield from _examples(read_records(self.part, self.name, skipped, self.on_bytes))
    except BadRecord as error:
      self.note.with_suffix(".error").write_text(str(error), encoding="utf-8")
      raise
    if skipped is not None:
      text = json.dumps(dataclasses.asdict(skipped))
      self.note.with_suffix(".json").write_text(text, encoding="utf-8")


def _nothing(size: int) -> None:
  """The default of `on_bytes`; a lambda could not be sent to another process."""


class Builder(RowsBuilder):
  """PRM800K (Let's Verify Step by Step, Lightman et al. 2023).

  A shard is a part of one of upstream's files, so that each can be written by another process:
  with `download_config=tfds.download.DownloadConfig(beam_runner=...)`, on Apache Beam.
  """

  BUILDER_CONFIGS = [  # noqa: RUF012 - TFDS's convention
    tfds.core.BuilderConfig(name="all", description="both phases"),
    tfds.core.BuilderConfig(name="phase1", description="alternatives at every step; about 5 %"),
    tfds.core.BuilderConfig(name="phase2", description="labels up to the first error"),
  ]
  SHARD_BYTES = 32 * 2**20  # of a source file; 15 shards of train
  BASE_URL = "https://media.githubusercontent.com/media/openai/prm800k/main/prm800k/"

  def __init__(
    self,
    *,
    source: str | pathlib.Path | None = None,
    on_bad_record: str = "fail",
    on_bytes: Callable[[int], None] = _nothing,
    **kwargs,
  ):
    """Args as of TFDS's builders (`config`, `data_dir`), and

    source: folder with upstream's files, `data/phase1_train.jsonl` or `phase1_train.jsonl`; it may
      hold a part of upstream's rows and is not verified.  None: download and verify.
    on_bad_record: "fail" raises BadRecord at the first bad line; "skip" counts it in `skipped`.
    on_bytes: called with the size of each line read; not on Beam, where it would have to be sent
      to other processes.
    """
    if on_bad_record not in ON_BAD_RECORD:
      raise ValueError(f"on_bad_record={on_bad_record!r}; expected one of {ON_BAD_RECORD}")
    self.source = source
    self._skip = on_bad_record == "skip"
    self._on_bytes = on_bytes
    self.skipped: dict[str, BadRecords] = {}  # by split
    self.paths: dict[str, pathlib.Path] = {}  # of the source files, once they are known
    super().__init__(**kwargs)

  def files(self) -> dict[str, list[str]]:
    """Upstream's files of each split, for this config."""
    phases = (
      ("phase1", "phase2") if self.builder_config.name == "all" else (self.builder_config.name,)
    )
    return {s: [f"data/{phase}_{s}.jsonl" for phase in phases] for s in ("train", "test")}

  def _download_and_prepare(self, dl_manager, download_config=None):
    with tempfile.TemporaryDirectory(dir=self.data_dir) as folder:
      self._notes = {split: pathlib.Path(folder, split) for split in self.files()}
      try:
        super()._download_and_prepare(dl_manager, download_config)
      except Exception as error:
        if bad := sorted(pathlib.Path(folder).rglob("*.error")):  # under what Beam made of it
          raise BadRecord(bad[0].read_text(encoding="utf-8")) from error
        raise
      for path in pathlib.Path(self.data_dir).glob("*.shard_infos.json"):
        path.unlink()  # TFDS leaves its notes of a Beam pipeline
      for split, notes in self._notes.items():
        self.skipped[split] = BadRecords()
        for note in sorted(notes.glob("*.json")):
          self.skipped[split].update(BadRecords(**json.loads(note.read_text(encoding="utf-8"))))
    for split, info in self.info.splits.items():
      if not info.num_examples:
        bad = self.skipped[split]
        example = f"; all {bad.count} are bad, first {bad.examples[0]}" if bad.count else ""
        where = ", ".join(str(self.paths[name]) for name in self.files()[split])
        raise ValueError(f"{self.name}: split {split!r} has no rows in {where}{example}")

  def _shard_iterators_per_split(self, dl_manager):
    files = self.files()
    needed = [name for names in files.values() for name in names]
    self.paths = download.fetch(
      needed, self.source, self.BASE_URL, self.url_infos, dl_manager.download_dir
    )
    shards: dict[str, list[_Shard]] = {split: [] for split in files}
    for split, names in files.items():
      self._notes[split].mkdir()
      for name in names:
        for part in parts(self.paths[name], self.SHARD_BYTES):
          note = self._notes[split] / f"{len(shards[split]):05}"
          short = pathlib.PurePath(name).name
          shards[split].append(_Shard(part, short, self._skip, note, self._on_bytes))
    # On Beam, TFDS runs what it has of a split again with each split after it: the small one first.
    return {split: shards[split] for split in ("test", "train")}


def numbered(rows: Iterable[dict[str, Any]], name: str) -> Iterator[Record]:
  """Records of generated rows, checked like read ones; `name` stands for the file."""
  for line, row in enumerate(rows, 1):
    check_row(row)
    yield Record(row, name, line)


class Rows(Sequence):
  """The stored records of a split: `rows[i]` reads one; ValueError if its file is damaged."""

  def __init__(self, builder: tfds.core.DatasetBuilder, split: str):
    self._files = builder.info.splits[split].file_instructions
    self._data_source = builder.as_data_source(split)

  def __len__(self) -> int:
    return len(self._data_source)

  def __getitem__(self, i):
    if isinstance(i, slice):
      return [self[j] for j in range(*i.indices(len(self)))]
    if not -len(self) <= i < len(self):
      raise IndexError(f"row {i} of {len(self)}")
    i %= len(self)
    try:
      return codec.decode(self._data_source[i])
    except Exception as error:  # of array_record, which names no file, or of what it misread
      counts = itertools.accumulate(file.examples_in_shard for file in self._files)
      name = next(file.filename for file, end in zip(self._files, counts) if i < end)
      raise ValueError(
        f"{name}: row {i} of the split cannot be read: {error}; the file is damaged: copy it "
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


def read_rows(directory: str | pathlib.Path, split: str) -> Rows:
  """The records of `split` below a prepare_data output: a sequence with random access.

  Raises:
    FileNotFoundError: no dataset there.
    ValueError: it has no such split; or, where a row is read, its file is damaged.
  """
  builder = tfds.builder_from_directory(find_dataset(directory))
  if split not in builder.info.splits:
    raise ValueError(f"no split {split!r} in {directory}; there are {sorted(builder.info.splits)}")
  return Rows(builder, split)
