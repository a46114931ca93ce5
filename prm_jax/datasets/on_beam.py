"""The two heavy parts of preparing a dataset, on Apache Beam: writing shards and counting labels.

Shards are written by TFDS, whose `ShardBasedBuilder` runs each shard's generator in a Beam worker.
Counting is a pipeline over the rows as they are stored.  Both give what one process gives, to the
byte.  Data passes between processes as files, so workers on other machines must see the same
folders, those of the source and of the output.
"""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping

import tensorflow_datasets as tfds

from prm_jax.datasets import prm800k
from prm_jax.datasets.prm800k.recipes import OBJECTIVES, Converter, Counts, Recipe

ROWS = 500  # a worker's portion; PRM800K has 101,599
Key = tuple[str, str, bytes]  # split, objective, content


@dataclasses.dataclass(frozen=True)
class Beam:
  """Where a pipeline runs."""

  runner: str = ""
  """DirectRunner, or another of Apache Beam's; "": in this process, without Beam."""
  options: tuple[str, ...] = ()
  """The runner's own, without dashes: direct_num_workers=4 direct_running_mode=multi_processing."""

  def pipeline_options(self):
    """The runner's options as Beam has them.

    Raises:
      ValueError: Beam is not installed, or has no such option.
    """
    try:
      from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
      raise ValueError(
        f"--beam.runner={self.runner} needs Apache Beam ({error}); install it with "
        "python -m pip install '.[beam]', or leave the runner out: the output is the same"
      ) from error
    options = PipelineOptions([f"--{option}" for option in self.options])
    known = options.get_all_options()
    if unknown := [o for o in self.options if o.partition("=")[0] not in known]:
      raise ValueError(f"--beam.options: Apache Beam has no {', '.join(unknown)}")
    return options

  def download_config(self) -> tfds.download.DownloadConfig:
    """What makes TFDS write the shards of a builder there."""
    return tfds.download.DownloadConfig(
      beam_runner=self.runner, beam_options=self.pipeline_options()
    )


def count(
  beam: Beam,
  directory: pathlib.Path,
  sizes: Mapping[str, int],
  recipe: Recipe,
  excluded: Mapping[str, Collection[str]],
) -> dict[str, dict[str, Counts]]:
  """What a recipe keeps of a stored dataset: `conversion.Converter` over all its rows.

  Rows with equal content meet in one place, where the first of them in the dataset is told from its
  duplicates; counts then add up in any order.

  Args:
    beam: where to count.
    directory: holds the dataset.
    sizes: rows of each split.
    recipe: which labels to keep.
    excluded: problems whose rows are dropped, by split.

  Returns:
    the counts of each split and objective.
  """
  import apache_beam

  portions = [
    (split, start, min(start + ROWS, size))
    for split, size in sizes.items()
    for start in range(0, size, ROWS)
  ]
  with tempfile.TemporaryDirectory(dir=directory) as folder:
    result = pathlib.Path(folder, "counts.pickle")
    with apache_beam.Pipeline(runner=beam.runner, options=beam.pipeline_options()) as pipeline:
      _ = (
        pipeline
        | "portions" >> apache_beam.Create(portions)
        | "spread" >> apache_beam.Reshuffle()
        | "convert" >> apache_beam.FlatMap(_convert, directory, recipe, excluded)
        | "by content" >> apache_beam.GroupByKey()
        | "duplicates" >> apache_beam.FlatMapTuple(_first_and_others)
        | "add up" >> apache_beam.CombinePerKey(_total)
        | "gather" >> apache_beam.combiners.ToList()
        | "write" >> apache_beam.Map(_write, result)
      )
    counted = pickle.loads(result.read_bytes())  # written a moment ago, in a folder of its own
  empty = {split: {objective: Counts() for objective in OBJECTIVES} for split in sizes}
  for (split, objective), counts in counted:
    empty[split][objective] = counts
  return empty


def _convert(
  portion: tuple[str, int, int],
  directory: pathlib.Path,
  recipe: Recipe,
  excluded: Mapping[str, Collection[str]],
) -> Iterator[tuple[Key, tuple[int, Counts, Counts]]]:
  """Of each row and objective: its place, what it adds to the counts, and what a repeat adds."""
  split, start, stop = portion
  rows = prm800k.read_rows(directory, split)
  for objective in OBJECTIVES:
    converter = Converter(recipe, objective, excluded[split])
    for i in range(start, stop):
      record = rows[i]
      converter.seen.clear()
      added = []
      for _ in ("first", "repeat"):
        converter.counts = Counts()
        converter(record)
        added.append(converter.counts)
      # a row that was dropped has no content, and so repeats none
      content = next(iter(converter.seen), record.source.encode())
      yield (split, objective, content), (i, *added)


def _first_and_others(
  key: Key, rows: Iterable[tuple[int, Counts, Counts]]
) -> Iterator[tuple[tuple[str, str], Counts]]:
  for place, (_, first, repeat) in enumerate(sorted(rows, key=lambda row: row[0])):
    yield key[:2], repeat if place else first


def _total(counts: Iterable[Counts]) -> Counts:
  total = Counts()
  for one in counts:
    total.update(one)
  return total


def _write(counted: list, path: pathlib.Path) -> None:
  path.write_bytes(pickle.dumps(counted))
