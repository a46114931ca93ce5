"""PRM800K written on Apache Beam is what one process writes, to the byte."""

import json
import sys

import conftest
import pytest

from prm_jax.datasets import prepare, prm800k
from prm_jax.runtime.json_lines import BadLine

BEAM = prepare.Beam("DirectRunner", ("direct_num_workers=1",))


@pytest.fixture
def source(tmp_path, raw_rows):
  """Upstream's four files; records repeat within and across them."""
  folder = tmp_path / "prm800k"
  folder.mkdir()
  for phase in (1, 2):
    for split, rows in raw_rows.items():
      lines = [json.dumps(row) + "\n" for row in rows * 3]
      (folder / f"phase{phase}_{split}.jsonl").write_text("".join(lines))
  (folder / "phase1_test.jsonl").write_text("")
  return folder


def files(folder):
  """Name and content of every file below `folder`."""
  paths = sorted(path for path in folder.rglob("*") if path.is_file())
  return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.beam
def test_the_same_output(tmp_path, source, monkeypatch):
  """Every file is the same to the byte: shards, TFDS's description, the manifest."""
  monkeypatch.setattr(prm800k.Builder, "SHARD_BYTES", 2000)
  with open(source / "phase2_train.jsonl", "a") as f:
    f.write('{"labeler": 3}\n' + json.dumps(conftest.phase1_row()) + "\n")
  options = {"source": source, "on_bad_record": "skip"}
  manifest = prepare.prepare_prm800k(tmp_path / "here", **options)
  prepare.prepare_prm800k(tmp_path / "beam", **options, beam=BEAM)
  here, beam = files(tmp_path / "here"), files(tmp_path / "beam")
  assert sum("train.array_record" in name for name in here) >= 4
  assert manifest["bad_records"]["count"] == 1
  assert here == beam


@pytest.mark.beam
def test_a_bad_record_is_named(tmp_path, source):
  """A bad record that a worker finds ends the command in the same words, and leaves nothing."""
  path = source / "phase1_train.jsonl"
  path.write_text(path.read_text() + '{"labeler": 3}\n')
  with pytest.raises(BadLine, match=r"phase1_train.jsonl:10: \"labeler\" is 3: expected str"):
    prepare.prepare_prm800k(tmp_path / "out", source=source, beam=BEAM)
  assert not (tmp_path / "out").exists()


@pytest.mark.beam
def test_unknown_options_are_refused():
  """Beam would ignore an option that it does not know."""
  with pytest.raises(ValueError, match="Apache Beam has no direct_workers=3"):
    prepare.Beam("DirectRunner", ("direct_workers=3",)).download_config()


def test_without_beam(monkeypatch):
  """A runner without Apache Beam is an error that says how to install it."""
  monkeypatch.setitem(sys.modules, "apache_beam", None)
  monkeypatch.setitem(sys.modules, "apache_beam.options.pipeline_options", None)
  with pytest.raises(ValueError, match=r"--beam.runner=DirectRunner needs Apache Beam .*\[beam\]"):
    BEAM.download_config()
