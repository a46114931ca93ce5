"""Several hosts, as processes on the CPU: the same numbers as one, and no host is left waiting."""

import dataclasses
import json
import math
import os
import pathlib
import signal
import subprocess
import sys

import jax
import jobs
import numpy as np
import pytest
import tiny
from conftest import ROOT

from prm_jax import config as config_lib
from prm_jax.runtime import distributed
from prm_jax.training import loop

CONFIG = """
import dataclasses, pathlib, sys
sys.path.insert(0, {tests!r})
import tiny
from prm_jax import config as config_lib

def config():
  c = tiny.experiment(pathlib.Path({data!r}), config_lib.Loss(language_model_weight=1.0))
  train = dataclasses.replace(c.train, steps=20, log_every=1, eval_every=10, save_every=10)
  return dataclasses.replace(c, train=train)
"""


@pytest.fixture(scope="module")
def config(arithmetic_data, tmp_path_factory):
  """A config file of twenty steps."""
  path = tmp_path_factory.mktemp("config") / "config.py"
  path.write_text(CONFIG.format(tests=str(ROOT / "tests"), data=str(arithmetic_data)))
  return path


def train(config, workdir, *arguments, hosts: int = 1, devices: int = 8) -> pathlib.Path:
  flags = (f"--config={config}", f"--workdir={workdir}", *arguments)
  jobs.finish(jobs.start("train.py", *flags, hosts=hosts, devices=devices))
  return workdir


def numbers(workdir, split: str = "train") -> np.ndarray:
  """Losses of every update, or metrics of every evaluation."""
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
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


def test_two_hosts_are_one(config, whole, tmp_path):
  """A run on two hosts has the losses, evaluations and checkpoint of a run on one."""
  assert_same_run(whole, train(config, tmp_path, *MESH, hosts=2))


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 8, 1), (1, 4, 2), (2, 2, 2)])
def test_hosts_and_meshes_are_one(config, whole, tmp_path, hosts, mesh):
  """One, two and four hosts with different meshes make the same run."""
  devices = math.prod(mesh)
  if devices < hosts:
    pytest.skip("a host without a device")
  sizes = [f"--config.mesh.{name}={n}" for name, n in zip(("data", "fsdp", "tensor"), mesh)]
  assert_same_run(whole, train(config, tmp_path, *sizes, hosts=hosts, devices=devices))


def test_another_number_of_hosts_goes_on(config, whole, tmp_path):
  """A run of two hosts that was killed half way is finished by one host with two devices."""
  flags = (f"--config={config}", f"--workdir={tmp_path}", *MESH)
  pair = jobs.start("train.py", *flags, hosts=2, devices=8)
  jobs.wait_for((tmp_path / "checkpoints" / "10").exists, pair)
  jobs.kill(pair)
  for process in pair:
    process.communicate()
  train(config, tmp_path, devices=2)
  assert_same_run(whole, tmp_path)


def test_hosts_with_other_settings_are_told(config, tmp_path):
  """Every host ends with an error that names the setting, both values and the hosts."""
  other = {1: ["--config.optim.learning_rate=0.5"]}
  flags = (f"--config={config}", f"--workdir={tmp_path}")
  for process in jobs.start("train.py", *flags, hosts=2, devices=8, each=other):
    said = process.communicate(timeout=240)[1]
    assert process.returncode == 1
    assert "optim.learning_rate: 0.003 on host 0, 0.5 on host 1" in said
  assert not (tmp_path / "metrics.jsonl").exists()


def test_evaluation_rows_are_compared(arithmetic_data, tmp_path):
  """Hosts with different evaluation rows would wait for each other: they differ in one fact."""
  rows = loop.read_rows(tiny.experiment(arithmetic_data, config_lib.Loss()))
  other = dataclasses.replace(rows, evaluation=rows.train)
  facts, others = rows.facts(tmp_path), other.facts(tmp_path)
  assert {name for name in facts if facts[name] != others[name]} == {"hash of the evaluation rows"}


