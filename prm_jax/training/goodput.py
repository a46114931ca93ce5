"""Where a run's seconds go: what share of them are updates, and what takes the rest."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator

NO_PART = {"step", "split", "goodput", "total", "unix"}  # of a record: no seconds of their own
DATA_BOUND = 0.1  # share of the time spent waiting for rows that is worth a warning


class Goodput:
  """Seconds of a run, by what they went to: of its processes so far, and of this one."""

  def __init__(self):
    self._began, self._time = time.perf_counter(), time.time()
    self._before: collections.Counter[str] = collections.Counter()
    self.seconds: collections.Counter[str] = collections.Counter()  # of this process

  @contextlib.contextmanager
  def spent_on(self, name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
      yield
    finally:
      self.seconds[name] += time.perf_counter() - start

  def resume(self, last: dict[str, float]) -> None:
    """Adds the processes before this one.

    Args:
      last: their `summary` at the step that this one goes on from.  What came after it is "away":
        work that a kill has undone, and the time in which nothing ran.
    """
    self._before.update({name: x for name, x in last.items() if name not in NO_PART})
    self._before["away"] += max(self._time - last["unix"], 0.0)  # clocks of two hosts may differ

  def summary(self) -> dict[str, float]:
    """Seconds of everything, which add up to the "total" since the run first began.

    "updates" are what is left in each process; "goodput" is their share of the total; "unix" is the
    time now, in seconds since 1970.
    """
    updates = time.perf_counter() - self._began - self.seconds.total()
    seconds = collections.Counter(updates=updates, away=0.0)
    seconds.update(self._before)
    seconds.update(self.seconds)
    total = seconds.total()
    return {"goodput": seconds["updates"] / total, "total": total, **seconds, "unix": time.time()}


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
