"""Metrics of step probabilities: AUROC, calibration, accuracy by class; None if undefined."""

import numpy as np

from prm_jax.types import RATINGS

BINS = 10  # of the calibration error: equal widths over [0, 1]
SURE, DEVIATION = (0.1, 0.9), 0.01  # limits of P(right), and of its deviation, at a sure step
TINY = float(np.finfo(np.float32).tiny)  # lower bound of a probability in a logarithm


def step_metrics(probs, labels, classes=RATINGS) -> dict:
  """Returns metrics of the probabilities of steps (or of solutions) against their labels.

  Args:
    probs: `[n, C]` probabilities of `classes`, in that order.
    labels: `[n]` members of `classes`; or `[n, C]` weights of the classes, from soft labels or
      counts.  The label is then the class of the largest weight, the last of equal ones.
    classes: `[C]`, wrong first: -1 for steps, 0 for outcomes (read 0 for -1 below).

  Returns:
    count: n; count_by_class: by label.
    nll: mean negative log-likelihood, in nats.
    accuracy: of the most probable class; accuracy_by_class: among the steps of each label.
    auroc: area under the ROC curve of P(not -1) for label != -1: the probability that a random
      step that is not wrong scores above a random wrong one, ties counting half.
    ece: expected calibration error of P(not -1), the score that the paper multiplies: the mean
      over steps of |mean score - share not wrong| of the step's bin.  `ece` and `nll` weight the
      steps: a label of n rollouts counts n times.

  Raises:
    ValueError: the shapes do not fit, or a label is not among the classes.
  """
  probs, labels = np.asarray(probs, np.float64), np.asarray(labels)
  if labels.ndim == 1 and len(unknown := labels[~np.isin(labels, classes)]):
    raise ValueError(f"label {unknown[0]}: expected one of {classes}")
  weights = labels[:, None] == np.asarray(classes) if labels.ndim == 1 else labels
  weights = weights.astype(np.float64)
  if weights.ndim != 2 or not probs.shape == weights.shape == (len(labels), len(classes)):
    shapes = f"probs {probs.shape}, labels {labels.shape}"
    raise ValueError(f"{shapes}: expected probs [n, {len(classes)}], labels [n] or like probs")
  target = len(classes) - 1 - weights[:, ::-1].argmax(axis=1)
  hit, total = probs.argmax(axis=1) == target, weights.sum()
  scores, rollouts = probs[:, 1:].sum(axis=1), weights.sum(axis=1)
  # Sums of score - outcome, by bin.
  gaps = np.bincount(bins(scores), rollouts * scores - weights[:, 1:].sum(axis=1))
  return {
    "count": len(target),
    "count_by_class": {str(c): int((target == i).sum()) for i, c in enumerate(classes)},
    "nll": float((-np.log(np.maximum(probs, TINY)) * weights).sum() / total) if total else None,
    "accuracy": mean(hit),
    "accuracy_by_class": {str(c): mean(hit[target == i]) for i, c in enumerate(classes)},
    "auroc": auroc(scores, target > 0),
    "ece": float(np.abs(gaps).sum() / total) if total else None,
  }


def certain(right, deviation) -> bool:
  """Returns whether an ensemble is sure of a solution's steps, up to the first surely wrong one.

  The later steps would have no labels.  A step is sure if P(right) is at least 0.9 or at most 0.1,
  and the standard deviation over the heads is at most 0.01 (ActPRM, arXiv:2504.10559).

  Args:
    right: mean of P(right) over the heads, `[T]`.
    deviation: standard deviation of P(right) over the heads, `[T]`.
  """
  right, deviation = np.asarray(right), np.asarray(deviation)
  doubt = ((right > SURE[0]) & (right < SURE[1])) | (deviation > DEVIATION)
  wrong = np.flatnonzero(~doubt & (right <= SURE[0]))
  return not doubt[: wrong[0] if len(wrong) else None].any()


def auroc(scores, positive) -> float | None:
  """Returns the area under the ROC curve of `[n]` scores; None if a class is absent.

  Ties count half; `positive` is bool `[n]`, and a higher score means more likely positive.
  """
  import scipy.stats  # takes most of a second, which only evaluations should spend

  positive = np.asarray(positive, bool)
  right, wrong = positive.sum(), (~positive).sum()
  if not right or not wrong:
    return None
  ranks = scipy.stats.rankdata(np.asarray(scores, np.float64))  # 1-based; NaN if any score is
  return float((ranks[positive].sum() - right * (right + 1) / 2) / (right * wrong))


def calibration(scores: np.ndarray, positive: np.ndarray) -> dict:
  """Returns the calibration error of scores `[n]` against bool `[n]`, and its bins.

  Returns:
    count: n; ece: the error, None without scores; bins: the rows of a reliability diagram, without
      empty ones.
  """
  bin_of = bins(scores)
  rows = [
    {
      "low": b / BINS,
      "high": (b + 1) / BINS,
      "count": int((bin_of == b).sum()),
      "mean_probability": float(scores[bin_of == b].mean()),
      "share_not_wrong": float(positive[bin_of == b].mean()),
    }
    for b in np.unique(bin_of)
  ]
  gap = sum(b["count"] * abs(b["mean_probability"] - b["share_not_wrong"]) for b in rows)
  count = len(scores)
  return {"count": count, "ece": gap / count if count else None, "bins": rows}


def bins(scores: np.ndarray) -> np.ndarray:
  """Returns each score's bin, 0..BINS-1; the last includes 1 and sums that round above it."""
  return np.clip((np.nan_to_num(scores) * BINS).astype(int), 0, BINS - 1)


def mean(values) -> float | None:
  """Returns the mean; None if there are no values."""
  return float(np.mean(values)) if len(values) else None


def kappa(a, b) -> float | None:
  """Returns Cohen's kappa, the agreement beyond chance of two labellers on the same items `[n]`.

  It is 1 at most; None if both give every item the same label, or there is none.
  """
  a, b = np.asarray(a), np.asarray(b)
  if not a.size:
    return None
  agreement = np.mean(a == b)
  chance = sum(np.mean(a == label) * np.mean(b == label) for label in np.union1d(a, b))
  return float((agreement - chance) / (1 - chance)) if chance < 1 else None


def spearman(x, y) -> float | None:
  """Returns Spearman's rank correlation; None if either side is constant."""
  import scipy.stats  # takes most of a second

  if min(np.unique(x).size, np.unique(y).size) < 2:  # not ptp: a log score may be -inf
    return None
  return float(scipy.stats.spearmanr(x, y).statistic)
