"""The training loop: one program, whatever the devices, and no step lost or repeated."""

import contextlib
import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from prm_jax import config as config_lib
from prm_jax.datasets import arithmetic, prepare
from prm_jax.model import sharding as sharding_lib
from prm_jax.training import checkpoint, loop
from prm_jax.training import step as step_lib

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def experiment(arithmetic_data):
  return tiny.experiment(arithmetic_data, config_lib.Loss(language_model_weight=1.0))


@pytest.fixture(autouse=True)
def one_device(request):
  """Runs take one device, unless marked otherwise."""
  with contextlib.nullcontext() if "all_devices" in request.fixturenames else tiny.first_device():
    yield


@pytest.fixture
def all_devices():
  """Runs take all eight CPU devices."""


@pytest.fixture(scope="module")
def short(experiment, tmp_path_factory):
  """(an experiment of two steps, the work directory of its run)."""
  short, workdir = tiny.change(experiment, "train", steps=2), tmp_path_factory.mktemp("short")
  with tiny.first_device():
    loop.run(short, workdir)
  return short, workdir


def metrics(workdir):
  return {line["step"]: line for line in tiny.records(workdir) if line["split"] == "train"}


@pytest.mark.parametrize(
  "kind", ["process", pytest.param("outcome", marks=SLOW), pytest.param("lora", marks=SLOW)]
)
def test_resumed_equals_uninterrupted_bit_for_bit(experiment, tmp_path, monkeypatch, kind):
  """A run killed between checkpoints and started again ends in the same state and log.

  One program serves each from its first step to its last, also after restoring a checkpoint.
  """
  if kind == "lora":
    low = {"lora_rank": 2, "lora_targets": ("query", "down"), "param_dtype": "bfloat16"}
    model = dataclasses.replace(experiment.model, **low)
    optim = dataclasses.replace(experiment.optim, trained="lora")
    experiment = dataclasses.replace(experiment, loss=config_lib.Loss(), model=model, optim=optim)
  else:
    weight = float(kind == "process")
    experiment = tiny.change(experiment, "loss", objective=kind, language_model_weight=weight)
  compiled, jit = [], jax.jit

  def watching(fun, **kwargs):
    jitted = jit(fun, **kwargs)
    if getattr(fun, "func", None) in (step_lib.train_step, step_lib.read_log_probs):
      compiled.append(jitted)
    return jitted

  monkeypatch.setattr(jax, "jit", watching)
  step_lib._programs.cache_clear()
  loop.run(experiment, tmp_path / "whole")

  def killed(self, step, split, values, write=loop.Log.write):
    write(self, step, split, values)
    if step >= 4:
      raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(loop.Log, "write", killed)
    with pytest.raises(KeyboardInterrupt):
      loop.run(experiment, tmp_path / "killed")
  assert checkpoint.latest(tmp_path / "killed")[0] == 3
  loop.run(experiment, tmp_path / "killed")
  assert len(compiled) == 2 and max(jitted._cache_size() for jitted in compiled) == 1

  finals = tiny.final_state(tmp_path / "whole"), tiny.final_state(tmp_path / "killed")
  jax.tree.map(np.testing.assert_array_equal, *finals)
  whole, resumed = tiny.records(tmp_path / "whole"), tiny.records(tmp_path / "killed")
  assert [r["step"] for r in whole if r["split"] == "train"] == [2, 3, 4, 6, 8]
  assert whole == resumed


@pytest.mark.parametrize("trained", ["all", pytest.param("head", marks=SLOW)])
def test_eight_devices_equal_one(experiment, tmp_path, all_devices, trained):
  """Sharding rows and parameters changes where sums are made, not what is learnt."""
  experiment = tiny.change(experiment, "train", steps=4)
  experiment = tiny.change(experiment, "optim", trained=trained)
  with tiny.first_device():
    loop.run(experiment, tmp_path / "one")
  loop.run(tiny.change(experiment, "mesh", fsdp=4, tensor=2), tmp_path / "eight")
  one, eight = metrics(tmp_path / "one"), metrics(tmp_path / "eight")
  for step in one:
    for name in ("loss", "language_model_loss", "gradient_norm"):
      assert one[step][name] == pytest.approx(eight[step][name], rel=1e-4)
  # Adam divides by the root of a sum of squares: float32 noise in tiny gradients grows
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3),
    tiny.final_state(tmp_path / "one").params,
    tiny.final_state(tmp_path / "eight").params,
  )


def test_accumulated_gradients_equal_one_pass(experiment):
  """Microbatches with different numbers of targets give the gradients of one pass."""
  metrics = []
  for microbatches in (1, 4):
    c = tiny.change(experiment, "train", microbatches=microbatches)
    c = tiny.change(c, "optim", embedding_scale=0.0)  # of a part as of everything
    on = sharding_lib.make_mesh(config_lib.Mesh())
    made = step_lib.make(c, tiny.TOKENIZER.vocab_size, 3, on)
    state = made.begin(jax.tree.map(jnp.copy, tiny.model()[1]))
    metrics.append(made.train_step(state, tiny.batch())[1])
  for name in metrics[0]:
    np.testing.assert_allclose(metrics[0][name], metrics[1][name], rtol=1e-5)


def test_epochs_are_updates_of_all_rows(experiment):
  """With epochs, the number of updates follows from the rows, and takes the place of steps."""
  rows = loop.read_rows(tiny.change(experiment, "train", epochs=2.5, batch_rows=4, steps=7))
  assert rows.metadata.config.train.steps == round(2.5 * len(rows.train) / 4) != 7


