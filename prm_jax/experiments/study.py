"""One seed of an experiment: its data, the labels of its pool, and the models trained on them."""

import collections
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from prm_jax.config import Experiment, Model
from prm_jax.experiments import models, tasks
from prm_jax.experiments.plan import Plan, changed
from prm_jax.experiments.tasks import Problem, Solution, Task
from prm_jax.pretrained import families
from prm_jax.runtime import json_lines, storage
from prm_jax.scoring.scorer import Scorer
from prm_jax.supervision import active, synthetic
from prm_jax.training import loop
from prm_jax.types import StepTree

EVALUATED = 32  # test solutions for the evaluation during training
Place = tuple[int, int]  # problem of the pool, and solution of the problem
Make = Callable[["Study", str], dict[str, Any]]  # makes the result of that name


@dataclasses.dataclass(frozen=True)
class Study:
  """One seed of an experiment, or the models that all seeds share.

  Each model and each result is made once, so a killed run resumes where it stopped.
  """

  plan: Plan
  directory: pathlib.Path  # of the seed's models and results
  seed: int
  bases: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of `shared.bases`
  labeller: Scorer | None = None  # None: the labels are given with the solutions
  # The labels of `solutions` so far, by problem and steps.
  _labels: dict[tuple[str, tuple[str, ...]], synthetic.Ratings] = dataclasses.field(
    default_factory=dict, init=False, repr=False
  )

  def result(self, name: str, make: Callable[[], dict[str, Any]]) -> None:
    """Computes the result `name` with `make` and stores it, if it is missing."""
    path = self.directory / f"{name}.json"
    if not path.is_file():
      result = {"seed": self.seed, "run": name} | make()
      with storage.written(path) as out:
        out.write(json.dumps(result) + "\n")

  def stored(self, name: str) -> dict[str, Any]:
    """Returns the stored result `name`."""
    return json_lines.document(self.directory / f"{name}.json")

  def model(
    self,
    name: str,
    c: Experiment,
    solutions: Sequence[StepTree],
    evaluation: Sequence[StepTree],
    recipe: str,
    base: str = "",
  ) -> Scorer:
    """Returns a reward model trained on the solutions; resumes a run that was stopped.

    Args:
      base: initial checkpoint, unless the settings name one; "": random parameters.
    """
    workdir = self.directory / name
    if not models.finished(workdir, c):
      c = changed(c, seed=self.seed)
      if base and not c.init.checkpoint:
        choices = {field: getattr(c.model, field) for field in families.CHOICES}
        model = dataclasses.replace(Model(), **choices)
        c = dataclasses.replace(changed(c, checkpoint=base), model=model)
      loop.run(c, workdir, loop.Solutions([*solutions], [*evaluation], recipe))
    return models.load(workdir)

  @functools.cached_property
  def task(self) -> Task:
    """The pool and the test problems, from the plan's files or from the embedded domain."""
    files = self.plan.files
    if not files.pool:
      return self.plan.embedded.task(self.seed, self.plan.setting)
    pool, test = (self.read(path) if path else [] for path in (files.pool, files.test))
    return tasks.from_files(pool, test, self.seed)

  def read(self, path: str) -> list[Problem]:
    """Reads a file of candidates, within the limits of the plan."""
    files, separator = self.plan.files, self.plan.process.data.separator
    return tasks.read(path, separator, files.problems, files.samples)

  @functools.cached_property
  def evaluation(self) -> dict[str, list[StepTree]]:
    """Labelled test solutions for the evaluation during training, by objective."""
    test = self.task.test[:EVALUATED]
    firsts = [(p, 0) for p in range(len(test))]
    arms = {"process": "process", "outcome": "outcome_answer"}
    return {objective: self.trees(firsts, arm, test) for objective, arm in arms.items()}

  def solutions(
    self, chosen: Sequence[Place], problems: Sequence[Problem] = ()
  ) -> list[tuple[str, Solution, synthetic.Ratings]]:
    """Returns the problem's text, the solution and the labeller's labels for each of the chosen.

    Args:
      problems: problems of the chosen places; none: those of the pool.
    """
    problems = problems or self.task.pool
    pairs = [(problems[p].text, problems[p].solutions[s]) for p, s in chosen]
    asked = dict.fromkeys((text, each.steps) for text, each in pairs)
    if new := [each for each in asked if each not in self._labels]:
      classes = self.labeller.contract.labels
      for each, probabilities in zip(new, self.labeller.by_head(new)):
        ratings = synthetic.label(probabilities.mean(1), self.plan.threshold, classes)
        self._labels[each] = ratings
    return [(text, each, self._labels[text, each.steps]) for text, each in pairs]

  def errors(self, chosen: Sequence[Place]) -> dict[str, Any] | None:
    """Returns the labeller's errors (`synthetic.errors`); None if no exact ratings are known."""
    pairs = [
      (labels, x.ratings) for _, x, labels in self.solutions(chosen) if x.ratings is not None
    ]
    return synthetic.errors(*zip(*pairs)) if pairs else None

  def trees(
    self, chosen: Sequence[Place], arm: str, problems: Sequence[Problem] = ()
  ) -> list[StepTree]:
    """Returns the chosen solutions with the labels of an arm.

    Args:
      arm: "process": the labeller's labels of steps; "outcome_labeller": its outcome;
        "outcome_answer": whether the final answer is right.
      problems: as in `solutions`.
    """
    solutions = self.solutions(chosen, problems)
    if arm == "process":
      return [synthetic.process(text, x.steps, labels) for text, x, labels in solutions]
    right = lambda x, labels: -1 not in labels if arm == "outcome_labeller" else x.correct
    return [synthetic.outcome(text, x.steps, right(x, labels)) for text, x, labels in solutions]

  def train(
    self, name: str, objective: str, trees: Sequence[StepTree], recipe: str, **changes: Any
  ) -> Scorer:
    """Trains a model with the plan's settings, but for `changes` of loss, optim or train."""
    c = changed(getattr(self.plan, objective), **changes)
    if self.plan.proportional and "steps" not in changes:
      share = len(trees) / (len(self.task.pool) * self.plan.samples[-1])
      c = changed(c, steps=max(round(share * c.train.steps), 1))
    evaluation, base = self.evaluation[objective], self.bases[objective]
    return self.model(name, c, trees, evaluation, f"experiment: {recipe}", base)

  def judged(
    self, name: str, objective: str, trees: Sequence[StepTree], recipe: str, **changes: Any
  ) -> dict[str, Any]:
    """Trains a model as `train` does, and returns its `measured`."""
    return self.measured(self.train(name, objective, trees, recipe, **changes), trees)

  def measured(self, scorer: Scorer, trees: Sequence[StepTree]) -> dict[str, Any]:
    """Returns the counts of the training labels, and how well the model picks."""
    return counts(trees) | models.judged(scorer, self.task)

  def uniform(self, per_problem: int) -> list[Place]:
    """Returns each problem's first distinct solutions; larger sets contain smaller ones."""
    return [
      (p, s)
      for p, each in enumerate(self.task.pool)
      for s in list(dict.fromkeys(each.samples))[:per_problem]
    ]

  @functools.cached_property
  def pool(self) -> Callable[[str], active.Pool]:
    """A function that returns the pool with the scores of a trained model, the selector.

    It caches the pools of three models, because scoring takes long.
    """
    # Not `self` in the function: a cycle would keep the labeller in memory after its seed.
    problems, directory = self.task.pool, self.directory

    @functools.lru_cache(3)
    def pool(model: str) -> active.Pool:
      scorer = models.load(directory / model)
      right = models.right_steps(scorer, problems)
      solutions = [x for each in problems for x in each.solutions]
      return active.Pool(
        problems=np.repeat(np.arange(len(problems)), [len(each.solutions) for each in problems]),
        correct=np.array([x.correct for x in solutions]),
        steps=[x.steps for x in solutions],
        times=np.concatenate([each.times for each in problems]),
        right=[x for each in right for x in each],
      )

    return pool

  def choice(
    self, model: str, rule: str, count: int, seed: int, known: Iterable[Place], **options: Any
  ) -> list[Place]:
    """Chooses solutions of the pool that are not in `known`, by the scores of a model.

    Args:
      rule, count, seed, options: of `active.select`.
    """
    known = {*known}
    places = [(p, s) for p, each in enumerate(self.task.pool) for s in range(len(each.solutions))]
    left = np.flatnonzero([place not in known for place in places])
    chosen = active.select(self.pool(model), rule, count, seed, among=left, **options)
    return [places[i] for i in chosen]


def counts(trees: Sequence[StepTree]) -> dict[str, Any]:
  """Counts solutions, and step labels by rating or, without these, outcomes "true" and "false"."""
  labels = [label for tree in trees for label in tree.labels if label is not None]
  count = collections.Counter(labels or [tree.outcome for tree in trees])
  return {"solutions": len(trees), "labels": {str(x).lower(): n for x, n in sorted(count.items())}}
