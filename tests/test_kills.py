"""Runs that are stopped, killed or started twice lose nothing, and say what is wrong."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny
from conftest import ROOT, run_script

from prm_jax import config as config_lib
from prm_jax.datasets import prm800k
from prm_jax.runtime import preemption, workdir_lock
from prm_jax.training import checkpoint, loop
from prm_jax.training import step as step_lib


@pytest.fixture
def experiment(arithmetic_data, one_device):
  """A run on one device, with a line for every step."""
  experiment = tiny.experiment(arithmetic_data, config_lib.Loss())
  return tiny.change(experiment, "train", log_every=1)


def test_sigterm_saves_and_loses_nothing(experiment, tmp_path, monkeypatch):
  """The step under way is finished and saved, though SIGTERM comes twice; resuming goes on there.

  The evaluation that was due at that step is made up for, and stands in the log once.
  """
  loop.run(experiment, tmp_path / "whole")

  def told(self, step, split, values, write=loop.Log.write):
    write(self, step, split, values)
    if step == 2:  # written while step 3 is under way
      os.kill(os.getpid(), signal.SIGTERM)
      os.kill(os.getpid(), signal.SIGTERM)

  c = tiny.change(experiment, "train", eval_every=3)
  c = tiny.change(c, "train", save_every=8)
  loop.run(c, tmp_path / "every_three")
  with monkeypatch.context() as patch, pytest.raises(preemption.Preempted, match="step 3 is saved"):
    patch.setattr(loop.Log, "write", told)
    loop.run(c, tmp_path / "stopped")
  assert checkpoint.latest(tmp_path / "stopped")[0] == 3
  assert [(r["step"], r["split"]) for r in tiny.records(tmp_path / "stopped")][-1] == (3, "train")
  loop.run(c, tmp_path / "stopped")
  final = [tiny.final_state(tmp_path / name) for name in ("whole", "stopped")]
  jax.tree.map(np.testing.assert_array_equal, *final)
  assert tiny.records(tmp_path / "stopped") == tiny.records(tmp_path / "every_three")
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_before_the_first_step_ends_at_once():
  """There is nothing to save while data or a checkpoint are read; the exit code asks for a restart.

  No exception is raised, which a reader of checkpoints could take for damage.
  """
  code = (
    "import os, signal\nfrom prm_jax.runtime import preemption\npreemption.exit_on_sigterm()\n"
    "try:\n  os.kill(os.getpid(), signal.SIGTERM)\nfinally:\n  print('not reached')"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, text=True)
  assert (done.returncode, done.stdout) == (preemption.EXIT_CODE, "")
  assert "before the first step" in done.stderr


def test_one_run_at_a_time(tmp_path):
  """A second run in a work directory is refused, and told who is there; SIGKILL frees it."""
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


def test_a_directory_that_cannot_be_written(tmp_path):
  """It is named before anything is read or trained.  (/proc refuses even root.)"""
  with (
    pytest.raises(OSError, match="--workdir=/proc/run cannot be written"),
    workdir_lock.WorkdirLock(pathlib.Path("/proc/run")),
  ):
    pass


@pytest.mark.parametrize("damage", ["changed", "truncated", "missing"])
def test_a_damaged_shard_is_named(arithmetic_data, tmp_path, damage):
  """Reading prepared data that were damaged since ends with the file and what to do."""
  shutil.copytree(arithmetic_data, tmp_path / "data")
  (shard,) = (tmp_path / "data").rglob("*train.array_record*")
  data = bytearray(shard.read_bytes())
  data[len(data) // 2] ^= 1
  if damage == "missing":
    shard.unlink()
  else:
    shard.write_bytes(data if damage == "changed" else data[: len(data) // 2])
  with pytest.raises(ValueError, match=rf"{shard.name}: row 0 .* write the dataset again"):
    list(prm800k.read_rows(tmp_path / "data", "train"))


@pytest.mark.parametrize("steps", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_and_nothing_is_compiled_again(
  experiment, tmp_path, monkeypatch, steps
):
  """Over so many steps with evaluations and checkpoints, from the first quarter on.

  16 MB are for the allocator: 1,500 batches of this run, or their metrics as arrays, are more.
  """
  quarter = steps // 4
  experiment = tiny.change(
    experiment, "train", steps=steps, log_every=10, eval_every=quarter, save_every=quarter
  )
  memory, programs, real_jit = {}, [], jax.jit

  def jit(fun, **kwargs):
    jitted = real_jit(fun, **kwargs)
    if getattr(fun, "func", None) in (step_lib.train_step, step_lib.read_log_probs):
      programs.append(jitted)
    return jitted

  def measured(self, step, split, values, write=loop.Log.write):
    write(self, step, split, values)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    memory[step] = pages * os.sysconf("SC_PAGE_SIZE")

  monkeypatch.setattr(jax, "jit", jit)
  monkeypatch.setattr(loop.Log, "write", measured)
  loop.run(experiment, tmp_path)
  assert memory[steps] - memory[quarter + 10] < 16e6
  assert [program._cache_size() for program in programs] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [5, 100])
def test_a_killed_run_ends_as_one_left_alone(tmp_path, kills):
  """SIGKILL and SIGTERM at random moments, also inside saves: the same bits, every step once."""
  output = tmp_path / "kills.json"
  arguments = (f"--directory={tmp_path / 'runs'}", f"--kills={kills}", f"--output={output}")
  done = run_script("kill_campaign.py", *arguments)
  assert done.returncode == 0, done.stderr
  assert json.loads(output.read_text())["kills"] == kills
