"""Turns a prepared dataset into packed rows: the input pipeline of training in one call."""

import collections
import dataclasses
import functools
import hashlib
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from prm_jax import config as config_lib
from prm_jax.datasets import labelled
from prm_jax.input_pipeline import packing, prefix_tree, token_tree
from prm_jax.input_pipeline.tokenizers import Tokenizer
from prm_jax.types import StepContract, StepTree, problem_key


def texts(directory: str | pathlib.Path, split: str, limit: int) -> Iterator[str]:
  """Yields problems and steps of the first `limit` records of a split, to train a tokenizer on.

  The solutions are those with step labels or, if there are none, those with an outcome.
  """
  read = functools.partial(labelled.step_trees, directory, split, limit=limit)
  for tree in read("process")[0] or read("outcome")[0]:
    yield from (tree.problem, *tree.steps)


def pack(
  solutions: list[StepTree],
  tokenizer: Tokenizer,
  contract: StepContract,
  row_length: int,
  merge: bool = True,
  evaluation: bool = False,
  round_reads_to: int = 1,
) -> tuple[packing.PackedRows, dict[str, Any]]:
  """Tokenises solutions and packs them into rows.

  A solution with a path longer than a row keeps the steps that fit.  For an outcome model it is
  dropped, because an outcome belongs to the whole solution.

  Args:
    merge: encode once the tokens that solutions of a problem share; otherwise encode each path by
      itself.  The targets are the same: a step with one rating in several solutions is one target.
    evaluation: count every label; an outcome model is then read at the last token only.
    round_reads_to: see `PackedRows`; rounding gives similar datasets rows of one shape.

  Returns:
    The rows, and counts for the run's manifest, which lists the examples longer than a row.

  Raises:
    ValueError: there is nothing to train on.
  """
  outcome = contract.objective == "outcome"
  by_problem, too_long = collections.defaultdict(list), []
  for number, solution in enumerate(solutions):
    tree = token_tree.encode(solution, tokenizer, contract, evaluation, number)
    targets, longest = len(tree.read_targets), int(tree.positions.max()) + 1
    if longest > row_length:
      tree = prefix_tree.shorten(tree, 0 if outcome else row_length)
      lost = targets - len(tree.read_targets)
      too_long.append({"source": solution.source, "tokens": longest, "targets_lost": lost})
    if len(tree):
      by_problem[solution.problem].append(tree)
  what = f"nothing to {'evaluate' if evaluation else 'train'} on"
  if not by_problem:
    if not solutions:
      raise ValueError(f"{what}: there is no solution")
    text = f"{what}: none of {len(solutions)} {contract.objective} examples fits a row"
    raise ValueError(f"{text} of {row_length} tokens: {room(too_long)}")
  encoded = list(itertools.chain(*by_problem.values()))
  # Each solution has its own outcome; steps with the same rating share one target.
  merged = [prefix_tree.merge(group, evaluation or outcome)[0] for group in by_problem.values()]
  sequences = merged if merge else prefix_tree.sequences(merged)
  rows = packing.PackedRows(sequences, row_length, round_reads_to)
  targets = np.concatenate([tree.read_targets for tree in merged]).sum(0, np.float64)
  if not targets.any():
    raise ValueError(f"{what}: none of {len(solutions)} {contract.objective} examples has a label")
  return rows, rows.manifest() | {
    "examples": len(encoded),
    "merged": merge,
    "tokens_of_paths": sum(prefix_tree.tokens_of_paths(tree) for tree in encoded),
    "tokens_repeated_by_cuts": rows.repeated,
    "targets": dict(zip(contract.classes, map(_number, targets))),
    "longer_than_a_row": too_long,
    "contract": dataclasses.asdict(contract),
  }


def room(too_long: list[dict[str, Any]]) -> str:
  """Returns advice: the smallest power of two as row length that fits all of these examples."""
  longest = max(each["tokens"] for each in too_long)
  return f"--config.data.row_length={1 << (longest - 1).bit_length()} has room for all"


def _number(x: float) -> int | float:
  """Returns a whole count as an int; sums of soft labels may not be whole."""
  return int(x) if x == int(x) else round(float(x), 3)


def load(
  data: config_lib.Data,
  split: str,
  tokenizer: Tokenizer,
  contract: StepContract,
  evaluation: bool = False,
) -> tuple[packing.PackedRows, dict[str, Any]]:
  """Returns the packed rows of a split, and counts of conversion and packing for the manifest.

  Training rows include the solutions of `data.also`, except those whose problem the first dataset
  holds out.  They are limited to a share `data.share` of all problems, rounded.  A smaller share is
  a subset of a larger one.

  Raises:
    ValueError: no solution is left, or neutral means right in one dataset and wrong in the other.
  """
  solutions, counts = labelled.step_trees(data.directory, split, contract.objective)
  if split == "train" and not evaluation:
    if data.also:
      added, counts["also"] = labelled.step_trees(data.also, split, contract.objective)
      first, second = map(labelled.read_manifest, (data.directory, data.also))
      a, b = first.meaning["neutral"], second.meaning["neutral"]
      if contract.objective == "process" and {a, b} == {"positive", "negative"}:
        text = f"neutral counts as {a} in {data.directory} and as {b} in {data.also}"
        raise ValueError(f"{text}; prepare one of them again, to match the other")
      tested = set(map(problem_key, first.test_problems))
      solutions += [tree for tree in added if problem_key(tree.problem) not in tested]
    # Not by the plain hash, as `stepwise` may have chosen its test split by that.
    order = lambda problem: hashlib.sha256(f"share of {problem}".encode()).digest()
    problems = sorted({tree.problem for tree in solutions}, key=order)
    kept = set(problems[: max(round(data.share * len(problems)), 1)])
    solutions = [tree for tree in solutions if tree.problem in kept]
  if not solutions:
    raise ValueError(
      f"{data.directory}: the split {split} has no solution for loss.objective="
      f"{contract.objective}; dropped: {counts['dropped'] or 'none'}"
    )
  rows, packed = pack(solutions, tokenizer, contract, data.row_length, data.merge, evaluation)
  return rows, {"conversion": counts} | packed
