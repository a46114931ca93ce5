"""Compares two results of a step benchmark on the same solutions."""

import pathlib
from typing import Any

import msgspec
import numpy as np

from prm_jax.evaluation import diagnostics
from prm_jax.evaluation.judged import Judged, with_intervals
from prm_jax.evaluation.step_benchmarks import MODULES, Name
from prm_jax.runtime import json_lines


class Result(msgspec.Struct):
  """The keys that `compared` reads of a result file, with hashes of problems and no texts."""

  benchmark: Name
  threshold: float
  solutions: list[Judged]
  trees: list[Judged] = []


def read_result(path: pathlib.Path) -> Result:
  """Reads a result file; raises BadLine if it is another file."""
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
  # An id of prm800k is a place in a scored file, of which each model has its own.
  own_id = lambda x: "" if name == "prm800k" else x.id
  for kind, pair in (("solutions", judged), ("trees", trees)):
    first, second = (
      [(own_id(x), x.group, x.problem, x.cluster, tuple(x.labels)) for x in part] for part in pair
    )
    if first != second:
      if len(first) != len(second):
        why = f"the first has {len(first)}, the second {len(second)}"
      else:
        other = sum(a != b for a, b in zip(first, second))
        why = f"{other} of {len(first)} differ from the one at the same place"
      raise ValueError(f"{paths[0]} and {paths[1]} are not of the same {kind}: {why}")
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


def table(result: dict[str, Any]) -> list[str]:
  """Returns the comparison as lines for a terminal; all but AUROC and likelihood in percent."""
  lines = [f"A {result['a']}", f"B {result['b']}"]
  width = max(map(len, result["paired"]), default=0)
  lines.append(f"{'':{width}}{'A':>8}{'B':>8}{'A - B':>8}   95 % interval")
  for name, row in result["paired"].items():
    scale, digits = (1, 3) if name in ("auroc", "nll") else (100, 1)
    values = [f"{scale * row[key]:8.{digits}f}" for key in ("a", "b", "difference")]
    ends = [f"{scale * row[key]:.{digits}f}" for key in ("low", "high") if row[key] is not None]
    lines.append(f"{name:{width}}{''.join(values)}   {' to '.join(ends)}")
  agreement = result["agreement"]
  number = lambda key: "n/a" if agreement[key] is None else f"{agreement[key]:.3f}"
  lines.append(
    f"agreement on {agreement['steps']:,} steps: Spearman {number('spearman')}, Pearson "
    f"{number('pearson')}, same decision {number('same_decision')}, kappa {number('kappa')}"
  )
  return lines
