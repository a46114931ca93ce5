"""Weights & Biases: the calls that a run makes, against a stand-in; and the package itself."""

import json
import os
import sys
import types

import jax
import pytest
import tiny

from prm_jax import config as config_lib
from prm_jax.runtime import preemption
from prm_jax.training import boards, loop

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def experiment(arithmetic_data):
  experiment = tiny.experiment(arithmetic_data, config_lib.Loss())
  return tiny.change(experiment, "train", log_every=4, save_every=4, wandb="prm")


@pytest.fixture
def fake(monkeypatch):
  """A stand-in for the package: every call in order, as (name, what it was given)."""
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


def of(calls, name):
  return [given for each, given in calls if each == name]


def test_a_resumed_run_continues_its_own(experiment, tmp_path, fake, monkeypatch):
  """Every record goes to one run id, a stop counts as a failure, and the rest as done.

  Metrics have the names of TensorBoard and an axis of their own.
  """
  write = loop.Log.write

  def told(self, step, split, values):
    write(self, step, split, values)
    if (step, split) == (4, "test"):
      os.kill(os.getpid(), 15)

  with monkeypatch.context() as patch:
    patch.setattr(loop.Log, "write", told)
    with pytest.raises(preemption.Preempted):
      loop.run(experiment, tmp_path / "run")
  loop.run(experiment, tmp_path / "run")
  first, second = of(fake, "init")
  assert first["id"] == second["id"] == (tmp_path / "run" / boards.RUN_ID).read_text().strip()
  assert (first["project"], first["name"], first["resume"]) == ("prm", "run", "allow")
  assert first["config"]["optim"]["learning_rate"] == experiment.optim.learning_rate
  assert of(fake, "define_metric") == [(("*",), {"step_metric": "step"})] * 2
  assert of(fake, "finish") == [1, 0]
  logged = {(given["step"], name): x for given in of(fake, "log") for name, x in given.items()}
  for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
    record = json.loads(line)
    name = {"train": "loss", "test": "nll", "goodput": "total"}[record["split"]]
    assert logged[record["step"], f"{record['split']}/{name}"] == record[name]
  assert "test/accuracy_by_class/1" in {name for _, name in logged}


def test_only_the_first_host_writes(experiment, tmp_path, fake, monkeypatch):
  """The other hosts open no run and need no package."""
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  c = config_lib.Experiment(train=experiment.train)
  with boards.contextlib.ExitStack() as stack:
    loop.Log(loop.workdir_lock.WorkdirLock(tmp_path), c, 0, stack).write(1, "test", {"nll": 1.0})
  assert not fake and not list(tmp_path.iterdir())


@pytest.mark.parametrize("found", ["nothing", "the folder that it makes"])
def test_without_the_package_nothing_begins(experiment, tmp_path, monkeypatch, found):
  """An error that says what to install, before the data is read; and nothing is left."""
  module = None if found == "nothing" else types.ModuleType("wandb")
  monkeypatch.setitem(sys.modules, "wandb", module)
  monkeypatch.setattr(loop, "read_rows", lambda *_: pytest.fail("the data was read"))
  with pytest.raises(ValueError, match=r"train\.wandb='prm': .*pip install 'prm_jax\[wandb\]'"):
    loop.run(experiment, tmp_path)
  assert not [path for path in tmp_path.iterdir() if path.name != "train.lock"]


def test_a_run_that_cannot_be_opened_is_an_error(experiment, tmp_path, fake, monkeypatch):
  """Without a key the package raises its own error: ours says what to do."""

  def init(**_):
    raise RuntimeError("api_key not configured")

  monkeypatch.setattr(sys.modules["wandb"], "init", init)
  with pytest.raises(ValueError, match=r"api_key not configured; log in .* WANDB_MODE=offline"):
    loop.run(experiment, tmp_path)


def test_the_package_itself_offline(experiment, tmp_path, monkeypatch):
  """Without an account: two processes of a run write two files with the same id."""
  pytest.importorskip("wandb", reason="wandb is not installed: pip install '.[wandb]'")
  monkeypatch.setenv("WANDB_MODE", "offline")
  loop.run(experiment, tmp_path)
  loop.run(experiment, tmp_path)
  found = [path.name.rpartition("-")[2] for path in (tmp_path / "wandb").glob("offline-run-*")]
  assert found == [(tmp_path / boards.RUN_ID).read_text().strip()] * 2
