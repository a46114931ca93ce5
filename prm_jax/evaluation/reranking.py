"""Best-of-N curves of every method that a file of scored samples allows, with error bars."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from prm_jax import aggregation as agg
from prm_jax.evaluation.scored_samples import ScoredSamples

PAIRS = (("prm_product", "orm"), ("prm_product", "majority"), ("orm", "majority"))
SCORE_TOLERANCE = 1e-3  # between a file's prm_score and its rating_probs: scorers round


def powers_of_two(m: int) -> list[int]:
  """1, 2, 4, ... up to M, and M."""
  return sorted({2**i for i in range(m.bit_length())} | {m})


def solution_scores(samples: ScoredSamples, neutral: str = "positive") -> dict[str, np.ndarray]:
  """Every score of a solution that the samples allow: `prm_product`, ... and `orm`.

  Args:
    samples: the candidates.
    neutral: how a neutral step counts, "positive" or "negative".

  Returns:
    `[P, M]` float64 each, higher is better, the PRM's in log space; NaN where there is no line.
  """
  scores = {}
  if samples.step_probs is not None:
    with jax.enable_x64(True):
      steps = agg.step_log_scores(samples.step_probs, neutral)
      for how in agg.REDUCTIONS:
        flat = agg.reduce_steps(steps, samples.step_slots, samples.correct.size, how)
        scores[f"prm_{how}"] = np.asarray(flat).reshape(samples.correct.shape)
  if samples.orm is not None:
    scores["orm"] = samples.orm
  return scores


def rerank(
  samples: ScoredSamples,
  n: Sequence[int] | None = None,
  *,
  neutral: str = "positive",
  pad_short: bool = True,
  seed: int = 0,
  resamples: int = 10_000,
  permutations: int = 400,
) -> tuple[dict, dict[str, np.ndarray]]:
  """The content of report.json: curves, paired differences, breakdown by level.

  Args:
    samples: the candidates.
    n: values of N; None: powers of two up to M, and M.
    neutral: how a neutral step counts in the PRM's scores, "positive" or "negative".
    pad_short: what a problem with fewer than M candidates lacks counts as drawn and missing, as
      in OpenAI's evaluation, where it was cut off; False: it was never generated, and N beyond
      what the problem has draws all of it.
    seed: of the resamples and of the orders of the votes.
    resamples: of the bootstrap over problems.
    permutations: of each vote's Monte-Carlo.

  Returns:
    The report, which JSON can store, and the `solution_scores` that it ranks by.  Accuracies are
    shares of problems; `low` and `high` bound 95 % percentile bootstrap intervals over problems
    (by level: normal ones); `standard_error` is the Monte-Carlo noise of a vote's curve, beside
    which the curves are exact.

  Raises:
    ValueError: N outside 1..M.
  """
  scores = solution_scores(samples, neutral)
  m = samples.correct.shape[1]
  n = powers_of_two(m) if n is None else sorted(set(n))
  boot_key, vote_key = jax.random.split(jax.random.key(seed))
  with jax.enable_x64(True):
    solved, vote_error = _solved(samples, scores, n, pad_short, vote_key, permutations)
    curves, paired = _with_intervals(solved, boot_key, resamples)
    report = {
      "problems": len(samples.problems),
      "samples": int(samples.sizes.sum()),
      "candidates": m,
      "n": n,
      "curves": curves,
      "paired": paired,
      "by_level": {},
      "notices": _notices(samples, scores),
      "neutral": neutral,
      "interval": "95 % percentile bootstrap over problems",
      "pad_short": pad_short,
      "seed": seed,
      "resamples": resamples,
      "permutations": permutations,
      "files": [str(path) for path in samples.files],
    }
    for name, error in vote_error.items():
      report["curves"][name]["standard_error"] = error.tolist()
    levels = sorted({level for level in samples.levels if level is not None}, key=_natural)
    for level in levels:
      chosen = np.array([known == level for known in samples.levels])
      report["by_level"][level] = {
        "problems": int(chosen.sum()),
        "curves": {name: _rows(*_normal_interval(curve[chosen])) for name, curve in solved.items()},
      }
  return report, scores


def _notices(samples: ScoredSamples, scores: dict[str, np.ndarray]) -> list[str]:
  """What a reader of the curves must know about the candidates, in words."""
  result = []
  short = int((samples.sizes < samples.sizes.max()).sum())
  if short:
    result.append(
      f"{short} of {len(samples.sizes)} problems have fewer than {samples.sizes.max()} candidates"
    )
  unanswered = int(((samples.lines > 0) & ~samples.valid).sum())
  if unanswered:
    result.append(f"{unanswered} candidates have no answer: drawn like any, never chosen")
  if "prm_product" in scores:
    product = np.exp(scores["prm_product"])
    gap = np.abs(product - samples.prm_score)  # NaN where prm_score is not given
    given = int((~np.isnan(gap)).sum())
    wrong = np.argwhere(gap > SCORE_TOLERANCE)
    if len(wrong):
      p, m = min(map(tuple, wrong), key=lambda slot: samples.lines[slot])
      result.append(
        f"warning: {samples.where(p, m)}: prm_score is {samples.prm_score[p, m]:.6g}, but the "
        f"product of its rating_probs is {product[p, m]:.6g} ({len(wrong)} such lines); "
        "another reduction, or neutral counted otherwise?  The curves use rating_probs"
      )
    elif given:
      result.append(
        f"prm_score is the product of rating_probs on all {given} lines that have it "
        f"(largest difference {np.nanmax(gap):.1g})"
      )
  if "orm" in scores and (scores["orm"] < 0).any():
    result.append("some orm_score is negative: no weighted vote by it")
  return result


def _solved(samples, scores, n, pad_short, key, permutations):
  """`[P, K]` expected correctness by each method, and `[K]` standard errors of the votes."""
  candidates = (samples.correct, samples.valid, n)
  sizes = None if pad_short else samples.sizes
  solved = {
    name: np.asarray(agg.best_of_n(score, *candidates, sizes=sizes))
    for name, score in scores.items()
  }
  vote_error = {}
  weights = {}
  if samples.answer_ids is not None:
    weights["majority"] = None
    if "prm_product" in scores:
      # Only ratios matter: relative to the best, so that long products do not underflow.
      log_score = np.where(samples.valid, scores["prm_product"], -np.inf)
      best = log_score.max(axis=1, keepdims=True)
      weights["weighted_prm_product"] = np.exp(log_score - np.where(np.isfinite(best), best, 0))
    if "orm" in scores and not (scores["orm"] < 0).any():
      weights["weighted_orm"] = np.where(samples.valid, scores["orm"], 0)
  for name, weight in weights.items():
    mean, error = agg.majority_vote(
      samples.answer_ids,
      *candidates,
      weights=weight,
      sizes=sizes,
      key=key,
      permutations=permutations,
    )
    solved[name] = np.asarray(mean)
    vote_error[name] = np.sqrt(np.square(error).sum(axis=0)) / len(mean)
  solved["oracle"] = np.asarray(agg.pass_at_n(*candidates, sizes=sizes))
  blind = np.zeros(samples.correct.shape)
  solved["random"] = np.asarray(agg.best_of_n(blind, *candidates, sizes=sizes))
  return solved, vote_error


def _with_intervals(solved, key, resamples) -> tuple[dict, dict]:
  """Curves and paired differences; every mean is taken over the same resamples."""
  pairs = [(a, b) for a, b in PAIRS if a in solved and b in solved]
  curves = list(solved.values()) + [solved[a] - solved[b] for a, b in pairs]
  per_problem = np.stack(curves, axis=1)  # [P, curves, K]
  mean = per_problem.mean(axis=0)
  low, high = agg.bootstrap(per_problem.reshape(len(per_problem), -1), key, resamples)
  bounds = list(zip(mean, np.reshape(low, mean.shape), np.reshape(high, mean.shape)))
  paired = {f"{a} - {b}": bound for (a, b), bound in zip(pairs, bounds[len(solved) :])}
  return (
    {name: _rows(*bound) for name, bound in zip(solved, bounds)},
    {name: _rows(*bound, mean="difference") for name, bound in paired.items()},
  )


def _normal_interval(per_problem):
  """Mean and 1.96 standard errors either side: a group of problems is too small for better."""
  mean = per_problem.mean(axis=0)
  reach = 1.96 * per_problem.std(axis=0) / np.sqrt(len(per_problem))
  return mean, np.maximum(mean - reach, 0), np.minimum(mean + reach, 1)


def _rows(middle, low, high, mean: str = "accuracy") -> dict:
  return {mean: middle.tolist(), "low": low.tolist(), "high": high.tolist()}


def _natural(level: str):
  """Levels in the order of their numbers: 2 before 10."""
  digits = "".join(c for c in level if c.isdigit())
  return (int(digits) if digits else -1, level)
