"""Packs token trees into rows: a plan made once, and rows that are pure functions of their index.

The rows of an update are a pure function of its number (`shuffled`).  The step is therefore the
whole state of the input pipeline, and a run resumes on any number of hosts.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grain
import numpy as np

from prm_jax.input_pipeline import prefix_tree
from prm_jax.input_pipeline.token_tree import TokenTree
from prm_jax.input_pipeline.tokenizers import PAD
from prm_jax.types import Batch

DONORS = 64  # longer pieces to search, shortest first, for a part that fits the room left in a row
EMPTY = -1  # index of a row of padding, which completes a batch


def plan(trees: Sequence[TokenTree], row_length: int) -> list[list[tuple[int, int, int]]]:
  """Returns the pieces of each row: tree, start and stop (see `prefix_tree.piece`).

  A tree longer than a row is first cut between leaves, where that repeats the fewest tokens.  Rows
  are then filled one by one.  Each takes the longest piece that fits the room left.  If none does,
  it takes the part of a longer piece that fills the room best, provided that the part has more
  tokens than the cut repeats.  The plan is deterministic.

  Raises:
    ValueError: a path is longer than a row.
  """
  starts = [prefix_tree.starts(tree) for tree in trees]

  def entry(i: int, start: int, stop: int) -> tuple[int, int, int, int]:
    tokens = stop - start + int(trees[i].positions[start])
    return tokens, -i, start, stop  # of equally long pieces, the first tree's is popped first

  @functools.cache
  def cuts_of(i: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the cuts of a piece, and the tokens and gain of both parts at each: `[2, cuts]`."""
    low, high = np.searchsorted(starts[i], (start, stop))
    cuts, positions = starts[i][low + 1 : high], trees[i].positions
    repeated = positions[cuts]
    tokens = np.stack([cuts - start + positions[start], stop - cuts + repeated])
    return cuts, tokens, tokens - repeated

  left = []  # pieces that have no row yet, ascending
  for i, tree in enumerate(trees):
    left += [entry(i, *ends) for ends in _cut(tree, starts[i], row_length, i)]
  left.sort()
  rows = []
  while left:
    row, room = [], row_length
    while left and room:
      if fits := bisect.bisect_right(left, (room, 1)):
        tokens, i, *ends = left.pop(fits - 1)
      elif part := _part(left[:DONORS], cuts_of, room):
        donor, ends, rest = part
        i = left.pop(donor)[1]
        bisect.insort(left, entry(-i, *rest))
        tokens = entry(-i, *ends)[0]
      else:
        break
      row.append((-i, *ends))
      room -= tokens
    rows.append(row)
  return rows


def _cut(
  tree: TokenTree, starts: np.ndarray, row_length: int, number: int
) -> Iterable[tuple[int, int]]:
  """Cuts a tree into pieces (start, stop) that each fit a row, repeating the fewest tokens."""
  if len(tree) <= row_length:
    return [(0, len(tree))]
  repeated = tree.positions[starts[:-1]]  # tokens that a piece repeats if it begins there
  # Dynamic program: up to each start, the fewest tokens repeated and where the last piece begins.
  fewest, best = np.zeros(len(starts)), np.zeros(len(starts), int)
  for last in range(1, len(starts)):
    tokens = starts[last] - starts[:last] + repeated[:last]
    costs = np.where(tokens <= row_length, fewest[:last] + repeated[:last], np.inf)
    best[last], fewest[last] = costs.argmin(), costs.min()
    if fewest[last] == np.inf:
      raise ValueError(
        f"example {number} has a path of {tokens[-1]} tokens, but a row holds {row_length}: "
        "shorten it first"
      )
  ends = [len(starts) - 1]
  while ends[-1]:
    ends.append(best[ends[-1]])
  return itertools.pairwise(starts[ends[::-1]].tolist())


def _part(
  pieces: list[tuple[int, int, int, int]],
  cuts_of: Callable[[int, int, int], tuple[np.ndarray, np.ndarray, np.ndarray]],
  room: int,
) -> tuple[int, tuple[int, int], tuple[int, int]] | None:
  """Returns index, part and remainder of the piece whose part gains most tokens within `room`."""
  choice, most = None, 0
  for number, (_, i, start, stop) in enumerate(pieces):
    cuts, tokens, gain = cuts_of(-i, start, stop)
    gain = np.where(tokens <= room, gain, 0)
    if gain.size and gain.max() > most:
      most = gain.max()
      takes_end, best = divmod(int(gain.argmax()), len(cuts))
      beginning, end = (start, int(cuts[best])), (int(cuts[best]), stop)
      choice = (number, end, beginning) if takes_end else (number, beginning, end)
  return choice


