"""Work directories in a bucket of Cloud Storage, which a local server imitates."""

import dataclasses
import functools
import importlib.util
import os
import signal
import time

import fake_bucket
import jax
import jobs
import numpy as np
import pytest
import tiny
from conftest import ROOT
from etils import epath

from prm_jax import config as config_lib
from prm_jax.runtime import json_lines, preemption, storage
from prm_jax.scoring import scorer
from prm_jax.training import checkpoint, loop

pytestmark = [
  pytest.mark.skipif(not importlib.util.find_spec("gcsfs"), reason="it reads buckets"),
  # orbax leaves behind what it had begun to read of a damaged checkpoint
  pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def bucket():
  """An empty bucket, `gs://bucket`, for this process."""
  with fake_bucket.serving() as server, pytest.MonkeyPatch.context() as patch:
    for name, value in server.environment().items():
      patch.setenv(name, value)
    yield server


@pytest.fixture
def experiment(arithmetic_data, one_device):
  """Eight steps on one device."""
  experiment = tiny.experiment(arithmetic_data, config_lib.Loss())
  return tiny.change(experiment, "train", log_every=1, save_every=2, profile_at=2)


def assert_identical(*trees):
  jax.tree.map(np.testing.assert_array_equal, *trees)


def test_a_run_in_a_bucket_is_one_on_a_disk(bucket, experiment, tmp_path, monkeypatch, capfd):
  """Stopped and resumed in a bucket, a run has the parameters (bit for bit), records and files of
  a run on a disk.  It can be scored with, and another run can start from it.
  """
  loop.run(experiment, tmp_path / "run")

  def told(self, step, split, values, write=loop.Log.write):
    write(self, step, split, values)
    if step == 4:
      os.kill(os.getpid(), signal.SIGTERM)

  with monkeypatch.context() as patch, pytest.raises(preemption.Preempted, match="is saved"):
    patch.setattr(loop.Log, "write", told)
    loop.run(experiment, "gs://bucket/runs/prm")
  stopped = checkpoint.latest("gs://bucket/runs/prm")[0]
  assert 4 <= stopped < experiment.train.steps
  assert tiny.records(storage.path("gs://bucket/runs/prm"))[-1]["step"] == stopped
  capfd.readouterr()
  loop.run(experiment, "gs://bucket/runs/prm")
  assert f"resuming at step {stopped}" in capfd.readouterr().err

  assert_identical(tiny.final_state("gs://bucket/runs/prm"), tiny.final_state(tmp_path / "run"))
  there = storage.path("gs://bucket/runs/prm")
  assert tiny.records(there) == tiny.records(tmp_path / "run")
  for name in ("manifest.json", "tokenizer.model"):
    assert (there / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
  names = [name.removeprefix("runs/prm/") for name in bucket.objects]
  assert {name.split("/")[0] for name in names} == {p.name for p in (tmp_path / "run").iterdir()}
  assert any(name.startswith("profile/") and name.endswith(".pb") for name in names)
  kept = lambda path: sorted(p.name for p in (path / "checkpoints").iterdir())
  assert kept(there) == kept(tmp_path / "run")

  scorers = [scorer.Scorer.load(where) for where in ("gs://bucket/runs/prm", tmp_path / "run")]
  solutions = [("1 + 2", ["3", "so 3"])]
  assert_identical(*(scorer.probabilities(solutions) for scorer in scorers))
  assert scorers[0].contract == scorers[1].contract

  start = config_lib.Init(checkpoint="gs://bucket/runs/prm", head="zeros")
  again = tiny.change(experiment, "train", steps=1, profile_at=0)
  again = dataclasses.replace(again, init=start)
  loop.run(again, "gs://bucket/runs/second")
  assert checkpoint.latest("gs://bucket/runs/second")[0] == 1


CONFIG = """
import dataclasses, pathlib, sys
sys.path.insert(0, {tests!r})
import tiny
from prm_jax import config as config_lib

def config():
  c = tiny.experiment(pathlib.Path({data!r}), config_lib.Loss())
  return tiny.change(c, "train", steps=60, log_every=1, eval_every=20, save_every=2)
"""


@pytest.fixture(scope="module")
def config(arithmetic_data, tmp_path_factory):
  """A config file of sixty steps."""
  path = tmp_path_factory.mktemp("config") / "config.py"
  path.write_text(CONFIG.format(tests=str(ROOT / "tests"), data=str(arithmetic_data)))
  return path


def saved(bucket, workdir, step):
  """A function that says whether the step's checkpoint is complete."""
  return lambda: f"{workdir}/checkpoints/{step}/commit_success.txt" in bucket.objects


@pytest.mark.slow
def test_a_killed_run_in_a_bucket_goes_on(bucket, config):
  """After SIGKILL the same command resumes, and records each step once."""
  arguments = ("train.py", f"--config={config}", "--workdir=gs://bucket/killed")
  processes = jobs.start(*arguments, environment=bucket.environment())
  jobs.wait_for(saved(bucket, "killed", 6), processes)
  jobs.kill(processes)
  processes[0].communicate()
  said = jobs.finish(jobs.start(*arguments, environment=bucket.environment()))[0]
  assert "resuming at step" in said
  steps = [r["step"] for r in tiny.records(storage.path("gs://bucket/killed"))]
  assert [step for step in steps if step % 20] == [step for step in range(1, 60) if step % 20]
  assert checkpoint.latest("gs://bucket/killed")[0] == 60


@pytest.mark.slow
def test_two_hosts_in_a_bucket(bucket, config, tmp_path):
  """Two hosts, stopped and resumed, have the records and parameters of one host on a disk."""
  flags = ("train.py", f"--config={config}")
  jobs.finish(jobs.start(*flags, f"--workdir={tmp_path / 'run'}", devices=2))
  flags += ("--workdir=gs://bucket/two",)
  start = functools.partial(jobs.start, hosts=2, devices=2, environment=bucket.environment())
  processes = start(*flags)
  jobs.wait_for(saved(bucket, "two", 6), processes)
  processes[1].send_signal(signal.SIGTERM)
  jobs.finish(processes, code=75)
  said = jobs.finish(start(*flags))
  assert "resuming at step" in said[0] and "rror" not in "".join(said)
  steps = [
    [(r["step"], r["split"]) for r in tiny.records(where)]
    for where in (storage.path("gs://bucket/two"), tmp_path / "run")
  ]
  assert steps[0] == steps[1]
  final = [tiny.final_state(where).params for where in ("gs://bucket/two", tmp_path / "run")]
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *final)


def test_a_second_run_takes_over(bucket, experiment, tmp_path, monkeypatch):
  """A second run in a bucket completes.  The first ends before its next save, names the second,
  and overwrites neither checkpoints nor records.
  """
  experiment = tiny.change(experiment, "train", profile_at=0)  # one profiler in a process
  loop.run(experiment, tmp_path / "run")
  after = {}

  def meanwhile(self, step, split, values, write=loop.Log.write):
    write(self, step, split, values)
    if step == 3 and not after:
      while not saved(bucket, "contested", 2)():
        time.sleep(0.01)
      with monkeypatch.context() as patch:
        patch.setattr(loop.Log, "write", write)
        loop.run(experiment, "gs://bucket/contested")
      after.update(bucket.objects)

  monkeypatch.setattr(loop.Log, "write", meanwhile)
  who = rf"process {os.getpid()} on "
  with pytest.raises(ValueError, match=rf"contested: another run has taken over .*\({who}"):
    loop.run(experiment, "gs://bucket/contested")
  assert bucket.objects == after
  there = storage.path("gs://bucket/contested")
  assert tiny.records(there) == tiny.records(tmp_path / "run")
  assert_identical(tiny.final_state(there), tiny.final_state(tmp_path / "run"))


@pytest.mark.slow
def test_all_hosts_end_when_another_run_takes_over(bucket, config):
  """Exit code 1 asks for no restart, which would take over in its turn."""
  flags = (f"--config={config}", "--workdir=gs://bucket/taken", "--config.train.steps=100000")
  processes = jobs.start("train.py", *flags, hosts=2, devices=2, environment=bucket.environment())
  jobs.wait_for(saved(bucket, "taken", 2), processes)
  with bucket.lock:
    bucket.objects["taken/train.lock"] = b"process 1 elsewhere", bucket.generation + 1
  said = jobs.finish(processes, code=1)
  assert "has taken over this work directory (process 1 elsewhere)" in said[0]
  assert "has taken over this work directory" in said[1]


@pytest.mark.parametrize("damage", ["a changed bit", "unfinished"])
def test_a_damaged_checkpoint_in_a_bucket(bucket, experiment, capfd, damage):
  """A damaged checkpoint is renamed and an unfinished one deleted; the run ends as without them."""
  workdir = f"gs://bucket/{damage}"
  loop.run(experiment, workdir)
  expected = tiny.final_state(workdir)
  folder = f"{damage}/checkpoints/8"
  if damage == "unfinished":
    del bucket.objects[f"{folder}/commit_success.txt"]
  else:
    arrays = [name for name in bucket.objects if name.startswith(f"{folder}/params/d/")]
    largest = max(arrays, key=lambda name: len(bucket.objects[name][0]))
    data, generation = bucket.objects[largest]
    middle = len(data) // 2
    data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    bucket.objects[largest] = data, generation
  # gcsfs remembers what it has listed; another process would look
  epath.backend.fsspec_backend.fs(workdir).invalidate_cache()
  before = dict(bucket.objects)
  capfd.readouterr()
  assert scorer.Scorer.load(workdir).step == 6
  assert bucket.objects == before  # a reader changes nothing
  loop.run(experiment, workdir)
  said = capfd.readouterr().err
  assert "resuming at step 6" in said
  assert_identical(expected, tiny.final_state(workdir))
  names = (name for name in bucket.objects if name.startswith(f"{folder}."))
  aside = {name.split("/")[2] for name in names}
  assert aside == (set() if damage == "unfinished" else {"8.unreadable"})
  assert ("checkpoints/8 does not read back: " in said) == (damage != "unfinished")


def test_a_bucket_that_cannot_be_written(bucket, experiment):
  """It is an error before anything is read or trained."""
  with pytest.raises(OSError, match=r"gs://missing/run/train\.lock: cannot be written: "):
    loop.run(experiment, "gs://missing/run")


def test_other_urls_are_refused(experiment, monkeypatch):
  """Other URLs are not taken for local folders, and a missing package is named."""
  for url in ("s3://bucket/run", "gs:///run"):
    with pytest.raises(ValueError, match=f"{url}: expected a path of a file system, or gs://BUCK"):
      loop.run(experiment, url)
  monkeypatch.setattr(storage.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match=r"gs://bucket/run: buckets need .* pip install gcsfs"):
    loop.run(experiment, "gs://bucket/run")


def test_half_an_object_is_never_there(bucket):
  """A file takes its name in a bucket only when its block ends well."""
  path = storage.path("gs://bucket/lines.jsonl")
  with pytest.raises(RuntimeError), json_lines.written(path) as file:
    file.write("half")
    raise RuntimeError
  assert "lines.jsonl" not in bucket.objects
  with json_lines.written(path) as file:
    file.write("whole")
  assert bucket.objects["lines.jsonl"][0] == b"whole"


def test_a_public_model_is_not_read_from_a_bucket(bucket, experiment):
  """The error says to copy public models to a disk first."""
  c = dataclasses.replace(experiment, init=config_lib.Init(checkpoint="gs://bucket/llama"))
  with pytest.raises(FileNotFoundError, match=r"gs://bucket/llama: no run .* copy it first"):
    loop.run(c, "gs://bucket/from_public")
