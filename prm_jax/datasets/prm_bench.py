"""PRMBench (Song et al. 2025, arXiv:2501.03124): 6,216 solutions with errors of eight classes.

github.com/ssmisya/PRMBench, Apache-2.0.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from prm_jax.datasets.benchmarks import Benchmark, Steps, url_infos
from prm_jax.runtime import json_lines

CORRECT = "correct"  # class of the original solutions
WITH_ORIGINAL = "redundency"  # upstream takes original solutions from this class, and spells it so
BASE_URL = (
  "https://raw.githubusercontent.com/ssmisya/PRMBench/a1ae4eab803e14c4c6316bf89d1679b0486faa8c/"
  "mr_eval/tasks/prmtest_classified/data/"
)
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
  """A solution to judge."""

  id: str  # CLASS_idx
  idx: str
  classification: str
  problem: str
  steps: tuple[str, ...]
  wrong: frozenset[int]  # indices of wrong steps, from 0


BENCHMARK = Benchmark(
  "prm_bench",
  BASE_URL,
  [url.removeprefix(BASE_URL) for url in url_infos() if url.startswith(BASE_URL)],
  Line,
  lambda folder: sorted(folder.glob("*.jsonl")),
  split="test",
)


def solutions(rows: Iterable[tuple[T, Line]]) -> Iterator[tuple[T, Solution]]:
  """Yields the solutions that upstream judges, each with the first element of its row.

  Follows mr_eval/tasks/prmtest_classified/task.py.  A line gives its modified solution; before it,
  a line with redundant steps gives its original solution as a correct one.  Of lines with the
  same class and idx, only the first is used.
  """
  seen = set()
  for beside, row in rows:
    wrong = frozenset(step - 1 for step in row.error_steps)
    modified = row.modified_question, tuple(row.modified_process), wrong
    original = row.original_question, tuple(row.original_process), frozenset()
    contents = {CORRECT: original} if row.classification == WITH_ORIGINAL else {}
    for name, content in (contents | {row.classification: modified}).items():
      key = f"{name}_{row.idx}"
      if key not in seen:
        seen.add(key)
        yield beside, Solution(key, row.idx, name, *content)


def read(directory: str | pathlib.Path) -> list[Solution]:
  """Returns all solutions of a folder."""
  return [solution for _, solution in solutions(enumerate(BENCHMARK.read(directory)))]
