"""PRMBench (Song et al. 2025, arXiv:2501.03124) as a TFDS dataset; array_record."""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import tensorflow_datasets as tfds

from prm_jax.datasets import download, stored
from prm_jax.runtime import json_lines

CORRECT = "correct"  # class of the original solutions
WITH_ORIGINAL = "redundency"  # upstream takes those from the lines of this class (and spells it so)
Steps = Annotated[list[str], msgspec.Meta(min_length=1)]
T = TypeVar("T")


class Line(msgspec.Struct):
  """A line of PRMBench's files.  Keys that are not listed are ignored."""

  idx: str  # of the original solution: lines of several classes share it
  classification: json_lines.Text
  original_question: json_lines.Text
  modified_question: json_lines.Text
  original_process: Steps
  modified_process: Steps
  error_steps: list[int]  # from 1; a few are beyond the last step


@dataclasses.dataclass(frozen=True)
class Solution:
  """A solution that is judged."""

  id: str  # CLASS_idx
  classification: str
  problem: str
  steps: tuple[str, ...]
  wrong: frozenset[int]  # indices of wrong steps, from 0


class Builder(tfds.core.GeneratorBasedBuilder):
  """The lines of PRMBench; one split."""

  VERSION = tfds.core.Version("1.0.0")
  BASE_URL = (
    "https://raw.githubusercontent.com/ssmisya/PRMBench/a1ae4eab803e14c4c6316bf89d1679b0486faa8c/"
    "mr_eval/tasks/prmtest_classified/data/"
  )

  def __init__(self, *, source: str | pathlib.Path | None = None, **kwargs):
    """Args as of TFDS's builders, and

    source: folder whose .jsonl files are lines of PRMBench.
    """
    self.source = source
    self.paths: dict[str, pathlib.Path] = {}
    super().__init__(file_format="array_record", **kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    texts, numbers = (tfds.features.Sequence(x) for x in (tfds.features.Text(), np.int32))
    types = {str: tfds.features.Text(), json_lines.Text: tfds.features.Text()}
    types |= {Steps: texts, list[int]: numbers}
    features = {field.name: types[field.type] for field in msgspec.structs.fields(Line)}
    return self.dataset_info_from_configs(
      features=tfds.features.FeaturesDict(features), disable_shuffling=True
    )

  def _split_generators(self, dl_manager):
    if self.source is None:
      files = [url.removeprefix(self.BASE_URL) for url in self.url_infos]
      self.paths = download.fetch(self, files, None, dl_manager.download_dir / self.name)
    else:
      self.paths = {path.name: path for path in _local(self.source)}
    return {"test": self._generate_examples()}

  def _generate_examples(self):
    rows = (line for path in self.paths.values() for _, line in lines(path))
    for i, line in enumerate(rows):
      yield i, msgspec.structs.asdict(line)


def _local(source: str | pathlib.Path) -> list[pathlib.Path]:
  """The files of a folder, by name; FileNotFoundError if there is none."""
  if not (found := sorted(download.folder(source).glob("*.jsonl"))):
    raise FileNotFoundError(f"{source}: no file of PRMBench: expected .jsonl files")
  return found


def lines(path: pathlib.Path) -> Iterator[tuple[str, Line]]:
  """FILE:LINE and content of each line; BadLine for one of another form."""
  for where, record in json_lines.records(path):
    yield where, json_lines.convert(record, Line, where)


def solutions(rows: Iterable[tuple[T, Line]]) -> Iterator[tuple[T, Solution]]:
  """The solutions that upstream judges, each with the first element of its row.

  As mr_eval/tasks/prmtest_classified/task.py: a line gives its modified solution; before that, a
  line with redundant steps gives its original solution as a correct one.  Of lines with the same
  class and idx, the first counts.
  """
  seen = set()
  for beside, row in rows:
    wrong = frozenset(step - 1 for step in row.error_steps)
    modified = row.modified_question, tuple(row.modified_process), wrong
    original = row.original_question, tuple(row.original_process), frozenset()
    several = {CORRECT: original} if row.classification == WITH_ORIGINAL else {}
    for name, content in (several | {row.classification: modified}).items():
      number = f"{name}_{row.idx}"
      if number not in seen:
        seen.add(number)
        yield beside, Solution(number, name, *content)


def read(directory: str | pathlib.Path) -> list[Solution]:
  """All solutions of a folder: what prepare_data.py wrote, or .jsonl files as published."""
  if not any(pathlib.Path(directory).rglob("dataset_info.json")):
    rows = (row for path in _local(directory) for row in lines(path))
  else:
    rows = enumerate(stored.Examples(directory, "test", _line))
  return [solution for _, solution in solutions(rows)]


def _line(example: dict[str, Any]) -> Line:
  """A line of a stored example."""
  values = {}
  for name, value in example.items():
    if name == "error_steps":
      values[name] = [int(step) for step in value]
    else:
      values[name] = value.decode() if isinstance(value, bytes) else [x.decode() for x in value]
  return Line(**values)
