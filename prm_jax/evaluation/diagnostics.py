"""Diagnostics of step scores: calibration, length bias, uncertainty, agreement of two models."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from prm_jax import aggregation as agg
from prm_jax import step_metrics
from prm_jax.evaluation.judged import Judged, first_below
from prm_jax.types import RATINGS

STEP_BINS = ((1, 1), (2, 2), (3, 3), (4, 5), (6, 8), (9, 12), (13, None))  # of the step's number


def diagnose(
  judged: Sequence[Judged], threshold: float, trees: Sequence[Judged] = ()
) -> dict[str, Any]:
  """Computes all diagnostics that the solutions allow, as JSON.

  Args:
    trees: the solutions with the alternatives of their steps, for diagnostics of single steps.

  Returns:
    calibration: see `calibration`.
    length_bias: see `length_bias`.
    minimum_at_last_step: share of solutions of two steps or more whose smallest score is the last;
      a high share suggests that the scores are about outcomes (arXiv:2501.07301, figure 8).
    right_answer_wrong_steps: of the n solutions with a right answer and a wrong step, the share
      with a step below the threshold (detected), and the share in which the first such step is the
      first wrong one (located).
    by_rating: mean score of the steps of each human rating, and Spearman's correlation of both.
    uncertainty: see `uncertainty`; only for an ensemble.
  """
  out = {
    "calibration": calibration(trees or judged),
    "length_bias": length_bias(judged),
    "minimum_at_last_step": step_metrics.mean(
      [each.scores.argmin() == len(each.scores) - 1 for each in judged if len(each.scores) > 1]
    ),
    "by_rating": by_rating(trees or judged),
  }
  lucky = [each for each in judged if each.answer_is_right and each.first_error >= 0]
  if lucky:
    predicted = [first_below(each.scores, threshold) for each in lucky]
    out["right_answer_wrong_steps"] = {
      "n": len(lucky),
      "detected": step_metrics.mean([step >= 0 for step in predicted]),
      "located": step_metrics.mean(
        [step == each.first_error for step, each in zip(predicted, lucky)]
      ),
    }
  of_ensemble = [[x for x in part if x.std is not None] for part in (judged, trees or judged)]
  if all(of_ensemble):
    out["uncertainty"] = uncertainty(*of_ensemble)
  return out


def steps_of(judged: Sequence[Judged]) -> dict[str, np.ndarray]:
  """Returns columns of all labelled steps.

  solution: index in `judged`; label; score; probs `[n, 3]`; not_wrong: 1 minus P(-1), the score if
  neutral counts as positive; number: of the step, from 1; std.
  """
  kept = [
    (s, i) for s, each in enumerate(judged) for i, x in enumerate(each.labels) if x is not None
  ]
  depths = [each.depths for each in judged]
  probs = np.array([judged[s].probs[i] for s, i in kept], float).reshape(-1, len(RATINGS))
  stds = [np.full(len(each.labels), np.nan) if each.std is None else each.std for each in judged]
  return {
    "solution": np.array([s for s, _ in kept], int),
    "label": np.array([judged[s].labels[i] for s, i in kept], int),
    "score": np.array([judged[s].scores[i] for s, i in kept], float),
    "probs": probs,
    "not_wrong": probs[:, 1:].sum(1),
    "number": 1 + np.array([depths[s][i] for s, i in kept], int),
    "std": np.array([stds[s][i] for s, i in kept], float),
  }


def calibration(judged: Sequence[Judged]) -> dict[str, Any]:
  """Returns the expected calibration error and the bins of its reliability diagram.

  `ece` and `bins` compare 1 - P(-1) with "not wrong".  `by_class` compares each class's probability
  with that class.  `by_step` has ranges of step numbers, each with the calibration error, the AUROC
  and the means of 1 - P(-1) and of "not wrong", without bins.
  """
  steps = steps_of(judged)
  right = steps["label"] >= 0
  out = step_metrics.calibration(steps["not_wrong"], right)
  out["by_class"] = {
    str(rating): step_metrics.calibration(steps["probs"][:, i], steps["label"] == rating)
    for i, rating in enumerate(RATINGS)
    if (steps["label"] == rating).any() or steps["probs"][:, i].any()
  }
  out["by_step"] = []
  for first, last in STEP_BINS:
    inside = (steps["number"] >= first) & (steps["number"] <= (last or np.inf))
    if inside.any():
      scores, positive = steps["not_wrong"][inside], right[inside]
      row = {"first": first, "last": last} | step_metrics.calibration(scores, positive)
      del row["bins"]
      row |= {"mean_score": float(scores.mean()), "share_not_wrong": float(positive.mean())}
      out["by_step"].append(row | {"auroc": step_metrics.auroc(scores, positive)})
  return out


def length_bias(judged: Sequence[Judged]) -> dict[str, Any]:
  """Returns Spearman's correlation of each reduction with the number of steps.

  "right" is among solutions without a wrong step, "wrong" among the others.  Both are 0 for a
  solution score that ignores length.
  """
  counts = np.array([len(each.scores) for each in judged])
  wrong = np.array([each.first_error >= 0 for each in judged])
  logs = np.log(np.maximum(np.concatenate([each.scores for each in judged]), step_metrics.TINY))
  solutions = np.repeat(np.arange(len(judged)), counts)
  with jax.enable_x64(True):
    reduced = np.asarray(agg.reduce_steps(logs, solutions, len(judged), agg.REDUCTIONS))
  return {
    name: {
      group: step_metrics.spearman(score[members], counts[members])
      for group, members in (("right", ~wrong), ("wrong", wrong))
    }
    for name, score in zip(agg.REDUCTIONS, reduced)
  }


def by_rating(judged: Sequence[Judged]) -> dict[str, Any]:
  """Returns the mean score by human rating, and the rank correlation of score and rating."""
  steps = steps_of(judged)
  rows = {}
  for rating in RATINGS:
    scores = steps["score"][steps["label"] == rating]
    if len(scores):
      rows[str(rating)] = {"count": len(scores), "mean_score": float(scores.mean())}
  return {"ratings": rows, "spearman": step_metrics.spearman(steps["score"], steps["label"])}


def uncertainty(judged: Sequence[Judged], trees: Sequence[Judged]) -> dict[str, Any]:
  """Measures how well the standard deviation over an ensemble's heads predicts its errors.

  `bins`: the labelled steps by quintile of standard deviation (equal ones share a bin), with the
  share of wrong decisions at 0.5, the calibration error and the AUROC of each.  `error_auroc`: the
  AUROC with which the deviation predicts wrong decisions.  `certain`: the share of solutions that
  ActPRM would trust (`step_metrics.certain`), and the share of right decisions among their steps.
  """
  steps = steps_of(trees)
  right = steps["label"] >= 0
  mistaken = (steps["not_wrong"] >= 0.5) != right
  edges = np.quantile(steps["std"], [0.2, 0.4, 0.6, 0.8], method="inverted_cdf")
  quintile, bins = np.searchsorted(edges, steps["std"]), []
  for part in (np.flatnonzero(quintile == i) for i in range(5)):
    if len(part):
      entry = {"count": len(part), "mean_std": float(steps["std"][part].mean())}
      entry["wrong_decisions"] = float(mistaken[part].mean())
      entry["ece"] = step_metrics.calibration(steps["not_wrong"][part], right[part])["ece"]
      bins.append(entry | {"auroc": step_metrics.auroc(steps["not_wrong"][part], right[part])})
  sure = [each for each in judged if step_metrics.certain(each.scores, each.std)]
  trusted = steps_of(sure)
  hits = (trusted["not_wrong"] >= 0.5) == (trusted["label"] >= 0)
  return {
    "bins": bins,
    "error_auroc": step_metrics.auroc(steps["std"], mistaken),
    "certain": {"share": len(sure) / len(judged), "right_decisions": step_metrics.mean(hits)},
  }


def agreement(a: Sequence[Judged], b: Sequence[Judged], thresholds: Sequence[float]) -> dict:
  """Measures how far two models agree on the steps of the same solutions.

  Returns Spearman's and Pearson's correlation of their scores, and the share of equal decisions
  and Cohen's kappa of the decisions (a score below the model's own threshold).
  """
  scores = [np.concatenate([each.scores for each in judged]) for judged in (a, b)]
  decisions = [values < threshold for values, threshold in zip(scores, thresholds)]
  spread = all(len(values) > 1 and values.std() > 0 for values in scores)
  return {
    "steps": len(scores[0]),
    "spearman": step_metrics.spearman(*scores),
    "pearson": float(np.corrcoef(*scores)[0, 1]) if spread else None,
    "same_decision": float((decisions[0] == decisions[1]).mean()),
    "kappa": step_metrics.kappa(*decisions),
  }


def table(found: dict[str, Any]) -> list[str]:
  """Returns the main diagnostics as lines for a terminal."""
  number = lambda x: "n/a" if x is None else f"{x:.3f}"
  lines = [
    f"calibration error {number(found['calibration']['ece'])}; the smallest score is the last in "
    f"{number(found['minimum_at_last_step'])} of the solutions"
  ]
  bias = ", ".join(
    f"{name} {number(pair['right'])} and {number(pair['wrong'])}"
    for name, pair in found["length_bias"].items()
    if {*pair.values()} != {None}
  )
  lines.append(f"rank correlation with length (right and wrong solutions): {bias or 'n/a'}")
  if lucky := found.get("right_answer_wrong_steps"):
    lines.append(
      f"right answers by wrong steps: {lucky['n']:,}, detected {number(lucky['detected'])}, "
      f"located {number(lucky['located'])}"
    )
  if unsure := found.get("uncertainty"):
    each = (f"{number(x['wrong_decisions'])} at {x['mean_std']:.2g}" for x in unsure["bins"])
    lines.append(f"wrong decisions by quintile of uncertainty (mean std): {', '.join(each)}")
  return lines
