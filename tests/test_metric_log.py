"""The metrics of a run: its time by parts, progress, warnings, profiles."""

import contextlib
import re
import time

import jax
import pytest
import tiny
from conftest import read_lines

from prm_jax import config as config_lib
from prm_jax.runtime import exits, progress, workdir_lock
from prm_jax.training import loop, metric_log
from prm_jax.training import step as step_lib

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def experiment(arithmetic_data):
  return tiny.experiment(arithmetic_data)


def records(workdir, split):
  """The lines of metrics.jsonl of a split, with their times."""
  lines = read_lines(workdir / "metrics.jsonl")
  return [line for line in lines if line["split"] == split]


def test_goodput_covers_all_processes_of_a_run(experiment, tmp_path):
  """After a stop and a kill, the last goodput record counts the time of all the run's processes.

  Its parts add up to the total.  "away" is time without a process, or of work that a kill undid.
  """
  began = time.time()
  with tiny.after_record(4, tiny.terminate, "train"), pytest.raises(exits.Preempted):
    loop.run(experiment, tmp_path)
  stopped = records(tmp_path, "goodput")[-1]
  time.sleep(1)
  with tiny.after_record(8, tiny.kill, "train"), pytest.raises(KeyboardInterrupt):
    loop.run(experiment, tmp_path)  # whose last checkpoint is of step 6
  saved = records(tmp_path, "goodput")[-1]
  assert saved["step"] == 6
  assert 1 <= saved["away"] < saved["total"] - stopped["total"]
  undone = time.time() - saved["unix"]
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


def test_every_host_warns_that_it_waits_for_data(tmp_path, monkeypatch, capsys):
  """A host whose data is slower than its updates warns once, also if it writes no log.

  Very short updates give no warning.
  """
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  c, logs = config_lib.Experiment(train=config_lib.Train(steps=4)), []
  with contextlib.ExitStack() as stack:
    log = metric_log.Log(workdir_lock.WorkdirLock(tmp_path), c, 0, stack)
    timer = metric_log.Goodput()
    for brief in (1e9, 0.01):
      monkeypatch.setattr(metric_log, "BRIEF", brief)
      updates = metric_log.UpdateMetrics(log, timer, c.train, 1.0)
      for step in (1, 2):
        updates.add({"loss": 1.0, "gradient_norm": 1.0, "learning_rate": 0.1})
        with timer.spent_on("data"):
          time.sleep(0.05)
        updates.close_record(step)
      updates.write()
      logs.append(capsys.readouterr().err)
  assert not logs[0] and logs[1].startswith("host 1 of 2: data is the bottleneck: ")
  assert logs[1].count("bottleneck") == 1
  assert not list(tmp_path.iterdir())


def test_a_run_prints_its_progress_and_writes_a_trace(experiment, tmp_path, monkeypatch, capsys):
  """A run prints its separator, losses and time left; train.profile_at writes a profiler trace.

  It warns of a warm-up that never ends, of examples longer than the model's context, and of
  compiler options where there is no TPU.
  """
  monkeypatch.setattr(progress, "SECONDS", 0.001)
  warming = tiny.change(experiment, "optim", warmup_steps=8)
  warming = tiny.change(warming, "model", context_length=20)
  warming = tiny.change(warming, "tpu", compiler_options=("xla_a=1",))
  loop.run(tiny.change(warming, "train", profile_at=3), tmp_path / "run")
  log = capsys.readouterr().err
  assert "warning: the learning rate rises to the end of the run: 8 steps of optim.warmup" in log
  assert re.search(
    r"warning: a training example has \d\d tokens, more than the model's context of 20", log
  )
  assert "steps end with the separator '\\n', tokens [3]" in log
  assert "tpu.compiler_options are ignored: the devices are not TPUs" in log
  assert re.search(r"step 2 of 8: loss .* tokens/s \d+, .*\d+:\d+ left", log)
  assert "compiling the evaluation\n" in log and re.search(r"evaluating: \d+/\d+ batches", log)
  assert re.search(r"step 8 goodput: goodput \d+\.\d%  total [\d.e-]+ s  updates ", log)
  assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
  schedule = step_lib.learning_rate(warming.optim, warming.train.steps)
  rates = {x["step"]: x["learning_rate"] for x in records(tmp_path / "run", "train")}
  assert len(rates) > 2 and rates == pytest.approx({i: float(schedule(i - 1)) for i in rates})


@pytest.mark.parametrize(
  ("steps", "step", "expected"),
  [
    (10, 3, 7 + 3 * 100 + 2 * 1000),  # evaluations at steps 4, 8 and 10; saves at 5 and 10
    (10, 10, 100 + 1000),  # evaluation and save at the last step
    (12, 8, 4 + 2 * 100 + 2 * 1000),  # evaluations at 8 and 12; saves at 10 and 12
  ],
)
def test_the_time_left_counts_evaluations_and_saves(steps, step, expected):
  """The estimated time left includes every evaluation and save that is still due."""
  c = config_lib.Train(steps=steps, eval_every=4, save_every=5)
  timer = metric_log.Goodput()
  assert metric_log.seconds_left(c, step, 1.0, timer) == steps - step  # no durations known yet
  timer.last.update(evaluation=100, checkpoint=1000)
  assert metric_log.seconds_left(c, step, 1.0, timer) == expected


@pytest.mark.parametrize("terminal", [True, False])
def test_a_progress_bar_shows_a_given_time_left(monkeypatch, terminal):
  """A progress bar shows the given estimate of the time left, on a terminal and in a log."""
  monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
  with progress.Progress(total=20, initial=10, unit="steps", desc="training") as bar:
    bar.set_postfix_str("tokens/s 7", refresh=False)
    bar.estimate(lambda done: 60.0 * (20 - done), at_most=True)
    shown = str(bar)
  assert all(text in shown for text in ("training", "10/20", "tokens/s 7", "at most 10:00"))


def test_nested_parts_of_the_time_count_once():
  """Compilation within an evaluation counts as compilation only."""
  timer = metric_log.Goodput()
  with timer.spent_on("evaluation"), timer.spent_on("compilation"):
    time.sleep(0.05)
  assert timer.seconds["compilation"] > timer.seconds["evaluation"] == timer.last["evaluation"]
