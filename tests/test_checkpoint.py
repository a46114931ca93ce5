"""Checkpoints: which are kept, which are refused, and that only undamaged ones are used."""

import contextlib
import dataclasses
import os
import pathlib
import resource
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import jobs
import numpy as np
import pytest
import tiny
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from prm_jax import config as config_lib
from prm_jax.model import sharding as sharding_lib
from prm_jax.scoring import scorer
from prm_jax.training import checkpoint, loop, programs
from prm_jax.training import step as step_lib

# orbax leaves behind what it had begun to read of a damaged checkpoint
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
METADATA = checkpoint.Metadata(config_lib.Experiment(), tiny.contract(), 7, "hash")
KEEP = config_lib.Train(keep=2, keep_best=0)


def state(step):
  """A training state of random numbers."""
  rng = np.random.default_rng(step)
  params = {"weight": rng.normal(size=(64, 32)).astype(np.float32), "norm": {"scale": np.ones(7)}}
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16 if x.ndim == 1 else None), params)
  return step_lib.TrainState(
    jnp.int32(step), params, (jnp.int32(step), {"m": np.arange(5.0, dtype="f")})
  )


def abstract(like):
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  describe = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)
  return jax.tree.map(describe, jax.tree.map(jnp.asarray, like))


def opened(workdir, c=KEEP):
  return contextlib.closing(checkpoint.Checkpointer(workdir, c))


def assert_identical(a, b):
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, a), b)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A work directory with checkpoints of steps 1 and 2."""
  workdir = tmp_path_factory.mktemp("saved")
  with opened(workdir) as checkpointer:
    for step in (1, 2):
      checkpointer.save(jax.tree.map(jnp.asarray, state(step)), METADATA)
  return workdir


def largest(folder: pathlib.Path) -> pathlib.Path:
  """The file with the numbers."""
  return max((path for path in folder.rglob("*") if path.is_file()), key=os.path.getsize)


def flip(path: pathlib.Path) -> None:
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def truncate(path: pathlib.Path) -> None:
  os.truncate(path, path.stat().st_size // 2)


DAMAGES = {
  "a changed bit in an array": lambda folder: flip(largest(folder / "params")),
  "a truncated array": lambda folder: truncate(largest(folder / "params")),
  "a changed bit in an index": lambda folder: flip(folder / "params/manifest.ocdbt"),
  "a file is missing": lambda folder: (folder / "optimizer/manifest.ocdbt").unlink(),
  "a folder is missing": lambda folder: shutil.rmtree(folder / "optimizer"),
  "a changed bit in the metadata": lambda folder: flip(folder / "_CHECKPOINT_METADATA"),
  "the metadata is missing": lambda folder: (folder / "_CHECKPOINT_METADATA").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_not_used(saved, tmp_path, capfd, damage):
  """The one before is used, with a warning.  A run renames the damaged one; a reader does not."""
  workdir = tmp_path / "run"
  shutil.copytree(saved, workdir)
  DAMAGES[damage](workdir / "checkpoints/2")
  like = abstract(state(1))
  for c in (None, KEEP):
    with opened(workdir, c) as checkpointer:
      restore = lambda step, metadata: checkpointer.restore(step, like)
      step, metadata, restored = checkpointer.newest(restore)
      assert (step, metadata) == (1, METADATA)
      assert_identical(state(1), restored)
      warning = capfd.readouterr().err
      assert "checkpoints/2 does not read back: " in warning and "step 1 is used" in warning
      aside = workdir / "checkpoints/2.unreadable"
      assert aside.exists() == (c is not None)
      if c is not None:
        checkpointer.save(jax.tree.map(jnp.asarray, state(2)), METADATA)
        checkpointer.finish()
        assert checkpointer.newest(restore)[0] == 2


def test_a_half_deleted_checkpoint_is_passed_over(saved, tmp_path):
  """If a run was killed while it deleted a checkpoint, the next save ends the deletion."""
  workdir = tmp_path / "run"
  shutil.copytree(saved, workdir)
  shutil.rmtree(workdir / "checkpoints/1/params")
  (workdir / "checkpoints/1/_CHECKPOINT_METADATA").unlink()
  like = abstract(state(2))
  with opened(workdir) as checkpointer:
    assert checkpointer.newest(lambda step, _: checkpointer.restore(step, like))[0] == 2
    checkpointer.save(jax.tree.map(jnp.asarray, state(3)), METADATA)
  with opened(workdir) as checkpointer:
    assert checkpointer.steps() == [2, 3]


def test_damaged_checkpoints_alone_are_an_error(saved, tmp_path):
  """No run begins again from nothing because its checkpoints cannot be read; they stay in place."""
  workdir = tmp_path / "run"
  shutil.copytree(saved, workdir)
  for step in (1, 2):
    truncate(largest(workdir / f"checkpoints/{step}/params"))
  like = abstract(state(1))
  with opened(workdir) as checkpointer:
    with pytest.raises(checkpoint.Unreadable, match="no checkpoint is left") as error:
      checkpointer.newest(lambda step, metadata: checkpointer.restore(step, like))
    assert "checkpoints/1 does not" in str(error.value)
    assert "checkpoints/2 does not" in str(error.value)
  assert {"1", "2"} == {path.name for path in (workdir / "checkpoints").iterdir()}


def test_packages_of_other_versions_are_named(saved):
  """A checkpoint's packages are compared with those installed, where it names them."""
  with opened(saved, None) as reader:
    then = reader.info(2)["versions"]
  assert loop.other_packages(then) == loop.other_packages({}) == ""
  changed = loop.other_packages(then | {"jax": "0.1.2"})
  assert changed == f"jax 0.1.2, now {jax.__version__}"


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 31), st.integers(0, 23), st.sampled_from(["float32", "bfloat16", "int32"]))
def test_a_checksum_changes_with_every_bit(bit, place, dtype):
  """Whichever bit of whichever number is changed."""
  x = np.arange(1, 25).reshape(4, 6).astype(jnp.dtype(dtype))
  bits = x.view(f"uint{8 * x.itemsize}").copy()
  bits.flat[place] ^= np.array(1, bits.dtype) << np.array(bit % (8 * x.itemsize), bits.dtype)
  sums = checkpoint.checksums({"then": jnp.asarray(x), "now": jnp.asarray(bits.view(x.dtype))})
  assert sums["then"] != sums["now"]


