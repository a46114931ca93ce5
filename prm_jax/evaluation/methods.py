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
# Without --methods: what the file allows of these.
STANDARD = (
  *RANKED,
  "majority",
  "weighted_prm_product",
  "weighted_orm",
  "oracle",
  "random",
)
# Exact majority voting takes a millisecond or so for each problem and N, more for large pools.
EXACT_VOTES, EXACT_POOL = 20_000, 100_000


@dataclasses.dataclass(frozen=True)
class Draws:
  """How candidates are drawn, for all methods alike."""

  n: np.ndarray  # [K]
  sizes: np.ndarray | None  # [P] how many candidates exist; None: all slots, missing or not
  key: jax.Array  # of the orders of the votes
  permutations: int  # how many orders

  @property
  def options(self) -> dict:
    return {"n": self.n, "sizes": self.sizes}


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
    with jax.enable_x64(True):  # products of many steps that differ in their last digits
      steps = agg.step_log_scores(samples.step_probs, neutral)
      size = samples.correct.size
      reduced = agg.reduce_steps(steps, samples.step_slots, size, agg.REDUCTIONS)
    for how, score in zip(agg.REDUCTIONS, np.asarray(reduced)):
      scores[f"prm_{how}"] = score.reshape(samples.correct.shape)
  if samples.orm is not None:
    scores["orm"] = np.asarray(samples.orm, np.float64)
  return scores


def why_not(name: str, samples: ScoredSamples) -> str | None:
  """What the samples lack for a method; None: nothing."""
  if name in VOTES and samples.answer_ids is None:
    return 'no "answer"'
  if "prm_" in name and samples.step_probs is None:
    return 'no "rating_probs"'
  if name.endswith("orm") and samples.orm is None:
    return 'no "orm_score"'
  if name in VOTES and name.endswith("orm"):
    least = samples.orm[samples.valid].min(initial=0)
    if least < 0:
      return f'an "orm_score" is negative, {least:.6g}: no weight of a vote'
  return None


def choose(samples: ScoredSamples, names: Sequence[str], every_n: bool) -> tuple[list, list[str]]:
  """The methods to compute, and what to say about those left out.

  Args:
    samples: the candidates.
    names: methods asked for; none: the standard ones that the samples allow.
    every_n: curves at every N, where votes that nobody asked for would take too long.

  Raises:
    ValueError: a name is unknown, or the samples do not allow it.
  """
  missing = {name: reason for name in LABELS if (reason := why_not(name, samples))}
  for name in names:
    if name not in LABELS or name in missing:
      reason = f"the file has {missing[name]}" if name in missing else "unknown"
      if missing.get(name, "").startswith("an "):
        reason = missing[name]
      if name not in LABELS and (near := difflib.get_close_matches(name, LABELS, n=1)):
        reason += f" (nearest: {near[0]})"
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


def solve(
  samples: ScoredSamples,
  scores: dict[str, np.ndarray],
  names: Sequence[str],
  draws: Draws,
  progress: bool = False,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """How often each method is right.

  Returns:
    `[P, K]` expected correctness by each method, and for each vote its `[P, K]` Monte-Carlo
    standard error: zero where it is exact.
  """
  solved, vote_error = {}, {}
  votes = [name for name in names if name in VOTES]
  # The exact majority vote steadies weighted ones, so it comes first, wanted or not.
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
      score = ranking(name, samples, scores)
      solved[name] = agg.best_of_n(score, samples.correct, samples.valid, **draws.options)
    solved[name] = np.asarray(solved[name])
  return {name: solved[name] for name in names}, {name: vote_error[name] for name in votes}


def ranking(name: str, samples: ScoredSamples, scores: dict) -> np.ndarray | None:
  """The `[P, M]` score by which a method is a best-of-N; None: it is none."""
  if name == "oracle":
    return samples.correct.astype(np.float64)
  if name == "random":  # all tie
    return np.zeros(samples.correct.shape)
  return scores.get(name)


def _vote(name, samples, scores, draws, exact) -> tuple[np.ndarray, np.ndarray]:
  """`[P, K]` expected correctness of a vote, and its standard error."""
  candidates = (samples.answer_ids, samples.correct, samples.valid)
  (problems, pool), options = samples.correct.shape, draws.options
  if name == "majority":
    if problems * len(draws.n) > EXACT_VOTES or pool > EXACT_POOL:
      options |= {"key": draws.key, "permutations": draws.permutations}
  else:
    combine = "mean" if name.startswith("weighted_mean_") else "sum"
    score = scores[name.removeprefix("weighted_").removeprefix("mean_")]
    if "prm_" in name:
      # Only ratios matter: relative to the best, so that long products do not underflow.
      score = np.where(samples.valid, score, -np.inf)
      best = score.max(axis=1, keepdims=True)
      score = np.exp(score - np.where(np.isfinite(best), best, 0))
    options |= {
      "weights": np.where(samples.valid, score, 0),
      "combine": combine,
      "control": exact,
      "key": draws.key,
      "permutations": draws.permutations,
    }
  mean, error = agg.majority_vote(*candidates, **options)
  return np.asarray(mean), np.asarray(error)
