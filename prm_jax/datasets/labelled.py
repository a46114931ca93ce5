"""Labelled solutions of a prepared dataset.

Each such dataset is stored as records of PRM800K's format, by a subclass of its `RecordsBuilder`,
and takes part by its name in `Manifest.dataset`.
"""

import itertools
import pathlib
from typing import Any, Literal

import msgspec

from prm_jax.datasets.prm800k import recipes, stored_records
from prm_jax.runtime import json_lines
from prm_jax.types import StepTree

MANIFEST = "manifest.json"


class Manifest(msgspec.Struct):
  """What training needs of manifest.json."""

  dataset: Literal["prm800k", "arithmetic"]
  recipe: recipes.Recipe
  test_problems: list[str]  # not to be trained on, although the training split has them


def read_manifest(directory: str | pathlib.Path) -> Manifest:
  """What prepare_data.py wrote about the dataset of labelled solutions in `directory`.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is damaged, or of a dataset without labelled solutions.
  """
  path = pathlib.Path(directory) / MANIFEST
  if not directory or not path.is_file():
    raise FileNotFoundError(
      f"no prepared dataset in {str(directory)!r}: it has no {MANIFEST}; "
      "scripts/prepare_data.py makes one (then --config.data.directory=DIR)"
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
  records = itertools.islice(stored_records(directory, split), limit)
  trees, counts = recipes.convert_all(records, manifest.recipe, objective, excluded)
  del counts["test_problems"]  # the dataset's manifest lists them
  return trees, counts
