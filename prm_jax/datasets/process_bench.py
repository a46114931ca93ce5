"""ProcessBench (Zheng et al. 2024, arXiv:2412.06559): the first wrong step of 3,400 solutions.

github.com/QwenLM/ProcessBench, Apache-2.0.
"""

import pathlib

import msgspec

from prm_jax.datasets import download
from prm_jax.datasets.benchmarks import Benchmark, Steps
from prm_jax.runtime import json_lines

SUBSETS = ("gsm8k", "math", "olympiadbench", "omnimath")


class Solution(msgspec.Struct):
  """A line of ProcessBench."""

  id: str  # SUBSET-NUMBER
  problem: json_lines.Text
  steps: Steps
  label: int  # index of the first wrong step; -1: all are right
  final_answer_correct: bool | None = None
  generator: str = ""

  def __post_init__(self):
    if not -1 <= self.label < len(self.steps):
      raise ValueError(f"label is {self.label}, of {len(self.steps)} steps")

  @property
  def subset(self) -> str:
    """Returns the part of the id before its number."""
    return self.id.rpartition("-")[0] or self.id


def find(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the file of each subset that is in a folder: SUBSET.jsonl, .json or .jsonl.gz."""
  return [*download.first_files(folder, SUBSETS, (".jsonl", ".json", ".jsonl.gz")).values()]


BENCHMARK = Benchmark(
  "process_bench",
  "https://huggingface.co/datasets/Qwen/ProcessBench/resolve/main/",
  [f"{name}.json" for name in SUBSETS],
  Solution,
  find,
)
