"""Several hosts as one job: joining it, and making sure that all run the same.

Every host runs the same program with the same settings.  Each packs all rows, which is the same
plan everywhere, and builds of every batch only the rows that its own devices hold
(`sharding.global_batch`).  The first host writes what is not sharded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

import jax
import numpy as np
from jax.experimental import multihost_utils

from prm_jax import config as config_lib
from prm_jax.runtime import json_lines

PATIENCE = 20  # seconds until it is said that hosts are missing
CONNECT = 300  # seconds until a job is given up of which hosts are missing
SILENCE = 30  # seconds without a sign of life after which a host counts as dead
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "grain", "prm_jax")
LOST = os.EX_TEMPFAIL  # exit code where another host is gone: start the job again


@contextlib.contextmanager
def job(c: config_lib.Hosts) -> Iterator[None]:
  """Joins the job's other processes, if there are; on an error leaves them at once, by exit code 1.

  A process that waited for the others to end, as JAX does, would keep them in a collective that
  this one has left.  The code is `LOST` if it is another host that has left.  (On TPUs JAX itself
  then ends the process, by SIGABRT.)
  """
  join(c)
  try:
    yield
  except Exception as error:
    if jax.process_count() == 1:
      raise
    print(
      of_this(f"{type(error).__name__}: {error}"),
      "The job's other hosts end too.  If another one has ended before this one, its log says why.",
      "Started again on all hosts, training goes on from the newest checkpoint.",
      sep="\n",
      file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(LOST if _left_alone(error) else 1)


# What is said of a host that is gone, in whatever class: by collectives on CPUs, and by JAX's
# coordination service, also of barriers.
GONE = re.compile(r"\bGloo\b|gloo/transport|CoordinationService|\b[Bb]arrier\b")
# The same as a status of JAX's own errors.  Storage has these codes too, where no host is gone.
STATUS = re.compile(r"\b(UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): ")


def _left_alone(error: BaseException | None) -> bool:
  """Whether another host's end is among the causes, which may be of several classes."""
  if error is None:
    return False
  said, of_jax = str(error), isinstance(error, jax.errors.JaxRuntimeError)
  if GONE.search(said) or (of_jax and STATUS.search(said)):
    return True
  # The context also where there is a cause: closing what was open may end with an error of its own.
  causes = (error.__cause__, error.__context__, *getattr(error, "exceptions", ()))
  return any(map(_left_alone, causes))


def join(c: config_lib.Hosts) -> None:
  """Makes this process one of the job's, if the job has several; before JAX is used.

  On TPU slices, Kubernetes, Slurm and MPI, JAX finds the others by itself.  If they do not come
  within `CONNECT` seconds, JAX ends the process.

  Raises:
    ValueError: what is said of the hosts is not enough, or makes no sense.
  """
  given = {}
  if c.coordinator_address:
    given = {name: getattr(c, name) for name in ("coordinator_address", "num_processes")}
    given["process_id"] = c.process_id
  # On CPUs two programs under way at once may meet in another order on another host, and wait; or
  # take, on many simulated devices, the threads that each needs for all of its devices at once.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  timer = threading.Timer(PATIENCE, _say_who_is_missing, [c])
  timer.daemon = True
  timer.start()
  try:
    jax.distributed.initialize(
      **given, initialization_timeout=CONNECT, heartbeat_timeout_seconds=SILENCE
    )
  except (ValueError, RuntimeError) as error:
    alone = ("coordinator_address should be defined", "must be called before any JAX calls")
    if given or not any(text in str(error) for text in alone):
      raise
    simulated = jax.config.jax_num_cpu_devices > 1 or "device_count" in os.getenv("XLA_FLAGS", "")
    jax.config.update("jax_cpu_enable_async_dispatch", not simulated)
    return  # nothing here says that there are others, or JAX is in use already, as in a notebook
  finally:
    timer.cancel()
  print(f"host {jax.process_index()} of {jax.process_count()}", file=sys.stderr, flush=True)


def _say_who_is_missing(c: config_lib.Hosts) -> None:
  where = f" at {c.coordinator_address}" if c.coordinator_address else ""
  print(
    f"waiting for the job's other hosts{where} since {PATIENCE} s, for {CONNECT} s at most.  Does "
    "this command run on all of them (gcloud: --worker=all)?  Can they reach the first one's port?",
    file=sys.stderr,
    flush=True,
  )


def is_first() -> bool:
  """Whether this host writes what all hosts know."""
  return jax.process_index() == 0


def of_this(text: str) -> str:
  """The text with this host's number before it, where there are others."""
  count = jax.process_count()
  return text if count == 1 else f"host {jax.process_index()} of {count}: {text}"


@contextlib.contextmanager
def written_once(path: str | pathlib.Path) -> Iterator[TextIO]:
  """`json_lines.written` on the first host; what the others write goes nowhere."""
  with json_lines.written(path) if is_first() else open(os.devnull, "w") as file:
    yield file


def somewhere(here: bool) -> bool:
  """Whether it is so on any host; all hosts ask at the same point."""
  if jax.process_count() == 1:
    return here
  return bool(multihost_utils.process_allgather(np.array(here)).any())


def check_same(facts: Mapping[str, Any]) -> None:
  """Compares what every host should have alike; all hosts call it at the same point.

  Args:
    facts: name to value, of which JSON or its text is compared.

  Raises:
    ValueError: two hosts differ; says in what.
  """
  if jax.process_count() == 1:
    return
  own = np.frombuffer(json.dumps(facts, default=str).encode(), np.uint8)
  length = int(multihost_utils.process_allgather(np.int32(len(own))).max())
  padded = np.full(length, ord(" "), np.uint8)
  padded[: len(own)] = own
  first, *others = map(json.loads, map(bytes, multihost_utils.process_allgather(padded)))
  differences = [
    f"  {name}: {first.get(name)!r} on host 0, {other.get(name)!r} on host {i}"
    for i, other in enumerate(others, 1)
    for name in first | other
    if first.get(name) != other.get(name)
  ]
  if differences:
    raise ValueError(
      "the hosts of this job do not run the same; give all the same command, packages and data:\n"
      + "\n".join(differences)
    )


def check_same_command(args: Any, files: Iterable[pathlib.Path]) -> None:
  """`check_same` of a script: its flags, what it reads, and the packages.

  Hosts that read other rows would compute other numbers of batches, and wait for each other.

  Args:
    args: the flags, as a dataclass.  `pathlib.Path`s may differ, so long as `files` do not.
    files: what is read; by several hosts only, once more here.

  Raises:
    ValueError: two hosts differ; says in what.
    OSError: a file cannot be read.
  """
  if jax.process_count() == 1:
    return
  digest = hashlib.sha256()
  for path in files:
    with path.open("rb") as file:
      digest.update(hashlib.file_digest(file, "sha256").digest())
  flags = {
    f"--{name}": value
    for name, value in dataclasses.asdict(args).items()
    if name != "hosts" and not isinstance(value, pathlib.Path)
  }
  check_same(flags | {"sha256 of what is read": digest.hexdigest()} | versions())


def versions() -> dict[str, str]:
  """Of the packages that decide what is computed."""
  found = {}
  for package in PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = "not installed as a package"
  return found
