"""The MATH problems as PRM800K splits them: 12,000 to train, 500 to test."""

import pathlib
from collections.abc import Iterator

import msgspec

from prm_jax.datasets import download, stored
from prm_jax.runtime import json_lines

FILES = {split: f"math_splits/{split}.jsonl" for split in ("train", "test")}


class Problem(msgspec.Struct):
  """A line of a `math_splits` file."""

  problem: str
  solution: str
  answer: str
  subject: str
  unique_id: str
  level: stored.Int32


class Builder(stored.BenchmarkBuilder):
  """MATH problems with solutions and answers (Lightman et al. 2023, appendix C).

  `source` holds the files of one or both splits, as `download.fetch` takes it.
  """

  BASE_URL = "https://media.githubusercontent.com/media/openai/prm800k/main/prm800k/"
  LINE = Problem

  def _split_generators(self, dl_manager):
    files = FILES
    if self.source is not None:
      files = {s: f for s, f in FILES.items() if download.find(self.source, f)} or FILES
    self.paths = download.fetch(self, list(files.values()), self.source, dl_manager.download_dir)
    return {split: self._generate_examples([self.paths[file]]) for split, file in files.items()}


def find_test(source: str | pathlib.Path) -> pathlib.Path | None:
  """Finds the list of test problems in or beside a folder of PRM800K's files; None without one."""
  folder = pathlib.Path(source).expanduser().absolute()
  places = (folder / FILES["test"], folder.parent / FILES["test"])
  return next(filter(pathlib.Path.is_file, places), None)


def read_problems(path: str | pathlib.Path) -> Iterator[Problem]:
  """Returns the problems of a `math_splits` file; BadLine names file, line and what is wrong."""
  return (problem for _, problem in json_lines.structs(path, Problem))
