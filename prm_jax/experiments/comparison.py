"""Ways to choose one of a problem's candidates, compared on the same candidates.

Reward models, each from a file of score.py; the generator's own log-probability; the shortest
solution; majority and weighted votes; a random pick and the oracle.  A candidate that was cut off,
or has no answer, is drawn like any and never chosen (as in *Let's Verify Step by Step*).

Shapes: P problems, M candidates of each, K values of N, R resamples of the problems.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import msgspec
import numpy as np
from scipy import stats

from prm_jax import aggregation as agg
from prm_jax import step_metrics
from prm_jax.aggregation.intervals import resample_counts
from prm_jax.evaluation import methods, reranking, scored_samples
from prm_jax.evaluation.sample_arrays import ScoredSamples
from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import BadLine

RESAMPLES = 10_000
PERCENT = (2.5, 97.5)
PERMUTATIONS = 64  # random orders for a weighted vote
POWER = 0.8  # chance to establish a difference, of a two-sided test at 5 %
BASELINES = ("majority", "log-probability")  # that every method is compared with


@dataclasses.dataclass(frozen=True)
class Candidates:
  """P problems with up to M candidates each, and what scores them."""

  samples: ScoredSamples
  scores: dict[str, np.ndarray]  # [P, M] by scorer, higher is better; NaN: padding
  models: dict[str, np.ndarray]  # [P, M] the same as P(right), by reward model: weights of votes
  scored: dict[str, ScoredSamples]  # their files
  steps: np.ndarray | None  # [P, M] number of steps; NaN: padding; None: a line has no `steps`


def read(
  path: pathlib.Path,
  scored: Mapping[str, pathlib.Path],
  reduction: str = "product",
  join: Callable | None = None,
) -> Candidates:
  """Graded candidates and their scores.

  Args:
    path: lines of grade.py; `logprob` and `tokens`, of generate.py, are read if they are there.
    scored: by name of a reward model, the same lines with the keys of score.py.
    reduction: of a process model's steps to a score, of `aggregation.REDUCTIONS`; a model with a
      reduction in its name has that, see `parts`.
    join: which answers are equal, as of `read_scored_samples`.

  Raises:
    BadLine: a line is wrong; or a file has other candidates, or no scores.
    ValueError: a name asks for an unknown reduction.
  """
  scores: dict[str, np.ndarray] = {}
  models: dict[str, np.ndarray] = {}
  files: dict[str, ScoredSamples] = {}
  given = {name: parts(name)[2] for name in scored}
  for name, how in given.items():
    if how and how not in agg.REDUCTIONS:
      raise ValueError(f"{name}: no reduction {how!r}; there are {', '.join(agg.REDUCTIONS)}")
  samples = scored_samples.read_scored_samples([path], progress=True, join=join)

  @functools.cache  # a file may be of several names
  def read_once(file: pathlib.Path) -> tuple[ScoredSamples, dict[str, np.ndarray]]:
    own = scored_samples.read_scored_samples([file], progress=True)
    return own, methods.solution_scores(own)

  for name, file in scored.items():
    own, found = read_once(file)
    files[name] = own
    same = own.problems == samples.problems and np.array_equal(own.slots, samples.slots)
    if not same or not np.array_equal(own.correct, samples.correct):
      raise BadLine(f"{file}: not the candidates of {path}, in the same order and graded alike")
    score = found.get(f"prm_{given[name] or reduction}", None if given[name] else found.get("orm"))
    if score is None and not samples.valid.any():
      score = np.zeros(samples.correct.shape)  # all were cut off, and score.py skipped them
    if score is None:
      needed = "no rating_probs" if given[name] else "neither rating_probs nor orm_score"
      raise BadLine(f"{file}: {needed}, for {name}")
    scores[name] = score
    models[name] = np.exp(score) if "prm_product" in found else score
  log_probs, tokens, steps = _given(path, samples)
  if log_probs is not None:
    scores["log-probability"] = log_probs
  if tokens is not None:
    scores["shortest"] = -tokens
  return Candidates(samples, scores, models, files, steps)


def _given(path: pathlib.Path, samples: ScoredSamples) -> list[np.ndarray | None]:
  """Log-probability, number of tokens and of steps `[P, M]` each; None where a line lacks it."""
  given = [
    (record.get("logprob"), record.get("tokens"), len(record.get("steps") or ()) or None)
    for _, record in scored_samples.candidates(path, progress=False)
  ]
  out: list[np.ndarray | None] = []
  for values in zip(*given):
    table = None
    if all(isinstance(value, int | float) for value in values):
      table = np.full(samples.correct.size, np.nan)
      table[samples.slots] = values
      table = table.reshape(samples.correct.shape)
    out.append(table)
  return out


def parts(name: str) -> tuple[str, int, str]:
  """Model, share and reduction of a name.

  "people/2:min", trained on half of the labels and read by `min`, is ("people", 2, "min"); "people"
  is ("people", 1, "").
  """
  base, share, how = re.fullmatch(r"(.+?)(?:/([1-9]\d*))?(?::([^:]*))?", name, re.S).groups()
  return base, int(share or 1), how or ""


def whole(name: str) -> str:
  """The name of the same model on all labels."""
  base, _, how = parts(name)
  return f"{base}:{how}" if how else base


def within_problems(scores: np.ndarray, correct: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """AUROC `[P]` of scores `[P, M]` among a problem's valid candidates; NaN where all are alike."""
  found = (
    step_metrics.auroc(s[v], c[v]) if v.any() else None for s, c, v in zip(scores, correct, valid)
  )
  return np.array([np.nan if each is None else each for each in found])


