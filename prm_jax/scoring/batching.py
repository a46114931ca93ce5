"""Solutions to packed rows and back: one forward over all distinct tokens, whatever reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from prm_jax.input_pipeline import packing, prefix_tree
from prm_jax.input_pipeline.token_tree import TokenTree
from prm_jax.model import sharding as sharding_lib
from prm_jax.types import Batch

BATCH_TOKENS = 16_384  # token slots of one forward
READS = 16  # reads of a row are rounded up to a multiple of this, to keep shapes few
MAX_TOKENS = 16_384  # of a solution: a bound on what one line of a file may cost


class SolutionError(ValueError):
  """A solution cannot be scored; `index` is its place among those given."""

  def __init__(self, index: int, message: str):
    super().__init__(message)
    self.index = index


class TooLongError(SolutionError):
  """A solution is too long to score."""

  def __init__(self, index: int, tokens: int):
    super().__init__(index, f"a solution of {tokens} tokens; at most {MAX_TOKENS} can be scored")


def score(
  solutions: Sequence[tuple[str, Sequence[str]]],
  encode: Callable[[str, Sequence[str]], TokenTree],
  read: Callable[[Sequence[TokenTree], Sequence[str]], list[np.ndarray]],
) -> list[np.ndarray]:
  """What `read` gives for each (problem, steps) pair; equal pairs are encoded and read once.

  Args:
    read: of token trees and their problems.

  Raises:
    SolutionError: `encode` refuses a solution (ValueError).
    TooLongError: a solution has more than `MAX_TOKENS` tokens.
  """
  distinct: dict[tuple[str, tuple[str, ...]], int] = {}
  index = [distinct.setdefault((p, tuple(steps)), len(distinct)) for p, steps in solutions]
  encoded = []
  for i, (problem, steps) in enumerate(distinct):
    try:
      encoded.append(encode(problem, steps))
    except ValueError as error:
      raise SolutionError(index.index(i), str(error)) from error
    if len(encoded[i]) > MAX_TOKENS:
      raise TooLongError(index.index(i), len(encoded[i]))
  results = read(encoded, [problem for problem, _ in distinct])
  return [results[i] for i in index]


def read(
  token_trees: Sequence[TokenTree],
  problems: Sequence[str],
  forward: Callable[[Batch], jax.Array],
  mesh: jax.sharding.Mesh,
  row_length: int,
  merge: bool = True,
) -> list[np.ndarray]:
  """Class probabilities, float64 `[r, C]`, at the read positions of each token tree.

  Args:
    problems: of each tree; those of one problem are encoded as one.
    forward: class log-probabilities `[B, R, C]` at a batch's read positions.
    row_length: tokens of a row; with a longer path, it is twice, four times, ... as long.
    merge: False: every solution by itself, for comparison.
  """
  groups: dict[str | int, list[int]] = {}
  for i, problem in enumerate(problems):
    groups.setdefault(problem if merge else i, []).append(i)
  by_length: dict[int, list[list[int]]] = {}
  for members in groups.values():
    length = row_length
    while length <= max(token_trees[i].positions.max() for i in members):
      length *= 2
    by_length.setdefault(length, []).append(members)
  out: list[np.ndarray] = [np.zeros(0)] * len(token_trees)
  for length, several in by_length.items():
    merged = [prefix_tree.merge([token_trees[i] for i in members]) for members in several]
    rows = packing.PackedRows([tree for tree, _ in merged], length, READS)
    found = np.exp(_run(rows, forward, mesh).astype(np.float64))
    for members, (tree, places), read in zip(several, merged, rows.by_tree(found)):
      for i, place in zip(members, places):
        out[i] = read[np.searchsorted(tree.read_positions, place[token_trees[i].read_positions])]
  return out


def _run(
  rows: packing.PackedRows, forward: Callable[[Batch], jax.Array], mesh: jax.sharding.Mesh
) -> np.ndarray:
  """Class log-probabilities, float32 `[rows, R, C]`."""
  spread = mesh.shape["data"] * mesh.shape["fsdp"]
  most = max(BATCH_TOKENS // rows.row_length // spread, 1)
  groups = -(-len(rows) // spread)
  # As many batches as there must be, all of one size, so that the last one is nearly full too.  Of
  # the sizes, each of which is compiled, there are few: powers of two, and multiples of eight.
  needed = -(-groups // -(-groups // most))
  rounded = 2 ** (needed - 1).bit_length() if needed <= 8 else -(-needed // 8) * 8
  batch_rows = min(rounded, most) * spread
  with jax.set_mesh(mesh):
    results = [
      forward(sharding_lib.global_batch(lambda i, batch=batch: rows[batch[i]], batch_rows, mesh))
      for batch in packing.eval_order(rows, batch_rows)
    ]
  return np.concatenate([np.asarray(r) for r in results])
