"""Paths on a file system or in a bucket of Cloud Storage (`gs://BUCKET/DIRECTORY`).

Files and directories are written under another name and take theirs when they are whole.
"""

import contextlib
import fcntl
import glob
import gzip
import importlib.util
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Literal

from etils import epath

Path = pathlib.Path | epath.Path


def path(text: str | os.PathLike[str]) -> Path:
  """A path with the methods of pathlib, which for a bucket read and write its objects.

  Raises:
    ValueError: a URL of another kind, or gcsfs, which reads buckets, is not installed.
  """
  text = os.fspath(text)
  if not re.match("[a-z0-9]+://", text):
    return pathlib.Path(text)
  if not re.match("gs://[^/]", text) or importlib.util.find_spec("gcsfs") is None:
    raise ValueError(f"{text}: expected a folder, or gs://BUCKET/DIRECTORY with gcsfs installed")
  return epath.Path(text)


def absolute(text: str | os.PathLike[str]) -> Path:
  """`path`, made absolute."""
  found = path(text)
  return found if in_bucket(found) else found.resolve()


def in_bucket(path: Path) -> bool:
  return isinstance(path, epath.Path)


@contextlib.contextmanager
def local(folder: Path, unless: Callable[[], Any] = bool) -> Iterator[pathlib.Path]:
  """A local folder to write to: `folder` itself, or a temporary one that is uploaded at the end.

  Objects of a bucket cannot be appended to, and some libraries write to file systems only.  If
  `unless()` is true at the end, nothing is uploaded.
  """
  if not in_bucket(folder):
    yield folder
    return
  with tempfile.TemporaryDirectory() as name:
    try:
      yield pathlib.Path(name)
    finally:
      if not unless():
        upload(pathlib.Path(name), folder)


def upload(source: pathlib.Path, folder: epath.Path) -> None:
  """Copies all files below a local folder to a folder of a bucket, with the same names."""
  for file in sorted(source.rglob("*")):
    if file.is_file():
      write(folder / file.relative_to(source), file.read_bytes())


def write(path: epath.Path, data: bytes) -> None:
  """Writes an object of a bucket; OSError if that fails for any reason."""
  try:
    path.write_bytes(data)
  except Exception as error:  # from gcsfs, Google's authentication or HTTP
    raise OSError(f"{path}: cannot be written: {type(error).__name__}: {error}") from error


def read(path: epath.Path) -> bytes:
  """The present contents of an object of a bucket (`path.read_bytes` may use a cached listing)."""
  try:
    return epath.backend.fsspec_backend.fs(path).cat_file(os.fspath(path))
  except Exception as error:  # as in `write`
    raise OSError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def written(name: str | os.PathLike[str], mode: Literal["wt", "wb"] = "wt"):
  """A file, UTF-8 text or bytes, that takes its name only when the block ends well.

  A name that ends in .gz gives a compressed file.  Its folder is made if it is not there.

  Raises:
    OSError: before the block: a file cannot be written there.  (In a bucket, after it.)
  """
  with local(path(name).parent) as folder:
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / path(name).name
    unfinished = folder / f"{final.name}.{os.getpid()}.unfinished"
    if final.exists() and not final.is_file():
      raise OSError(f"{final}: is a directory, or no plain file; give the name of a file")
    try:
      opener = gzip.open if final.suffix == ".gz" else open
      with opener(unfinished, mode, encoding="utf-8" if mode == "wt" else None) as file:
        yield file
      os.replace(unfinished, final)
    finally:
      unfinished.unlink(missing_ok=True)


def refuse_existing(name: str | os.PathLike[str], replaces: str = "") -> pathlib.Path:
  """The absolute path of a local directory to be written.

  Args:
    replaces: name of a file: a directory that holds it may be there.  "": none may.

  Raises:
    FileExistsError: something else is there, and it is not an empty directory.
  """
  directory = pathlib.Path(name).expanduser().absolute()
  free = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
  if not free and not (replaces and (directory / replaces).is_file()):
    raise FileExistsError(f"{directory}: is there already; give the name of a new directory")
  return directory


@contextlib.contextmanager
def written_directory(name: str | os.PathLike[str], replaces: str = "") -> Iterator[pathlib.Path]:
  """A new local directory that takes its name only when the block ends without an error.

  Deletes what a killed process left of an earlier attempt.  Arguments and errors as those of
  `refuse_existing`, before the block; OSError: it cannot be written.
  """
  final = refuse_existing(name, replaces)
  final.parent.mkdir(parents=True, exist_ok=True)
  for left in final.parent.glob(f".{glob.escape(final.name)}.*.unfinished"):
    with contextlib.suppress(OSError), _locked(left):
      shutil.rmtree(left)
  unfinished = final.with_name(f".{final.name}.{os.getpid()}.unfinished")
  replaced = unfinished.with_suffix(".replaced")
  unfinished.mkdir()
  with contextlib.ExitStack() as lock:
    with contextlib.suppress(OSError):  # some network file systems have no locks
      lock.enter_context(_locked(unfinished))
    try:
      yield unfinished
      if final.exists():  # a directory that is not empty cannot be replaced in one step
        final.rename(replaced)
      unfinished.rename(final)
      shutil.rmtree(replaced, ignore_errors=True)
    finally:
      shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
  """Holds a lock, which ends with the process; OSError if there is none to be had."""
  opened = os.open(directory, os.O_RDONLY)
  try:
    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    yield
  finally:
    os.close(opened)
