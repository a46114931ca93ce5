"""Runs that are stopped, killed or started twice lose nothing; damaged data is named."""

import collections
import gc
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc

import forked_train
import jax
import pytest
import tiny
from conftest import OPTIMISED, ROOT

from prm_jax.datasets import prm800k
from prm_jax.runtime import exits, workdir_lock
from prm_jax.training import checkpoint, loop


@pytest.fixture
def experiment(arithmetic_data, one_device):
  """A run on one device, with a line for every step."""
  experiment = tiny.experiment(arithmetic_data)
  return tiny.change(experiment, "train", log_every=1)


def test_a_run_stopped_by_sigterm_resumes_exactly(experiment, tmp_path):
  """SIGTERM, even twice, finishes and saves the current step; the resumed run equals a whole one.

  The evaluation that was due at that step is made on resuming, and recorded once.
  """
  c = tiny.change(experiment, "train", eval_every=3, save_every=8)
  loop.run(c, tmp_path / "whole")
  twice = lambda: (tiny.terminate(), tiny.terminate())
  # The record of step 2 is written while step 3 is under way.
  with tiny.after_record(2, twice), pytest.raises(exits.Preempted, match="step 3 is saved"):
    loop.run(c, tmp_path / "stopped")
  assert checkpoint.latest(tmp_path / "stopped")[0] == 3
  assert [(r["step"], r["split"]) for r in tiny.records(tmp_path / "stopped")][-1] == (3, "train")
  loop.run(c, tmp_path / "stopped")
  tiny.assert_same_run(tmp_path / "whole", tmp_path / "stopped")
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_one_run_at_a_time(tmp_path):
  """A second run in a work directory is an error that names the first; SIGKILL frees the directory.

  A directory that cannot be written is an error too.
  """
  code = (
    "import pathlib, sys, time\nfrom prm_jax.runtime import workdir_lock\n"
    "with workdir_lock.WorkdirLock(pathlib.Path(sys.argv[1])):\n  print('mine', flush=True)\n"
    "  time.sleep(600)"
  )
  first = subprocess.Popen(
    [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, cwd=ROOT, text=True
  )
  try:
    assert first.stdout.readline() == "mine\n"
    with (
      pytest.raises(ValueError, match=rf"another run is writing here \(process {first.pid} on "),
      workdir_lock.WorkdirLock(tmp_path),
    ):
      pass
  finally:
    first.kill()
    first.wait()
  with workdir_lock.WorkdirLock(tmp_path):
    pass
  unwritable = workdir_lock.WorkdirLock(pathlib.Path("/proc/run"))  # it refuses even root
  with pytest.raises(OSError, match="/proc/run"):
    unwritable.__enter__()


def test_a_damaged_shard_is_named(arithmetic_data, tmp_path):
  """Reading prepared data with one changed bit is an error with file, record and remedy."""
  shutil.copytree(arithmetic_data, tmp_path / "data")
  (shard,) = (tmp_path / "data").rglob("*train.array_record*")
  tiny.flip(shard)
  with pytest.raises(ValueError, match=rf"{shard.name}: record 0 .* prepare the dataset again"):
    list(prm800k.stored_records(tmp_path / "data", "train"))


def held() -> int:
  """Bytes of JAX's arrays, plus those that Python and numpy allocated since the first call."""
  gc.collect()
  if not tracemalloc.is_tracing():
    tracemalloc.start()
  return tracemalloc.get_traced_memory()[0] + sum(a.nbytes for a in jax.live_arrays())


def resident() -> int:
  """Resident bytes of this process, including those that allocators keep for later."""
  return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("measure", "steps", "bound"), [(held, 400, 1e6), (resident, 2000, 32e6)])
@pytest.mark.slow
def test_memory_does_not_grow(experiment, tmp_path, monkeypatch, measure, steps, bound):
  """Training with evaluations and checkpoints takes no more memory after its first quarter.

  The bound is at most a third of the bytes that keeping all batches or all metrics would take.
  """
  quarter = steps // 4
  every = {"log_every": 10, "eval_every": quarter, "save_every": quarter}
  experiment = tiny.change(experiment, "train", steps=steps, **every)
  memory = {}

  def measured(self, step, split, values, write=loop.Log.write):
    write(self, step, split, values)
    if split == "train" and step in (quarter + 10, steps):
      memory[step] = measure()

  monkeypatch.setattr(loop.Log, "write", measured)
  try:
    loop.run(experiment, tmp_path)
  finally:
    tracemalloc.stop()
  assert memory[steps] - memory[quarter + 10] < bound


