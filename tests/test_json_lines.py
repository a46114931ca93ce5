"""JSON lines: what is accepted, what a bad line's message says, and files written whole."""

import json
import math
import os
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prm_jax.runtime import json_lines, storage

WRITABLE = st.recursive(
  st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=10,
)


def records(path):
  return list(json_lines.read(path))


def fails(path, message):
  with pytest.raises(json_lines.BadLine) as error:
    records(path)
  assert str(error.value).startswith(message)


@given(st.dictionaries(st.text(), WRITABLE), st.booleans())
def test_a_line_means_what_it_means_to_the_json_module(record, ascii_only):
  """NaN, infinities, long integers, every character: the same value, of the same type."""
  text = json.dumps(record, ensure_ascii=ascii_only)
  assert repr(json_lines.parse(text.encode(), "here")) == repr(json.loads(text))


def test_every_line_that_the_json_module_takes_is_read(tmp_path):
  """A byte order mark, NaN and numbers of any length are read; long integers stay exact."""
  path = tmp_path / "a.jsonl"
  lines = [b'\xef\xbb\xbf{"id": 3}', b'{"id": NaN}', b" ", b'{"id": 1e400}']
  lines += [b'{"id": %d}' % n for n in (10**400, 2**64, -(2**63) - 1, 2**64 - 1)]
  path.write_bytes(b"\r\n".join(lines))
  numbers, offsets, values = zip(*((n, at, r["id"]) for n, at, r in records(path)))
  assert numbers == (1, 2, 4, 5, 6, 7, 8)
  expected = [3, math.nan, math.inf, 10**400, 2**64, -(2**63) - 1, 2**64 - 1]
  assert repr(list(values)) == repr(expected)
  for number, offset in zip(numbers[1:], offsets[1:]):
    assert path.read_bytes()[offset:].startswith(lines[number - 1])


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (b'{"a": "b', "not JSON in UTF-8 (Unterminated string"),
    (b"[1, 2]", "expected an object, got [1, 2]"),
    (b'{"a": "\\ud83d"}', "not JSON in UTF-8 ('utf-8' codec can't encode character '\\ud83d'"),
    (b'{"a": "\xe9"}', "not JSON in UTF-8 ('utf-8' codec can't decode byte 0xe9"),
    ('{"a": 1}'.encode("utf-16"), "not JSON in UTF-8"),
    ('{"a": 1}'.encode("utf-16-le"), "not JSON in UTF-8"),
    (b'{"a": ' + b"[" * 200_000, "nested 200001 deep, expected at most 100"),
    (b'{"a": "' + b"x" * 992 + b'"}', "a line of over 1000 bytes"),
  ],
)
def test_a_bad_line(tmp_path, monkeypatch, line, message):
  """The message has the file, the line and what is wrong, in the json module's words."""
  if "1000" in message:  # not read whole into memory in search of its end
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 1000)
  path = tmp_path / "a.jsonl"
  path.write_bytes(b'{"a": 1}\n' + line)
  fails(path, f"{path}:2: {message}")


def test_a_damaged_gzip_file(tmp_path):
  """Not gzip, cut short, or a byte changed anywhere: a message with the file and a line."""
  path = tmp_path / "a.jsonl.gz"
  path.write_bytes(b"{}\n")
  fails(path, f"{path}:1: broken gzip file")
  with storage.written(path) as out:
    for i in range(3000):
      out.write(json.dumps({"number": i * 7919 % 3001}) + "\n")
  whole = path.read_bytes()
  path.write_bytes(whole[:-20])
  fails(path, f"{path}:")
  for at in range(200, len(whole), 497):  # before that is the header, with a name that nobody reads
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
    fails(path, f"{path}:")


def test_the_position_ends_at_the_file_s_size(tmp_path):
  """Files named .gz are compressed; progress is in bytes as stored, and never goes back."""
  path = tmp_path / "a.jsonl.gz"
  with storage.written(path) as out:
    out.write('{"problem": "π"}\n' * 1000)
  positions = []
  found = [record for _, _, record in json_lines.read(path, positions.append)]
  assert found == [{"problem": "π"}] * 1000
  assert positions == sorted(positions)
  assert positions[-1] == path.stat().st_size < 1000


def test_nothing_half_written_stays(tmp_path):
  """After an error the old file is there and no other; two writers do not share a file."""
  path = tmp_path / "out" / "o.jsonl"
  with storage.written(path) as file:
    file.write("old")
    assert str(os.getpid()) in pathlib.Path(file.name).name
  with pytest.raises(KeyboardInterrupt), storage.written(path) as file:
    file.write("new")
    raise KeyboardInterrupt
  assert list(path.parent.iterdir()) == [path]
  assert path.read_text() == "old"
  with pytest.raises(OSError, match="is a directory"), storage.written(path.parent):
    pytest.fail("the block must not run")
