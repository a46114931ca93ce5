"""Generated arithmetic: problems, labelled solutions, and candidate solutions to rerank."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from prm_jax.datasets import prm800k
from prm_jax.datasets.arithmetic import solver
from prm_jax.runtime import json_lines

CANDIDATES = "candidates.jsonl"


class Builder(prm800k.RecordsBuilder):
  """TFDS builder of arithmetic problems with labelled solutions, as records of PRM800K's format."""

  name = "arithmetic"
  VERSION = tfds.core.Version("1.0.0")

  def __init__(self, *, rows: Mapping[str, Iterable[dict[str, Any]]] | None = None, **kwargs):
    """Args: rows: JSON objects of each split; needed to write, not to read."""
    self._rows = rows or {}
    super().__init__(**kwargs)

  def _shard_iterators_per_split(self, dl_manager):
    return {
      split: [functools.partial(prm800k.examples, prm800k.numbered(rows, f"arithmetic_{split}"))]
      for split, rows in self._rows.items()
    }


@dataclasses.dataclass(frozen=True)
class Generator:
  """The data of one seed; no problem is in both splits.

  Seeds are independent: about one test problem in six, mostly of level 1, is also among another
  seed's problems, with other likely mistakes.  Tune on seeds from 100 up, report on others.
  """

  seed: int = 0  # of problems, mistakes and solutions
  train_problems: int = 4000
  solutions: int = 2  # labelled solutions of each problem
  alternatives: int = 1  # further completions of a step, if as many are found
  test_problems: int = 200
  candidates: int = 1024  # solutions sampled for each test problem, to rerank

  def problems(self) -> dict[str, list[solver.Problem]]:
    stream = solver.problems(self.seed, self.test_problems + self.train_problems)
    test = list(itertools.islice(stream, self.test_problems))
    return {"train": list(stream), "test": test}

  def rows(self) -> dict[str, Iterator[dict[str, Any]]]:
    """Labelled solutions of each split, as JSON objects of PRM800K's format."""
    return {split: self._rows(split, problems) for split, problems in self.problems().items()}

  def _rows(self, split: str, problems: list[solver.Problem]) -> Iterator[dict[str, Any]]:
    rng = self._rng(split)
    for problem in problems:
      for _ in range(self.solutions):
        yield solver.make_row(problem, solver.solve(problem, rng), rng, self.alternatives)

  def write_candidates(self, directory: str | pathlib.Path) -> pathlib.Path:
    """Writes candidate solutions of the test problems: input of scripts/score.py."""
    rng, path = self._rng("candidates"), pathlib.Path(directory) / CANDIDATES
    with json_lines.written(path) as out:
      for i, problem in enumerate(self.problems()["test"]):
        for _ in range(self.candidates):
          solution = solver.solve(problem, rng)
          candidate = {
            "problem": problem.text,
            "unique_id": f"test/{i}",
            "level": problem.level,
            "ground_truth_answer": str(problem.answer),
            "steps": solution.steps,
            "answer": str(solution.answer),
            "is_correct": solution.answer == problem.answer,
          }
          out.write(json.dumps(candidate) + "\n")
    return path

  def _rng(self, use: str) -> np.random.Generator:
    return np.random.default_rng([self.seed, *use.encode()])
