"""Compares ways to choose one of a problem's candidates, on the same candidates.

The methods are reward models, each from a file of score.py; the generator's own log-probability;
the shortest solution; majority and weighted votes; a random pick and the oracle.  A candidate that
was cut off, or has no answer, is drawn like any other but never chosen (as in *Let's Verify Step by
Step*).

Shapes: P problems, M candidates of each, K values of N, R resamples of the problems.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import msgspec
import numpy as np
from scipy import stats

from prm_jax import aggregation as agg
from prm_jax import step_metrics
from prm_jax.aggregation.intervals import interval, resample_counts
from prm_jax.evaluation import methods, reranking, scored_samples
from prm_jax.evaluation.candidate_table import is_number
from prm_jax.evaluation.sample_arrays import ScoredSamples, place
from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import BadLine

RESAMPLES = 10_000
PERMUTATIONS = 64  # random orders for a weighted vote
POWER = 0.8  # of a two-sided test at 5 %
BASELINES = ("majority", "log-probability")  # every method is compared with these
RESERVED = (*BASELINES, "shortest", "random", "oracle", "problems")  # not for models


@dataclasses.dataclass(frozen=True)
class Candidates:
  """P problems with up to M candidates each, and their scores."""

  samples: ScoredSamples
  scores: dict[str, np.ndarray]  # [P, M] by scorer, higher is better; NaN: padding
  models: dict[str, np.ndarray]  # [P, M] P(right) by reward model; an ORM's may be other numbers
  scored: dict[str, ScoredSamples]  # the file of each reward model
  steps: np.ndarray | None  # [P, M] number of steps; NaN: padding; None: a record has no `steps`
  warnings: Sequence[str] = ()  # of scores that contradict each other, or that some records lack

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
    """Returns the warnings, and what is left out for models whose scores are not probabilities."""
    out = []
    for name, calibration in self.calibration.items():
      if name not in self.voters:
        out.append(f"no vote by {name} and no calibration of it: some orm_score is negative")
      elif calibration is None:
        out.append(f"no calibration of {name}: some orm_score is above 1")
    out = [f"{each}; P(right) of a logit x is 1 / (1 + exp(-x))" for each in out]
    return [*self.warnings, *out]


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
      model's name takes precedence, see `parts`.
    join: tells which answers are equal, as in `read_scored_samples`.
    neutral: how a neutral step counts, "positive" or "negative".

  Raises:
    BadLine: a record is wrong; or a file has other candidates, or lacks scores.
    ValueError: a name asks for an unknown reduction, or is in `RESERVED`.
  """
  scores: dict[str, np.ndarray] = {}
  models: dict[str, np.ndarray] = {}
  contents: dict[pathlib.Path, ScoredSamples] = {}
  by_method: dict[pathlib.Path, dict[str, np.ndarray]] = {}
  warnings: list[str] = []
  named = _reductions(scored)
  samples = scored_samples.read_scored_samples([path], progress=True, join=join)

  for file in dict.fromkeys(scored.values()):  # several names may have one file
    content = scored_samples.read_scored_samples([file], progress=True)
    same = content.problems == samples.problems and np.array_equal(content.slots, samples.slots)
    if not same or not np.array_equal(content.correct, samples.correct):
      raise BadLine(f"{file}: not the candidates of {path}, in the same order and graded alike")
    contents[file], by_method[file] = content, methods.solution_scores(content, neutral)
    warnings += reranking.contradictions(content, by_method[file])
  for name, file in scored.items():
    available = by_method[file]
    orm = None if named[name] else available.get("orm")
    score = available.get(f"prm_{named[name] or reduction}", orm)
    if score is None and not samples.valid.any():
      score = np.zeros(samples.correct.shape)  # all were cut off, and score.py skipped them
    if score is None:
      needed = "no rating_probs" if named[name] else "neither rating_probs nor orm_score"
      raise BadLine(f"{file}: {needed}, for {name}")
    if np.isnan(score[samples.valid]).any():
      raise BadLine(f"{file}: lacks scores of candidates that were not cut off in {path}")
    scores[name] = score
    models[name] = np.minimum(np.exp(score), 1) if "prm_product" in available else score
  given, lacking = _given(path, samples)
  if "logprob" in given:
    scores["log-probability"] = given["logprob"]
  if "tokens" in given:
    scores["shortest"] = -given["tokens"]
  files = {name: contents[file] for name, file in scored.items()}
  return Candidates(samples, scores, models, files, given.get("steps"), [*warnings, *lacking])


def _reductions(names: Iterable[str]) -> dict[str, str]:
  """Returns the reduction in each model's name (`parts`); ValueError if a name is not allowed."""
  named = {name: parts(name)[2] for name in names}
  for name, how in named.items():
    if name in RESERVED or name.startswith("vote by "):
      raise ValueError(f"{name}: this is a method or a column; name the model otherwise")
    if how and how not in agg.REDUCTIONS:
      raise ValueError(f"{name}: no reduction {how!r}; there are {', '.join(agg.REDUCTIONS)}")
  return named


