"""SIGTERM becomes a checkpoint after the step under way, and the exit code 75.

Cloud machines, Kubernetes and Slurm send SIGTERM to a process that they take away, and kill it some
30 seconds later.  `EXIT_CODE` is the sysexits.h code of a temporary failure: start the job again.
It differs from 1 (an error that will come again), from 2 (a wrong flag), and from 143, with which
systemd and others count a service as stopped on purpose.
"""

from __future__ import annotations

import os
import signal
import threading

import jax
from jax.experimental import multihost_utils

EXIT_CODE = os.EX_TEMPFAIL  # 75


class Preempted(BaseException):  # as KeyboardInterrupt, so that `except Exception` lets it pass
  """The run received SIGTERM and has saved its state."""


def exit_on_sigterm() -> None:
  """Makes SIGTERM end this process at once with `EXIT_CODE`: for the time before the first step.

  An exception would not do: libraries that read a checkpoint take it for damage, and Python drops
  one that is raised during garbage collection.
  """

  def leave(*_) -> None:
    os.write(2, b"stopped by SIGTERM before the first step; there was nothing to save\n")
    os._exit(EXIT_CODE)

  signal.signal(signal.SIGTERM, leave)


class PreemptionGuard:
  """Context manager that records SIGTERM instead of ending the process.

  With `jax.distributed`, JAX itself listens to SIGTERM, and all hosts stop after the same step,
  whichever of them received it.  Outside of the main thread, signals are not recorded.
  """

  def __init__(self):
    self._received = False
    self._previous = None

  def __enter__(self) -> PreemptionGuard:
    main = threading.current_thread() is threading.main_thread()
    if main and not jax.distributed.is_initialized():
      self._previous = signal.signal(signal.SIGTERM, self._record)
    return self

  def __exit__(self, *_) -> None:
    if self._previous is not None:
      signal.signal(signal.SIGTERM, self._previous)

  def _record(self, *_) -> None:
    self._received = True

  def reached(self, step: int) -> bool:
    """Whether to save after `step` updates, and stop; to be called after every update."""
    if jax.distributed.is_initialized():
      return multihost_utils.reached_preemption_sync_point(step)
    return self._received
