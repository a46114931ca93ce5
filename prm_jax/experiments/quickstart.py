"""The quick start's data and settings, and a small language model that learns its domain."""

import dataclasses
import functools
import json
import pathlib

import numpy as np

from prm_jax.config import Loss
from prm_jax.datasets import arithmetic, prm800k
from prm_jax.datasets.prm800k import recipes
from prm_jax.experiments import models, tasks
from prm_jax.experiments.plan import Plan, changed
from prm_jax.experiments.study import Study
from prm_jax.generation.sampler import Sampler
from prm_jax.input_pipeline import tokenizers
from prm_jax.runtime import storage
from prm_jax.training import loop
from prm_jax.types import StepTree

VOCABULARY = 320  # as in scripts/quickstart.sh


def adapted(plan: Plan, directory: pathlib.Path, seed: int) -> Plan:
  """Returns the plan with the quick start's settings of both objectives, tokenizer and seed."""
  quick = plan.quickstart
  generator = dataclasses.replace(quick.generator, seed=seed)
  tokenizer = directory / "tokenizer.model"
  if not tokenizer.is_file():
    texts = (text for tree in trees(generator, "process") for text in (tree.problem, *tree.steps))
    tokenizers.train_sentencepiece(texts, tokenizer, VOCABULARY)
  updates = {"process": quick.process_updates, "outcome": quick.outcome_updates}
  settings = {
    objective: changed(quick.settings, objective=objective, steps=n, tokenizer=str(tokenizer))
    for objective, n in updates.items()
  }
  quick = dataclasses.replace(quick, generator=generator)
  return dataclasses.replace(plan, quickstart=quick, **settings)


def trees(
  generator: arithmetic.Generator,
  objective: str,
  split: str = "train",
  alternatives: str = "siblings",
) -> list[StepTree]:
  """Returns the generator's labelled solutions, by the paper's recipe.

  Args:
    alternatives: "siblings": steps with their rated alternatives; "drop": without them.
  """
  records = prm800k.numbered(generator.rows()[split], f"{split}.jsonl")
  recipe = recipes.Recipe("paper", alternatives=alternatives)
  return recipes.convert_all(records, recipe, objective)[0]


class QuickStartStudy(Study):
  """One seed of the quick start, of an `adapted` plan."""

  @property
  def generator(self) -> arithmetic.Generator:
    return self.plan.quickstart.generator

  @functools.cached_property
  def problems(self) -> dict[str, list[arithmetic.Problem]]:
    """The problems of each split."""
    return self.generator.problems()

  @functools.cached_property
  def task(self) -> tasks.Task:
    """The test problems with samples of the simulated solver; there is no pool."""
    rng = np.random.default_rng([self.seed, *b"candidates"])
    count = self.generator.candidates
    return tasks.Task((), tuple(tasks.sampled(x, count, rng) for x in self.problems["test"]))

  @functools.cached_property
  def language_model(self) -> Sampler:
    """The language model, trained on the simulated solver's samples, mistakes included."""
    workdir = self.directory / "language_model"
    c = changed(self.plan.process, steps=self.plan.search.updates, seed=self.seed)
    if not models.finished(workdir, c):
      rng = np.random.default_rng([self.seed, *b"text"])
      files = {}
      for split, problems in self.problems.items():
        files[split] = path = self.directory / f"text_{split}.jsonl"
        with storage.written(path) as out:
          for each in problems:
            for _ in range(self.plan.search.solutions):
              steps = arithmetic.solve(each, rng).steps
              line = {"prompt": f"{each.text}\n", "completion": "\n".join(steps)}
              out.write(json.dumps(line) + "\n")
      texts = {"text_train": str(files["train"]), "text_eval": str(files["test"])}
      data = dataclasses.replace(c.data, directory="", **texts)
      loss = Loss(objective="language_model")
      loop.run(dataclasses.replace(c, data=data, loss=loss), workdir)
    return Sampler.load(workdir)
