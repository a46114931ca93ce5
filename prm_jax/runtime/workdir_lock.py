"""A lock that lets one run at a time write a work directory."""

import contextlib
import fcntl
import os
import secrets
import socket
import sys
from typing import Self

from prm_jax.runtime import distributed, json_lines, storage

OWN = "start one run only, or give each its own --workdir"


class WorkdirLock:
  """Context manager that makes and locks a work directory, on the first host only.

  Entering it raises ValueError if another process has the lock or the directory is a dataset, and
  OSError if the directory cannot be written.

  The operating system unlocks the file when the process ends in any way, so a leftover file means
  nothing.  A bucket has no locks: there the file names the run that started last, and `check`
  raises in an earlier one.
  """

  def __init__(self, workdir: storage.Path):
    self.workdir = workdir
    self._path = workdir / "train.lock"
    self._mark = f"process {os.getpid()} on {socket.gethostname()}, {secrets.token_hex(8)}"
    self._stack = contextlib.ExitStack()

  def __enter__(self) -> Self:
    if not distributed.is_first():
      return self
    if storage.in_bucket(self.workdir):
      storage.write(self._path, self._mark.encode())
      return self
    if "dataset" in json_lines.document_or_empty(self.workdir / "manifest.json"):
      raise ValueError(
        f"{self.workdir}: holds a prepared dataset; give the run a --workdir of its own"
      )
    self.workdir.mkdir(parents=True, exist_ok=True)
    file = self._stack.enter_context(open(self._path, "a+", encoding="utf-8"))
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      who = self._path.read_text()
      raise ValueError(f"{self.workdir}: another run is writing here ({who}); {OWN}") from None
    except OSError as error:  # some network file systems have no locks
      print(f"warning: {self._path}: no locks here ({error}); start one run only", file=sys.stderr)
    file.truncate(0)
    file.write(self._mark)
    file.flush()
    return self

  def __exit__(self, kind, error, traceback) -> None:
    self._stack.close()
    if isinstance(error, Exception):  # another run may have caused it by deleting files
      with contextlib.suppress(OSError):
        if other := self.taken_by():
          raise self._lost(other) from error

  def taken_by(self) -> str:
    """Returns the run that has since taken over the bucket; "" if none, or not the first host."""
    if not storage.in_bucket(self.workdir) or not distributed.is_first():
      return ""
    owner = storage.read(self._path).decode()
    return owner if owner != self._mark else ""

  def check(self) -> None:
    """Raises ValueError if another run has taken over.  All hosts call it before they write."""
    if storage.in_bucket(self.workdir) and distributed.somewhere(bool(other := self.taken_by())):
      raise self._lost(other or "see the first host's log")

  def _lost(self, other: str) -> ValueError:
    return ValueError(
      f"{self.workdir}: another run has taken over this work directory ({other}); this one ends, "
      f"and saves nothing more; {OWN}"
    )
