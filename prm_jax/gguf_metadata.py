"""The header of a GGUF file: its metadata and the list of its tensors.

Every count is checked against the file's size before anything is made of it, so that a file that
lies is an error at once.  Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import mmap
import pathlib
import struct
from typing import Any

import numpy as np

MAX_COUNT = 2**16  # of metadata keys and of tensors
MAX_NAME = 2**12  # bytes of a key or a tensor's name
MAX_STRINGS = 2**22  # in one array: four million tokens
MAX_DIMENSIONS = 8
STRING, ARRAY = 8, 9
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))  # kind -> struct


@dataclasses.dataclass(frozen=True)
class Listed:
  """What the header says of a tensor; where it ends depends on its block layout."""

  shape: tuple[int, ...]  # slowest axis first, as numpy counts
  kind: int  # GGML's number of the block layout
  offset: int  # in the file


@dataclasses.dataclass(frozen=True)
class Header:
  """Metadata and tensors of a file.  An array of numbers is a numpy array."""

  metadata: dict[str, Any]
  tensors: dict[str, Listed]
  size: int  # of the file, in bytes


def read(path: str | pathlib.Path, texts: str | None = None) -> Header:
  """Reads the header, and nothing of the tensors.

  Args:
    texts: arrays of strings are lists under keys that begin with this; elsewhere their length only
      (a vocabulary takes a while).

  Raises:
    ValueError: not a GGUF file of version 2 or 3 (little-endian), cut off, or claiming more than
      there is in the file; names the file and the number.
    OSError: the file cannot be read.
  """
  path = pathlib.Path(path)
  with path.open("rb") as file:
    if file.read(4) != b"GGUF":
      raise ValueError(f"{path}: not a GGUF file (it does not begin with GGUF)")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
      return _header(_Cursor(path, data), texts)


class _Cursor:
  """A place in the header.  Nothing is read or allocated beyond the end of the file."""

  def __init__(self, path: pathlib.Path, data: mmap.mmap):
    self.path, self.data, self.at = path, data, 4

  def skip(self, count: int) -> int:
    """Where the next `count` bytes begin; they are passed."""
    if count > len(self.data) - self.at:
      raise ValueError(
        f"{self.path}: the header wants {count:,} bytes at {self.at:,}, and the file has "
        f"{len(self.data):,}: cut off in copying, or no GGUF file"
      )
    self.at += count
    return self.at - count

  def number(self, code: str) -> Any:
    layout = "<" + code
    return struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout)))[0]

  def count(self, what: str, limit: int) -> int:
    value = self.number("Q")
    if value > limit:
      raise ValueError(
        f"{self.path}: the header claims {value:,} {what}; at most {limit:,} are read"
      )
    return value

  def text(self, limit: int | None = None) -> str:
    size = self.count("bytes of text", limit or len(self.data))
    start = self.skip(size)
    try:
      return self.data[start : start + size].decode()
    except UnicodeDecodeError as error:
      raise ValueError(f"{self.path}: a name or text at byte {start:,} is not UTF-8") from error

  def value(self, texts: bool) -> Any:
    kind = self.number("I")
    if kind == STRING:
      return self.text()
    if kind == ARRAY:
      return self._array(texts)
    if kind not in SCALARS:
      raise ValueError(f"{self.path}: metadata of unknown type {kind}")
    return self.number(SCALARS[kind])

  def _array(self, texts: bool) -> Any:
    kind = self.number("I")
    if kind == STRING:
      count = self.count("texts in an array", MAX_STRINGS)
      if texts:
        return [self.text() for _ in range(count)]
      for _ in range(count):
        self.skip(self.number("Q"))
      return count
    if kind not in SCALARS:
      raise ValueError(f"{self.path}: an array of type {kind} in the metadata cannot be read")
    layout = np.dtype("<" + SCALARS[kind])  # struct and numpy name these alike
    count = self.number("Q")
    start = self.skip(count * layout.itemsize)
    return np.frombuffer(self.data, layout, count, start).copy()


def _header(cursor: _Cursor, texts: str | None) -> Header:
  path = cursor.path
  version = cursor.number("I")
  if version not in (2, 3):  # a file of the other byte order has version 2**24 * 3
    raise ValueError(f"{path}: GGUF version {version}; 2 and 3 (little-endian) are read")
  tensor_count = cursor.count("tensors", MAX_COUNT)
  metadata: dict[str, Any] = {}
  for _ in range(cursor.count("metadata keys", MAX_COUNT)):
    key = cursor.text(MAX_NAME)
    metadata[key] = cursor.value(texts is not None and key.startswith(texts))
  listed: dict[str, Listed] = {}
  for _ in range(tensor_count):
    name = cursor.text(MAX_NAME)
    if name in listed:
      raise ValueError(f"{path}: tensor {name} is there twice")
    dimensions = cursor.number("I")
    if dimensions > MAX_DIMENSIONS:
      raise ValueError(f"{path}: tensor {name} has {dimensions:,} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    listed[name] = Listed(shape, cursor.number("I"), cursor.number("Q"))
  alignment = metadata.get("general.alignment", 32)
  if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
    raise ValueError(f"{path}: general.alignment={alignment!r}: expected a power of two")
  start = -(-cursor.at // alignment) * alignment
  tensors = {
    name: dataclasses.replace(each, offset=start + each.offset) for name, each in listed.items()
  }
  return Header(metadata, tensors, len(cursor.data))
