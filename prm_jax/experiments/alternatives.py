"""The quick start's ablation: how much its PRM gains from the rated alternatives of steps.

In its records most steps have another completion with its own rating, as in PRM800K.  A process
model learns from these alternatives; an outcome model cannot.
"""

import dataclasses
from typing import Any

import numpy as np

from prm_jax.datasets import arithmetic, prm800k
from prm_jax.datasets.prm800k import recipes
from prm_jax.experiments import intervals, shared, tasks
from prm_jax.experiments.figures import Curve, Panel
from prm_jax.experiments.plan import Plan
from prm_jax.experiments.results import Results, Table, percent, ratio
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
  settings = {
    objective: shared.with_tokenizer(
      dataclasses.replace(
        quick.settings,
        loss=dataclasses.replace(quick.settings.loss, objective=objective),
        train=dataclasses.replace(quick.settings.train, steps=steps),
      ),
      tokenizer,
    )
    for objective, steps in (("process", quick.process_updates), ("outcome", quick.outcome_updates))
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
  weights = intervals.resampled(gaps[0].shape[:2], results.crossed)
  part, whole = (np.einsum("rsp,spk->rk", weights, gap) for gap in gaps)
  with np.errstate(all="ignore"):  # no gap, no share
    exact = gaps[0].mean((0, 1)) / gaps[1].mean((0, 1))
    resampled = np.where(whole > 0, part / whole, np.nan)
  shares = [intervals.interval(exact[k], resampled[:, k]) for k in range(1, len(results.n))]
  return {
    "curves": {arm: results.intervals(curve) for arm, curve in curves.items()},
    "differences": {
      "alternatives - own_steps": results.intervals(gaps[0]),
      "alternatives - outcome": results.intervals(gaps[1]),
      "own_steps - outcome": results.intervals(curves["own_steps"] - curves["outcome"]),
    },
    "share_of_gap": dict(zip(map(str, results.n[1:]), shares)),
    "majority": results.intervals(results.problems("majority")),
    "labels": {arm: results.labels(arm) for arm in ARMS},
  }


def panels(results: Results, summary: dict[str, Any]) -> list[Panel]:
  """Returns the panel of best-of-N, of the three models and of voting."""
  curves = [Curve.over_n(label, results.n, summary["curves"][arm]) for arm, label in ARMS.items()]
  curves.append(Curve.over_n("Majority voting", results.n, summary["majority"], dashed=True))
  return [Panel(curves, "N = number of solutions per problem", "% problems solved (best-of-N)")]


def tables(results: Results, summary: dict[str, Any]) -> list[Table]:
  """Returns the table of page and screen."""
  at = [k for k, n in enumerate(results.n) if n in (4, 16, 64, 256, results.n[-1])]
  header = ["N", *(str(results.n[k]) for k in at)]
  rows = [
    [label, *(percent(summary["curves"][arm], at=k) for k in at)] for arm, label in ARMS.items()
  ]
  names = {
    "alternatives - own_steps": "gained by alternatives",
    "own_steps - outcome": "own steps minus ORM",
  }
  rows += [
    [label, *(percent(summary["differences"][key], True, k) for k in at)]
    for key, label in names.items()
  ]
  shares = (ratio(summary["share_of_gap"][str(results.n[k])], 0, 100) for k in at)
  rows.append(["share of the PRM's lead over the ORM that is due to alternatives, %", *shares])
  return [Table("% of problems solved, with 95 % intervals", header, rows)]
