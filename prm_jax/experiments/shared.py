"""The models that all seeds share: the bases that every model starts from, and the labeller."""

import dataclasses
import pathlib
from collections.abc import Callable

from prm_jax.config import Experiment
from prm_jax.datasets import labelled
from prm_jax.datasets.arithmetic import Setting
from prm_jax.experiments import models, tasks
from prm_jax.experiments import plan as plan_lib
from prm_jax.experiments.plan import Plan
from prm_jax.experiments.study import Study
from prm_jax.input_pipeline import tokenizers
from prm_jax.types import StepTree

BASE_SEED, LABELLER_SEED = 10_000, 10_001  # of data outside every pool and test
VOCABULARY = 700  # pieces: every clause, value and sign of the embedded domain, and bytes
HELD_OUT = 64  # labelled solutions for the evaluation of bases and labeller; half if there are few


def prepare(plan: Plan, directory: pathlib.Path) -> None:
  """Trains the bases and the labeller, unless they are given or already trained."""
  study, base = Study(plan, directory / "shared", 0), bases(plan, directory)["process"]

  def train(name: str, c: Experiment, make: Callable[[], list[StepTree]], base: str) -> None:
    if not models.finished(study.directory / name, c):
      trees = make()
      plan_lib.keep(plan, study.directory)
      held_out = min(HELD_OUT, len(trees) // 2)
      recipe = f"experiment: {name}"
      study.model(name, c, trees[held_out:], trees[:held_out], recipe, base)

  if not plan.files.base:
    tokenizer = study.directory / "tokenizer.model"
    if not tokenizer.is_file():
      trees = [*critiques(plan, "process"), *labelled_trees(plan)]
      plan_lib.keep(plan, study.directory)
      texts = [text for tree in trees for text in (tree.problem, *tree.steps)]
      tokenizers.train_sentencepiece(texts, tokenizer, VOCABULARY, whole_words=True)
    c = plan_lib.changed(plan.process_base, tokenizer=str(tokenizer))
    train("process_base", c, lambda: critiques(plan, "process"), base="")
    train("outcome_base", plan.outcome_base, lambda: critiques(plan, "outcome"), base)
  if not plan.files.labeller:
    train("labeller", plan.labeller, lambda: labelled_trees(plan), base)


def critiques(plan: Plan, objective: str) -> list[StepTree]:
  """Returns what a base is trained on: random mistakes, labelled by a critic with blind spots."""
  random = dataclasses.replace(taught(plan), misread=(0.0,) * len(plan.setting.misread))
  problems = getattr(plan, f"{objective}_problems")
  return tasks.labelled(BASE_SEED, problems, random, objective, plan.blind)


def labelled_trees(plan: Plan) -> list[StepTree]:
  """Returns what the labeller is trained on: human labels of a dataset, or exact labels."""
  if plan.files.labels:
    return labelled.step_trees(plan.files.labels, "train", "process")[0]
  return tasks.labelled(LABELLER_SEED, plan.labeller_problems, taught(plan))


def taught(plan: Plan) -> Setting:
  """Returns the domain with more random mistakes, for the models that all seeds share."""
  return dataclasses.replace(plan.setting, stray=plan.taught_stray)


def bases(plan: Plan, directory: pathlib.Path) -> dict[str, str]:
  """Returns the checkpoint that the models of each objective start from."""
  return {
    objective: plan.files.base or str(directory / "shared" / f"{objective}_base")
    for objective in ("process", "outcome")
  }


def study(plan: Plan, directory: pathlib.Path, folder: pathlib.Path, seed: int) -> Study:
  """Returns the study of one seed, after `prepare`.

  Args:
    directory, folder: of all experiments, and of the seed.

  Raises:
    ValueError: the labeller is not a process model.
  """
  path = plan.files.labeller or directory / "shared" / "labeller"
  labeller = models.load(path)
  if labeller.contract.objective != "process":
    raise ValueError(f"{path}: an {labeller.contract.objective} model cannot label steps")
  plan_lib.keep(plan, directory / "shared")  # `prepare` may have trained nothing
  return Study(plan, folder, seed, bases(plan, directory), labeller)
