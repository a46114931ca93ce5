"""The structure of the package: imports go one way; files, functions and lines are short."""

import ast
import functools
import graphlib

from conftest import ROOT, python

PACKAGE = ROOT / "prm_jax"
# A subpackage may import those before it, and those of RESTRICTED only some of them.
ORDER = ("runtime", "datasets", "input_pipeline", "model", "pretrained")
ORDER += ("training", "tpu", "scoring", "aggregation", "evaluation", "generation")
ORDER += ("supervision", "experiments")
RESTRICTED = {"model": set(), "pretrained": {"runtime", "model"}, "aggregation": set()}
TOP_LEVEL = {"prm_jax.__main__": {"runtime"}}  # other modules beside the subpackages import none
HEAVY = {"flax", "orbax", "grain", "tensorflow_datasets", "tensorflow", "matplotlib", "optax"}
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {
  ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
  for path in FILES
}


def subpackage(module: str) -> str:
  """The subpackage of a module; "" for one beside the subpackages."""
  parts = MODULES[module].relative_to(PACKAGE).parts
  return parts[0] if len(parts) > 1 else ""


@functools.cache
def imports(module: str) -> set[str]:
  """The modules of the package that a module imports, at its top or inside functions."""
  imported = set()
  for node in ast.walk(ast.parse(MODULES[module].read_text())):
    if isinstance(node, ast.ImportFrom) and node.module in MODULES:
      names = [f"{node.module}.{alias.name}" for alias in node.names]
      imported |= {name if name in MODULES else node.module for name in names}
    elif isinstance(node, ast.Import):
      imported |= {alias.name for alias in node.names} & set(MODULES)
  return imported


def test_imports_go_one_way():
  """No subpackage imports a later one of the pipeline; the aggregator imports only types."""
  assert {subpackage(module) for module in MODULES} == {"", *ORDER}
  for module in MODULES:
    own, imported = subpackage(module), imports(module)
    earlier = set(ORDER[: ORDER.index(own)]) if own else set()
    allowed = RESTRICTED.get(own, earlier) if own else TOP_LEVEL.get(module, set())
    assert {subpackage(name) for name in imported} <= allowed | {own, ""}, module
    if own == "aggregation":
      beside = {name for name in imported if not subpackage(name)}
      assert beside <= {"prm_jax.types", "prm_jax.reductions"}, module


def test_imports_have_no_cycle():
  graphlib.TopologicalSorter({name: imports(name) for name in MODULES}).prepare()


def test_the_aggregator_loads_no_heavy_library():
  """Importing the aggregator loads no library that only training and evaluation need."""
  code = "import sys, prm_jax.aggregation; print(' '.join(sys.modules))"
  loaded = python("-c", code).stdout.split()
  assert not {name.split(".")[0] for name in loaded} & HEAVY


def test_files_functions_and_lines_are_short():
  """A file has 400 lines at most, a function 60, a line of documentation 100 columns."""
  for path in FILES:
    text = path.read_text()
    assert len(text.splitlines()) <= 400, path
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        assert node.end_lineno - node.lineno < 60, (path, node.name)
  for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
    lines = enumerate(path.read_text().splitlines(), 1)
    long = [i for i, line in lines if len(line) > 100 and line[0] != "|"]  # tables may be wide
    assert not long, path
