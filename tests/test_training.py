"""The training loop: the same run on any devices and after any interruption."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import tiny

from prm_jax import config as config_lib
from prm_jax.datasets import arithmetic, prepare
from prm_jax.input_pipeline import packing
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib
from prm_jax.training import checkpoint, loop
from prm_jax.training import step as step_lib

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def experiment(arithmetic_data):
  return tiny.experiment(arithmetic_data, language_model_weight=1.0)


@pytest.fixture(autouse=True)
def one_device(request):
  """Runs take one device, unless marked otherwise."""
  with contextlib.nullcontext() if "all_devices" in request.fixturenames else tiny.first_device():
    yield


@pytest.fixture
def all_devices():
  """Runs take all eight CPU devices."""


@contextlib.contextmanager
def watched(fresh: bool = True):
  """A list of the training steps and evaluations that runs in the block compile.

  Args:
    fresh: runs in the block share no program with earlier runs.
  """
  compiled, jit = [], jax.jit
  if fresh:
    step_lib._programs.cache_clear()

  def watching(fun, **kwargs):
    jitted = jit(fun, **kwargs)
    if getattr(fun, "func", None) in (step_lib.train_step, step_lib.read_log_probs):
      compiled.append(jitted)
    return jitted

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, "jit", watching)
    yield compiled


@pytest.fixture(scope="module")
def whole(experiment, tmp_path_factory):
  """(the work directory of an uninterrupted run of `experiment`, the programs it compiled)."""
  workdir = tmp_path_factory.mktemp("whole")
  with tiny.first_device(), watched() as compiled:
    loop.run(experiment, workdir)
  return workdir, compiled


def test_programs_are_shared_by_equal_settings_only(experiment, all_devices):
  """Two runs share compiled programs only if their settings give the same update."""
  one, two = (sharding_lib.make_mesh(config_lib.Mesh(), jax.devices()[:n]) for n in (1, 2))
  made = lambda c, on=one: step_lib.make(c, 300, 3, on)
  change = functools.partial(tiny.change, experiment)
  first = made(experiment)
  for same in (change("train", seed=7, eval_every=1), change("data", row_length=99)):
    assert made(same) is first
  assert made(experiment, two) is not first
  for section, values in (
    ("train", {"steps": 99}),
    ("train", {"microbatches": 2}),
    ("optim", {"learning_rate": 0.5}),
    ("loss", {"class_weights": (1.0, 2.0, 3.0)}),
    ("init", {"head": "random", "head_std": 0.5}),
    ("model", {"layers": 3}),
    ("tpu", {"compiler_options": ("xla_a=1",)}),
  ):
    assert made(change(section, **values)) is not first, values
  heads = tiny.change(change("loss", heads=3), "train", seed=1)  # the seed draws the heads' samples
  assert made(heads) is not made(tiny.change(heads, "train", seed=2))


def metrics(workdir):
  return {line["step"]: line for line in tiny.records(workdir) if line["split"] == "train"}


@pytest.mark.parametrize(
  "kind", ["process", pytest.param("outcome", marks=SLOW), pytest.param("lora", marks=SLOW)]
)
def test_a_resumed_run_equals_a_whole_one(experiment, whole, tmp_path, kind):
  """A run killed between two checkpoints and resumed ends in the state and log of a whole run.

  A run compiles one training step and one evaluation; resuming compiles nothing more.
  """
  if kind == "lora":
    low = {"lora_rank": 2, "lora_targets": ("query", "down"), "param_dtype": "bfloat16"}
    model = dataclasses.replace(experiment.model, **low)
    optim = dataclasses.replace(experiment.optim, trained="lora")
    experiment = dataclasses.replace(experiment, loss=config_lib.Loss(), model=model, optim=optim)
  elif kind == "outcome":
    experiment = dataclasses.replace(experiment, loss=config_lib.Loss(objective=kind))
  uninterrupted, compiled = whole
  if kind != "process":
    uninterrupted = tmp_path / "whole"
    with watched() as compiled:
      loop.run(experiment, uninterrupted)

  with watched(fresh=False) as more:
    with tiny.after_record(4, tiny.kill), pytest.raises(KeyboardInterrupt):
      loop.run(experiment, tmp_path / "killed")
    assert checkpoint.latest(tmp_path / "killed")[0] == 3
    loop.run(experiment, tmp_path / "killed")
  assert len(compiled) == 2 and max(jitted._cache_size() for jitted in compiled) == 1
  assert not more

  tiny.assert_same_run(uninterrupted, tmp_path / "killed")
  records = tiny.records(uninterrupted)
  assert [r["step"] for r in records if r["split"] == "train"] == [2, 3, 4, 6, 8]


def test_a_finished_run_returns_its_stored_evaluation(experiment, whole, tmp_path, monkeypatch):
  """Run again, a finished run compiles nothing and returns the evaluation of its last update."""
  workdir = shutil.copytree(whole[0], tmp_path / "again")
  monkeypatch.setattr(loop.Run, "call", lambda *_: pytest.fail("runs a program"))
  with tiny.first_device():
    result = loop.run(experiment, workdir)
  record = [record for record in tiny.records(workdir) if record["split"] == "test"][-1]
  assert {"nll", "auroc"} <= result.keys() and result.items() <= record.items()


@pytest.mark.parametrize("trained", ["all", pytest.param("head", marks=SLOW)])
def test_eight_devices_equal_one(experiment, whole, tmp_path, all_devices, trained):
  """Training sharded over eight devices gives the losses and parameters of one device."""
  experiment, alone = tiny.change(experiment, "optim", trained=trained), whole[0]
  if trained != "all":
    alone = tmp_path / "one"
    with tiny.first_device():
      loop.run(experiment, alone)
  loop.run(tiny.change(experiment, "mesh", fsdp=4, tensor=2), tmp_path / "eight")
  one, eight = metrics(alone), metrics(tmp_path / "eight")
  for step in one:
    for name in ("loss", "language_model_loss", "gradient_norm"):
      assert one[step][name] == pytest.approx(eight[step][name], rel=1e-4)
  # Adam divides by the root of a mean square, which enlarges the rounding of tiny gradients.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3),
    tiny.final_state(alone).params,
    tiny.final_state(tmp_path / "eight").params,
  )


def test_epochs_set_the_number_of_updates(experiment):
  """train.epochs sets the number of updates from the number of rows, in place of train.steps."""
  rows = loop.read_rows(tiny.change(experiment, "train", epochs=2.5, batch_rows=4, steps=7))
  assert rows.metadata.config.train.steps == round(2.5 * len(rows.train) / 4) != 7


def test_an_evaluation_holds_no_more_rows_than_a_pass_of_an_update(
  experiment, tmp_path, monkeypatch
):
  """With microbatches an evaluation reads fewer rows at once, and finds the same."""
  sizes, results, order = [], [], packing.eval_order
  ordered = lambda rows, size, limit: sizes.append(size) or order(rows, size, limit)
  monkeypatch.setattr(packing, "eval_order", ordered)
  for passes in (1, 4):
    given = tiny.change(experiment, "train", steps=1, eval_every=1, microbatches=passes)
    loop.run(tiny.change(given, "train", batch_rows=8), tmp_path / str(passes))
    results += [x["nll"] for x in tiny.records(tmp_path / str(passes)) if "nll" in x]
  assert sizes == [8, 2]
  assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_resuming_with_other_settings_or_data_is_refused(experiment, whole, tmp_path):
  """Resuming with another setting or other data is an error that names it and changes nothing.

  Settings that change only rounding may differ, such as rematerialisation and microbatches.
  """
  workdir = whole[0]
  before = (workdir / "manifest.json").read_text()
  with pytest.raises(ValueError, match=r"optim\.learning_rate: 0\.003 then, 0\.1 now"):
    loop.run(tiny.change(experiment, "optim", learning_rate=0.1), workdir)
  free = tiny.change(experiment, "model", remat="full", unroll_layers=True, attention="dense")
  free = tiny.change(free, "train", microbatches=2)
  then = checkpoint.latest(workdir)[1]
  checkpoint.check_same_run(loop.read_rows(free).metadata, then, workdir)  # raises nothing
  other = arithmetic.Generator(seed=1, train_problems=30, test_problems=6, candidates=1)
  prepare.prepare_arithmetic(tmp_path / "other", other)
  with pytest.raises(
    ValueError, match=r"(?s)hash of the training rows: .*hash of the evaluation rows: "
  ):
    loop.run(tiny.change(experiment, "data", directory=str(tmp_path / "other")), workdir)
  assert (workdir / "manifest.json").read_text() == before


def test_a_dataset_is_no_work_directory(experiment):
  """A run in the folder of a prepared dataset is refused, and the dataset stays as it was."""
  folder = pathlib.Path(experiment.data.directory)
  before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
  with pytest.raises(ValueError, match="holds a prepared dataset"):
    loop.run(experiment, folder)
  assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_training_learns_more_than_class_frequencies(experiment, tmp_path):
  """Training brings the loss well below the entropy of the class frequencies."""
  experiment = tiny.change(experiment, "optim", learning_rate=1e-2)
  experiment = tiny.change(
    experiment, "train", steps=200, log_every=100, eval_every=200, save_every=200
  )
  loop.run(experiment, tmp_path)
  targets = json.loads((tmp_path / "manifest.json").read_text())["train"]["targets"]
  shares = np.array(list(targets.values())) / sum(targets.values())
  entropy = -(shares * np.log(shares)).sum()
  assert metrics(tmp_path)[200]["loss"] < 0.8 * entropy


@pytest.mark.parametrize("unroll", [False, pytest.param(True, marks=SLOW)])
def test_bfloat16_losses_follow_those_of_float32(experiment, whole, tmp_path, unroll):
  """Training with bfloat16 activations runs on a CPU and gives the float32 losses to 3 %."""
  loop.run(tiny.change(experiment, "model", dtype="bfloat16", unroll_layers=unroll), tmp_path)
  half, exact = ([line["loss"] for line in metrics(x).values()] for x in (tmp_path, whole[0]))
  np.testing.assert_allclose(half, exact, rtol=0.03)
  assert half != exact


@pytest.mark.parametrize("save_every", [1, 100])
def test_a_loss_that_is_not_finite_stops_the_run(experiment, tmp_path, save_every):
  """A run that diverges ends with advice, and no checkpoint contains NaN."""
  wild = tiny.change(experiment, "optim", learning_rate=1e30, warmup_steps=0, clip_norm=1e30)
  with pytest.raises(ValueError, match=r"lower optim\.learning_rate"):
    loop.run(tiny.change(wild, "train", steps=20, log_every=10, save_every=save_every), tmp_path)
  if checkpoint.latest(tmp_path):
    finite = jax.tree.map(lambda x: np.isfinite(x).all(), tiny.final_state(tmp_path).params)
    assert all(jax.tree.leaves(finite))


def test_a_reader_leaves_an_unfinished_save_in_place(whole, tmp_path):
  """Reading the newest checkpoint does not delete a save that the run has not finished."""
  shutil.copytree(whole[0], tmp_path / "run")
  under_way = tmp_path / "run/checkpoints/9.orbax-checkpoint-tmp"
  under_way.mkdir()
  assert checkpoint.latest(tmp_path / "run")[0] == 8
  assert under_way.exists()


def test_the_rate_warms_up_only_matrices_decay_and_gradients_are_clipped(experiment):
  """The learning rate warms up and decays, only matrices decay, and gradients are clipped."""
  c = config_lib.Optim(learning_rate=1e-2, warmup_steps=4, final_fraction=0.1, clip_norm=1.0)
  schedule = step_lib.learning_rate(c, 20)
  assert float(schedule(0)) == pytest.approx(0.0025)
  assert float(schedule(4)) == pytest.approx(1e-2)
  assert float(schedule(20)) == pytest.approx(1e-3)
  mesh = sharding_lib.make_mesh(config_lib.Mesh())
  shapes = decoder.abstract_params(tiny.MODEL, tiny.TOKENIZER.vocab_size, 3, mesh)
  params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
  optimizer = step_lib.make_optimizer(c, 20)
  first_update = jax.jit(lambda given, p: optimizer.update(given, optimizer.init(p), p))
  updates = first_update(jax.tree.map(np.zeros_like, params), params)[0]
  updates = jax.tree_util.tree_flatten_with_path(updates)[0]
  undecayed = {path[-1].key for path, update in updates if not update.any()}
  assert undecayed == {"attention_norm", "mlp_norm", "final_norm", "head_bias"}
  params = {"weight": np.ones((2, 2), np.float32)}
  optimizer = step_lib.make_optimizer(dataclasses.replace(c, weight_decay=0.0), 20)
  huge = {"weight": np.full((2, 2), 1e20, np.float32)}
  first_update = jax.jit(lambda given, p: optimizer.update(given, optimizer.init(p), p))
  _, state = first_update(huge, params)
  moments = [x for x in jax.tree.leaves(state) if np.shape(x) == (2, 2)]
  assert max(float(np.abs(m).max()) for m in moments) < 1  # as of a gradient of norm 1