def test_a_checkpoint_is_restored_on_any_mesh(tmp_path):
  """Saved on 1 x 1, 4 x 2 and 2 x 2 x 2 devices, each restored on all: the same bits."""
  devices = jax.devices()
  shapes = {(1, 1, 1): devices[:1], (1, 4, 2): devices, (2, 2, 2): devices}
  optimizer = step_lib.make_optimizer(config_lib.Optim(), 10)
  layouts = []
  for (data, fsdp, tensor), some in shapes.items():
    on = sharding_lib.make_mesh(config_lib.Mesh(data=data, fsdp=fsdp, tensor=tensor), some)
    params = sharding_lib.abstract_params(tiny.MODEL, 256, 3, on)
    layouts.append(programs.abstract_state(params, optimizer, on))
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
  """By the metric that is asked for, lower or higher as it is better, also after a restart.

  A step without evaluation, or whose metric is undefined, is not the best.
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
        checkpointer.save(small, metadata, None if i == 4 else values)
  with opened(tmp_path, None) as reader:
    assert reader.steps() == expected
    evaluations = [reader.info(step)["evaluation"] for step in (5, 6)]
    assert evaluations[0] is None and evaluations[1]["accuracy"] == 0.1
    found = lambda which: reader.newest(lambda step, _: step, which)[2]
    assert [found(which) for which in ("latest", "best", "5")] == [6, min(expected), 5]
    with pytest.raises(
      ValueError, match=f"step 1; expected latest, best or one of 6, 5, {min(expected)}"
    ):
      found("1")


def test_a_full_disk_loses_nothing(saved, tmp_path):
  """The save fails with what and why; the checkpoints before it are whole, and it can be repeated.

  A limit of file sizes stands in for the disk: writing fails at the same place.
  """
  workdir = tmp_path / "run"
  shutil.copytree(saved, workdir)
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  like, third = abstract(state(3)), jax.tree.map(jnp.asarray, state(3))
  with opened(workdir) as checkpointer:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
      with pytest.raises(OSError, match=r"checkpoints: saving step 3 failed: .*Is there room"):
        checkpointer.save(third, METADATA)
        checkpointer.finish()
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, before)
  with opened(workdir) as checkpointer:
    restore = lambda step, metadata: checkpointer.restore(step, like)
    step, _, restored = checkpointer.newest(restore)
    assert step == 2
    assert_identical(state(2), restored)
    checkpointer.save(third, METADATA)
    checkpointer.finish()
    assert checkpointer.newest(restore)[0] == 3


@pytest.mark.usefixtures("one_device")
def test_a_run_goes_on_from_the_checkpoint_before(arithmetic_data, tmp_path, capfd):
  """With the newest one damaged a run ends as if it were not, and scoring takes the one before."""
  experiment = tiny.experiment(arithmetic_data, config_lib.Loss())
  experiment = tiny.change(experiment, "train", steps=4, save_every=2)
  loop.run(experiment, tmp_path)
  expected, records = tiny.final_state(tmp_path), tiny.records(tmp_path)
  flip(largest(tmp_path / "checkpoints/4/params"))
  capfd.readouterr()
  assert scorer.Scorer.load(tmp_path).step == 2
  assert "checkpoints/4 does not read back: the numbers of params/" in capfd.readouterr().err
  loop.run(experiment, tmp_path)
  assert "resuming at step 2" in capfd.readouterr().err
  assert_identical(expected, tiny.final_state(tmp_path))
  assert tiny.records(tmp_path) == records


HOST = """
import contextlib, os, pathlib, signal, sys, time
import jax
index, address, workdir = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
from test_checkpoint import KEEP, METADATA  # and eight devices
jax.distributed.initialize(address, 2, index)
import numpy as np
from prm_jax import config as config_lib
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import preemption
from prm_jax.training import checkpoint
from prm_jax.training.step import TrainState

