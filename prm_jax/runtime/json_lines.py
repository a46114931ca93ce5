"""Streaming readers of JSON lines, plain or gzip; errors name file and line."""

import codecs
import contextlib
import gzip
import io
import itertools
import json
import pathlib
import re
import sys
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

import msgspec

MAX_LINE_BYTES = 64 * 2**20  # a longer line means another format
MAX_DEPTH = 100  # of brackets: far below Python's recursion limit
READ_BYTES = 2**18  # per read: a line may have thousands of bytes, too many for the default
OTHER_FORMATS = {
  b"version https://git-lfs": "a Git LFS pointer, not the data (run `git lfs pull` in its clone)",
  b"\x1f\x8b": "a gzip file",
  b"PAR1": "a Parquet file",
}
BROKEN_GZIP = (gzip.BadGzipFile, EOFError, zlib.error)
# An unclosed string runs to the end: searching it again from each quote in it would be quadratic.
STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'
NO_BRACKET = re.compile(STRING + rb'|[^][{}"]+', re.DOTALL)
Struct = TypeVar("Struct", bound=msgspec.Struct)
Text = Annotated[str, msgspec.Meta(min_length=1)]  # a field of a Struct that is not empty
NotBlank = Annotated[str, msgspec.Meta(pattern=r"\S")]  # one that also has a visible character


class BadLine(ValueError):
  """`FILE:LINE: what is wrong`."""


def show(value: Any, limit: int = 80) -> str:
  """Returns a value as text for an error message, shortened."""
  text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
  return text if len(text) <= limit else text[: limit - 3] + "..."


def printable(text: str) -> str:
  """Replaces control characters by "?": one safe line for a terminal or figure."""
  return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else "?" for c in text)


@contextlib.contextmanager
def opened(path: str | pathlib.Path):
  """Yields the decompressed stream, and the file itself, whose position is the progress.

  Raises OSError if the file cannot be read, or is a pipe.
  """
  path = pathlib.Path(path) if isinstance(path, str) else path  # which may be in a bucket
  with path.open("rb") as raw:
    if not raw.seekable():  # most files are read twice
      raise OSError(f"{path}: not a regular file")
    yield (gzip.GzipFile(fileobj=raw) if str(path).endswith(".gz") else raw), raw


def lines(
  path: str | pathlib.Path,
  on_position: Callable[[int], None] = lambda position: None,
  *,
  start: int = 0,
  stop: int = sys.maxsize,
  first: int = 1,
) -> Iterator[tuple[int, int, bytes]]:
  """Yields (line number from 1, byte offset, bytes) of each line that is not blank.

  Args:
    on_position: called now and then with the number of (compressed) bytes read.
    start: byte offset of the first line to read.
    stop: byte offset; lines that begin there or later are not read.
    first: number of the line at `start`.

  Raises:
    BadLine: a line longer than `MAX_LINE_BYTES`, a broken gzip, a file of another format, or one
      without any line.
    OSError: the file cannot be read.
  """
  offset, number, empty = start, first - 1, True
  with opened(path) as (file, raw):
    file.seek(start)
    buffered = io.BufferedReader(file, READ_BYTES)
    try:
      while offset < stop and (line := buffered.readline(MAX_LINE_BYTES + 1)):
        number += 1
        if number == 1 and line.startswith(codecs.BOM_UTF8):
          line, offset = line.removeprefix(codecs.BOM_UTF8), offset + len(codecs.BOM_UTF8)
        for magic, kind in OTHER_FORMATS.items() if number == 1 else ():
          if line.startswith(magic):
            raise BadLine(f"{path}:1: {kind}; expected JSON lines, plain or in a file named .gz")
        if len(line) > MAX_LINE_BYTES:
          raise BadLine(f"{path}:{number}: a line of over {MAX_LINE_BYTES} bytes is not JSON lines")
        if not line.isspace():
          empty = False
          yield number, offset, line
        offset += len(line)
        if number % 256 == 0:
          on_position(raw.tell())
    except BROKEN_GZIP as error:
      raise BadLine(f"{path}:{number + 1}: broken gzip file: {error}") from None
    on_position(raw.tell())
  if empty and not start and stop == sys.maxsize:
    raise BadLine(f"{path}: empty: it has no line")


