"""Checkpoints: which ones are kept, and damaged ones, which are never used."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import jobs
import numpy as np
import pytest
import tiny
from conftest import ROOT, full_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from prm_jax import config as config_lib
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import distributed
from prm_jax.scoring import scorer
from prm_jax.training import checkpoint, loop
from prm_jax.training import step as step_lib

# orbax leaves reads of a damaged checkpoint unfinished
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
# Checkpoints keep metadata as JSON, from which tuples are read back as tuples.
INIT = config_lib.Init("public", head="tokens", head_tokens=("-", "0", "+"))
METADATA = checkpoint.Metadata(config_lib.Experiment(init=INIT), tiny.contract(), 7, "hash")
KEEP = config_lib.Train(keep=2, keep_best=0)


def state(step):
  """A training state of random numbers."""
  weight = jax.random.normal(jax.random.key(step), (64, 32))
  params = {"weight": weight, "norm": {"scale": jnp.ones(7, jnp.bfloat16)}}
  return step_lib.TrainState(jnp.int32(step), params, (jnp.int32(step), {"m": jnp.arange(5.0)}))


def abstract(like):
  """Shapes, dtypes and shardings of a state."""
  describe = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  return jax.tree.map(describe, like)


def opened(workdir, c=KEEP):
  """A context with the checkpointer of a run, or of a reader if c is None."""
  return contextlib.closing(checkpoint.Checkpointer(workdir, c))


def newest(checkpointer):
  """Step, metadata and state of the newest readable checkpoint."""
  like = abstract(state(0))
  return checkpointer.newest(lambda step, metadata: checkpointer.restore(step, like))


def assert_identical(a, b):
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, a), b)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A work directory with checkpoints of steps 1 and 2."""
  workdir = tmp_path_factory.mktemp("saved")
  with opened(workdir) as checkpointer:
    for step in (1, 2):
      checkpointer.save(state(step), METADATA)
  return workdir


@pytest.fixture
def workdir(saved, tmp_path):
  """A copy of the directory `saved`."""
  return pathlib.Path(shutil.copytree(saved, tmp_path / "run"))


def largest(folder: pathlib.Path) -> pathlib.Path:
  """The largest file of a folder, which has the numbers."""
  return max((path for path in folder.rglob("*") if path.is_file()), key=os.path.getsize)


DAMAGES = {
  "a changed bit in an array": lambda folder: tiny.flip(largest(folder / "params")),
  "a truncated array": lambda folder: os.truncate(largest(folder / "params"), 100),
  "a changed bit in an index": lambda folder: tiny.flip(folder / "params/manifest.ocdbt"),
  "a file is missing": lambda folder: (folder / "optimizer/manifest.ocdbt").unlink(),
  "a folder is missing": lambda folder: shutil.rmtree(folder / "optimizer"),
  "a changed bit in the metadata": lambda folder: tiny.flip(folder / "_CHECKPOINT_METADATA"),
  "the metadata is missing": lambda folder: (folder / "_CHECKPOINT_METADATA").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_not_used(workdir, capfd, damage):
  """If the newest checkpoint is damaged, the one before is used, with a warning.

  A run renames the damaged one; a reader changes nothing.
  """
  DAMAGES[damage](workdir / "checkpoints/2")
  for c in (None, KEEP):
    with opened(workdir, c) as checkpointer:
      step, metadata, restored = newest(checkpointer)
      assert (step, metadata) == (1, METADATA)
      assert_identical(state(1), restored)
      warning = capfd.readouterr().err
      assert "checkpoints/2 does not read back: " in warning and "step 1 is used" in warning
      aside = workdir / "checkpoints/2.unreadable"
      assert aside.exists() == (c is not None)
      if c is not None:
        checkpointer.save(state(2), METADATA)
        checkpointer.finish()
        assert newest(checkpointer)[0] == 2


def test_an_error_of_a_moment_damages_no_checkpoint(workdir, monkeypatch):
  """If reading fails once, it is tried again: the newest checkpoint is used and keeps its name."""
  load, calls = checkpoint.ocp.load_checkpointables, []

  def fails_once(*args):
    calls.append(args)
    if len(calls) == 1:
      raise OSError(24, "Too many open files")
    return load(*args)

  monkeypatch.setattr(checkpoint.ocp, "load_checkpointables", fails_once)
  with opened(workdir, KEEP) as checkpointer:
    assert newest(checkpointer)[0] == 2
    assert checkpointer.steps() == [1, 2]


def test_a_half_deleted_checkpoint_is_skipped(workdir):
  """A checkpoint that a killed run had half deleted is not read; the next save deletes the rest."""
  shutil.rmtree(workdir / "checkpoints/1/params")
  (workdir / "checkpoints/1/_CHECKPOINT_METADATA").unlink()
  with opened(workdir) as checkpointer:
    assert newest(checkpointer)[0] == 2
    checkpointer.save(state(3), METADATA)
  with opened(workdir) as checkpointer:
    assert checkpointer.steps() == [2, 3]


def test_damaged_checkpoints_alone_are_an_error(workdir):
  """If no checkpoint can be read, the run ends with an error; it neither restarts nor deletes.

  The error for a damaged checkpoint that was chosen by its step names the others.
  """
  tiny.flip(largest(workdir / "checkpoints/1/params"))
  restore = lambda step, metadata: reader.restore(step, abstract(state(0)))
  message = r"(?s)checkpoints/1 does not .*the other checkpoints are 2: choose one with --step"
  with opened(workdir, None) as reader, pytest.raises(checkpoint.Unreadable, match=message):
    reader.newest(restore, "1")
  tiny.flip(largest(workdir / "checkpoints/2/params"))
  message = r"(?s)checkpoints/2 does not .*checkpoints/1 does not .*no checkpoint is left"
  with opened(workdir) as checkpointer, pytest.raises(checkpoint.Unreadable, match=message):
    newest(checkpointer)
  assert {"1", "2"} == {path.name for path in (workdir / "checkpoints").iterdir()}


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 31), st.integers(0, 23), st.sampled_from(["float32", "bfloat16", "int32"]))
def test_a_checksum_changes_with_any_bit(bit, place, dtype):
  x = np.arange(1, 25).reshape(4, 6).astype(jnp.dtype(dtype))
  bits = x.view(f"uint{8 * x.itemsize}").copy()
  bits.flat[place] ^= np.array(1, bits.dtype) << np.array(bit % (8 * x.itemsize), bits.dtype)
  sums = checkpoint.checksums({"then": jnp.asarray(x), "now": jnp.asarray(bits.view(x.dtype))})
  assert sums["then"] != sums["now"]


