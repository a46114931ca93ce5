"""The properties of the whole model: causal, packed = alone, tree = flattened."""

import dataclasses
import functools

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
from prm_jax.model import attention as attention_lib
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib
from prm_jax.model.block_mask import TreeMask
from prm_jax.training import loss as loss_lib
from prm_jax.training import step as step_lib
from prm_jax.types import Batch, StepTree

ROW = 64
# float32 sums of a few hundred terms in another order
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def batch_of(token_trees, row_length=ROW, rows=None, reads=8) -> Batch:
  packed = packing.PackedRows(token_trees, row_length, round_reads_to=reads)
  (order,) = packing.eval_order(packed, rows or len(packed))
  return jax.tree.map(jnp.asarray, packing.stack([packed[i] for i in order]))


def chain(problem: str, steps: list[str], labels=None) -> StepTree:
  labels = labels or (1,) * len(steps)
  return StepTree(problem, tuple(steps), tuple(range(-1, len(steps) - 1)), tuple(labels))


# Every option that tells the public families apart.  The window is shorter than the paths.
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
  """(graph, random parameters) of a model with every option."""
  rng = np.random.default_rng(0)
  size = {"config": EVERYTHING, "vocab_size": tiny.TOKENIZER.vocab_size, "num_classes": 3}
  shapes = jax.eval_shape(functools.partial(step_lib.init_params, **size), jax.random.key(0))
  params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 3, x.dtype), shapes)
  params["embedding"] *= 3
  return step_lib.graph(*size.values()), params


@functools.partial(jax.jit, static_argnums=2)
def probabilities(params, batch, graphdef=None):
  return step_lib.read_log_probs(params, batch, graphdef=graphdef or tiny.model()[0])


@functools.partial(jax.jit, static_argnums=(2, 3))
def loss_and_gradient(params, batch, config, graphdef=None):
  """Summed losses and the gradient of their total, over a batch."""

  def objective(params):
    sums = loss_lib.sums(nnx.merge(graphdef or tiny.model()[0], params), batch, config)
    return sum(v for k, v in sums.items() if k != "correct"), sums

  return jax.grad(objective, has_aux=True)(params)


