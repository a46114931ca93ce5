"""One run at a time writes a work directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys

from prm_jax import storage
from prm_jax.training import hosts

LOCK = "train.lock"


@contextlib.contextmanager
def locked(workdir: storage.Path):
  """Holds the work directory, which is made if it is not there; of several hosts the first does.

  The lock is the operating system's, on an open file: it goes with the process, however that ends,
  so the file that stays behind means nothing.  In a bucket there are no locks: the file only says
  who wrote there last.

  Raises:
    ValueError: another process holds it.
    OSError: it cannot be written.
  """
  path = workdir / LOCK
  if not hosts.is_first():
    yield
    return
  own = f"process {os.getpid()} on {socket.gethostname()}\n"
  if storage.in_bucket(workdir):
    storage.write(path, own.encode())
    yield
    return
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - closed below
  except OSError as error:
    raise OSError(f"--workdir={workdir} cannot be written: {error}") from error
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      raise ValueError(
        f"{workdir}: another run is writing here ({file.read().strip() or 'unknown'}); wait for "
        "its end, or give this one its own --workdir"
      ) from None
    except OSError as error:  # some network file systems have no locks
      print(f"warning: {path}: no locks here ({error}); start one run only", file=sys.stderr)
    file.truncate(0)
    file.write(own)
    file.flush()
    yield
