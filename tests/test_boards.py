"""Weights & Biases: the calls of a run, recorded by a stand-in, and the package itself."""

import sys
import types

import jax
import pytest
import tiny
from conftest import read_lines

from prm_jax import config as config_lib
from prm_jax.runtime import exits
from prm_jax.training import boards, loop

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def experiment(arithmetic_data):
  experiment = tiny.experiment(arithmetic_data)
  return tiny.change(experiment, "train", log_every=4, save_every=4, wandb="prm")


@pytest.fixture
def fake(monkeypatch):
  """The calls to a stand-in for the package, in order, as (name, arguments)."""
  calls = []

  class Run:
    def log(self, values):
      calls.append(("log", values))

    def define_metric(self, *args, **options):
      calls.append(("define_metric", (args, options)))

    def finish(self, exit_code):
      calls.append(("finish", exit_code))

  def init(**options):
    calls.append(("init", options))
    return Run()

  module = types.ModuleType("wandb")
  module.init, module.Settings = init, lambda **options: options
  monkeypatch.setitem(sys.modules, "wandb", module)
  return calls


def arguments(calls, name):
  """The arguments of each call of a function."""
  return [given for each, given in calls if each == name]


def test_a_resumed_run_keeps_its_run_id(experiment, tmp_path, fake):
  """A stopped and a resumed process log every record to one run id, the first as failed.

  Metrics have the names used in TensorBoard and the step as their axis.
  """
  with tiny.after_record(4, tiny.terminate, "test"), pytest.raises(exits.Preempted):
    loop.run(experiment, tmp_path / "run")
  loop.run(experiment, tmp_path / "run")
  first, second = arguments(fake, "init")
  assert first["id"] == second["id"] == (tmp_path / "run" / boards.RUN_ID).read_text().strip()
  assert (first["project"], first["name"], first["resume"]) == ("prm", "run", "allow")
  assert first["config"]["optim"]["learning_rate"] == experiment.optim.learning_rate
  assert arguments(fake, "define_metric") == [(("*",), {"step_metric": "step"})] * 2
  assert arguments(fake, "finish") == [1, 0]
  lines = arguments(fake, "log")
  logged = {(line["step"], name): value for line in lines for name, value in line.items()}
  for record in read_lines(tmp_path / "run" / "metrics.jsonl"):
    name = {"train": "loss", "test": "nll", "goodput": "total"}[record["split"]]
    assert logged[record["step"], f"{record['split']}/{name}"] == record[name]
  assert "test/accuracy_by_class/1" in {name for _, name in logged}


def test_only_the_first_host_opens_a_run(experiment, tmp_path, fake, monkeypatch):
  """Hosts other than the first open no run at Weights & Biases and write no file."""
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  c = config_lib.Experiment(train=experiment.train)
  with boards.contextlib.ExitStack() as stack:
    loop.Log(loop.workdir_lock.WorkdirLock(tmp_path), c, 0, stack).write(1, "test", {"nll": 1.0})
  assert not fake and not list(tmp_path.iterdir())


@pytest.mark.parametrize("imported", ["nothing", "the package's output folder"])
def test_a_missing_package_is_an_error_before_training(experiment, tmp_path, monkeypatch, imported):
  """Without wandb a run ends before reading data, with what to install, and leaves no file."""
  module = None if imported == "nothing" else types.ModuleType("wandb")
  monkeypatch.setitem(sys.modules, "wandb", module)
  monkeypatch.setattr(loop, "read_rows", lambda *_: pytest.fail("the data was read"))
  with pytest.raises(ValueError, match=r"train\.wandb='prm': .*pip install 'prm_jax\[wandb\]'"):
    loop.run(experiment, tmp_path)
  assert not [path for path in tmp_path.iterdir() if path.name != "train.lock"]


def test_a_run_that_cannot_be_opened_is_an_error(experiment, tmp_path, fake, monkeypatch):
  """If the package cannot open a run, the error adds what to do to the package's own message."""

  def init(**_):
    raise RuntimeError("api_key not configured")

  monkeypatch.setattr(sys.modules["wandb"], "init", init)
  with pytest.raises(ValueError, match=r"api_key not configured; log in .* WANDB_MODE=offline"):
    loop.run(experiment, tmp_path)


def test_the_package_itself_continues_a_run_offline(experiment, tmp_path, monkeypatch):
  """Offline, the package itself writes a run and its continuation under the same id."""
  pytest.importorskip("wandb", reason="wandb is not installed: pip install '.[wandb]'")
  monkeypatch.setenv("WANDB_MODE", "offline")
  loop.run(experiment, tmp_path)
  loop.run(experiment, tmp_path)
  ids = [path.name.rpartition("-")[2] for path in (tmp_path / "wandb").glob("offline-run-*")]
  assert ids == [(tmp_path / boards.RUN_ID).read_text().strip()] * 2
