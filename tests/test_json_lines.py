"""JSON lines: what is accepted, what a bad line's message says, and files written whole."""

import json
import math
import os
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prm_jax.runtime import json_lines

WRITABLE = st.recursive(
  st.none() | st.booleans() | st.floats() | st.integers(-(2**63), 2**64 - 1) | st.text(),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def records(path):
  return list(json_lines.read(path))


def fails(path, message):
  with pytest.raises(json_lines.BadLine) as error:
    records(path)
  assert str(error.value).startswith(message)


@given(st.dictionaries(st.text(), WRITABLE | st.integers()), st.booleans())
def test_a_line_means_what_it_means_to_the_json_module(record, ascii_only):
  """NaN, infinities, long integers, every character: the same value, of the same type."""
  text = json.dumps(record, ensure_ascii=ascii_only)
  assert repr(json_lines.parse(text.encode(), "here")) == repr(json.loads(text))


def test_what_the_fast_parser_refuses(tmp_path):
  """A byte order mark, NaN and numbers of any length are read; long integers stay exact."""
  path = tmp_path / "a.jsonl"
  lines = [b'\xef\xbb\xbf{"id": 3}', b'{"id": NaN}', b" ", b'{"id": 1e400}']
  lines += [b'{"id": %d}' % n for n in (10**400, 2**64, -(2**63) - 1, 2**64 - 1)]
  path.write_bytes(b"\r\n".join(lines))
  numbers, offsets, values = zip(*((n, at, r["id"]) for n, at, r in records(path)))
  assert numbers == (1, 2, 4, 5, 6, 7, 8)
  assert values[0] == 3 and math.isnan(values[1])
  assert values[2:] == (math.inf, 10**400, 2**64, -(2**63) - 1, 2**64 - 1)
  assert all(type(value) is int for value in values[3:])
  data = path.read_bytes()
  for number, offset in zip(numbers[1:], offsets[1:]):
    assert data[offset:].startswith(lines[number - 1])


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (b'{"a": "b', "not JSON (Unterminated string"),
    (b'{"a": 01}', "not JSON (Expecting ','"),
    (b"[1, 2]", "expected an object, got [1, 2]"),
    (b"null", "expected an object, got None"),
    (b'{"a": "\\ud83d"}', "'\\ud83d' is half of a surrogate pair"),
    (b'{"a": "\xe9"}', "not UTF-8"),
    ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    ('{"a": 1}'.encode("utf-16-le"), "not UTF-8"),
    (b'{"a": ' + b"[" * 200_000, "not JSON"),
    (b"[" * 200_000 + b"]" * 200_000, "not JSON"),
  ],
)
def test_a_bad_line(tmp_path, line, message):
  """The message has the file, the line and what is wrong, in the json module's words."""
  path = tmp_path / "a.jsonl"
  path.write_bytes(b'{"a": 1}\n' + line)
  fails(path, f"{path}:2: {message}")


def test_a_line_without_end(tmp_path, monkeypatch):
  """A file of another format is not read whole into memory in search of a line's end."""
  monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 1000)
  path = tmp_path / "a.jsonl"
  path.write_text(json.dumps({"a": "x" * 991}) + "\n")
  assert len(path.read_bytes()) == 1001
  fails(path, f"{path}:1: a line of over 1000 bytes")
  path.write_text(json.dumps({"a": "x" * 990}) + "\n")
  assert len(records(path)) == 1


def test_a_damaged_gzip_file(tmp_path):
  """Not gzip, cut short, or a byte changed anywhere: a message with the file and a line."""
  path = tmp_path / "a.jsonl.gz"
  path.write_bytes(b"{}\n")
  fails(path, f"{path}:1: broken gzip file")
  with json_lines.written(path) as out:
    for i in range(3000):
      out.write(json.dumps({"number": i * 7919 % 3001}) + "\n")
  whole = path.read_bytes()
  path.write_bytes(whole[:-20])
  fails(path, f"{path}:")
  for at in range(200, len(whole), 497):  # before that is the header, with a name that nobody reads
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
    fails(path, f"{path}:")


def test_the_position_ends_at_the_file_s_size(tmp_path):
  """Progress is in bytes of the file as it is stored, and never goes back."""
  path = tmp_path / "a.jsonl.gz"
  with json_lines.written(path) as out:
    out.write("{}\n" * 1000)
  positions = []
  assert len(list(json_lines.read(path, positions.append))) == 1000
  assert positions == sorted(positions)
  assert positions[-1] == path.stat().st_size


def test_files_named_gz_are_compressed(tmp_path):
  """What is written under a .gz name can be read again under it."""
  with json_lines.written(tmp_path / "a.jsonl.gz") as out:
    out.write('{"problem": "π"}\n')
  assert (tmp_path / "a.jsonl.gz").read_bytes().startswith(b"\x1f\x8b")
  assert [r for _, _, r in json_lines.read(tmp_path / "a.jsonl.gz")] == [{"problem": "π"}]


def test_nothing_half_written_stays(tmp_path):
  """After an error the old file is there and no other; two writers do not share a file."""
  path = tmp_path / "out" / "o.jsonl"
  with json_lines.written(path) as file:
    file.write("old")
    assert str(os.getpid()) in pathlib.Path(file.name).name
  with pytest.raises(KeyboardInterrupt), json_lines.written(path) as file:
    file.write("new")
    raise KeyboardInterrupt
  assert list(path.parent.iterdir()) == [path]
  assert path.read_text() == "old"


def test_a_folder_without_permission_is_said_before_any_work(tmp_path, monkeypatch):
  """The message names the folder, not a temporary file."""
  monkeypatch.setattr(os, "access", lambda *_: False)  # the superuser may write anywhere
  with (
    pytest.raises(PermissionError, match="no permission to write"),
    json_lines.written(tmp_path / "o"),
  ):
    pytest.fail("the block must not run")
