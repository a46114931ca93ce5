"""Whatever form attention takes, it is the rule of `visible` under one softmax."""

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
from prm_jax.model import attention as attention_lib
from prm_jax.model import block_mask, blockwise, tree_kernel
from prm_jax.model import sharding as sharding_lib
from prm_jax.training import loss as loss_lib
from prm_jax.training import step as step_lib
from prm_jax.types import Batch

HEADS = ((2, 2), (4, 1), (6, 3))  # of queries, of keys


def packed_trees(rng, rows: int, T: int):
  """`subtree_end` and `positions` of rows of random trees: chains that branch, and padding."""
  ends, depths = np.zeros((rows, T), np.int32), np.zeros((rows, T), np.int32)
  for row in range(rows):
    start = 0
    while start < T:
      size = min(int(rng.integers(1, 200)), T - start)
      parent = np.arange(size) - 1
      for branch in rng.integers(1, max(size, 2), 3):
        if branch < size:  # hangs off an earlier token of its own path
          path = [branch - 1]
          while parent[path[-1]] >= 0:
            path.append(parent[path[-1]])
          parent[branch] = rng.choice(path)
      end = np.arange(size) + 1
      for i in range(size - 1, 0, -1):
        end[parent[i]] = max(end[parent[i]], end[i])
      for i in range(size):
        depths[row, start + i] = 0 if i == 0 else depths[row, start + parent[i]] + 1
      ends[row, start : start + size] = end + start
      start += size
  return jnp.asarray(ends), jnp.asarray(depths)


def reference(q, k, v, end, positions, window, softcap):
  """One softmax over all keys, of float32 arrays."""
  k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
  scores = jnp.einsum("BQNH,BSNH->BNQS", q, k) * q.shape[-1] ** -0.5
  scores = attention_lib.soft_cap(scores, softcap)
  seen = attention_lib.visible(end, positions, window)[:, None]
  weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
  return jnp.einsum("BNQS,BSNH->BQNH", weights, v)


def value_and_gradients(attend, q, k, v):
  def loss(q, k, v):
    out = attend(q, k, v).astype(jnp.float32)
    return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

  (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
  return out, *gradients


def inputs(rng, rows, T, heads, size=8, dtype=jnp.float32):
  N, K = heads
  return [jnp.asarray(rng.normal(size=(rows, T, n, size)), dtype) for n in (N, K, K)]


BLOCKS = st.sampled_from([(8, 8), (8, 24), (24, 8), (4, 48), (48, 48)])  # of queries, of keys


@st.composite
def packed_rows(draw, T: int = 48):
  """`subtree_end` and `positions` `[2, T]` of random trees, each row with padding at its end."""
  ends, depths = np.empty((2, T), np.int32), np.zeros((2, T), np.int32)
  for end, depth in zip(ends, depths):
    end[:] = np.arange(T) + 1
    path = []
    for i in range(draw(st.integers(0, T))):
      path = path[: max(0, len(path) - draw(st.sampled_from([0, 0, 0, 0, 0, 1, 2, 9, T])))]
      depth[i] = len(path)
      path.append(i)
      end[path] = i + 1
  return jnp.asarray(ends), jnp.asarray(depths)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize(
  ("T", "heads", "window", "softcap"),
  [(512, HEADS[0], None, 0.0), (512, HEADS[1], 60, 2.0), (330, HEADS[2], 60, 0.0)],
)
def test_every_form_is_one_softmax(implementation, T, heads, window, softcap):
  """Values and all gradients, on random trees, in rows that end within a block too."""
  rng = np.random.default_rng(0)
  end, positions = packed_trees(rng, 2, T)
  q, k, v = inputs(rng, 2, T, heads)
  rule = (end, positions, window)
  wanted = value_and_gradients(
    lambda *x: reference(*x, *rule, softcap), q, k, v
  )  # float32 sums in another order: 1e-5
  got = value_and_gradients(
    lambda *x: attention_lib.attention(*x, *rule, None, softcap, implementation), q, k, v
  )
  for a, b in zip(got, wanted):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(packed_rows(), st.sampled_from([None, 4]), st.sampled_from([8, 24]))
def test_blocks_of_random_trees_equal_one_softmax(rows, window, size):
  """Rows of other trees in a batch, each with padding: values and gradients."""
  q, k, v = inputs(np.random.default_rng(0), *rows[0].shape, HEADS[2])
  for a, b in zip(by_blocks(q, k, v, *rows, window, size), at_once(q, k, v, *rows, window)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@functools.partial(jax.jit, static_argnums=5)
def at_once(q, k, v, end, positions, window):
  return value_and_gradients(lambda *x: reference(*x, end, positions, window, 0.0), q, k, v)


@functools.partial(jax.jit, static_argnums=(5, 6))
def by_blocks(q, k, v, end, positions, window, size):
  def attend(q, k, v):
    B, T, N, H = q.shape
    q = q.reshape(B, T, k.shape[2], -1, H).transpose(0, 2, 3, 1, 4) * H**-0.5
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    out = blockwise.attention(q, k, v, end, positions, window, 0.0, size=size)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)

  return value_and_gradients(attend, q, k, v)


def test_blocks_in_bfloat16_are_as_near_as_dense_ones():
  """Weights are rounded to 8 bits either way; sums are float32."""
  rng = np.random.default_rng(1)
  end, positions = packed_trees(rng, 1, 512)
  q, k, v = inputs(rng, 1, 512, HEADS[1], dtype=jnp.bfloat16)
  exact = reference(*(x.astype(jnp.float32) for x in (q, k, v)), end, positions, None, 0.0)
  got = jax.jit(attention_lib.attention)(q, k, v, end, positions)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(got, np.float32), exact, atol=0.02)


