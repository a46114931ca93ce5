"""JSON lines are read as by the json module, and errors name file and line."""

import codecs
import gzip
import json
import math
import os
import time

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
  """The line number, byte offset and object of each line of a file."""
  return list(json_lines.read(path))


def fails(path, message):
  """Asserts that reading the file raises BadLine with a message that starts so."""
  with pytest.raises(json_lines.BadLine) as error:
    records(path)
  assert str(error.value).startswith(message)


@given(st.dictionaries(st.text(), WRITABLE), st.booleans())
def test_a_line_is_parsed_as_by_the_json_module(record, ascii_only):
  """Every JSON object, NaN and long integers included, has the json module's values and types."""
  text = json.dumps(record, ensure_ascii=ascii_only)
  assert repr(json_lines.parse(text.encode(), "here")) == repr(json.loads(text))


def test_every_line_that_the_json_module_takes_is_read(tmp_path):
  """A byte order mark, NaN, blank lines and numbers of any length are read, with line offsets."""
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
    (b'{"a": 1,\n', "not JSON in UTF-8 (Expecting property name enclosed in double quotes at"),
    (b"[1, 2]", "expected an object, got [1, 2]"),
    (b'{"a": "\\ud83d"}', "not JSON in UTF-8 ('utf-8' codec can't encode character '\\ud83d'"),
    (b'{"a": "\xe9"}', "not JSON in UTF-8 ('utf-8' codec can't decode byte 0xe9"),
    ('{"a": 1}'.encode("utf-16"), "not JSON in UTF-8"),
    ('{"a": 1}'.encode("utf-16-le"), "not JSON in UTF-8"),
    (b'{"a": ' + b"[" * 200_000, "nested 200001 deep, expected at most 100"),
    (b'{"a": "' + b"x" * 992 + b'"}', "a line of over 1000 bytes"),
  ],
)
def test_a_bad_line_is_named(tmp_path, monkeypatch, line, message):
  """The error of a bad line has the file, the line's number and the reason."""
  if "1000" in message:  # not read whole into memory in search of its end
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 1000)
  path = tmp_path / "a.jsonl"
  path.write_bytes(b'{"a": 1}\n' + line)
  fails(path, f"{path}:2: {message}")


def test_an_array_and_a_byte_order_mark_of_lines(tmp_path):
  """A reader of lines names an array, and no reader sees a byte order mark."""
  path = tmp_path / "a.jsonl"
  path.write_bytes(b'[\n{"a": 1}\n]')
  fails(path, f"{path}:1: a JSON array; `jq -c '.[]'` makes lines of it")
  path.write_bytes(codecs.BOM_UTF8 + b'{"a": 1}\n{"a": 2}\n')
  assert [*json_lines.lines(path)] == [(1, 3, b'{"a": 1}\n'), (2, 12, b'{"a": 2}\n')]


@pytest.mark.parametrize("end", [b"", b"\\"])
def test_an_unclosed_string_is_refused_in_linear_time(end):
  """A client's megabyte of quotes in a string that never ends does not stop the server."""
  start = time.monotonic()
  with pytest.raises(json_lines.BadLine, match="nested 101 deep"):
    json_lines.parse(b"[" * 101 + b'"' + b'\\"' * 500_000 + end, "here")
  assert time.monotonic() - start < 10


@pytest.mark.parametrize(("text", "what"), [("", "it has no line"), (" [ ]\n", "the array has no")])
def test_an_empty_file_is_an_error(text, what, tmp_path):
  """A file without a line, and an array without an entry, are errors that name the file."""
  (tmp_path / "a.json").write_text(text)
  with pytest.raises(json_lines.BadLine, match=f"{tmp_path / 'a.json'}: empty: {what}"):
    list(json_lines.records(tmp_path / "a.json"))


def test_an_array_is_read_like_lines(tmp_path):
  """The entries of an array are records, after a byte order mark too; errors have their place."""
  path = tmp_path / "a.json"
  path.write_bytes(codecs.BOM_UTF8 + b' [{"a": 1},\n{"a": NaN}]\n')
  places, values = zip(*json_lines.records(path))
  assert places == (f"{path}[0]", f"{path}[1]") and repr(values) == "({'a': 1}, {'a': nan})"
  for text, message in (
    ('[{"a": 1}, 2]', "[1]: expected an object, got 2"),
    ('[{"a": x}]', ": not JSON in UTF-8 (Expecting value at character 8)"),
    ('[{"a": 1}], "all": [{"a": 2}]', ": not JSON in UTF-8 (Extra data at character 11)"),
  ):
    path.write_text(text)
    with pytest.raises(json_lines.BadLine) as error:
      list(json_lines.records(path))
    assert str(error.value).startswith(f"{path}{message}")
  path.write_text('[{"a": 1}, 2, {"a": 3}]')
  bad = []
  found = json_lines.records(path, on_bad=lambda where, error: bad.append(where))
  assert [record["a"] for _, record in found] == [1, 3] and bad == [f"{path}[1]"]


def test_a_damaged_gzip_file_is_named(tmp_path):
  """A file that is not gzip, is cut short or has a changed byte gives an error with its name."""
  path = tmp_path / "a.jsonl.gz"
  path.write_bytes(b"{}\n")
  fails(path, f"{path}:1: broken gzip file")
  path.write_bytes(gzip.compress(b'[{"a": 1}, {"a": 2}]'))
  assert [record for _, record in json_lines.records(path)] == [{"a": 1}, {"a": 2}]
  path.write_bytes(path.read_bytes()[:-1])
  with pytest.raises(json_lines.BadLine, match="broken gzip file"):
    list(json_lines.records(path))
  with storage.written(path) as out:
    for i in range(3000):
      out.write(json.dumps({"number": i * 7919 % 3001}) + "\n")
  whole = path.read_bytes()
  path.write_bytes(whole[:-20])
  fails(path, f"{path}:")
  for at in range(200, len(whole), 497):  # before that is the header, with a name that nobody reads
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
    fails(path, f"{path}:")


def test_the_progress_of_reading_ends_at_the_size_of_the_file(tmp_path):
  """The progress of reading a .gz file counts compressed bytes, and only grows."""
  path = tmp_path / "a.jsonl.gz"
  with storage.written(path) as out:
    out.write('{"problem": "π"}\n' * 1000)
  positions = []
  read = [record for _, _, record in json_lines.read(path, positions.append)]
  assert read == [{"problem": "π"}] * 1000
  assert positions == sorted(positions)
  assert positions[-1] == path.stat().st_size < 1000


def test_a_pipe_is_named(tmp_path):
  """A pipe, which cannot be read twice, is an error with its name."""
  os.mkfifo(path := tmp_path / "pipe")
  for read in (records, json_lines.document):
    with open(path, "r+b", 0), pytest.raises(OSError, match=f"^{path}: not a regular file$"):
      read(path)


def test_a_printable_line_keeps_spaces_of_all_languages():
  """Control characters become "?"; a no-break and an ideographic space stay."""
  assert json_lines.printable("1\u00a0000\u3000x\x1b[0m\u202e\n") == "1\u00a0000\u3000x?[0m??"