KILLS = int(os.environ.get("PRM_JAX_KILLS", "20"))


@pytest.mark.parametrize(
  ("kills", "steps"), [(1, 20), pytest.param(KILLS, 60, marks=pytest.mark.slow)]
)
def test_killed_runs_end_as_uninterrupted_ones(experiment, tmp_path, monkeypatch, kills, steps):
  """A run killed at random moments ends with the state and metrics of an uninterrupted one.

  Each kill comes while the run starts, after a random step, or inside a save.  Two of three are
  SIGKILL, the others SIGTERM, some of these twice.  Each start resumes from the newest finished
  checkpoint.

    PRM_JAX_KILLS=100 bash scripts/test.sh -m slow -k kills -s
  """
  # Only the slow campaign is optimised as for users.
  for name, value in ({"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if kills == 1 else OPTIMISED).items():
    monkeypatch.setenv(name, value)
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
  monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
  experiment = tiny.change(experiment, "train", steps=steps, eval_every=7, save_every=5)
  config = tmp_path / "config.py"
  config.write_text(f"from prm_jax.config import *\ndef config():\n  return {experiment!r}\n")
  fork = multiprocessing.get_context("forkserver")  # saves each start the seconds of importing
  fork.set_forkserver_preload(["prm_jax.training.loop"])

  def start(workdir):
    child = fork.Process(target=forked_train.run, args=(config, workdir, tmp_path / "log"))
    child.start()
    return child

  # The second run finds its programs compiled, like the killed runs, and takes as long to start.
  for name in ("compile", "whole") if kills > 1 else ("whole",):
    began, child = time.monotonic(), start(tmp_path / name)
    while child.is_alive() and not recorded(tmp_path / name):
      time.sleep(0.01)
    startup = time.monotonic() - began
    child.join(600)
    assert child.exitcode == 0, (tmp_path / "log").read_text()
  draw, sent = random.Random(2), collections.Counter()
  while sent.total() < kills:
    workdir = tmp_path / f"run_{sent.total()}"
    while (before := newest(workdir)) < steps:
      child = start(workdir)
      name = draw.choices(("SIGKILL", "SIGTERM", "SIGTERM twice"), (6, 2, 1))[0]
      kind = draw.choices(("start", "step", "save"), (15, 40, 45))[0]
      if sent.total() < kills and moment(kind, child, workdir, startup, draw):
        os.kill(child.pid, signal.SIGKILL if name == "SIGKILL" else signal.SIGTERM)
        if name == "SIGTERM twice":
          time.sleep(draw.uniform(0, 0.1))
          child.terminate()
        sent[f"{name}, {kind}"] += 1
      child.join(600)
      log, code = (tmp_path / "log").read_text(), child.exitcode
      # -SIGTERM: before the run handled the signal, or after its end
      assert code in (0, os.EX_TEMPFAIL, -signal.SIGKILL, -signal.SIGTERM), (code, log)
      assert code != 0 or before == 0 or f"resuming at step {before}\n" in log, log
      assert newest(workdir) >= before
    tiny.assert_same_run(tmp_path / "whole", workdir)
  print(f"{kills} kills: {dict(sent)}")


def recorded(workdir) -> int:
  """The last step in metrics.jsonl, whose last line may be half written; 0 without one."""
  path = workdir / "metrics.jsonl"
  return int(([0] + re.findall(r'"step": ?(\d+)', path.read_text() if path.exists() else ""))[-1])


def newest(workdir) -> int:
  """The step of the newest finished checkpoint; 0 without one."""
  names = [path.name for path in (workdir / "checkpoints").glob("*")]
  return max([int(name) for name in names if name.isdigit()], default=0)


def moment(kind, child, workdir, startup, draw) -> bool:
  """Waits for a random moment of this kind; False if the run ends first."""
  delay = draw.uniform(0, {"start": startup, "step": 0.02, "save": 0.3}[kind])
  unfinished = (workdir / "checkpoints").glob
  goal, left = recorded(workdir) + draw.randint(1, 10), {*unfinished("*orbax-checkpoint-tmp*")}
  while child.is_alive():
    now = {*unfinished("*orbax-checkpoint-tmp*")}
    reached = {"start": True, "step": recorded(workdir) >= goal, "save": bool(now - left)}
    if reached[kind]:
      break
    left &= now  # the run deletes the saves that the last kill left unfinished
    time.sleep(0.001)
  time.sleep(delay)
  return child.is_alive()