@pytest.mark.parametrize("form", ["blockwise", "kernel"])
@pytest.mark.parametrize(
  ("rows", "heads", "axes", "window"),
  [
    (4, (2, 2), {"fsdp": 4, "tensor": 2}, 90),
    (4, (8, 2), {"data": 2, "tensor": 4}, None),  # each head of keys goes to two devices
    (2, (12, 6), {"data": 2, "tensor": 4}, None),  # 12 of them on 4 devices
    (3, (3, 1), {"fsdp": 4, "tensor": 2}, None),  # nothing to split evenly: all do everything
  ],
)
def test_many_devices_equal_one(form, rows, heads, axes, window, monkeypatch):
  """Values and gradients, wherever rows and heads are."""
  if form == "kernel":
    pretend_tpu(monkeypatch)
  rng = np.random.default_rng(2)
  end, positions = packed_trees(rng, rows, 256)
  q, k, v = inputs(rng, rows, 256, heads)
  attend = functools.partial(
    attention_lib.attention,
    subtree_end=end,
    positions=positions,
    window=window,
    implementation=form,
  )
  wanted = value_and_gradients(lambda *x: reference(*x, end, positions, window, 0.0), q, k, v)
  mesh = sharding_lib.make_mesh(config_lib.Mesh(**{"fsdp": 1} | axes))
  with jax.set_mesh(mesh):
    got = value_and_gradients(attend, q, k, v)
  for a, b in zip(got, wanted):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def pretend_tpu(monkeypatch):
  """The kernel, interpreted, as if the devices were TPUs."""
  kernel = functools.partial(tree_kernel.attention, interpret=True)
  monkeypatch.setattr(tree_kernel, "attention", kernel)
  monkeypatch.setattr(attention_lib, "_platform", lambda: "tpu")


def test_each_platform_has_its_form(monkeypatch):
  """Rows of any length come to the kernel on a TPU; elsewhere to ask for it is a mistake."""
  rng = np.random.default_rng(4)
  end, positions = packed_trees(rng, 1, 130)
  q, k, v = inputs(rng, 1, 130, HEADS[1])
  with pytest.raises(ValueError, match=r'"kernel" is for TPUs, and the devices .* platform cpu'):
    attention_lib.attention(q, k, v, end, implementation="kernel")
  pretend_tpu(monkeypatch)
  got = jax.jit(attention_lib.attention)(q, k, v, end, positions, 40)
  np.testing.assert_allclose(got, reference(q, k, v, end, positions, 40, 0.0), atol=1e-5)
  program = jax.make_jaxpr(attention_lib.attention)
  assert "pallas_call" in str(program(q, k, v, end))
  assert "pallas_call" not in str(program(*(x[:, :100] for x in (q, k, v, end))))


def long_tree(trunk: int, branch: int, branches: int) -> tuple[Batch, Batch]:
  """A row with one tree that is read at the end of each branch, and its paths, a row each."""
  rng = np.random.default_rng(3)
  T = trunk + branch * branches
  tokens = rng.integers(0, tiny.TOKENIZER.vocab_size, T)
  targets = rng.integers(0, 3, branches)
  place = np.arange(T)
  end = np.where(place < trunk, T, place + branch - (place - trunk) % branch)
  depth = np.where(place < trunk, place, trunk + (place - trunk) % branch)
  paths = np.array([
    [*range(trunk), *range(start, start + branch)] for start in range(trunk, T, branch)
  ])  # fmt: skip
  length = paths.shape[1]

  def rows(tokens, positions, end, reads, targets):
    values = (tokens, positions, end, np.full_like(tokens, -1), reads, targets)
    return Batch(*(jnp.asarray(x, jnp.int32) for x in values))

  tree = rows(*(x[None] for x in (tokens, depth, end, paths[:, -1], targets)))
  alone = rows(
    tokens[paths],
    np.tile(np.arange(length), (branches, 1)),
    np.full((branches, length), length),
    np.full((branches, 1), length - 1),
    targets[:, None],
  )
  return tree, alone


