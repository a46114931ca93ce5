"""The results of a run's batches in a journal beside its output, from which a killed run resumes.

A run computes the same batches in the same order each time, so a batch's number identifies it.
"""

import base64
import contextlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from prm_jax.runtime import journal


@contextlib.contextmanager
def beside(output: pathlib.Path) -> Iterator["BatchJournal"]:
  """Yields a journal to `open`; deletes it if the block succeeds, or if no batch is done.

  Enter it before the block that renames the output, so that the journal is deleted last.
  """
  path, keep = journal.path(output, jax.process_index()), False
  batches = BatchJournal(path.with_name(f".{path.name}"))
  try:
    yield batches
  except BaseException:
    keep = max(batches.count, batches.known) > 0
    raise
  finally:
    batches.close(keep)


class BatchJournal:
  """The class log-probabilities of the batches that are done."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self._journal: journal.Journal | None = None
    self.count = self.known = 0  # batches so far, and of an earlier process

  def open(self, facts: dict[str, Any]) -> None:
    """Opens the journal of the run that `facts` describe; replaces that of another run.

    Raises:
      ValueError: another process has it open.
    """
    self.path.parent.mkdir(parents=True, exist_ok=True)  # only the first host writes the output
    try:
      self._journal = journal.Journal(self.path, facts)
    except journal.OtherRun:
      self.path.unlink()
      self._journal = journal.Journal(self.path, facts)
    # Another host may have lost its disk, or be a batch behind.
    self.known = int(multihost_utils.process_allgather(np.int32(len(self._journal.done))).min())
    if self.known:
      print(f"resuming after {self.known:,} batches", file=sys.stderr)

  def next(self) -> np.ndarray | None:
    """Returns the result of the next batch, or None if it is to be computed and added."""
    if self.count >= self.known:
      return None
    (entry,) = self._journal.done.pop(self.count)
    self.count += 1
    return np.frombuffer(base64.b64decode(entry["float32"]), "<f4").reshape(entry["shape"])

  def add(self, result: np.ndarray) -> None:
    """Records the result of the next batch, float32."""
    data = base64.b64encode(result.astype("<f4").tobytes()).decode()
    self._journal.add(self.count, [{"shape": result.shape, "float32": data}])
    del self._journal.done[self.count]  # it is in the file
    self.count += 1

  def close(self, keep: bool) -> None:
    if self._journal:
      if not keep:
        self.path.unlink()
      self._journal.close()
