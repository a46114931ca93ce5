"""Trained and frozen parameters, LoRA, parameter groups, float32 copies, rematerialisation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from prm_jax import config as config_lib
from prm_jax.model import sharding as sharding_lib
from prm_jax.training import loss as loss_lib
from prm_jax.training import step as step_lib
from prm_jax.training import trainable

LORA = dataclasses.replace(tiny.MODEL, lora_rank=2, lora_alpha=3.0)
# One factor pair for each kind of matrix product: all seven would only take longer to compile.
FEW = dataclasses.replace(LORA, lora_targets=("query", "output", "down"))
UNTIED = dataclasses.replace(tiny.MODEL, tied_embeddings=False)
HEAD = {"head", "head_bias"}


def experiment(model=tiny.MODEL, weight=0.0, **optim):
  """An experiment for `selected`, without data."""
  return config_lib.Experiment(
    model=model,
    loss=config_lib.Loss(language_model_weight=weight),
    optim=config_lib.Optim(learning_rate=1e-2, warmup_steps=0, **optim),
    train=config_lib.Train(steps=10, batch_rows=8),
  )


def selected(params, c: config_lib.Experiment):
  """The parameters that an experiment trains."""
  return trainable.select(params, c.loss, c.optim)


RULES = {
  "all": experiment(),
  "head": experiment(trained="head"),
  "lora": experiment(FEW, trained="lora"),
  "no_embedding": experiment(weight=1.0, embedding_scale=0),
  "untied_head": experiment(UNTIED, weight=0.5, trained="head"),
}


VOCABULARY = tiny.TOKENIZER.vocab_size


def described(model):
  """Shapes and dtypes of the parameters."""
  init = functools.partial(step_lib.init_params, config=model, num_classes=3)
  return jax.eval_shape(functools.partial(init, vocab_size=VOCABULARY), jax.random.key(0))


@functools.cache
def params(model=tiny.MODEL):
  """Parameters without a zero, drawn in numpy, so that nothing is compiled."""
  rng = np.random.default_rng(0)

  def draw(path, x):
    name = path[-1].key
    if name.endswith("norm"):
      return jnp.ones(x.shape, x.dtype)
    scale = {"embedding": 1.0, "head": 1.0}.get(name, 0.3)
    return jnp.asarray(scale * rng.normal(size=x.shape), x.dtype)

  return jax.tree_util.tree_map_with_path(draw, described(model))


def graph(model):
  return step_lib.graph(model, VOCABULARY, 3)


def gradient(model, name="all"):
  """Loss and gradient of the trained part of `params(FEW)`, as in the training step."""
  whole, batch, config = params(FEW), tiny.batch(), config_lib.Loss()

  def loss(trained):
    merged = trainable.merge(whole, trained)
    sums = loss_lib.sums(nnx.merge(graph(model), merged), batch, config)
    return loss_lib.total(sums, loss_lib.weights(batch, config), config)

  rule = config_lib.Optim(trained=name)
  return jax.jit(jax.value_and_grad(loss))(trainable.select(whole, config, rule))


@functools.cache
def whole_gradient():
  """`gradient` of all parameters of `FEW`."""
  return gradient(FEW)


def close(a, b, **tolerance):
  """Asserts equality up to float32 rounding, since XLA fuses two programs differently."""
  tolerance = {"rtol": 1e-4, "atol": 1e-6} | tolerance
  jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), a, b)


@pytest.mark.parametrize("name", ["head", "lora"])
def test_freezing_parameters_keeps_the_gradients_of_the_others(name):
  """Trained parameters have the same gradient whether or not the others are frozen."""
  whole_loss, whole = whole_gradient()
  loss, part = gradient(FEW, name)
  close(loss, whole_loss)
  close(part, trainable.select(whole, config_lib.Loss(), config_lib.Optim(trained=name)))
  assert all(np.any(x) for x in jax.tree.leaves(part))


@functools.cache
def two_updates(name, param_dtype="float32"):
  """The states before and after two updates on one batch."""
  c = tiny.change(RULES[name], "model", param_dtype=param_dtype)
  made = step_lib.make(c, VOCABULARY, 3, sharding_lib.make_mesh(c.mesh, jax.devices()[:1]))
  state = made.begin(jax.tree.map(jnp.copy, params(c.model)))
  before = jax.tree.map(np.asarray, state)
  for _ in range(2):
    state, _ = made.train_step(state, tiny.batch())
  return before, jax.tree.map(np.asarray, state)


def changed(before, after):
  """Names of the parameters that differ; of stacked ones, `name.layer`."""
  out = {name for name in before if name != "blocks" and np.any(before[name] != after[name])}
  for name, old in before["blocks"].items():
    for i, (was, now) in enumerate(zip(old, after["blocks"][name])):
      out |= {f"{name}.{i}"} if np.any(was != now) else set()
  return out


@pytest.mark.parametrize(
  ("name", "param_dtype"),
  [(name, "float32") for name in ("head", "lora", "no_embedding")]
  + [(name, "bfloat16") for name in ("all", "untied_head")],
)
def test_frozen_parameters_stay_bit_for_bit(name, param_dtype):
  """Updates change every trained parameter and no frozen one; only trained ones have moments."""
  before, after = two_updates(name, param_dtype=param_dtype)
  layer = [key for key in before.params["blocks"] if "_lora_" not in key]
  factors = [f"{w}_lora_{side}" for w in FEW.lora_targets for side in ("in", "out")]
  expected = {
    "head": HEAD,
    "lora": HEAD | {f"{key}.{i}" for key in factors for i in (0, 1)},
    "all": HEAD | {"final_norm", "embedding"} | {f"{key}.{i}" for key in layer for i in (0, 1)},
  }
  expected["no_embedding"] = expected["all"] - {"embedding"}
  expected["untied_head"] = HEAD | {"language_model"}
  # A norm of 1 in bfloat16 changes only by steps of 1/256.
  kept = lambda names: {n for n in names if param_dtype == "float32" or "norm" not in n}
  assert kept(changed(before.params, after.params)) == kept(expected[name])
  trained = selected(before.params, RULES[name])
  moments = sum(x.size for x in jax.tree.leaves(after.opt_state) if x.ndim)
  copies = 2 + (param_dtype == "bfloat16")  # two moments, and the float32 copy
  assert moments == copies * sum(x.size for x in jax.tree.leaves(trained))


def test_accumulated_gradients_equal_one_pass():
  """Microbatches with different numbers of targets give the loss and gradients of one pass."""
  metrics = []
  for microbatches in (1, 4):
    c = tiny.change(RULES["no_embedding"], "train", microbatches=microbatches)
    made = step_lib.make(c, VOCABULARY, 3, sharding_lib.make_mesh(c.mesh, jax.devices()[:1]))
    state = made.begin(jax.tree.map(jnp.copy, params(c.model)))
    metrics.append(made.train_step(state, tiny.batch())[1])
  for name in metrics[0]:
    np.testing.assert_allclose(metrics[0][name], metrics[1][name], rtol=1e-5)


@pytest.mark.parametrize("name", ["all", "untied_head"])
def test_bfloat16_parameters_are_a_rounded_float32_copy(name):
  """A float32 copy keeps updates too small for bfloat16; the parameters are the copy, rounded."""
  _, after = two_updates(name, param_dtype="bfloat16")
  master, trained = after.opt_state[0], selected(after.params, RULES[name])
  rounded = jax.tree.map(lambda x, like: x.astype(like.dtype), master, trained)
  jax.tree.map(np.testing.assert_array_equal, rounded, trained)
  large = master["blocks"]["gate"] if name == "all" else master["language_model"]
  assert np.any(np.asarray(large) != np.asarray(large.astype(jnp.bfloat16), np.float32))


def test_a_float32_copy_is_kept_only_of_other_dtypes():
  """The optimiser keeps a float32 copy only if a trained parameter is not float32.

  A loss that trains no parameter is an error.
  """
  half = dataclasses.replace(UNTIED, param_dtype="bfloat16")
  low = dataclasses.replace(half, lora_rank=2)
  for c, trains, has_master in [
    (experiment(half, trained="head"), False, False),
    (experiment(half, weight=0.5, trained="head"), True, True),
    (experiment(low, weight=0.5, trained="lora"), False, False),
    (experiment(UNTIED, weight=0.5), True, False),
  ]:
    every = described(c.model)
    assert ("language_model" in selected(every, c)) == trains
    optimizer = step_lib.make_optimizer(c.optim, 10)
    begin = functools.partial(step_lib.begin, optimizer=optimizer, loss=c.loss, optim=c.optim)
    assert bool(jax.eval_shape(begin, every).opt_state[0]) == has_master
  nothing = experiment(trained="head", head_scale=0)
  with pytest.raises(
    ValueError, match=r"optim\.trained='head': with this loss .* no parameter is trained"
  ):
    selected(params(), nothing)


def test_lora_factors_start_without_effect_and_merge_to_the_same_output():
  """LoRA factors have no effect at step 0, and merging them later keeps the model's output."""
  batch = tiny.batch()

  @functools.partial(jax.jit, static_argnums=1)
  def read(params, model):
    return step_lib.read_log_probs(params, batch, graphdef=graph(model))

  base_of = dataclasses.replace(LORA, lora_rank=0)
  trained = params(LORA)
  base = trained | {"blocks": {k: x for k, x in trained["blocks"].items() if "_lora_" not in k}}
  fresh = {k: x * (not k.endswith("lora_out")) for k, x in trained["blocks"].items()}
  close(read(trained | {"blocks": fresh}, LORA), read(base, base_of), atol=1e-5)
  merged = trainable.merge_lora(trained, LORA)
  assert jax.tree.structure(merged) == jax.tree.structure(base)
  apart = read(trained, LORA)
  close(apart, read(merged, base_of), atol=1e-5)
  assert np.abs(apart - read(base, base_of)).max() > 0.1
  assert trainable.merge_lora(base, tiny.MODEL) is base


