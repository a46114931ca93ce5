"""Properties of the whole model: causal, packed = alone, tree = flattened."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from prm_jax import config as config_lib
from prm_jax.input_pipeline import packing, prefix_tree, token_tree
from prm_jax.model import attention, decoder, normalization, products, rotary
from prm_jax.model import sharding as sharding_lib
from prm_jax.training import loss as loss_lib
from prm_jax.training import step as step_lib
from prm_jax.types import Batch, StepTree

ROW = 64
# float32 sums of a few hundred terms in another order
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def batch_of(token_trees, row_length=ROW, rows=None, reads=8) -> Batch:
  """Returns trees packed into rows, which are padded to `rows` rows of `row_length` tokens."""
  packed = packing.PackedRows(token_trees, row_length, round_reads_to=reads)
  (order,) = packing.eval_order(packed, rows or len(packed))
  return jax.tree.map(jnp.asarray, packing.stack([packed[i] for i in order]))


def encode(tree: StepTree) -> token_tree.TokenTree:
  """Returns the tokens of a tree with a byte tokenizer."""
  return token_tree.encode(tree, tiny.TOKENIZER, tiny.contract())


CHAIN = encode(StepTree("ab", ("a", "b"), (-1, 0), (1, 1)))
BRANCHES = encode(StepTree("ab", ("a", "b", "ca", "c"), (-1, -1, 1, 1), (-1, 1, 0, 1)))

# Every option that distinguishes the public families.  The window is shorter than the paths.
EVERYTHING = dataclasses.replace(
  tiny.MODEL,
  activation="gelu_tanh",
  norm_offset=True,
  post_norms=True,
  query_key_norm=True,
  attention_bias=True,
  attention_scalar=3,
  attention_softcap=2.0,
  window=5,
  window_pattern="sf",
  local_rope_theta=20.0,
  rope_scaling="llama3",
  rope_original_length=32,
  rope_factor=4.0,
  scale_embeddings=True,
  tied_embeddings=False,
  logit_softcap=3.0,
)


@functools.cache
def everything():
  """Returns (graph, random parameters) of a model with every option."""
  rng = np.random.default_rng(0)
  size = {"config": EVERYTHING, "vocab_size": tiny.TOKENIZER.vocab_size, "num_classes": 3}
  shapes = jax.eval_shape(functools.partial(step_lib.init_params, **size), jax.random.key(0))
  params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 3, x.dtype), shapes)
  params["embedding"] *= 3
  return step_lib.graph(*size.values()), params


@functools.partial(jax.jit, static_argnums=2)
def log_probabilities(params, batch, graphdef=None):
  """Returns the log-probabilities of the classes at each read, `[B, R, K, C]`."""
  return step_lib.read_log_probs(params, batch, graphdef=graphdef or tiny.model()[0])


@functools.partial(jax.jit, static_argnums=(2, 3))
def loss_and_gradient(params, batch, config, graphdef=None):
  """Returns (gradient, summed losses) of a batch; the gradient is that of their total."""

  def objective(params):
    sums = loss_lib.sums(nnx.merge(graphdef or tiny.model()[0], params), batch, config)
    return sum(v for k, v in sums.items() if k != "correct"), sums

  return jax.grad(objective, has_aux=True)(params)


def gradients(function, *inputs):
  """Returns the gradients of a weighted sum of the outputs."""
  weighted = lambda *inputs: jnp.sum(jnp.sin(jnp.arange(12.0)) * function(*inputs))
  return jax.grad(weighted, range(len(inputs)))(*inputs)


@pytest.mark.parametrize("offset", [False, True])
def test_gradients_of_a_norm_equal_those_of_its_formula(offset):
  """RMSNorm's gradients equal those that JAX derives from the formula."""
  c = dataclasses.replace(tiny.MODEL, norm_offset=offset, norm_epsilon=0.03)
  x, scale = np.random.default_rng(0).normal(size=(6, 12)).astype(np.float32), np.arange(1.0, 13)

  def plain(x, scale):
    return (offset + scale) * x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 0.03)

  got = gradients(lambda x, scale: normalization.rms_norm(x, scale, c), x, np.float32(scale))
  for each, wanted in zip(got, gradients(plain, x, np.float32(scale)), strict=True):
    np.testing.assert_allclose(each, wanted, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_rotation_equal_those_of_its_formula():
  """The gradient of a rotation equals that of complex multiplication."""
  c = dataclasses.replace(tiny.MODEL, head_size=12, rope_theta=50.0)
  x = np.random.default_rng(0).normal(size=(1, 5, 3, 12)).astype(np.float32)
  positions = np.array([[0, 3, 1, 9, 2]])
  turn = jnp.exp(1j * positions[..., None, None] * rotary.frequencies(c))

  def plain(x):
    turned = turn * (x[..., :6] + 1j * x[..., 6:])
    return jnp.concatenate([turned.real, turned.imag], -1)

  rotated = lambda x: rotary.rotate(x, rotary.tables(positions, c)[0])
  np.testing.assert_allclose(rotated(x), plain(x), rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(*gradients(rotated, x), *gradients(plain, x), rtol=1e-5, atol=1e-5)


def test_cosines_are_computed_once():
  """XLA computes the cosines of positions once, not in each layer and for each head."""
  c, size = dataclasses.replace(tiny.MODEL, unroll_layers=True), tiny.TOKENIZER.vocab_size
  graphdef, (_, params) = step_lib.graph(c, size, 3), tiny.model()
  run = jax.jit(lambda params, *tokens: nnx.merge(graphdef, params).hidden(*tokens))
  program = run.lower(params, *np.zeros((3, 2, 64), np.int32)).compile().as_text()
  assert len(re.findall(r" cosine\(", program)) == 1


def test_no_token_depends_on_a_later_one():
  """Causal: a changed token changes its own hidden state and later ones, and none before."""
  T = 12
  tokens = np.tile(np.arange(T) % 7, (T + 1, 1))
  np.fill_diagonal(tokens, 99)  # row t has another token at t; the last row has none
  positions, end = np.tile(np.arange(T), (T + 1, 1)), np.full((T + 1, T), T)
  hidden = np.asarray(jax.jit(nnx.merge(*everything()).hidden)(tokens, positions, end))
  changed = np.abs(hidden[:T] - hidden[T]).max(-1)  # [changed token, position]
  assert np.all(changed[np.tril_indices(T, -1)] == 0)
  assert np.all(changed[np.triu_indices(T)] > 1e-3)


@settings(max_examples=15, deadline=None)
@given(st.lists(tiny.step_trees(), min_size=2, max_size=4))
def test_packed_equals_alone(examples):
  """Packed = alone: each step of a packed tree has the probabilities of its own chain."""
  graphdef, params = everything()
  packed = packing.PackedRows(list(map(encode, examples)), 256, round_reads_to=32)
  batch = packing.stack([packed[i] for i in range(len(packed))])
  together = np.asarray(log_probabilities(params, batch, graphdef))
  for tree, reads in zip(examples, packed.by_tree(together)):
    for read, chain in zip(reads, tiny.flatten(tree), strict=True):
      alone = log_probabilities(params, batch_of([encode(chain)]), graphdef)
      np.testing.assert_allclose(read, np.asarray(alone)[0, 0], **CLOSE)


def paths_of(tree: token_tree.TokenTree) -> list[token_tree.TokenTree]:
  """Returns chains of a tree, each with one read or language-model target, at its end."""
  chains = []
  for i in range(len(tree)):
    path = np.flatnonzero(tree.subtree_end[: i + 1] > i)
    reads = tree.read_positions == i
    alone = token_tree.chain(tree.tokens[path], reads=[len(path) - 1] * reads.sum())
    predicted = (np.arange(len(path)) == len(path) - 1) & (tree.previous[i] >= 0)
    previous = np.where(predicted, alone.previous, -1)
    targets = {name: getattr(tree, name)[reads] for name in ("read_targets", "read_solutions")}
    chains.append(dataclasses.replace(alone, previous=previous, **targets))
  return chains


@pytest.mark.parametrize(("model", "language_model_weight"), [(tiny.model, 0.0), (everything, 1.0)])
@settings(max_examples=10, deadline=None)
@given(st.lists(tiny.step_trees(), min_size=1, max_size=3))
def test_tree_equals_flattened(model, language_model_weight, solutions):
  """Tree = flattened: merged solutions have the loss and gradient of each step on its own chain.

  Trees of several solutions are cut into short rows.
  """
  graphdef, params = model()
  config = config_lib.Loss(language_model_weight=language_model_weight)
  same = [encode(dataclasses.replace(tree, problem="ab")) for tree in solutions]
  merged, _ = prefix_tree.merge(same)
  gradient, sums = loss_and_gradient(params, batch_of([merged], 32, 64, 32), config, graphdef)
  flat = batch_of(paths_of(merged), 32, 64, 32)
  expected, expected_sums = loss_and_gradient(params, flat, config, graphdef)
  for name in sums:
    np.testing.assert_allclose(sums[name], expected_sums[name], rtol=1e-5)
  for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
    # of the largest entry of each array: sums are made in another order
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max() + 1e-9)


def test_everything_sharded_equals_single():
  """Sharded = single: a model with every option gives the same on a mesh as on one device."""
  graphdef, params = everything()
  batch = batch_of([BRANCHES], 24, rows=4)
  expected = log_probabilities(params, batch, graphdef)
  mesh = sharding_lib.make_mesh(config_lib.Mesh(data=2, fsdp=2, tensor=2))
  abstract = decoder.abstract_params(EVERYTHING, tiny.TOKENIZER.vocab_size, 3, mesh)
  assert abstract["blocks"]["query_bias"].sharding.spec[1] == "tensor"
  with jax.set_mesh(mesh):
    placed = jax.device_put(params, sharding_lib.shardings(abstract))
    rows = jax.device_put(batch, sharding_lib.batch_sharding(mesh))
    got = log_probabilities(placed, rows, graphdef)
  np.testing.assert_allclose(got, expected, **CLOSE)


def test_garbage_in_padding_changes_nothing():
  """Other tokens, positions and reads in the padding do not change a bit of loss and gradient."""
  graphdef, params = everything()
  config = config_lib.Loss(language_model_weight=1.0)
  clean = batch_of([CHAIN], 32, 64, 32)
  padding = (jnp.arange(32) >= len(CHAIN)) | (jnp.arange(64) > 0)[:, None]
  dirty = dataclasses.replace(
    clean,
    tokens=jnp.where(padding, 77, clean.tokens),
    positions=jnp.where(padding, 5, clean.positions),
    read_positions=jnp.where(clean.read_targets.any(-1), clean.read_positions, 3),
  )
  assert np.any(clean.read_positions[0] != dirty.read_positions[0])
  results = (loss_and_gradient(params, batch, config, graphdef) for batch in (clean, dirty))
  jax.tree.map(np.testing.assert_array_equal, *results)


def test_step_losses_compute_no_vocabulary_logits():
  """A loss without a language-model term computes no array of `[B, T, V]`."""
  graphdef, params = tiny.model()
  batch = batch_of([CHAIN])

  def program(weight):
    config = config_lib.Loss(language_model_weight=weight)
    f = lambda p: loss_lib.sums(nnx.merge(graphdef, p), batch, config)
    return str(jax.make_jaxpr(f)(params))

  vocabulary_logits = f"f32[1,{ROW},{tiny.TOKENIZER.vocab_size}]"
  assert vocabulary_logits not in program(0.0)
  assert vocabulary_logits in program(1.0)


@pytest.mark.parametrize(
  ("platform", "dtype", "rounding"),
  [("cpu", jnp.bfloat16, 2**-8), ("tpu", jnp.float32, 1e-5)],  # the branches of the code
)
@pytest.mark.parametrize(
  ("inputs", "outputs"), [((24,), (36,)), ((24,), (6, 4)), ((6, 4), (24,)), ((6, 4), (5,))]
)
def test_products_round_their_exact_sums(platform, dtype, rounding, inputs, outputs, monkeypatch):
  """In bfloat16, sums and the weight's gradient are exact; the others are rounded once."""
  monkeypatch.setattr(attention, "platform", lambda: platform)
  draws = np.random.default_rng(0)
  rounded = lambda *size: np.asarray(draws.normal(size=size).astype(jnp.bfloat16), np.float64)
  x, weight, dy = rounded(40, *inputs), rounded(*inputs, *outputs), rounded(40, *outputs)
  product = lambda x, weight: products.weight_product(x, weight, "float32")
  y, backward = jax.vjp(product, jnp.asarray(x, dtype), jnp.asarray(weight, jnp.float32))
  dx, dw = backward(jnp.asarray(dy, dtype))
  assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)
  np.testing.assert_allclose(dw, np.tensordot(x, dy, (0, 0)), rtol=1e-5, atol=1e-5)
  backwards = np.moveaxis(weight, range(len(inputs)), range(-len(inputs), 0))
  for got, expected in (
    (y, np.tensordot(x, weight, len(inputs))),
    (dx, np.tensordot(dy, backwards, len(outputs))),
  ):
    np.testing.assert_allclose(np.asarray(got, float), expected, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize(
  ("platform", "tensor", "barriers", "constraints"),
  [("tpu", 1, 1, 1), ("tpu", 2, 1, 0), ("gpu", 1, 0, 0), ("cpu", 1, 0, 0)],
)
def test_layouts_are_constrained_on_tpus_over_fsdp(
  platform, tensor, barriers, constraints, monkeypatch
):
  """Elsewhere XLA would gather a gradient whose layout is constrained."""
  monkeypatch.setattr(attention, "platform", lambda: platform)
  square = lambda x, w: (products.weight_product(x, w, "float32") ** 2).sum()
  with jax.set_mesh(sharding_lib.make_mesh(config_lib.Mesh(tensor=tensor))):
    program = str(jax.make_jaxpr(jax.grad(square, (0, 1)))(jnp.ones((8, 4)), jnp.ones((4, 6))))
  assert program.count("optimization_barrier") == barriers
  assert program.count("layout_constraint") == constraints


CPU = pathlib.Path("/proc/cpuinfo")


@pytest.mark.skipif(
  not (CPU.exists() and "avx512_bf16" in CPU.read_text()),
  reason="no instructions for bfloat16 here",
)
def test_products_of_bfloat16_are_compiled_as_such():
  """XLA's CPU backend converts no factor of a product or of its gradients to float32 first."""
  square = lambda x, w: (products.weight_product(x, w, "float32").astype(jnp.float32) ** 2).sum()
  x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
  weight = jax.ShapeDtypeStruct((512, 384), jnp.float32)
  program, dtypes = jax.jit(jax.grad(square, (0, 1))).lower(x, weight).compile().as_text(), []
  for computation in program.split("\n\n"):
    for factors in re.findall(r" dot\((.*?)\)", computation):
      for name in re.findall(r"%([\w.]+)", factors):
        dtypes += re.findall(rf"\b{re.escape(name)} = (\w+)\[", computation)
  assert dtypes == ["bf16"] * 6


@pytest.mark.parametrize(
  ("change", "close"),
  [
    ({"unroll_layers": True}, CLOSE),
    ({"dtype": "bfloat16"}, {"atol": 0.3}),  # hidden states have 8 bits: about 1 %
  ],
)
def test_unrolled_and_bfloat16_layers_give_the_same_probabilities(change, close):
  """Options of speed and memory do not change probabilities, which are always float32."""
  _, params = tiny.model()
  batch = batch_of([CHAIN])
  graphdef = step_lib.graph(dataclasses.replace(tiny.MODEL, **change), tiny.TOKENIZER.vocab_size, 3)
  got = log_probabilities(params, batch, graphdef)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, log_probabilities(params, batch), **close)
