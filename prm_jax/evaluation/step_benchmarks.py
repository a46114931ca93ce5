"""Reads, scores and measures each step benchmark by its name, and compares two results."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from prm_jax.datasets import prm_bench as prm_bench_data
from prm_jax.datasets import process_bench as process_bench_data
from prm_jax.datasets.labelled import MANIFEST
from prm_jax.evaluation import diagnostics, first_error, prm800k_steps, prm_bench, process_bench
from prm_jax.evaluation.judged import (
  Judged,
  Labelled,
  score,
  short_hash,
  stored,
  with_intervals,
)
from prm_jax.evaluation.verdicts import UNDECIDED
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


def threshold(
  given: float | None,
  path: pathlib.Path | None,
  scorer: Scorer | None,
  judged: Sequence[Judged],
  neutral: str,
  own: float | None = None,
) -> tuple[float, str]:
  """Returns the threshold, and a text that says where it is from.

  Args:
    given: --threshold.
    path: --threshold_data, a file for `threshold_solutions`.
    judged: the reported solutions; the text says whether the file shares problems with them.
    own: PRMBench's threshold for a readout of `DIFFERENCES`.

  Raises:
    ValueError: only some solutions have verdicts; or there are verdicts as well as a threshold or
      its data; or no threshold can be found on the file.
  """
  if verdicts := [each.verdict for each in judged if each.verdict is not None]:
    if given is not None or path:
      raise ValueError("the lines have verdicts, which decide: give no threshold")
    if len(verdicts) < len(judged):
      raise ValueError(
        f"{len(verdicts):,} of {len(judged):,} lines have verdicts: expected all or none"
      )
    undecided = f"{verdicts.count(UNDECIDED):,} of {len(judged):,} solutions undecided"
    return THRESHOLD, f"of the diagnostics; first wrong steps are the judge's, {undecided}"
  if path is None:
    if given is not None:
      return given, "given"
    if own is not None:
      return own, "PRMBench's own, on differences between steps"
    return THRESHOLD, "the default"

  used = threshold_solutions(path, neutral)
  if not isinstance(used[0], Judged):
    used = _scored(used, judged, scorer, path)
  reported = {short_hash(each.problem) for each in judged}
  shared = sum(short_hash(each.problem) in reported for each in used)
  about = (
    f"{shared:,} of them on problems that are reported here"
    if shared
    else "none of their problems is reported here"
  )
  origin = f"best F1 on {path.name}, {len(used):,} solutions, {about}"
  return first_error.best_threshold(used), origin


def _scored(
  solutions: Sequence[Labelled],
  judged: Sequence[Judged],
  scorer: Scorer | None,
  path: pathlib.Path,
) -> list[Judged]:
  """Scores the solutions of a file, with the scores in `judged` if it has all of them."""
  known = {(each.problem, tuple(each.steps)): each for each in judged}
  same = [known.get((each.problem, tuple(each.steps))) for each in solutions]
  if None not in same:
    return [dataclasses.replace(each, labels=x.labels) for each, x in zip(same, solutions)]
  if scorer is None:
    raise ValueError(
      f"{path}: no rating_probs or step_scores, and no model to score it; score it first"
    )
  return score(scorer, solutions)[0]


def threshold_solutions(path: pathlib.Path, neutral: str) -> list[Labelled] | list[Judged]:
  """Returns the labelled solutions of a file, judged if its lines have scores of steps.

  Args:
    path: lines of ProcessBench, of PRM800K, or of `problem`, `steps`, `labels`; scores of steps are
      `rating_probs` or `step_scores`.

  Raises:
    ValueError: there is no solution, or a line has another form, or verdicts.
  """
  records = list(json_lines.records(path))
  _, first = records[0]
  if any(f'"{key}"' in json.dumps(first) for key in ("rating_probs", "step_scores")):
    if _is_process_bench(first):
      judged = [*process_bench.solutions(records, neutral)]
    else:
      judged, _ = prm800k_steps.scored(path, neutral)
    if any(each.verdict is not None for each in judged):
      raise ValueError(f"{path}: its lines have verdicts, which do not depend on a threshold")
  elif any("verdicts" in record for _, record in records):
    raise ValueError(f"{path}: its labels are those of a judge's verdicts, not known ones")
  else:
    judged = labelled(records)
  if not judged:
    raise ValueError(f"{path}: no labelled solution")
  return judged


def labelled(records: Sequence[tuple[str, dict[str, Any]]]) -> list[Labelled]:
  """Returns the solutions of (FILE:LINE, record) pairs in a form of `threshold_solutions`."""
  if _is_process_bench(records[0][1]):
    return [*process_bench.solutions(records, None)]
  return prm800k_steps.unscored(records)


def _is_process_bench(record: dict[str, Any]) -> bool:
  return "label" in record and "steps" in record


class Result(msgspec.Struct):
  """The keys that `compared` reads of a result file, with hashes of problems and no texts."""

  benchmark: Name
  threshold: float
  solutions: list[Judged]
  trees: list[Judged] = []


def read_result(path: pathlib.Path) -> Result:
  """Reads a result file; raises BadLine if it is another file, or an old one with other keys."""
  document = json_lines.document(path)
  if "benchmark" in document and "threshold" not in document:
    raise json_lines.BadLine(f"{path}: the result of an outcome model, which decides no steps")
  array = lambda kind, x: np.array(x, float)
  return json_lines.convert(document, Result, str(path), dec_hook=array)


def compared(paths: tuple[pathlib.Path, pathlib.Path]) -> dict[str, Any]:
  """Compares two results of a benchmark on the same solutions: differences and paired intervals.

  Both models share the resamples of the problems, so the difficulty of a problem cancels.

  Raises:
    ValueError: a file is not a result of evaluate.py, or the solutions differ.
  """
  results = [read_result(path) for path in paths]
  if len({each.benchmark for each in results}) > 1:
    raise ValueError(
      f"{paths[0]} is of {results[0].benchmark}, {paths[1]} of {results[1].benchmark}"
    )
  name = results[0].benchmark
  judged, trees = [x.solutions for x in results], [x.trees for x in results]
  for path, part in zip(paths, judged):
    if name == "prm_bench" and not all(each.cluster for each in part):
      raise ValueError(f"{path}: of an earlier version, without PRMBench's idx: evaluate again")
  # An id of prm800k is a place in a scored file, of which each model has its own.
  own_id = lambda x: "" if name == "prm800k" else x.id
  for kind, pair in (("solutions", judged), ("trees", trees)):
    first, second = (
      [(own_id(x), x.group, x.problem, x.cluster, tuple(x.labels)) for x in part] for part in pair
    )
    if first != second:
      other = sum(a != b for a, b in zip(first, second))
      raise ValueError(
        f"{paths[0]} and {paths[1]} are not of the same {kind}: {len(first)} and "
        f"{len(second)}, of which {other} differ from the one at the same place"
      )
  thresholds = [each.threshold for each in results]
  arguments = [judged, thresholds, *([trees] if name == "prm800k" else [])]
  a, b = (MODULES[name].measures(*each) for each in zip(*arguments))
  rows = {}
  for key, each in with_intervals({key: a[key] - b[key] for key in a}).items():
    values = {"a": float(a[key][0]), "b": float(b[key][0])}
    if np.isfinite([*values.values()]).all():
      rows[key] = values | {"difference": each["value"], "low": each["low"], "high": each["high"]}
  limits = thresholds
  if name == "prm_bench":  # for PRMBench, a score equal to the threshold is wrong
    limits = np.nextafter(thresholds, np.inf)
  return {
    "benchmark": name,
    "a": str(paths[0]),
    "b": str(paths[1]),
    "paired": rows,
    "agreement": diagnostics.agreement(*(trees if name == "prm800k" else judged), limits),
  }


def compared_table(result: dict[str, Any]) -> list[str]:
  """Returns the comparison as lines for a terminal; all but AUROC and likelihood in percent."""
  lines = [f"A {result['a']}", f"B {result['b']}"]
  lines.append(f"{'':34}{'A':>8}{'B':>8}{'A - B':>8}   95 % interval")
  for name, row in result["paired"].items():
    scale, digits = (1, 3) if name in ("auroc", "nll") else (100, 1)
    values = [f"{scale * row[key]:8.{digits}f}" for key in ("a", "b", "difference")]
    ends = [f"{scale * row[key]:.{digits}f}" for key in ("low", "high") if row[key] is not None]
    lines.append(f"{name:34}{''.join(values)}   {' to '.join(ends)}")
  agreement = result["agreement"]
  number = lambda key: "n/a" if agreement[key] is None else f"{agreement[key]:.3f}"
  lines.append(
    f"agreement on {agreement['steps']:,} steps: Spearman {number('spearman')}, Pearson "
    f"{number('pearson')}, same decision {number('same_decision')}, kappa {number('kappa')}"
  )
  return lines