def solved(of: Candidates, n: Sequence[int], seed: int = 0) -> dict[str, np.ndarray]:
  """The probability that each method's pick is right, `[P, K]`."""
  samples = of.samples
  outcomes, draws = (samples.correct, samples.valid), {"n": np.array(n)}
  if not (samples.sizes == samples.correct.shape[1]).all():
    draws["sizes"] = samples.sizes
  with jax.enable_x64(True):
    out = {name: np.asarray(agg.best_of_n(s, *outcomes, **draws)) for name, s in of.scores.items()}
    out["random"] = np.asarray(agg.best_of_n(np.zeros(samples.correct.shape), *outcomes, **draws))
    out["oracle"] = np.asarray(agg.pass_at_n(*outcomes, **draws))
    if samples.answer_ids is None:
      return out
    plain = np.asarray(agg.majority_vote(samples.answer_ids, *outcomes, **draws)[0])
    out["majority"] = plain
    orders = {"key": jax.random.key(seed), "permutations": PERMUTATIONS, "control": plain}
    for name, probability in of.models.items():
      weights = np.where(samples.valid, np.nan_to_num(probability), 0)
      vote, _ = agg.majority_vote(samples.answer_ids, *outcomes, weights=weights, **draws, **orders)
      out[f"vote by {name}"] = np.asarray(vote)
  return out


@dataclasses.dataclass(frozen=True)
class Resampled:
  """Means over the problems with 95 % percentile bootstrap intervals; all share their resamples."""

  weights: np.ndarray  # [1 + R, P], of `resample_counts`

  def means(self, values: np.ndarray) -> np.ndarray:
    """`[1 + R, K]` means of `[P, K]` over the problems that have a value."""
    there = np.isfinite(values)
    with np.errstate(invalid="ignore"):
      return (self.weights @ np.where(there, values, 0)) / (self.weights @ there)

  def interval(self, values: np.ndarray) -> dict[str, list[float | None]]:
    """`interval` of the means of `[P, K]`."""
    return interval(self.means(values))


def interval(means: np.ndarray) -> dict[str, list[float | None]]:
  """Mean, low and high `[K]`, as JSON, of `[1 + R, K]` over resamples; None: no value."""
  ends = np.full((2, means.shape[1]), np.nan)
  known = np.isfinite(means[1:]).any(0)
  ends[:, known] = np.nanpercentile(means[1:, known], PERCENT, axis=0)
  plain = lambda row: [None if np.isnan(x) else float(x) for x in row]
  return {"mean": plain(means[0]), "low": plain(ends[0]), "high": plain(ends[1])}