def _given(path: pathlib.Path, samples: ScoredSamples) -> tuple[dict[str, np.ndarray], list[str]]:
  """Returns `[P, M]` "logprob", "tokens" and "steps" (counted), each if all records have it.

  Also returns notices of those that only some records lack.  Raises BadLine for a wrong logprob.
  """
  given: dict[str, list] = {"logprob": [], "tokens": [], "steps": []}
  for where, record in scored_samples.candidates(path, progress=False):
    record = record | {"steps": len(record.get("steps") or ()) or None}
    for key, values in given.items():
      value = record.get(key)
      if key == "logprob" and not (value is None or is_number(value) or value == -np.inf):
        about = f"{place(path, *where[:2])}: logprob is {json_lines.show(value)}"
        raise BadLine(f"{about}: expected a finite number or -inf")
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


def within_problems(scores: np.ndarray, correct: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """Returns AUROC `[P]` of scores `[P, M]` among a problem's valid candidates.

  A problem whose valid candidates are all right or all wrong has NaN.
  """
  by_problem = (step_metrics.auroc(s[v], c[v]) for s, c, v in zip(scores, correct, valid))
  return np.array([*by_problem], float)  # None becomes NaN


def solved(candidates: Candidates, n: Sequence[int], seed: int = 0) -> dict[str, np.ndarray]:
  """Returns the probability that a method's pick is right, `[P, K]`, by method."""
  samples = candidates.samples
  outcomes, draws = (samples.correct, samples.valid), {"n": np.array(n)}
  if not (samples.sizes == samples.correct.shape[1]).all():
    draws["sizes"] = samples.sizes
  with jax.enable_x64(True):
    scores = candidates.scores | {"random": np.zeros(samples.correct.shape)}
    out = {name: np.asarray(agg.best_of_n(s, *outcomes, **draws)) for name, s in scores.items()}
    out["oracle"] = np.asarray(agg.pass_at_n(*outcomes, **draws))
    if samples.answer_ids is None:
      return out
    plain = np.asarray(agg.majority_vote(samples.answer_ids, *outcomes, **draws)[0])
    out["majority"] = plain
    orders = {"key": jax.random.key(seed), "permutations": PERMUTATIONS, "control": plain}
    for name, weights in candidates.voters.items():
      vote, _ = agg.majority_vote(samples.answer_ids, *outcomes, weights=weights, **draws, **orders)
      out[f"vote by {name}"] = np.asarray(vote)
  return out


def means(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
  """Returns means `[1 + R, K]` of `[P, K]` over problems with a value; weights are `[1 + R, P]`."""
  known = np.isfinite(values)
  with np.errstate(invalid="ignore"):
    return (weights @ np.where(known, values, 0)) / (weights @ known)


def compare(
  candidates: Candidates, n: Sequence[int] = (), seed: int = 0, against: Sequence[str] = ()
) -> dict[str, Any]:
  """Returns every number of the comparison, as JSON.

  The name "people/4" stands for the model "people" trained on a quarter of the labelled problems.
  `growth` tells what a doubling of the labels adds: the slope of a line over log2 of the share.

  Args:
    n: values of N; none: powers of two up to M, and M.
    seed: of the bootstrap and of the orders of weighted votes.
    against: methods with which every other is compared, in addition to `BASELINES`.

  Raises:
    ValueError: a method of `against` does not exist.
  """
  samples, scores = candidates.samples, candidates.scores
  outcomes = (samples.correct, samples.valid)
  baselines = _baselines(candidates, against)
  n = sorted({*n}) or reranking.powers_of_two(samples.correct.shape[1])
  curves = solved(candidates, n, seed)
  weights = resample_counts(len(samples.problems), RESAMPLES, seed)
  auc = {name: within_problems(score, *outcomes)[:, None] for name, score in scores.items()}
  estimate = lambda values: interval(means(weights, values))
  by_method = {}
  for name, curve in curves.items():
    by_method[name] = {"accuracy": estimate(curve)}
    by_method[name]["minus"] = {
      other: estimate(curve - curves[other]) | power(curve, curves[other])
      for other in baselines
      if other != name
    }
    if name in auc:
      by_method[name]["auc"] = estimate(auc[name])
  for name, calibration in candidates.calibration.items():
    by_method[name]["calibration"] = calibration
  for name in scores if candidates.steps is not None else ():
    by_method[name]["length"] = length(scores[name], candidates.steps, samples.valid)
  return {
    "problems": len(samples.problems),
    "candidates": len(samples.slots),
    "missing": int(len(samples.slots) - samples.valid.sum()),
    "mixed": int(np.isfinite(next(iter(auc.values()))).sum()) if auc else None,
    "n": n,
    "seed": seed,
    "baselines": baselines,
    "notices": candidates.notices(),
    "methods": by_method,
    "by": {
      kind: {
        group: {"problems": len(members)}
        | {name: float(curve[members, -1].mean()) for name, curve in curves.items()}
        for group, members in groups.items()
      }
      for kind, groups in reranking.breakdowns(samples).items()
      if kind != "subject"
    },
    "growth": growth({name: curve[:, -1:] for name, curve in curves.items()}, auc, weights),
  }


def _baselines(candidates: Candidates, against: Sequence[str]) -> list[str]:
  """Returns those of `BASELINES` that apply, and `against`; ValueError for an unknown method."""
  known = [*candidates.scores, "random", "oracle"]
  if candidates.samples.answer_ids is not None:
    known += ["majority", *(f"vote by {name}" for name in candidates.voters)]
  if unknown := [name for name in against if name not in known]:
    raise ValueError(f"--against {unknown[0]}: no such method; there are {', '.join(known)}")
  return [name for name in dict.fromkeys((*BASELINES, *against)) if name in known]


def power(a: np.ndarray, b: np.ndarray) -> dict[str, float | None]:
  """Returns how many problems would establish the estimated difference at the largest N.

  None: there is no difference beyond rounding, or only one problem to estimate it from.

  A two-sided test at 5 % finds a mean difference d of standard deviation s over n problems with
  probability `POWER` for n = ((z(0.975) + z(POWER)) s / d)^2.
  """
  difference = (a - b)[:, -1]
  if len(difference) < 2:
    return {"deviation": None, "problems_needed": None}
  d, s = (round(float(x), 9) for x in (difference.mean(), difference.std(ddof=1)))
  z = stats.norm.ppf(0.975) + stats.norm.ppf(POWER)
  return {"deviation": s, "problems_needed": float((z * s / d) ** 2) if d else None}


def length(scores: np.ndarray, steps: np.ndarray, valid: np.ndarray) -> dict[str, float | None]:
  """Measures how a score depends on the number of steps, `[P, M]` each.

  Returns:
    correlation: Spearman's, over the valid candidates of all problems.
    pick, random: mean number of steps of the best valid candidate, ties shared, and of a random
      one, over problems with at least two.
  """
  pairs = [(s[v], t[v]) for s, t, v in zip(scores, steps, valid) if v.sum() > 1]
  return {
    "correlation": step_metrics.spearman(scores[valid], steps[valid]),
    "pick": step_metrics.mean([t[s == s.max()].mean() for s, t in pairs]),
    "random": step_metrics.mean([t.mean() for _, t in pairs]),
  }


def growth(
  last: Mapping[str, np.ndarray], auc: Mapping[str, np.ndarray], weights: np.ndarray
) -> dict[str, dict[str, Any]]:
  """Returns what a doubling of the labels adds to AUC and to accuracy at the last N, by model."""
  out: dict[str, dict[str, Any]] = {}
  shares: dict[str, dict[float, str]] = {}
  for name in auc:
    if (base := whole(name)) in auc:
      shares.setdefault(base, {})[-np.log2(parts(name)[1])] = name
  for base, names in shares.items():
    if len(names) < 2:
      continue
    x = np.array(sorted(names))
    slopes = {}
    for key, values in (("auc", auc), ("accuracy", last)):
      by_share = [means(weights, values[names[share]]) for share in x]
      y = np.concatenate(by_share, axis=1)  # [1 + R, shares]
      slopes[key] = interval((y @ (x - x.mean()) / np.square(x - x.mean()).sum())[:, None])
    out[base] = {"shares": [2.0**share for share in x], **slopes}
  return out


def disagreements(candidates: Candidates, model: str) -> tuple[list[tuple[int, int]], list[str]]:
  """Returns slots of a model's and the majority's picks where just one is right; and who picked.

  The majority picks the first candidate with its answer; a tied majority picks none.
  """
  samples, slots, why = candidates.samples, [], []
  if samples.answer_ids is None:
    return slots, why
  for p in range(len(samples.problems)):
    valid = np.flatnonzero(samples.valid[p])
    if not len(valid):
      continue
    pick = valid[np.argmax(candidates.scores[model][p, valid])]
    answers, counts = np.unique(samples.answer_ids[p, valid], return_counts=True)
    if (counts == counts.max()).sum() > 1:
      continue
    majority = valid[samples.answer_ids[p, valid] == answers[counts.argmax()]][0]
    if samples.correct[p, pick] != samples.correct[p, majority]:
      slots += [(p, int(pick)), (p, int(majority))]
      why += [f"the pick of {model}", f"the majority: {counts.max()} of {len(valid)} answers"]
  return slots, why


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
