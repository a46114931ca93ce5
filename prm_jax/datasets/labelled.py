"""Labelled solutions of a prepared dataset, whatever its records look like.

A new dataset of labelled solutions takes part by one line in `READERS` and one function:

    step_trees(directory, split, objective, recipe, excluded_problems, limit) -> (trees, counts)

It reads what the dataset's builder wrote below `directory` and labels it as the manifest's
`recipe` says, without the solutions of `excluded_problems`; the rest as `step_trees` below.
"""

from __future__ import annotations

import pathlib
from typing import Any, Literal

import msgspec

from prm_jax.datasets import prm800k
from prm_jax.runtime import json_lines
from prm_jax.types import StepTree

MANIFEST = "manifest.json"
READERS = {  # by the manifest's "dataset"
  "prm800k": prm800k.step_trees,
  "arithmetic": prm800k.step_trees,  # stored as records of PRM800K's format
}


class Manifest(msgspec.Struct):
  """What training needs of manifest.json."""

  dataset: Literal[tuple(READERS)]  # type: ignore[valid-type]
  recipe: dict[str, Any]  # its name and options
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
      f"no prepared dataset in {str(directory)!r}: it has no manifest.json; "
      "scripts/prepare_data.py makes one (then --config.data.directory=DIR)"
    )
  try:
    return json_lines.decode(path.read_bytes(), Manifest, str(path))
  except json_lines.BadLine as error:
    raise ValueError(
      f"{error}; write labelled solutions with scripts/prepare_data.py --dataset=prm800k (or "
      "arithmetic)"
    ) from None


def step_trees(
  directory: str | pathlib.Path, split: str, objective: str, limit: int | None = None
) -> tuple[list[StepTree], dict[str, Any]]:
  """The solutions of a split, labelled by the recipe that the dataset was prepared with.

  Args:
    directory: an output of scripts/prepare_data.py.
    split: "train" or "test".  Training leaves out the problems that are tested on.
    objective: "process" for step labels, "outcome" for whole solutions with the outcome.
    limit: records to read, at most; None: all.

  Returns:
    The trees, and counts of what was read, kept and dropped, for the run's manifest.

  Raises:
    FileNotFoundError, ValueError: as `read_manifest`; no such split; a damaged file.
  """
  manifest = read_manifest(directory)
  excluded = manifest.test_problems if split == "train" else ()
  reader = READERS[manifest.dataset]
  return reader(directory, split, objective, manifest.recipe, excluded, limit)
