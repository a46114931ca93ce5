"""Reads, scores and measures each step benchmark by its name."""

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from prm_jax.datasets import prm_bench as prm_bench_data
from prm_jax.datasets import process_bench as process_bench_data
from prm_jax.datasets.labelled import MANIFEST
from prm_jax.evaluation import diagnostics, prm800k_steps, prm_bench, process_bench
from prm_jax.evaluation.judged import Judged, Labelled, score, stored
from prm_jax.runtime import json_lines
from prm_jax.scoring.scorer import Scorer

Name = Literal["process_bench", "prm_bench", "prm800k"]
MODULES = {"process_bench": process_bench, "prm_bench": prm_bench, "prm800k": prm800k_steps}
FILES = {"process_bench": process_bench_data.BENCHMARK, "prm_bench": prm_bench_data.BENCHMARK}
# The benchmark of each prepared dataset.
BENCHMARKS: dict[str, Name] = {"process_bench": "process_bench", "prm_bench": "prm_bench"}
BENCHMARKS |= dict.fromkeys(("prm800k", "arithmetic", "stepwise"), "prm800k")
THRESHOLD = 0.5
# PRMBench's threshold for the readouts whose scores it reads as differences between steps.
DIFFERENCES = {"skywork-o1-prm": -0.05}


def read(
  name: Name, directory: pathlib.Path, split: str = ""
) -> tuple[list[Labelled], list[Labelled]]:
  """Returns the solutions of a split, and their trees, which only prm800k has.

  Args:
    split: "" is the test split of prm800k, and every group of the others.

  Raises:
    FileNotFoundError, NotADirectoryError, ValueError: the folder does not hold this benchmark.
  """
  manifest = directory / MANIFEST
  made = str(json_lines.document_or_empty(manifest).get("dataset"))
  if not manifest.is_file() and name == "prm800k" and FILES["process_bench"].find(directory):
    made = "process_bench"
  if (fits := BENCHMARKS.get(made, name)) != name:
    raise ValueError(f"{directory}: data of {made}: give --benchmark={fits}")
  if name == "prm800k":
    return prm800k_steps.read(directory, split or "test")
  records = FILES[name].records(directory)
  return _of_group(MODULES[name].solutions(records, None), split, directory), []


def is_result(path: pathlib.Path) -> bool:
  """Returns whether evaluate.py wrote a file: a `result` as JSON, or the picture beside it."""
  path = path.with_suffix("") if path.name.endswith(".json.png") else path
  return path.suffix == ".json" and "benchmark" in json_lines.document_or_empty(path)


def judge(
  scorer: Scorer, solutions: Sequence[Labelled], trees: Sequence[Labelled] = ()
) -> tuple[list[Judged], list[Judged], dict[str, Any]]:
  """Scores what `read` returns, and also returns the speed; errors as `judged.score`."""
  judged, speed = score(scorer, [*trees, *solutions])  # together: a tree's own path is encoded once
  return judged[len(trees) :], judged[: len(trees)], speed | {"solutions": len(solutions)}


def scored(
  name: Name, path: pathlib.Path, split: str = "", neutral: str = "positive"
) -> tuple[list[Judged], list[Judged]]:
  """Returns solutions and trees, as `read` does, from a file of the benchmark's scored lines.

  Args:
    split: the group of the solutions; "" is every group.
    neutral: how the neutral class counts in the scores.

  Raises:
    BadLine: a line has another form, or lacks a score.
    ValueError: there is no solution.
  """
  if name == "prm800k":
    return prm800k_steps.scored(path, neutral)
  return _of_group(MODULES[name].solutions(json_lines.records(path), neutral), split, path), []


def labelled(records: Sequence[tuple[str, dict[str, Any]]]) -> list[Labelled]:
  """Returns the solutions of (FILE:LINE, record) pairs of ProcessBench, PRM800K or steps."""
  if is_process_bench(records[0][1]):
    return [*process_bench.solutions(records, None)]
  return prm800k_steps.unscored(records)


def is_process_bench(record: dict[str, Any]) -> bool:
  return "label" in record and "steps" in record


def _of_group(solutions: Iterable[Any], split: str, path: pathlib.Path) -> list[Any]:
  """Returns the solutions of a group, or all; raises ValueError if there are none."""
  if not (found := [x for x in solutions if split in ("", x.group)]):
    raise ValueError(f"{path}: no solution" + f" of --split={split}" * bool(split))
  return found


def result(
  name: Name,
  judged: Sequence[Judged],
  trees: Sequence[Judged],
  threshold: float,
  differences: bool = False,
) -> dict[str, Any]:
  """Returns a benchmark's numbers and diagnostics, as JSON, with the scores of all solutions.

  Args:
    differences: decide by the differences between steps (`DIFFERENCES`).
  """
  decided = prm_bench.step_differences(judged) if differences else judged
  if name == "prm800k":
    out = prm800k_steps.evaluate(decided, threshold, trees)
  else:
    out = MODULES[name].evaluate(decided, threshold)
  out["diagnostics"] = diagnostics.diagnose(judged, THRESHOLD if differences else threshold, trees)
  out["solutions"] = stored(decided)
  return out | ({"trees": stored(trees)} if trees else {})
