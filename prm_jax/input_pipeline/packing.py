"""Packing: a plan made once, and rows that are a pure function of their index.

The plan is data.  `batches(...)[step]` is the batch of that step, so the whole state of the input
pipeline is the step number: resuming, replaying and changing the number of hosts are all the same.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
from collections.abc import Sequence

import grain
import numpy as np

from prm_jax.input_pipeline.tokenizers import PAD
from prm_jax.input_pipeline.trees import TokenTree
from prm_jax.types import Batch


def plan(lengths: Sequence[int], row_length: int) -> list[list[int]]:
  """Best-fit decreasing: which examples share which row.

  Args:
    lengths: tokens of each example, each at most `row_length`.

  Returns:
    For each row, the indices of its examples.  Deterministic.
  """
  rows: list[list[int]] = []
  room: list[tuple[int, int]] = []  # (free tokens, row), sorted
  for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
    if lengths[i] > row_length:
      raise ValueError(f"example {i} has {lengths[i]} tokens, a row {row_length}: cut it first")
    at = bisect.bisect_left(room, (lengths[i], -1))
    if at < len(room):
      free, row = room.pop(at)
    else:
      free, row = row_length, len(rows)
      rows.append([])
    rows[row].append(i)
    bisect.insort(room, (free - lengths[i], row))
  return rows


@dataclasses.dataclass(frozen=True)
class PackedRows:
  """Random access to the packed rows of a data set.

  `rows[i]` is a dict of the fields of `types.Batch` for one row, arrays int32 `[T]` and `[R]`.
  R is the largest number of reads in any row, so every row has the same shape.
  """

  trees: Sequence[TokenTree]
  row_length: int
  round_reads_to: int = 1  # R is rounded up to a multiple of this

  def __post_init__(self):
    rows = plan([len(t) for t in self.trees], self.row_length)
    reads = [sum(len(self.trees[i].read_targets) for i in row) for row in rows]
    object.__setattr__(self, "plan", rows)
    most = -(-max(reads, default=0) // self.round_reads_to) * self.round_reads_to
    object.__setattr__(self, "reads", most)

  def __len__(self) -> int:
    return len(self.plan)

  def __getitem__(self, row: int) -> dict[str, np.ndarray]:
    T = self.row_length
    out = {
      "tokens": np.full(T, PAD, np.int32),
      "positions": np.zeros(T, np.int32),
      "subtree_end": np.arange(1, T + 1, dtype=np.int32),  # padding sees only itself
      "previous": np.full(T, -1, np.int32),
      "read_positions": np.zeros(self.reads, np.int32),
      "read_targets": np.full(self.reads, -1, np.int32),
    }
    start = read = 0
    for i in self.plan[row]:
      tree = self.trees[i]
      span, reads = slice(start, start + len(tree)), slice(read, read + len(tree.read_targets))
      out["tokens"][span] = tree.tokens
      out["positions"][span] = tree.positions
      out["subtree_end"][span] = tree.subtree_end + start
      out["previous"][span] = np.where(tree.previous < 0, -1, tree.previous + start)
      out["read_positions"][reads] = tree.read_positions + start
      out["read_targets"][reads] = tree.read_targets
      start, read = span.stop, reads.stop
    return out

  @property
  def fill(self) -> float:
    """Share of token slots that hold real tokens."""
    return sum(len(t) for t in self.trees) / max(len(self) * self.row_length, 1)

  @property
  def hash(self) -> str:
    """Of plan and content: a run may only be resumed on the rows it was started with."""
    digest = hashlib.sha256(repr((self.row_length, self.plan)).encode())
    for tree in self.trees:
      for field in dataclasses.fields(tree):
        digest.update(getattr(tree, field.name).tobytes())
    return digest.hexdigest()


def batches(rows: PackedRows, batch_rows: int, seed: int) -> grain.MapDataset:
  """Endless shuffled batches; `batches(...)[step]` is a pure function of the step.

  Epochs follow one another without a gap: a batch may hold the end of one and start the next.
  """
  dataset = grain.MapDataset.source(rows).seed(seed).shuffle().repeat()
  return dataset.batch(batch_rows).map(lambda fields: Batch(**fields))


def eval_batches(rows: PackedRows, batch_rows: int, limit: int | None = None) -> list[Batch]:
  """Every row once, or `limit` of them evenly spread; the last batch is filled with empty rows.

  The first rows of a plan hold the longest examples, so a share of them would be no sample.
  """
  count = len(rows) if limit is None else min(len(rows), limit)
  chosen = [i * len(rows) // count for i in range(count)]
  empty = {k: np.zeros_like(v) for k, v in rows[0].items()}
  empty["subtree_end"] = np.arange(1, rows.row_length + 1, dtype=np.int32)
  empty["previous"] -= 1
  empty["read_targets"] -= 1
  out = []
  for start in range(0, count, batch_rows):
    part = [rows[i] for i in chosen[start : start + batch_rows]]
    part += [empty] * (batch_rows - len(part))
    out.append(Batch(**{k: np.stack([row[k] for row in part]) for k in empty}))
  return out
