"""Child processes: the cores that they may use, their memory allocator, and their end."""

import ctypes
import ctypes.util
import os
import signal
import sys

# Pages that glibc's allocator gets from the system are larger, and cleared faster.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def usable_cores() -> list[int]:
  """Returns the CPU cores that this process may use, or all where the system does not tell."""
  every = range(os.cpu_count() or 1)
  return sorted(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else every)


def allocator() -> dict[str, str]:
  """Returns the environment variables of a faster memory allocator for CPUs; none outside Linux.

  glibc returns large blocks to the system, which clears their pages again in each training step.
  jemalloc, where it is installed, keeps them.  Otherwise glibc uses large pages.
  """
  if sys.platform != "linux":
    return {}
  if library := ctypes.util.find_library("jemalloc"):
    # Unused pages go back after 10 s.  Without oversize_threshold, those of blocks of 8 MB or more
    # would go back at once.
    return {"LD_PRELOAD": library, "MALLOC_CONF": "thp:always,oversize_threshold:0"}
  return LARGE_PAGES


def end_with_parent() -> None:
  """Makes the system kill this process when its parent ends; only on Linux."""
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