def test_a_checkpoint_is_restored_on_any_mesh(tmp_path):
  """A checkpoint saved on one mesh restores bit for bit on any other, with its shardings."""
  devices = jax.devices()
  shapes = {(1, 1, 1): devices[:1], (1, 4, 2): devices, (2, 2, 2): devices}
  optim = config_lib.Optim()
  rules = {
    "optimizer": step_lib.make_optimizer(optim, 10),
    "optim": optim,
    "loss": METADATA.config.loss,
  }
  layouts = []
  for (data, fsdp, tensor), some in shapes.items():
    on = sharding_lib.make_mesh(config_lib.Mesh(data=data, fsdp=fsdp, tensor=tensor), some)
    every = decoder.abstract_params(tiny.MODEL, 256, 3, on)
    kinds = ("attention_norm", "query", "output", "gate", "down")
    blocks = {name: every["blocks"][name] for name in kinds}
    params = {"embedding": every["embedding"], "head": every["head"], "blocks": blocks}
    layouts.append(step_lib.abstract_state(params, **rules))
  rng = np.random.default_rng(0)
  numbers = jax.tree.map(lambda x: np.asarray(rng.normal(size=x.shape), x.dtype), layouts[0])
  for i, layout in enumerate(layouts):
    numbers = step_lib.TrainState(np.int32(i), numbers.params, numbers.opt_state)
    put = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), numbers, layout)
    with opened(tmp_path / str(i)) as checkpointer:
      checkpointer.save(put, METADATA)
      checkpointer.finish()
      for other in layouts:
        restored = checkpointer.restore(i, other)
        assert_identical(restored, numbers)
        assert restored.params["blocks"]["gate"].sharding == other.params["blocks"]["gate"].sharding


@pytest.mark.parametrize(
  ("metric", "expected"), [("nll", [2, 5, 6]), ("auroc", [3, 5, 6]), ("accuracy", [4, 5, 6])]
)
def test_the_latest_and_the_best_are_kept(tmp_path, metric, expected):
  """The latest checkpoints and the best by `best_metric` are kept, also over a restart.

  A step without evaluation or with an undefined metric is not the best.
  """
  c = config_lib.Train(keep=2, keep_best=1, best_metric=metric)
  metadata = dataclasses.replace(METADATA, config=config_lib.Experiment(train=c))
  nll = [0.5, 0.1, 0.4, 0.3, None, float("nan")]
  auroc = [0.5, 0.6, 0.9, 0.8, None, None]
  accuracy = [0.5, 0.6, 0.7, 0.7, None, 0.1]  # of equals, the later
  for half in (range(3), range(3, 6)):
    with opened(tmp_path, c) as checkpointer:
      for i in half:
        values = {"nll": nll[i], "auroc": auroc[i], "accuracy": accuracy[i]}
        small = step_lib.TrainState(jnp.int32(i + 1), {"a": jnp.ones(2)}, {"b": jnp.ones(2)})
        if i != 4:
          checkpointer.evaluations[i + 1] = values
        checkpointer.save(small, metadata)
  with opened(tmp_path, None) as reader:
    assert reader.steps() == expected
    evaluations = [reader.info(step)["evaluation"] for step in (5, 6)]
    assert evaluations[0] is None and evaluations[1]["accuracy"] == 0.1
    step_of = lambda which: reader.newest(lambda step, _: step, which)[2]
    assert [step_of(which) for which in ("latest", "best", "5")] == [6, min(expected), 5]
    with pytest.raises(ValueError, match=f"no checkpoint is 1; .* one of 6, 5, {min(expected)}"):
      step_of("1")
    assert step_of(5) == 5


