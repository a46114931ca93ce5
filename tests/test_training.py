"""The training loop: one program, whatever the devices, and no step lost or repeated."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import tiny

from prm_jax import config as config_lib
from prm_jax.input_pipeline import packing, trees
from prm_jax.training import checkpoint, loop, mesh
from prm_jax.training import step as step_lib
from prm_jax.types import StepTree


@pytest.fixture
def experiment(arithmetic_data):
  return config_lib.Experiment(
    data=config_lib.Data(
      directory=str(arithmetic_data),
      tokenizer=str(arithmetic_data / "tokenizer.model"),
      separator="\n",
      row_length=128,
    ),
    model=tiny.MODEL,
    loss=config_lib.Loss(language_model_weight=1.0),
    optim=config_lib.Optim(learning_rate=3e-3, warmup_steps=2),
    train=config_lib.Train(
      steps=8, batch_rows=8, log_every=2, eval_every=4, eval_rows=8, save_every=3
    ),
  )


def change(experiment, section, **values):
  changed = dataclasses.replace(getattr(experiment, section), **values)
  return dataclasses.replace(experiment, **{section: changed})


@pytest.fixture(autouse=True)
def one_device(request, monkeypatch):
  """Runs take one of the eight CPU devices, unless marked otherwise: that compiles faster."""
  if "all_devices" not in request.fixturenames:
    devices = jax.devices()[:1]
    monkeypatch.setattr(mesh, "make_mesh", functools.partial(mesh.make_mesh, devices=devices))


@pytest.fixture
def all_devices():
  """Runs take all eight CPU devices."""


def final_state(workdir):
  """(step, params, moments) of the newest checkpoint, as numpy."""
  metadata = checkpoint.Checkpointer(workdir).latest()[1]
  c = metadata.config
  on = mesh.make_mesh(config_lib.Mesh())
  params = mesh.abstract_params(c.model, metadata.vocab_size, len(metadata.contract.classes), on)
  optimizer = step_lib.make_optimizer(c.optim, c.train.steps)
  abstract = mesh.abstract_state(params, optimizer, on)
  checkpointer = checkpoint.Checkpointer(workdir)
  state = checkpointer.restore(checkpointer.latest()[0], abstract)
  checkpointer.close()
  return jax.tree.map(np.asarray, state)


def assert_identical(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def metrics(workdir, split="train"):
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return {line["step"]: line for line in lines if line["split"] == split}


@pytest.mark.parametrize("objective", ["process", "outcome"])
def test_resumed_equals_uninterrupted_bit_for_bit(experiment, tmp_path, monkeypatch, objective):
  """A run killed between checkpoints and started again ends in the same state and log."""
  experiment = change(experiment, "loss", objective=objective)
  loop.run(experiment, tmp_path / "whole")

  def killed(self, step, split, values, write=loop.Log.write):
    write(self, step, split, values)
    if step >= 4:
      raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(loop.Log, "write", killed)
    with pytest.raises(KeyboardInterrupt):
      loop.run(experiment, tmp_path / "killed")
  assert checkpoint.Checkpointer(tmp_path / "killed").latest()[0] == 3
  loop.run(experiment, tmp_path / "killed")

  assert_identical(final_state(tmp_path / "whole"), final_state(tmp_path / "killed"))
  whole, resumed = metrics(tmp_path / "whole"), metrics(tmp_path / "killed")
  assert whole.keys() == resumed.keys() == {2, 4, 6, 8}
  for step in (6, 8):
    assert whole[step]["loss"] == resumed[step]["loss"]


def test_eight_devices_equal_one(experiment, tmp_path, monkeypatch, all_devices):
  """Sharding rows and parameters changes where sums are made, not what is learnt."""
  experiment = change(experiment, "train", steps=4)
  with monkeypatch.context() as patch:
    first = functools.partial(mesh.make_mesh, devices=jax.devices()[:1])
    patch.setattr(mesh, "make_mesh", first)
    loop.run(experiment, tmp_path / "one")
  loop.run(change(experiment, "mesh", fsdp=4, tensor=2), tmp_path / "eight")
  one, eight = metrics(tmp_path / "one"), metrics(tmp_path / "eight")
  for step in one:
    assert one[step]["loss"] == pytest.approx(eight[step]["loss"], rel=1e-4)
  # Adam divides by the root of a sum of squares: float32 noise in tiny gradients grows
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3),
    final_state(tmp_path / "one").params,
    final_state(tmp_path / "eight").params,
  )


def test_parameters_are_sharded(all_devices):
  """On a 4 x 2 mesh each device holds an eighth of every matrix that divides."""
  on = mesh.make_mesh(config_lib.Mesh(fsdp=4, tensor=2))
  params = mesh.abstract_params(tiny.MODEL, 256, 3, on)
  assert params["blocks"]["gate"].sharding.spec == jax.P(None, "fsdp", "tensor")
  assert params["blocks"]["gate"].sharding.shard_shape((2, 16, 24)) == (2, 4, 12)
  state = mesh.abstract_state(params, step_lib.make_optimizer(config_lib.Optim(), 10), on).opt_state
  moments = [x for x in jax.tree.leaves(state) if x.shape == (2, 16, 24)]
  assert len(moments) == 4  # two of `gate`, two of `up`
  assert all(m.sharding.shard_shape(m.shape) == (2, 4, 12) for m in moments)
  with pytest.raises(ValueError, match="does not use the 8 devices"):
    mesh.make_mesh(config_lib.Mesh(fsdp=3))


def sample_batch(rows=8, row_length=64):
  rng = np.random.default_rng(0)
  encoded = []
  for i in range(rows):
    labels = tuple(int(r) for r in rng.integers(-1, 2, i % 3 + 1))
    steps = tuple("abc"[: r + 2] for r in labels)
    tree = StepTree("p" * (i + 1), steps, tuple(range(-1, len(steps) - 1)), labels)
    encoded.append(trees.encode(tree, tiny.TOKENIZER, tiny.contract()))
  packed = [packing.PackedRows([t], row_length, round_reads_to=4)[0] for t in encoded]
  return packing.Batch(**{k: np.stack([row[k] for row in packed]) for k in packed[0]})


def make_step(microbatches):
  optimizer = step_lib.make_optimizer(config_lib.Optim(learning_rate=1e-2, warmup_steps=0), 10)
  graphdef, params = tiny.model()
  state = step_lib.TrainState(jax.numpy.int32(0), params, optimizer.init(params))
  step = jax.jit(
    functools.partial(
      step_lib.train_step,
      graphdef=graphdef,
      optimizer=optimizer,
      config=config_lib.Loss(language_model_weight=0.5),
      microbatches=microbatches,
    )
  )
  return state, step


def test_accumulated_gradients_equal_one_pass():
  """Microbatches with different numbers of targets: sums over targets, not a mean of means."""
  batch = sample_batch()
  results = []
  for microbatches in (1, 4):
    state, step = make_step(microbatches)
    results.append(step(state, batch)[1])
  for name in results[0]:
    np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-5)


def test_the_step_compiles_once(experiment, tmp_path, monkeypatch):
  """One program serves the whole run, also after restoring a checkpoint."""
  compiled = []
  real_jit = jax.jit

  def watching(fun, **kwargs):
    jitted = real_jit(fun, **kwargs)
    if getattr(fun, "func", None) is step_lib.train_step:
      compiled.append(jitted)
    return jitted

  monkeypatch.setattr(jax, "jit", watching)
  loop.run(change(experiment, "train", steps=4), tmp_path)
  with pytest.raises(ValueError, match=r"train\.steps: 4 then, 8 now"):
    loop.run(experiment, tmp_path)
  assert [jitted._cache_size() for jitted in compiled[:1]] == [1]


def test_a_run_is_only_resumed_as_itself(experiment, tmp_path):
  """Other settings or other data in a used work directory are refused, and named."""
  loop.run(change(experiment, "train", steps=2), tmp_path)
  with pytest.raises(ValueError, match=r"optim\.learning_rate: 0\.003 then, 0\.1 now"):
    other = change(change(experiment, "train", steps=2), "optim", learning_rate=0.1)
    loop.run(other, tmp_path)


def test_it_learns(experiment, tmp_path):
  """The loss of the process model falls well below that of the class frequencies."""
  experiment = change(experiment, "train", steps=60, log_every=10, eval_every=60, save_every=60)
  loop.run(experiment, tmp_path)
  losses = metrics(tmp_path)
  assert losses[60]["loss"] < 0.7 * losses[10]["loss"]


def test_a_loss_that_is_not_finite_stops_the_run(experiment, tmp_path):
  """A diverged run ends with what to do, not with a checkpoint of NaN."""
  wild = change(experiment, "optim", learning_rate=1e30, warmup_steps=0, clip_norm=1e30)
  with pytest.raises(ValueError, match=r"lower optim\.learning_rate"):
    loop.run(change(wild, "train", steps=20, save_every=100), tmp_path)
  assert checkpoint.Checkpointer(tmp_path).latest() is None


def test_rows_must_divide_over_devices(experiment, tmp_path, all_devices):
  """A batch that cannot be split over the mesh is named before anything is compiled."""
  with pytest.raises(ValueError, match=r"train\.batch_rows=6 must be a multiple"):
    loop.run(change(experiment, "train", batch_rows=6), tmp_path)
