"""scripts/benchmark.py scaling: what is compiled for which slices, and its tables."""

import pathlib

import pytest
from conftest import ROOT


@pytest.fixture
def topologies(monkeypatch):
  monkeypatch.syspath_prepend(ROOT / "scripts")
  from benchmarks import compiled_topologies

  monkeypatch.setattr(compiled_topologies.util, "find_spec", lambda name: name)
  return compiled_topologies


def test_every_asked_slice_is_there(topologies, tmp_path):
  """1.2B, 7B and 32B where the issue of the project wants them; each production config."""
  jobs = [topologies.job(case, tmp_path) for case in topologies.CASES]
  there = {(pathlib.Path(j.config.init.checkpoint).name, j.topology) for j in jobs}
  asked = {("Llama-3.2-1B", "v5e:4x4"), ("Qwen2.5-32B", "v5p:8x8x16")}
  slices = ("v5e:8x8", "v5p:4x4x4", "v6e:8x8", "v5p:8x8x16")
  asked |= {("Qwen2.5-Math-7B", topology) for topology in slices}
  assert asked <= there
  for path in (ROOT / "configs").glob("*.py"):
    if "--topology=" in (text := path.read_text()):
      topology = text.split("--topology=")[1].split()[0]
      name = path.stem.removeprefix("prm800k_")
      assert any((c.config, c.topology) == (name, topology) for c in topologies.CASES)


def test_a_run_on_other_rows_goes_over_as_much_data(topologies, tmp_path):
  """Steps are fewer where rows are more."""
  first = topologies.job(topologies.CASES[0], tmp_path).config.train
  assert (first.batch_rows, first.steps) == (64, 237)  # of 32 and 475


def test_tables_say_what_is_not_known(topologies, monkeypatch, tmp_path):
  """No text, no collectives and no cycles: none of them is a zero; and the target is not met."""
  gib = {"arguments": 1.0, "temporaries": 4.0, "temp_size": 4.5}
  said = topologies.ahead_of_time.Compiled(gib, 5.0, None, "no text", 60.0, "2026-01-01", 0)
  monkeypatch.setattr(topologies.ahead_of_time, "compiled", lambda job, work: said)
  (each,) = topologies.run(tmp_path, topologies.CASES[:1])
  row = topologies.row(each)
  assert row[4] == "1.00 + 4.00 of 15.75" and row[5] == "68%" and row[6] == "not known"
  assert row[8] == "" and row[9].endswith("(no cycles)")
  assert [target["met"] for target in topologies.targets([each])] == [True, False, False, True]


def test_the_documentation_has_the_markers():
  """--docs finds its place in docs/benchmarks.md."""
  text = pathlib.Path(ROOT, "docs/benchmarks.md").read_text()
  assert text.count("<!-- scaling: begin -->") == text.count("<!-- scaling: end -->") == 1
