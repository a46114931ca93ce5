"""Reads the labelled solutions of a prepared dataset.

Training takes the datasets of `Manifest.dataset`: `stepwise`, and those whose builder is a subclass
of PRM800K's `RecordsBuilder` and stores records of its format.
"""

import dataclasses
import itertools
import pathlib
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, Literal

import msgspec

from prm_jax.datasets import stepwise
from prm_jax.datasets.prm800k import recipes, stored_records
from prm_jax.runtime import json_lines
from prm_jax.types import CLASSES, StepTree, problem_key

MANIFEST = "manifest.json"


class Manifest(msgspec.Struct):
  """The part of manifest.json that training needs."""

  dataset: Literal["prm800k", "arithmetic", "stepwise"]
  test_problems: list[str]  # problems that training leaves out; `problem_key` compares them
  recipe: recipes.Recipe | None = None  # for records in PRM800K's format
  labels: str = ""  # for stepwise: the kind of its labels
  classes: tuple[str, ...] = CLASSES["process"]  # classes of a head trained on the steps

  def __post_init__(self):
    if (self.recipe is None) != (self.dataset == "stepwise"):
      raise ValueError(f"dataset {self.dataset} with recipe {self.recipe}")

  @property
  def meaning(self) -> dict[str, Any]:
    """Returns the fields of `StepContract` that follow from the labels."""
    recipe = self.recipe.name if self.recipe else f"stepwise, {self.labels} labels"
    negative = self.recipe is not None and self.recipe.neutral == "negative"
    neutral = "none" if "0" not in self.classes else "negative" if negative else "positive"
    return {"recipe": recipe, "neutral": neutral, "classes": self.classes}


def read_manifest(directory: str | pathlib.Path) -> Manifest:
  """Returns the manifest that prepare_data.py wrote to `directory`.

  Raises:
    FileNotFoundError: the directory has no manifest.
    ValueError: the manifest is damaged, or its dataset has no labelled solutions.
  """
  path = pathlib.Path(directory) / MANIFEST
  if not directory or not path.is_file():
    given = "" if directory else " (then --config.data.directory=DIR)"
    raise FileNotFoundError(
      f"no prepared dataset in {str(directory)!r}: it has no {MANIFEST}; "
      f"scripts/prepare_data.py makes one{given}"
    )
  try:
    return json_lines.decode(json_lines.contents(path), Manifest, str(path))
  except json_lines.BadLine as error:
    remedy = "give an output of prepare_data.py --dataset=prm800k, stepwise or arithmetic"
    raise ValueError(f"{error}; {remedy}") from None


def step_trees(
  directory: str | pathlib.Path,
  split: str,
  objective: str,
  limit: int | None = None,
  alternatives: bool = True,
) -> tuple[list[StepTree], dict[str, Any]]:
  """Returns the solutions of a split, labelled by the recipe that the dataset was prepared with.

  Args:
    split: "train" or "test".  "train" leaves out the manifest's `test_problems`.
    objective: "process" for step labels, "outcome" for whole solutions with the outcome.
    limit: the largest number of records to read; None reads all.
    alternatives: False leaves out alternative steps, so that each solution is a chain.

  Returns:
    The trees, and counts of what was read, kept and dropped, for the run's manifest.

  Raises:
    FileNotFoundError, ValueError: see `read_manifest` and `stored_records`.
  """
  manifest = read_manifest(directory)
  excluded = manifest.test_problems if split == "train" else ()
  if manifest.recipe is None:
    trees = itertools.islice(stepwise.stored_trees(directory, split), limit)
    return _kept(trees, objective, {*map(problem_key, excluded)})
  records = itertools.islice(stored_records(directory, split), limit)
  recipe = manifest.recipe
  if not alternatives:
    recipe = msgspec.structs.replace(recipe, alternatives="drop")
  return recipes.convert_all(records, recipe, objective, excluded)


def _kept(
  trees: Iterable[StepTree], objective: str, excluded: Collection[str]
) -> tuple[list[StepTree], dict[str, Any]]:
  """Returns the trees to train on (process: cut after the last label), and counts for the manifest.

  Args:
    excluded: keys of the problems whose trees are dropped.
  """
  kept, dropped, read = [], Counter(), 0
  for tree in trees:
    read += 1
    end = max((i for i, label in enumerate(tree.labels, 1) if label is not None), default=0)
    if problem_key(tree.problem) in excluded:
      dropped["test_problem"] += 1
    elif objective == "outcome" and tree.outcome is None:
      dropped["no_is_correct"] += 1
    elif objective == "process" and not end:
      dropped["no_labels"] += 1
    elif objective == "process":  # the head reads no step after the last label
      cut = {name: getattr(tree, name)[:end] for name in ("steps", "parents", "labels")}
      kept.append(dataclasses.replace(tree, **cut))
    else:
      kept.append(tree)
  return kept, {"rows": {"read": read, "kept": len(kept)}, "dropped": dict(dropped)}
