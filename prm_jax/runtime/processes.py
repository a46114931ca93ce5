"""Child processes: the cores that they may use, and their end."""

import ctypes
import os
import signal
import sys


def usable_cores() -> list[int]:
  """Returns the CPU cores that this process may use, or all where the system does not tell."""
  every = range(os.cpu_count() or 1)
  return sorted(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else every)


def end_with_parent() -> None:
  """Makes the system kill this process when its parent ends; only on Linux."""
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
