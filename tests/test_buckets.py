"""Work directories in a bucket of Cloud Storage, imitated by a local server."""

import functools
import importlib.util
import os
import signal
import time

import fake_bucket
import fake_server
import jax
import jobs
import numpy as np
import pytest
import tiny
from etils import epath

from prm_jax.runtime import exits, storage
from prm_jax.scoring import scorer
from prm_jax.training import checkpoint, loop

pytestmark = [
  pytest.mark.skipif(not importlib.util.find_spec("gcsfs"), reason="gcsfs is missing"),
  # orbax leaves reads of a damaged checkpoint unfinished
  pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def bucket():
  """An empty bucket, `gs://bucket`, for this process."""
  server = fake_bucket.Server()
  with fake_server.running(server), pytest.MonkeyPatch.context() as patch:
    for name, value in server.environment.items():
      patch.setenv(name, value)
    yield server


@pytest.fixture
def experiment(arithmetic_data, one_device):
  """Eight steps on one device."""
  experiment = tiny.experiment(arithmetic_data)
  return tiny.change(experiment, "train", log_every=1, save_every=2, profile_at=2)


def assert_identical(*trees):
  jax.tree.map(np.testing.assert_array_equal, *trees)


@pytest.mark.slow
def test_a_run_in_a_bucket_equals_one_on_a_disk(bucket, experiment, tmp_path, capfd):
  """A run stopped and resumed in a bucket has the parameters, records and files of one on a disk.

  Its checkpoint scores solutions, and another run can start from it.
  """
  workdir, folder = "gs://bucket/runs/prm", storage.path("gs://bucket/runs/prm")
  loop.run(experiment, tmp_path / "run")

  with tiny.after_record(4, tiny.terminate), pytest.raises(exits.Preempted, match="is saved"):
    loop.run(experiment, workdir)
  stopped = checkpoint.latest(workdir)[0]
  assert 4 <= stopped < experiment.train.steps
  assert tiny.records(folder)[-1]["step"] == stopped
  loop.run(experiment, workdir)
  assert f"resuming at step {stopped}" in capfd.readouterr().err

  tiny.assert_same_run(folder, tmp_path / "run")
  for name in ("manifest.json", "tokenizer.model"):
    assert (folder / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
  names = [name.removeprefix("runs/prm/") for name in bucket.objects]
  assert {name.split("/")[0] for name in names} == {p.name for p in (tmp_path / "run").iterdir()}
  assert any(name.startswith("profile/") and name.endswith(".pb") for name in names)
  runs = (folder, tmp_path / "run")
  kept = [sorted(path.name for path in (run / "checkpoints").iterdir()) for run in runs]
  assert kept[0] == kept[1]

  scorers = [scorer.Scorer.load(where) for where in (workdir, tmp_path / "run")]
  assert_identical(*(each.probabilities([("1 + 2", ["3", "so 3"])]) for each in scorers))
  assert scorers[0].contract == scorers[1].contract

  again = tiny.change(experiment, "train", steps=1, profile_at=0)
  loop.run(tiny.change(again, "init", checkpoint=workdir), "gs://bucket/runs/second")
  assert checkpoint.latest("gs://bucket/runs/second")[0] == 1


@pytest.fixture(scope="module")
def config(arithmetic_data, tmp_path_factory):
  """A config file of sixty steps."""
  folder = tmp_path_factory.mktemp("config")
  return jobs.config_file(folder, arithmetic_data, steps=60, eval_every=20, save_every=2)


def saved(bucket, workdir, step):
  """A function that returns whether the step's checkpoint is complete."""
  return lambda: f"{workdir}/checkpoints/{step}/commit_success.txt" in bucket.objects


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "stop"), [(1, signal.SIGKILL), (2, signal.SIGTERM)])
def test_runs_in_a_bucket_resume(bucket, config, tmp_path, hosts, stop):
  """A killed or stopped run in a bucket resumes to the records and parameters of one on a disk."""
  flags, name = ("train.py", f"--config={config}"), f"run_of_{hosts}"
  jobs.finish(jobs.start(*flags, f"--workdir={tmp_path / 'run'}", devices=2))
  flags += (f"--workdir=gs://bucket/{name}",)
  start = functools.partial(jobs.start, hosts=hosts, devices=2, environment=bucket.environment)
  processes = start(*flags)
  jobs.wait_for(saved(bucket, name, 6), processes)
  processes[-1].send_signal(stop)
  jobs.finish(processes, code=75 if stop == signal.SIGTERM else -stop)
  logs = jobs.finish(start(*flags))
  assert "resuming at step" in logs[0] and "rror" not in "".join(logs)
  runs = (storage.path(f"gs://bucket/{name}"), tmp_path / "run")
  steps = [[(r["step"], r["split"]) for r in tiny.records(where)] for where in runs]
  assert steps[0] == steps[1]
  final = [tiny.final_state(where).params for where in runs]
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *final)