def document(path: pathlib.Path) -> dict[str, Any]:
  """Returns the object of a JSON file; raises as `contents` and `parse`."""
  return parse(contents(path), str(path))


def document_or_empty(path: pathlib.Path) -> dict[str, Any]:
  """Returns `document(path)`, or {} if the file is missing or damaged."""
  try:
    return document(path)
  except (OSError, ValueError):
    return {}


def contents(path: str | pathlib.Path) -> bytes:
  """Returns the decompressed bytes of a whole file.

  Raises:
    BadLine: there are over `MAX_LINE_BYTES`, or the gzip file is broken.
    OSError: the file cannot be read.
  """
  try:
    with opened(path) as (file, _):
      data = file.read(MAX_LINE_BYTES + 1)
  except BROKEN_GZIP as error:
    raise BadLine(f"{path}: broken gzip file: {error}") from None
  if len(data) > MAX_LINE_BYTES:
    raise BadLine(f"{path}: over {MAX_LINE_BYTES} bytes: not a file of this kind")
  return data


def read(
  path: str | pathlib.Path,
  on_position: Callable[[int], None] = lambda position: None,
  on_bad: Callable[[str, BadLine], None] | None = None,
) -> Iterator[tuple[int, int, dict[str, Any]]]:
  """Yields (line number, byte offset, object) of each line; errors as `lines` and `parse`.

  Args:
    on_bad: called with FILE:LINE and error for each line that is no JSON object; None: raise it.
  """
  name = str(path)  # converted once, not for every line
  for number, offset, line in lines(path, on_position):
    if number == 1 and line.startswith(b"["):
      raise BadLine(f"{name}:1: a JSON array; `jq -c '.[]'` makes lines of it")
    if (record := _attempt(parse, line, f"{name}:{number}", on_bad)) is not None:
      yield number, offset, record


def _attempt(
  read: Callable[[Any, str], dict[str, Any]],
  value: Any,
  where: str,
  on_bad: Callable[[str, BadLine], None] | None,
) -> dict[str, Any] | None:
  """Returns `read(value, where)`; None if that raises BadLine and `on_bad` takes the error."""
  try:
    return read(value, where)
  except BadLine as error:
    if not on_bad:
      raise
    on_bad(where, error)
    return None


