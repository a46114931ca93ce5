"""metrics.jsonl: every record once, the time of a run by its parts, warnings, profiles."""

import contextlib
import json
import os
import signal
import time

import jax
import numpy as np
import pytest
import tiny

from prm_jax import config as config_lib
from prm_jax.runtime import preemption, progress, workdir_lock
from prm_jax.training import loop, metric_log

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def experiment(arithmetic_data):
  return tiny.experiment(arithmetic_data, config_lib.Loss())


def records(workdir, split):
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return [line for line in lines if line["split"] == split]


def test_goodput_is_of_the_whole_run(experiment, tmp_path, monkeypatch):
  """After a stop and a kill, the last record counts the time of all processes of the run.

  Its parts add up to the total.  In "away" nothing ran, or work was done that the kill undid.
  """
  write, began = loop.Log.write, time.time()

  def told(self, step, split, values):
    write(self, step, split, values)
    if (step, split) == (4, "train"):
      os.kill(os.getpid(), signal.SIGTERM)

  def killed(self, step, split, values):
    write(self, step, split, values)
    if (step, split) == (8, "train"):  # the last checkpoint is of step 6
      raise RuntimeError("killed")

  monkeypatch.setattr(loop.Log, "write", told)
  with pytest.raises(preemption.Preempted):
    loop.run(experiment, tmp_path)
  stopped = records(tmp_path, "goodput")[-1]
  monkeypatch.setattr(loop.Log, "write", killed)
  time.sleep(1)
  with pytest.raises(RuntimeError, match="killed"):
    loop.run(experiment, tmp_path)
  saved = records(tmp_path, "goodput")[-1]
  assert saved["step"] == 6
  assert 1 <= saved["away"] < saved["total"] - stopped["total"]
  undone = time.time() - saved["unix"]
  monkeypatch.setattr(loop.Log, "write", write)
  loop.run(experiment, tmp_path)
  end = records(tmp_path, "goodput")[-1]
  assert end["away"] >= saved["away"] + undone
  parts = ("updates", "start", "compilation", "data", "evaluation", "checkpoint", "away")
  assert sum(end[part] for part in parts) == pytest.approx(end["total"], rel=1e-6)
  for part in parts[:3]:
    assert end[part] > saved[part] > stopped[part] > 0
  assert stopped["away"] == 0
  for line in records(tmp_path, "train"):
    assert 0 <= line["data_wait_seconds"] <= line["step_seconds"]
  assert end["total"] == pytest.approx(end["unix"] - began, rel=0.1)
  assert end["goodput"] == pytest.approx(end["updates"] / end["total"])
  steps = [record["step"] for record in records(tmp_path, "goodput")]
  assert steps == [3, stopped["step"], 6, 8]


def test_every_host_says_that_it_waits_for_data(tmp_path, monkeypatch, capsys):
  """Rows that come slower than updates: one warning, also of a host that writes no log.

  There is none where an update is so short that any host is slow beside it.
  """
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  c, said = config_lib.Experiment(train=config_lib.Train(steps=4)), []
  with contextlib.ExitStack() as stack:
    log = metric_log.Log(workdir_lock.WorkdirLock(tmp_path), c, 0, stack)
    timer = metric_log.Goodput()
    for brief in (1e9, 0.01):
      monkeypatch.setattr(metric_log, "BRIEF", brief)
      updates = metric_log.UpdateMetrics(log, timer, c.train, np.ones(4), 1.0)
      for step in (1, 2):
        updates.add({"loss": 1.0, "gradient_norm": 1.0})
        with timer.spent_on("data"):
          time.sleep(0.05)
        updates.close_record(step)
      updates.write()
      said.append(capsys.readouterr().err)
  assert not said[0] and said[1].startswith("host 1 of 2: data is the bottleneck: ")
  assert said[1].count("bottleneck") == 1
  assert not list(tmp_path.iterdir())


def test_a_trace_is_written_on_request(experiment, tmp_path):
  """train.profile_at: three updates in the profiler's format."""
  loop.run(tiny.change(experiment, "train", profile_at=3), tmp_path / "with")
  assert list((tmp_path / "with" / "profile").rglob("*.xplane.pb"))


@pytest.mark.parametrize(
  ("steps", "step", "expected"),
  [
    (10, 3, 7 + 3 * 100 + 2 * 1000),  # evaluations of steps 4, 8 and 10; saves of 5 and 10
    (10, 10, 100 + 1000),  # what is due with the last update
    (12, 8, 4 + 2 * 100 + 2 * 1000),  # of 8 and 12; of 10 and 12
  ],
)
def test_the_time_left_counts_evaluations_and_saves(steps, step, expected):
  """All that are due until the end, the last of each at the last step."""
  c = config_lib.Train(steps=steps, eval_every=4, save_every=5)
  timer = metric_log.Goodput()
  assert metric_log.seconds_left(c, step, 1.0, timer) == steps - step  # none was made so far
  timer.last.update(evaluation=100, checkpoint=1000)
  assert metric_log.seconds_left(c, step, 1.0, timer) == expected


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_shows_the_time_left_that_is_known(monkeypatch, terminal):
  """On a terminal and in a log: done, total, rate, tokens and the estimate in place of tqdm's."""
  monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
  with progress.Progress(total=20, initial=10, unit="steps", desc="training") as bar:
    bar.set_postfix_str("tokens/s 7", refresh=False)
    bar.estimate(lambda done: 60.0 * (20 - done), at_most=True)
    shown = str(bar)
  assert all(text in shown for text in ("training", "10/20", "tokens/s 7", "at most 10:00"))


def test_a_part_of_the_time_counts_once():
  """The compilation within an evaluation is compilation, and no evaluation."""
  timer = metric_log.Goodput()
  with timer.spent_on("evaluation"), timer.spent_on("compilation"):
    time.sleep(0.05)
  assert timer.seconds["compilation"] > timer.seconds["evaluation"] == timer.last["evaluation"]