def compare(
  of: Candidates, n: Sequence[int] = (), seed: int = 0, against: Sequence[str] = ()
) -> dict[str, Any]:
  """Every number of the comparison, as JSON.

  A name such as "people/4" is of the model "people" on a quarter of the labelled problems: `growth`
  has what a doubling of the labels adds, the slope of a line over log2 of the share.

  Args:
    n: values of N; none: powers of two up to M, and M.
    seed: of the bootstrap and of the orders of weighted votes.
    against: methods that every other is compared with, beside `BASELINES`.

  Raises:
    ValueError: there is no such method.
  """
  samples = of.samples
  outcomes = (samples.correct, samples.valid)
  baselines = _baselines(of, against)
  n = sorted({*n}) or reranking.powers_of_two(samples.correct.shape[1])
  curves = solved(of, n, seed)
  resampled = Resampled(resample_counts(len(samples.problems), RESAMPLES, seed))
  auc = {name: within_problems(score, *outcomes)[:, None] for name, score in of.scores.items()}
  found = {}
  for name, curve in curves.items():
    found[name] = {"accuracy": resampled.interval(curve)}
    found[name]["minus"] = {
      other: resampled.interval(curve - curves[other]) | power(curve, curves[other])
      for other in baselines
      if other != name
    }
    if name in auc:
      found[name]["auc"] = resampled.interval(auc[name])
  for name, probability in of.models.items():
    chosen = samples.valid
    found[name]["calibration"] = calibration(probability[chosen], samples.correct[chosen])
  for name in of.scores if of.steps is not None else ():
    found[name]["length"] = length(of.scores[name], of.steps, samples.valid)
  return {
    "problems": len(samples.problems),
    "candidates": len(samples.slots),
    "missing": int(len(samples.slots) - samples.valid.sum()),
    "mixed": int(np.isfinite(next(iter(auc.values()))).sum()) if auc else None,
    "n": n,
    "seed": seed,
    "baselines": baselines,
    "methods": found,
    "by": {
      kind: {
        group: {"problems": len(members)}
        | {name: float(curve[members, -1].mean()) for name, curve in curves.items()}
        for group, members in groups.items()
      }
      for kind, groups in reranking.breakdowns(samples).items()
      if kind != "subject"
    },
    "growth": growth({name: curve[:, -1:] for name, curve in curves.items()}, auc, resampled),
  }


def _baselines(of: Candidates, against: Sequence[str]) -> list[str]:
  """`BASELINES` that there are, and `against`; ValueError if one of these is no method."""
  known = [*of.scores, "random", "oracle"]
  if of.samples.answer_ids is not None:
    known += ["majority", *(f"vote by {name}" for name in of.models)]
  if unknown := [name for name in against if name not in known]:
    raise ValueError(f"--against {unknown[0]}: no such method; there are {', '.join(known)}")
  return [name for name in dict.fromkeys((*BASELINES, *against)) if name in known]


def power(a: np.ndarray, b: np.ndarray) -> dict[str, float | None]:
  """Problems needed to establish the difference at the largest N, if it is as large as it seems.

  A two-sided test at 5 % finds a mean difference d of standard deviation s over n problems with
  probability `POWER` for n = ((z(0.975) + z(POWER)) s / d)^2.
  """
  difference = (a - b)[:, -1]
  d, s = float(difference.mean()), float(difference.std(ddof=1)) if len(difference) > 1 else 0.0
  z = stats.norm.ppf(0.975) + stats.norm.ppf(POWER)
  return {"deviation": s, "problems_needed": float((z * s / d) ** 2) if d else None}


