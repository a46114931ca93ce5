"""How good are the probabilities of single steps?  NumPy only; called from training too.

Every figure that a class's absence leaves undefined is None, so that it prints and stores as such.
"""

from __future__ import annotations

import numpy as np

from prm_jax.types import RATINGS

BINS = 10  # of the calibration error: equal widths over [0, 1]
TINY = float(np.finfo(np.float32).tiny)  # a probability below this counts as this in a logarithm


def step_metrics(probs, labels, bins: int = BINS) -> dict:
  """Metrics of step probabilities against step labels.

  Args:
    probs: `[n, 3]` class probabilities of the ratings -1, 0, 1, in that order.
    labels: `[n]` ratings in {-1, 0, 1}.
    bins: how many equal-width bins the calibration error has.

  Returns:
    count: n; count_by_class: of each label.
    nll: mean negative log likelihood, in nats.
    accuracy: of the most probable class; accuracy_by_class: among the steps of each label.
    auroc: area under the ROC of P(not -1) for label != -1: the chance that a random step that is
      not wrong scores above a random wrong one, ties counting half.
    ece: expected calibration error of P(not -1), the score that the paper multiplies: the mean
      over steps of |mean score - share not wrong| of the step's bin.

  Raises:
    ValueError: wrong shapes, or a label that is none of -1, 0, 1.
  """
  probs, labels = _checked(probs, labels, RATINGS)
  not_wrong = probs[:, 1:].sum(axis=1) if len(probs) else np.zeros(0)
  return _metrics(probs, labels, RATINGS, not_wrong, labels != -1, bins)


def outcome_metrics(probs, labels, bins: int = BINS) -> dict:
  """Metrics of solution probabilities against outcomes.

  Args:
    probs: `[n, 2]` probabilities of wrong and of right, in that order.
    labels: `[n]` outcomes, 0 wrong or 1 right.
    bins: as in `step_metrics`.

  Returns:
    The keys of `step_metrics`, for the classes 0 and 1; auroc and ece are of P(right).
  """
  probs, labels = _checked(probs, labels, (0, 1))
  return _metrics(probs, labels, (0, 1), probs[:, 1], labels == 1, bins)


def auroc(scores, positive) -> float | None:
  """Area under the ROC curve by ranks, ties counting half; None where a class is absent.

  Args:
    scores: `[n]` higher means more likely positive.
    positive: `[n]` bool.
  """
  scores, positive = np.asarray(scores, np.float64), np.asarray(positive, bool)
  right, wrong = int(positive.sum()), int((~positive).sum())
  if not right or not wrong:
    return None
  if np.isnan(scores).any():
    return float("nan")
  _, group, size = np.unique(scores, return_inverse=True, return_counts=True)
  mean_rank = np.cumsum(size) - (size - 1) / 2  # 1-based, shared by the tied
  above = mean_rank[group][positive].sum() - right * (right + 1) / 2
  return float(above / (right * wrong))


def calibration_error(scores, positive, bins: int = BINS) -> float | None:
  """Expected calibration error over equal-width bins of [0, 1]; None of nothing.

  Args:
    scores: `[n]` probabilities of being positive.
    positive: `[n]` bool.
    bins: how many.
  """
  scores, positive = np.asarray(scores, np.float64), np.asarray(positive, bool)
  if not scores.size:
    return None
  if np.isnan(scores).any():
    return float("nan")
  # Probabilities that add up to a hair over 1 belong to the last bin, as 1 does.
  bin_of = np.clip((scores * bins).astype(int), 0, bins - 1)
  gap = np.bincount(bin_of, scores - positive, minlength=bins)
  return float(np.abs(gap).sum() / scores.size)


def _checked(probs, labels, classes) -> tuple[np.ndarray, np.ndarray]:
  probs, labels = np.asarray(probs, np.float64), np.asarray(labels)
  if labels.ndim != 1 or probs.shape != (len(labels), len(classes)):
    raise ValueError(
      f"probs {probs.shape}, labels {labels.shape}: expected [n, {len(classes)}] and [n]"
    )
  unknown = ~np.isin(labels, classes)
  if unknown.any():
    raise ValueError(f"label {labels[unknown][0]}: expected one of {classes}")
  return probs, labels


def _metrics(probs, labels, classes, scores, positive, bins) -> dict:
  target = np.searchsorted(classes, labels)
  hit = probs.argmax(axis=1) == target
  likelihood = probs[np.arange(len(target)), target]
  return {
    "count": len(labels),
    "count_by_class": {str(c): int((labels == c).sum()) for c in classes},
    "nll": _mean(-np.log(np.maximum(likelihood, TINY))),
    "accuracy": _mean(hit),
    "accuracy_by_class": {str(c): _mean(hit[labels == c]) for c in classes},
    "auroc": auroc(scores, positive),
    "ece": calibration_error(scores, positive, bins),
  }


def _mean(values) -> float | None:
  return float(np.mean(values)) if len(values) else None
