"""Paths on a file system or in a bucket of Cloud Storage (`gs://BUCKET/DIRECTORY`).

Files and directories are written under temporary names, and renamed when they are complete.
"""

import contextlib
import errno
import fcntl
import glob
import gzip
import hashlib
import importlib.util
import io
import os
import pathlib
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, Literal

from etils import epath

from prm_jax.runtime import exits

Path = pathlib.Path | epath.Path


def path(text: str | os.PathLike[str]) -> Path:
  """Returns a path with the methods of pathlib; for a bucket they read and write its objects.

  Raises:
    ValueError: an empty text; a URL of another kind; or gcsfs, which reads buckets, is not
      installed.
  """
  if not (text := os.fspath(text)):
    raise ValueError("an empty path: is a variable of the shell not set?")
  if not re.match("[a-z0-9]+://", text):
    return pathlib.Path(text)
  if not re.match("gs://[^/]", text) or importlib.util.find_spec("gcsfs") is None:
    raise ValueError(f"{text}: expected a folder, or gs://BUCKET/DIRECTORY with gcsfs installed")
  return epath.Path(text)


def absolute(text: str | os.PathLike[str]) -> Path:
  """Returns `path(text)`, made absolute."""
  relative = path(text)
  return relative if in_bucket(relative) else relative.resolve()


def in_bucket(path: Path) -> bool:
  return isinstance(path, epath.Path)


@contextlib.contextmanager
def local(folder: Path, unless: Callable[[], Any] = bool) -> Iterator[pathlib.Path]:
  """Yields a local folder to write to: `folder` itself, or a temporary one, uploaded at the end.

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
  """Writes an object of a bucket; raises OSError if that fails for any reason."""
  try:
    path.write_bytes(data)
  except Exception as error:  # from gcsfs, Google's authentication or HTTP
    raise OSError(f"{path}: cannot be written: {type(error).__name__}: {error}") from error


def read(path: epath.Path) -> bytes:
  """Returns the present contents of a bucket's object; `path.read_bytes` may use an old listing."""
  try:
    return epath.backend.fsspec_backend.fs(path).cat_file(os.fspath(path))
  except Exception as error:  # of any class, as in `write`
    raise OSError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def sha256_of(path: str | os.PathLike[str]) -> str:
  """Returns the SHA-256 of a local file's contents, in hexadecimal."""
  with open(path, "rb") as f:
    return hashlib.file_digest(f, "sha256").hexdigest()


_HOME = os.path.expanduser("~")  # for an account without a home "~" itself; "/" if HOME is empty
CACHE = pathlib.Path(tempfile.gettempdir() if _HOME in ("~", "/") else f"{_HOME}/.cache", "prm_jax")
# Errors of the disk; others without a file's name, as of a connection, are the block's own.
_OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
Mode = Literal["wt", "wb"]


@contextlib.contextmanager
def written(name: str | os.PathLike[str], mode: Mode = "wt", compress: bool = True) -> Iterator[IO]:
  """Yields a file, UTF-8 text or bytes, that takes its name only if the block ends without error.

  Args:
    compress: with gzip, if the name ends in .gz.

  Raises:
    OSError: the file cannot be written.  Raised before the block, or after it for a bucket or a
      full disk.
  """
  with written_together() as output:
    yield output(name, mode, compress)


@contextlib.contextmanager
def written_together() -> Iterator[Callable[..., IO]]:
  """Yields a function that opens files; all take their names if the block succeeds, or none does.

  The function takes the arguments of `written`, makes the file's folder if needed, and deletes the
  leftovers of killed processes.  A link stays, and so does the mode of a file that is replaced.
  """
  files: list[tuple[IO, IO, pathlib.Path, pathlib.Path]] = []

  def output(name: str | os.PathLike[str], mode: Mode = "wt", compress: bool = True) -> IO:
    folder = stack.enter_context(local(path(name).parent))
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / path(name).name
    if final.exists() and not final.is_file():
      raise OSError(f"{final}: is a directory, or not a regular file; give another name")
    if _is_printed_to(final):
      raise OSError(f"{final}: is the file to which this command prints; give another name")
    if final.resolve() in [other.resolve() for *_, other in files]:
      raise OSError(f"{final}: two outputs have this name; give each its own")
    gzipped = compress and final.suffix == ".gz"  # by the name of a link, as readers have it
    if final.is_symlink():
      final = final.resolve()
      final.parent.mkdir(parents=True, exist_ok=True)
    unfinished = stack.enter_context(_unfinished(final, pathlib.Path.touch))
    file = raw = stack.enter_context(unfinished.open("wb"))
    with contextlib.suppress(OSError):  # there is no earlier file, or the disk has no modes
      shutil.copymode(final, unfinished)
    if gzipped:  # equal contents give equal bytes: no name, no time
      file = stack.enter_context(gzip.GzipFile("", "wb", fileobj=raw, mtime=0))
    if mode == "wt":
      file = stack.enter_context(io.TextIOWrapper(file, encoding="utf-8"))
    files.append((file, raw, unfinished, final))
    return file

  try:
    with contextlib.ExitStack() as stack:
      yield output
      for file, raw, *_ in files:
        file.close()  # writes the last bytes, for which the disk may be full
        raw.close()  # a GzipFile does not
      with exits.COMMIT:
        for *_, unfinished, final in files:
          unfinished.replace(final)
  except OSError as error:  # also of closing a file after another error
    if error.filename or error.errno not in _OF_DISK:
      raise
    names = ", ".join(str(final) for *_, final in files)
    raise OSError(f"{names}: {error.strerror}; nothing was replaced") from error


