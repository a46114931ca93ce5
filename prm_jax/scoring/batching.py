"""Packs solutions into rows, runs the model on them, and returns its outputs for each solution.

Every distinct token of a problem is encoded once.
"""

import collections
from collections.abc import Callable, Sequence

import jax
import numpy as np

from prm_jax.input_pipeline import packing, prefix_tree
from prm_jax.input_pipeline.token_tree import TokenTree
from prm_jax.model import sharding as sharding_lib
from prm_jax.scoring.batch_journal import BatchJournal
from prm_jax.types import Batch

BATCH_TOKENS = 16_384  # tokens of one forward, padding included


def read(
  token_trees: Sequence[TokenTree],
  problems: Sequence[str],
  forward: Callable[[Batch], jax.Array],
  mesh: jax.sharding.Mesh,
  row_length: int,
  merge: bool = True,
  on_share: Callable[[float], None] = lambda share: None,
  journal: BatchJournal | None = None,
) -> list[np.ndarray]:
  """Returns the output of `forward` at each token tree's read positions, float32 `[r, K, C]`.

  Args:
    problems: the problem of each tree; trees of one problem are merged into a prefix tree.
    forward: see `Rater.forward`.
    row_length: tokens of a row; doubled until the longest path of a problem fits.
    merge: whether to merge; False encodes each solution by itself, for comparison.
    on_share: called after each batch with the share of all tokens processed so far.
    journal: supplies the results of the first batches, and records those computed here.
  """
  by_problem: dict[str | int, list[int]] = collections.defaultdict(list)
  for i, problem in enumerate(problems):
    by_problem[problem if merge else i].append(i)
  by_length: dict[int, list[list[int]]] = collections.defaultdict(list)
  for members in by_problem.values():
    length = row_length
    while length <= max(token_trees[i].positions.max() for i in members):
      length *= 2
    by_length[length].append(members)
  out: list[np.ndarray] = [np.zeros(0)] * len(token_trees)
  done, total = 0, sum(map(len, token_trees))
  for length, groups in by_length.items():
    merged = [prefix_tree.merge([token_trees[i] for i in members]) for members in groups]
    rows = packing.PackedRows([tree for tree, _ in merged], length)
    tokens = sum(len(token_trees[i]) for members in groups for i in members)
    part = lambda share, done=done, tokens=tokens: on_share((done + share * tokens) / total)
    found = _run(rows, forward, mesh, part, journal)
    done += tokens
    for members, (tree, indices), values in zip(groups, merged, rows.by_tree(found)):
      for i, index in zip(members, indices):
        positions = index[token_trees[i].read_positions]
        out[i] = values[np.searchsorted(tree.read_positions, positions)]
  return out


def _run(
  rows: packing.PackedRows,
  forward: Callable[[Batch], jax.Array],
  mesh: jax.sharding.Mesh,
  on_share: Callable[[float], None],
  journal: BatchJournal | None,
) -> np.ndarray:
  """Returns the output of `forward` at the reads of all rows, float32 `[rows, R, K, C]`.

  To compile few programs, batches come in few sizes, and reads are padded to one of two lengths.
  """
  shards = mesh.shape["data"] * mesh.shape["fsdp"]
  most = max(BATCH_TOKENS // rows.row_length // shards, 1)  # rows of a shard that fit
  needed = -(-len(rows) // shards)
  # As few batches as possible, all of one size, so that the last is nearly full too.  Sizes are
  # powers of two up to eight and multiples of eight above, because each one is compiled.
  size = -(-needed // -(-needed // most))
  rounded = 2 ** (size - 1).bit_length() if size <= 8 else -(-size // 8) * 8
  batch_rows = min(rounded, most) * shards
  batches = packing.eval_order(rows, batch_rows)
  contents = f"{rows.hash} {batch_rows}" if journal else ""  # a server need not hash its requests
  computed: list[jax.Array] = []  # at most the last two
  results: list[np.ndarray] = []
  T, R = rows.row_length, rows.reads
  padding = (T // 16 if R <= T // 16 else T) - R

  def load(number: int) -> dict[str, np.ndarray | None]:
    row = rows[number]
    reads = np.pad(row["read_positions"], (0, padding))
    return row | {"read_positions": reads, "read_targets": None, "read_solutions": None}

  def finish() -> None:
    results.append(np.asarray(computed.pop(0))[:, :R])
    if journal:
      journal.add(f"{contents} {len(results)}", results[-1])

  with jax.set_mesh(mesh):
    for i, numbers in enumerate(batches):
      if journal and (known := journal.next(f"{contents} {i + 1}")) is not None:
        results.append(known)
        continue
      batch = sharding_lib.global_batch(
        lambda i, numbers=numbers: load(numbers[i]), batch_rows, mesh
      )
      computed.append(forward(batch))
      if len(computed) > 1:  # the host stays one batch ahead of the devices
        finish()
      on_share(i / len(batches))
    if computed:
      finish()
  return np.concatenate(results)
