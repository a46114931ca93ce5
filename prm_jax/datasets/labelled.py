"""Labelled solutions of a prepared dataset, whatever its records look like.

A dataset of labelled solutions takes part by one function, named in `READERS`:

    step_trees(directory, split, objective, manifest, limit) -> (trees, counts)

with the arguments and results of `step_trees` below.  It reads what the dataset's builder wrote,
turns it into labels as `manifest["recipe"]` says, and leaves `manifest["test_problems"]` out of
the training split.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from prm_jax.datasets import prm800k
from prm_jax.types import StepTree

MANIFEST = "manifest.json"
READERS = {  # by the manifest's "dataset"
  "prm800k": prm800k.step_trees,
  "arithmetic": prm800k.step_trees,  # stored as records of PRM800K's format
}
_PREPARE = "write the dataset with scripts/prepare_data.py --dataset=prm800k (or arithmetic)"


def read_manifest(directory: str | pathlib.Path) -> dict[str, Any]:
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
    manifest = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:  # also bytes that are not UTF-8
    raise ValueError(f"{path}: not JSON ({error}); {_PREPARE}") from None
  dataset = manifest.get("dataset") if isinstance(manifest, dict) else None
  try:
    complete = dataset in READERS and isinstance(manifest["recipe"]["name"], str)
    complete = complete and isinstance(manifest["test_problems"], list)
  except (KeyError, TypeError):
    complete = False
  if not complete:
    of = f", but of {dataset}" if dataset else ""
    raise ValueError(f"{path}: not the manifest of labelled solutions{of}; {_PREPARE}")
  return manifest


def step_trees(
  directory: str | pathlib.Path, split: str, objective: str, limit: int | None = None
) -> tuple[list[StepTree], dict[str, Any]]:
  """The solutions of a split, labelled by the recipe that the dataset was prepared with.

  Args:
    directory: an output of scripts/prepare_data.py.
    split: "train" or "test".
    objective: "process" for step labels, "outcome" for whole solutions with the outcome.
    limit: records to read, at most; None: all.

  Returns:
    The trees, and counts of what was read, kept and dropped, for the run's manifest.

  Raises:
    FileNotFoundError, ValueError: as `read_manifest`; no such split; a damaged file.
  """
  manifest = read_manifest(directory)
  return READERS[manifest["dataset"]](directory, split, objective, manifest, limit)
