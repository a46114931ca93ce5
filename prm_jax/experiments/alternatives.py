"""The quick start's ablation: how much its PRM gains from the rated alternatives of steps.

In its records most steps have another completion with its own rating, as in PRM800K.  A process
model learns from these alternatives; an outcome model cannot.
"""

import pathlib
from typing import Any

from prm_jax.experiments import figures, quickstart
from prm_jax.experiments.figures import Panel
from prm_jax.experiments.plan import Plan
from prm_jax.experiments.quickstart import QuickStartStudy
from prm_jax.experiments.results import Results, Table, over_n, percent, ratio_interval, ratios
from prm_jax.experiments.study import Make

TITLE = "What alternatives of steps are worth"
QUESTION = (
  "The quick start compares a process model that learns from rated alternatives of steps with an "
  "outcome model that cannot. How much of the gap is due to them? The same solutions, updates and "
  "settings, with and without the alternatives."
)
PAPER = (
  "The paper has no such ablation. PRM800K's first phase, 5 % of its labels, rated several "
  "completions of a step. At large scale the outcome model has other, uniform samples (section 3); "
  "section 4.1 compares on identical solutions, without alternatives."
)
ARMS = {
  "alternatives": "PRM, with alternatives",
  "own_steps": "PRM, solutions' own steps only",
  "outcome": "ORM",
}


def runs(plan: Plan) -> dict[str, Make]:
  return dict.fromkeys(ARMS, _model)


def study(plan: Plan, directory: pathlib.Path, seed: int) -> QuickStartStudy:
  """Returns a study of the quick start's data and settings, in place of the plan's."""
  return QuickStartStudy(quickstart.adapted(plan, directory, seed), directory, seed)


def _model(study: QuickStartStudy, arm: str) -> dict[str, Any]:
  """Trains and judges the model of an arm."""
  objective = "outcome" if arm == "outcome" else "process"
  about = {"objective": objective, "alternatives": "drop" if arm == "own_steps" else "siblings"}
  data, held_out = (
    quickstart.trees(study.generator, split=split, **about) for split in ("train", "test")
  )
  scorer = study.model(arm, getattr(study.plan, objective), data, held_out, "paper")
  return study.measured(scorer, data)


def panels(results: Results) -> list[Panel]:
  """Returns the panel of best-of-N, of the three models and of voting."""
  return [figures.over_n(ARMS | {"majority": "Majority voting"}, results)]


def tables(results: Results) -> list[Table]:
  """Returns the table of page and screen."""
  at = results.at(4, 16, 64, 256)
  header = ["N", *(str(results.n[k]) for k in at)]
  rows = over_n(ARMS, results.curve, at)
  names = {
    ("alternatives", "own_steps"): "gained by alternatives",
    ("own_steps", "outcome"): "own steps minus ORM",
  }
  rows += over_n(names, lambda pair: results.minus(*pair), at, sign=True)
  others = map(results.accuracy, ("own_steps", "outcome"))
  gaps = (results.accuracy("alternatives") - other for other in others)
  shares = ratios(*gaps, results.crossed).T
  percentages = (percent(ratio_interval(shares[k]), digits=0) for k in at)
  rows.append(["share of the PRM's lead over the ORM that is due to alternatives, %", *percentages])
  return [Table("% of problems solved, with 95 % intervals", header, rows)]