def test_a_run_is_only_resumed_as_itself(experiment, short, tmp_path):
  """Other settings or data in a used work directory are refused by name, and change nothing.

  Settings that only change rounding may differ: rematerialisation, passes per update.
  """
  short, workdir = short
  before = (workdir / "manifest.json").read_text()
  with pytest.raises(ValueError, match=r"optim\.learning_rate: 0\.003 then, 0\.1 now"):
    loop.run(tiny.change(short, "optim", learning_rate=0.1), workdir)
  free = tiny.change(short, "model", remat="full", unroll_layers=True, attention="dense")
  free = tiny.change(free, "train", microbatches=2)
  then = checkpoint.latest(workdir)[1]
  checkpoint.check_same_run(loop.read_rows(free).metadata, then, workdir)  # raises nothing
  other = arithmetic.Generator(seed=1, train_problems=30, test_problems=6, candidates=1)
  prepare.prepare_arithmetic(tmp_path / "other", other)
  with pytest.raises(ValueError, match="hash of the training rows: "):
    loop.run(tiny.change(short, "data", directory=str(tmp_path / "other")), workdir)
  assert (workdir / "manifest.json").read_text() == before


def test_it_learns(experiment, tmp_path):
  """The training loss falls well below the entropy of the classes: more than their frequencies."""
  experiment = tiny.change(experiment, "optim", learning_rate=1e-2)
  experiment = tiny.change(
    experiment, "train", steps=200, log_every=100, eval_every=200, save_every=200
  )
  loop.run(experiment, tmp_path)
  targets = json.loads((tmp_path / "manifest.json").read_text())["train"]["targets"]
  shares = np.array(list(targets.values())) / sum(targets.values())
  entropy = -(shares * np.log(shares)).sum()
  assert metrics(tmp_path)[200]["loss"] < 0.8 * entropy


@pytest.mark.parametrize("unroll", [False, True])
def test_bfloat16_learns_nearly_the_same(experiment, tmp_path, unroll):
  """Activations in bfloat16 run on a CPU too, and follow the losses of float32 to a few percent."""
  losses = {}
  for dtype in ("float32", "bfloat16"):
    c = tiny.change(experiment, "loss", language_model_weight=0.5)
    c = tiny.change(
      tiny.change(c, "model", dtype=dtype, unroll_layers=unroll), "train", steps=6, log_every=1
    )
    loop.run(c, tmp_path / dtype)
    losses[dtype] = [metrics(tmp_path / dtype)[step]["loss"] for step in range(1, 7)]
  np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=0.03)
  assert losses["bfloat16"] != losses["float32"]


@pytest.mark.parametrize("save_every", [1, 100])
def test_a_loss_that_is_not_finite_stops_the_run(experiment, tmp_path, save_every):
  """A diverged run ends with what to do, and no checkpoint of NaN, however often it saves."""
  wild = tiny.change(experiment, "optim", learning_rate=1e30, warmup_steps=0, clip_norm=1e30)
  with pytest.raises(ValueError, match=r"lower optim\.learning_rate"):
    loop.run(tiny.change(wild, "train", steps=20, log_every=10, save_every=save_every), tmp_path)
  if checkpoint.latest(tmp_path):
    finite = jax.tree.map(lambda x: np.isfinite(x).all(), tiny.final_state(tmp_path).params)
    assert all(jax.tree.leaves(finite))


def test_scoring_beside_training_touches_nothing(short, tmp_path):
  """A reader of a work directory does not delete an unfinished save of the run."""
  shutil.copytree(short[1], tmp_path / "run")
  under_way = tmp_path / "run/checkpoints/7.orbax-checkpoint-tmp"
  under_way.mkdir()
  assert checkpoint.latest(tmp_path / "run")[0] == 2
  assert under_way.exists()


def test_the_optimiser(experiment):
  """Warm-up, peak and end of the learning rate; decay on matrices alone; clipped gradients."""
  c = config_lib.Optim(learning_rate=1e-2, warmup_steps=4, final_fraction=0.1, clip_norm=1.0)
  schedule = step_lib.learning_rate(c, 20)
  assert float(schedule(0)) == pytest.approx(0.0025)
  assert float(schedule(4)) == pytest.approx(1e-2)
  assert float(schedule(20)) == pytest.approx(1e-3)
  params = jax.tree.map(np.ones_like, tiny.model()[1])
  optimizer = step_lib.make_optimizer(c, 20)
  still = jax.tree.map(np.zeros_like, params)
  updates = optimizer.update(still, optimizer.init(params), params)[0]
  updates = jax.tree_util.tree_flatten_with_path(updates)[0]
  undecayed = {path[-1].key for path, update in updates if not update.any()}
  assert undecayed == {"attention_norm", "mlp_norm", "final_norm", "head_bias"}
  params = {"weight": np.ones((2, 2), np.float32)}
  optimizer = step_lib.make_optimizer(dataclasses.replace(c, weight_decay=0.0), 20)
  huge = {"weight": np.full((2, 2), 1e20, np.float32)}
  _, state = optimizer.update(huge, optimizer.init(params), params)
  moments = [x for x in jax.tree.leaves(state) if np.shape(x) == (2, 2)]
  assert max(float(np.abs(m).max()) for m in moments) < 1  # of a gradient of norm 1


def test_rows_must_divide_over_devices(experiment, tmp_path, all_devices):
  """A batch that cannot be split over the mesh is named before anything is compiled."""
  with pytest.raises(ValueError, match=r"train\.batch_rows=6 must be a multiple"):
    loop.run(tiny.change(experiment, "train", batch_rows=6), tmp_path)
