"""Jobs of several hosts: joining, stopping, and checking that all hosts run the same program.

Every host runs the same program with the same settings.  Each host makes the same plan of all rows,
and builds only the rows of a batch that its own devices hold (`sharding.global_batch`).  The first
host writes all files that are not sharded, except that each host has its own journal
(`runtime/journal.py`).
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from prm_jax import config as config_lib
from prm_jax.runtime import exits, storage

PATIENCE = 20  # seconds until a message says that hosts are missing
CONNECT = 300  # seconds until JAX gives up on a job whose hosts are missing
SILENCE = 30  # seconds without a heartbeat after which a host counts as dead
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "grain", "prm_jax")
WAITING = (
  "waiting for the other hosts.  Does this command run on all of them (gcloud: --worker=all)?  "
  "Can they reach the first one's port?"
)
ENDING = (
  "The job's other hosts end too.  If one of them ended before this one, its log says why.  "
  "Start the job again on all hosts: training resumes from the newest checkpoint, other work from "
  "its journals."
)


@contextlib.contextmanager
def job(c: config_lib.Hosts, saves: bool = False) -> Iterator[None]:
  """Joins the job's other processes, if there are any; ends this one if the block raises an error.

  Enter it before JAX is used.  JAX detects the other processes on TPU slices, Kubernetes, Slurm and
  MPI, and ends this process if they do not connect within `CONNECT` seconds.

  After an error this process exits at once: JAX's own shutdown would wait minutes for hosts that
  wait for this one in a collective.  The exit code is 75 if another host is gone, else 1.  (On TPUs
  JAX itself ends the process by SIGABRT when another host is gone.)

  Args:
    saves: whether the block saves its state after SIGTERM (`PreemptionGuard`); otherwise
      SIGTERM ends this process.
  """
  jax.config.update("jax_enable_preemption_service", saves)  # the service takes over SIGTERM
  _join(c)
  try:
    yield
  except Exception as error:
    if jax.process_count() == 1:
      raise
    if not isinstance(error, exits.EXPECTED):
      traceback.print_exc()
    _say(of_this(f"{type(error).__name__}: {error}\n{ENDING}"))
    sys.stdout.flush()
    os._exit(1 if _left_together() else exits.AGAIN)


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def _left_together() -> bool:
  """Leaves the job; returns False if JAX's coordination service finds another host dead.

  Every host with an error calls it.  Hosts that fail alike meet at a barrier at once, and then shut
  JAX's client down together; otherwise the exit of the first host, which runs the service, would
  abort the others.  A dead host breaks the barrier, after `SILENCE` seconds at the latest.  If the
  barrier times out, the other hosts are alive and waiting, so the error is this host's own.
  """
  timeout, start = 1.5 * SILENCE, time.monotonic()
  try:
    multihost.get_barrier_sync_fn()(key="error", timeout_ms=int(1000 * timeout))
  except Exception:  # of any class: a broken barrier
    return time.monotonic() - start >= timeout
  with contextlib.suppress(Exception):
    jax.distributed.shutdown()
  return True


def _join(c: config_lib.Hosts) -> None:
  """Joins the other processes of the job, if it has several."""
  given = dataclasses.asdict(c) if c.coordinator_address else {}
  # On CPUs, two programs in flight could meet in different orders on different hosts and deadlock,
  # or starve each other of threads where a host simulates many devices.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  timer = threading.Timer(PATIENCE, _say, [WAITING])
  timer.daemon = True
  timer.start()
  try:
    jax.distributed.initialize(
      **given, initialization_timeout=CONNECT, heartbeat_timeout_seconds=SILENCE
    )
    _say(of_this("joined"))
  except (ValueError, RuntimeError) as error:
    alone = ("coordinator_address should be defined", "must be called before any JAX calls")
    if given or not any(text in str(error) for text in alone):
      raise
    # This is a single host, or JAX is in use already, as in a notebook.
    simulated = jax.config.jax_num_cpu_devices > 1 or "device_count" in os.getenv("XLA_FLAGS", "")
    jax.config.update("jax_cpu_enable_async_dispatch", not simulated)
  finally:
    timer.cancel()


class PreemptionGuard(contextlib.ExitStack):
  """Context manager that records SIGTERM instead of ending the process.

  Cloud machines, Kubernetes and Slurm send SIGTERM to a process some 30 seconds before they kill
  it.  With several hosts, JAX itself handles SIGTERM, and all hosts stop after the same step,
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


def is_first() -> bool:
  """Returns whether this is the host that writes files and logs."""
  return jax.process_index() == 0


def of_this(text: str) -> str:
  """Returns the text, after this host's number if there are several hosts."""
  count = jax.process_count()
  return text if count == 1 else f"host {jax.process_index()} of {count}: {text}"


@contextlib.contextmanager
def written_together() -> Iterator[Callable[..., IO]]:
  """Wraps `storage.written_together` on the first host; other hosts write to the null device."""
  if is_first():
    with storage.written_together() as output:
      yield output
  else:
    with open(os.devnull, "w") as nowhere:
      yield lambda *_: nowhere


def somewhere(here: bool) -> bool:
  """Returns whether `here` is true on any host.  All hosts call it."""
  return bool(multihost_utils.process_allgather(np.array(here)).any())


def check_same(facts: Mapping[str, Any]) -> None:
  """Checks that values, compared by name and as JSON, agree on all hosts.  All hosts call it.

  Raises:
    ValueError: two hosts differ; the message names the values and the hosts.
  """
  encoded = json.dumps(facts, default=str).encode()
  length = int(multihost_utils.process_allgather(np.int32(len(encoded))).max())
  padded = np.frombuffer(encoded.ljust(length), np.uint8)
  first, *others = map(json.loads, map(bytes, multihost_utils.process_allgather(padded)))
  differences = [
    f"\n  {name}: {first.get(name)!r} on host 0, {other.get(name)!r} on host {i}"
    for i, other in enumerate(others, 1)
    for name in first | other
    if first.get(name) != other.get(name)
  ]
  if differences:
    raise ValueError(
      "the hosts of this job differ; all of them need the same command, packages and data:"
      + "".join(differences)
    )


def check_same_command(args: Any, files: Iterable[pathlib.Path]) -> None:
  """Applies `check_same` to the flags of a script, the contents of its input files, and packages.

  Hosts with different input would compute different numbers of batches, and wait for each other.
  The paths in `args`, a dataclass, may differ between hosts if the contents of `files` do not.
  """
  if jax.process_count() == 1:
    return
  digest = hashlib.sha256("".join(map(storage.sha256_of, files)).encode())
  flags = {
    f"--{name}": value
    for name, value in dataclasses.asdict(args).items()
    if name != "hosts" and not isinstance(value, pathlib.Path)
  }
  check_same(flags | {"sha256 of what is read": digest.hexdigest()} | versions())


def versions() -> dict[str, str]:
  """Returns the versions of the packages that the computed numbers depend on."""
  found = dict.fromkeys(PACKAGES, "not installed as a package")
  for package in PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[package] = importlib.metadata.version(package)
  return found
