"""Config files, overrides on the command line, and errors that name what is wrong."""

import ast
import dataclasses
import sys

import pytest
from conftest import ROOT

from prm_jax import config as config_lib
from prm_jax.runtime import command_line, exits

CONFIG = f"--config={ROOT}/configs/arithmetic.py"
CONFIGS = sorted([*ROOT.glob("configs/*.py"), *ROOT.glob("configs/mathematics/*.py")])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_config_files_say_how_to_run_them(path):
  """Every config file gives an Experiment and documents its command, cost and expected result."""
  assert isinstance(command_line.read(str(path)), config_lib.Experiment)
  docstring = ast.get_docstring(ast.parse(path.read_text()))
  assert f"--config={path.relative_to(ROOT)}" in docstring
  assert "Cost: " in docstring and "Expected" in docstring


def parse(monkeypatch, *argv):
  """The arguments that a command line gives."""

  @dataclasses.dataclass(frozen=True)
  class Args:
    workdir: str
    quick: bool = False
    config: config_lib.Experiment = config_lib.Experiment()

  monkeypatch.setattr(sys, "argv", ["train.py", *argv])
  return command_line.parse(Args)


def test_overrides_reach_the_experiment(monkeypatch):
  """A dotted override changes one field; "--config FILE" and "--config=FILE" mean the same."""
  argv = ["--config", CONFIG.removeprefix("--config="), "--workdir", "w"]
  args = parse(monkeypatch, *argv, "--config.mesh.fsdp", "-1", "--config.optim.learning_rate=1e-5")
  given = command_line.read(f"{ROOT}/configs/arithmetic.py")
  optim = dataclasses.replace(given.optim, learning_rate=1e-5)
  assert args.workdir == "w"
  assert args.config == dataclasses.replace(given, optim=optim)


def test_a_switch_needs_no_value(monkeypatch):
  """A flag that is False by default is switched on by its name alone."""
  for given in [(), ("--quick",), ("--quick=True",), ("--quick", "False")]:
    args = parse(monkeypatch, CONFIG, *given, "--workdir=w")
    assert args.quick == (given in [("--quick",), ("--quick=True",)]) and args.workdir == "w"


@pytest.mark.parametrize(
  ("given", "expected"), [("~/models", "/home/me/models"), ("~", "/home/me"), ("a/~", "a/~")]
)
def test_a_path_may_begin_with_the_home_directory(monkeypatch, given, expected):
  """In --NAME=~ and --NAME=~/PATH, which shells do not expand, ~ is the home directory."""
  monkeypatch.setenv("HOME", "/home/me")
  assert parse(monkeypatch, CONFIG, f"--workdir={given}").workdir == expected


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ('{"train": 1}', "KeyError: 'config'; see configs/"),
    ("def config(:", "SyntaxError: invalid syntax (config.py, line 1)"),
    ("def config():\n  return 3", "config() returned 3, not an Experiment"),
    ("Train(step=3)", "'step'; the nearest key is steps"),
    ("Optim(lr=1)", "'lr'; the nearest key is learning_rate"),
    ("Train(steps='3')", "config.py:3: ValueError: train.steps='3': Expected `int`, got `str`"),
    ("Train(keep=0)", "train.keep=0: Expected `int` >= 1"),
    ("Model(dtype='float64')", "model.dtype='float64': Invalid enum value 'float64'; expected Lit"),
    ("Model(lora_targets=('head',))", "Invalid enum value 'head' - at `$[0]`; expected tuple[Lit"),
    ("Experiment(train=Optim())", "experiment.train=Optim("),
    ("Model(lora_rank=1, lora_targets=('up', 'up'))", "one or more weights, each once"),
    ("Model(local_rope_theta=10.0)", "model.window=0: expected a window above 0"),
    ("Experiment(data=Data(text_train='my.experiment.jsonl'))", "text_train='my.experiment.jsonl'"),
    ("Experiment(model=Model(lora_rank=4))", "config.py:3: ValueError: optim.trained='all', model"),
  ],
)
def test_mistakes_in_a_config_file_name_file_and_line(tmp_path, text, message):
  """A config file that gives no experiment ends in one message with file, line and mistake."""
  if text[0].isupper():
    text = f"from prm_jax.config import *\ndef config():\n  return {text}"
  path = tmp_path / "config.py"
  path.write_text(text)
  with pytest.raises(SystemExit) as error:
    command_line.read(str(path))
  assert str(error.value).startswith(f"{exits.script()}: {path}")
  assert message in str(error.value)


