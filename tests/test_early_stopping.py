"""train.stop_patience: a run ends when its metric gets no better, and its best step is kept."""

import contextlib
import dataclasses
import os
import signal

import jax
import jobs
import numpy as np
import pytest
import tiny

from prm_jax import config as config_lib
from prm_jax.runtime import command_line, preemption
from prm_jax.training import checkpoint, evaluations, loop

# By step.  Better until step 4, then twice no better.
NLL = {2: 0.7, 4: 0.5, 6: 0.6, 8: 0.55, 10: 0.4, 12: 0.3}
AUROC = {2: 0.6, 4: None, 6: 0.7, 8: 0.5, 10: 0.7, 12: 0.9}


@dataclasses.dataclass(frozen=True)
class Args:
  config: config_lib.Experiment = config_lib.Experiment()


@pytest.fixture(scope="module")
def experiment(arithmetic_data):
  """A run of 12 steps, evaluated at every second and saved at every third, of known metrics."""

  def evaluate(self):
    step = int(self.state.step)
    return {"count": 9, "nll": NLL[step], "accuracy": 0.5, "auroc": AUROC[step], "ece": 0.1}

  experiment = tiny.experiment(arithmetic_data, config_lib.Loss())
  options = {"steps": 12, "log_every": 1, "eval_every": 2, "save_every": 3, "keep": 1}
  with pytest.MonkeyPatch.context() as patch, tiny.first_device():
    patch.setattr(loop.Run, "evaluate", evaluate)
    yield tiny.change(experiment, "train", **options, stop_patience=2)


@pytest.fixture(scope="module")
def whole(experiment, tmp_path_factory):
  """The work directory of an uninterrupted run."""
  workdir = tmp_path_factory.mktemp("whole")
  loop.run(experiment, workdir)
  return workdir


@pytest.fixture
def killing(monkeypatch):
  """A function that has the next run killed, or stopped by SIGTERM, after a record."""
  write = loop.Log.write

  def kill(at, split, term=False):
    def writing(self, step, name, values):
      write(self, step, name, values)
      if (step, name) == (at, split):
        monkeypatch.setattr(loop.Log, "write", write)
        if not term:
          raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop.Log, "write", writing)

  return kill


def kept(workdir):
  """Steps of the checkpoints, the best of them, and the last step with a record."""
  with contextlib.closing(checkpoint.Checkpointer(workdir)) as reader:
    best = reader.newest(lambda step, _: step, "best")[2]
    return reader.steps(), best, tiny.records(workdir)[-1]["step"]


@pytest.mark.parametrize(
  ("metric", "patience", "expected"),
  [
    ("nll", 2, ([4, 8], 4, 8)),
    ("nll", 3, ([12], 12, 12)),  # a better one at 10 starts the count again
    ("auroc", 2, ([10], 10, 10)),  # undefined and equal are no better; of equals the later is kept
  ],
)
def test_a_metric_that_gets_no_better_stops_the_run(
  experiment, tmp_path, capsys, metric, patience, expected
):
  """It ends after that many evaluations; the best step is kept, although save_every has others."""
  options = {"best_metric": metric, "stop_patience": patience}
  loop.run(tiny.change(experiment, "train", **options), tmp_path)
  assert kept(tmp_path) == expected
  said, last = capsys.readouterr().err, expected[2]
  assert (f"early stopping at step {last}" in said) == (last < 12)
  assert f"step {last} goodput" in said


