"""Iterative retraining: the model of each generation chooses what the next is trained on.

The paper (section 4.2) saw instability here that it could not diagnose.  Each generation logs what
would: balance of the new labels, calibration, overlap of selections, and drift of scores.
"""

import functools
from typing import Any

import numpy as np
from scipy import stats

from prm_jax.experiments import workspace
from prm_jax.experiments.figures import Curve, Panel
from prm_jax.experiments.plan import Plan
from prm_jax.experiments.results import Results, Table, percent
from prm_jax.experiments.study import Place, Study
from prm_jax.supervision import active

TITLE = "Iterative retraining"
QUESTION = (
  "Does it help to retrain the selector as labels come in? Each generation is trained anew on all "
  "labels so far, scores the solutions of the pool that have none, and chooses the next ones."
)
PAPER = (
  "Section 4.2: iteratively retraining the selector was unstable, for reasons the authors could "
  "not diagnose, and its models were no better than those without. No figures are given."
)
ARMS = {"convincing": "Most convincing wrong answers", "uniform": "Uniform"}
ADDED = 2  # solutions of each problem that a generation adds
DIAGNOSTICS = {
  "negative": "negative among new labels",
  "ece": "calibration error of steps",
  "overlap": "overlap with the last model's choice",
  "drift": "mean change of a solution's score",
  "rank_correlation": "rank correlation with the last scores",
  "score_right": "mean score, right answers",
  "score_wrong": "mean score, wrong answers",
}


def runs(plan: Plan) -> list[str]:
  """Names of the results of a seed."""
  return [f"{arm}-{g}" for arm in ARMS for g in range(plan.generations)]


def run(study: Study) -> None:
  """Trains, judges and diagnoses every generation of one seed."""

  @functools.lru_cache(2)  # this generation's and the last one's, which takes long to score
  def scored(name: str) -> tuple[active.Pool, list[Place]]:
    return study.pool(workspace.load(study.space.directory / name))

  for arm in ARMS:
    chosen = added = study.uniform(1)
    for g in range(study.plan.generations):

      def make(arm=arm, g=g, chosen=chosen, added=added) -> dict[str, Any]:
        trees = study.process_trees(chosen)
        scorer = study.train(f"{arm}-{g}", "process", trees, f"experiment: generation {g}")
        now = scored(f"{arm}-{g}")
        last = scored(f"{arm}-{g - 1}")[0] if g else None
        return study.measured(scorer, trees) | diagnosed(study, *now, arm, chosen, added, last)

      added = [tuple(place) for place in study.space.result(f"{arm}-{g}", make)["next"]]
      chosen = chosen + added


def diagnosed(
  study: Study,
  pool: active.Pool,
  places: list[Place],
  arm: str,
  chosen: list[Place],
  added: list[Place],
  last: active.Pool | None,
) -> dict[str, Any]:
  """What the model chooses next, and the diagnostics of `DIAGNOSTICS`.

  Args:
    pool: the pool, as the model scores it; `last`: as the model before it does.
    places: of the pool's candidates.
    chosen: what the model is trained on; `added`: the last of them.
  """
  labels = [rating for _, _, labels in study.solutions(added) for rating in labels.ratings]
  score = np.exp(pool.scores)
  found = {
    "negative": float(np.mean(np.array(labels) < 0)),
    "score_right": mean(score[pool.correct]),
    "score_wrong": mean(score[~pool.correct]),
  }

  def choice(pool: active.Pool) -> list[Place]:
    known = {*chosen}
    left = np.flatnonzero([place not in known for place in places])
    at = active.select(pool.subset(left), arm, ADDED, study.space.seed + len(chosen))
    return [places[i] for i in left[at]]

  found["next"] = choice(pool)
  if last is not None:
    then, now = {*choice(last)}, {*found["next"]}
    if arm != "uniform":  # whose choice does not depend on the model
      found["overlap"] = len(then & now) / max(len(then | now), 1)
    found["drift"] = mean(np.abs(score - np.exp(last.scores)))
    found["rank_correlation"] = float(stats.spearmanr(pool.scores, last.scores).statistic)
  return found


def mean(values: np.ndarray) -> float | None:
  return float(values.mean()) if len(values) else None


def summarise(results: Results) -> dict[str, Any]:
  """Curves and diagnostics of each generation."""
  names = [f"{arm}-{g}" for arm in ARMS for g in range(results.plan["generations"])]
  curves = {name: results.accuracy(name) for name in names}
  return {
    "curves": {name: results.intervals(curve) for name, curve in curves.items()},
    "differences": {
      str(g): results.intervals(curves[f"convincing-{g}"] - curves[f"uniform-{g}"])
      for g in range(results.plan["generations"])
    },
    "solutions": {name: results.mean(name, "solutions") for name in names},
    "diagnostics": {
      name: {key: results.values(name, key) for key in DIAGNOSTICS} for name in names
    },
  }


def panels(results: Results, summary: dict[str, Any]) -> list[Panel]:
  """Best-of-N by generation, and two diagnostics."""
  last, generations = results.n[-1], range(results.plan["generations"])
  first = [
    Curve.at_last(label, generations, [summary["curves"][f"{arm}-{g}"] for g in generations])
    for arm, label in ARMS.items()
  ]
  diagnostic = lambda arm, key: np.array(
    [np.mean(summary["diagnostics"][f"{arm}-{g}"][key] or [np.nan]) for g in generations]
  )
  second = [
    Curve(f"{DIAGNOSTICS[key]}, {arm}", generations, diagnostic(arm, key))
    for key in ("negative", "overlap", "drift")
    for arm in ARMS
  ]
  return [
    Panel(first, "generation", f"% problems solved (best-of-{last})", log=False),
    Panel(second, "generation", "share, or probability", log=False),
  ]


def tables(results: Results, summary: dict[str, Any]) -> list[Table]:
  """Tables of the page and the screen."""
  last, generations = results.n[-1], range(results.plan["generations"])
  header = ["generation", *map(str, generations)]
  rows = [
    [label, *(percent(summary["curves"][f"{arm}-{g}"]) for g in generations)]
    for arm, label in ARMS.items()
  ]
  rows.append(
    ["difference", *(percent(summary["differences"][str(g)], sign=True) for g in generations)]
  )
  text = lambda values: f"{np.mean(values):.3f}" if values else ""
  diagnostics = [
    [f"{label}, {arm}"] + [text(summary["diagnostics"][f"{arm}-{g}"][key]) for g in generations]
    for key, label in DIAGNOSTICS.items()
    for arm in ARMS
  ]
  return [
    Table(f"Best-of-{last}, % of problems, with 95 % intervals", header, rows),
    Table("Diagnostics, mean over seeds", header, diagnostics),
  ]
