"""The rules of the house: imports, sizes, documentation, and the command line."""

import ast
import dataclasses
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from prm_jax import config as config_lib

PACKAGE = ROOT / "prm_jax"
# Each room may import those before it.
ORDER = ("runtime", "datasets", "input_pipeline", "model", "pretrained")
ORDER += ("training", "tpu", "scoring", "aggregation", "evaluation")
ALONE = ("model", "aggregation")  # these import no other room


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
    before = set(ORDER[: ORDER.index(own)]) if own and own not in ALONE else set()
    others = {room(other) for other in imports(module)} - {own}
    assert others <= before | {None}, module


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


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_config_files_say_how_to_run_them(path):
  """Every config is an Experiment, and opens with its command, cost and expected result."""
  assert isinstance(config_lib.read(str(path)), config_lib.Experiment)
  docstring = ast.get_docstring(ast.parse(path.read_text()))
  assert f"--config=configs/{path.name}" in docstring
  assert "Cost: " in docstring and "Expected" in docstring


def parse(monkeypatch, *argv):
  @dataclasses.dataclass(frozen=True)
  class Args:
    workdir: str
    quick: bool = False
    config: config_lib.Experiment = config_lib.Experiment()

  monkeypatch.setattr(sys, "argv", ["train.py", *argv])
  return config_lib.parse(Args)


CONFIG = f"--config={ROOT}/configs/arithmetic.py"


@pytest.mark.parametrize("between", ["=", " "])
def test_overrides_reach_the_experiment(monkeypatch, between):
  """Overrides change single fields of the config file's experiment, after `=` or a space."""
  flags = [CONFIG, "--workdir=w", "--config.optim.learning_rate=1", "--config.mesh.fsdp=-1"]
  argv = [word for flag in flags for word in flag.replace("=", between, 1).split(" ")]
  args, given = parse(monkeypatch, *argv), config_lib.read(f"{ROOT}/configs/arithmetic.py")
  optim = dataclasses.replace(given.optim, learning_rate=1.0)  # an int where a float is meant
  mesh = dataclasses.replace(given.mesh, fsdp=-1)
  assert args.workdir == "w"
  assert args.config == dataclasses.replace(given, optim=optim, mesh=mesh)


@pytest.mark.parametrize(
  ("given", "quick"),
  [
    ((), False),
    (("--quick",), True),
    (("--quick=True",), True),
    (("--quick", "True"), True),
    (("--quick", "False"), False),
  ],
)
def test_a_switch_needs_no_value(monkeypatch, given, quick):
  """A flag that is off by default is switched on by its name alone, or by a value."""
  args = parse(monkeypatch, CONFIG, *given, "--workdir=w")
  assert args.quick == quick and args.workdir == "w"


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ('{"train": 1}', "config.py: there is no function config()"),
    ('{"train": null}', "config.py:1: NameError"),
    ("def config(:", "config.py:1: SyntaxError"),
    ("def config():\n  return 3", "config.py: config() returned int, not Experiment"),
    ("Train(step=3)", "config.py:3: Train has no step; did you mean steps?"),
    ("Train(steps='3')", "config.py:3: train.steps='3': expected int"),
    ("Train(keep=0)", "train.keep=0: expected at least 1"),
    ("Model(dtype='float64')", "model.dtype='float64': expected one of float32, bfloat16"),
    ("Experiment(model=Model(lora_rank=4))", "optim.trained='all' with model.lora_rank=4"),
  ],
)
def test_mistakes_in_a_config_file_name_file_and_line(tmp_path, text, message):
  """A config file that makes no experiment ends in one message with file, line and value."""
  if text[0].isupper():
    text = f"from prm_jax.config import *\ndef config():\n  return {text}"
  path = tmp_path / "config.py"
  path.write_text(text)
  with pytest.raises(SystemExit) as error:
    config_lib.read(str(path))
  assert str(error.value).startswith(str(path))
  assert message in str(error.value)


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["--workdir=w", CONFIG, "--config.optim.learning_rte=1"], "config.optim.learning_rate"),
    (["--workdir=w", CONFIG, "--config.train.steps=many"], "many"),
    (["--workdir=w", CONFIG, "--config.loss.objective=both"], "outcome"),
    (["--workdir=w", CONFIG, "--config.optim.b2=1"], "optim.b2=1.0"),
    ([CONFIG], "workdir"),
    (["--workdir=w"], "--config=FILE is required"),
    (["--workdir=w", "--config=none.py"], "none.py: no such file"),
    (["--workdir=w", "--config"], "expected one argument"),
  ],
)
def test_mistakes_on_the_command_line_say_what_to_do(monkeypatch, capsys, argv, message):
  """An unknown key names the nearest one; a wrong value, itself; a missing file, its path."""
  with pytest.raises(SystemExit) as error:
    parse(monkeypatch, *argv)
  assert error.value.code != 0
  assert message in capsys.readouterr().err + str(error.value)
