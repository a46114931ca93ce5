"""Work directories in a bucket of Cloud Storage, of which a local server is the stand-in."""

import dataclasses
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import fake_bucket
import jax
import numpy as np
import pytest
import tiny
from conftest import CACHE, ROOT
from etils import epath

from prm_jax import config as config_lib
from prm_jax import json_lines, storage
from prm_jax.scoring import score
from prm_jax.training import checkpoint, loop, mesh, preemption

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
def experiment(arithmetic_data, monkeypatch):
  """Eight steps on one device."""
  alone = functools.partial(mesh.make_mesh, devices=jax.devices()[:1])
  monkeypatch.setattr(mesh, "make_mesh", alone)
  experiment = tiny.experiment(arithmetic_data, config_lib.Loss())
  return tiny.change(experiment, "train", log_every=1, save_every=2, profile_at=2)


def records(path):
  """Lines of metrics.jsonl, but for what depends on the clock."""
  times = {"tokens_per_second", "step_seconds", "data_wait_seconds"}
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  kept = [line for line in lines if line["split"] != "goodput"]
  return [{k: v for k, v in line.items() if k not in times} for line in kept]


def assert_identical(*trees):
  jax.tree.map(np.testing.assert_array_equal, *trees)


def test_a_run_in_a_bucket_is_one_on_a_disk(bucket, experiment, tmp_path, monkeypatch, capfd):
  """Stopped and resumed in a bucket: the same parameters, bit for bit, the same records and files.

  Also another run can start from it, and it scores as the other one does.
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
  assert records(storage.path("gs://bucket/runs/prm/metrics.jsonl"))[-1]["step"] == stopped
  capfd.readouterr()
  loop.run(experiment, "gs://bucket/runs/prm")
  assert f"resuming at step {stopped}" in capfd.readouterr().err

  assert_identical(tiny.final_state("gs://bucket/runs/prm"), tiny.final_state(tmp_path / "run"))
  there = storage.path("gs://bucket/runs/prm")
  assert records(there / "metrics.jsonl") == records(tmp_path / "run/metrics.jsonl")
  for name in ("manifest.json", "tokenizer.model"):
    assert (there / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
  names = [name.removeprefix("runs/prm/") for name in bucket.objects]
  assert {name.split("/")[0] for name in names} == {p.name for p in (tmp_path / "run").iterdir()}
  assert any(name.startswith("profile/") and name.endswith(".pb") for name in names)
  kept = lambda path: sorted(p.name for p in (path / "checkpoints").iterdir())
  assert kept(there) == kept(tmp_path / "run")

  scorers = [score.Scorer.load(where) for where in ("gs://bucket/runs/prm", tmp_path / "run")]
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


def start(bucket, script, *arguments):
  return subprocess.Popen(
    [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)],
    stderr=subprocess.PIPE,
    text=True,
    cwd=ROOT,
    env=os.environ
    | bucket.environment()
    | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": CACHE},
  )


def finish(process, code=0):
  """What the process printed; it ends with this code."""
  said = process.communicate(timeout=300)[1]
  assert process.returncode == code, said
  return said


@pytest.fixture(scope="module")
def killed(bucket, arithmetic_data, tmp_path_factory):
  """A run of train.py in a bucket that was killed in the middle, and the arguments of it."""
  config = tmp_path_factory.mktemp("config") / "config.py"
  config.write_text(CONFIG.format(tests=str(ROOT / "tests"), data=str(arithmetic_data)))
  arguments = (f"--config={config}", "--workdir=gs://bucket/killed")
  process = start(bucket, "train.py", *arguments)
  end = time.monotonic() + 240
  try:
    while "killed/checkpoints/6/commit_success.txt" not in bucket.objects:
      assert process.poll() is None and time.monotonic() < end
      time.sleep(0.05)
  finally:
    process.kill()
    print(process.communicate()[1])
  return arguments


@pytest.mark.slow
def test_scripts_take_a_bucket(bucket, killed, arithmetic_data, tmp_path):
  """A killed run goes on; evaluate.py, score.py and export.py read what it saved."""
  said = finish(start(bucket, "train.py", *killed))
  assert "resuming at step" in said
  steps = [r["step"] for r in records(storage.path("gs://bucket/killed/metrics.jsonl"))]
  assert [step for step in steps if step % 20] == [step for step in range(1, 60) if step % 20]
  assert checkpoint.latest("gs://bucket/killed")[0] == 60

  run = "--checkpoint=gs://bucket/killed"
  source = arithmetic_data / "candidates.jsonl"
  flags = (f"--input={source}", f"--output={tmp_path / 'scored.jsonl'}")
  finish(start(bucket, "score.py", run, *flags))
  assert len(list(json_lines.read(tmp_path / "scored.jsonl"))) == len(list(json_lines.read(source)))
  flags = (f"--data_dir={arithmetic_data}", f"--output={tmp_path / 'evaluation.json'}")
  finish(start(bucket, "evaluate.py", run, *flags))
  assert json.loads((tmp_path / "evaluation.json").read_text())["accuracy"] > 0
  finish(start(bucket, "export.py", run, f"--output={tmp_path / 'exported'}"))
  assert (tmp_path / "exported" / "model.safetensors").is_file()


@pytest.mark.parametrize("damage", ["a changed bit", "unfinished"])
def test_a_damaged_checkpoint_in_a_bucket(bucket, experiment, capfd, damage):
  """One that does not read back is renamed, and one that was not finished deleted; the run ends as
  if neither had been.
  """
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
  assert score.Scorer.load(workdir).step == 6
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
  """It is named before anything is read or trained."""
  with pytest.raises(OSError, match=r"gs://missing/run/train\.lock: cannot be written: "):
    loop.run(experiment, "gs://missing/run")


def test_other_urls_are_refused(experiment, monkeypatch):
  """They are not taken for a folder of that name in the current one; what is missing is named."""
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
  """Starting from what is no run there says that public models are copied first."""
  c = dataclasses.replace(experiment, init=config_lib.Init(checkpoint="gs://bucket/llama"))
  with pytest.raises(FileNotFoundError, match=r"gs://bucket/llama: no run .* copy it first"):
    loop.run(c, "gs://bucket/from_public")
