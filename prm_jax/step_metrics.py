"""Metrics of step probabilities: AUROC, calibration, accuracy by class; None where undefined."""

import numpy as np

from prm_jax.types import RATINGS

LABELS = {"process": RATINGS, "outcome": (0, 1)}  # by objective and class, wrong first
BINS = 10  # of the calibration error: equal widths over [0, 1]
TINY = float(np.finfo(np.float32).tiny)  # lower bound of a probability in a logarithm


def step_metrics(probs, labels, classes=RATINGS) -> dict:
  """Metrics of the probabilities of steps (or of solutions) against their labels.

  Args:
    probs: `[n, C]` probabilities of `classes`, in that order.
    labels: `[n]` members of `classes`.
    classes: `[C]`, one of `LABELS`.  Of an outcome, 0 is what -1 is of a step below.

  Returns:
    count: n; count_by_class: by label.
    nll: mean negative log-likelihood, in nats.
    accuracy: of the most probable class; accuracy_by_class: among the steps of each label.
    auroc: area under the ROC curve of P(not -1) for label != -1: the probability that a random
      step that is not wrong scores above a random wrong one, ties counting half.
    ece: expected calibration error of P(not -1), the score that the paper multiplies: the mean
      over steps of |mean score - share not wrong| of the step's bin.

  Raises:
    ValueError: wrong shapes, or a label that is none of the classes.
  """
  probs, labels = np.asarray(probs, np.float64), np.asarray(labels)
  if labels.ndim != 1 or probs.shape != (len(labels), len(classes)):
    shapes = f"probs {probs.shape}, labels {labels.shape}"
    raise ValueError(f"{shapes}: expected [n, {len(classes)}] and [n]")
  if len(unknown := labels[~np.isin(labels, classes)]):
    raise ValueError(f"label {unknown[0]}: expected one of {classes}")
  target = np.searchsorted(classes, labels)
  hit = probs.argmax(axis=1) == target
  scores, positive = probs[:, 1:].sum(axis=1), target > 0
  gaps = np.bincount(_bin(scores), scores - positive)  # by bin: the sum of score - outcome
  return {
    "count": len(labels),
    "count_by_class": {str(c): int((labels == c).sum()) for c in classes},
    "nll": _mean(-np.log(np.maximum(probs[np.arange(len(target)), target], TINY))),
    "accuracy": _mean(hit),
    "accuracy_by_class": {str(c): _mean(hit[labels == c]) for c in classes},
    "auroc": auroc(scores, positive),
    "ece": float(np.abs(gaps).sum() / len(scores)) if len(scores) else None,
  }


def auroc(scores, positive) -> float | None:
  """Area under the ROC curve of `[n]` scores; None where a class is absent.

  Ties count half; `positive` is bool `[n]`, and a higher score means more likely positive.
  """
  import scipy.stats  # takes most of a second, which jobs without an evaluation need not spend

  positive = np.asarray(positive, bool)
  right, wrong = positive.sum(), (~positive).sum()
  if not right or not wrong:
    return None
  ranks = scipy.stats.rankdata(np.asarray(scores, np.float64))  # 1-based; NaN if any score is
  return float((ranks[positive].sum() - right * (right + 1) / 2) / (right * wrong))


def calibration(scores: np.ndarray, positive: np.ndarray) -> list[dict]:
  """The bins of the calibration error that are not empty, as rows of a reliability diagram."""
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
  """The bin of each score, 0..BINS-1; 1 and sums a hair over 1 are in the last."""
  return np.clip((np.nan_to_num(scores) * BINS).astype(int), 0, BINS - 1)


def _mean(values) -> float | None:
  return float(np.mean(values)) if len(values) else None
