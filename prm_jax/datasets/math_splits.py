"""The MATH problems as PRM800K splits them: 12,000 to train, 500 to test.

Lightman et al. 2023 (arXiv:2305.20050), appendix C; `math_splits` of github.com/openai/prm800k.
"""

import os
import pathlib

import msgspec

from prm_jax.datasets import download
from prm_jax.datasets.benchmarks import Benchmark

TRAIN, TEST = "train.jsonl", "test.jsonl"
TEST_FILE = f"math_splits/{TEST}"  # as upstream lays it out


class Problem(msgspec.Struct):
  """A line of a `math_splits` file."""

  problem: str
  solution: str
  answer: str
  subject: str
  unique_id: str
  level: int


def find(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the paths of train.jsonl and test.jsonl, if in a folder or its `math_splits`."""
  return [path for file in (TRAIN, TEST) if (path := download.find(folder, f"math_splits/{file}"))]


BENCHMARK = Benchmark(
  "math_splits",
  "https://media.githubusercontent.com/media/openai/prm800k/main/prm800k/math_splits/",
  (TRAIN, TEST),
  Problem,
  find,
)


def find_test(source: str | pathlib.Path) -> pathlib.Path | None:
  """Finds the list of test problems in or beside a folder of PRM800K's files; None if missing."""
  folder = pathlib.Path(os.path.abspath(os.path.expanduser(source)))  # the parent of "x/.." is x
  places = (folder / TEST_FILE, folder.parent / TEST_FILE)
  return next(filter(pathlib.Path.is_file, places), None)


def test_file(source: str | pathlib.Path | None, download_dir: str | pathlib.Path) -> pathlib.Path:
  """Returns the file of test problems in or beside `source`, or downloads it if that is None."""
  if source is None:
    return BENCHMARK.fetch([TEST], download_dir)[TEST]
  if path := find_test(source) or download.find(download.folder(source), TEST_FILE):
    return path
  raise FileNotFoundError(f"{source} lacks {TEST_FILE}; leave the source out to download it")
