"""What share of a run's time are updates, and what takes the rest."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator

NO_PART = {"step", "split", "goodput", "total", "unix"}  # fields of a summary that are not a part


class Goodput:
  """Seconds of a run by what they were spent on, over all its processes."""

  def __init__(self):
    self._began, self._began_unix = time.perf_counter(), time.time()
    self._before: collections.Counter[str] = collections.Counter()  # seconds of earlier processes
    self.seconds: collections.Counter[str] = collections.Counter()  # of this process

  @contextlib.contextmanager
  def spent_on(self, part: str) -> Iterator[None]:
    """Adds the time of the block to `part`."""
    start = time.perf_counter()
    try:
      yield
    finally:
      self.seconds[part] += time.perf_counter() - start

  def resume(self, last: dict[str, float]) -> None:
    """Adds the time of earlier processes.

    Args:
      last: their `summary` at the step that is resumed.  The time since then is "away": nothing
        ran, or it did work that a kill undid.
    """
    self._before.update({part: x for part, x in last.items() if part not in NO_PART})
    self._before["away"] += max(self._began_unix - last["unix"], 0.0)  # host clocks may differ

  def summary(self) -> dict[str, float]:
    """Seconds of each part, and their "total" since the run first began.

    "updates" is all time of a process that no other part claims, and "goodput" the share of
    "updates" in the total.  "unix" is the present time in seconds since 1970.
    """
    rest = time.perf_counter() - self._began - self.seconds.total()
    seconds = collections.Counter(updates=rest, away=0.0)
    seconds.update(self._before)
    seconds.update(self.seconds)
    total = seconds.total()
    return {"goodput": seconds["updates"] / total, "total": total, **seconds, "unix": time.time()}