on = sharding_lib.make_mesh(config_lib.Mesh())
split = jax.NamedSharding(on, jax.P("fsdp"))

def state(step):
  numbers = np.arange(32.0, dtype=np.float32).reshape(16, 2) + step
  whole = jax.make_array_from_callback(numbers.shape, split, lambda index: numbers[index])
  return TrainState(np.int32(step), {"a": whole}, {"m": whole * 2})

def abstract(like):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), like)

like = TrainState(jax.ShapeDtypeStruct((), np.int32, sharding=sharding_lib.replicated(on)),
                  *(abstract(x) for x in (state(0).params, state(0).opt_state)))
with preemption.PreemptionGuard() as guard:
  with contextlib.closing(checkpoint.Checkpointer(workdir, KEEP)) as checkpointer:
    assert checkpointer.newest(lambda *_: None) is None
    for step in range(1, 1000):
      if step == 5 and index == 1:
        os.kill(os.getpid(), signal.SIGTERM)  # one of them is told
      if step == 3 or (told := guard.reached(step)):
        checkpointer.save(state(step), METADATA)
        checkpointer.finish()
      if step != 3 and told:
        break
      time.sleep(0.02)
    steps = checkpointer.steps()
    assert steps == [3, step], steps
  real = checkpoint.ocp.load_checkpointables

  def load(path, wanted):
    if index == 1 and path.name == str(step):
      raise OSError("not here")
    return real(path, wanted)

  checkpoint.ocp.load_checkpointables = load
  with contextlib.closing(checkpoint.Checkpointer(workdir, KEEP)) as checkpointer:
    found = checkpointer.newest(lambda step, metadata: checkpointer.restore(step, like))
    assert found[0] == 3
    for x in found[2].params["a"].addressable_shards:
      np.testing.assert_array_equal(x.data, np.arange(32.0).reshape(16, 2)[x.index] + 3)
    assert checkpointer.steps() == [3]
print("stopped at", step, flush=True)
jax.distributed.shutdown()
"""


def test_two_hosts_save_and_restore_together(tmp_path):
  """SIGTERM to one stops both at the same step; what one cannot read, both leave aside."""
  address = jobs.free_address()
  (tmp_path / "host.py").write_text(HOST)
  env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, tmp_path / "host.py"]
  hosts = [
    subprocess.Popen(
      [*command, str(i), address, tmp_path / "run"],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=env,
    )
    for i in range(2)
  ]
  try:
    said = [host.communicate(timeout=300) for host in hosts]
  finally:
    for host in hosts:
      host.kill()
  assert [host.returncode for host in hosts] == [0, 0], said
  assert said[0][0].splitlines()[-1] == said[1][0].splitlines()[-1]
  assert (tmp_path / "run/checkpoints/3").is_dir()
  assert "does not read back: another host could not read it" in said[0][1]
  assert "does not read back: OSError: not here" in said[1][1]
