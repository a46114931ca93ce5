"""Reads, scores and measures each step benchmark by its name, and finds its threshold."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from prm_jax.datasets import prm_bench as prm_bench_data
from prm_jax.datasets import process_bench as process_bench_data
from prm_jax.datasets.labelled import MANIFEST
from prm_jax.evaluation import diagnostics, first_error, prm800k_steps, prm_bench, process_bench
from prm_jax.evaluation.judged import Judged, Labelled, score, short_hash, stored
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


def labelled(
  records: Sequence[tuple[str, dict[str, Any]]], neutral: str | None = None
) -> list[Any]:
  """Returns the solutions of (FILE:LINE, record) pairs of ProcessBench, PRM800K or plain steps.

  Args:
    neutral: how a neutral step counts in the scores of `Judged`; None: read no scores, and return
      `Labelled`.
  """
  _, first = records[0]
  module = process_bench if "label" in first and "steps" in first else prm800k_steps
  return [*module.solutions(records, neutral)]


def threshold_data(path: pathlib.Path, neutral: str) -> list[Labelled] | list[Judged]:
  """Returns the labelled solutions of a file, judged if its lines have scores of steps.

  Args:
    path: lines of ProcessBench, of PRM800K, or of `problem`, `steps`, `labels`; scores of steps are
      `rating_probs` or `step_scores`.

  Raises:
    ValueError: there is no solution, or a line has another form, or verdicts.
  """
  records = [*json_lines.records(path)]
  first = json.dumps(records[0][1])  # PRM800K's lines have scores in each completion
  has_scores = any(f'"{key}"' in first for key in ("rating_probs", "step_scores"))
  if not has_scores and any("verdicts" in record for _, record in records):
    raise ValueError(f"{path}: its labels are those of a judge's verdicts, not known ones")
  solutions = labelled(records, neutral if has_scores else None)
  if has_scores and any(each.verdict is not None for each in solutions):
    raise ValueError(f"{path}: its lines have verdicts, which do not depend on a threshold")
  if not solutions:
    raise ValueError(f"{path}: no labelled solution")
  return solutions


def choose_threshold(
  given: float | None,
  path: pathlib.Path | None,
  known: Sequence[Labelled],
  scorer: Scorer | None,
  judged: Sequence[Judged],
  own: float | None = None,
) -> tuple[float, str]:
  """Returns the threshold below which a step counts as wrong, and a text on its origin.

  Args:
    given: --threshold.
    path, known: --threshold_data, and its solutions (`threshold_data`).
    scorer: scores `known` if neither its file nor `judged` has the scores.
    judged: the reported solutions; the text says whether `known` shares problems with them.
    own: PRMBench's threshold for a readout of `DIFFERENCES`.

  Raises:
    ValueError: only some solutions have verdicts; or there are verdicts as well as a threshold or
      its data; or no threshold can be found on the data.
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

  if not isinstance(known[0], Judged):
    known = _with_scores(known, judged, scorer, path)
  reported = {short_hash(each.problem) for each in judged}
  shared = sum(short_hash(each.problem) in reported for each in known)
  about = f"{f'{shared:,}' if shared else 'none'} of them on problems that are reported here"
  origin = f"best F1 on {path.name}, {len(known):,} solutions, {about}"
  try:
    return first_error.best_threshold(known), origin
  except ValueError as error:
    wrong = sum(each.first_error >= 0 for each in known)
    raise ValueError(f"{path}: {error}; {wrong} of {len(known)} have one") from error


def _with_scores(
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
      f"{path}: no rating_probs or step_scores, and no model to score it; score it first "
      f"({same.count(None)} of its {len(same)} solutions are not among the evaluated ones)"
    )
  return score(scorer, solutions)[0]


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
