"""JSON lines, plain or gzip, read as a stream; a bad line is an error that names file and line."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pathlib
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import orjson

from prm_jax.runtime import storage

MAX_LINE_BYTES = 64 * 2**20  # beyond this it is another format
READ_BYTES = 2**18  # at a time: a line may have thousands, and the default is not much more
BROKEN_GZIP = (gzip.BadGzipFile, EOFError, zlib.error)
Struct = TypeVar("Struct", bound=msgspec.Struct)
Text = Annotated[str, msgspec.Meta(min_length=1)]  # a field of a Struct that is not empty


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


def lines(
  path: str | pathlib.Path,
  on_position: Callable[[int], None] = lambda position: None,
  *,
  start: int = 0,
  stop: int = sys.maxsize,
  first: int = 1,
) -> Iterator[tuple[int, int, bytes]]:
  """(line number from 1, byte offset, bytes) of each line that is not blank.

  Args:
    on_position: called now and then with the number of (compressed) bytes read.
    start: byte offset at which a line begins: the first one to read.
    stop: lines that begin at this offset or later are not read.
    first: number of the line at `start`.

  Raises:
    BadLine: a line longer than `MAX_LINE_BYTES`, a broken gzip, or a file of another format.
    OSError: the file cannot be read.
  """
  offset, number = start, first - 1
  name = str(path)  # once, not for every line
  with opened(path) as (file, raw):
    file.seek(start)
    buffered = io.BufferedReader(file, READ_BYTES)
    try:
      while offset < stop and (line := buffered.readline(MAX_LINE_BYTES + 1)):
        number += 1
        if number == 1 and (other := _other_format(line)):
          raise BadLine(f"{name}:1: {other}")
        if len(line) > MAX_LINE_BYTES:
          raise BadLine(f"{name}:{number}: a line of over {MAX_LINE_BYTES} bytes is not JSON lines")
        if not line.isspace():
          yield number, offset, line
        offset += len(line)
        if number % 256 == 0:
          on_position(raw.tell())
    except BROKEN_GZIP as error:
      raise BadLine(f"{name}:{number + 1}: broken gzip file: {error}") from None
    on_position(raw.tell())


def _other_format(line: bytes) -> str | None:
  """The format of a file whose first line is not JSON; None if it may be JSON lines."""
  if line.startswith(b"version https://git-lfs.github.com/spec/"):
    return "a Git LFS pointer, not the data; run `git lfs pull` where it was cloned"
  for magic, kind in ((b"\x1f\x8b", "gzip"), (b"PAR1", "Parquet"), (b"PK\x03\x04", "zip")):
    if line.startswith(magic):
      return f"a {kind} file; expected JSON lines" + (", or a name in .gz" * (kind == "gzip"))
  return None


def read(
  path: str | pathlib.Path, on_position: Callable[[int], None] = lambda position: None
) -> Iterator[tuple[int, int, dict[str, Any]]]:
  """(line number, byte offset, object) of each line, as `lines` and `parse`."""
  name = str(path)
  for number, offset, line in lines(path, on_position):
    yield number, offset, parse(line, f"{name}:{number}")


def parse(line: bytes, where: str) -> dict[str, Any]:
  """The object on a line; `where` begins the message of an error.

  An integer of the object itself is exact; in a list or an object inside it, one of more than 64
  bits becomes a float.

  Raises:
    BadLine: not JSON, not UTF-8, not an object, nested too deeply, or a text with half of a
      surrogate pair, which no UTF-8 file or tokenizer can hold.
  """
  try:
    value = orjson.loads(line)
  except orjson.JSONDecodeError:
    return _parse_slowly(line, where)
  if type(value) is not dict:
    return _parse_slowly(line, where)
  for each in value.values():
    if type(each) is float and not -(2.0**63) < each < 2.0**63:  # may have been a long integer
      return _parse_slowly(line, where)
  return value


def _parse_slowly(line: bytes, where: str) -> dict[str, Any]:
  """By the json module, which takes more than orjson does (NaN, 1e400), and says what is wrong."""
  try:
    value = json.loads(line.decode("utf-8-sig"))  # some editors put a mark before the first line
    if b"\\ud" in line.lower():  # \ud83d\ude00 is a character, \ud83d alone is none
      json.dumps(value, ensure_ascii=False).encode()
  except UnicodeEncodeError as error:
    half = error.object[error.start]
    raise BadLine(f"{where}: {half!r} is half of a surrogate pair: {show(line)}") from None
  except (ValueError, RecursionError) as error:
    utf8 = not isinstance(error, UnicodeDecodeError) and b"\0" not in line  # UTF-16 is full of \0
    raise BadLine(f"{where}: not {'JSON' if utf8 else 'UTF-8'} ({error}): {show(line)}") from None
  if not isinstance(value, dict):
    raise BadLine(f"{where}: expected an object, got {show(value)}")
  return value


def decode(line: bytes, decoder: msgspec.json.Decoder, where: str) -> Any:
  """The value on a line, of the type that `decoder` has.  `where` opens an error's message.

  Raises:
    BadLine: not JSON, or a value of another type; the message names field and value.
  """
  try:
    value = orjson.loads(line)  # also checks the keys that the decoder skips
    return decoder.decode(line)
  except msgspec.ValidationError as error:
    raise BadLine(f"{where}: {_explained(error, value)}") from None
  except (ValueError, RecursionError) as error:
    raise BadLine(f"{where}: not JSON ({error}): {show(line)}") from None


def convert(record: dict[str, Any], kind: type[Struct]) -> Struct:
  """The record as a msgspec struct, whose fields document the format.

  Raises:
    BadLine: a key is missing or holds a wrong value.  The message has the key, its value and what
      is expected; the caller adds file and line.
  """
  try:
    return msgspec.convert(record, kind)
  except msgspec.ValidationError as error:
    raise BadLine(_explained(error, record)) from None


def _explained(error: msgspec.ValidationError, record: Any) -> str:
  """The message of `error`, such as "Expected `str`, got `int` - at `$.a[0]`", with the value."""
  message, _, path = str(error).partition(" - at `$")
  message = message.replace(r" matching regex '\\S'", " that is not blank")
  path = path.rstrip("`")
  for key, index in re.findall(r"\.([^.\[]+)|\[(\d+)\]", path):
    record = record[int(index)] if index else record[key]
  if missing := re.search("missing required field `(.*)`", message):
    message = f'no "{missing[1]}"'
    if not path:
      return message
  field = f'"{path.lstrip(".")}"' if path else "the record"
  return f"{field} is {show(record)}: {message[0].lower()}{message[1:].replace('`', '')}"


@contextlib.contextmanager
def written(path: str | pathlib.Path, mode: Literal["wt", "wb"] = "wt"):
  """A file, UTF-8 text or bytes, that takes its name only when the block ends well.

  A name that ends in .gz gives a compressed file.  Its folder is made if it is not there.  After an
  error nothing is left of the file.

  Raises:
    OSError: before the block: a file cannot be written there.  (In a bucket, after it.)
  """
  path = storage.path(path)
  if storage.in_bucket(path):
    with tempfile.TemporaryDirectory() as folder:
      with written(os.path.join(folder, path.name), mode) as file:
        yield file
      storage.upload(pathlib.Path(folder), path.parent)
    return
  if path.exists() and not path.is_file():
    raise OSError(f"{path}: is a directory, or no plain file; give the name of a file")
  path.parent.mkdir(parents=True, exist_ok=True)
  if not os.access(path.parent, os.W_OK):
    raise PermissionError(f"{path}: no permission to write in {path.parent}")
  unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
  try:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(unfinished, mode, encoding="utf-8" if mode == "wt" else None) as file:
      yield file
    os.replace(unfinished, path)
  finally:
    unfinished.unlink(missing_ok=True)
