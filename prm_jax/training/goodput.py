"""Where a run's seconds go: what share of them are updates, and what takes the rest."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator

DATA_BOUND = 0.1  # share of the time spent waiting for rows that is worth a warning


class Goodput:
  """Seconds of one process of a run, by what they went to."""

  def __init__(self):
    self._began = time.perf_counter()
    self.seconds: collections.Counter[str] = collections.Counter()

  @contextlib.contextmanager
  def spent_on(self, name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
      yield
    finally:
      self.seconds[name] += time.perf_counter() - start

  def summary(self) -> dict[str, float]:
    """Seconds of everything, "updates" being what is left; and "goodput", the share of those."""
    total = time.perf_counter() - self._began
    updates = max(total - self.seconds.total(), 0.0)
    return {"goodput": updates / total, "total": total, "updates": updates, **self.seconds}


class Window:
  """The updates since the last line of metrics: their speed, and how long rows kept them waiting.

  Evaluation and saving, which come between two windows, count for neither.
  """

  def __init__(self, goodput: Goodput, tokens_per_update: float):
    self._goodput, self._tokens = goodput, tokens_per_update
    self.restart()

  def restart(self) -> None:
    self._then, self._waited = time.perf_counter(), self._goodput.seconds["data"]

  def close(self, updates: int) -> dict[str, float]:
    """Means over the updates of the window; the next one begins."""
    then, waited = self._then, self._waited
    self.restart()
    seconds = self._then - then
    return {
      "tokens_per_second": updates * self._tokens / seconds,
      "step_seconds": seconds / updates,
      "data_wait_seconds": (self._waited - waited) / updates,
    }


def data_bound(values: dict[str, float]) -> str | None:
  """What to say of a window whose updates waited for their rows; None: they did not."""
  share = values["data_wait_seconds"] / values["step_seconds"]
  if share < DATA_BOUND:
    return None
  return (
    f"data is the bottleneck: {share:.0%} of the time went to waiting for rows, which the host's "
    "processor builds; give it more cores, or each host fewer rows of a batch (more hosts)"
  )
