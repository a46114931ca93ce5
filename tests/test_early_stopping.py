"""Early stopping: a run ends when its metric no longer improves, and keeps its best step."""

import contextlib

import jobs
import pytest
import tiny

from prm_jax import config as config_lib
from prm_jax.runtime import exits
from prm_jax.training import checkpoint, evaluations, loop

# Metrics by step: NLL improves until step 4, then twice does not.
NLL = {2: 0.7, 4: 0.5, 6: 0.6, 8: 0.55, 10: 0.4, 12: 0.3}
AUROC = {2: float("nan"), 4: None, 6: 0.7, 8: 0.5, 10: 0.7, 12: 0.9}


@pytest.fixture(scope="module")
def experiment(arithmetic_data):
  """A run of 12 steps, evaluated every second and saved every third, with the metrics above."""

  def evaluate(self):
    step = int(self.state.step)
    return {"count": 9, "nll": NLL[step], "accuracy": 0.5, "auroc": AUROC[step], "ece": 0.1}

  experiment = tiny.experiment(arithmetic_data)
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


def kept(workdir):
  """The steps of the checkpoints, the best step, and the last step with a record."""
  with contextlib.closing(checkpoint.Checkpointer(workdir)) as reader:
    best = reader.newest(lambda step, _: step, "best")[2]
    return reader.steps(), best, tiny.records(workdir)[-1]["step"]


@pytest.mark.parametrize(
  ("metric", "patience", "expected"),
  [
    ("nll", 2, ([4, 8], 4, 8)),
    ("nll", 3, ([12], 12, 12)),  # the improvement at step 10 resets the count
    (
      "auroc",
      2,
      ([10], 10, 10),
    ),  # undefined and equal values are no improvement; of equals the later is kept
  ],
)
def test_a_run_stops_when_its_metric_no_longer_improves(
  experiment, tmp_path, capsys, metric, patience, expected
):
  """A run ends after stop_patience evaluations without improvement and keeps its best step."""
  options = {"best_metric": metric, "stop_patience": patience}
  loop.run(tiny.change(experiment, "train", **options), tmp_path)
  assert kept(tmp_path) == expected
  log, last = capsys.readouterr().err, expected[2]
  assert (f"early stopping at step {last}: {metric} has not improved in" in log) == (last < 12)
  checkpoint.restore_params(tmp_path, loop.sharding_lib.make_mesh(experiment.mesh))
  says = f"using step {last} (latest); step {expected[1]} (best) has a better {metric}\n"
  assert (says in capsys.readouterr().err) == (last != expected[1])


def test_a_run_that_only_patience_ends_needs_no_memory_for_its_steps(experiment, tmp_path):
  """The most steps that a config can have cost no time or memory before they are made."""
  loop.run(tiny.change(experiment, "train", steps=2**31 - 1), tmp_path)
  assert kept(tmp_path) == ([4, 8], 4, 8)


@pytest.mark.parametrize(
  "kill",
  [
    pytest.param((7, tiny.kill, "train"), id="between two checkpoints"),
    pytest.param((8, tiny.kill, "test"), id="before the save"),
    pytest.param((7, tiny.terminate, "train"), id="SIGTERM before the evaluation"),
  ],
)
def test_a_resumed_run_stops_where_an_uninterrupted_one_does(
  experiment, whole, tmp_path, kill, capsys
):
  """A run killed or preempted anywhere stops at the step, state and log of an uninterrupted one.

  Run once more, it does nothing, and says by which metric the best checkpoint is found; with more
  patience it trains on.
  """
  with tiny.after_record(*kill), pytest.raises((KeyboardInterrupt, exits.Preempted)):
    loop.run(experiment, tmp_path)
  assert checkpoint.latest(tmp_path)[0] in (6, 8)
  for _ in range(2):
    loop.run(experiment, tmp_path)
    tiny.assert_same_run(whole, tmp_path)
  assert checkpoint.latest(tmp_path)[0] == 8
  capsys.readouterr()
  loop.run(tiny.change(experiment, "train", best_metric="ece", stop_patience=1), tmp_path)
  assert "--step=best ranks by nll" in capsys.readouterr().err
  loop.run(tiny.change(experiment, "train", stop_patience=3), tmp_path)
  assert checkpoint.latest(tmp_path)[0] == 12


def test_patience_that_cannot_stop_the_run_is_warned_of(experiment, tmp_path, capsys, monkeypatch):
  """Too few evaluations and an undefined metric each give one warning.

  Asking for the best checkpoint is then an error that names the undefined metric.
  """
  monkeypatch.setattr(loop.Run, "evaluate", lambda _: {"count_by_class": {"-1": 0, "1": 9}})
  options = {"eval_every": 4, "save_every": 4, "best_metric": "auroc"}
  loop.run(tiny.change(experiment, "train", **options), tmp_path)
  log = capsys.readouterr().err
  few = "stop_patience=2 needs 3 evaluations before the last step; train.steps=12 and"
  assert few in log and "train.eval_every=4 give 2" in log
  assert log.count("auroc (train.best_metric) is undefined on the split test") == 1
  assert "by label are -1: 0, 1: 9; no step is the best, and train.stop_patience=2 cannot" in log
  with pytest.raises(
    ValueError, match=r"no checkpoint is best: auroc .* never defined .*right and"
  ):
    kept(tmp_path)
  assert not evaluations.why_too_few(config_lib.Train(steps=7, eval_every=2, stop_patience=2))
  assert evaluations.why_too_few(config_lib.Train(steps=6, eval_every=2, stop_patience=2))


def test_an_evaluation_made_on_resuming_counts(experiment, tmp_path):
  """A step saved on SIGTERM without its evaluation is evaluated on resuming and can be the best."""
  experiment = tiny.change(experiment, "train", save_every=100)
  stopped = pytest.raises(exits.Preempted, match="step 4 is saved")
  with tiny.after_record(3, tiny.terminate, "train"), stopped:
    loop.run(experiment, tmp_path)
  loop.run(experiment, tmp_path)
  assert kept(tmp_path) == ([4, 8], 4, 8)


def test_an_unknown_metric_is_refused_with_the_nearest_name():
  """An unknown best_metric names the nearest one; early stopping without keep_best is refused."""
  with pytest.raises(ValueError, match=r"train\.best_metric='aurok'.*the nearest is auroc"):
    config_lib.Train(best_metric="aurok")
  with pytest.raises(ValueError, match=r"train\.keep_best=0: expected keep_best of 1"):
    config_lib.Train(stop_patience=1, keep_best=0)


@pytest.mark.slow
def test_two_hosts_stop_where_one_does(arithmetic_data, tmp_path):
  """Early stopping on two hosts ends at the step, checkpoints and best step of one host."""
  train = {"steps": 40, "eval_every": 2, "save_every": 5, "keep": 1, "stop_patience": 2}
  path = jobs.config_file(tmp_path, arithmetic_data, **train, best_metric="accuracy")
  results = []
  for hosts in (1, 2):
    workdir = tmp_path / str(hosts)
    flags = (f"--config={path}", f"--workdir={workdir}", "--config.mesh.fsdp=-1")
    jobs.finish(jobs.start("train.py", *flags, hosts=hosts, devices=2))
    results.append(kept(workdir))
  assert results[0] == results[1] and results[0][2] < 40
