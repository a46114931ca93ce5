"""The notebooks: pairs of a percent source and a notebook without outputs, whose cells all run.

The sizes of `SMALL` replace those of the cell tagged "parameters"; `-m slow` runs the notebooks at
full size in a kernel.
"""

import ast
import html
import json
import re

import jupytext
import nbformat
import published_models
import pytest
from conftest import ROOT, run_script, write_lines
from scored_files import shown_on

from prm_jax.evaluation import display

SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
BY_NAME = {path.stem: path for path in SOURCES}
SMALL = {
  "look_at_prm800k": {"GENERATED": 40},
  "train_a_prm": {"STEPS": 8, "TRAIN_PROBLEMS": 60, "TEST_PROBLEMS": 10, "CANDIDATES": 8},
  "rerank_and_read_curves": {
    "STEPS": 8,
    "TRAIN_PROBLEMS": 60,
    "TEST_PROBLEMS": 20,
    "CANDIDATES": 8,
    "SETS": 2,
  },
  "load_a_real_model": {"STEPS": 8, "TRAIN_PROBLEMS": 60},
  "exact_best_of_n": {"PROBLEMS": 20, "CANDIDATES": 400, "TRIALS": 5},
  "a_prefix_tree": {"MOST": 32},
}
# Runs the cells of several notebooks; prints each one's output and the values of last lines.
RUN = """
import ast, contextlib, dataclasses, io, json, os, pathlib, sys
import matplotlib
from prm_jax.runtime import command_line
matplotlib.use("agg")
read = command_line.read

def one_layer(path):
  c = read(path)
  return dataclasses.replace(c, model=dataclasses.replace(c.model, layers=1))

command_line.read = one_layer  # compiles faster
given = json.loads(pathlib.Path(sys.argv[1]).read_text())
home, shown = pathlib.Path(sys.argv[1]).parent, {}
for notebook, sources in given.items():
  (home / notebook).mkdir()
  os.chdir(home / notebook)
  names = {"__name__": "__main__"}
  with contextlib.redirect_stdout(io.StringIO()) as out:
    for number, source in enumerate(sources):
      where = f"{notebook}, cell {number}"
      code = ast.parse(source, where)
      last = code.body.pop() if code.body and isinstance(code.body[-1], ast.Expr) else None
      exec(compile(code, where, "exec"), names)
      if last:
        value = eval(compile(ast.Expression(last.value), where, "eval"), names)
        if value is not None:
          print(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
  shown[notebook] = out.getvalue()
print(json.dumps(shown))
"""


def cells(path):
  """Returns the code cells of a source."""
  return [cell for cell in jupytext.read(path).cells if cell.cell_type == "code"]


def is_parameters(cell):
  """Returns whether a cell is tagged as the one of parameters."""
  return "parameters" in cell.metadata.get("tags", [])


def code_of(name, values):
  """Returns the code of a notebook's cells, with these values of its parameters."""
  codes = []
  for cell in cells(BY_NAME[name]):
    codes.append(cell.source.replace("layers=3", "layers=1"))  # compiles faster
    if is_parameters(cell):
      codes.append("\n".join(f"{name} = {value!r}" for name, value in values.items()))
  return codes


def test_every_notebook_has_small_parameters_and_is_listed():
  """Every notebook has an entry in `SMALL` for its test and a link in notebooks/README.md."""
  assert {path.stem for path in SOURCES} == set(SMALL)
  listed = (ROOT / "notebooks/README.md").read_text()
  for path in SOURCES:
    assert f"({path.stem}.ipynb)" in listed
    (parameters,) = filter(is_parameters, cells(path))
    assigned = {node.targets[0].id for node in ast.parse(parameters.source).body}
    assert set(SMALL[path.stem]) <= assigned, path.stem


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_is_the_pair_of_its_source(path):
  """Notebook and source have the same cells (`jupytext --sync notebooks/*.py`), without outputs."""
  notebook = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
  nbformat.validate(notebook)
  content = lambda cell: (cell.cell_type, cell.source, cell.metadata.get("tags", []))
  assert [*map(content, notebook.cells)] == [*map(content, jupytext.read(path).cells)]
  for cell in notebook.cells:
    assert not cell.get("outputs") and not cell.get("execution_count"), cell.source


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_the_badge_opens_the_notebook_and_its_first_cell_installs_if_needed(path):
  """The badge opens this notebook; the first cell installs the package only if it is missing."""
  text, first = path.read_text(), cells(path)[0].source
  badge = rf"github/([\w-]+/prm_jax)/blob/main/notebooks/{path.stem}\.ipynb"
  (repository,) = re.findall(badge, (ROOT / "notebooks/README.md").read_text())
  assert re.findall(badge, text) == [repository]
  assert set(re.findall(r"[\w-]+/prm_jax\b", text)) == {repository}  # also in the first cell
  assert 'if importlib.util.find_spec("prm_jax") is None' in first and "pip" in first


def test_the_notebooks_run(tmp_path, raw_rows):
  """Every cell runs without a network and each notebook shows a table.

  Two notebooks run again with the user's own input: PRM800K files, and a published model.
  """
  source, model = tmp_path / "source", tmp_path / "model"
  model.mkdir()
  for name, rows in zip(("phase2_train", "phase1_train"), raw_rows.values()):
    write_lines(source / f"{name}.jsonl", rows)
  published_models.write(model, "qwen2.5-math-prm")
  given = {name: code_of(name, values) for name, values in SMALL.items()}
  given["real files"] = code_of("look_at_prm800k", {"SOURCE": str(source)})
  given["published"] = code_of("load_a_real_model", {"MODEL": str(model)})
  (tmp_path / "run.py").write_text(RUN)
  (tmp_path / "cells.json").write_text(json.dumps(given))
  done = run_script(tmp_path / "run.py", tmp_path / "cells.json")
  shown = json.loads(done.stdout)
  for name in SMALL:
    assert "<table>" in shown[name], name
  real = shown["real files"]  # `SOURCE` is read, and nothing is generated
  assert "I add \u00e9 and \u4e8c." in real and "divisor" not in real
  assert "0 of 2 (0%) right solutions" in real  # generated data has dozens
  page = html.unescape(shown["load_a_real_model"])
  assert any("label" in step for p in shown_on(page) for x in p["solutions"] for step in x["steps"])
  published = shown["published"]  # `MODEL` is read as its authors lay it out
  assert "eggs" in published and "extra_0" in published and "trained:" not in published


def test_tables_escape_text_and_shade_doubtful_steps():
  """Text of steps is escaped, only `Html` is markup, and a less probable step is darker."""
  shown = display.steps(["<b>1</b>", "2"], [0.2, 1.0], [-1, None])
  assert "<b>" not in shown and "&lt;b&gt;1&lt;/b&gt;" in shown
  depths = [float(x) for x in re.findall(r"rgba\(213, 94, 0, ([\d.]+)\)", shown)]
  assert depths[0] > 0.5 and depths[1] == 0
  assert ">wrong<" in shown and ">right<" not in shown and ">0.200<" in shown
  assert "<i>" in display.table(["<u>"], [[display.Html("<i>")]])
  assert "<u>" not in display.table(["<u>"], [])


@pytest.mark.slow
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_runs_at_full_size_in_a_kernel(path, tmp_path, monkeypatch):
  """At full size in a Jupyter kernel, as on Colab, a notebook shows tables and figures."""
  from nbclient import NotebookClient

  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  notebook = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
  where = {"metadata": {"path": str(tmp_path)}}
  NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
  outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
  shown = {kind for out in outputs for kind in out.get("data", {})}
  assert {"text/html", "image/png"} <= shown
