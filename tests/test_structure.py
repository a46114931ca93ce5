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
EVERYONE = {"types", "config", "step_metrics"}


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


def test_the_config_file_may_follow_a_space(monkeypatch):
  """--config FILE is --config=FILE, and overrides after it still count."""
  argv = ["--config", CONFIG.removeprefix("--config="), "--workdir", "w"]
  args = parse(monkeypatch, *argv, "--config.mesh.fsdp", "-1", "--config.train.steps", "7")
  given = config_lib.read(f"{ROOT}/configs/arithmetic.py")
  assert args.workdir == "w"
  assert args.config == dataclasses.replace(given, train=dataclasses.replace(given.train, steps=7))


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
  """What is off by default is switched on by its name alone, as documentation writes it."""
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
    ("Train(zzz=3)", "config.py:3: Train has no zzz; there are steps, "),
    ("Train(steps='3')", "config.py:3: train.steps='3': expected int"),
    ("Train(steps=True)", "train.steps=True: expected int"),
    ("Optim(learning_rate='1')", "optim.learning_rate='1': expected float"),
    ("Model(remat=True)", "model.remat=True: expected one of none, dots, dots_no_batch, full"),
    ("Model(saved=('gate',))", "model.saved=('gate',) with model.remat='none'"),
    ("Model(remat='full', saved=('gates',))", "gates is none of query, key, value"),
    ("Model(tied_embeddings=1)", "model.tied_embeddings=1: expected bool"),
    ("Model(lora_targets=('head',))", "head is none of query, key, value"),
    ("Model(lora_targets=('query', 'key', 'query'))", "expected some weights, each once"),
    ("Model(lora_targets=())", "model.lora_targets=(): expected some weights"),
    ("Optim(last_layers=2)", "optim.last_layers=2 with optim.trained='all'"),
    (
      "Loss(objective='language_model', language_model_weight=0.5)",
      "loss.language_model_weight=0.5 weighs a loss beside",
    ),
    (
      "Experiment(loss=Loss(objective='language_model'), data=Data(text_train='a', text_eval='b'), "
      "train=Train(best_metric='ece'))",
      "train.best_metric='ece': of a language model there is only nll",
    ),
    ("Experiment(optim=Optim(trained='lora'))", "with model.lora_rank=0"),
    ("Experiment(model=Model(lora_rank=4))", "optim.trained='all' with model.lora_rank=4"),
    ("Model(dtype='float64')", "model.dtype='float64': expected one of float32, bfloat16"),
    ("Experiment(train=Optim())", "experiment.train=Optim("),
    ("Train(keep=0)", "train.keep=0: expected at least 1"),
    ("Optim(final_fraction=2)", "optim.final_fraction=2: expected 0 to 1"),
    ("Loss(language_model_weight=-1)", "loss.language_model_weight=-1: expected at least 0"),
  ],
)
def test_mistakes_in_a_config_file_name_file_and_line(tmp_path, text, message):
  """A config file that makes no experiment ends in one message, whatever is wrong with it."""
  if text[0].isupper():
    text = f"from prm_jax.config import *\ndef config():\n  return {text}"
  path = tmp_path / "config.py"
  path.write_text(text)
  with pytest.raises(SystemExit) as error:
    config_lib.read(str(path))
  assert str(error.value).startswith(str(path))
  assert message in str(error.value)


def test_an_int_is_fine_where_a_float_is_meant():
  """`Optim(learning_rate=1)` is no mistake."""
  assert config_lib.Optim(learning_rate=1, weight_decay=0).learning_rate == 1


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
    (["--workdir=w", "--config"], "expected one argument"),
    (["--workdir=w", CONFIG, "--config.train.log_every=0"], "train.log_every=0"),
    (["--workdir=w", CONFIG, "--config.train.eval_rows=-1"], "train.eval_rows=-1"),
    (["--workdir=w", CONFIG, "--config.data.row_length=0"], "data.row_length=0"),
    (["--workdir=w", CONFIG, "--config.model.heads=6"], "model.heads=6"),
    (["--workdir=w", CONFIG, "--config.model.head_size=7"], "model.head_size=7"),
    (["--workdir=w", CONFIG, "--config.optim.b2=1"], "optim.b2=1.0"),
    (["--workdir=w", CONFIG, "--config.optim.learning_rate=nan"], "optim.learning_rate=nan"),
    (["--workdir=w", CONFIG, "--config.mesh.fsdp=0"], "mesh.fsdp=0"),
  ],
)
def test_mistakes_on_the_command_line_say_what_to_do(monkeypatch, capsys, argv, message):
  """An unknown key names the nearest one; a wrong value, itself; a missing file, its path."""
  with pytest.raises(SystemExit) as error:
    parse(monkeypatch, *argv)
  assert error.value.code != 0
  assert message in capsys.readouterr().err + str(error.value)