def test_a_second_run_in_a_bucket_takes_over(bucket, experiment, tmp_path, monkeypatch):
  """A second run in the same bucket ends the first, which overwrites none of its files.

  The first ends before its next save with an error that names the second.
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
  tiny.assert_same_run(storage.path("gs://bucket/contested"), tmp_path / "run")


@pytest.mark.slow
def test_all_hosts_end_when_another_run_takes_over(bucket, config):
  """If another run takes over, every host ends with exit code 1, so that none is restarted."""
  flags = (f"--config={config}", "--workdir=gs://bucket/taken", "--config.train.steps=100000")
  processes = jobs.start("train.py", *flags, hosts=2, devices=2, environment=bucket.environment)
  jobs.wait_for(saved(bucket, "taken", 2), processes)
  with bucket.lock:
    bucket.objects["taken/train.lock"] = b"process 1 elsewhere"
  logs = jobs.finish(processes, code=1)
  assert "has taken over this work directory (process 1 elsewhere)" in logs[0]
  assert "has taken over this work directory" in logs[1]


@pytest.mark.parametrize(
  "damage", ["a changed bit", pytest.param("unfinished", marks=pytest.mark.slow)]
)
def test_a_damaged_checkpoint_in_a_bucket_is_not_used(bucket, experiment, capfd, damage):
  """In a bucket a run renames a damaged checkpoint, deletes an unfinished one and ends the same."""
  workdir = f"gs://bucket/{damage}"
  loop.run(experiment, workdir)
  expected = tiny.final_state(workdir)
  folder = f"{damage}/checkpoints/8"
  if damage == "unfinished":
    del bucket.objects[f"{folder}/commit_success.txt"]
  else:
    arrays = [name for name in bucket.objects if name.startswith(f"{folder}/params/d/")]
    largest = max(arrays, key=lambda name: len(bucket.objects[name]))
    data = bytearray(bucket.objects[largest])
    data[len(data) // 2] ^= 1
    bucket.objects[largest] = bytes(data)
  # gcsfs caches listings; another process would list anew
  epath.backend.fsspec_backend.fs(workdir).invalidate_cache()
  before = dict(bucket.objects)
  capfd.readouterr()
  assert scorer.Scorer.load(workdir).step == 6
  assert bucket.objects == before  # a reader changes nothing
  loop.run(experiment, workdir)
  log = capfd.readouterr().err
  assert "resuming at step 6" in log
  assert_identical(expected, tiny.final_state(workdir))
  names = (name for name in bucket.objects if name.startswith(f"{folder}."))
  aside = {name.split("/")[2] for name in names}
  assert aside == (set() if damage == "unfinished" else {"8.unreadable"})
  assert ("checkpoints/8 does not read back: " in log) == (damage != "unfinished")


@pytest.mark.parametrize(
  ("workdir", "checkpoint", "error", "message"),
  [
    ("s3://bucket/run", "", ValueError, "s3://bucket/run: expected a folder, or gs://BUCKET"),
    ("gs:///run", "", ValueError, "gs:///run: expected a folder, or gs://BUCKET"),
    ("gs://missing/run", "", OSError, r"gs://missing/run/train\.lock: cannot be written: "),
    ("gs://bucket/a", "gs://bucket/b", FileNotFoundError, "gs://bucket/b: no run .* copy it first"),
  ],
)
def test_wrong_urls_of_buckets_are_refused(bucket, experiment, workdir, checkpoint, error, message):
  """A wrong URL, a missing bucket and a public model in a bucket are errors before training."""
  with pytest.raises(error, match=message):
    loop.run(tiny.change(experiment, "init", checkpoint=checkpoint), workdir)


def test_a_bucket_never_has_half_an_object(bucket):
  """A file appears in a bucket only when its block ends without an exception."""
  path = storage.path("gs://bucket/lines.jsonl")
  with pytest.raises(RuntimeError), storage.written(path) as file:
    file.write("half")
    raise RuntimeError
  assert "lines.jsonl" not in bucket.objects
  with storage.written(path) as file:
    file.write("whole")
  assert bucket.objects["lines.jsonl"] == b"whole"
