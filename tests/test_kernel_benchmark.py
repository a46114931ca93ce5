"""scripts/benchmark.py kernel: what is compiled, what is not compiled again, and its tables."""

import json
import pathlib
import types

import pytest
from conftest import ROOT, run_script

FORMS = ("kernel", "splash_fused", "splash_split", "dense")


@pytest.fixture
def kernel(monkeypatch):
  monkeypatch.syspath_prepend(ROOT / "scripts")
  from benchmarks import kernel

  monkeypatch.setattr(kernel.util, "find_spec", lambda name: name)
  monkeypatch.setattr(kernel, "versions", lambda: {"libtpu": "1"})
  return kernel


@pytest.fixture
def calls(kernel, monkeypatch):
  """Compilations, which are not run: temporaries are a MiB times 1, 2, 3 and 4 by form."""
  calls = []

  def run(command, env, **_):
    assert "XLA_FLAGS" not in env and env["PYTHONPATH"] == str(ROOT)
    settings = json.loads(pathlib.Path(command[-1]).read_text())
    calls.append((settings["what"], settings["form"]))
    size = 2**20 * (1 + FORMS.index(settings["form"]))
    figures = {"temporaries": size, "temp_size": 10 * size, "arguments": 2**30}
    pathlib.Path(settings["output"]).write_text(json.dumps(figures))
    return types.SimpleNamespace(returncode=0)

  monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=elsewhere")
  monkeypatch.setattr(kernel.subprocess, "run", run)
  return calls


def arguments(tmp_path, **changed):
  return types.SimpleNamespace(**{"work": tmp_path, "quick": True, "skip": ()} | changed)


def test_a_kernel_benchmark_goes_on_where_it_was(kernel, calls, tmp_path, monkeypatch):
  """Finished compilations are read from their files; those of other code or packages are not."""
  alone, step = [("alone", form) for form in FORMS], [("step", form) for form in FORMS[:3]]
  result = kernel.run(arguments(tmp_path))
  assert calls == alone + step
  calls.clear()
  assert kernel.run(arguments(tmp_path)) == result and not calls
  monkeypatch.setattr(kernel, "ALONE", kernel.ALONE | {"kernel": ("types.py",)})
  kernel.run(arguments(tmp_path))
  assert calls == [("alone", "kernel")]
  calls.clear()
  monkeypatch.setattr(kernel, "versions", lambda: {"libtpu": "2"})
  kernel.run(arguments(tmp_path, skip=("step",)))
  assert calls == alone


def test_every_size_is_compiled(kernel):
  """Three generations, two lengths, three head sizes alone; the model's own in a step."""
  sizes = lambda part: {
    (c["topology"][:3], c["sizes"]["tokens"], c["sizes"]["head_size"])
    for c in kernel.cases(part, quick=False)
  }
  chips, lengths = ("v5e", "v5p", "v6e"), (4096, 8192)
  assert sizes("alone") == {(c, t, h) for c in chips for t in lengths for h in (64, 128, 256)}
  assert sizes("step") == {(c, t, 64) for c in chips for t in lengths}
  windowed = [c for c in kernel.cases("alone", quick=False) if c["sizes"].get("softcap")]
  assert len(windowed) == 2 * 6 and {c["form"] for c in windowed} == {"kernel", "dense"}


def test_the_kernel_is_held_against_the_leaner_splash(kernel, calls, tmp_path):
  """The target is the worst ratio of all sizes; a table has a column for each form."""
  figures = kernel.run(arguments(tmp_path, quick=False))
  assert [(t["measured"], t["met"]) for t in figures["targets"]] == [(0.5, True)] * 4
  text = kernel.tables(figures)
  assert "largest of 18 | < 1 | 0.500 | yes |" in text and "largest of 6 |" in text
  cells = " | ".join(f"{mib}.0 ({mib}0.0)" for mib in (1, 2, 3, 4))
  assert f"| v5e:2x2 | 4,096 | 16/8 of 128 | {cells} |" in text
  about, cells = "8/4 of 256, window 1,024, soft cap 50", "1.0 (10.0) |  |  | 4.0 (40.0)"
  assert f"| v5e:2x2 | 4,096 | {about} | {cells} |" in text  # splash is not given it
  assert "| v6e:4x4 | 8,192 | 32/8 of 64 | 1.0 (10.0) | 2.0 (20.0) | 3.0 (30.0) |" in text


def test_what_does_not_fit_is_said(kernel, calls, tmp_path):
  """Not on the chip at all: more than any, and no number."""
  figures = kernel.run(arguments(tmp_path, skip=("step",)))
  figures["peers"][0] |= {"temporaries": None, "temp_size": None}  # splash attention, fused
  figures["targets"] = kernel.targets(figures["ours"] + figures["peers"])
  assert figures["targets"][0]["measured"] == pytest.approx(1 / 3)  # of the other's
  assert "| 1.0 (10.0) | does not fit | 3.0 (30.0) |" in kernel.tables(figures)
  figures["ours"][0] |= {"temporaries": None, "temp_size": None}
  assert not kernel.targets(figures["ours"] + figures["peers"])[0]["met"]


def test_a_failed_compilation_shows_its_last_words(kernel, tmp_path, monkeypatch):
  """And leaves no figures, so that the next run tries again."""

  def run(command, stdout, **_):
    stdout.write("RESOURCE_EXHAUSTED: vmem")
    return types.SimpleNamespace(returncode=-6)

  monkeypatch.setattr(kernel.subprocess, "run", run)
  with pytest.raises(RuntimeError, match=r"(?s)ended with -6; .*RESOURCE_EXHAUSTED: vmem"):
    kernel.run(arguments(tmp_path))
  assert not list(tmp_path.glob("*.json"))


def test_without_the_compiler_nothing_is_begun(kernel, calls, tmp_path, monkeypatch):
  """The message says what to install."""
  monkeypatch.setattr(kernel.util, "find_spec", lambda name: None)
  with pytest.raises(RuntimeError, match="pip install libtpu"):
    kernel.run(arguments(tmp_path / "work"))
  assert not calls and not (tmp_path / "work").exists()


def test_parts_are_known_and_some_are_left():
  """A misspelt part is named."""
  done = run_script("benchmark.py", "kernel", "--skip", "whole")
  assert done.returncode == 1 and "--skip whole: expected one of ('alone', 'step')" in done.stderr


def test_the_documentation_has_the_markers():
  """--docs finds its place in docs/benchmarks.md."""
  text = pathlib.Path(ROOT, "docs/benchmarks.md").read_text()
  assert text.count("<!-- kernel: begin -->") == text.count("<!-- kernel: end -->") == 1
