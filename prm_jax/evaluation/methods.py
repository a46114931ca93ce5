"""The reranking methods: their names, the keys that each needs, and how often each is right."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np

from prm_jax import aggregation as agg
from prm_jax.evaluation.sample_arrays import ScoredSamples
from prm_jax.runtime.progress import Progress

RANKED = {  # labels of the methods that pick the best-scored candidate
  **{f"prm_{how}": f"PRM, {how}" for how in agg.REDUCTIONS},
  "prm_product": "PRM",
  "prm_min": "PRM, weakest step",
  "prm_mean": "PRM, mean of steps",
  "prm_last": "PRM, last step",
  "prm_soft_min": "PRM, soft minimum",
  "orm": "ORM",
}
OF_STEPS = frozenset(RANKED) - {"orm"}
VOTE_WEIGHTS = {  # from a score to the logarithm of its vote's weight
  "sigmoid": lambda score: -np.logaddexp(0, -score),
  "softmax": lambda score: score,
}
LOGITS = "for logits, use --vote_weight=sigmoid or softmax"
# Majority votes are exact up to this many (problem, N) pairs and this many candidates of a problem.
# A pair takes about a millisecond, and more with many candidates.
EXACT_VOTES, EXACT_POOL = 20_000, 100_000


class Method(NamedTuple):
  """A way to pick one of the candidates that are drawn."""

  label: str  # in figures and pages
  score: str = ""  # the score that ranks the candidates or weighs their votes
  combine: Literal["", "sum", "mean"] = ""  # of a vote: how the weights of an answer join

  @property
  def has_vote_weight(self) -> bool:
    """Whether --vote_weight applies: the method is a vote by a score of the whole solution."""
    return bool(self.combine) and self.score not in {"", *OF_STEPS}


class Own(NamedTuple):
  """A column of the input that the user ranks by."""

  column: str
  label: str


def catalogue(own: Mapping[str, Own] = {}) -> dict[str, Method]:
  """Returns all methods by name, those of the user's own scores among them."""
  ranked = RANKED | {name: each.label for name, each in own.items()}
  votes = {"majority": Method("Majority voting", combine="sum")}
  for name, label in ranked.items():
    votes[f"weighted_{name}"] = Method(f"{label}-weighted voting", name, "sum")
  for name, label in ranked.items():
    votes[f"weighted_mean_{name}"] = Method(f"Voting by mean {label}", name, "mean")
  others = {"oracle": "Oracle (any right)", "random": "Random pick", "all_correct": "All N right"}
  return (
    {name: Method(label, name) for name, label in ranked.items()}
    | votes
    | {name: Method(label, name) for name, label in others.items()}
  )


def standard(own: Iterable[str] = ()) -> list[str]:
  """Returns the methods that run by default, as far as the file allows them."""
  votes = ["majority", *(f"weighted_{name}" for name in ("prm_product", "orm", *own))]
  return [*RANKED, *own, *votes, "oracle", "random"]


def own_scores(
  samples: ScoredSamples, names: Sequence[str] = (), labels: Sequence[str] = ()
) -> dict[str, Own]:
  """Returns the user's own scores by the name of the method that ranks by each.

  The method has the column's name, with `score_` before it where that name is taken.

  Args:
    names: the columns to rank by; none: all that the samples have.
    labels: one for each column; none: the names.

  Raises:
    ValueError: the samples lack a column, or the labels are not one for each, all different.
  """
  names = tuple(names) or samples.score_names
  if lacking := [name for name in names if name not in samples.score_names]:
    columns = ", ".join(samples.score_names) or "none"
    raise ValueError(
      f"--score {lacking[0]}: not among the columns that were read ({columns}); a bundle has those "
      "that --score named when it was written"
    )
  labels = tuple(labels) or names
  if len(labels) != len(names) or len({*labels}) < len(labels) or len({*names}) < len(names):
    raise ValueError(
      f"--score {' '.join(names)} --label {' '.join(map(repr, labels))}: expected different "
      "columns and as many different labels"
    )
  own: dict[str, Own] = {}
  for each in map(Own, names, labels):
    taken, name = catalogue(own), each.column
    while taken.keys() & {name, f"weighted_{name}", f"weighted_mean_{name}"}:
      name = f"score_{name}"
    own[name] = each
  return own


def choose(
  samples: ScoredSamples,
  scores: Mapping[str, np.ndarray],
  names: Sequence[str],
  every_n: bool,
  own: Mapping[str, Own] = {},
  vote_weight: str = "plain",
) -> tuple[dict[str, Method], list[str]]:
  """Returns the methods to compute by name, and notices about those left out.

  Args:
    names: methods asked for; none: those of `standard` that the samples allow.
    every_n: the curves have every N.  Votes then take long, and are computed only if asked for.

  Raises:
    ValueError: a name is unknown, or the samples do not allow it.
  """
  methods = catalogue(own)
  reasons = {name: _lacking(each, samples, scores, vote_weight) for name, each in methods.items()}
  allowed = [name for name, reason in reasons.items() if not reason]
  for name in names:
    if name not in allowed:
      reason = reasons.get(name, "unknown")
      raise ValueError(f"--methods {name}: {reason}; there are {', '.join(allowed)}")
  if names:
    return {name: methods[name] for name in names}, []
  notices = ['no candidate has "answer": no votes'] * (samples.answer_ids is None)
  negative = [name for name in ("orm", *own) if "negative" in (reasons[f"weighted_{name}"] or "")]
  if negative:
    columns = [own[name].column if name in own else "orm_score" for name in negative]
    some = " and some ".join(columns)
    notices.append(f"some {some} is negative and cannot weigh votes; {LOGITS}")
  votes = {name for name in allowed if methods[name].combine}
  if every_n and votes:
    notices.append("votes at every N take long and are left out; name them in --methods")
  chosen = [name for name in standard(own) if name in allowed and not (every_n and name in votes)]
  return {name: methods[name] for name in chosen}, notices


