"""Labels of rollouts against exact labels: first errors found, cost, and PRMs trained on them.

The language model of the experiment search continues from the steps of other solutions of its
domain, whose ratings are known exactly.
"""

import contextlib
import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

from prm_jax.aggregation.intervals import interval
from prm_jax.datasets import arithmetic
from prm_jax.datasets.stepwise import records
from prm_jax.evaluation.answers import grading
from prm_jax.experiments import figures, models, quickstart
from prm_jax.experiments.figures import Curve, Panel
from prm_jax.experiments.plan import Plan, changed
from prm_jax.experiments.quickstart import QuickStartStudy
from prm_jax.experiments.results import Results, Table, number, over_n, percent, ratios
from prm_jax.experiments.search import LIMITS
from prm_jax.experiments.study import Make
from prm_jax.generation.engines import Prompt
from prm_jax.generation.sampling import Sampling
from prm_jax.runtime.journal import Journal
from prm_jax.supervision import rollout_labels, synthetic
from prm_jax.supervision.rollout_labels import Problem, Settings, Solution
from prm_jax.supervision.rollouts import Annotator
from prm_jax.types import StepTree

TITLE = "Step labels from rollouts"
QUESTION = (
  "A language model can label a step by continuing from it: a step from which no rollout reaches "
  "the right answer is wrong. How many first errors do k rollouts find, at what cost, and how good "
  "is a PRM that learns from such labels?"
)
PAPER = (
  "The paper's labels are people's, or a large PRM's (section 4). Math-Shepherd (Wang et al. 2023) "
  "labels by rollouts, OmegaPRM (Luo et al. 2024) finds the first error by a binary search. Zhang "
  "et al. (2025) found PRMs of rollout labels worse than of people's or of a judge's: a rollout "
  "may reach the answer after a wrong step, and may miss it after a right one."
)
RULES = {  # how labels are made: search, share of right rollouts up to which a step is wrong
  "all": ("every step, wrong if no rollout is right", Settings(search="all")),
  "quarter": ("every step, wrong if a quarter is right or less", Settings(wrong_share=0.25)),
  "binary": ("binary search, wrong if no rollout is right", Settings(search="binary")),
}
ARMS = {  # of training, on the same solutions
  "exact": "exact",
  "hard": "wrong if none is right",
  "quarter": "wrong if a quarter is right",
  "counts": "counts",
  "tolerant": "tolerant",
}
LEARNED = {  # the labels of these arms, and their kind
  "hard": (Settings(), "binary"),
  "quarter": (Settings(wrong_share=0.25), "binary"),
  "counts": (Settings(labels="counts"), "counts"),
  "tolerant": (Settings(labels="tolerant", sure=0.5), "soft"),
}

# The first errors of which each measure is the share named right.
MEASURES = {"precision": "named", "recall": "there"}


def runs(plan: Plan) -> dict[str, Make]:
  labels = {
    f"{rule}-{k}": functools.partial(_labels, rule=rule, k=k)
    for rule in RULES
    for k in plan.rollouts.counts
  }
  return labels | dict.fromkeys(ARMS, _model)


def study(plan: Plan, directory: pathlib.Path, seed: int) -> "RolloutStudy":
  """Returns the quick start's study, with fewer updates of a process model for fewer labels."""
  plan = quickstart.adapted(plan, directory, seed)
  process = changed(plan.process, steps=plan.rollouts.updates)
  return RolloutStudy(dataclasses.replace(plan, process=process), directory, seed)


class RolloutStudy(QuickStartStudy):
  """The labels that rollouts give the solutions of a seed's training problems."""

  @functools.cached_property
  def solved(self) -> list[tuple[arithmetic.Problem, list[arithmetic.Solution]]]:
    """Training problems with solutions of the simulated solver, to be labelled."""
    s, rng = self.plan.rollouts, np.random.default_rng([self.seed, *b"pool"])
    return [
      (problem, [arithmetic.solve(problem, rng) for _ in range(s.solutions)])
      for problem in self.problems["train"][: s.problems]
    ]

  def annotated(self, s: Settings) -> list[Problem]:
    """Returns the solved problems with the rollouts that the settings ask for."""
    problems = []
    for problem, drawn in self.solved:
      answer = problem.answer
      solutions = [Solution({}, x.steps, ended=True, right=x.answer == answer) for x in drawn]
      problems.append(Problem(problem.text, str(answer), solutions))
    make = lambda text, seed: Prompt("", text, "\n", seed)
    model = dataclasses.replace(self.language_model, batch=512)
    path = self.directory / "rollouts.journal"
    path.unlink(missing_ok=True)  # of a run that was killed
    with grading.Grader("math") as grader, contextlib.closing(Journal(path, {})) as journal:
      seed = self.seed
      annotator = Annotator(model, make, Sampling(), LIMITS, "\n", grader, s, seed, {})
      annotator.run(problems, range(len(problems)), journal)
    path.unlink()
    return problems

  @functools.cached_property
  def counted(self) -> list[Problem]:
    """The pool with all rollouts of every step."""
    return self.annotated(self.settings("counts"))

  def settings(self, arm: str) -> Settings:
    """Returns the settings of the labels on which a model is trained, with the most rollouts."""
    return dataclasses.replace(LEARNED[arm][0], rollouts=max(self.plan.rollouts.counts))

  def labelled(self, arm: str) -> list[StepTree]:
    """Returns the labelled solutions of the pool that a model of this arm is trained on."""
    if arm == "exact":
      return [
        synthetic.process(problem.text, each.steps, each.ratings)
        for problem, solutions in self.solved
        for each in solutions
      ]
    s, kind = self.settings(arm), LEARNED[arm][1]
    out = []
    for problem in self.annotated(s) if arm == "tolerant" else self.counted:
      for each in problem.solutions:
        values, _ = rollout_labels.label(problem, each, s)
        labels = [records.label(value, kind) for value in values if value is not None]
        if labels:
          out.append(synthetic.process(problem.text, each.steps, labels))
    return out