@dataclasses.dataclass(frozen=True)
class PackedRows:
  """The packed rows of a dataset; `rows[i]` has the fields of `types.Batch` without `B`.

  R is the largest number of reads in any row, so all rows have the same shape.
  """

  trees: Sequence[TokenTree]  # reads sorted by position
  row_length: int
  round_reads_to: int = 1  # R is rounded up to a multiple of this

  def __post_init__(self):
    object.__setattr__(self, "plan", plan(self.trees, self.row_length))
    reads = max((sum(len(self._reads(*piece)) for piece in row) for row in self.plan), default=0)
    object.__setattr__(self, "reads", -(-reads // self.round_reads_to) * self.round_reads_to)

  def __len__(self) -> int:
    return len(self.plan)

  def _reads(self, i: int, *ends: int) -> np.ndarray:
    """Returns the indices of the reads of tree i that lie in a piece."""
    return np.arange(*np.searchsorted(self.trees[i].read_positions, ends))

  def __getitem__(self, row: int) -> dict[str, np.ndarray]:
    """Returns a row of the plan; only padding if `row` is `EMPTY`."""
    T = self.row_length
    out = {
      "tokens": np.full(T, PAD, np.int32),
      "positions": np.zeros(T, np.int32),
      "subtree_end": np.arange(1, T + 1, dtype=np.int32),  # padding attends to itself only
      "previous": np.full(T, -1, np.int32),
      "read_positions": np.zeros(self.reads, np.int32),
      "read_targets": np.zeros((self.reads, self.trees[0].read_targets.shape[1]), np.float32),
      "read_solutions": np.zeros(self.reads, np.int32),
    }
    start = read = 0
    for i, *ends in [] if row == EMPTY else self.plan[row]:
      tree = prefix_tree.piece(self.trees[i], *ends)
      span = slice(start, start + len(tree))
      reads = slice(read, read + len(tree.read_targets))
      out["tokens"][span] = tree.tokens
      out["positions"][span] = tree.positions
      out["subtree_end"][span] = tree.subtree_end + start
      out["previous"][span] = np.where(tree.previous < 0, -1, tree.previous + start)
      out["read_positions"][reads] = tree.read_positions + start
      out["read_targets"][reads] = tree.read_targets
      out["read_solutions"][reads] = tree.read_solutions
      start, read = span.stop, reads.stop
    return out

  def by_tree(self, values: np.ndarray) -> list[np.ndarray]:
    """Unpacks values `[N, R, ...]` at the reads of all N rows to `[r, ...]`, one array per tree."""
    shapes = [(len(tree.read_targets), *values.shape[2:]) for tree in self.trees]
    out = [np.zeros(shape, values.dtype) for shape in shapes]
    for row, pieces in zip(values, self.plan):
      read = 0
      for i, *ends in pieces:
        reads = self._reads(i, *ends)
        out[i][reads] = row[read : read + len(reads)]
        read += len(reads)
    return out

  @property
  def repeated(self) -> int:
    """The number of tokens that rows repeat because trees were cut."""
    return sum(int(self.trees[i].positions[start]) for row in self.plan for i, start, _ in row)

  @property
  def fill(self) -> float:
    """The share of token slots that hold tokens."""
    tokens = sum(len(tree) for tree in self.trees) + self.repeated
    return tokens / max(len(self) * self.row_length, 1)

  def manifest(self) -> dict[str, Any]:
    """Returns counts for the run's manifest."""
    return {
      "tokens": sum(len(tree) for tree in self.trees),
      "rows": len(self),
      "row_length": self.row_length,
      "fill": self.fill,
      "rows_hash": self.hash,
    }

  @property
  def hash(self) -> str:
    """SHA-256 of plan and content; a run resumes only on the rows that it started with."""
    digest = hashlib.sha256(repr((self.row_length, self.plan)).encode())
    for tree in self.trees:
      for field in dataclasses.fields(tree):
        digest.update(getattr(tree, field.name).tobytes())
    return digest.hexdigest()


def shuffled(rows: PackedRows, seed: int) -> grain.MapDataset:
  """Repeats the rows forever, each epoch in another order; entry i is a pure function of i."""
  return grain.MapDataset.source(rows).seed(seed).shuffle().repeat()


def eval_order(rows: PackedRows, batch_rows: int, limit: int | None = None) -> list[list[int]]:
  """Returns the row indices of each batch: every row once, or `limit` evenly spread rows.

  `EMPTY` completes the last batch.
  """
  count = len(rows) if limit is None else min(len(rows), limit)
  chosen = [i * len(rows) // count for i in range(count)]
  chosen += [EMPTY] * (-count % batch_rows)
  return [chosen[start : start + batch_rows] for start in range(0, len(chosen), batch_rows)]


def stack(rows: Sequence[dict[str, np.ndarray]]) -> Batch:
  """Stacks rows into a batch on the host."""
  return Batch(**{key: np.stack([row[key] for row in rows]) for key in rows[0]})