def _lacking(method: Method, samples: ScoredSamples, scores, vote_weight: str) -> str | None:
  """Says why the samples do not allow a method, or returns None if they do."""
  for key, values, needed in (
    ('"answer"', samples.answer_ids, method.combine),
    ('"rating_probs" or "step_scores"', samples.step_probs, method.score in OF_STEPS),
    ('"orm_score"', samples.orm, method.score == "orm"),
  ):
    if needed and values is None:
      return f"the file has no {key}"
  if method.has_vote_weight and vote_weight == "plain":
    least = scores[method.score][samples.valid].min(initial=0)
    if least < 0:
      return f"a score is negative, {least:.6g}, and cannot weigh a vote; {LOGITS}"
  return None


def solution_scores(
  samples: ScoredSamples, neutral: str = "positive", own: Mapping[str, Own] = {}
) -> dict[str, np.ndarray]:
  """Returns the scores that rank candidates: `oracle`, `random`, `prm_*`, `orm` and those of `own`.

  Each is `[P, M]` float64, higher is better; the PRM's are logarithms; NaN is padding.

  Args:
    neutral: how a neutral step counts, "positive" or "negative".
  """
  right = samples.correct.astype(np.float64)
  scores = {"oracle": right, "random": np.zeros_like(right)}  # a tie of all is a random pick
  if samples.step_probs is not None:
    slots = np.repeat(samples.slots, samples.step_counts)
    with jax.enable_x64(True):  # products of many steps may differ in their last digits only
      steps = agg.step_log_scores(samples.step_probs, neutral)
      reduced = agg.reduce_steps(steps, slots, samples.correct.size, agg.REDUCTIONS)
      for how, score in zip(agg.REDUCTIONS, np.asarray(reduced)):
        scores[f"prm_{how}"] = agg.join_ties(score.reshape(samples.correct.shape))
  if samples.orm is not None:
    scores["orm"] = samples.orm
  for name, each in own.items():
    scores[name] = samples.scores[samples.score_names.index(each.column)]
  return scores


def solve(
  samples: ScoredSamples,
  scores: Mapping[str, np.ndarray],
  chosen: Mapping[str, Method],
  draws: dict,
  orders: dict,
  vote_weight: str = "plain",
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """Computes the probability that each method's pick is right.

  Args:
    draws: `n` and `sizes` of `aggregation.best_of_n`.
    orders: `key` and `permutations` of `aggregation.majority_vote`, for votes that are sampled.
    vote_weight: the weight of a vote by a score of the whole solution: "plain", the score itself;
      "sigmoid" of the score; "softmax" of the score over the candidates that are drawn.

  Returns:
    `[P, K]` for each method, and for each vote its `[P, K]` Monte-Carlo standard error, zero where
    the vote is exact.
  """
  outcomes = (samples.correct, samples.valid)
  solved, vote_error = {}, {}
  votes = [name for name, method in chosen.items() if method.combine]
  # The exact majority vote is the control variate of the weighted votes, so it is computed first.
  majority = {"majority": Method("", combine="sum")} if votes else {}
  control = None
  bar = {"desc": "reranking", "unit": "methods", "leave": False}
  for name, method in Progress((majority | chosen).items(), **bar):
    if method.combine:
      options = draws | _vote(
        method, samples, scores, orders, len(draws["n"]), control, vote_weight
      )
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
  return {name: solved[name] for name in chosen}, {name: vote_error[name] for name in votes}


def _vote(method: Method, samples, scores, orders, values_of_n, control, vote_weight) -> dict:
  """Returns the options of `aggregation.majority_vote` for a vote."""
  problems, pool = samples.correct.shape
  if not method.score:
    exact = problems * values_of_n <= EXACT_VOTES and pool <= EXACT_POOL
    return {} if exact else orders
  score = scores[method.score]
  # The PRM's scores are logarithms of probabilities; the probability itself is the weight.
  logarithm = VOTE_WEIGHTS.get("softmax" if method.score in OF_STEPS else vote_weight)
  if logarithm is None:
    weights = np.where(samples.valid, score, 0)
  else:
    weights = vote_weights(logarithm(np.where(samples.valid, score, 0)), samples.valid)
  return orders | {"weights": weights, "combine": method.combine, "control": control}


def vote_weights(logarithms: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """Returns weights of votes `[P, M]` from their logarithms; zero for candidates without an answer.

  Only ratios of a problem's weights matter, so exp(score) is the softmax over any of its
  candidates.  The best score is subtracted: nothing overflows, and not all weights underflow.
  """
  score = np.where(valid, logarithms, -np.inf)
  best = score.max(axis=1, keepdims=True)
  with np.errstate(over="ignore"):
    return np.exp(score - np.where(np.isfinite(best), best, 0))
