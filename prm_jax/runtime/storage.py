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
from collections.abc import Callable, Iterator
from typing import IO, Any, Literal

from etils import epath

from prm_jax.runtime import exits

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
  with exits.scratch_directory() as temporary:
    try:
      yield temporary
    finally:
      if not unless():
        upload(temporary, folder)


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


Mode = Literal["wt", "wb"]


@contextlib.contextmanager
def written(name: str | os.PathLike[str], mode: Mode = "wt") -> Iterator[IO]:
  """A file, UTF-8 text or bytes, that takes its name only when the block ends well.

  Raises:
    OSError: names the file.  Before the block if it cannot be written.  (In a bucket, after it.)
  """
  with written_together() as output:
    yield output(name, mode)


@contextlib.contextmanager
def written_together() -> Iterator[Callable[..., IO]]:
  """A function that opens files; all take their names when the block ends well, or none does.

  Its arguments are those of `written`.  A name that ends in .gz gives a compressed file.  A file's
  folder is made if it is not there, and what a killed process left of the file is deleted.
  """
  files: list[tuple[IO, pathlib.Path, pathlib.Path]] = []

  def output(name: str | os.PathLike[str], mode: Mode = "wt") -> IO:
    folder = stack.enter_context(local(path(name).parent))
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / path(name).name
    if final.exists() and not final.is_file():
      raise OSError(f"{final}: is a directory, or no plain file; give the name of a file")
    unfinished = stack.enter_context(_unfinished(final))
    opener = gzip.open if final.suffix == ".gz" else open
    file = stack.enter_context(opener(unfinished, mode, encoding="utf-8" if "t" in mode else None))
    with contextlib.suppress(OSError):  # some network file systems have no locks
      stack.enter_context(_locked(unfinished))
    files.append((file, unfinished, final))
    return file

  with contextlib.ExitStack() as stack:
    try:
      yield output
      for file, *_ in files:
        file.close()  # the last bytes: the disk may be full
    except OSError as error:
      if error.filename or not error.errno:
        raise
      names = ", ".join(str(final) for *_, final in files)
      raise OSError(f"{names}: {error.strerror}; nothing was replaced") from error
    with exits.COMMIT:
      for _, unfinished, final in files:
        unfinished.replace(final)


@contextlib.contextmanager
def _unfinished(final: pathlib.Path) -> Iterator[pathlib.Path]:
  """The name under which a file or directory is written; deletes what is left of it at the end.

  First deletes what killed processes left, and puts back a directory that one had moved away.
  """
  name = glob.escape(final.name)
  for left in final.parent.glob(f".{name}.*.unfinished"):
    with contextlib.suppress(OSError), _locked(left):
      if not _runs(left.name.split(".")[-2]):
        _delete(left)
  for left in final.parent.glob(f".{name}.*.replaced"):
    if not _runs(left.name.split(".")[-2]):
      _delete(left) if final.exists() else left.rename(final)
  unfinished = final.parent.resolve() / f".{final.name}.{os.getpid()}.unfinished"
  with exits.COMMIT:
    if unfinished in exits.UNFINISHED:
      raise OSError(f"{final}: two outputs have this name; give each its own")
    exits.UNFINISHED.add(unfinished)
  try:
    yield unfinished
  finally:
    _delete(unfinished)
    exits.UNFINISHED.discard(unfinished)


def _runs(process: str) -> bool:
  """Whether a process of that number runs here; its lock may be a moment late."""
  try:
    os.kill(int(process), 0)
  except (ProcessLookupError, ValueError):
    return False
  except PermissionError:
    pass
  return True


def _delete(path: pathlib.Path) -> None:
  shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


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
  with _unfinished(final) as unfinished, contextlib.ExitStack() as stack:
    unfinished.mkdir()
    with contextlib.suppress(OSError):  # as of a file
      stack.enter_context(_locked(unfinished))
    yield unfinished
    replaced = unfinished.with_suffix(".replaced")
    with exits.COMMIT:
      if final.exists():  # a directory that is not empty cannot be replaced in one step
        final.rename(replaced)
      unfinished.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
  """Holds a lock, which ends with the process; OSError if there is none to be had."""
  opened = os.open(path, os.O_RDONLY)
  try:
    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    yield
  finally:
    os.close(opened)
