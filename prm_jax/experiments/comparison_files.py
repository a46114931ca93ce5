"""Reads the files of a comparison: graded candidates, their scores by model, and judgements.

Shapes: P problems, M candidates of each.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from prm_jax import aggregation as agg
from prm_jax import step_metrics
from prm_jax.evaluation import methods, sample_checks, scored_samples
from prm_jax.evaluation.candidate_table import is_number
from prm_jax.evaluation.sample_arrays import ScoredSamples, is_bundle, place
from prm_jax.experiments import step_calibration
from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import BadLine

BASELINES = ("majority", "log-probability")  # every method is compared with these
CALIBRATED = "calibrated"  # the product of calibrated steps (`step_calibration`)
# Not for models.
RESERVED = (*BASELINES, "shortest", "fewest steps", "random", "oracle", "problems")


@dataclasses.dataclass(frozen=True)
class Candidates:
  """P problems with up to M candidates each, and their scores."""

  samples: ScoredSamples
  scores: dict[str, np.ndarray]  # [P, M] by scorer, higher is better; NaN: padding
  models: dict[str, np.ndarray]  # [P, M] P(right) by reward model; an ORM's may be other numbers
  scored: dict[str, ScoredSamples]  # the file of each reward model
  steps: np.ndarray | None  # [P, M] number of steps; NaN: padding; None: a record has no `steps`
  warnings: Sequence[str] = ()  # of scores that contradict each other, or that some records lack
  lines: Mapping[str, list] = dataclasses.field(default_factory=dict)  # a and b of `CALIBRATED`

  @functools.cached_property
  def voters(self) -> dict[str, np.ndarray]:
    """The weights of votes `[P, M]` by model, for those without a negative score."""
    out, valid = {}, self.samples.valid
    for name, score in self.models.items():
      if self.scored[name].step_probs is not None:
        out[name] = methods.vote_weights(self.scores[name], valid)
      elif (score[valid] >= 0).all():
        out[name] = np.where(valid, score, 0)
    return out

  @functools.cached_property
  def calibration(self) -> dict[str, dict[str, Any] | None]:
    """The calibration of each model's P(right); None if some score is not a probability."""
    right, out = self.samples.correct[self.samples.valid], {}
    for name, score in self.models.items():
      known = score[self.samples.valid]
      probable = ((known >= 0) & (known <= 1)).all()
      out[name] = step_metrics.calibration(known, right) if probable else None
    return out

  def notices(self) -> list[str]:
    """Returns the warnings, what is left out for models, and which of them count steps."""
    out, logits = [*self.warnings], "P(right) of a logit x is 1 / (1 + exp(-x))"
    for name, calibration in self.calibration.items():
      if name not in self.voters:
        why = f"some orm_score is negative; {logits}"
        out.append(f"no vote by {name} and no calibration of it: {why}")
      elif calibration is None:
        out.append(f"no calibration of {name}: some orm_score is above 1; {logits}")
    for name, lines in self.lines.items():
      if flat := sum(a <= step_calibration.NO_SLOPE for a, _ in lines):
        why = "steps with higher probabilities are not in right solutions more often"
        out.append(f"{name} only counts steps in {flat} of {len(lines)} folds: {why}")
    return out


def read(
  path: pathlib.Path,
  scored: Mapping[str, pathlib.Path],
  reduction: str = "product",
  join: Callable | None = None,
  neutral: str = "positive",
) -> Candidates:
  """Reads graded candidates and their scores.

  Args:
    path: records of grade.py; `logprob` and `tokens`, of generate.py, are optional.
    scored: by name of a reward model, a file of the same records with the keys of score.py.
    reduction: of a process model's steps to a score, of `aggregation.REDUCTIONS`; a reduction in a
      model's name takes precedence, see `parts`, and may also be `CALIBRATED`.
    join: tells which answers are equal, as in `read_scored_samples`.
    neutral: how a neutral step counts, "positive" or "negative".

  Raises:
    BadLine: a record is wrong; or a file has other candidates, or lacks scores.
    ValueError: a name asks for an unknown reduction, or is in `RESERVED`.
  """
  scores: dict[str, np.ndarray] = {}
  models: dict[str, np.ndarray] = {}
  lines: dict[str, list] = {}
  contents: dict[pathlib.Path, ScoredSamples] = {}
  by_method: dict[pathlib.Path, dict[str, np.ndarray]] = {}
  named = _reductions(scored)
  samples = scored_samples.read_scored_samples([path], join=join)
  warnings = sample_checks.graded_both_ways(samples)

  for file in dict.fromkeys(scored.values()):  # several names may have one file
    content = contents[file] = _read_scored(file, path, samples)
    by_method[file] = methods.solution_scores(content, neutral)
    warnings += sample_checks.contradictions(content, by_method[file])
  given, lacking = _given(path, [file for file in contents if not is_bundle(file)], samples)
  for name, file in scored.items():
    available = by_method[file]
    orm = None if named[name] else available.get("orm")
    content = contents[file]
    if named[name] == CALIBRATED and content.step_probs is not None:
      available["prm_calibrated"], lines[name] = step_calibration.calibrated(content, neutral)
    score = available.get(f"prm_{named[name] or reduction}", orm)
    if score is None and not samples.valid.any():
      score = np.zeros(samples.correct.shape)  # all were cut off, and score.py skipped them
    if score is None:
      other = "" if named[name] else " and no orm_score"
      raise BadLine(f"{file}: no rating_probs or step_scores{other}, for {name}")
    if np.isnan(score[samples.valid]).any():
      raise BadLine(f"{file}: lacks scores of candidates that were not cut off in {path}")
    scores[name] = score
    models[name] = np.minimum(np.exp(score), 1) if "prm_product" in available else score
  if "logprob" in given:
    scores["log-probability"] = given["logprob"]
  if "tokens" in given:
    scores["shortest"] = -given["tokens"]
  if "steps" in given:
    scores["fewest steps"] = -given["steps"]
  files = {name: contents[file] for name, file in scored.items()}
  steps, notices = given.get("steps"), [*warnings, *lacking]
  return Candidates(samples, scores, models, files, steps, notices, lines)


