"""A search of learning rate and updates for each objective, on seeds that are not reported."""

from typing import Any

import numpy as np

from prm_jax.experiments.figures import Curve, Panel
from prm_jax.experiments.plan import Plan
from prm_jax.experiments.results import Results, Table, percent
from prm_jax.experiments.study import Study

TITLE = "Hyper-parameter search"
QUESTION = (
  "Is the outcome model as strong as it can be? Each objective has its own search of learning rate "
  "and updates, on the largest training set."
)
PAPER = (
  "Appendix E and F.1: low learning rates mattered for both, and both were swept; the values are "
  "not given. The ORM has 1 epoch, no dropout and no language-model loss."
)
ARMS = {
  "process": "Process supervision",
  "outcome": "Outcome supervision, by final answer",
}


def settings(plan: Plan | dict[str, Any]) -> list[tuple[float, int]]:
  """(learning rate, updates) of the search."""
  get = plan.get if isinstance(plan, dict) else lambda name: getattr(plan, name)
  return [(rate, steps) for rate in get("learning_rates") for steps in get("updates")]


def name(arm: str, rate: float, steps: int) -> str:
  return f"{arm}-{rate:g}-{steps}"


def runs(plan: Plan) -> list[str]:
  """Names of the results of a seed."""
  return [name(arm, *each) for arm in ARMS for each in settings(plan)]


def run(study: Study) -> None:
  """Trains and judges the models of one seed."""
  chosen = study.uniform(study.plan.samples[-1])
  trees = {
    "process": lambda: study.process_trees(chosen),
    "outcome": lambda: study.outcome_trees(chosen, by_labeller=False),
  }
  for arm, of in trees.items():
    for rate, steps in settings(study.plan):
      changes = {"learning_rate": rate, "steps": steps}
      study.judged(name(arm, rate, steps), arm, of, "experiment: tuning", **changes)


def summarise(results: Results) -> dict[str, Any]:
  """Best-of-N of every setting, and the best one of each objective by the mean over N."""
  curves = {
    name(arm, *each): results.accuracy(name(arm, *each))
    for arm in ARMS
    for each in settings(results.plan)
  }
  best = {
    arm: max(settings(results.plan), key=lambda each, arm=arm: curves[name(arm, *each)].mean())
    for arm in ARMS
  }
  return {
    "curves": {key: results.intervals(curve) for key, curve in curves.items()},
    "best": {arm: {"learning_rate": rate, "updates": n} for arm, (rate, n) in best.items()},
  }


def panels(results: Results, summary: dict[str, Any]) -> list[Panel]:
  """Best-of-N at the largest N over updates, one line for each learning rate."""
  out, last = [], results.n[-1]
  for arm, label in ARMS.items():
    curves = []
    for rate in results.plan["learning_rates"]:
      found = [summary["curves"][name(arm, rate, n)] for n in results.plan["updates"]]
      curves.append(Curve.at_last(f"learning rate {rate:g}", results.plan["updates"], found))
    out.append(Panel(curves, f"updates: {label.lower()}", f"% problems solved (best-of-{last})"))
  return out


def tables(results: Results, summary: dict[str, Any]) -> list[Table]:
  """Mean over all N, by which the best is chosen, and best-of-N at the largest."""
  rows = [
    [
      label,
      f"{rate:g}",
      f"{steps:,}",
      f"{100 * np.mean(found['mean']):.1f}",
      percent(found),
      "best" if summary["best"][arm] == {"learning_rate": rate, "updates": steps} else "",
    ]
    for arm, label in ARMS.items()
    for rate, steps in settings(results.plan)
    for found in [summary["curves"][name(arm, rate, steps)]]
  ]
  header = [
    "objective",
    "learning rate",
    "updates",
    "mean over N",
    f"best-of-{results.n[-1]}, %",
    "",
  ]
  return [Table("% of problems solved", header, rows)]
