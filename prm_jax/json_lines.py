"""JSON lines, plain or gzip, read as a stream; a bad line is an error that names file and line."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

MAX_LINE_BYTES = 64 * 2**20  # beyond this it is another format


class BadLine(ValueError):
  """`FILE:LINE: what is wrong`."""


def show(value: Any, limit: int = 80) -> str:
  """A value for an error message, shortened."""
  text = repr(value)
  return text if len(text) <= limit else text[: limit - 3] + "..."


@contextlib.contextmanager
def opened(path: str | pathlib.Path):
  """The file's bytes, decompressed, and the file itself, whose position is the progress."""
  path = pathlib.Path(path)
  with path.open("rb") as raw:
    if path.suffix == ".gz":
      with gzip.GzipFile(fileobj=raw) as file:
        yield file, raw
    else:
      yield raw, raw


def read(
  path: str | pathlib.Path, on_position: Callable[[int], None] = lambda position: None
) -> Iterator[tuple[int, int, dict[str, Any]]]:
  """(line number from 1, byte offset, object) of each line.

  Args:
    on_position: called now and then with the number of (compressed) bytes read.

  Raises:
    BadLine: not JSON, not UTF-8, not an object, too long, nested too deeply, or a broken gzip.
    OSError: the file cannot be read.
  """
  offset = number = 0
  with opened(path) as (file, raw):
    try:
      while text := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(text) > MAX_LINE_BYTES:
          raise BadLine(f"{path}:{number}: a line of over {MAX_LINE_BYTES} bytes is not JSON lines")
        try:
          value = json.loads(text)
        except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
          raise BadLine(f"{path}:{number}: not JSON ({error}): {show(text)}") from None
        if not isinstance(value, dict):
          raise BadLine(f"{path}:{number}: expected an object, got {show(value)}")
        yield number, offset, value
        offset += len(text)
        if number % 256 == 0:
          on_position(raw.tell())
    except (gzip.BadGzipFile, EOFError) as error:
      raise BadLine(f"{path}:{number + 1}: broken gzip file: {error}") from None
    on_position(raw.tell())


@contextlib.contextmanager
def written(path: str | pathlib.Path):
  """A text file that takes its name only when the block ends well."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  unfinished = path.with_name(path.name + ".unfinished")
  with open(unfinished, "w", encoding="utf-8") as file:
    yield file
  os.replace(unfinished, path)
