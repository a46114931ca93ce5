"""Compares ways to choose one of a problem's candidates, on the same candidates.

The methods are reward models, each from a file of score.py; the generator's own log-probability;
the solution of fewest tokens, or steps; majority and weighted votes; a random pick and the oracle.
A candidate that was cut off, or has no answer, is drawn like any other but never chosen (as in
*Let's Verify Step by Step*).

Shapes: P problems, M candidates of each, K values of N, R resamples of the problems.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from scipy import stats

from prm_jax import aggregation as agg
from prm_jax import step_metrics
from prm_jax.aggregation.intervals import interval, resample_counts
from prm_jax.evaluation import reranking
from prm_jax.experiments.comparison_files import BASELINES, Candidates, parts, whole

RESAMPLES = 10_000
PERMUTATIONS = 64  # random orders for a weighted vote
POWER = 0.8  # of a two-sided test at 5 %


def within_problems(scores: np.ndarray, correct: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """Returns AUROC `[P]` of scores `[P, M]` among a problem's valid candidates.

  A problem whose valid candidates are all right or all wrong has NaN.
  """
  by_problem = (step_metrics.auroc(s[v], c[v]) for s, c, v in zip(scores, correct, valid))
  return np.array([*by_problem], float)  # None becomes NaN


def solved(candidates: Candidates, n: Sequence[int], seed: int = 0) -> dict[str, np.ndarray]:
  """Returns the probability that a method's pick is right, `[P, K]`, by method."""
  samples = candidates.samples
  outcomes, draws = (samples.correct, samples.valid), {"n": np.array(n), "sizes": samples.sizes}
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
  estimate = lambda values, of=slice(None): interval(means(weights[:, of], values[of]))
  plain = curves.get("majority", np.full_like(curves["random"], np.nan))[:, -1:]
  by_group = lambda values, of: estimate(values, of) | {"minus": estimate(values - plain, of)}
  by_method = {}
  for name, curve in curves.items():
    by_method[name] = {"accuracy": estimate(curve), "minus": {}}
    for other in baselines:
      if other != name:
        minus = estimate(curve - curves[other]) | power(curve, curves[other])
        if name in auc and other in auc:
          minus["auc"] = estimate(auc[name] - auc[other])
        by_method[name]["minus"][other] = minus
    if name in auc:
      by_method[name]["auc"] = estimate(auc[name])
  for name in scores:
    by_method[name] |= _of_scores(candidates, name, weights)
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
        | {name: by_group(curve[:, -1:], members) for name, curve in curves.items()}
        for group, members in groups.items()
      }
      for kind, groups in reranking.breakdowns(samples).items()
      if kind != "subject"
    },
    "growth": growth({name: curve[:, -1:] for name, curve in curves.items()}, auc, weights),
  }


def _of_scores(candidates: Candidates, name: str, weights: np.ndarray) -> dict[str, Any]:
  """Returns the calibration of a scorer's numbers and their dependence on the number of steps."""
  outcomes, out = (candidates.samples.correct, candidates.samples.valid), {}
  if name in candidates.models:
    out["calibration"] = found = candidates.calibration[name]
    if found:  # the error with its interval
      error = calibration_error(candidates.models[name], *outcomes, weights)
      out["calibration"] = found | {"ece": error}
  if name in candidates.lines:
    out["calibrated_by"] = candidates.lines[name]  # a and b of each fold of problems
  if candidates.steps is not None:
    out["length"] = length(candidates.scores[name], candidates.steps, candidates.samples.valid)
  return out


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


def calibration_error(
  probabilities: np.ndarray, correct: np.ndarray, valid: np.ndarray, weights: np.ndarray
) -> dict[str, list[float | None]]:
  """Returns the expected calibration error of P(right) `[P, M]`, with its interval over problems.

  An error cannot be negative, so an error near zero is overestimated, as is its interval: with 120
  problems, a true error of 0 is estimated as 0.04, and one of 0.05 as 0.06.
  """
  problem, _ = np.nonzero(valid)
  gaps = np.zeros((len(valid), step_metrics.BINS))  # sum of P(right) minus number of right ones
  excess = probabilities[valid] - correct[valid]
  np.add.at(gaps, (problem, step_metrics.bins(probabilities[valid])), excess)
  with np.errstate(invalid="ignore"):
    return interval((np.abs(weights @ gaps).sum(1) / (weights @ valid.sum(1)))[:, None])


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
