"""Several hosts, as processes on the CPU: they compute the numbers of one, and none hangs."""

import math
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import jobs
import numpy as np
import pytest
import tiny
from conftest import ENVIRONMENT, ROOT, python, read_lines, run_script

from prm_jax import config as config_lib
from prm_jax.runtime import distributed, exits


@pytest.fixture(scope="module")
def config(arithmetic_data, tmp_path_factory):
  """A config file of twenty steps."""
  folder = tmp_path_factory.mktemp("config")
  return jobs.config_file(folder, arithmetic_data, steps=20, eval_every=10, save_every=10)


def train(config, workdir, *arguments, hosts: int = 1, devices: int = 8) -> pathlib.Path:
  """Runs train.py to its end; returns its work directory."""
  flags = (f"--config={config}", f"--workdir={workdir}", *arguments)
  jobs.finish(jobs.start("train.py", *flags, hosts=hosts, devices=devices))
  return workdir


def numbers(workdir, split: str = "train") -> np.ndarray:
  """The losses of every update, or the metrics of every evaluation."""
  lines = read_lines(workdir / "metrics.jsonl")
  names = ["loss", "language_model_loss", "gradient_norm"] if split == "train" else ["nll", "ece"]
  return np.array([[line[name] for name in names] for line in lines if line["split"] == split])


def assert_same_run(one, other):
  """Asserts equal losses and evaluations (to 1e-6), and equal last checkpoints."""
  assert len(numbers(one)) == 20 and len(numbers(one, "test")) == 2
  for split in ("train", "test"):
    np.testing.assert_allclose(numbers(one, split), numbers(other, split), rtol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    tiny.final_state(one).params,
    tiny.final_state(other).params,
  )


MESH = ("--config.mesh.fsdp=4", "--config.mesh.tensor=2")


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
  """A run on one host with eight devices."""
  return train(config, tmp_path_factory.mktemp("one"), *MESH)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 8, 1), (1, 4, 2), (2, 2, 2)])
def test_runs_are_equal_on_any_hosts_and_meshes(config, whole, tmp_path, hosts, mesh):
  """A run is the same on one, two and four hosts and on different meshes."""
  devices = math.prod(mesh)
  if devices < hosts:
    pytest.skip("a host without a device")
  sizes = [f"--config.mesh.{name}={n}" for name, n in zip(("data", "fsdp", "tensor"), mesh)]
  assert_same_run(whole, train(config, tmp_path, *sizes, hosts=hosts, devices=devices))


@pytest.mark.slow
def test_another_number_of_hosts_resumes_a_run(config, whole, tmp_path):
  """One host can finish a run that was killed on two hosts."""
  flags = (f"--config={config}", f"--workdir={tmp_path}", *MESH)
  pair = jobs.start("train.py", *flags, hosts=2, devices=8)
  jobs.wait_for((tmp_path / "checkpoints" / "10").exists, pair)
  jobs.kill(pair)
  train(config, tmp_path, devices=2)
  assert_same_run(whole, tmp_path)


def test_hosts_with_different_settings_are_refused(config, tmp_path):
  """If hosts' settings differ, every host ends with an error that names setting and values."""
  other = {1: ["--config.optim.learning_rate=0.5"]}
  flags = (f"--config={config}", f"--workdir={tmp_path}")
  for log in jobs.finish(jobs.start("train.py", *flags, hosts=2, devices=2, each=other), code=1):
    assert "optim.learning_rate: 0.003 on host 0, 0.5 on host 1" in log
  assert not (tmp_path / "metrics.jsonl").exists()


def test_scoring_hosts_with_different_inputs_are_refused(prm_run, arithmetic_data, tmp_path):
  """If scoring hosts' input or flags differ, every host names them and no file is written."""
  source, short = arithmetic_data / "candidates.jsonl", tmp_path / "short.jsonl"
  short.write_text(source.read_text().partition("\n")[0])
  flags = (f"--checkpoint={prm_run}", f"--output={tmp_path / 'out.jsonl'}", f"--input={source}")
  other = {1: [f"--input={short}", "--step=8"]}
  for log in jobs.finish(jobs.start("score.py", *flags, hosts=2, devices=2, each=other), code=1):
    assert "sha256 of what is read: " in log
    assert "--step: 'latest' on host 0, '8' on host 1" in log
  assert [path.name for path in tmp_path.iterdir()] == ["short.jsonl"]


