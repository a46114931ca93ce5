"""Every implementation of attention is one softmax under the tree mask."""

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
from prm_jax.model.block_mask import TreeMask
from prm_jax.training import loss as loss_lib
from prm_jax.training import step as step_lib
from prm_jax.types import Batch

HEADS = ((2, 2), (4, 1), (6, 3))  # of queries, of keys


def random_trees(rng, T: int, branching: float = 0.03) -> list[int]:
  """Returns the parents of random trees in preorder, -1 for a root; few tokens start a branch."""
  parents, path = [], []
  for i in range(T):
    if rng.random() < branching:
      path = path[: rng.integers(len(path) + 1)]
    parents.append(path[-1] if path else -1)
    path.append(i)
  return parents


def tree_mask(*rows, window: int | None = None) -> TreeMask:
  """Returns the mask of rows of trees, each given by the parents of its tokens."""
  ends = np.tile(np.arange(1, len(rows[0]) + 1, dtype=np.int32), (len(rows), 1))
  depths = np.zeros_like(ends)
  for parents, end, depth in zip(rows, ends, depths):
    for i, parent in enumerate(parents):
      depth[i] = depth[parent] + 1 if parent >= 0 else 0
    for i in reversed(np.flatnonzero(np.asarray(parents) >= 0)):
      end[parents[i]] = max(end[parents[i]], end[i])
  return TreeMask(jnp.asarray(ends), jnp.asarray(depths), window)


def random_mask(rng, rows: int, T: int, window: int | None = None) -> TreeMask:
  """Returns the mask of rows of random trees."""
  return tree_mask(*(random_trees(rng, T) for _ in range(rows)), window=window)


def reference(q, k, v, mask, softcap=0.0):
  """Returns attention by one softmax over all keys, from float32 arrays."""
  k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
  scores = jnp.einsum("BQNH,BSNH->BNQS", q, k) * q.shape[-1] ** -0.5
  scores = attention_lib.soft_cap(scores, softcap)
  weights = jax.nn.softmax(jnp.where(mask.dense()[:, None], scores, -jnp.inf), axis=-1)
  return jnp.einsum("BNQS,BSNH->BQNH", weights, v)


def by_tokens(attend, q, k, v, mask, softcap=0.0):
  """Returns the result for `[B, T, N, H]` of `attend`, which takes scaled `[B, K, G, T, H]`."""
  B, T, N, H = q.shape
  q = q.reshape(B, T, k.shape[2], -1, H).transpose(0, 2, 3, 1, 4) * H**-0.5
  k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
  return attend(q, k, v, mask, softcap).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


@functools.partial(jax.jit, static_argnums=(0, 5))
def value_and_gradients(attend, q, k, v, mask, softcap=0.0):
  """Returns the output and the gradients of q, k and v, for a fixed gradient of the output."""

  def loss(q, k, v):
    out = attend(q, k, v, mask, softcap=softcap).astype(jnp.float32)
    return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

  (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
  return out, *gradients


def assert_equals_reference(attend, x, mask, softcap=0.0):
  """Compares values and gradients with `reference`, to 1e-5 of the largest or of 1.

  Sums of float32 are in another order, and a gradient of 0 may be the difference of two of them.
  """
  got = value_and_gradients(attend, *x, mask, softcap)
  wanted = value_and_gradients(reference, *x, mask, softcap)
  for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), 1), err_msg=name)


def inputs(seed, rows, T, heads, size=8, dtype=jnp.float32):
  """Returns random queries, keys and values."""
  rng, (N, K) = np.random.default_rng(seed), heads
  return [jnp.asarray(rng.normal(size=(rows, T, n, size)), dtype) for n in (N, K, K)]


@st.composite
def packed_rows(draw, T: int = 48) -> TreeMask:
  """Draws the mask of two rows of random trees, each with padding at its end."""
  rows = np.full((2, T), -1)
  for parents in rows:
    path = []
    for i in range(draw(st.integers(0, T))):
      path = path[: max(0, len(path) - draw(st.sampled_from([0, 0, 0, 0, 0, 1, 2, 9, T])))]
      parents[i] = path[-1] if path else -1
      path.append(i)
  return tree_mask(*rows)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize(
  ("T", "heads", "window", "softcap"),
  [(512, HEADS[0], None, 0.0), (512, HEADS[1], 60, 2.0), (330, HEADS[2], 60, 0.0)],
)
def test_implementations_equal_one_softmax(implementation, T, heads, window, softcap):
  """Each implementation has the values and gradients of one softmax, also in padded rows."""
  mask = random_mask(np.random.default_rng(0), 2, T, window)
  attend = functools.partial(attention_lib.attention, implementation=implementation)
  assert_equals_reference(attend, inputs(0, 2, T, heads), mask, softcap)


