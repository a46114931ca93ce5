"""From a prepared dataset to packed rows: the whole input pipeline of training in one call."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from prm_jax.datasets import prm800k
from prm_jax.input_pipeline import conversion, packing, trees
from prm_jax.input_pipeline.prepare import MANIFEST
from prm_jax.input_pipeline.tokenizers import Tokenizer
from prm_jax.types import StepContract, StepTree

_PREPARE = "write the dataset with scripts/prepare_data.py --dataset=prm800k (or arithmetic)"


def read_manifest(directory: str | pathlib.Path) -> dict[str, Any]:
  """What prepare_data.py wrote about the dataset in `directory`.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is damaged, or of a dataset without labelled rows.
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
  try:
    conversion.recipe_of(manifest)
    complete = isinstance(manifest["recipe"]["name"], str)
    complete = complete and isinstance(manifest["test_problems"], list)
  except (AttributeError, KeyError, TypeError):
    complete = False
  if not complete:
    dataset = manifest.get("dataset") if isinstance(manifest, dict) else None
    raise ValueError(
      f"{path}: not the manifest of labelled rows"
      f"{f', but of {dataset}' if dataset else ''}; {_PREPARE}"
    )
  return manifest


def examples(
  directory: str | pathlib.Path, split: str, objective: str, limit: int | None = None
) -> tuple[list[StepTree], conversion.Counts]:
  """The converted solutions of a split, by the recipe the dataset was prepared with.

  Training leaves out the problems that are tested on; they are listed in the manifest.

  Args:
    limit: rows to read, at most; None: all.
  """
  manifest = read_manifest(directory)
  excluded = frozenset(manifest["test_problems"]) if split == "train" else frozenset()
  recipe = conversion.recipe_of(manifest)
  records = itertools.islice(prm800k.read_rows(directory, split), limit)
  return conversion.convert_all(records, recipe, objective, excluded)


def texts(directory: str | pathlib.Path, split: str, limit: int) -> Iterator[str]:
  """Problems and steps of the first `limit` rows of a split, to train a tokenizer on.

  Raises:
    ValueError: `limit` is below 1; also as `read_manifest`.
  """
  if limit < 1:
    raise ValueError(f"limit={limit}: at least 1 row")
  solutions, _ = examples(directory, split, "process", limit)
  for tree in solutions:
    yield tree.problem
    yield from tree.steps


def pack(
  solutions: list[StepTree], tokenizer: Tokenizer, contract: StepContract, row_length: int
) -> tuple[packing.PackedRows, dict[str, Any]]:
  """Tokenises solutions and packs them into rows.

  Returns:
    The rows, and counts for the run's manifest, with every example that did not fit a row.

  Raises:
    ValueError: there is nothing to train on.
  """
  token_trees, too_long = [], []
  for tree in solutions:
    tokens, dropped_steps = trees.cut(tree, tokenizer, contract, row_length)
    if tokens is not None:
      token_trees.append(tokens)
    if dropped_steps:
      kept = len(tree.steps) - dropped_steps if tokens is not None else 0
      too_long.append({"source": tree.source, "steps": len(tree.steps), "kept": kept})
  if not token_trees:
    raise ValueError(
      f"nothing to train on: none of {len(solutions)} {contract.objective} examples fits a row of "
      f"{row_length} tokens"
      if solutions
      else f"no {contract.objective} example in the data"
    )
  rows = packing.PackedRows(token_trees, row_length)
  targets = collections.Counter(t for tree in token_trees for t in tree.read_targets.tolist())
  return rows, {
    "examples": len(token_trees),
    "tokens": sum(len(tree) for tree in token_trees),
    "targets": {name: targets[i] for i, name in enumerate(contract.classes)},
    "rows": len(rows),
    "row_length": row_length,
    "fill": rows.fill,
    "longer_than_a_row": too_long,
    "rows_hash": rows.hash,
    "contract": dataclasses.asdict(contract),
  }


def load(
  directory: str, split: str, tokenizer: Tokenizer, contract: StepContract, row_length: int
) -> tuple[packing.PackedRows, dict[str, Any]]:
  """Reads, converts, tokenises and packs one split: rows, and how they came to be."""
  solutions, counts = examples(directory, split, contract.objective)
  rows, packed = pack(solutions, tokenizer, contract, row_length)
  return rows, {"conversion": counts.to_json()} | packed