def gradient(params, batch, implementation="auto"):
  """Of the whole model's loss on long rows."""
  model = dataclasses.replace(tiny.MODEL, attention=implementation)
  graph = step_lib.graph(model, tiny.TOKENIZER.vocab_size, 3)

  def loss(params):
    return loss_lib.sums(nnx.merge(graph, params), batch, config_lib.Loss())["step"]

  return jax.value_and_grad(loss)(params)


def test_a_row_of_8200_tokens_trains_as_its_paths_do():
  """Loss and every gradient of a tree with branches of 1,000 tokens, on this machine."""
  tree, alone = long_tree(200, 1000, 8)
  params = tiny.model()[1]
  loss, got = jax.jit(gradient)(params, tree)
  wanted_loss, wanted = jax.jit(gradient)(params, alone)
  np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
    np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("branch", [1024, 1025])
def test_long_rows_make_no_array_of_tokens_by_tokens(branch):
  """The gradient of the whole model, of 8,192 tokens and of a length that no block divides."""
  tree, _ = long_tree(0, branch, 8)
  T = tree.tokens.shape[1]
  program = jax.make_jaxpr(gradient)(tiny.model()[1], tree)
  assert max(array.size for array in arrays(program.jaxpr)) < T * T / 16
  dense = jax.make_jaxpr(functools.partial(gradient, implementation="dense"))
  assert max(array.size for array in arrays(dense(tiny.model()[1], tree).jaxpr)) >= T * T


def arrays(program):
  """Shapes of all that a jaxpr computes, in loops and calls too."""
  for equation in program.eqns:
    yield from (result.aval for result in equation.outvars)
    for value in jax.tree.leaves(list(equation.params.values())):
      if inner := getattr(value, "jaxpr", value if hasattr(value, "eqns") else None):
        yield from arrays(inner)


@settings(deadline=None, max_examples=50)
@given(packed_rows(), BLOCKS, st.sampled_from([None, 1, 3, 9, 40]))
def test_live_blocks_are_those_in_which_a_token_is_seen(rows, sizes, window):
  """All of them always; without a window no others."""
  end, positions = rows
  (B, T), (queries, keys) = end.shape, sizes
  seen = np.asarray(attention_lib.visible(end, positions, window))
  wanted = seen.reshape(B, T // queries, queries, T // keys, keys).any((2, 4))
  live = np.asarray(block_mask.live(end, positions, window, queries, keys))
  assert live[wanted].all()
  if window is None:
    assert (live == wanted).all()
  order, count = block_mask.listed(jnp.asarray(live))
  assert order.dtype == count.dtype == jnp.int32 and order.shape == live.shape
  for at in np.ndindex(count.shape):
    blocks = np.flatnonzero(live[at]).tolist()
    tail = [blocks[-1]] * (live.shape[-1] - len(blocks))  # repeats the last: nothing to fetch
    assert count[at] == len(blocks) and order[at].tolist() == blocks + tail


@pytest.mark.parametrize("window", [1, 17, 64, 100])
def test_live_blocks_of_a_chain_are_those_in_the_window(window):
  """What has slid out of the window is skipped as what has ended is."""
  T = 256
  end, positions = jnp.full((1, T), T), jnp.arange(T)[None]
  seen = np.asarray(attention_lib.visible(end, positions, window))
  wanted = seen.reshape(T // 32, 32, T // 16, 16).any((1, 3))
  assert (block_mask.live(end, positions, window, 32, 16)[0] == wanted).all()


def test_finished_siblings_are_not_live():
  """Between a trunk and its last branch lies what only other branches see."""
  trunk, branch, branches = 8, 16, 5
  T = trunk + branch * branches
  end = np.full(T, T)
  end[trunk:] = np.repeat(trunk + branch * np.arange(1, branches + 1), branch)
  order, count = block_mask.listed(block_mask.live(jnp.asarray(end)[None], None, None, 8, 8))
  assert order[0, -1, :3].tolist() == [0, 9, 10] and count[0, -1] == 3