@pytest.mark.parametrize("T", [1, 16, 64])
def test_rows_of_one_block_train_in_bfloat16(T):
  """Blockwise attention of a row that is not longer than a block has gradients in bfloat16 too."""
  mask = random_mask(np.random.default_rng(0), 2, T, None)
  attend = functools.partial(attention_lib.attention, implementation="blockwise")
  x = inputs(0, 2, T, HEADS[0], dtype=jnp.bfloat16)
  got = value_and_gradients(attend, *x, mask)
  wanted = value_and_gradients(reference, *(each.astype(jnp.float32) for each in x), mask)
  for a, b in zip(got, wanted):
    np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.05 * max(np.abs(b).max(), 1))


BLOCKWISE = {
  block: functools.partial(by_tokens, functools.partial(blockwise.attention, block=block))
  for block in (8, 24)
}


@settings(deadline=None, max_examples=20)
@given(packed_rows(), st.sampled_from([(None, 8), (4, 24)]))
def test_blockwise_equals_one_softmax_on_any_trees(mask, choice):
  """Blockwise attention has the values and gradients of one softmax for any trees and padding."""
  window, block = choice
  mask = dataclasses.replace(mask, window=window)
  assert_equals_reference(BLOCKWISE[block], inputs(0, 2, 48, HEADS[2]), mask)


@pytest.mark.parametrize(
  ("implementation", "rows", "heads", "axes", "window"),
  [
    ("kernel", 4, (2, 2), {"fsdp": 4, "tensor": 2}, 90),
    ("blockwise", 4, (2, 2), {"fsdp": 4, "tensor": 2}, 90),
    # each of 2 key heads goes to 2 of 4 devices
    ("kernel", 4, (8, 2), {"data": 2, "tensor": 4}, None),
    # 6 key heads, as 12, on 4 devices
    ("blockwise", 2, (12, 6), {"data": 2, "tensor": 4}, None),
    # nothing divides: every device computes everything
    ("kernel", 3, (3, 1), {"fsdp": 4, "tensor": 2}, None),
  ],
)
def test_sharded_equals_single(implementation, rows, heads, axes, window, monkeypatch):
  """Values and gradients do not depend on how rows and heads are split over devices.

  The split does not depend on the implementation, so each case has one of the two.
  """
  if implementation == "kernel":
    pretend_tpu(monkeypatch)
  mask = random_mask(np.random.default_rng(2), rows, 256, window)
  attend = functools.partial(attention_lib.attention, implementation=implementation)
  with jax.set_mesh(sharding_lib.make_mesh(config_lib.Mesh(**{"fsdp": 1} | axes))):
    assert_equals_reference(attend, inputs(2, rows, 256, heads), mask)


def pretend_tpu(monkeypatch):
  """Makes attention interpret the kernel, as if the devices were TPUs."""
  kernel = functools.partial(tree_kernel.attention, interpret=True)
  monkeypatch.setattr(tree_kernel, "attention", kernel)
  monkeypatch.setattr(attention_lib, "platform", lambda: "tpu")


def test_each_platform_has_its_implementation(monkeypatch):
  """TPUs run the kernel on all but short rows; on other devices, asking for it is an error."""
  mask, (q, k, v) = random_mask(np.random.default_rng(4), 1, 130, 40), inputs(4, 1, 130, HEADS[1])
  with pytest.raises(ValueError, match=r'"kernel" needs TPUs, but the platform is cpu'):
    attention_lib.attention(q, k, v, mask, implementation="kernel")
  pretend_tpu(monkeypatch)
  got = jax.jit(attention_lib.attention)(q, k, v, mask)
  np.testing.assert_allclose(got, reference(q, k, v, mask), atol=1e-5)
  program = jax.make_jaxpr(attention_lib.attention)
  assert "pallas_call" in str(program(q, k, v, mask))
  short = jax.tree.map(lambda x: x[:, :100], (q, k, v, TreeMask(mask.subtree_end)))
  assert "pallas_call" not in str(program(*short))


