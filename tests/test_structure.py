"""The one-way rule of imports, the light aggregator, and the command line."""

import ast
import dataclasses
import pathlib
import subprocess
import sys

import pytest

from prm_jax import config as config_lib

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Each folder may import what stands before it on its line.
MAY_IMPORT = {
  "datasets": set(),
  "input_pipeline": {"datasets"},
  "model": set(),
  "training": {"datasets", "input_pipeline", "model"},
  "scoring": {"input_pipeline", "model", "training"},
  "aggregation": set(),
  "evaluation": {"input_pipeline", "scoring", "training", "aggregation"},
}
EVERYONE = {"types", "config", "json_lines"}


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
    allowed -= {"config", "json_lines"}
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


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_config_files_say_how_to_run_them(path):
  """Every config is an Experiment, and opens with the command that runs it."""
  assert isinstance(config_lib.read(str(path)), config_lib.Experiment)
  assert f"--config=configs/{path.name}" in ast.get_docstring(ast.parse(path.read_text()))


def parse(monkeypatch, *argv):
  @dataclasses.dataclass(frozen=True)
  class Args:
    workdir: str
    config: config_lib.Experiment = config_lib.Experiment()

  monkeypatch.setattr(sys, "argv", ["train.py", *argv])
  return config_lib.parse(Args)


CONFIG = f"--config={ROOT}/configs/arithmetic.py"


def test_overrides_reach_the_experiment(monkeypatch):
  """Dotted overrides change one field of the config file's experiment, with its type."""
  args = parse(monkeypatch, CONFIG, "--workdir=w", "--config.optim.learning_rate=1e-5")
  given = config_lib.read(f"{ROOT}/configs/arithmetic.py")
  assert args.config.optim == dataclasses.replace(given.optim, learning_rate=1e-5)
  assert args.config.model == given.model


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["--workdir=w", CONFIG, "--config.optim.learning_rte=1"], "config.optim.learning_rate"),
    (["--workdir=w", CONFIG, "--config.train.steps=many"], "many"),
    (["--workdir=w", CONFIG, "--config.loss.objective=both"], "outcome"),
    ([CONFIG], "workdir"),
    (["--workdir=w"], "--config=FILE is required"),
    (["--workdir=w", "--config=none.py"], "none.py: no such file"),
  ],
)
def test_mistakes_on_the_command_line_say_what_to_do(monkeypatch, capsys, argv, message):
  """An unknown key names the nearest one; a wrong type, the value; a missing file, itself."""
  with pytest.raises(SystemExit) as error:
    parse(monkeypatch, *argv)
  assert error.value.code != 0
  assert message in capsys.readouterr().err + str(error.value)