@pytest.mark.parametrize(
  "kill",
  [
    pytest.param((7, "train"), id="between"),
    pytest.param((8, "test"), id="after the evaluation, before the save"),
    pytest.param((5, "train", True), id="SIGTERM"),
    pytest.param((7, "train", True), id="SIGTERM, before the evaluation that ends it"),
  ],
)
def test_a_resumed_run_stops_where_an_uninterrupted_one_does(
  experiment, whole, tmp_path, killing, kill
):
  """Killed or preempted anywhere, it ends at the same step, in the same state, with the same log.

  Run once more, it does nothing; with more patience it goes on.
  """
  killing(*kill)
  with pytest.raises((KeyboardInterrupt, preemption.Preempted)):
    loop.run(experiment, tmp_path)
  assert checkpoint.latest(tmp_path)[0] in (6, 8)
  for _ in range(2):
    loop.run(experiment, tmp_path)
    states = tiny.final_state(whole), tiny.final_state(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert tiny.records(whole) == tiny.records(tmp_path)
  assert checkpoint.latest(tmp_path)[0] == 8
  loop.run(tiny.change(experiment, "train", stop_patience=3), tmp_path)
  assert checkpoint.latest(tmp_path)[0] == 12


def test_patience_that_cannot_act_is_said(experiment, tmp_path, capsys, monkeypatch):
  """Too few evaluations before the end, or a metric that is undefined: one warning each, and the
  error for the best checkpoint says which metric never was."""
  monkeypatch.setattr(loop.Run, "evaluate", lambda _: {"count_by_class": {"-1": 0, "1": 9}})
  options = {"eval_every": 4, "save_every": 4, "best_metric": "auroc"}
  loop.run(tiny.change(experiment, "train", **options), tmp_path)
  said = capsys.readouterr().err
  few = "stop_patience=2 needs 3 evaluations before the last step; train.steps=12 and"
  assert few in said and "train.eval_every=4 give 2" in said
  assert said.count("auroc (train.best_metric) is undefined on the split test") == 1
  assert "by label are -1: 0, 1: 9; no step is the best, and train.stop_patience=2 cannot" in said
  with pytest.raises(
    ValueError, match=r"no checkpoint is best: auroc .* never defined .*right and"
  ):
    kept(tmp_path)
  assert not evaluations.too_few(config_lib.Train(steps=7, eval_every=2, stop_patience=2))
  assert evaluations.too_few(config_lib.Train(steps=6, eval_every=2, stop_patience=2))


def test_a_metric_of_an_evaluation_that_was_made_up_counts(experiment, tmp_path, killing):
  """A step that was saved in a hurry, without its evaluation, can be the best nevertheless."""
  experiment = tiny.change(experiment, "train", save_every=100)
  killing(3, "train", term=True)
  with pytest.raises(preemption.Preempted, match="step 4 is saved"):
    loop.run(experiment, tmp_path)
  loop.run(experiment, tmp_path)
  assert kept(tmp_path) == ([4, 8], 4, 8)


def test_what_is_known_of_evaluations():
  """Ranking takes the later of equals; patience counts from the first of them."""
  known = {2: {"nll": 0.5}, 4: {"nll": float("nan")}, 6: {"nll": 0.5}, 8: {}}
  assert evaluations.ranked(known, "nll") == [6, 2]
  assert evaluations.without_better(known, "nll") == (2, 3)
  assert evaluations.without_better(known, "auroc") == (None, 0)


def test_a_wrong_metric_names_the_nearest(monkeypatch, capsys):
  """In a config file and in a flag; and a run that may stop must keep its best step."""
  with pytest.raises(ValueError, match=r"train\.best_metric='aurok'.*the nearest is auroc"):
    config_lib.Train(best_metric="aurok")
  with pytest.raises(ValueError, match=r"train\.keep_best=0: expected keep_best of 1"):
    config_lib.Train(stop_patience=1, keep_best=0)
  for flag in (["--config.train.best_metric=auc"], ["--config.train.best_metric", "auc"]):
    monkeypatch.setattr("sys.argv", ["train.py", "--config=configs/arithmetic.py", *flag])
    with pytest.raises(SystemExit):
      command_line.parse(Args)
    assert "best_metric=auc: did you mean" in capsys.readouterr().err


@pytest.mark.slow
def test_two_hosts_stop_where_one_does(arithmetic_data, tmp_path):
  """By a real metric: the same last step, checkpoints and best on one host and on two."""
  train = {"steps": 40, "eval_every": 2, "save_every": 5, "keep": 1, "stop_patience": 2}
  path = jobs.config_file(tmp_path, arithmetic_data, **train, best_metric="accuracy")
  found = []
  for hosts in (1, 2):
    workdir = tmp_path / str(hosts)
    flags = (f"--config={path}", f"--workdir={workdir}", "--config.mesh.fsdp=-1")
    jobs.finish(jobs.start("train.py", *flags, hosts=hosts, devices=2))
    found.append(kept(workdir))
  assert found[0] == found[1] and found[0][2] < 40
