"""One seed of an experiment: its task, the labels of its pool, and the models trained on them."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from prm_jax.experiments import plan as plan_lib
from prm_jax.experiments import workspace as workspace_lib
from prm_jax.experiments.plan import Plan
from prm_jax.experiments.tasks import Solution, Task
from prm_jax.experiments.workspace import Workspace
from prm_jax.scoring.scorer import Scorer
from prm_jax.supervision import active, synthetic
from prm_jax.types import StepTree

EVALUATED = 32  # test solutions for the evaluation during training
Place = tuple[int, int]  # problem of the pool, and solution of the problem


@dataclasses.dataclass(frozen=True)
class Study:
  """One seed's plan, workspace, task and labeller."""

  plan: Plan
  space: Workspace
  task: Task
  labeller: Scorer | None = None  # None: the labels are given with the solutions

  @functools.cached_property
  def _labels(self) -> dict[Place, synthetic.Ratings]:
    """The labels of `solutions` so far."""
    return {}

  @functools.cached_property
  def evaluation(self) -> dict[str, list[StepTree]]:
    """Labelled test solutions for the evaluation during training, by objective."""
    test = dataclasses.replace(self, task=Task(self.task.test[:EVALUATED], ()))
    firsts = [(p, 0) for p in range(len(test.task.pool))]
    outcome = test.outcome_trees(firsts, by_labeller=False)
    return {"process": test.process_trees(firsts), "outcome": outcome}

  def solutions(self, chosen: Sequence[Place]) -> Iterable[tuple[str, Solution, synthetic.Ratings]]:
    """Yields the problem's text, the solution and the labeller's labels for each of the chosen."""
    pool = self.task.pool
    if new := [place for place in dict.fromkeys(chosen) if place not in self._labels]:
      pairs = [(pool[p].text, pool[p].solutions[s].steps) for p, s in new]
      classes = self.labeller.contract.labels
      for place, each in zip(new, self.labeller.by_head(pairs)):
        self._labels[place] = synthetic.label(each.mean(1), self.plan.threshold, classes)
    for p, s in chosen:
      yield pool[p].text, pool[p].solutions[s], self._labels[p, s]

  def errors(self, chosen: Sequence[Place]) -> dict[str, Any] | None:
    """Returns the labeller's errors (`synthetic.errors`); None if no exact ratings are known."""
    pairs = [
      (labels, x.ratings) for _, x, labels in self.solutions(chosen) if x.ratings is not None
    ]
    return synthetic.errors(*zip(*pairs)) if pairs else None

  def process_trees(self, chosen: Sequence[Place]) -> list[StepTree]:
    """Returns the chosen solutions with the labeller's step labels."""
    return [
      synthetic.process(text, each.steps, labels) for text, each, labels in self.solutions(chosen)
    ]

  def outcome_trees(self, chosen: Sequence[Place], by_labeller: bool) -> list[StepTree]:
    """Returns the chosen solutions with an outcome: the labeller's, or the final answer's."""
    return [
      synthetic.outcome(text, each.steps, -1 not in labels if by_labeller else each.correct)
      for text, each, labels in self.solutions(chosen)
    ]

  def train(
    self, name: str, objective: str, trees: Sequence[StepTree], recipe: str, **changes: Any
  ) -> Scorer:
    """Trains a model with the plan's settings, but for `changes` of loss, optim or train."""
    c = plan_lib.changed(getattr(self.plan, objective), **changes)
    if self.plan.proportional and "steps" not in changes:
      share = len(trees) / (len(self.task.pool) * self.plan.samples[-1])
      c = plan_lib.changed(c, steps=max(round(share * c.train.steps), 1))
    return self.space.model(name, c, trees, self.evaluation[objective], recipe)

  def judged(
    self,
    name: str,
    objective: str,
    trees: Callable[[], list[StepTree]],
    recipe: str,
    **changes: Any,
  ) -> dict[str, Any]:
    """Returns a model's stored result; trains and judges the model if it is missing."""

    def make() -> dict[str, Any]:
      data = trees()
      return self.measured(self.train(name, objective, data, recipe, **changes), data)

    return self.space.result(name, make)

  def measured(self, scorer: Scorer, trees: Sequence[StepTree]) -> dict[str, Any]:
    """Returns the counts of the training labels, and how well the model picks."""
    return counts(trees) | workspace_lib.judged(scorer, self.task)

  def uniform(self, per_problem: int) -> list[Place]:
    """Returns each problem's first distinct solutions; larger sets contain smaller ones."""
    return [
      (p, s)
      for p, each in enumerate(self.task.pool)
      for s in list(dict.fromkeys(each.samples))[:per_problem]
    ]

  def samples(self, per_problem: int) -> list[Place]:
    """Returns each problem's first samples, repeated solutions included."""
    return [(p, s) for p, each in enumerate(self.task.pool) for s in each.samples[:per_problem]]

  @functools.cached_property
  def places(self) -> list[Place]:
    """The places of all distinct solutions of the pool."""
    return [(p, s) for p, each in enumerate(self.task.pool) for s in range(len(each.solutions))]

  def pool(self, model: str) -> active.Pool:
    """Returns the solutions at `places` as a trained model, the selector, scores them."""
    scorer = workspace_lib.load(self.space.directory / model)
    probabilities = workspace_lib.step_probabilities(scorer, self.task.pool)
    classes = scorer.contract.right_classes
    solutions = [self.task.pool[p].solutions[s] for p, s in self.places]
    return active.Pool(
      problems=np.array([p for p, _ in self.places]),
      correct=np.array([each.correct for each in solutions]),
      steps=[each.steps for each in solutions],
      times=np.concatenate([each.times for each in self.task.pool]),
      right=[probabilities[p][s][:, :, classes].sum(-1) for p, s in self.places],
    )

  def unlabelled(
    self, pool: active.Pool, labelled: Sequence[Place]
  ) -> tuple[active.Pool, list[Place]]:
    """Returns the solutions of the pool that have no labels yet, and their places."""
    known = {*labelled}
    left = np.flatnonzero([place not in known for place in self.places])
    return pool.subset(left), [self.places[i] for i in left]


def counts(trees: Sequence[StepTree]) -> dict[str, Any]:
  """Counts solutions, and step labels by rating or else outcomes, "true" and "false"."""
  labels = [label for tree in trees for label in tree.labels if label is not None]
  count = collections.Counter(labels or [tree.outcome for tree in trees])
  return {"solutions": len(trees), "labels": {str(x).lower(): n for x, n in sorted(count.items())}}
