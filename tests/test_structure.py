"""The rules of the house: imports go one way, files, functions and lines are short."""

import ast
import pathlib
import subprocess
import sys

from conftest import ROOT

PACKAGE = ROOT / "prm_jax"
# Each room may import those before it, and some of them fewer.
ORDER = ("runtime", "datasets", "input_pipeline", "model", "pretrained")
ORDER += ("training", "tpu", "scoring", "aggregation", "evaluation")
ONLY = {"model": set(), "pretrained": {"runtime", "model"}, "aggregation": set()}
HEAVY = {"flax", "orbax", "grain", "tensorflow_datasets", "tensorflow", "matplotlib", "optax"}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: pathlib.Path) -> str:
  """The folder of a module; "" for one beside the folders."""
  return path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else ""


def imports(path: pathlib.Path) -> set[str]:
  """Rooms, and modules beside them, that a module imports anywhere in its text."""
  names = []
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      names += [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
  return {name.split(".")[1] for name in names if name.startswith("prm_jax.")}


def test_imports_go_one_way():
  """No room imports one that stands further down the pipeline; the aggregator needs types only."""
  assert {room(path) for path in FILES} == {"", *ORDER}
  for path in FILES:
    own, found = room(path), imports(path)
    allowed = ONLY.get(own, set(ORDER[: ORDER.index(own)])) if own else set()
    assert found & set(ORDER) <= allowed | {own}, path
    assert own != "aggregation" or found <= {own, "types"}, path


def test_the_aggregator_loads_nothing_heavy():
  """Whoever trains elsewhere installs it for its own sake."""
  code = "import sys, prm_jax.aggregation; print(' '.join(sys.modules))"
  loaded = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).split()
  assert not {name.split(".")[0] for name in loaded} & HEAVY


def test_files_functions_and_lines_are_short():
  """A file has 400 lines at most, a function 60, a line of documentation 100 columns."""
  for path in FILES:
    text = path.read_text()
    assert len(text.splitlines()) <= 400, path
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.FunctionDef):
        assert node.end_lineno - node.lineno < 60, (path, node.name)
  for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
    lines = enumerate(path.read_text().splitlines(), 1)
    assert not [i for i, line in lines if len(line) > 100 and line[0] != "|"], path  # but tables