def calibration(probability: np.ndarray, correct: np.ndarray) -> dict[str, Any]:
  """Expected calibration error of P(right) of solutions, and the bins of a reliability diagram."""
  bins = step_metrics.calibration(probability, correct)
  gaps = [b["count"] * abs(b["mean_probability"] - b["share_not_wrong"]) for b in bins]
  return {"error": float(sum(gaps) / max(len(probability), 1)), "bins": bins}


def length(scores: np.ndarray, steps: np.ndarray, valid: np.ndarray) -> dict[str, float | None]:
  """How a score depends on the number of steps, `[P, M]` each.

  Returns:
    correlation: Spearman's, over the valid candidates of all problems.
    pick, random: mean number of steps of the best valid candidate, ties shared, and of a random
      one, over problems with at least two.
  """
  mean = lambda of: float(np.mean(of)) if of else None
  found = [(s[v], t[v]) for s, t, v in zip(scores, steps, valid) if v.sum() > 1]
  return {
    "correlation": step_metrics.spearman(scores[valid], steps[valid]),
    "pick": mean([t[s == s.max()].mean() for s, t in found]),
    "random": mean([t.mean() for _, t in found]),
  }


def growth(
  last: Mapping[str, np.ndarray], auc: Mapping[str, np.ndarray], resampled: Resampled
) -> dict[str, dict[str, Any]]:
  """By model with several shares: what a doubling of the labels adds to AUC and accuracy."""
  out: dict[str, dict[str, Any]] = {}
  shares: dict[str, dict[float, str]] = {}
  for name in auc:
    if (base := whole(name)) in auc:
      shares.setdefault(base, {})[-np.log2(parts(name)[1])] = name
  for base, of in shares.items():
    if len(of) < 2:
      continue
    x = np.array(sorted(of))
    slopes = {}
    for key, values in (("auc", auc), ("accuracy", last)):
      y = np.concatenate([resampled.means(values[of[share]]) for share in x], axis=1)  # [1 + R, S]
      slopes[key] = interval((y @ (x - x.mean()) / np.square(x - x.mean()).sum())[:, None])
    out[base] = {"shares": [2.0**share for share in x], **slopes}
  return out


def disagreements(of: Candidates, model: str) -> tuple[list[tuple[int, int]], list[str]]:
  """Slots of the picks of a model and of the majority where just one is right; and who picked.

  Of the majority, the candidate with its answer that stands first.
  """
  samples, slots, why = of.samples, [], []
  for p in range(len(samples.problems)):
    there = np.flatnonzero(samples.valid[p])
    if not len(there) or samples.answer_ids is None:
      continue
    own = there[np.argmax(of.scores[model][p, there])]
    answers, counts = np.unique(samples.answer_ids[p, there], return_counts=True)
    if (counts == counts.max()).sum() > 1:
      continue  # the majority is tied
    most = there[samples.answer_ids[p, there] == answers[counts.argmax()]][0]
    if samples.correct[p, own] != samples.correct[p, most]:
      slots += [(p, int(own)), (p, int(most))]
      why += [f"the pick of {model}", f"the majority: {counts.max()} of {len(there)} answers"]
  return slots, why


class Ends(msgspec.Struct):
  low: float | None
  high: float | None


class Subset(msgspec.Struct):
  f1: float | None


class ProcessBench(msgspec.Struct):
  """What is read of a result of evaluate.py."""

  benchmark: Literal["process_bench"]
  subsets: dict[str, Subset]
  mean_f1: float | None
  intervals: dict[str, Ends]


def process_bench(path: pathlib.Path) -> dict[str, dict[str, list[float | None]]]:
  """F1 of each subset and their mean, as `interval`; BadLine: the file is no such result."""
  of = json_lines.convert(json_lines.document(path), ProcessBench, str(path))
  values = {name: (part.f1, f"{name}/f1") for name, part in of.subsets.items()}
  ends = lambda key: of.intervals.get(key, Ends(None, None))
  return {
    name: {"mean": [f1], "low": [ends(key).low], "high": [ends(key).high]}
    for name, (f1, key) in (values | {"mean": (of.mean_f1, "mean_f1")}).items()
  }
