"""A journal of batch results beside a run's output, from which a killed run resumes.

A run computes the same batches in the same order each time.  The journal supplies results up to the
first batch whose contents differ.
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

from prm_jax.runtime import distributed, journal


@contextlib.contextmanager
def beside(output: pathlib.Path) -> Iterator["BatchJournal"]:
  """Yields a journal to `open`; deletes it if the block succeeds.

  Enter it before the block that renames the output, so that the journal is deleted last.
  """
  hidden = output.parent / f".{output.name}"
  batches = BatchJournal(journal.path(hidden, jax.process_index()))
  with contextlib.closing(batches):
    yield batches
  distributed.check_same({"output": "written"})  # the others wait for the first host
  for path in [batches.path, *journal.journals(hidden)]:  # those of all hosts, if they share a disk
    path.unlink(missing_ok=True)


class BatchJournal:
  """What `Rater.forward` returned for each finished batch."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self._journal: journal.Journal | None = None
    self._next = 0  # number of the next batch
    self._known = 0  # batches that are in every host's journal
    self._empty = self._recording = True
    self.resumed = False  # whether results were taken from the journal

  def open(self, model: dict[str, Any], mesh: jax.sharding.Mesh) -> None:
    """Opens the journal of a model on these devices; replaces one of another model.

    All hosts must call it.

    Args:
      model: the `identity` of the `Rater`.

    Raises:
      ValueError: another process has it open.
    """
    devices = {"mesh": dict(mesh.shape), "device": mesh.devices.flat[0].device_kind}
    # Nested under one key, because `Journal` raises OtherRun only where the keys are equal.
    facts = {"batches of": model | devices | distributed.versions()}
    self.path.parent.mkdir(parents=True, exist_ok=True)  # only the first host writes the output
    try:
      self._journal = journal.Journal(self.path, facts)
    except journal.OtherRun:
      print("starting over: weights, devices, packages or version have changed", file=sys.stderr)
      self.path.unlink()
      self._journal = journal.Journal(self.path, facts)
    done = len(self._journal.done)
    self._empty = not done
    # Another host may have lost its disk, or be a batch behind.
    self._known = int(multihost_utils.process_allgather(np.int32(done)).min())

  def next(self, key: str) -> np.ndarray | None:
    """Returns the next batch's result, or None if the caller must compute and `add` it.

    Args:
      key: identifies the batch's contents.
    """
    if self._next >= self._known:
      return None
    (entry,) = self._journal.done.pop(self._next)
    if distributed.somewhere(entry["key"] != key):
      self._known = 0
      return None
    self._next, self.resumed = self._next + 1, True
    if self._next == self._known:
      print(f"resuming after {self._next:,} batches", file=sys.stderr)
    return np.frombuffer(base64.b64decode(entry["float32"]), "<f4").reshape(entry["shape"])

  def add(self, key: str, result: np.ndarray) -> None:
    """Records the result of the next batch, float32; from the first NaN on, records nothing."""
    self._recording &= not np.isnan(result).any()
    if not self._recording:
      return
    data = base64.b64encode(result.astype("<f4").tobytes()).decode()
    self._journal.add(self._next, [{"key": key, "shape": result.shape, "float32": data}])
    del self._journal.done[self._next]  # it is in the file
    self._next += 1
    self._empty = False

  def close(self) -> None:
    """Deletes the journal if it has no batch."""
    if self._journal:
      if self._empty:
        self.path.unlink(missing_ok=True)
      self._journal.close()