def long_tree(trunk: int, branch: int, branches: int) -> tuple[Batch, Batch]:
  """Returns a row with one tree that is read at the end of each branch, and a row per path."""
  rng = np.random.default_rng(3)
  T, length = trunk + branch * branches, trunk + branch
  tokens = rng.integers(0, tiny.TOKENIZER.vocab_size, T)
  targets = rng.integers(0, 3, branches)
  place = np.arange(T)
  end = np.where(place < trunk, T, place + branch - (place - trunk) % branch)
  depth = np.where(place < trunk, place, trunk + (place - trunk) % branch)
  starts = np.arange(trunk, T, branch)[:, None]
  paths = np.where(place < trunk, place, place - trunk + starts)[:, :length]

  def rows(tokens, positions, end, reads, targets):
    values = (tokens, positions, end, np.full_like(tokens, -1), reads)
    values = [jnp.asarray(np.atleast_2d(x), jnp.int32) for x in values]
    one_hot = jnp.eye(3)[jnp.atleast_2d(targets)]
    return Batch(*values, one_hot, jnp.zeros_like(values[-1]))

  tree = rows(tokens, depth, end, paths[:, -1], targets)
  full = np.full_like(paths, length)
  return tree, rows(tokens[paths], depth[paths], full, full[:, :1] - 1, targets[:, None])


def gradient(params, batch, implementation="auto"):
  """Returns the loss of the whole model and its gradient."""
  model = dataclasses.replace(tiny.MODEL, attention=implementation)
  graph = step_lib.graph(model, tiny.TOKENIZER.vocab_size, 3)

  def loss(params):
    return loss_lib.sums(nnx.merge(graph, params), batch, config_lib.Loss())["step"]

  return jax.value_and_grad(loss)(params)


@pytest.mark.slow
def test_a_row_of_8200_tokens_trains_as_its_paths_do():
  """A tree with branches of 1,000 tokens has the loss and gradient of its paths."""
  tree, alone = long_tree(200, 1000, 8)
  params = tiny.model()[1]
  loss, got = jax.jit(gradient)(params, tree)
  wanted_loss, wanted = jax.jit(gradient)(params, alone)
  np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
    np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("branch", [1024, 1025])
def test_long_rows_make_no_array_of_tokens_by_tokens(branch):
  """No array of the gradient grows with the square of the row, also if no block divides it."""
  tree, _ = long_tree(0, branch, 8)
  T = tree.tokens.shape[1]
  program = jax.make_jaxpr(gradient)(tiny.model()[1], tree)
  assert max(array.size for array in arrays(program.jaxpr)) < T * T / 16
  dense = jax.make_jaxpr(functools.partial(gradient, implementation="dense"))
  assert max(array.size for array in arrays(dense(tiny.model()[1], tree).jaxpr)) >= T * T


def arrays(program):
  """Yields all arrays that a jaxpr computes, in loops and calls too."""
  for equation in program.eqns:
    yield from (result.aval for result in equation.outvars)
    for value in jax.tree.leaves(list(equation.params.values())):
      if inner := getattr(value, "jaxpr", value if hasattr(value, "eqns") else None):
        yield from arrays(inner)


active_blocks = jax.jit(block_mask.active_blocks, static_argnums=(1, 2))
active_indices = jax.jit(block_mask.active_indices)
dense = jax.jit(TreeMask.dense)
BLOCKS = st.sampled_from([(8, 8), (8, 24), (24, 8), (4, 48), (48, 48)])  # of queries, of keys


@settings(deadline=None, max_examples=50)
@given(packed_rows(), BLOCKS, st.sampled_from([None, 1, 3, 9, 40]))
def test_active_blocks_hold_all_pairs_that_attend(mask, blocks, window):
  """No block with a visible pair is skipped, and without a window no other block is visited."""
  mask, (block_q, block_kv) = dataclasses.replace(mask, window=window), blocks
  B, T = mask.subtree_end.shape
  wanted = np.asarray(dense(mask)).reshape(B, T // block_q, block_q, T // block_kv, block_kv)
  wanted = wanted.any((2, 4))
  active = np.asarray(active_blocks(mask, block_q, block_kv))
  assert active[wanted].all()
  if window is None:
    assert (active == wanted).all()
  indices, count = active_indices(active)
  indices, count = np.asarray(indices), np.asarray(count)
  assert indices.dtype == count.dtype == np.int32 and indices.shape == active.shape
  for at in np.ndindex(count.shape):
    visited = np.flatnonzero(active[at]).tolist()
    rest = [visited[-1]] * (active.shape[-1] - len(visited))  # repeats the last: nothing to fetch
    assert count[at] == len(visited) and indices[at].tolist() == visited + rest


@pytest.mark.parametrize("window", [1, 17, 64, 100])
def test_active_blocks_of_a_chain_are_exact_with_a_window(window):
  """In a chain, exactly the blocks with a pair inside the window are visited."""
  T = 256
  mask = TreeMask(jnp.full((1, T), T), jnp.arange(T)[None], window)
  wanted = np.asarray(mask.dense()).reshape(T // 32, 32, T // 16, 16).any((1, 3))
  assert (block_mask.active_blocks(mask, 32, 16)[0] == wanted).all()