def _is_printed_to(file: pathlib.Path) -> bool:
  """Returns whether standard output or error goes to the file, by any of its names."""
  for printed in (1, 2):
    with contextlib.suppress(OSError):  # it is closed, or there is no such file
      if os.path.samestat(file.stat(), os.fstat(printed)):
        return True
  return False


@contextlib.contextmanager
def _unfinished(
  final: pathlib.Path, make: Callable[[pathlib.Path], None]
) -> Iterator[pathlib.Path]:
  """Makes a file or directory with a temporary name; at the end deletes it if it is still there.

  First deletes the leftovers of killed processes, and restores a directory that one moved away.
  """
  name = f".{glob.escape(final.name)}.{'?' * 8}"  # "*" would also take those of NAME.OTHER
  for left in final.parent.glob(f"{name}.unfinished"):
    with contextlib.suppress(OSError), _locked(left):  # no process writes it
      exits.delete(left)
  for left in final.parent.glob(f"{name}.replaced"):
    with contextlib.suppress(FileNotFoundError):  # another process was faster
      exits.delete(left) if final.exists() else left.rename(final)
  new = final.parent.resolve() / f".{final.name}.{secrets.token_hex(4)}"
  unfinished = new.with_name(f"{new.name}.unfinished")
  with contextlib.ExitStack() as stack:
    for path in (new, unfinished):
      exits.UNFINISHED.add(path)
      stack.callback(exits.UNFINISHED.discard, path)
      stack.callback(exits.delete, path)
    make(new)
    with contextlib.suppress(OSError):  # some network file systems have no locks
      stack.enter_context(_locked(new))
    new.rename(unfinished)  # locked by now, so no other process deletes it
    yield unfinished


def refuse_inputs(
  outputs: Iterable[pathlib.Path | None], inputs: Iterable[pathlib.Path | None]
) -> None:
  """Raises ValueError if an output has the name of an input or of another output."""
  taken = {path.resolve(): "is an input" for path in inputs if path}
  for path in filter(None, outputs):
    if why := taken.get(path.resolve()):
      raise ValueError(f"output {path} {why}: give another name")
    taken[path.resolve()] = "is named twice"


def refuse_existing(name: str | os.PathLike[str], replaces: str = "") -> pathlib.Path:
  """Returns the absolute path of a local directory that may be written.

  Args:
    replaces: name of a file; a directory that holds it may be replaced.  "": none may.

  Raises:
    FileExistsError: the path exists, and is neither such a directory nor an empty one.
  """
  directory = pathlib.Path(name).expanduser().resolve()  # follows links
  free = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
  if not free and not (replaces and (directory / replaces).is_file()):
    raise FileExistsError(f"{directory}: exists already; give the name of a new directory")
  return directory


@contextlib.contextmanager
def written_directory(name: str | os.PathLike[str], replaces: str = "") -> Iterator[pathlib.Path]:
  """Yields a new local directory that takes its name only if the block ends without error.

  Deletes the leftovers of killed processes.  Takes the arguments and raises the errors of
  `refuse_existing`, before the block; raises OSError if it cannot be written.
  """
  final = refuse_existing(name, replaces)
  final.parent.mkdir(parents=True, exist_ok=True)
  with _unfinished(final, pathlib.Path.mkdir) as unfinished:
    yield unfinished
    replaced = unfinished.with_suffix(".replaced")
    with exits.COMMIT:
      refuse_existing(final, replaces)  # it may have appeared since
      if final.exists():  # a rename cannot replace a directory that is not empty
        final.rename(replaced)
      unfinished.rename(final)
    exits.delete(replaced)


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
  """Holds a lock on a path, which ends with the process; raises OSError if another holds it."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    yield
  finally:
    os.close(descriptor)
