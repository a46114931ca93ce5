"""Iterative retraining: each generation's model chooses what the next model is trained on.

The paper (section 4.2) saw instability here that it could not diagnose.  Each generation records
diagnostics: balance of the new labels, calibration, overlap of selections, and drift of scores.
"""

import functools
from typing import Any

import numpy as np

from prm_jax import step_metrics
from prm_jax.experiments.figures import Curve, Panel
from prm_jax.experiments.plan import Plan
from prm_jax.experiments.results import Results, Table, mean, number, percent
from prm_jax.experiments.study import Make, Place, Study

TITLE = "Iterative retraining"
QUESTION = (
  "Does it help to retrain the selector as labels come in? Each generation is trained anew on all "
  "labels so far. The next solutions to label are chosen by that model, by the first one, or at "
  "random."
)
PAPER = (
  "Section 4.2: iteratively retraining the selector was unstable, for reasons the authors could "
  "not diagnose, and its models were no better than those without. No figures are given."
)
ARMS = {
  "convincing": "most convincing, retrained selector",
  "frozen": "most convincing, first selector",
  "uniform": "uniform",
}
FIRST = "first"  # the model of generation 0, which all arms share
ADDED = 2  # solutions of each problem that a generation adds
DIAGNOSTICS = {
  "negative": "negative among new labels",
  "missed": "wrong steps that the labeller missed among them",
  "ece": "calibration error of steps",
  "overlap": "overlap with the last model's choice",
  "drift": "mean change of a solution's score",
  "rank_correlation": "rank correlation with the last scores",
  "score_right": "mean score, right answers",
  "score_wrong": "mean score, wrong answers",
}


def runs(plan: Plan) -> dict[str, Make]:
  """Returns the makers of a seed's results, each after those whose results it needs."""
  made: dict[str, Make] = {}
  for arm in ARMS:
    for g in range(plan.generations):
      made.setdefault(name(arm, g), functools.partial(_model, arm=arm, g=g))
  return made


def name(arm: str, generation: int) -> str:
  """Returns the name of a model.

  All arms share the first model; both selectors share the second, as the first model chose for it.
  """
  if generation == 0:
    return FIRST
  return f"{'convincing' if (arm, generation) == ('frozen', 1) else arm}-{generation}"


def _model(study: Study, model: str, arm: str, g: int) -> dict[str, Any]:
  """Trains, judges and diagnoses a generation's model; chooses the next solutions to label."""
  chosen = added = study.uniform(1)
  for k in range(g):
    added = [tuple(place) for place in study.stored(name(arm, k))["next"][arm]]
    chosen = chosen + added
  result = study.judged(model, "process", study.trees(chosen, "process"), f"generation {g}")
  chosen_next = {
    other: choice(study, FIRST if other == "frozen" else model, other, chosen)
    for other in ARMS
    if name(other, g) == model  # these arms share the model
  }
  labels = [rating for _, _, labels in study.solutions(added) for rating in labels]
  pool, errors = study.pool(model), study.errors(added)
  score = np.exp(pool.scores)
  result |= {
    "next": chosen_next,
    "missed": errors and errors["missed_share"],
    "negative": mean(np.array(labels) < 0),
    "score_right": mean(score[pool.correct]),
    "score_wrong": mean(score[~pool.correct]),
  }
  if g:
    last = name(arm, g - 1)
    before = study.pool(last).scores
    result["drift"] = mean(np.abs(score - np.exp(before)))
    result["rank_correlation"] = step_metrics.spearman(pool.scores, before)
    if arm == "convincing":
      by_last, by_this = {*choice(study, last, arm, chosen)}, {*chosen_next[arm]}
      result["overlap"] = len(by_last & by_this) / max(len(by_last | by_this), 1)
  return result


def choice(study: Study, model: str, arm: str, chosen: list[Place]) -> list[Place]:
  """Returns the next solutions to label, from those of the pool that are not chosen yet."""
  rule = "uniform" if arm == "uniform" else "convincing"
  return study.choice(model, rule, ADDED, study.seed + len(chosen), chosen)


def panels(results: Results) -> list[Panel]:
  """Returns panels of best-of-N by generation, and of three diagnostics."""
  last, generations = results.n[-1], range(results.plan["generations"])
  first = [
    Curve.at_last(label, generations, [results.curve(name(arm, g)) for g in generations])
    for arm, label in ARMS.items()
  ]
  # None becomes NaN, which is not drawn.
  means = lambda arm, key: np.array([results.mean(name(arm, g), key) for g in generations], float)
  out = [Panel(first, "generation", f"% problems solved (best-of-{last})", log=False)]
  for key in ("negative", "ece", "drift"):
    curves = [Curve(label, generations, means(arm, key)) for arm, label in ARMS.items()]
    out.append(Panel(curves, "generation", DIAGNOSTICS[key], log=False))
  return out


def tables(results: Results) -> list[Table]:
  """Returns the tables of page and screen."""
  last, generations = results.n[-1], range(results.plan["generations"])
  header = ["generation", *map(str, generations)]
  rows = [
    [label, *(percent(results.curve(name(arm, g))) for g in generations)]
    for arm, label in ARMS.items()
  ]
  for other in ("frozen", "uniform"):
    gains = (
      "the same model"
      if name(other, g) == name("convincing", g)
      else percent(results.minus(name("convincing", g), name(other, g)), sign=True)
      for g in generations[1:]
    )
    rows.append([f"retrained minus {ARMS[other]}", "", *gains])
  diagnostic = lambda arm, key, g: number(results.mean(name(arm, g), key))
  diagnostics = [
    [f"{label}: {ARMS[arm]}", *values]
    for key, label in DIAGNOSTICS.items()
    for arm in ARMS
    if any(values := [diagnostic(arm, key, g) for g in generations])
  ]
  return [
    Table(f"Best-of-{last}, % of problems, with 95 % intervals", header, rows),
    Table("Diagnostics, mean over seeds", header, diagnostics),
  ]
