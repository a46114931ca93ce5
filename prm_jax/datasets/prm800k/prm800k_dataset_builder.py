"""PRM800K as a TFDS dataset of whole labelled solutions: array_record, no TensorFlow.

    builder = Builder(source="prm800k/data", config="all", data_dir="out")
    builder.download_and_prepare()
    rows = read_rows("out", "train")     # rows[17].row is upstream's JSON object

Without `source` the files are downloaded from github.com/openai/prm800k and verified.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow_datasets as tfds

from prm_jax.datasets import upstream
from prm_jax.datasets.prm800k import codec
from prm_jax.datasets.prm800k.rows import BadRecords, Record, check_row, read_records

ON_BAD_RECORD = ("fail", "skip")


class RowsBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Writes rows in PRM800K's format.  A dataset of such rows is a subclass named `Builder`.

  TFDS holds a split in memory while it writes it, and needs TensorFlow beyond 1 GB a split
  (PRM800K has less than half of that).
  """

  VERSION = tfds.core.Version("1.0.0")

  def __init__(self, *, splits: Mapping[str, Iterable[Record]] | None = None, **kwargs):
    """Args: splits: the records of each split; needed to write, not to read."""
    self._splits = splits
    super().__init__(file_format="array_record", **kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    # disable_shuffling: rows stay in the order of their files
    return self.dataset_info_from_configs(features=codec.features(), disable_shuffling=True)

  def _records(self, dl_manager) -> Mapping[str, Iterable[Record]]:
    del dl_manager
    if self._splits is None:
      raise ValueError(f"{self.name}: no rows to write; give splits=")
    return self._splits

  def _split_generators(self, dl_manager):
    generators = {}
    for split, records in self._records(dl_manager).items():
      records = iter(records)
      first = next(records, None)
      if first is None:
        raise ValueError(f"{self.name}: split {split!r} has no rows{self._why_empty(split)}")
      generators[split] = self._generate_examples(itertools.chain([first], records))
    return generators

  def _generate_examples(self, records: Iterable[Record]):
    for i, record in enumerate(records):
      yield i, codec.encode(record)

  def _why_empty(self, split: str) -> str:
    del split
    return ""


class Builder(RowsBuilder):
  """PRM800K (Let's Verify Step by Step, Lightman et al. 2023)."""

  BUILDER_CONFIGS = [  # noqa: RUF012 - TFDS's convention
    tfds.core.BuilderConfig(name="all", description="both phases"),
    tfds.core.BuilderConfig(name="phase1", description="alternatives at every step; about 5 %"),
    tfds.core.BuilderConfig(name="phase2", description="labels up to the first error"),
  ]
  BASE_URL = "https://media.githubusercontent.com/media/openai/prm800k/main/prm800k/"

  def __init__(
    self,
    *,
    source: str | pathlib.Path | None = None,
    on_bad_record: str = "fail",
    on_bytes: Callable[[int], None] = lambda n: None,
    **kwargs,
  ):
    """Args as of TFDS's builders (`config`, `data_dir`), and

    source: folder with upstream's files, `data/phase1_train.jsonl` or `phase1_train.jsonl`; it may
      hold a part of upstream's rows and is not verified.  None: download and verify.
    on_bad_record: "fail" raises BadRecord at the first bad line; "skip" counts it in `skipped`.
    on_bytes: called with the size of each line read.
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

  def _records(self, dl_manager) -> Mapping[str, Iterable[Record]]:
    files = self.files()
    needed = [name for names in files.values() for name in names]
    self.paths = upstream.fetch(
      needed, self.source, self.BASE_URL, self.url_infos, dl_manager.download_dir
    )
    self.skipped = {split: BadRecords() for split in files}
    return {split: self._read(names, self.skipped[split]) for split, names in files.items()}

  def _read(self, names: Sequence[str], skipped: BadRecords) -> Iterator[Record]:
    for name in names:
      short = pathlib.PurePath(name).name
      yield from read_records(
        self.paths[name], short, skipped if self._skip else None, self._on_bytes
      )

  def _why_empty(self, split: str) -> str:
    skipped = self.skipped[split]
    example = f"; all {skipped.count} are bad, first {skipped.examples[0]}" if skipped.count else ""
    return f" in {', '.join(str(self.paths[name]) for name in self.files()[split])}{example}"


def numbered(rows: Iterable[dict[str, Any]], name: str) -> Iterator[Record]:
  """Records of generated rows, checked like read ones; `name` stands for the file."""
  for line, row in enumerate(rows, 1):
    check_row(row)
    yield Record(row, name, line)


class Rows(Sequence):
  """The stored records of a split: `rows[i]` reads one."""

  def __init__(self, data_source):
    self._data_source = data_source

  def __len__(self) -> int:
    return len(self._data_source)

  def __getitem__(self, i):
    if isinstance(i, slice):
      return [self[j] for j in range(*i.indices(len(self)))]
    if not -len(self) <= i < len(self):
      raise IndexError(f"row {i} of {len(self)}")
    return codec.decode(self._data_source[i % len(self)])


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
    ValueError: it has no such split.
  """
  builder = tfds.builder_from_directory(find_dataset(directory))
  if split not in builder.info.splits:
    raise ValueError(f"no split {split!r} in {directory}; there are {sorted(builder.info.splits)}")
  return Rows(builder.as_data_source(split))
