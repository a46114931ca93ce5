"""The one-way rule of imports, and the light aggregator."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Each folder may import what stands before it on its line.
MAY_IMPORT = {
  "runtime": set(),
  "datasets": {"runtime"},
  "input_pipeline": {"runtime", "datasets"},
  "model": set(),
  "pretrained": {"runtime", "model"},
  "training": {"runtime", "datasets", "input_pipeline", "model", "pretrained"},
  "tpu": {"runtime", "input_pipeline", "model", "training"},
  "scoring": {"runtime", "input_pipeline", "model", "pretrained", "training"},
  "aggregation": set(),
  "evaluation": {"runtime", "input_pipeline", "scoring", "aggregation"},
}
EVERYONE = {"types", "config", "step_metrics", "gguf_metadata"}


def imports(path):
  """Parts of prm_jax that a file imports."""
  for node in ast.walk(ast.parse(path.read_text())):
    names = []
    if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("prm_jax"):
      names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
      names = [alias.name for alias in node.names if alias.name.startswith("prm_jax")]
    yield from (name.split(".")[1] for name in names)


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_imports_go_one_way(folder):
  """No folder imports one that stands further down the pipeline."""
  allowed = MAY_IMPORT[folder] | EVERYONE | {folder}
  if folder == "aggregation":
    allowed -= EVERYONE - {"types"}
  for path in (ROOT / "prm_jax" / folder).rglob("*.py"):
    assert set(imports(path)) <= allowed, path


def test_every_folder_has_a_rule():
  """A new folder states what it may import."""
  folders = {p.parent.name for p in (ROOT / "prm_jax").glob("*/__init__.py")}
  assert folders == set(MAY_IMPORT)


def test_the_aggregator_loads_nothing_heavy():
  """Someone who trains elsewhere installs it for its own sake: jax and types only."""
  code = "import sys, prm_jax.aggregation; print(' '.join(sys.modules))"
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
  )
  loaded = {name.split(".")[0] for name in done.stdout.split()}
  heavy = {"flax", "orbax", "grain", "tensorflow_datasets", "tensorflow", "matplotlib", "optax"}
  assert not loaded & heavy
