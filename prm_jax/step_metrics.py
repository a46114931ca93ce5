"""Metrics of step probabilities: AUROC, calibration, accuracy by class; used in training too.

A metric that the absence of a class leaves undefined is None.
"""

from __future__ import annotations

import numpy as np

from prm_jax.types import RATINGS

BINS = 10  # of the calibration error: equal widths over [0, 1]
TINY = float(np.finfo(np.float32).tiny)  # lower bound of a probability in a logarithm


def step_metrics(probs, labels) -> dict:
  """Metrics of step probabilities against step labels.

  Args:
    probs: `[n, 3]` class probabilities of the ratings -1, 0, 1, in that order.
    labels: `[n]` ratings in {-1, 0, 1}.

  Returns:
    count: n; count_by_class: by label.
    nll: mean negative log-likelihood, in nats.
    accuracy: of the most probable class; accuracy_by_class: among the steps of each label.
    auroc: area under the ROC curve of P(not -1) for label != -1: the probability that a random
      step that is not wrong scores above a random wrong one, ties counting half.
    ece: expected calibration error of P(not -1), the score that the paper multiplies: the mean
      over steps of |mean score - share not wrong| of the step's bin.

  Raises:
    ValueError: wrong shapes, or a label other than -1, 0, 1.
  """
  probs, labels = _checked(probs, labels, RATINGS)
  not_wrong = probs[:, 1:].sum(axis=1) if len(probs) else np.zeros(0)
  return _metrics(probs, labels, RATINGS, not_wrong, labels != -1)


def outcome_metrics(probs, labels) -> dict:
  """Metrics of solution probabilities against outcomes.

  Args:
    probs: `[n, 2]` probabilities of wrong and of right, in that order.
    labels: `[n]` outcomes, 0 wrong or 1 right.

  Returns:
    The keys of `step_metrics`, for the classes 0 and 1; auroc and ece are of P(right).
  """
  probs, labels = _checked(probs, labels, (0, 1))
  return _metrics(probs, labels, (0, 1), probs[:, 1], labels == 1)


def auroc(scores, positive) -> float | None:
  """Area under the ROC curve, ties counting half; None where a class is absent.

  Args:
    scores: `[n]` higher means more likely positive.
    positive: `[n]` bool.
  """
  import scipy.stats  # takes most of a second, which jobs without an evaluation need not spend

  positive = np.asarray(positive, bool)
  right, wrong = int(positive.sum()), int((~positive).sum())
  if not right or not wrong:
    return None
  ranks = scipy.stats.rankdata(np.asarray(scores, np.float64))  # 1-based; NaN if any score is
  return float((ranks[positive].sum() - right * (right + 1) / 2) / (right * wrong))


def calibration_error(scores, positive) -> float | None:
  """Expected calibration error over equal-width bins of [0, 1]; None for no scores.

  Args:
    scores: `[n]` probabilities of being positive.
    positive: `[n]` bool.
  """
  scores, positive = np.asarray(scores, np.float64), np.asarray(positive, bool)
  if not scores.size:
    return None
  if np.isnan(scores).any():
    return float("nan")
  gap = np.bincount(_bin(scores), scores - positive, minlength=BINS)
  return float(np.abs(gap).sum() / scores.size)


def calibration(scores: np.ndarray, positive: np.ndarray) -> list[dict]:
  """The bins of `calibration_error` that are not empty, as rows of a reliability diagram."""
  bin_of = _bin(scores)
  return [
    {
      "low": b / BINS,
      "high": (b + 1) / BINS,
      "count": int((bin_of == b).sum()),
      "mean_probability": float(scores[bin_of == b].mean()),
      "share_not_wrong": float(positive[bin_of == b].mean()),
    }
    for b in np.unique(bin_of)
  ]


def _bin(scores: np.ndarray) -> np.ndarray:
  """The bin of each score, 0..BINS-1."""
  # Probabilities that add up to a hair over 1 belong to the last bin, as 1 does.
  return np.clip((scores * BINS).astype(int), 0, BINS - 1)


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


def _metrics(probs, labels, classes, scores, positive) -> dict:
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
    "ece": calibration_error(scores, positive),
  }


def _mean(values) -> float | None:
  return float(np.mean(values)) if len(values) else None
