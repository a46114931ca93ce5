"""scripts/benchmark.py: all methods measure the same, and the figures go where they should."""

import json
import pathlib

import numpy as np
import pytest
from conftest import ROOT, run_script

EXACT = ("numpy_sort", "numpy_argsort", "library", "library_bfloat16", "library_all_n")
DOCS = (
  "# Title\n\nBefore.\n\n<!-- aggregation: begin -->\nold\n<!-- aggregation: end -->\n\nAfter.\n"
)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
  """One quick run: its figures, what it printed, and the documentation it wrote into."""
  directory = tmp_path_factory.mktemp("benchmark")
  (directory / "docs.md").write_text(DOCS)
  done = run_script(
    "benchmark.py", "aggregation", "--quick", "--skip", "rerank",
    f"--json={directory}/figures.json", "--docs", f"--docs_file={directory}/docs.md",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  figures = json.loads((directory / "figures.json").read_text())
  return figures, done, (directory / "docs.md").read_text()


def methods(figures, names):
  return [
    (f"{size['candidates']} {name}", size["methods"][name])
    for size in figures["sizes"]
    for name in names
    if name in size["methods"]
  ]


def test_exact_methods_agree(quick):
  """numpy, where nothing ties, and the library give the float64 expectation of each problem."""
  for name, about in methods(quick[0], (*EXACT, "library_jit")):
    assert about["largest_error"] < 1e-6, name
    np.testing.assert_allclose(about["curve"], about["expected"], atol=1e-6, err_msg=name)


def test_random_trials_agree_within_their_noise(quick):
  """What the exact curve is compared with estimates the same curve."""
  for name, about in methods(quick[0], ("loop", "numpy_trials")):
    off = np.abs(np.subtract(about["curve"], about["expected"]))
    assert (off <= 5 * np.array(about["standard_error"]) + 1e-9).all(), name
  votes = quick[0]["sizes"][0]["methods"]
  estimate = votes["majority_trials"]
  off = np.abs(np.subtract(estimate["curve"], votes["majority"]["curve"]))
  # An outcome that none of 64 orders showed is missing from the standard error.
  assert (off <= 5 * np.array(estimate["standard_error"]) + 2e-3).all()
  assert votes["numpy_steps"]["difference"] < 1e-4  # log scores down to -30


def test_figures_have_their_fields(quick):
  """The JSON file holds times, memory, machine and targets."""
  figures, _, _ = quick
  assert {"machine", "command", "quick", "seconds", "sizes", "targets"} <= figures.keys()
  assert {"processor", "cores", "date", "python", "jax", "numpy"} <= figures["machine"].keys()
  for name, about in methods(figures, (*EXACT, "majority", "weighted", "jackknife", "band")):
    times = ("cpu_seconds", "wall_seconds", "first_wall_seconds", "peak_gb", "gb_before")
    assert all(about[key] > 0 for key in times), name
  for row in figures["targets"]:
    assert {"what", "target", "measured", "met"} == row.keys()
    assert np.isfinite(row["measured"])


def test_the_tables_go_between_the_markers(quick):
  """--docs replaces what stood between the markers by what was printed, and nothing else."""
  _, done, text = quick
  before, old, after = DOCS.partition("\nold\n")
  assert text == f"{before}\n\n{done.stdout.rstrip()}\n\n{after}"
  assert old and "| `best_of_n` |" in text and "(--quick)" in text


def test_the_benchmark_of_rerank(monkeypatch):
  """rerank.py is timed on a generated file, and the reading of its bundle; both are in the page."""
  monkeypatch.syspath_prepend(ROOT / "scripts")
  from benchmarks import reranking

  figures = reranking.run(3, 5)
  assert (figures["problems"], figures["candidates"], figures["lines"]) == (3, 5, 15)
  assert all(figures[key] > 0 for key in ("seconds", "peak_gb", "bundle_seconds", "bundle_gb"))


def test_documentation_without_markers_is_an_error_before_any_work(tmp_path):
  """A quarter of an hour is not spent on figures that have no place."""
  (tmp_path / "docs.md").write_text("# Title\n")
  done = run_script("benchmark.py", "aggregation", "--docs", f"--docs_file={tmp_path}/docs.md")
  assert done.returncode == 1
  assert "<!-- aggregation: begin -->" in done.stderr and "500 x" not in done.stderr


@pytest.mark.parametrize(
  ("arguments", "message"),
  [(("agregation",), "agregation"), (("aggregation", "--skip", "reranking"), "reranking")],
)
def test_unknown_names_are_errors(arguments, message):
  """A misspelt benchmark or part is named in the message."""
  done = run_script("benchmark.py", *arguments)
  assert done.returncode != 0 and message in done.stdout + done.stderr


def test_the_documentation_has_the_markers():
  """--docs finds its place in docs/benchmarks.md."""
  text = pathlib.Path(ROOT, "docs/benchmarks.md").read_text()
  assert text.count("<!-- aggregation: begin -->") == text.count("<!-- aggregation: end -->") == 1
