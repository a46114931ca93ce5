"""Preemption: after SIGTERM, a run saves a checkpoint and ends with the exit code 75.

Cloud machines, Kubernetes and Slurm send SIGTERM to a process some 30 seconds before they kill it.
The code 75 means a temporary failure (sysexits.h): start the job again.  systemd and others take
143, the usual code after SIGTERM, for a stop on purpose.
"""

import contextlib
import signal
from typing import Self

import jax
from jax.experimental import multihost_utils


class PreemptionGuard(contextlib.ExitStack):
  """Context manager that records SIGTERM instead of ending the process.

  With `jax.distributed`, JAX itself handles SIGTERM, and all hosts stop after the same step,
  whichever of them received it.  Outside of the main thread, no signal is recorded.
  """

  _received = False

  def __enter__(self) -> Self:
    if not jax.distributed.is_initialized():
      with contextlib.suppress(ValueError):  # outside of the main thread
        previous = signal.signal(signal.SIGTERM, self._record)
        self.callback(signal.signal, signal.SIGTERM, previous)
    return self

  def _record(self, *_) -> None:
    self._received = True

  def reached(self, step: int) -> bool:
    """Returns whether to save and stop after `step` updates.  Call it after every update."""
    if jax.distributed.is_initialized():
      return multihost_utils.reached_preemption_sync_point(step)
    return self._received
