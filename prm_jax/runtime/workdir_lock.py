"""One run at a time writes a work directory."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import secrets
import socket
import sys
from collections.abc import Iterator

from prm_jax.runtime import distributed, storage

LOCK = "train.lock"


@dataclasses.dataclass(frozen=True)
class WorkdirLock:
  """That a work directory is this run's; in a bucket, until another run takes it over."""

  workdir: storage.Path
  own: bytes  # what the lock file says while it is

  def taken_by(self) -> str:
    """Who has taken it over; "": nobody.  Only the first host looks, and only in a bucket."""
    if not storage.in_bucket(self.workdir) or not distributed.is_first():
      return ""
    try:
      found = storage.read(self.workdir / LOCK)
    except FileNotFoundError:
      return ""
    return "" if found == self.own else found.decode(errors="replace").strip() or "unknown"

  def check(self) -> None:
    """To be called by all hosts before they write; ValueError if another run has taken over."""
    if storage.in_bucket(self.workdir) and distributed.somewhere(bool(by := self.taken_by())):
      raise self.lost(by)

  def lost(self, by: str) -> ValueError:
    who = f" ({by})" if by else ""
    return ValueError(
      f"{self.workdir}: another run has taken over this work directory{who}; this one ends, and "
      "saves nothing more.  Start one only, or give each its own --workdir"
    )


@contextlib.contextmanager
def locked(workdir: storage.Path) -> Iterator[WorkdirLock]:
  """Holds the work directory, which is made if it is not there; of several hosts the first does.

  The lock is the operating system's, on an open file: it goes with the process, however that ends,
  so the file that stays behind means nothing.  In a bucket there are no locks: the file says who
  started there last, and the run before finds that out by `WorkdirLock.check`.

  Raises:
    ValueError: another process holds it; or has taken it over, whatever error that led to.
    OSError: it cannot be written.
  """
  path = workdir / LOCK
  own = f"process {os.getpid()} on {socket.gethostname()}, {secrets.token_hex(8)}\n"
  hold = WorkdirLock(workdir, own.encode())
  if not distributed.is_first():
    yield hold
    return
  if storage.in_bucket(workdir):
    storage.write(path, hold.own)
    try:
      yield hold
    except Exception as error:  # such as of a save whose files the other run has deleted
      with contextlib.suppress(OSError):
        if by := hold.taken_by():
          raise hold.lost(by) from error
      raise
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
    yield hold