def test_attention_equals_a_plain_loop():
  """Softmax attention over exactly the tokens that the mask shows."""
  rng = np.random.default_rng(0)
  q, k, v = (rng.normal(size=(2, 7, n, 4)).astype(np.float32) for n in (4, 2, 2))
  end = np.array([[7, 3, 3, 7, 5, 7, 7], [1, 4, 4, 4, 5, 7, 7]], np.int32)
  got = attention_lib.attention(*map(jnp.asarray, (q, k, v)), TreeMask(jnp.asarray(end)))
  for b in range(2):
    for i in range(7):
      seen = [j for j in range(i + 1) if i < end[b, j]]
      for n in range(4):
        scores = np.array([q[b, i, n] @ k[b, j, n // 2] for j in seen]) / 2
        weights = np.exp(scores) / np.exp(scores).sum()
        expected = sum(w * v[b, j, n // 2] for w, j in zip(weights, seen))
        np.testing.assert_allclose(got[b, i, n], expected, rtol=1e-5, atol=1e-6)


def test_a_window_counts_depth_in_the_tree():
  """A token attends to the nearest of its own path, wherever in the row their branch stands."""
  # A trunk of three, a branch of four, and another that hangs off the trunk where the first does.
  positions = jnp.asarray([[0, 1, 2, 3, 4, 5, 6, 3, 4, 5]])
  end = jnp.asarray([[10, 10, 10, 7, 7, 7, 7, 10, 10, 10]])
  got = TreeMask(end, positions, 3).dense()[0]
  paths = {6: [4, 5, 6], 3: [1, 2, 3], 7: [1, 2, 7], 8: [2, 7, 8], 9: [7, 8, 9]}
  for token, seen in paths.items():
    assert np.flatnonzero(got[token]).tolist() == seen


def plain_block(block, x, positions, end):
  """A layer in float64 numpy, one token and one head at a time: `[T, D]` from one row."""
  c = block.config
  # fmt: off
  attention_scale, query, key, value, output, mlp_scale, gate, up, down = (
    np.asarray(w[...], np.float64)
    for w in (block.attention_norm, block.query, block.key, block.value, block.output,
              block.mlp_norm, block.gate, block.up, block.down)
  )
  # fmt: on
  half, group = c.head_size // 2, c.heads // c.kv_heads

  def norm(v, scale):
    return v / np.sqrt((v**2).mean() + c.norm_epsilon) * scale

  def turned(v, position):
    out = np.empty_like(v)
    for j in range(half):
      angle = position / c.rope_theta ** (j / half)
      out[j] = v[j] * np.cos(angle) - v[half + j] * np.sin(angle)
      out[half + j] = v[half + j] * np.cos(angle) + v[j] * np.sin(angle)
    return out

  after = []
  for i in range(len(x)):
    total = x[i].copy()
    seen = [j for j in range(i + 1) if i < end[j]]
    for n in range(c.heads):
      k = n // group
      q = turned(norm(x[i], attention_scale) @ query[:, n], positions[i])
      ys = [norm(x[j], attention_scale) for j in seen]
      keys = [turned(y @ key[:, k], positions[j]) for y, j in zip(ys, seen)]
      weights = np.exp([q @ other / np.sqrt(c.head_size) for other in keys])
      mixed = sum(w * (y @ value[:, k]) for w, y in zip(weights / weights.sum(), ys))
      total += mixed @ output[n]
    y = norm(total, mlp_scale)
    after.append(total + (y @ gate / (1 + np.exp(-y @ gate)) * (y @ up)) @ down)
  return np.array(after)


def test_a_layer_equals_plain_numpy():
  """A whole layer on a tree with branches: rotary angles by depth, norm scales, shared key heads,
  SwiGLU."""
  config = dataclasses.replace(tiny.MODEL, head_size=8, rope_theta=50.0, norm_epsilon=0.03)
  block = decoder.Block(config, nnx.Rngs(0))
  rng = np.random.default_rng(0)
  for scale in (block.attention_norm, block.mlp_norm):
    scale[...] = jnp.asarray(rng.uniform(0.3, 2, config.width), jnp.float32)
  tree = StepTree("ab", ("a", "b", "ca", "c"), (-1, -1, 1, 1), (-1, 1, 0, 1))
  batch = batch_of([token_tree.encode(tree, tiny.TOKENIZER, tiny.contract())], 24)
  assert np.any(np.diff(batch.positions[0]) < 0)  # a branch starts again higher up
  x = rng.normal(size=(24, config.width))
  run = jax.jit(lambda x: block(x, TreeMask(batch.subtree_end, batch.positions))[0])
  got = run(jnp.asarray(x[None], jnp.float32))
  positions, end = np.asarray(batch.positions[0]), np.asarray(batch.subtree_end[0])
  np.testing.assert_allclose(got, plain_block(block, x, positions, end), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", [tiny.model, everything])
def test_no_token_depends_on_a_later_one(model):
  """Causal: a changed token changes its own hidden state and later ones, and none before."""
  T = 12
  base = np.arange(T) % 7
  tokens = np.tile(base, (T + 1, 1))
  tokens[np.arange(T), np.arange(T)] = 99  # row t has another token at t; the last row has none
  positions, end = np.tile(np.arange(T), (T + 1, 1)), np.full((T + 1, T), T)
  hidden = np.asarray(jax.jit(nnx.merge(*model()).hidden)(tokens, positions, end))
  changed = np.abs(hidden[:T] - hidden[T]).max(-1)  # [changed token, position]
  assert np.all(changed[np.tril_indices(T, -1)] == 0)
  assert np.all(changed[np.triu_indices(T)] > 1e-3)


@pytest.mark.parametrize("model", [tiny.model, everything])
@settings(max_examples=15, deadline=None)
@given(st.lists(tiny.step_trees(), min_size=2, max_size=4))
def test_packed_equals_alone(model, examples):
  """Packed = alone: a solution's probabilities do not depend on the rest of its row."""
  graphdef, params = model()
  encoded = [token_tree.encode(t, tiny.TOKENIZER, tiny.contract()) for t in examples]
  packed = packing.PackedRows(encoded, 256, round_reads_to=32)
  batch = packing.stack([packed[i] for i in range(len(packed))])
  together = np.asarray(probabilities(params, batch, graphdef))
  for tree, reads in zip(encoded, packed.by_tree(together)):
    alone = probabilities(params, batch_of([tree], 64), graphdef)
    np.testing.assert_allclose(reads, np.asarray(alone)[0, : len(reads)], **CLOSE)


@pytest.mark.parametrize(
  ("model", "language_model_weight"), [(tiny.model, 0.0), (tiny.model, 1.0), (everything, 1.0)]
)
def test_tree_equals_flattened(model, language_model_weight):
  """Loss and gradient of a tree are those of its labelled steps, each at the end of its chain."""
  graphdef, params = model()
  config = config_lib.Loss(language_model_weight=language_model_weight)
  tree = StepTree(
    problem="ab",
    steps=("a", "bb", "c", "ab", "cc", "a", "b"),
    parents=(-1, -1, 1, 1, 1, 4, 4),
    labels=(-1, 1, 0, -1, 1, 1, -1),
  )
  whole = token_tree.encode(tree, tiny.TOKENIZER, tiny.contract())
  chains = [token_tree.encode(c, tiny.TOKENIZER, tiny.contract()) for c in tiny.flatten(tree)]
  if language_model_weight:  # each token is predicted once: from its own step's chain
    last = [len(tiny.TOKENIZER.encode(step)) + 1 for step in tree.steps]
    chains = [
      dataclasses.replace(
        c, previous=np.where(np.arange(len(c)) >= len(c) - n, c.previous, -1).astype(np.int32)
      )
      for c, n in zip(chains, last)
    ]
  # As many rows of both, so that they are one program.
  gradient, sums = loss_and_gradient(params, batch_of([whole], 32, 8), config, graphdef)
  expected, expected_sums = loss_and_gradient(params, batch_of(chains, 32, 8), config, graphdef)
  for name in sums:
    np.testing.assert_allclose(sums[name], expected_sums[name], rtol=1e-5)
  assert_gradients_equal(gradient, expected)


def assert_gradients_equal(gradient, expected):
  """To 1e-5 of the largest entry of each array: sums are made in another order."""
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max() + 1e-9),
    gradient,
    expected,
  )


def paths_of(tree: token_tree.TokenTree) -> list[token_tree.TokenTree]:
  """Each read and each language-model target of a tree, alone at the end of its own chain."""
  chains = []
  for i in range(len(tree)):
    path = np.flatnonzero(tree.subtree_end[: i + 1] > i)
    alone = token_tree.chain(tree.tokens[path], first=i if tree.previous[i] < 0 else len(path) - 1)
    if tree.previous[i] < 0:
      alone = dataclasses.replace(alone, previous=np.full_like(alone.previous, -1))
    reads = tree.read_positions == i
    chains.append(
      dataclasses.replace(
        alone,
        read_positions=np.full(reads.sum(), len(path) - 1, np.int32),
        read_targets=tree.read_targets[reads],
      )
    )
  return chains


@pytest.mark.parametrize("model", [tiny.model, everything])
@settings(max_examples=10, deadline=None)
@given(st.lists(tiny.step_trees(), min_size=2, max_size=3))
def test_merged_and_cut_trees_equal_flattened(model, solutions):
  """Tree = flattened for merged solutions whose tree is cut into short rows: loss and gradient are
  those of the distinct steps and tokens, each on its own chain."""
  graphdef, params = model()
  config = config_lib.Loss(language_model_weight=1.0)
  encoded = [
    token_tree.encode(dataclasses.replace(t, problem="ab"), tiny.TOKENIZER, tiny.contract())
    for t in solutions
  ]
  merged, _ = prefix_tree.merge(encoded)
  gradient, sums = loss_and_gradient(params, batch_of([merged], 32, 64, 32), config, graphdef)
  flat = batch_of(paths_of(merged), 32, 64, 32)
  expected, expected_sums = loss_and_gradient(params, flat, config, graphdef)
  for name in sums:
    np.testing.assert_allclose(sums[name], expected_sums[name], rtol=1e-5)
  assert_gradients_equal(gradient, expected)


def test_everything_sharded_equals_single():
  """Sharded = single for a model with every option, over rows, width and heads."""
  graphdef, params = everything()
  tree = StepTree("ab", ("a", "b", "ca", "c"), (-1, -1, 1, 1), (-1, 1, 0, 1))
  batch = batch_of([token_tree.encode(tree, tiny.TOKENIZER, tiny.contract())], 24, rows=4)
  expected = step_lib.read_log_probs(params, batch, graphdef=graphdef)
  mesh = sharding_lib.make_mesh(config_lib.Mesh(data=2, fsdp=2, tensor=2))
  abstract = sharding_lib.abstract_params(EVERYTHING, tiny.TOKENIZER.vocab_size, 3, mesh)
  assert abstract["blocks"]["query_bias"].sharding.spec[1] == "tensor"
  with jax.set_mesh(mesh):
    placed = jax.device_put(params, sharding_lib.shardings(abstract))
    rows = jax.device_put(batch, sharding_lib.batch_sharding(mesh))
    got = probabilities(placed, rows, graphdef)
  np.testing.assert_allclose(got, expected, **CLOSE)


@settings(max_examples=15, deadline=None)
@given(tiny.step_trees())
def test_random_trees_equal_their_chains(tree):
  """Siblings do not attend to each other: every read of a tree is that of its own chain."""
  _, params = tiny.model()
  whole = token_tree.encode(tree, tiny.TOKENIZER, tiny.contract())
  chains = [token_tree.encode(c, tiny.TOKENIZER, tiny.contract()) for c in tiny.flatten(tree)]
  together = np.asarray(probabilities(params, batch_of([whole])))[0]
  for i, c in enumerate(chains):
    alone = np.asarray(probabilities(params, batch_of([c])))[0, 0]
    np.testing.assert_allclose(together[i], alone, **CLOSE)


def test_garbage_in_padding_changes_nothing():
  """Other tokens, positions and reads in the padding leave loss and gradient bit for bit."""
  _, params = tiny.model()
  config = config_lib.Loss(language_model_weight=1.0)
  encoded = token_tree.encode(chain("ab", ["a", "b"]), tiny.TOKENIZER, tiny.contract())
  clean = batch_of([encoded], rows=2)
  padding = (jnp.arange(ROW) >= len(encoded)) | (jnp.arange(2) > 0)[:, None]
  dirty = dataclasses.replace(
    clean,
    tokens=jnp.where(padding, 77, clean.tokens),
    positions=jnp.where(padding, 5, clean.positions),
    read_positions=jnp.where(clean.read_targets < 0, 3, clean.read_positions),
  )
  assert np.any(clean.read_positions[0] != dirty.read_positions[0])
  for a, b in zip(
    jax.tree.leaves(loss_and_gradient(params, clean, config)),
    jax.tree.leaves(loss_and_gradient(params, dirty, config)),
  ):
    np.testing.assert_array_equal(a, b)


def test_without_language_model_loss_no_vocabulary_logits_exist():
  """A training step without a language-model loss never makes `[B, T, V]`."""
  graphdef, params = tiny.model()
  batch = batch_of([token_tree.encode(chain("ab", ["a"]), tiny.TOKENIZER, tiny.contract())])

  def text(weight):
    config = config_lib.Loss(language_model_weight=weight)
    f = lambda p: loss_lib.sums(nnx.merge(graphdef, p), batch, config)
    return str(jax.make_jaxpr(f)(params))

  vocabulary_logits = f"f32[1,{ROW},{tiny.TOKENIZER.vocab_size}]"
  assert vocabulary_logits not in text(0.0)
  assert vocabulary_logits in text(1.0)


@pytest.mark.parametrize("change", [{"remat": "full"}, {"unroll_layers": True}])
def test_ways_to_run_the_layers_agree(change):
  """Rematerialisation and unrolling change speed and memory, not numbers."""
  _, params = tiny.model()
  batch = batch_of([token_tree.encode(chain("ab", ["a", "b"]), tiny.TOKENIZER, tiny.contract())])
  graphdef = step_lib.graph(dataclasses.replace(tiny.MODEL, **change), tiny.TOKENIZER.vocab_size, 3)
  got = step_lib.read_log_probs(params, batch, graphdef=graphdef)
  np.testing.assert_allclose(got, probabilities(params, batch), **CLOSE)


def test_bfloat16_activations_keep_float32_heads():
  """bf16 rounds hidden states (8 bits: about 1 %), not the probabilities read from them."""
  _, params = tiny.model()
  batch = batch_of([token_tree.encode(chain("ab", ["a", "b"]), tiny.TOKENIZER, tiny.contract())])
  bf16 = dataclasses.replace(tiny.MODEL, dtype="bfloat16")
  got = step_lib.read_log_probs(
    params, batch, graphdef=step_lib.graph(bf16, tiny.TOKENIZER.vocab_size, 3)
  )
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, probabilities(params, batch), atol=0.3)
