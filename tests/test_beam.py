"""Preparing PRM800K on Apache Beam gives what one process gives, to the byte."""

import json

import conftest
import pytest

from prm_jax.datasets import on_beam, prepare, prm800k
from prm_jax.datasets.prm800k import recipes

BEAM = on_beam.Beam("DirectRunner", ("direct_num_workers=1",))


@pytest.fixture
def source(tmp_path, raw_rows):
  """Upstream's four files, cut into many shards; rows repeat within and across them."""
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
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in sorted(folder.rglob("*"))
    if path.is_file()
  }


@pytest.mark.beam
@pytest.mark.parametrize("duplicates", ["keep", "drop"])
def test_the_same_output(tmp_path, source, monkeypatch, duplicates):
  """Every file is the same to the byte: shards, TFDS's description, the manifest."""
  monkeypatch.setattr(prm800k.Builder, "SHARD_BYTES", 2000)
  monkeypatch.setattr(on_beam, "ROWS", 4)
  with open(source / "phase2_train.jsonl", "a") as f:
    f.write('{"labeler": 3}\n' + json.dumps(conftest.phase1_row()) + "\n")
  recipe = recipes.Recipe(duplicates=duplicates)
  options = {"source": source, "recipe": recipe, "on_bad_record": "skip"}
  manifest = prepare.prepare_prm800k(tmp_path / "here", **options)
  prepare.prepare_prm800k(tmp_path / "beam", **options, beam=BEAM)
  here, beam = files(tmp_path / "here"), files(tmp_path / "beam")
  assert sum("train.array_record" in name for name in here) >= 4
  assert manifest["splits"]["train"]["duplicates"] > 4
  assert manifest["bad_records"]["count"] == 1
  assert here == beam


@pytest.mark.beam
def test_a_bad_record_is_named(tmp_path, source):
  """What a worker finds wrong ends the command in the same words, and leaves nothing."""
  path = source / "phase1_train.jsonl"
  path.write_text(path.read_text() + '{"labeler": 3}\n')
  with pytest.raises(
    prm800k.BadRecord, match=r"phase1_train.jsonl:10: labeler is 3; expected text$"
  ):
    prepare.prepare_prm800k(tmp_path / "out", source=source, beam=BEAM)
  assert not (tmp_path / "out").exists()


@pytest.mark.beam
def test_unknown_options_are_refused():
  """Beam would ignore an option it does not know."""
  with pytest.raises(ValueError, match="Apache Beam has no direct_workers=3"):
    on_beam.Beam("DirectRunner", ("direct_workers=3",)).pipeline_options()


def test_without_beam(tmp_path, source, monkeypatch):
  """A runner without Apache Beam is an error that says how to install it."""
  monkeypatch.setitem(__import__("sys").modules, "apache_beam", None)
  monkeypatch.setitem(__import__("sys").modules, "apache_beam.options.pipeline_options", None)
  with pytest.raises(ValueError, match=r"--beam.runner=DirectRunner needs Apache Beam .*\[beam\]"):
    prepare.prepare_prm800k(tmp_path / "out", source=source, beam=BEAM)


def test_counts_add_up(raw_rows):
  """The counts of two halves of the rows add up to those of all, the empty groups too."""
  rows = [row for split in raw_rows.values() for row in split]
  records = list(prm800k.numbered(rows, "phase2_x.jsonl"))
  recipe = recipes.RECIPES["paper"]
  total = recipes.Counts()
  for half in (records[:2], records[2:]):
    total.update(recipes.convert_all(half, recipe)[1])
  assert total.to_json() == recipes.convert_all(records, recipe)[1].to_json()
  assert total.to_json()["by_finish_reason"]["give_up"] == {"rows_read": 1, "rows_kept": 0}
