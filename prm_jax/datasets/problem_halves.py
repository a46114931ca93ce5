"""Splits problems with answers: a half for reported results, the rest for labels and settings.

Each level of the 500 test problems of `math_splits` is halved.  Results are reported on one half.
Labels and settings come from the other half and from the problems of PRM800K's training records
that have an answer.
"""

import hashlib
import pathlib
from collections.abc import Sequence
from typing import Any

from prm_jax.datasets import download, math_splits
from prm_jax.datasets.prm800k import records
from prm_jax.types import problem_key

TRAIN = ("data/phase1_train.jsonl", "data/phase2_train.jsonl")


def read(
  source: pathlib.Path | None, download_dir: pathlib.Path
) -> tuple[list[math_splits.Problem], list[dict[str, Any]]]:
  """Returns the test problems, and the problems of the training records as lines of `generate.py`.

  Args:
    source: folder with some or all of upstream's files; None downloads the test problems to
      `download_dir` and returns no others.

  Raises:
    BadLine: a line is malformed.
    FileNotFoundError: `source` has no list of test problems.
    RuntimeError: the download failed.
  """
  file = math_splits.FILES["test"]
  path = download.fetch(math_splits.Builder, [file], source, download_dir)[file]
  test = [*math_splits.read_problems(path)]
  test_keys, others = {problem_key(each.problem) for each in test}, {}
  for file in TRAIN if source else ():
    if path := download.find(source, file):
      for record in records.read_records(path):
        question = record.solution.question
        key = problem_key(question.problem)
        if question.ground_truth_answer and key not in test_keys:
          answer = {"ground_truth_answer": question.ground_truth_answer}
          others.setdefault(key, {"problem": question.problem} | answer)
  return test, [*others.values()]


def halves(problems: Sequence[math_splits.Problem], seed: int) -> tuple[list[dict], list[dict]]:
  """Returns two halves of the problems of each level, as lines of `generate.py`.

  Every prefix of a half has the levels in proportion, so a caller may take fewer problems.
  """
  key = lambda each: hashlib.sha256(f"{seed} {each.problem}".encode()).digest()
  parts: tuple[list, list] = [], []
  for level in sorted({each.level for each in problems}):
    members = sorted((each for each in problems if each.level == level), key=key)
    for i, each in enumerate(members):
      quantile = (i // 2 + 0.5) / (len(members) / 2)  # among its level's problems in the half
      parts[i % 2].append((quantile, key(each), _line(each)))
  first, second = ([line for *_, line in sorted(part, key=lambda x: x[:2])] for part in parts)
  return first, second


def _line(problem: math_splits.Problem) -> dict[str, Any]:
  return {
    "problem": problem.problem,
    "ground_truth_answer": problem.answer,
    "level": problem.level,
    "subject": problem.subject,
    "unique_id": problem.unique_id,
  }
