"""The rules of the house: imports go one way, files, functions and lines are short."""

import ast
import graphlib
import subprocess
import sys

from conftest import ROOT

PACKAGE = ROOT / "prm_jax"
# Each room may import those before it, and some of them fewer.
ORDER = ("runtime", "datasets", "input_pipeline", "model", "pretrained")
ORDER += ("training", "tpu", "scoring", "aggregation", "evaluation", "generation")
ORDER += ("supervision", "experiments")
ONLY = {"model": set(), "pretrained": {"runtime", "model"}, "aggregation": set()}
DOOR = {"prm_jax.__main__": {"runtime"}}
HEAVY = {"flax", "orbax", "grain", "tensorflow_datasets", "tensorflow", "matplotlib", "optax"}
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {
  ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
  for path in FILES
}


def room(module: str) -> str:
  """The folder of a module; "" for one beside the folders."""
  parts = MODULES[module].relative_to(PACKAGE).parts
  return parts[0] if len(parts) > 1 else ""


def imports(module: str) -> set[str]:
  """Modules of the package that a module imports, anywhere in its text."""
  found = set()
  for node in ast.walk(ast.parse(MODULES[module].read_text())):
    if isinstance(node, ast.ImportFrom) and node.module in MODULES:
      names = [f"{node.module}.{alias.name}" for alias in node.names]
      found |= {name if name in MODULES else node.module for name in names}
    elif isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names} & set(MODULES)
  return found


def test_imports_go_one_way():
  """No room imports one that stands further down the pipeline; the aggregator needs types only."""
  assert {room(module) for module in MODULES} == {"", *ORDER}
  for module in MODULES:
    own, found = room(module), imports(module)
    allowed = ONLY.get(own, set(ORDER[: ORDER.index(own)])) if own else DOOR.get(module, set())
    assert {room(name) for name in found} <= allowed | {own, ""}, module
    if own == "aggregation":
      assert {name for name in found if not room(name)} <= {
        "prm_jax.types",
        "prm_jax.reductions",
      }, module


def test_there_is_no_circle():
  """No module imports itself through others."""
  graphlib.TopologicalSorter({name: imports(name) for name in MODULES}).prepare()


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
