"""A lock, so that one run at a time writes a work directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import sys

from prm_jax.runtime import distributed, storage

NAME = "train.lock"


class WorkdirLock:
  """Context manager that locks a work directory, which it makes if needed; on the first host.

  The operating system locks the open file and unlocks it when the process ends in any way, so a
  file that is left behind means nothing.  A bucket has no locks: there the file names the run that
  started last, and an earlier run finds that out by `check`.
  """

  def __init__(self, workdir: storage.Path):
    self.workdir = workdir
    self._mark = f"process {os.getpid()} on {socket.gethostname()}, {secrets.token_hex(8)}\n"
    self._stack = contextlib.ExitStack()

  def __enter__(self) -> WorkdirLock:
    """Raises ValueError if another process has the lock, OSError if it cannot be written."""
    if distributed.is_first():
      if storage.in_bucket(self.workdir):
        storage.write(self.workdir / NAME, self._mark.encode())
      else:
        self._lock_file()
    return self

  def _lock_file(self) -> None:
    path = self.workdir / NAME
    try:
      self.workdir.mkdir(parents=True, exist_ok=True)
      file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - closed by the stack
    except OSError as error:
      raise OSError(f"--workdir={self.workdir} cannot be written: {error}") from error
    self._stack.enter_context(file)
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      raise ValueError(
        f"{self.workdir}: another run is writing here ({file.read().strip() or 'unknown'}); wait "
        "for its end, or give this one its own --workdir"
      ) from None
    except OSError as error:  # some network file systems have no locks
      print(f"warning: {path}: no locks here ({error}); start one run only", file=sys.stderr)
    file.truncate(0)
    file.write(self._mark)
    file.flush()

  def __exit__(self, kind, error, traceback) -> None:
    self._stack.close()
    if isinstance(error, Exception):  # such as a failed save, whose files another run has deleted
      with contextlib.suppress(OSError):
        if other := self.taken_by():
          raise self._lost(other) from error

  def taken_by(self) -> str:
    """The run that has taken over the bucket since, as seen by the first host; "": none."""
    if not storage.in_bucket(self.workdir) or not distributed.is_first():
      return ""
    try:
      found = storage.read(self.workdir / NAME).decode(errors="replace")
    except FileNotFoundError:
      return ""
    return "" if found == self._mark else found.strip() or "unknown"

  def check(self) -> None:
    """ValueError if another run has taken over; to be called by all hosts before they write."""
    if storage.in_bucket(self.workdir) and distributed.somewhere(bool(other := self.taken_by())):
      raise self._lost(other)

  def _lost(self, other: str) -> ValueError:
    return ValueError(
      f"{self.workdir}: another run has taken over this work directory{f' ({other})' * bool(other)}"
      "; this one ends, and saves nothing more.  Start one only, or give each its own --workdir"
    )
