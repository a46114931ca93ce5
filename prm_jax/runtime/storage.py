"""Paths on a file system or in a bucket of Cloud Storage (`gs://BUCKET/DIRECTORY`)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

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
