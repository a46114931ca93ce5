"""From a prepared dataset to packed rows: the whole input pipeline of training in one call."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

from prm_jax import config as config_lib
from prm_jax.datasets import labelled
from prm_jax.input_pipeline import packing, prefix_tree, token_tree
from prm_jax.input_pipeline.token_tree import TokenTree
from prm_jax.input_pipeline.tokenizers import Tokenizer
from prm_jax.types import StepContract, StepTree


def texts(directory: str | pathlib.Path, split: str, limit: int) -> Iterator[str]:
  """Problems and steps of the first `limit` rows of a split, to train a tokenizer on.

  Raises:
    ValueError: `limit` is below 1; also as `labelled.step_trees`.
  """
  if limit < 1:
    raise ValueError(f"limit={limit}: at least 1 row")
  solutions, _ = labelled.step_trees(directory, split, "process", limit)
  for tree in solutions:
    yield tree.problem
    yield from tree.steps


def pack(
  solutions: list[StepTree],
  tokenizer: Tokenizer,
  contract: StepContract,
  row_length: int,
  merge: bool = True,
  evaluation: bool = False,
) -> tuple[packing.PackedRows, dict[str, Any]]:
  """Tokenises solutions and packs them into rows.

  Args:
    merge: what solutions of a problem have in common is encoded once (a step that has the same
      rating in several is one target either way); otherwise each path of these trees by itself.
    evaluation: every label counts, and of an outcome model's solutions only the last read.

  Returns:
    The rows, and counts for the run's manifest, with every example that did not fit a row.

  Raises:
    ValueError: there is nothing to train on.
  """
  by_problem: dict[str, list[TokenTree]] = {}
  too_long = []
  for tree in solutions:
    encoded = token_tree.encode(tree, tokenizer, contract)
    if evaluation and contract.objective == "outcome":
      encoded = token_tree.last_read(encoded)
    if (longest := int(encoded.positions.max()) + 1) > row_length:
      read = len(encoded.read_targets)
      encoded = within_row(encoded, contract, row_length)
      lost = read - (0 if encoded is None else len(encoded.read_targets))
      too_long.append({"source": tree.source, "tokens": longest, "targets_lost": lost})
    if encoded is not None:
      by_problem.setdefault(tree.problem, []).append(encoded)
  if not by_problem:
    raise ValueError(
      f"nothing to train on: none of {len(solutions)} {contract.objective} examples fits a row of "
      f"{row_length} tokens"
      if solutions
      else f"no {contract.objective} example in the data"
    )
  each = list(itertools.chain(*by_problem.values()))
  # Each solution has an outcome of its own; a step that was rated alike twice is still one step.
  every_read = evaluation or contract.objective == "outcome"
  token_trees = [prefix_tree.merge(group, every_read)[0] for group in by_problem.values()]
  if not merge:
    token_trees = prefix_tree.sequences(token_trees)
  rows = packing.PackedRows(token_trees, row_length)
  targets = collections.Counter(t for tree in token_trees for t in tree.read_targets.tolist())
  return rows, {
    "examples": len(each),
    "merged": merge,
    "tokens": sum(len(tree) for tree in token_trees),
    "tokens_of_paths": sum(len(path) for path in prefix_tree.sequences(each)),
    "tokens_repeated_by_cuts": rows.repeated,
    "targets": {name: targets[i] for i, name in enumerate(contract.classes)},
    "rows": len(rows),
    "row_length": row_length,
    "fill": rows.fill,
    "longer_than_a_row": too_long,
    "rows_hash": rows.hash,
    "contract": dataclasses.asdict(contract),
  }


def within_row(tree: TokenTree, contract: StepContract, row_length: int) -> TokenTree | None:
  """What is left of a tree with a path longer than a row; None: no target is.

  Steps within a row keep their ratings.  An outcome is the whole solution's, so it is dropped.
  """
  if contract.objective == "outcome":
    return None
  tree = prefix_tree.shorten(tree, row_length)
  return tree if len(tree.read_targets) else None


def load(
  data: config_lib.Data,
  split: str,
  tokenizer: Tokenizer,
  contract: StepContract,
  evaluation: bool = False,
) -> tuple[packing.PackedRows, dict[str, Any]]:
  """Reads, converts, tokenises and packs one split: rows, and how they came to be."""
  solutions, counts = labelled.step_trees(data.directory, split, contract.objective)
  rows, packed = pack(solutions, tokenizer, contract, data.row_length, data.merge, evaluation)
  return rows, {"conversion": counts} | packed