def _labels(study: RolloutStudy, name: str, rule: str, k: int) -> dict[str, Any]:
  """Counts by problem `[P]` first errors that are named, there, and named right; and the cost."""
  named, existing, right = np.zeros((3, len(study.solved)), int)
  s = dataclasses.replace(RULES[rule][1], rollouts=k)
  problems = study.annotated(s)
  for p, (problem, (_, solutions)) in enumerate(zip(problems, study.solved)):
    for solution, exact in zip(problem.solutions, solutions):
      labels, _ = rollout_labels.label(problem, solution, s)
      first = labels.index(False) if False in labels else None
      true = exact.ratings.index(-1) if -1 in exact.ratings else None
      named[p] += first is not None
      existing[p] += true is not None
      right[p] += first is not None and first == true
  return {
    "named": named.tolist(),
    "there": existing.tolist(),
    "right": right.tolist(),
    "solutions": sum(len(solutions) for _, solutions in study.solved),
    "rollouts": sum(count.n for each in problems for count in each.counts.values()),
    "tokens": sum(each.tokens for each in problems),
  }


def _model(study: RolloutStudy, arm: str) -> dict[str, Any]:
  """Trains and judges a process model on the labels of an arm."""
  trees = study.labelled(arm)
  held_out = quickstart.trees(study.generator, "process", "test", "drop")
  scorer = study.model(f"prm_{arm}", study.plan.process, trees, held_out, "rollouts")
  labelled = sum(label is not None for tree in trees for label in tree.labels)
  result = models.judged(scorer, study.task)
  return result | {"solutions": len(trees), "steps": labelled}


def _by_count(results: Results, rule: str, key: str) -> np.ndarray:
  """Returns a key of `_labels` by seed, for K counts of rollouts: `[S, K, ...]`."""
  runs = [f"{rule}-{k}" for k in results.plan["rollouts"]["counts"]]
  return np.stack([[each[key] for each in results.of(run)] for run in runs], axis=1)


def _share(results: Results, of: str, rule: str) -> dict[str, list]:
  """Returns the share of the first errors that is found right, over k, with its interval."""
  right, whole = (_by_count(results, rule, key).swapaxes(1, 2) for key in ("right", of))
  return interval(ratios(right, whole, results.crossed))


def _cost(results: Results, rule: str) -> list[float]:
  """Returns the rollouts of a solution over k, mean over seeds."""
  rollouts, solutions = (_by_count(results, rule, key) for key in ("rollouts", "solutions"))
  return (rollouts / solutions).mean(0).tolist()


def panels(results: Results) -> list[Panel]:
  """Returns panels of precision and recall over the cost, and of the models' best-of-N."""
  out = []
  for name, of in MEASURES.items():
    curves = [
      Curve.over_n(label, _cost(results, rule), _share(results, of, rule))
      for rule, (label, _) in RULES.items()
    ]
    out.append(Panel(curves, "rollouts of a solution", f"{name} of first errors, %"))
  return [*out, figures.over_n(ARMS | {"majority": "majority voting"}, results)]


def tables(results: Results) -> list[Table]:
  """Returns the tables of page and screen."""
  counts, rows = results.plan["rollouts"]["counts"], []
  for name, of in MEASURES.items():
    labels = {rule: f"{name}: {label}" for rule, (label, _) in RULES.items()}
    rows += over_n(labels, functools.partial(_share, results, of), range(len(counts)))
  rows += [
    [f"rollouts of a solution: {label}", *(f"{x:.1f}" for x in _cost(results, rule))]
    for rule, (label, _) in RULES.items()
  ]
  at = results.at(4, 16, 64, 256)
  trained = []
  for arm, label in ARMS.items():
    row = [label, *(f"{results.mean(arm, key):,.0f}" for key in ("solutions", "steps"))]
    row += [number(results.mean(arm, "auroc"))]
    trained.append(row + [percent(results.curve(arm), at=k) for k in at])
  labels = {arm: f"{label}, minus exact" for arm, label in ARMS.items() if arm != "exact"}
  less = over_n(labels, lambda arm: results.minus(arm, "exact"), at, sign=True)
  trained += [[label, "", "", "", *curve] for label, *curve in less]
  names = ["labels", "solutions", "steps", "AUROC", *(f"best of {results.n[k]}" for k in at)]
  return [
    Table("First errors, % with 95 % intervals", ["k rollouts of a step", *map(str, counts)], rows),
    Table("% of problems solved by PRMs of these labels", names, trained),
  ]