def records(
  path: str | pathlib.Path, on_bad: Callable[[str, BadLine], None] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields FILE:LINE and object of each line; for a JSON array, FILE[NUMBER] and each entry.

  Args:
    on_bad: of lines and entries, as `read`.

  Raises:
    BadLine: as `read`; or an entry is no object, or the array is longer than `MAX_LINE_BYTES` or
      empty.
  """
  is_array = False
  with opened(path) as (file, _), contextlib.suppress(*BROKEN_GZIP):  # `read` reports it
    is_array = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
  if not is_array:
    for number, _, record in read(path, on_bad=on_bad):
      yield f"{path}:{number}", record
    return
  array = _value(contents(path), str(path), MAX_DEPTH)
  if not array:
    raise BadLine(f"{path}: empty: the array has no entry")
  for i, record in enumerate(array):
    where = f"{path}[{i}]"
    if (entry := _attempt(_object, record, where, on_bad)) is not None:
      yield where, entry


def structs(path: str | pathlib.Path, kind: type[Struct]) -> Iterator[tuple[str, Struct]]:
  """Yields place and content of each of the `records`; raises as `records` and `convert`."""
  for where, record in records(path):
    yield where, convert(record, kind, where)


def parse(line: bytes, where: str, depth: int = MAX_DEPTH) -> dict[str, Any]:
  """Returns the object on a line, as the json module would; error messages begin with `where`.

  Raises:
    BadLine: not JSON in UTF-8, not an object, nested too deeply, or half of a surrogate pair.
  """
  return _object(_value(line, where, depth), where)


def _object(value: Any, where: str) -> dict[str, Any]:
  if not isinstance(value, dict):
    raise BadLine(f"{where}: expected an object, got {show(value)}")
  return value


def _value(data: bytes, where: str, depth: int) -> Any:
  """Returns the value of a JSON text, as `parse`."""
  _check_depth(data, where, depth)
  try:
    return msgspec.json.decode(data)
  except ValueError:
    try:  # the json module takes NaN, 1e400 and a byte order mark, and its errors say more
      value = json.loads(data.decode("utf-8-sig").rstrip("\r\n"))
      json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair
      return value
    except ValueError as error:
      why = str(error)
      if isinstance(error, json.JSONDecodeError) and "\n" not in error.doc:  # "line 1" of `where`
        why = f"{error.msg} at character {error.pos + 1}"
      raise BadLine(f"{where}: not JSON in UTF-8 ({why}): {show(data)}") from None


def _check_depth(line: bytes, where: str, most: int = MAX_DEPTH) -> None:
  """Raises BadLine if brackets are nested more than `most` deep."""
  if line.count(b"[") + line.count(b"{") <= most:
    return
  brackets = NO_BRACKET.sub(b"", line)
  depth = max(itertools.accumulate(1 if each in b"[{" else -1 for each in brackets), default=0)
  if depth > most:
    raise BadLine(f"{where}: nested {depth} deep, expected at most {most}: {show(line)}")


def decode(line: bytes, kind: type[Struct], where: str) -> Struct:
  """Decodes a line, JSON without NaN, and applies `convert`."""
  _check_depth(line, where)
  try:
    record = msgspec.json.decode(line)
  except ValueError as error:
    raise BadLine(f"{where}: not JSON ({error}): {show(line)}") from None
  return convert(record, kind, where)


def decode_known(line: bytes, kind: type[Struct], where: str) -> Struct:
  """As `decode`, but skips keys that `kind` lacks, so that they take no memory."""
  _check_depth(line, where)
  try:
    return msgspec.json.decode(line, type=kind)
  except ValueError:
    return decode(line, kind, where)  # its error says more


def convert(
  record: Any,
  kind: type[Struct],
  where: str = "",
  dec_hook: Callable[[type, Any], Any] | None = None,
) -> Struct:
  """Returns the record as a msgspec struct, whose fields document the format.

  Args:
    dec_hook: makes values of types that msgspec does not know, as in `msgspec.convert`.

  Raises:
    BadLine: a key is missing or has a wrong value; the message begins with `where` and has both.
  """
  try:
    return msgspec.convert(record, kind, dec_hook=dec_hook)
  except msgspec.ValidationError as error:  # such as "Expected `str`, got `int` - at `$.a[0]`"
    # The path is at the end: a value that is quoted before it may hold anything.
    parts = re.fullmatch(r"(.*?)(?: - at `\$([^`]*)`)?", str(error), re.DOTALL)
  message, path = parts.groups("")
  message = message.replace(r" matching regex '\\S'", " that is not blank").replace("`", "")
  message = re.sub("Object missing required field (.*)", r'no "\1"', message)
  value, path = record, path.partition("[...]")[0]  # [...] stands for a dict's key
  for key, index in re.findall(r"\.([^.\[]+)|\[(\d+)\]", path):
    value = value[int(index)] if index else value[key]
  field = f'"{path.lstrip(".")}"' if path else "the record"
  about = f"{field} is {show(value)}: " if path or message.startswith("Expected") else ""
  message = message[0].lower() + message[1:500]
  if not path and message.startswith('no "') and isinstance(record, dict) and record:
    message += f"; its keys are {', '.join(map(show, itertools.islice(record, 12)))}"
  raise BadLine(f"{where}{': ' if where else ''}{about}{message}")
