"""Labelled solutions of a prepared dataset.

`Manifest.dataset` lists the datasets that can be trained on: those whose builder is a subclass of
PRM800K's `RecordsBuilder`, stored as records of its format, and `stepwise`.
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
from prm_jax.types import CLASSES, StepTree

MANIFEST = "manifest.json"


class Manifest(msgspec.Struct):
  """What training needs of manifest.json."""

  dataset: Literal["prm800k", "arithmetic", "stepwise"]
  test_problems: list[str]  # not to be trained on, although the training split has them
  recipe: recipes.Recipe | None = None  # of records in PRM800K's format
  labels: str = ""  # of stepwise: their kind
  classes: tuple[str, ...] = CLASSES["process"]  # of a head that is trained on the steps

  def __post_init__(self):
    if (self.recipe is None) != (self.dataset == "stepwise"):
      raise ValueError(f"dataset {self.dataset} with recipe {self.recipe}")

  @property
  def meaning(self) -> dict[str, Any]:
    """The fields of `StepContract` that follow from the labels."""
    recipe = self.recipe.name if self.recipe else f"stepwise, {self.labels} labels"
    negative = self.recipe is not None and self.recipe.neutral == "negative"
    neutral = "none" if "0" not in self.classes else "negative" if negative else "positive"
    return {"recipe": recipe, "neutral": neutral, "classes": self.classes}


def read_manifest(directory: str | pathlib.Path) -> Manifest:
  """What prepare_data.py wrote about the dataset of labelled solutions in `directory`.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is damaged, or of a dataset without labelled solutions.
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
    raise ValueError(f"{error}; write the dataset again with scripts/prepare_data.py") from None


def step_trees(
  directory: str | pathlib.Path, split: str, objective: str, limit: int | None = None
) -> tuple[list[StepTree], dict[str, Any]]:
  """The solutions of a split, labelled by the recipe that the dataset was prepared with.

  Args:
    split: "train" or "test".  Training leaves out the problems that are tested on.
    objective: "process" for step labels, "outcome" for whole solutions with the outcome.
    limit: records to read, at most; None: all.

  Returns:
    The trees, and counts of what was read, kept and dropped, for the run's manifest.

  Raises:
    FileNotFoundError, ValueError: as `read_manifest` and `stored_records`.
  """
  manifest = read_manifest(directory)
  excluded = manifest.test_problems if split == "train" else ()
  if manifest.recipe is None:
    trees = itertools.islice(stepwise.stored_trees(directory, split), limit)
    return _kept(trees, objective, frozenset(excluded))
  records = itertools.islice(stored_records(directory, split), limit)
  trees, counts = recipes.convert_all(records, manifest.recipe, objective, excluded)
  del counts["test_problems"]  # the dataset's manifest lists them
  return trees, counts


def own_paths(directory: str | pathlib.Path, split: str) -> list[StepTree]:
  """The solutions of a split without alternatives: each as the chain that it was judged on."""
  manifest = read_manifest(directory)
  if manifest.recipe is None:
    return step_trees(directory, split, "process")[0]
  recipe = msgspec.structs.replace(manifest.recipe, alternatives="drop")
  return recipes.convert_all(stored_records(directory, split), recipe)[0]


def _kept(
  trees: Iterable[StepTree], objective: str, excluded: Collection[str]
) -> tuple[list[StepTree], dict[str, Any]]:
  """The trees of other problems that can be trained on, and counts as `recipes.convert_all`."""
  kept, dropped, read = [], Counter(), 0
  for tree in trees:
    read += 1
    if tree.problem in excluded:
      dropped["test_problem"] += 1
    elif objective == "outcome" and tree.outcome is None:
      dropped["no_is_correct"] += 1
    elif objective == "process" and not any(label is not None for label in tree.labels):
      dropped["no_labels"] += 1
    elif objective == "process":  # the head reads nothing after the last label
      end = max(i for i, label in enumerate(tree.labels) if label is not None) + 1
      cut = {name: getattr(tree, name)[:end] for name in ("steps", "parents", "labels")}
      kept.append(dataclasses.replace(tree, **cut))
    else:
      kept.append(tree)
  return kept, {"rows": {"read": read, "kept": len(kept)}, "dropped": dict(dropped)}
