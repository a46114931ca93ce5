"""Chooses the threshold below which a step counts as wrong."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from prm_jax.evaluation import first_error, prm800k_steps, process_bench
from prm_jax.evaluation.judged import Judged, Labelled, score, short_hash
from prm_jax.evaluation.step_benchmarks import THRESHOLD, is_process_bench, labelled
from prm_jax.evaluation.verdicts import UNDECIDED
from prm_jax.runtime import json_lines
from prm_jax.scoring.scorer import Scorer


def choose(
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
    path: --threshold_data, a file for `solutions`.
    judged: the reported solutions; the text says whether the file shares problems with them.
    own: PRMBench's threshold for a readout of `step_benchmarks.DIFFERENCES`.

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

  used = solutions(path, neutral)
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


def solutions(path: pathlib.Path, neutral: str) -> list[Labelled] | list[Judged]:
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
    if is_process_bench(first):
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