def test_merged_factors_are_rounded_once():
  """Small updates of bfloat16 weights are there in a float32 export, or in a float32 run."""
  name = LORA.lora_targets[0]
  weight = jnp.ones((1, 4, 4), jnp.bfloat16)
  factors = {f"{name}_lora_in": jnp.ones((1, 4, 1)), f"{name}_lora_out": jnp.full((1, 1, 4), 1e-4)}
  c = dataclasses.replace(LORA, lora_rank=1, lora_alpha=1.0, lora_targets=(name,))
  merged = trainable.merge_lora({"blocks": {name: weight} | factors}, c, "float32")["blocks"][name]
  np.testing.assert_allclose(merged, 1.0001, rtol=1e-7)


def test_factors_are_merged_in_float32_on_every_platform():
  """All matrix products of merging ask for the highest precision; a TPU's default is bfloat16."""
  merge = jax.jit(functools.partial(trainable.merge_lora, c=LORA))
  text = merge.lower(params(LORA)).as_text()
  products = text.count("stablehlo.dot_general")
  assert products == text.count("precision = [HIGHEST, HIGHEST]") == len(LORA.lora_targets)


def test_a_groups_factor_scales_its_updates_only():
  """A parameter group's factor multiplies its updates, with their decay, and no others."""
  c = config_lib.Optim(learning_rate=1e-2, weight_decay=0.1)
  given = {name: x for name, x in params().items() if name != "blocks"}
  grads = jax.tree.map(lambda x: 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), given)

  def updates(c):
    optimizer = step_lib.make_optimizer(c, 10)
    return jax.jit(lambda: optimizer.update(grads, optimizer.init(given), given)[0])()

  plain = updates(c)
  scaled = updates(dataclasses.replace(c, embedding_scale=0.5, head_scale=4.0))
  factors = {"embedding": 0.5, "head": 4.0, "head_bias": 4.0}
  for name, value in plain.items():
    expected = jax.tree.map(functools.partial(jnp.multiply, factors.get(name, 1.0)), value)
    jax.tree.map(np.testing.assert_array_equal, scaled[name], expected)


def test_recomputation_changes_no_gradient():
  """Every rematerialisation policy gives the loss and gradients of keeping all activations."""
  for policy in ("dots", "full"):
    model = dataclasses.replace(FEW, remat=policy)
    close(gradient(model), whole_gradient())
  for saved in (("attention", "gate", "output"), ("attention", "attention_inputs", "residual")):
    kept = dataclasses.replace(FEW, remat="full", saved=saved)
    close(gradient(kept), whole_gradient())


def test_saved_outputs_are_not_computed_again():
  """The backward pass computes nothing again that `saved` names, nor what only it needs."""

  def program(*saved):
    model = dataclasses.replace(FEW, remat="full", saved=saved)
    return str(jax.make_jaxpr(lambda: gradient(model))())

  def products(*saved):
    return program(*saved).count("dot_general")

  def rotations(*saved):
    return program(*saved).count("concatenate")

  assert products("gate") == products("up") == products() - 1
  assert products("query", "key", "value", "gate", "up") <= products() - 5
  assert products("attention_inputs") == products("query", "key", "value")
  assert rotations("attention_inputs") == rotations("query", "key", "value") - 2
  assert products("attention", "residual") == products("attention", "output")
