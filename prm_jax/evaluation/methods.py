"""The methods that rerank candidates: their names, what each needs, and how often each is right."""

from collections.abc import Sequence

import jax
import numpy as np

from prm_jax import aggregation as agg
from prm_jax.evaluation.sample_arrays import ScoredSamples
from prm_jax.runtime.progress import Progress

_REDUCTION_LABELS = {  # of others: "PRM, " and the name
  "product": "PRM",
  "min": "PRM, weakest step",
  "mean": "PRM, mean of steps",
  "last": "PRM, last step",
  "soft_min": "PRM, soft minimum",
}
RANKED = {
  f"prm_{how}": _REDUCTION_LABELS.get(how, f"PRM, {how.replace('_', ' ')}")
  for how in agg.REDUCTIONS
} | {"orm": "ORM"}
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


def choose(samples: ScoredSamples, names: Sequence[str], every_n: bool) -> tuple[list, list[str]]:
  """The methods to compute, and notices about those left out.

  Args:
    names: methods asked for; none: those of `STANDARD` that the samples allow.
    every_n: curves at every N, where votes are computed only if asked for: they take long.

  Raises:
    ValueError: a name is unknown, or the samples do not allow it.
  """
  missing = {name: reason for name in LABELS if (reason := _lacking(name, samples))}
  there = [name for name in LABELS if name not in missing]
  for name in names:
    if name not in there:
      reason = missing.get(name, "unknown")
      raise ValueError(f"--methods {name}: {reason}; there are {', '.join(there)}")
  if names:
    return list(dict.fromkeys(names)), []
  notices = []
  if "negative" in missing.get("weighted_orm", ""):
    notices.append("some orm_score is negative: no weighted vote by it")
  left_out = VOTES if every_n else {}
  if any(name in left_out for name in there):
    notices.append("no votes at every N, which take long; name them in --methods to have them")
  return [name for name in STANDARD if name in there and name not in left_out], notices


def _lacking(name: str, samples: ScoredSamples) -> str | None:
  """Why the samples do not allow a method; None: they do."""
  for key, values, needed in (
    ("answer", samples.answer_ids, name in VOTES),
    ("rating_probs", samples.step_probs, "prm_" in name),
    ("orm_score", samples.orm, name.endswith("orm")),
  ):
    if needed and values is None:
      return f'the file has no "{key}"'
  if name in VOTES and name.endswith("orm"):
    least = samples.orm[samples.valid].min(initial=0)
    if least < 0:
      return f'an "orm_score" is negative, {least:.6g}: no weight of a vote'
  return None


def solution_scores(samples: ScoredSamples, neutral: str = "positive") -> dict[str, np.ndarray]:
  """The scores whose best-of-N is a method: `prm_product`, ..., `orm`, `oracle` and `random`.

  Args:
    neutral: how a neutral step counts, "positive" or "negative".

  Returns:
    `[P, M]` float64 each, higher is better, the PRM's in log space; NaN for padding.
  """
  right = samples.correct.astype(np.float64)
  scores = {"oracle": right, "random": np.zeros_like(right)}  # at random: all tie
  if samples.step_probs is not None:
    slots = np.repeat(samples.slots, samples.step_counts)
    with jax.enable_x64(True):  # products of many steps that differ in their last digits
      steps = agg.step_log_scores(samples.step_probs, neutral)
      reduced = agg.reduce_steps(steps, slots, samples.correct.size, agg.REDUCTIONS)
      for how, score in zip(agg.REDUCTIONS, np.asarray(reduced)):
        scores[f"prm_{how}"] = agg.join_ties(score.reshape(samples.correct.shape))
  if samples.orm is not None:
    scores["orm"] = samples.orm
  return scores


def solve(
  samples: ScoredSamples,
  scores: dict[str, np.ndarray],
  names: Sequence[str],
  draws: dict,
  orders: dict,
  progress: bool = False,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """The probability that each method's pick is right.

  Args:
    scores: of `solution_scores`.
    names: the methods.
    draws: `n` and `sizes` of `aggregation.best_of_n`.
    orders: `key` and `permutations` of `aggregation.majority_vote`, for votes that are sampled.
    progress: show progress on standard error.

  Returns:
    `[P, K]` for each method, and for each vote its `[P, K]` Monte-Carlo standard error, zero where
    it is exact.
  """
  outcomes = (samples.correct, samples.valid)
  solved, vote_error = {}, {}
  votes = [name for name in names if name in VOTES]
  # The exact majority vote is the control variate of the weighted ones: first, wanted or not.
  order = ["majority"] * bool(votes) + [name for name in names if name != "majority"]
  control = None
  bar = {"desc": "reranking", "unit": "methods", "leave": False, "disable": not progress}
  for name in Progress(order, **bar):
    if name in VOTES:
      options = draws | _vote(name, samples, scores, orders, len(draws["n"]), control)
      mean, error = agg.majority_vote(samples.answer_ids, *outcomes, **options)
      solved[name], vote_error[name] = np.asarray(mean), np.asarray(error)
      if name == "majority" and not vote_error[name].any():
        control = solved[name]
    elif name == "oracle":
      solved[name] = np.asarray(agg.pass_at_n(*outcomes, **draws))
    elif name == "all_correct":
      solved[name] = np.asarray(agg.all_correct_at_n(*outcomes, **draws))
    else:
      solved[name] = np.asarray(agg.best_of_n(scores[name], *outcomes, **draws))
  return {name: solved[name] for name in names}, {name: vote_error[name] for name in votes}


def _vote(name, samples, scores, orders, values_of_n, control) -> dict:
  """The options of `aggregation.majority_vote` for a vote."""
  problems, pool = samples.correct.shape
  if name == "majority":
    exact = problems * values_of_n <= EXACT_VOTES and pool <= EXACT_POOL
    return {} if exact else orders
  score = np.where(samples.valid, scores[name.removeprefix("weighted_").removeprefix("mean_")], 0)
  if "prm_" in name:
    # Only ratios matter: relative to the best, so that long products do not underflow.
    score = np.where(samples.valid, score, -np.inf)
    best = score.max(axis=1, keepdims=True)
    score = np.exp(score - np.where(np.isfinite(best), best, 0))
  combine = "mean" if name.startswith("weighted_mean_") else "sum"
  return orders | {"weights": score, "combine": combine, "control": control}
