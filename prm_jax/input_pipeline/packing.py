"""Packing: a plan made once, and rows that are a pure function of their number.

The plan is data.  Which rows an update reads is a pure function of the update's number
(`shuffled`), so the step is the whole state of the input pipeline: a run can resume, be replayed
or change its number of hosts without any other record.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Sequence

import grain
import numpy as np

from prm_jax.input_pipeline import prefix_tree
from prm_jax.input_pipeline.token_tree import TokenTree
from prm_jax.input_pipeline.tokenizers import PAD
from prm_jax.types import Batch

DONORS = 64  # pieces too long for the room in a row that are searched for a part that fits it
EMPTY = -1  # number of a row of padding, which completes a batch

Piece = tuple[int, int, int]  # tree, and the start and stop in it: see `prefix_tree.piece`


def plan(trees: Sequence[TokenTree], row_length: int) -> list[list[Piece]]:
  """Which parts of which trees share which row.

  A tree longer than a row is cut between leaves where that repeats the fewest tokens.  Then rows
  are filled one by one, best fit first: the longest piece that still fits, or where none does, the
  part of a longer one that fills the room best, if it gains more tokens than cutting repeats.

  Returns:
    The pieces of each row.  Deterministic.

  Raises:
    ValueError: a path is longer than a row.
  """
  at = [prefix_tree.starts(tree) for tree in trees]
  # Tokens of the path before each start, which a piece that begins there repeats.
  repeated = [np.append(tree.positions[a[:-1]], 0) for tree, a in zip(trees, at)]

  def entry(tree: int, first: int, last: int) -> tuple[int, int, int, int]:
    tokens = int(at[tree][last] - at[tree][first] + repeated[tree][first])
    return tokens, -tree, first, last  # of equally long pieces the first tree is popped first

  left = []  # the pieces that have no row yet, ascending; first and last count leaves
  for i in range(len(trees)):
    left += [entry(i, *leaves) for leaves in _cut(at[i], repeated[i], row_length, i)]
  left.sort()
  rows = []
  while left:
    row, room = [], row_length
    while left and room:
      fits = bisect.bisect_right(left, (room, 1))
      if fits:
        tokens, tree, first, last = left.pop(fits - 1)
      else:
        found = _part(left[:DONORS], at, repeated, room)
        if found is None:
          break
        donor, first, last = found
        _, tree, low, high = left.pop(donor)
        rest = (last, high) if first == low else (low, first)
        bisect.insort(left, entry(-tree, *rest))
        tokens, *_ = entry(-tree, first, last)
      row.append((-tree, int(at[-tree][first]), int(at[-tree][last])))
      room -= tokens
    rows.append(row)
  return rows


def _cut(at: np.ndarray, repeated: np.ndarray, row_length: int, tree: int) -> list[tuple[int, int]]:
  """The (first, last) leaves of pieces of at most a row each that repeat the fewest tokens."""
  leaves = len(at) - 1
  if at[-1] <= row_length:
    return [(0, leaves)]
  # Up to each leaf, the fewest tokens repeated, and the leaf at which its last piece begins then.
  fewest, best = np.zeros(leaves + 1), np.zeros(leaves + 1, np.int64)
  for last in range(1, leaves + 1):
    first = np.arange(last)
    fits = at[last] - at[:last] + repeated[:last] <= row_length
    if not fits.any():
      raise ValueError(
        f"example {tree} has a path of {at[last] - at[last - 1] + repeated[last - 1]} tokens, a "
        f"row {row_length}: shorten it first"
      )
    costs = np.where(fits, fewest[:last] + repeated[:last], np.inf)
    best[last] = first[np.argmin(costs)]
    fewest[last] = costs.min()
  ends = [leaves]
  while ends[-1]:
    ends.append(int(best[ends[-1]]))
  return list(zip(ends[1:], ends))[::-1]


def _part(
  pieces: list[tuple[int, int, int, int]],
  at: list[np.ndarray],
  repeated: list[np.ndarray],
  room: int,
) -> tuple[int, int, int] | None:
  """The beginning or end of a piece that fills `room` best: its number, first and last leaf.

  Best is the number of tokens less those that cutting repeats; None: no part gains any.
  """
  found, most = None, 0
  for number, (_, tree, low, high) in enumerate(pieces):
    a, again = at[-tree], repeated[-tree]
    cut = np.arange(low + 1, high)
    tokens = np.stack([a[cut] - a[low] + again[low], a[high] - a[cut] + again[cut]])
    gain = np.where(tokens <= room, tokens - again[cut], 0)  # of beginning and end, by cut
    if gain.size and gain.max() > most:
      most = int(gain.max())
      end, best = divmod(int(gain.argmax()), len(cut))
      leaf = int(cut[best])
      found = (number, leaf, high) if end else (number, low, leaf)
  return found


@dataclasses.dataclass(frozen=True)
class PackedRows:
  """Random access to the packed rows of a dataset.

  `rows[i]` is a dict of the fields of `types.Batch` for one row, int32 `[T]` and `[R]`.  R is the
  largest number of reads in any row, so all rows have the same shape.
  """

  trees: Sequence[TokenTree]  # reads sorted by position
  row_length: int
  round_reads_to: int = 1  # R is rounded up to a multiple of this

  def __post_init__(self):
    object.__setattr__(self, "plan", plan(self.trees, self.row_length))
    reads = max((ends[-1].stop for ends in map(self.reads_of, range(len(self.plan)))), default=0)
    object.__setattr__(self, "reads", -(-reads // self.round_reads_to) * self.round_reads_to)

  def __len__(self) -> int:
    return len(self.plan)

  def reads_of(self, row: int) -> list[slice]:
    """Which of a row's R reads belong to each of its pieces."""
    counts = [
      np.diff(np.searchsorted(self.trees[i].read_positions, ends)) for i, *ends in self.plan[row]
    ]
    ends = np.cumsum(np.concatenate([[0], *counts]))
    return [slice(int(start), int(stop)) for start, stop in itertools.pairwise(ends)]

  def __getitem__(self, row: int) -> dict[str, np.ndarray]:
    """A row of the plan, or padding alone if `row` is `EMPTY`."""
    T = self.row_length
    out = {
      "tokens": np.full(T, PAD, np.int32),
      "positions": np.zeros(T, np.int32),
      "subtree_end": np.arange(1, T + 1, dtype=np.int32),  # padding attends to itself only
      "previous": np.full(T, -1, np.int32),
      "read_positions": np.zeros(self.reads, np.int32),
      "read_targets": np.full(self.reads, -1, np.int32),
    }
    if row == EMPTY:
      return out
    start = 0
    for (i, *ends), reads in zip(self.plan[row], self.reads_of(row)):
      tree = prefix_tree.piece(self.trees[i], *ends)
      span = slice(start, start + len(tree))
      out["tokens"][span] = tree.tokens
      out["positions"][span] = tree.positions
      out["subtree_end"][span] = tree.subtree_end + start
      out["previous"][span] = np.where(tree.previous < 0, -1, tree.previous + start)
      out["read_positions"][reads] = tree.read_positions + start
      out["read_targets"][reads] = tree.read_targets
      start = span.stop
    return out

  def by_tree(self, values: np.ndarray) -> list[np.ndarray]:
    """The values `[N, R, ...]` at the reads of all N rows, by tree: `[r, ...]`, as its reads."""
    out = [np.zeros((len(tree.read_targets), *values.shape[2:])) for tree in self.trees]
    for row, pieces in enumerate(self.plan):
      for (i, *ends), reads in zip(pieces, self.reads_of(row)):
        out[i][slice(*np.searchsorted(self.trees[i].read_positions, ends))] = values[row, reads]
    return out

  @property
  def repeated(self) -> int:
    """Tokens that are in the rows a second time because their tree was cut."""
    pieces = (self.trees[i].positions[start] for row in self.plan for i, start, _ in row)
    return int(sum(pieces))

  @property
  def fill(self) -> float:
    """Share of token slots that hold tokens."""
    tokens = sum(len(tree) for tree in self.trees) + self.repeated
    return tokens / max(len(self) * self.row_length, 1)

  @property
  def hash(self) -> str:
    """sha256 of plan and content: a run resumes only on the rows that it was started with."""
    digest = hashlib.sha256(repr((self.row_length, self.plan)).encode())
    for tree in self.trees:
      for field in dataclasses.fields(tree):
        digest.update(getattr(tree, field.name).tobytes())
    return digest.hexdigest()


def shuffled(rows: PackedRows, seed: int) -> grain.MapDataset:
  """Rows without end, each epoch in another order; entry i is a pure function of i.

  Row j of the batch of update s is entry `s * batch_rows + j`, so a batch may hold the end of one
  epoch and the start of the next.
  """
  return grain.MapDataset.source(rows).seed(seed).shuffle().repeat()


def eval_order(rows: PackedRows, batch_rows: int, limit: int | None = None) -> list[list[int]]:
  """Row numbers of each batch: every row once, or `limit` rows evenly spread.

  The first rows of a plan hold the longest examples and would be no sample.  The last batch is
  completed with `EMPTY`.
  """
  count = len(rows) if limit is None else min(len(rows), limit)
  chosen = [i * len(rows) // count for i in range(count)]
  chosen += [EMPTY] * (-count % batch_rows)
  return [chosen[start : start + batch_rows] for start in range(0, len(chosen), batch_rows)]


def stack(rows: Sequence[dict[str, np.ndarray]]) -> Batch:
  """A batch on the host of these rows."""
  return Batch(**{key: np.stack([row[key] for row in rows]) for key in rows[0]})
