"""ProcessBench (Zheng et al. 2024, arXiv:2412.06559) as a TFDS dataset; array_record."""

import pathlib
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import numpy as np
import tensorflow_datasets as tfds

from prm_jax.datasets import download, stored
from prm_jax.runtime import json_lines

SUBSETS = ("gsm8k", "math", "olympiadbench", "omnimath")


class Solution(msgspec.Struct):
  """A line of ProcessBench."""

  id: str  # SUBSET-NUMBER
  problem: json_lines.Text
  steps: Annotated[list[str], msgspec.Meta(min_length=1)]
  label: int  # index of the first wrong step; -1: all are right
  final_answer_correct: bool | None = None
  generator: str = ""

  def __post_init__(self):
    if not -1 <= self.label < len(self.steps):
      raise ValueError(f"label is {self.label}, of {len(self.steps)} steps")

  @property
  def subset(self) -> str:
    """The part of the id before its number."""
    return self.id.rpartition("-")[0] or self.id


class Builder(tfds.core.GeneratorBasedBuilder):
  """Solutions with their first wrong step; the splits are the four subsets."""

  VERSION = tfds.core.Version("1.0.0")
  BASE_URL = "https://huggingface.co/datasets/Qwen/ProcessBench/resolve/main/"

  def __init__(self, *, source: str | pathlib.Path | None = None, **kwargs):
    """Args as of TFDS's builders, and

    source: folder with SUBSET.jsonl or SUBSET.json of some of the subsets.
    """
    self.source = source
    self.paths: dict[str, pathlib.Path] = {}
    super().__init__(file_format="array_record", **kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    text = tfds.features.Text()
    features = {"id": text, "generator": text, "problem": text, "label": np.int32}
    features["steps"] = tfds.features.Sequence(text)
    features["final_answer_correct"] = np.bool_
    return self.dataset_info_from_configs(
      features=tfds.features.FeaturesDict(features), disable_shuffling=True
    )

  def _split_generators(self, dl_manager):
    if self.source is None:
      names = [f"{name}.json" for name in SUBSETS]
      self.paths = download.fetch(self, names, None, dl_manager.download_dir / self.name)
    else:
      self.paths = {path.name: path for path in _local(self.source).values()}
    return {
      path.name.partition(".")[0]: self._generate_examples(path) for path in self.paths.values()
    }

  def _generate_examples(self, path):
    for i, (_, solution) in enumerate(lines(path)):
      yield i, msgspec.structs.asdict(solution)


def files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """The files of a folder by subset."""
  found = {}
  for name in SUBSETS:
    paths = [folder / f"{name}{ending}" for ending in (".jsonl", ".json", ".jsonl.gz")]
    if path := next(filter(pathlib.Path.is_file, paths), None):
      found[name] = path
  return found


def _local(source: str | pathlib.Path) -> dict[str, pathlib.Path]:
  """The files of a folder by subset; FileNotFoundError if there is none."""
  if not (found := files(download.folder(source))):
    names = ", ".join(f"{name}.jsonl" for name in SUBSETS)
    raise FileNotFoundError(f"{source}: no file of ProcessBench: expected some of {names}")
  return found


def lines(path: pathlib.Path) -> Iterator[tuple[str, Solution]]:
  """FILE:LINE and solution of each line, or of each entry of one JSON array.

  Raises:
    BadLine: a line is no such solution.
  """
  for where, record in json_lines.records(path):
    yield where, json_lines.convert(record, Solution, where)


def read(directory: str | pathlib.Path) -> list[Solution]:
  """All solutions of a folder: what prepare_data.py wrote, or SUBSET.jsonl files as published."""
  if not any(pathlib.Path(directory).rglob("dataset_info.json")):
    return [solution for path in _local(directory).values() for _, solution in lines(path)]

  def solution(example: dict[str, Any]) -> Solution:
    text = {key: example[key].decode() for key in ("id", "generator", "problem")}
    steps = [step.decode() for step in example["steps"]]
    correct = bool(example["final_answer_correct"])
    return Solution(**text, steps=steps, label=int(example["label"]), final_answer_correct=correct)

  splits = stored.opened(directory).info.splits
  return [each for split in splits for each in stored.Examples(directory, split, solution)]
