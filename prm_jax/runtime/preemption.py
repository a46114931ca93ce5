"""SIGTERM becomes a checkpoint after the step under way, and the exit code 75.

Cloud machines, Kubernetes and Slurm send SIGTERM to a process some 30 seconds before they kill it.
The code is that of a temporary failure (sysexits.h): start the job again.  systemd and others take
143, the usual code of SIGTERM, for a stop on purpose.
"""

import contextlib
import signal
from typing import Self

import jax
from jax.experimental import multihost_utils


class Preempted(BaseException):  # as KeyboardInterrupt, so that `except Exception` lets it pass
  """The run received SIGTERM and has saved its state."""


class PreemptionGuard(contextlib.ExitStack):
  """Context manager that records SIGTERM instead of ending the process.

  With `jax.distributed`, JAX itself listens to SIGTERM, and all hosts stop after the same step,
  whichever of them received it.  Outside of the main thread, signals are not recorded.
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
    """Whether to save after `step` updates, and stop; to be called after every update."""
    if jax.distributed.is_initialized():
      return multihost_utils.reached_preemption_sync_point(step)
    return self._received
