"""Problems with answers for an experiment: a half to report on, the others for every choice.

The 500 test problems of `math_splits` are split by level.  One half is reported on.  The other half
and the problems of PRM800K's training records that have an answer are for labels and settings.
"""

import hashlib
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from prm_jax.datasets import download, math_splits
from prm_jax.datasets.math_splits.math_splits_dataset_builder import Problem
from prm_jax.datasets.prm800k import records
from prm_jax.types import problem_key

TEST = "math_splits/test.jsonl"
TRAIN = ("data/phase1_train.jsonl", "data/phase2_train.jsonl")


def read(
  source: pathlib.Path | None, download_dir: pathlib.Path
) -> tuple[list[Problem], list[dict[str, Any]]]:
  """The test problems, and the others, as lines of `generate.py`.

  Args:
    source: folder with upstream's files, or a part of them; None: the test problems are downloaded
      to `download_dir`, and there are no others.

  Raises:
    BadLine, FileNotFoundError, RuntimeError: a bad line; no list of test problems; or no download.
  """
  path = download.fetch(math_splits.Builder, [TEST], source, download_dir)[TEST]
  test = [*math_splits.read_problems(path)]
  listed, others = {problem_key(each.problem) for each in test}, {}
  for file in TRAIN if source else ():
    if path := download.find(source, file):
      for record in records.read_records(path):
        question = record.solution.question
        key = problem_key(question.problem)
        if question.ground_truth_answer and key not in listed:
          answer = {"ground_truth_answer": question.ground_truth_answer}
          others.setdefault(key, {"problem": question.problem} | answer)
  return test, [*others.values()]


def halves(problems: Sequence[Problem], seed: int) -> tuple[list[dict], list[dict]]:
  """Half of the problems of each level, and the other half, as lines of `generate.py`.

  Both are in an order of which every beginning has the levels in proportion, so that fewer problems
  can be taken from the start.
  """
  key = lambda each: hashlib.sha256(f"{seed} {each.problem}".encode()).digest()
  parts: tuple[list, list] = [], []
  for level in sorted({each.level for each in problems}):
    members = sorted((each for each in problems if each.level == level), key=key)
    for i, each in enumerate(members):
      place = (i // 2 + 0.5) / (len(members) / 2)  # of its level's problems in the half
      parts[i % 2].append((place, key(each), line(each)))
  first, second = ([each for *_, each in sorted(part, key=lambda x: x[:2])] for part in parts)
  return first, second


def line(problem: Problem) -> dict[str, Any]:
  """A test problem as a line of `generate.py`."""
  return {
    "problem": problem.problem,
    "ground_truth_answer": problem.answer,
    "level": problem.level,
    "subject": problem.subject,
    "unique_id": problem.unique_id,
  }


def overlap(some: Iterable[dict], others: Iterable[dict]) -> list[str]:
  """Problems that are in both lists: reported problems may be in no other."""
  known = {problem_key(each["problem"]) for each in others}
  return [each["problem"] for each in some if problem_key(each["problem"]) in known]
