"""ProcessBench (Zheng et al. 2024, arXiv:2412.06559) as a TFDS dataset."""

import pathlib

import msgspec

from prm_jax.datasets import download, stored
from prm_jax.runtime import json_lines

SUBSETS = ("gsm8k", "math", "olympiadbench", "omnimath")


class Solution(msgspec.Struct):
  """A line of ProcessBench."""

  id: str  # SUBSET-NUMBER
  problem: json_lines.Text
  steps: stored.Steps
  label: stored.Int32  # index of the first wrong step; -1: all are right
  final_answer_correct: bool | None = None
  generator: str = ""

  def __post_init__(self):
    if not -1 <= self.label < len(self.steps):
      raise ValueError(f"label is {self.label}, of {len(self.steps)} steps")

  @property
  def subset(self) -> str:
    """Returns the part of the id before its number."""
    return self.id.rpartition("-")[0] or self.id


class Builder(stored.BenchmarkBuilder):
  """Solutions with their first wrong step; the splits are the four subsets.

  `source` holds the file of at least one subset (see `files`).
  """

  BASE_URL = "https://huggingface.co/datasets/Qwen/ProcessBench/resolve/main/"
  LINE = Solution

  def _split_generators(self, dl_manager):
    if self.source is None:
      names = [f"{name}.json" for name in SUBSETS]
      self.paths = download.fetch(self, names, None, dl_manager.download_dir / self.name)
    else:
      self.paths = {path.name: path for path in _local(self.source)}
    return {
      path.name.partition(".")[0]: self._generate_examples([path]) for path in self.paths.values()
    }


def files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns the file of each subset in a folder: SUBSET.jsonl, .json or .jsonl.gz."""
  return download.first_files(folder, SUBSETS, (".jsonl", ".json", ".jsonl.gz"))


def _local(source: str | pathlib.Path) -> list[pathlib.Path]:
  """Returns the paths of `files`; FileNotFoundError if the folder has none."""
  if not (paths := files(download.folder(source))):
    names = ", ".join(f"{name}.jsonl" for name in SUBSETS)
    raise FileNotFoundError(f"{source}: no file of ProcessBench: expected some of {names}")
  return [*paths.values()]


def read(directory: str | pathlib.Path) -> list[Solution]:
  """Returns all solutions of a folder: prepare_data.py's output, or the published files."""
  return stored.read(directory, Solution, _local)