def _read_scored(file: pathlib.Path, path: pathlib.Path, samples: ScoredSamples) -> ScoredSamples:
  """Reads a file of scores; BadLine if it has other candidates than `path`."""
  content = scored_samples.read_scored_samples([file])
  same = content.problems == samples.problems and np.array_equal(content.slots, samples.slots)
  if not same or not np.array_equal(content.correct, samples.correct):
    raise BadLine(f"{file}: not the candidates of {path}, in the same order and graded alike")
  return content


def _reductions(names: Iterable[str]) -> dict[str, str]:
  """Returns the reduction in each model's name (`parts`); ValueError if a name is not allowed."""
  named = {name: parts(name)[2] for name in names}
  for name, how in named.items():
    if name in RESERVED or name.startswith("vote by "):
      raise ValueError(f"{name}: this is a method or a column; name the model otherwise")
    if how and how not in (known := (*agg.REDUCTIONS, CALIBRATED)):
      raise ValueError(f"{name}: no reduction {how!r}; there are {', '.join(known)}")
  return named


def _given(
  path: pathlib.Path, scored: Sequence[pathlib.Path], samples: ScoredSamples
) -> tuple[dict[str, np.ndarray], list[str]]:
  """Returns `[P, M]` "logprob", "tokens" and "steps" (counted), each if all records have it.

  Also returns notices of those that only some records lack.  Raises BadLine for a wrong logprob,
  and for a candidate that has other steps or another answer in a file of `scored`.
  """
  given: dict[str, list] = {"logprob": [], "tokens": [], "steps": []}
  files = (scored_samples.candidates(file, progress=False) for file in (path, *scored))
  for (place_in_path, record), *others in zip(*files):
    where = place(path, *place_in_path[:2])
    for file, (place_in_file, other) in zip(scored, others):
      for key in ("steps", "answer"):
        if key in record and key in other and record[key] != other[key]:
          about = f"{place(file, *place_in_file[:2])}: not the {key}"
          raise BadLine(f"{about} of the candidate at {where}")
    record = record | {"steps": len(record.get("steps") or ()) or None}
    for key, values in given.items():
      value = record.get(key)
      if key == "logprob" and not (value is None or is_number(value) or value == -np.inf):
        shown = json_lines.show(value)
        raise BadLine(f"{where}: logprob is {shown}: expected a finite number or -inf")
      values.append(value if key == "logprob" or is_number(value) else None)
  out, notices = {}, []
  for key, values in given.items():
    if not (lacking := values.count(None)):
      out[key] = np.full(samples.correct.shape, np.nan)
      out[key].flat[samples.slots] = values
    elif lacking < len(values):
      notices.append(f"{lacking:,} of {len(values):,} records have no {key}: not compared")
  return out, notices


def parts(name: str) -> tuple[str, int, str]:
  """Returns the model, share and reduction of a name.

  "people/2:min", trained on half of the labels and read by `min`, is ("people", 2, "min"); "people"
  is ("people", 1, "").
  """
  base, share, how = re.fullmatch(r"(.+?)(?:/([1-9]\d*))?(?::([^:]*))?", name, re.S).groups()
  return base, int(share or 1), how or ""


def whole(name: str) -> str:
  """Returns the name of the same model trained on all labels."""
  base, _, how = parts(name)
  return f"{base}:{how}" if how else base


class Interval(msgspec.Struct):
  value: float | None
  low: float | None
  high: float | None


class ProcessBench(msgspec.Struct):
  """The keys of a result of evaluate.py that are read."""

  benchmark: Literal["process_bench"]
  intervals: dict[str, Interval]


def process_bench(path: pathlib.Path) -> dict[str, dict[str, list[float | None]]]:
  """Reads F1 of each subset and their mean, as `interval`; BadLine: the file is no such result."""
  found = json_lines.convert(json_lines.document(path), ProcessBench, str(path)).intervals
  names = {name: name.removesuffix("/f1") for name in found if name.endswith("/f1")}
  names |= {"mean_f1": "mean"}
  return {
    names[name]: {"mean": [each.value], "low": [each.low], "high": [each.high]}
    for name, each in found.items()
    if name in names
  }
