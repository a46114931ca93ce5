"""The quick start's ablation: how much its PRM gains from the rated alternatives of steps.

In its records most steps have another completion with its own rating, as in PRM800K.  A process
model learns from these alternatives; an outcome model cannot.
"""

import dataclasses
from typing import Any

import numpy as np

from prm_jax.datasets import arithmetic, prm800k
from prm_jax.datasets.prm800k import recipes
from prm_jax.experiments import figures, intervals, tasks
from prm_jax.experiments.figures import Panel
from prm_jax.experiments.plan import Plan, changed
from prm_jax.experiments.results import Results, Table, over_n, ratio
from prm_jax.experiments.study import Study
from prm_jax.experiments.workspace import Workspace
from prm_jax.input_pipeline import tokenizers
from prm_jax.types import StepTree

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
VOCABULARY = 320  # as in scripts/quickstart.sh


def runs(plan: Plan) -> list[str]:
  """Returns the names of a seed's results."""
  return list(ARMS)


def study(plan: Plan, space: Workspace) -> Study:
  """Returns a study of the quick start's data and settings, in place of the plan's."""
  plan = with_quickstart(plan, space)
  generator = plan.quickstart.generator
  rng = np.random.default_rng([space.seed, *b"candidates"])
  problems = generator.problems()["test"]
  test = tuple(tasks.sampled(each, generator.candidates, rng) for each in problems)
  return Study(plan, space, tasks.Task((), test))


def with_quickstart(plan: Plan, space: Workspace) -> Plan:
  """Returns the plan with the quick start's settings of both objectives, tokenizer and seed."""
  quick = plan.quickstart
  generator = dataclasses.replace(quick.generator, seed=space.seed)
  tokenizer = space.directory / "tokenizer.model"
  if not tokenizer.is_file():
    texts = (
      text for tree in trees(generator, "alternatives") for text in (tree.problem, *tree.steps)
    )
    tokenizers.train_sentencepiece(texts, tokenizer, VOCABULARY)
  updates = {"process": quick.process_updates, "outcome": quick.outcome_updates}
  settings = {
    objective: changed(quick.settings, objective=objective, steps=n, tokenizer=str(tokenizer))
    for objective, n in updates.items()
  }
  quick = dataclasses.replace(quick, generator=generator)
  return dataclasses.replace(plan, quickstart=quick, **settings)


def trees(generator: arithmetic.Generator, arm: str, split: str = "train") -> list[StepTree]:
  """Returns the generator's labelled solutions of an arm, by the paper's recipe."""
  records = prm800k.numbered(generator.rows()[split], f"{split}.jsonl")
  recipe = recipes.Recipe("paper", alternatives="drop" if arm == "own_steps" else "siblings")
  return recipes.convert_all(records, recipe, _objective(arm))[0]


def _objective(arm: str) -> str:
  return "outcome" if arm == "outcome" else "process"


def run(study: Study) -> None:
  """Trains and judges the models of one seed."""
  generator = study.plan.quickstart.generator
  for arm in ARMS:

    def make(arm=arm) -> dict[str, Any]:
      data, held_out = (trees(generator, arm, split) for split in ("train", "test"))
      c = getattr(study.plan, _objective(arm))
      scorer = study.space.model(arm, c, data, held_out, "paper")
      return study.measured(scorer, data)

    study.space.result(arm, make)


def summarise(results: Results) -> dict[str, Any]:
  """Returns curves, and the share of the gap between PRM and ORM that is due to alternatives."""
  curves = {arm: results.accuracy(arm) for arm in ARMS}
  gaps = [curves["alternatives"] - curves[other] for other in ("own_steps", "outcome")]
  shares = intervals.ratios(*gaps, results.crossed).T[1:]  # at N = 1 there is no gap
  return {
    "curves": {arm: results.intervals(curve) for arm, curve in curves.items()},
    "differences": {
      "alternatives - own_steps": results.intervals(gaps[0]),
      "own_steps - outcome": results.intervals(curves["own_steps"] - curves["outcome"]),
    },
    "share_of_gap": dict(zip(map(str, results.n[1:]), map(intervals.ratio_interval, shares))),
    "majority": results.intervals(results.problems("majority")),
  }


def panels(results: Results, summary: dict[str, Any]) -> list[Panel]:
  """Returns the panel of best-of-N, of the three models and of voting."""
  labels = ARMS | {"majority": "Majority voting"}
  curves = summary["curves"] | {"majority": summary["majority"]}
  return [figures.over_n(labels, results.n, curves)]


def tables(results: Results, summary: dict[str, Any]) -> list[Table]:
  """Returns the table of page and screen."""
  at = results.at(4, 16, 64, 256)
  header = ["N", *(str(results.n[k]) for k in at)]
  rows = over_n(ARMS, summary["curves"], at)
  names = {
    "alternatives - own_steps": "gained by alternatives",
    "own_steps - outcome": "own steps minus ORM",
  }
  rows += over_n(names, summary["differences"], at, sign=True)
  shares = (ratio(summary["share_of_gap"][str(results.n[k])], 0, 100) for k in at)
  rows.append(["share of the PRM's lead over the ORM that is due to alternatives, %", *shares])
  return [Table("% of problems solved, with 95 % intervals", header, rows)]