def test_a_full_disk_loses_nothing(workdir):
  """A save on a full disk fails with step and reason, keeps older ones, and can be repeated."""
  message = r"checkpoints: saving step 3 failed: .*Check free space"
  with opened(workdir) as checkpointer, full_disk(2000), pytest.raises(OSError, match=message):
    checkpointer.save(state(3), METADATA)
    checkpointer.finish()
  with opened(workdir) as checkpointer:
    step, _, restored = newest(checkpointer)
    assert step == 2
    assert_identical(state(2), restored)
    checkpointer.save(state(3), METADATA)
    checkpointer.finish()
    assert newest(checkpointer)[0] == 3


@pytest.mark.usefixtures("one_device")
def test_a_run_resumes_before_a_damaged_checkpoint(arithmetic_data, tmp_path, capfd, monkeypatch):
  """A run with a damaged newest checkpoint ends as an undamaged run; scoring uses the one before.

  Resuming names the packages whose versions have changed, and an update to trace beyond the last.
  """
  experiment = tiny.experiment(arithmetic_data)
  loop.run(experiment, tmp_path)
  expected, records = tiny.final_state(tmp_path), tiny.records(tmp_path)
  tiny.flip(largest(tmp_path / "checkpoints/8/params"))
  capfd.readouterr()
  assert scorer.Scorer.load(tmp_path).step == 6
  assert "checkpoints/8 does not read back: the values of params/" in capfd.readouterr().err
  monkeypatch.setattr(distributed, "versions", lambda: {"jax": "0.1.2"})
  loop.run(tiny.change(experiment, "train", profile_at=9), tmp_path)
  log = capfd.readouterr().err
  assert "no trace: the run ends before update 9" in log
  assert "resuming at step 6" in log and f"jax {jax.__version__}, now 0.1.2" in log
  assert_identical(expected, tiny.final_state(tmp_path))
  assert tiny.records(tmp_path) == records


HOST = """
import signal, time
from test_checkpoint import *  # and eight devices
index, address, workdir = int(sys.argv[1]), *sys.argv[2:]
jax.distributed.initialize(address, 2, index)
on = sharding_lib.make_mesh(config_lib.Mesh())
split = jax.NamedSharding(on, jax.P("fsdp"))
numbers = np.arange(32.0, dtype=np.float32).reshape(16, 2)

def state(step):
  whole = jax.make_array_from_callback((16, 2), split, lambda index: numbers[index] + step)
  count = jax.device_put(np.int32(step), sharding_lib.replicated(on))
  return step_lib.TrainState(count, {"a": whole}, {"m": whole * 2})

def load(path, wanted, real=checkpoint.ocp.load_checkpointables):
  if index == 1 and path.name == "2":
    raise OSError("not here")
  return real(path, wanted)

checkpoint.ocp.load_checkpointables = load
like = abstract(state(0))
with opened(workdir) as checkpointer:
  assert checkpointer.newest(lambda *_: None) is None
  for step in (1, 2):
    checkpointer.save(state(step), METADATA)
  checkpointer.finish()
  step, _, restored = checkpointer.newest(lambda step, metadata: checkpointer.restore(step, like))
  for x in restored.params["a"].addressable_shards:
    np.testing.assert_array_equal(x.data, numbers[x.index] + 1)
  assert (step, checkpointer.steps()) == (1, [1])

with distributed.PreemptionGuard() as guard:
  for step in range(1000):
    if step == 5 and index == 1:
      os.kill(os.getpid(), signal.SIGTERM)
    if guard.reached(step):
      break
    time.sleep(0.02)
distributed.check_same({"stopped at": step})
assert 5 <= step < 999
jax.distributed.shutdown()
"""


def test_two_hosts_save_and_restore_together(tmp_path):
  """Two hosts skip a checkpoint that one cannot read; SIGTERM to one stops both at one step."""
  address, code = jobs.free_address(), tmp_path / "host.py"
  code.write_text(HOST)
  env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
  start = functools.partial(subprocess.Popen, stderr=subprocess.PIPE, text=True, env=env)
  run = tmp_path / "run"
  hosts = [start([sys.executable, code, i, address, run]) for i in "01"]
  errors = [host.communicate(timeout=300)[1] for host in hosts]
  assert [host.returncode for host in hosts] == [0, 0], errors
  assert "does not read back: another host could not read it" in errors[0]
  assert "does not read back: OSError: not here" in errors[1]
