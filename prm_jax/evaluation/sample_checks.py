"""Checks of scored samples: what a reader of their curves must know."""

import numpy as np

from prm_jax.evaluation.sample_arrays import ScoredSamples

SCORE_TOLERANCE = 1e-3  # between a file's prm_score and its rating_probs, which scorers round


def unanswered(samples: ScoredSamples) -> list[str]:
  """Says how many candidates have no answer, if any."""
  count = int(len(samples.slots) - samples.valid.sum())
  return [f"{count} candidates have no answer: they may be drawn, but are never picked"] * bool(
    count
  )


def graded_both_ways(samples: ScoredSamples) -> list[str]:
  """Warns of equal answers to a problem of which one is graded right and another wrong, if any."""
  if samples.answer_ids is None:
    return []
  (problems, most), valid = samples.correct.shape, samples.valid
  answers = np.arange(problems)[:, None] * most + samples.answer_ids  # distinct over the problems
  both = np.intersect1d(answers[valid & samples.correct], answers[valid & ~samples.correct])
  if not len(both):
    return []
  first, second = (
    samples.where(*np.argwhere(valid & (answers == both[0]) & graded)[0])
    for graded in (samples.correct, ~samples.correct)
  )
  return [
    f"warning: the answers at {first} and {second} are equal, but only the first is graded right "
    f"({len(both)} such answers); a vote counts such an answer as right in proportion"
  ]


def contradictions(samples: ScoredSamples, scores: dict[str, np.ndarray]) -> list[str]:
  """Warns of a prm_score that is not the product of the line's steps, if there is any."""
  gap = score_gap(samples, scores)
  if not len(wrong := np.argwhere(gap > SCORE_TOLERANCE)):
    return []
  p, m = min(map(tuple, wrong), key=lambda slot: tuple(samples.places[slot][0]))
  product = np.exp(scores["prm_product"][p, m])
  return [
    f"warning: {samples.where(p, m)}: prm_score is {samples.prm_score[p, m]:.6g}, but the "
    f"product of its step scores is {product:.6g} ({len(wrong)} such lines); "
    "another reduction, or neutral counted otherwise?  The curves use the steps"
  ]


def score_gap(samples: ScoredSamples, scores: dict[str, np.ndarray]) -> np.ndarray:
  """Returns how far prm_score is from the product of steps `[P, M]`; NaN where one is missing."""
  product = np.exp(scores.get("prm_product", np.full(samples.correct.shape, np.nan)))
  return np.abs(product - samples.prm_score)