def test_values_are_converted_without_loss():
  """An int is accepted for a float, and a list for a tuple."""
  optim = config_lib.Optim(learning_rate=1, weight_decay=0)
  assert repr(optim) == repr(config_lib.Optim(learning_rate=1.0, weight_decay=0.0))
  assert config_lib.Model(lora_targets=["query"]).lora_targets == ("query",)


def test_settings_leave_out_marked_fields():
  """Fields marked as changeable on resuming, or as per host, are left out of the settings."""
  c = config_lib.Experiment()
  fixed = config_lib.settings(c, config_lib.CHANGEABLE)
  shared = config_lib.settings(c, config_lib.PER_HOST)
  assert fixed.keys() < shared.keys()
  assert fixed["optim.learning_rate"] == 1e-4 and "train.log_every" not in fixed
  assert "data.directory" not in shared and "train.log_every" in shared


def test_a_missing_config_file_is_named(monkeypatch):
  with pytest.raises(SystemExit, match=r"none\.py: FileNotFoundError"):
    parse(monkeypatch, "--workdir=w", "--config=none.py")


@pytest.mark.parametrize(
  ("text", "expected"),
  [(r"\n", "\n"), (r"a\t\\n", "a\t\\n"), ("a\nb", "a\nb"), ("\u00e9 ##", "\u00e9 ##")],
)
def test_flags_may_spell_line_breaks(monkeypatch, text, expected):
  r"""In a text flag `\n` stands for a line break, and a real line break stays one."""
  flags = ["--workdir=w", "--config.init.head=tokens", "--config.init.checkpoint=x"]
  flags += [f"--config.data.separator={text}", "--config.init.head_tokens", text]
  c = parse(monkeypatch, CONFIG, *flags).config
  assert (c.data.separator, c.init.head_tokens) == (expected, (expected,))


def test_help_shows_texts_as_flags_spell_them(monkeypatch, capsys, tmp_path):
  """The help shows a default text as a flag gives it, other alphabets included."""
  path = tmp_path / "config.py"
  given = r"Experiment(data=Data(separator='ки\n'))"
  path.write_text(f"from prm_jax.config import *\ndef config():\n  return {given}")
  with pytest.raises(SystemExit):
    parse(monkeypatch, f"--config={path}", "--help")
  out = capsys.readouterr().out
  assert r"'ки\n'" in out
  assert "Of the parameters, except the step head" in out  # a comment inside a default is not shown


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    ([], "Missing from train.py: --workdir"),
    (["--config.optim.learning_rte=1"], "Perhaps you meant: --config.optim.learning_rate "),
    (["--config.loss.objective=both"], "'both' for argument '--config.loss.objective'"),
    (["--config.train.best_metric", "auc"], "Expected one of ('nll', 'accuracy', 'auroc', 'ece')"),
    (["--config.model.heads=6"], "model.heads=6, model.kv_heads="),
    (["--config.optim.learning_rate=nan"], "optim.learning_rate=nan"),
    ([r"--config.data.separator=\d"], r"\d is none of \n, \t and"),
    (["--config.train.batch_size=1"], "--config.train.batch_rows "),
    (["--config.optimizer.b1=0.9"], "--config.optim.b1 "),
    (["--config.model.rope_theta=inf"], "model.rope_theta=inf"),
    (["--config.optim.learning_rate=1e400"], "optim.learning_rate=inf"),
    (["--config.train.batch_rows=1000000000"], "fewer than 2**31"),
    (["--config.data.directory=a\udcff"], "not UTF-8"),
  ],
)
def test_an_invalid_flag_is_refused(monkeypatch, capsys, argv, message):
  """A wrong or missing flag, or a wrong value, is an error that names it and what was meant."""
  with pytest.raises(SystemExit) as end:
    parse(monkeypatch, CONFIG, *(["--workdir=w"] if argv else []), *argv)
  errors = " ".join(capsys.readouterr().err.replace("│", " ").split())
  assert end.value.code == 2 and message in errors


def test_a_config_is_required(monkeypatch, capsys):
  with pytest.raises(SystemExit, match="2"):
    parse(monkeypatch, "--workdir=w")
  assert "required: --config" in capsys.readouterr().err
