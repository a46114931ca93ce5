"""The methods that rerank candidates: their names, what each needs, and how often each is right."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence

import jax
import numpy as np
import tqdm

from prm_jax import aggregation as agg
from prm_jax.evaluation.scored_samples import ScoredSamples

_REDUCTION_LABELS = {
  "product": "PRM",
  "min": "PRM, weakest step",
  "mean": "PRM, mean of steps",
  "last": "PRM, last step",
  "soft_min": "PRM, soft minimum",
}
RANKED = {f"prm_{how}": _REDUCTION_LABELS[how] for how in agg.REDUCTIONS} | {"orm": "ORM"}
VOTES = (
  {"majority": "Majority voting"}
  | {f"weighted_{name}": f"{label}-weighted voting" for name, label in RANKED.items()}
  | {f"weighted_mean_{name}": f"Voting by mean {label}" for name, label in RANKED.items()}
)
LABELS = (
  RANKED
  | VOTES
  | {"oracle": "Oracle (any right)", "random": "Random pick", "all_correct": "All N right"}
)
# Without --methods: those of these that the file allows.
STANDARD = (*RANKED, "majority", "weighted_prm_product", "weighted_orm", "oracle", "random")
# Exact majority voting takes a millisecond or so for each problem and N, more for large pools.
EXACT_VOTES, EXACT_POOL = 20_000, 100_000


@dataclasses.dataclass(frozen=True)
class Draws:
  """How N candidates are drawn, for all methods alike."""

  n: np.ndarray  # [K] values of N
  sizes: np.ndarray | None  # [P] how many candidates exist; None: all slots, missing or not
  key: jax.Array  # random key of the candidate orders of sampled votes
  permutations: int  # number of these orders

  @property
  def options(self) -> dict:
    return {"n": self.n, "sizes": self.sizes}


def choose(samples: ScoredSamples, names: Sequence[str], every_n: bool) -> tuple[list, list[str]]:
  """The methods to compute, and notices about those left out.

  Args:
    samples: the candidates.
    names: methods asked for; none: those of `STANDARD` that the samples allow.
    every_n: curves at every N, where votes are computed only if asked for: they take long.

  Raises:
    ValueError: a name is unknown, or the samples do not allow it.
  """
  missing = {name: reason for name in LABELS if (reason := _lacking(name, samples))}
  for name in names:
    reason = missing.get(name) if name in LABELS else "unknown"
    if name not in LABELS and (near := difflib.get_close_matches(name, LABELS, n=1)):
      reason += f" (nearest: {near[0]})"
    if reason:
      there = ", ".join(name for name in LABELS if name not in missing)
      raise ValueError(f"--methods {name}: {reason}; there are {there}")
  if names:
    return list(dict.fromkeys(names)), []
  chosen = [name for name in STANDARD if name not in missing]
  notices = []
  if "negative" in missing.get("weighted_orm", ""):
    notices.append("some orm_score is negative: no weighted vote by it")
  if every_n and any(name in VOTES for name in chosen):
    chosen = [name for name in chosen if name not in VOTES]
    notices.append("no votes at every N, which take long; name them in --methods to have them")
  return chosen, notices


def _lacking(name: str, samples: ScoredSamples) -> str | None:
  """Why the samples do not allow a method; None: they do."""
  if name in VOTES and samples.answer_ids is None:
    return 'the file has no "answer"'
  if "prm_" in name and samples.step_probs is None:
    return 'the file has no "rating_probs"'
  if name.endswith("orm") and samples.orm is None:
    return 'the file has no "orm_score"'
  if name in VOTES and name.endswith("orm"):
    least = samples.orm[samples.valid].min(initial=0)
    if least < 0:
      return f'an "orm_score" is negative, {least:.6g}: no weight of a vote'
  return None


def solution_scores(samples: ScoredSamples, neutral: str = "positive") -> dict[str, np.ndarray]:
  """Every score of a solution that the samples allow: `prm_product`, ... and `orm`.

  Args:
    samples: the candidates.
    neutral: how a neutral step counts, "positive" or "negative".

  Returns:
    `[P, M]` float64 each, higher is better, the PRM's in log space; NaN for padding.
  """
  scores = {}
  if samples.step_probs is not None:
    with jax.enable_x64(True):  # products of many steps that differ in their last digits
      steps = agg.step_log_scores(samples.step_probs, neutral)
      size = samples.correct.size
      reduced = agg.reduce_steps(steps, samples.step_slots, size, agg.REDUCTIONS)
    for how, score in zip(agg.REDUCTIONS, np.asarray(reduced)):
      scores[f"prm_{how}"] = score.reshape(samples.correct.shape)
  if samples.orm is not None:
    scores["orm"] = np.asarray(samples.orm, np.float64)
  return scores


def solve(
  samples: ScoredSamples,
  scores: dict[str, np.ndarray],
  names: Sequence[str],
  draws: Draws,
  progress: bool = False,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """The probability that each method's pick is right.

  Returns:
    `[P, K]` for each method, and for each vote its `[P, K]` Monte-Carlo standard error, zero where
    it is exact.
  """
  solved, vote_error = {}, {}
  votes = [name for name in names if name in VOTES]
  # The exact majority vote is the control variate of the weighted ones: first, wanted or not.
  order = ["majority"] * bool(votes) + [name for name in names if name != "majority"]
  hidden = None if progress else True  # None: hidden unless standard error is a terminal
  exact = None
  for name in tqdm.tqdm(order, desc="methods", unit="", leave=False, disable=hidden):
    if name in VOTES:
      solved[name], vote_error[name] = _vote(name, samples, scores, draws, exact)
      if name == "majority" and not vote_error[name].any():
        exact = solved[name]
    elif name == "oracle":
      solved[name] = agg.pass_at_n(samples.correct, samples.valid, **draws.options)
    elif name == "all_correct":
      solved[name] = agg.all_correct_at_n(samples.correct, samples.valid, **draws.options)
    else:
      score = _ranking(name, samples, scores)
      solved[name] = agg.best_of_n(score, samples.correct, samples.valid, **draws.options)
    solved[name] = np.asarray(solved[name])
  return {name: solved[name] for name in names}, {name: vote_error[name] for name in votes}


def generation_error(
  name: str, samples: ScoredSamples, scores: dict[str, np.ndarray], draws: Draws
) -> np.ndarray | None:
  """`[P, K]` standard error of a method over generations of the candidates; None: not known."""
  score = _ranking(name, samples, scores)
  if score is None:
    return None
  return np.asarray(agg.generation_error(score, samples.correct, samples.valid, **draws.options))


def _ranking(name: str, samples: ScoredSamples, scores: dict) -> np.ndarray | None:
  """The `[P, M]` score of which a method is the best-of-N; None: it is not a best-of-N."""
  if name == "oracle":
    return samples.correct.astype(np.float64)
  if name == "random":  # all tie
    return np.zeros(samples.correct.shape)
  return scores.get(name)


def _vote(name, samples, scores, draws, exact) -> tuple[np.ndarray, np.ndarray]:
  """`[P, K]` expected correctness of a vote, and its Monte-Carlo standard error."""
  candidates = (samples.answer_ids, samples.correct, samples.valid)
  sampled = {"key": draws.key, "permutations": draws.permutations}
  (problems, pool), options = samples.correct.shape, draws.options
  if name == "majority":
    if problems * len(draws.n) > EXACT_VOTES or pool > EXACT_POOL:
      options |= sampled
  else:
    score = scores[name.removeprefix("weighted_").removeprefix("mean_")]
    if "prm_" in name:
      # Only ratios matter: relative to the best, so that long products do not underflow.
      score = np.where(samples.valid, score, -np.inf)
      best = score.max(axis=1, keepdims=True)
      score = np.exp(score - np.where(np.isfinite(best), best, 0))
    options |= sampled | {
      "weights": np.where(samples.valid, score, 0),
      "combine": "mean" if name.startswith("weighted_mean_") else "sum",
      "control": exact,
    }
  mean, error = agg.majority_vote(*candidates, **options)
  return np.asarray(mean), np.asarray(error)
