"""Being stopped from outside: SIGTERM becomes a checkpoint at the next step, and an exit code.

Cloud machines, Kubernetes and Slurm send SIGTERM to a process and kill it some 30 seconds later.
The run then ends with `EXIT_CODE`, the sysexits.h code of a temporary failure: start it again.  It
is neither 1 (an error that will come again) nor 2 (a wrong flag), and not 143 either, with which
systemd and others count a service as stopped on purpose.
"""

from __future__ import annotations

import os
import signal
import threading

import jax
from jax.experimental import multihost_utils

EXIT_CODE = os.EX_TEMPFAIL  # 75
TOO_EARLY = "told to stop (SIGTERM) before the first step; nothing was to be saved"


class Preempted(BaseException):  # as KeyboardInterrupt: not to be caught with other errors
  """The run was told to stop, and has saved what it had."""


class PreemptionGuard:
  """In a `with` block: whether the run has been told to stop.

  With `jax.distributed`, whichever host is told, all hosts stop at the same step; jax listens to
  SIGTERM itself there.  Outside the main thread nobody listens.
  """

  def __init__(self):
    self._told = self._deferring = False
    self._before = None

  def __enter__(self) -> PreemptionGuard:
    main = threading.current_thread() is threading.main_thread()
    if main and not jax.distributed.is_initialized():
      self._before = signal.signal(signal.SIGTERM, self._on_signal)
    return self

  def __exit__(self, *_) -> None:
    if self._before is not None:
      signal.signal(signal.SIGTERM, self._before)

  def defer(self) -> None:
    """From here on SIGTERM no longer raises Preempted on the spot.

    What it would break off is reading a checkpoint, which would be taken for a damaged one; later
    there is something to save.
    """
    self._deferring = True

  def heed(self) -> None:
    """Raises Preempted if SIGTERM came since `defer`: there is nothing to save yet."""
    if self._told:
      raise Preempted(TOO_EARLY)

  def reached(self, step: int) -> bool:
    """Whether to save now, after `step` updates, and stop.  To be asked after every update."""
    if jax.distributed.is_initialized():
      return multihost_utils.reached_preemption_sync_point(step)
    return self._told

  def _on_signal(self, *_) -> None:
    self._told = True  # once more changes nothing: the save goes on
    if not self._deferring:  # lost if this interrupts Python's garbage collector: `heed` asks again
      raise Preempted(TOO_EARLY)