IMPATIENT = """
import runpy, sys
from prm_jax.runtime import distributed
distributed.SILENCE = 12
sys.argv[0] = {script!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_dead_host_ends_the_job(config, tmp_path, victim):
  """If one host dies, the other ends with the reason and the exit code that asks for a restart.

  In the slow variant both are started again and resume from a checkpoint.
  """
  script = tmp_path / "train.py"
  script.write_text(IMPATIENT.format(script=str(ROOT / "scripts" / "train.py")))
  command = (script, f"--config={config}", f"--workdir={tmp_path / 'run'}")
  command += ("--config.train.steps=100000", "--config.train.save_every=2")
  processes = jobs.start(*command, hosts=2, devices=2)
  jobs.wait_for((tmp_path / "run" / "checkpoints" / "2").exists, processes)
  processes[victim].send_signal(signal.SIGKILL)
  survivor = processes[1 - victim]
  # prm_jax exits with AGAIN, unless JAX aborts first
  assert survivor.wait(timeout=90) in (exits.AGAIN, -signal.SIGABRT), jobs.said(survivor)
  log = jobs.said(survivor)
  assert "one of them ended before" in log or "another task died" in log
  if victim == 0:
    again = jobs.start(*command, hosts=2, devices=2)
    jobs.wait_for(lambda: "resuming at step" in jobs.said(again[0]), again)
    jobs.kill(again)


HOST = """
import sys, time
from prm_jax import config
from prm_jax.runtime import distributed
distributed.PATIENCE, distributed.CONNECT, distributed.SILENCE = 1, {connect}, 5
with distributed.job(config.Hosts({address!r}, 2, {index})):
  if {index} == 1:
    raise OSError("No space left on device")
  time.sleep(60)
"""


def host(index: int, address: str, connect: int = 60):
  """Starts one of two hosts, of which the second fails."""
  code = HOST.format(index=index, address=address, connect=connect)
  command = [sys.executable, "-c", code]
  return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("error", [KeyError("k"), ValueError("v")])
def test_a_bug_keeps_its_traceback_on_several_hosts(error, monkeypatch, capsys):
  """An error that is none of the input or the machine shows where it was raised."""
  monkeypatch.setattr(distributed, "_join", lambda hosts: None)
  monkeypatch.setattr(distributed, "_left_together", lambda: True)
  monkeypatch.setattr(distributed.jax, "process_count", lambda: 2)
  monkeypatch.setattr(os, "_exit", sys.exit)
  with pytest.raises(SystemExit), distributed.job(config_lib.Hosts()):
    raise error
  said = capsys.readouterr().err
  assert f"{type(error).__name__}: {error}" in said
  assert ("Traceback" in said) == isinstance(error, KeyError)


def test_a_hosts_own_error_asks_for_no_restart():
  """A host that fails by itself ends with exit code 1, which asks for no restart."""
  address = jobs.free_address()
  processes = [host(index, address) for index in range(2)]
  try:
    assert processes[1].wait(timeout=60) == 1
  finally:
    jobs.kill(processes)


STOPPED = """
from prm_jax.runtime import exits
exits.on_signals()
import pathlib, signal, time
from prm_jax import config
from prm_jax.runtime import distributed, storage
with distributed.job(config.Hosts({address!r}, 1, 0)), storage.written({path!r}) as file:
  signal.raise_signal(signal.SIGTERM)
  time.sleep(60)
"""


def test_sigterm_ends_a_job_that_saves_no_state(tmp_path):
  """SIGTERM ends a command of a job at once, though JAX would wait for a checkpoint."""
  code = STOPPED.format(address=jobs.free_address(), path=str(tmp_path / "out"))
  assert "stopped by SIGTERM" in python("-c", code, code=143).stderr
  assert not [*tmp_path.iterdir()]


def test_a_missing_host_is_named():
  """A host whose peers never start gives up with an error that says what to check."""
  alone = host(0, jobs.free_address(), connect=2)
  log = alone.communicate(timeout=120)[1]
  assert alone.returncode != 0 and "--worker=all" in log


def test_incomplete_settings_of_hosts_are_refused():
  """A single host needs no settings; incomplete settings of several hosts are errors."""
  distributed.check_same({"a": 1})
  assert distributed.is_first()
  with pytest.raises(ValueError, match=r"hosts\.process_id=2, hosts\.num_processes=2: expected"):
    config_lib.Hosts("h:1", 2, 2)
  with pytest.raises(ValueError, match="expected HOST:PORT"):
    config_lib.Hosts(num_processes=2)


@pytest.mark.parametrize(
  ("script", "given"),
  [
    ("score.py", "--input={}/candidates.jsonl"),
    pytest.param("evaluate.py", "--data_dir={}", marks=pytest.mark.slow),
  ],
)
def test_two_hosts_score_as_one(prm_run, arithmetic_data, tmp_path, script, given):
  """Two hosts write the scores, or metrics, of one host to a single file."""
  results = []
  for count in (1, 2):
    out = tmp_path / f"{count}.json"
    flags = (f"--checkpoint={prm_run}", given.format(arithmetic_data), f"--output={out}")
    if count == 1:
      run_script(script, *flags)
    else:
      jobs.finish(jobs.start(script, *flags, hosts=count, devices=4))
    metrics = r'"(prm_score|nll|accuracy|auroc|ece|count)": ([-+.e0-9]+)'
    names, values = zip(*re.findall(metrics, out.read_text()))
    results.append((names, [*map(float, values)]))
  assert results[0][0] == results[1][0]
  np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-5)
  kept = [path.name for path in tmp_path.iterdir() if path.suffix != ".png"]  # evaluate.py draws
  assert sorted(kept) == ["1.json", "2.json"]
