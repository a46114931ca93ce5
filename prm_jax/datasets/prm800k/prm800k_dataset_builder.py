"""PRM800K as a TFDS dataset of whole labelled solutions: array_record, no TensorFlow.

    builder = Builder(source="prm800k/data", config="all", data_dir="out")
    builder.download_and_prepare()
    records = stored_records("out", "train")     # records[17].solution

Without `source` the files are downloaded from github.com/openai/prm800k and verified.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow_datasets as tfds
import tqdm
from tensorflow_datasets.core import writer
from tensorflow_datasets.proto import tf_example_pb2

from prm_jax.datasets import download
from prm_jax.datasets.prm800k.records import Record, read_records
from prm_jax.runtime.json_lines import BadLine

ON_BAD_RECORD = ("fail", "skip")


class RecordsBuilder(tfds.core.ShardBasedBuilder, skip_registration=True):
  """Writes records of PRM800K's format; each dataset of them is a subclass named `Builder`.

  An example is the record's JSON, byte for byte, beside the fields that one searches by.  TFDS
  holds one shard in memory while it writes it, and keeps the order of records and shards.
  """

  VERSION = tfds.core.Version("1.0.0")

  def __init__(self, **kwargs):
    super().__init__(file_format="array_record", **kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    names = ("json", "source", "problem", "finish_reason")
    features = tfds.features.FeaturesDict({name: tfds.features.Text() for name in names})
    return self.dataset_info_from_configs(features=features, disable_shuffling=True)

  def _example_writer(self) -> writer.ExampleWriter:
    return _DeterministicWriter(self.info.file_format)


class _DeterministicWriter(writer.ExampleWriter):
  """Writes the same bytes in every process; the order of an example's map would vary."""

  def write(self, path, examples):
    bar = tqdm.tqdm(examples, path.name, leave=False, disable=None)
    example = tf_example_pb2.Example.FromString
    ordered = ((key, example(data).SerializeToString(deterministic=True)) for key, data in bar)
    return super().write(path, ordered)


def examples(records: Iterable[Record]) -> Iterator[tuple[int, dict[str, Any]]]:
  """Key and features of each record, as TFDS wants them."""
  for key, record in enumerate(records):
    yield (
      key,
      {
        "json": record.json,
        "source": record.source,
        "problem": record.solution.question.problem,
        "finish_reason": record.solution.label.finish_reason,
      },
    )


@dataclasses.dataclass(frozen=True)
class _Shard:
  """Reads the examples of a part of a source file.  Apache Beam may call it in another process.

  What it says about bad records is therefore left in files: `report`.error has the message of the
  one that ended it, `report`.skipped a JSON list of the messages of those that were skipped.
  """

  path: pathlib.Path
  start: int  # byte offset
  stop: int
  first: int  # number of its first line
  report: pathlib.Path
  skip: bool  # bad records; otherwise the first one raises

  def __call__(self) -> Iterator[tuple[int, dict[str, Any]]]:
    skipped: list[str] | None = [] if self.skip else None
    part = {"start": self.start, "stop": self.stop, "first": self.first}
    try:
      yield from examples(read_records(self.path, skipped, **part))
    except BadLine as error:
      self.report.with_suffix(".error").write_text(str(error), encoding="utf-8")
      raise
    if skipped:
      self.report.with_suffix(".skipped").write_text(json.dumps(skipped), encoding="utf-8")


class Builder(RecordsBuilder):
  """PRM800K (Let's Verify Step by Step, Lightman et al. 2023).

  A shard is a part of one of upstream's files.  With
  `download_config=tfds.download.DownloadConfig(beam_runner=...)` Apache Beam writes the shards.
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
    **kwargs,
  ):
    """Args as of TFDS's builders (`config`, `data_dir`), and

    source: folder with upstream's files, `data/phase1_train.jsonl` or `phase1_train.jsonl`; it may
      hold a part of upstream's records and is not verified.  None: download and verify.
    on_bad_record: "fail" raises BadLine at the first bad record; "skip" lists it in `skipped`.
    """
    if on_bad_record not in ON_BAD_RECORD:
      raise ValueError(f"on_bad_record={on_bad_record!r}; expected one of {ON_BAD_RECORD}")
    self.source = source
    self._skip = on_bad_record == "skip"
    self.skipped: dict[str, list[str]] = {}  # messages of bad records, by split
    self.paths: dict[str, pathlib.Path] = {}  # of the source files, once they are known
    super().__init__(**kwargs)

  def files(self) -> dict[str, list[str]]:
    """Upstream's files of each split, for this config."""
    name = self.builder_config.name
    phases = ("phase1", "phase2") if name == "all" else (name,)
    return {s: [f"data/{phase}_{s}.jsonl" for phase in phases] for s in ("train", "test")}

  def _download_and_prepare(self, dl_manager, download_config=None):
    with tempfile.TemporaryDirectory(dir=self.data_dir) as folder:
      self._reports = pathlib.Path(folder)
      try:
        super()._download_and_prepare(dl_manager, download_config)
      except Exception as error:  # Beam wraps a worker's
        if found := sorted(self._reports.glob("*.error")):
          raise BadLine(found[0].read_text(encoding="utf-8")) from error
        raise
      for path in pathlib.Path(self.data_dir).glob("*.shard_infos.json"):
        path.unlink()  # TFDS leaves them after a Beam pipeline
      for split in self.files():
        paths = sorted(self._reports.glob(f"{split}-*.skipped"))
        lists = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        self.skipped[split] = list(itertools.chain(*lists))
    for split, bad in self.skipped.items():
      if not self.info.splits[split].num_examples:
        where = ", ".join(str(self.paths[name]) for name in self.files()[split])
        example = f"; all {len(bad)} are bad, first {bad[0]}" if bad else ""
        raise ValueError(f"{self.name}: split {split!r} has no records in {where}{example}")

  def _shard_iterators_per_split(self, dl_manager):
    files = self.files()
    needed = [name for names in files.values() for name in names]
    self.paths = download.fetch(self, needed, self.source, dl_manager.download_dir)
    shards: dict[str, list[_Shard]] = {}
    # On Beam, TFDS writes a split again together with each later one: the small one comes first.
    for split in ("test", "train"):
      parts = [
        (self.paths[name], *part)
        for name in files[split]
        for part in cut(self.paths[name], self.SHARD_BYTES)
      ]
      shards[split] = [
        _Shard(*part, self._reports / f"{split}-{i:05}", self._skip) for i, part in enumerate(parts)
      ]
    return shards


def cut(path: pathlib.Path, size: int) -> Iterator[tuple[int, int, int]]:
  """(start, stop, first line) of parts of whole lines, each of `size` bytes or a line more."""
  start, first = 0, 1
  with open(path, "rb") as f:
    while chunk := f.read(size):
      if not chunk.endswith(b"\n"):
        chunk += f.readline()
      yield start, start + len(chunk), first
      start += len(chunk)
      first += chunk.count(b"\n")