def test_scoring_hosts_with_other_input_or_flags_are_told(whole, arithmetic_data, tmp_path):
  """Every host ends before it scores and names the differences; nothing is written."""
  source, short = arithmetic_data / "candidates.jsonl", tmp_path / "short.jsonl"
  short.write_text(source.read_text().partition("\n")[0])
  flags = (f"--checkpoint={whole}", f"--output={tmp_path / 'out.jsonl'}", f"--input={source}")
  other = {1: [f"--input={short}", "--step=20"]}
  for said in jobs.finish(jobs.start("score.py", *flags, hosts=2, devices=2, each=other), code=1):
    assert "sha256 of what is read: " in said
    assert "--step: 'latest' on host 0, '20' on host 1" in said
  assert [path.name for path in tmp_path.iterdir()] == ["short.jsonl"]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_dead_host_ends_the_job(config, tmp_path, victim):
  """The other one ends within a minute and a half, says why, and asks to be started again.

  Started again, both go on from a checkpoint.
  """
  command = ("train.py", f"--config={config}", f"--workdir={tmp_path}")
  command += ("--config.train.steps=100000",)
  processes = jobs.start(*command, hosts=2, devices=2)
  jobs.wait_for((tmp_path / "checkpoints" / "10").exists, processes)
  processes[victim].send_signal(signal.SIGKILL)
  survivor = processes[1 - victim]
  said = survivor.communicate(timeout=90)[1]
  # by its own exit code, or by JAX, which aborts
  assert survivor.returncode in (distributed.LOST, -signal.SIGABRT), said
  assert "one of them ended before" in said or "another task died" in said
  again = jobs.start(*command, hosts=2, devices=2)
  jobs.wait_for_line("resuming at step", again)
  jobs.kill(again)


OWN_ERROR = """
import sys, time
from prm_jax import config
from prm_jax.runtime import distributed
distributed.SILENCE = 8
with distributed.job(config.Hosts({address!r}, 2, {index})):
  if {index} == 1:
    raise OSError("No space left on device")
  time.sleep(60)
"""


def test_a_hosts_own_error_asks_for_no_restart():
  """A host that fails while the others are alive ends with exit code 1, after waiting for them."""
  address, processes = jobs.free_address(), []
  for index in range(2):
    code = OWN_ERROR.format(address=address, index=index)
    processes.append(subprocess.Popen([sys.executable, "-c", code], cwd=ROOT))
  try:
    assert processes[1].wait(timeout=60) == 1
  finally:
    jobs.kill(processes)


def test_a_missing_host_is_named(tmp_path):
  """A host that waits for others says what to check, and gives up in the end."""
  code = """
from prm_jax import config
from prm_jax.runtime import distributed
distributed.PATIENCE, distributed.CONNECT = 1, 4
with distributed.job(config.Hosts("{address}", 2, 0)):
  pass
"""
  address = jobs.free_address()
  done = subprocess.run(
    [sys.executable, "-c", code.format(address=address)],
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode != 0
  assert "--worker=all" in done.stderr


def test_a_host_alone_joins_nobody():
  """A single host compares nothing; incomplete settings of several hosts are errors."""
  distributed.check_same({"a": 1})
  assert distributed.is_first()
  with pytest.raises(ValueError, match=r"hosts\.process_id=2: expected below"):
    config_lib.Hosts("h:1", 2, 2)
  with pytest.raises(ValueError, match="expected HOST:PORT"):
    dataclasses.replace(config_lib.Hosts(), num_processes=2)


def test_scores_of_two_hosts_are_those_of_one(whole, arithmetic_data, tmp_path):
  """Each host scores a part of the rows; the first writes all scores to one file."""
  source = arithmetic_data / "candidates.jsonl"
  found = []
  for count in (1, 2):
    out = tmp_path / f"{count}.jsonl"
    flags = (f"--checkpoint={whole}", f"--input={source}", f"--output={out}")
    jobs.finish(jobs.start("score.py", *flags, hosts=count, devices=4))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found.append([line["prm_score"] for line in lines])
  np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["1.jsonl", "2.jsonl"]


@pytest.mark.slow
def test_the_evaluation_of_two_hosts_is_that_of_one(whole, arithmetic_data, tmp_path):
  """Evaluation on two hosts gives the metrics of one host."""
  found = []
  for count in (1, 2):
    out = tmp_path / f"{count}.json"
    flags = (f"--checkpoint={whole}", f"--data_dir={arithmetic_data}", f"--output={out}")
    jobs.finish(jobs.start("evaluate.py", *flags, hosts=count, devices=4))
    found.append(json.loads(out.read_text()))
  assert found[0].keys() == found[1].keys()
  for name in ("nll", "accuracy", "auroc", "ece", "count"):
    assert found[0][name] == pytest.approx(found[1][name], rel=1e-6)
