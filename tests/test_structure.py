"""The rules of the house: imports, sizes, documentation, marks of tests."""

import ast
import graphlib
import pathlib
import re
import subprocess
import sys

from conftest import ROOT

PACKAGE = ROOT / "prm_jax"
# Each room may import those before it, and some of them fewer.
ORDER = ("runtime", "datasets", "input_pipeline", "model", "pretrained")
ORDER += ("training", "tpu", "scoring", "aggregation", "evaluation")
ONLY = {"model": set(), "pretrained": {"runtime", "model"}, "aggregation": set()}


def dotted(path: pathlib.Path) -> str:
  """The module's name: prm_jax.model.decoder."""
  return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {dotted(path): path for path in PACKAGE.rglob("*.py")}


def imports(module: str) -> set[str]:
  """Modules of the package that one of them imports, anywhere in its text."""
  names = []
  for node in ast.walk(ast.parse(MODULES[module].read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      names += [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
  # `from a.b import c`: the module a.b.c, or the name c of the module a.b
  modules = {name if name in MODULES else name.rpartition(".")[0] for name in names}
  return modules & MODULES.keys() - {"prm_jax"}


def room(module: str) -> str | None:
  """The folder of a module; None for one beside the folders."""
  parent = MODULES[module].parent
  return None if parent == PACKAGE else parent.relative_to(PACKAGE).parts[0]


def test_imports_go_one_way():
  """No room imports one that stands further down the pipeline."""
  assert {room(module) for module in MODULES} == {None, *ORDER}
  for module in MODULES:
    own = room(module)
    allowed = ONLY.get(own, set(ORDER[: ORDER.index(own)])) if own else set()
    assert {room(other) for other in imports(module)} <= allowed | {own, None}, module


def test_there_is_no_circle():
  """No module imports itself through others."""
  list(graphlib.TopologicalSorter({module: imports(module) for module in MODULES}).static_order())


def test_the_aggregator_loads_nothing_heavy():
  """Whoever trains elsewhere installs it for its own sake: it needs jax and types only."""
  for module in MODULES:
    if room(module) == "aggregation":
      assert {m for m in imports(module) if room(m) is None} <= {"prm_jax.types"}, module
  code = "import sys, prm_jax.aggregation; print(' '.join(sys.modules))"
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
  )
  loaded = {name.split(".")[0] for name in done.stdout.split()}
  heavy = {"flax", "orbax", "grain", "tensorflow_datasets", "tensorflow", "matplotlib", "optax"}
  assert not loaded & heavy


def test_files_and_functions_are_short():
  """A file has 400 lines at most, a function 60."""
  long = []
  for module, path in MODULES.items():
    text = path.read_text()
    if len(text.splitlines()) > 400:
      long.append(module)
    for node in ast.walk(ast.parse(text)):
      function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
      if function and node.end_lineno - node.lineno >= 60:
        long.append(f"{module}.{node.name}")
  assert not long


def test_documentation_is_narrow():
  """No line has more than 100 columns, except in generated tables."""
  wide = []
  for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
    for i, line in enumerate(path.read_text().splitlines(), 1):
      if len(line) > 100 and path.name != "benchmark_tables.md":
        wide.append(f"{path.name}:{i}")
  assert not wide


def test_tests_that_need_other_packages_are_marked():
  """A comparison with torch, transformers or Beam runs under `scripts/test.sh --reference`."""
  packages = r"(?:torch|transformers|apache_beam)\b"
  for path in (ROOT / "tests").glob("test_*.py"):
    text = path.read_text()
    if 'importorskip("trl"' not in text:  # the peer of a benchmark, which installs it
      assert not re.search(rf'importorskip\(\s*"{packages}', text), path.name
      assert not re.search(rf"(?m)^(?:import|from) {packages}", text), path.name
