"""A search of hyper-parameters for each objective, on seeds that are not reported."""

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from prm_jax.experiments.figures import Curve, Panel
from prm_jax.experiments.plan import Plan
from prm_jax.experiments.results import Results, Table, percent
from prm_jax.experiments.study import Make, Study

TITLE = "Hyper-parameter search"
QUESTION = (
  "Is the outcome model as strong as it can be? Each objective has its own search of learning "
  "rate, updates and language-model loss, on the largest training set."
)
PAPER = (
  "Appendix E and F.1: low learning rates mattered for both, and both were swept; the values are "
  "not given. The ORM has 1 epoch, no dropout and no language-model loss."
)
ARMS = {"process": "Process supervision", "outcome": "Outcome supervision, by final answer"}
AXES = ("language_model_weights", "learning_rates", "updates")  # of the plan
SETTINGS = ("language_model_weight", "learning_rate", "steps")  # of a model, in this order
Setting = tuple[float, float, int]  # one value of each axis


def settings(plan: Mapping[str, Any]) -> list[Setting]:
  """Returns every combination of the axes' values in the fields of a plan."""
  return [*itertools.product(*(plan[axis] for axis in AXES))]


def name(arm: str, weight: float, rate: float, steps: int) -> str:
  return f"{arm}-{weight:g}-{rate:g}-{steps}"


def runs(plan: Plan) -> dict[str, Make]:
  return {
    name(arm, *each): functools.partial(_model, arm=arm, changes=dict(zip(SETTINGS, each)))
    for arm in ARMS
    for each in settings(vars(plan))
  }


def _model(study: Study, name: str, arm: str, changes: dict[str, Any]) -> dict[str, Any]:
  """Trains and judges a model with changed settings."""
  chosen = study.uniform(study.plan.samples[-1])
  trees = study.trees(chosen, "process" if arm == "process" else "outcome_answer")
  return study.judged(name, arm, trees, "tuning", **changes)


def _solved(results: Results, arm: str, *setting: float) -> float:
  """Returns the mean best-of-N of a setting at the largest N."""
  return results.accuracy(name(arm, *setting))[..., -1].mean()


def panels(results: Results) -> list[Panel]:
  """Returns panels of best-of-N at the largest N over updates, a curve for each other setting."""
  out, last = [], results.n[-1]
  for arm, objective in ARMS.items():
    curves, (weights, rates, updates) = [], (results.plan[axis] for axis in AXES)
    for i, weight in enumerate(weights):
      for colour, rate in enumerate(rates):
        reached = [_solved(results, arm, weight, rate, n) for n in updates]
        label = f"learning rate {rate:g}" + (f", next-token loss {weight:g}" if weight else "")
        y = 100 * np.array(reached)  # the table has the intervals
        curves.append(Curve(label, updates, y, dashed=i > 0, colour=colour))
    out.append(
      Panel(curves, f"updates: {objective.lower()}", f"% problems solved (best-of-{last})")
    )
  return out


def tables(results: Results) -> list[Table]:
  """Returns a table of best-of-N at the largest N, which decides, and of the mean over all N."""
  rows = []
  for arm, label in ARMS.items():
    best = max(settings(results.plan), key=lambda each: _solved(results, arm, *each))
    for weight, rate, steps in settings(results.plan):
      curve = results.curve(name(arm, weight, rate, steps))
      row = [label, f"{weight:g}", f"{rate:g}", f"{steps:,}"]
      row += [f"{100 * np.mean(curve['mean']):.1f}", percent(curve)]
      rows.append([*row, "best" if best == (weight, rate, steps) else ""])
  header = ["objective", "next-token loss", "learning rate", "updates", "mean over N"]
  return [Table("% of problems solved", [*header, f"best-of-{results.n[-1]}, %", ""], rows)]
