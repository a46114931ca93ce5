"""The embedded default: generated problems, labelled rows and candidate solutions to rerank."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from prm_jax import json_lines
from prm_jax.datasets.arithmetic import solver
from prm_jax.datasets.arithmetic.arithmetic_dataset_builder import Builder

__all__ = ["Builder", "Generator"]

HELD_OUT = ("dev", "test")


@dataclasses.dataclass(frozen=True)
class Generator:
  """All the data of one seed: no problem is in two splits."""

  seed: int = 0  # of problems, solutions and temptations
  train_problems: int = 4000
  solutions: int = 2  # labelled solutions of each training problem
  test_problems: int = 100  # held out, for the reported curves
  dev_problems: int = 100  # held out, to tune on
  candidates: int = 1024  # solutions sampled for each held-out problem

  def problems(self) -> dict[str, list[solver.Problem]]:
    counts = {"dev": self.dev_problems, "test": self.test_problems, "train": self.train_problems}
    stream = solver.problems(self.seed, 0, sum(counts.values()))
    return {split: list(itertools.islice(stream, n)) for split, n in counts.items()}

  def rows(self) -> dict[str, Iterator[dict[str, Any]]]:
    """Labelled rows of each split, in PRM800K's format."""
    return {
      split: self._rows(problems, stream)
      for stream, (split, problems) in enumerate(self.problems().items())
    }

  def _rows(self, problems: list[solver.Problem], stream: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng([self.seed, 1, stream])
    for problem in problems:
      for _ in range(self.solutions):
        yield solver.make_row(problem, solver.solve(problem, rng))

  def write_candidates(self, directory: str | pathlib.Path) -> list[pathlib.Path]:
    """Writes `candidates_dev.jsonl` and `candidates_test.jsonl`: input of scripts/score.py."""
    problems, paths = self.problems(), []
    for stream, split in enumerate(HELD_OUT):
      rng = np.random.default_rng([self.seed, 2, stream])
      paths.append(pathlib.Path(directory) / f"candidates_{split}.jsonl")
      with json_lines.written(paths[-1]) as out:
        for i, problem in enumerate(problems[split]):
          for _ in range(self.candidates):
            solution = solver.solve(problem, rng)
            candidate = {
              "problem": problem.text,
              "unique_id": f"{split}/{i}",
              "level": problem.level,
              "ground_truth_answer": str(problem.answer),
              "steps": solution.steps,
              "answer": str(solution.answer),
              "is_correct": solution.answer == problem.answer,
            }
            out.write(json.dumps(candidate) + "\n")
    return paths
