"""The TPU kernel, interpreted: one softmax under the tree mask, masked blocks untouched.

Blocks are the smallest there are, so that rows of 512 tokens have masked ones.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prm_jax.model import attention as attention_lib
from prm_jax.model import block_mask, tree_kernel
from prm_jax.model.block_mask import TreeMask

BLOCK = 128
kernel = functools.partial(tree_kernel.attention, block=BLOCK, interpret=True)


def row(parents):
  """`subtree_end` and depths of trees in preorder; a parent of -1 begins a tree."""
  T = len(parents)
  end, depth = np.arange(1, T + 1, dtype=np.int32), np.zeros(T, np.int32)
  for i in reversed(range(T)):
    if parents[i] >= 0:
      end[parents[i]] = max(end[parents[i]], end[i])
  for i in range(T):
    depth[i] = depth[parents[i]] + 1 if parents[i] >= 0 else 0
  return end, depth


def chain(T):
  return np.arange(T) - 1


def padding(T):
  return np.full(T, -1)


def random_trees(seed, T, branching=0.02):
  """Chains that end, or that branch from a token of the path to their last one."""
  rng, parents, path = np.random.default_rng(seed), [], []
  for i in range(T):
    if rng.random() < branching:
      path = path[: rng.integers(len(path) + 1)]
    parents.append(path[-1] if path else -1)
    path.append(i)
  return np.array(parents)


def packed(*trees):
  """One row of several trees."""
  starts = np.cumsum([0] + [len(tree) for tree in trees])
  return np.concatenate([np.where(t < 0, -1, t + start) for t, start in zip(trees, starts)])


def tree_mask(*rows, window=None):
  end, depth = zip(*map(row, rows))
  return TreeMask(jnp.asarray(np.stack(end)), jnp.asarray(np.stack(depth)), window)


ROWS = (
  packed(random_trees(0, 300), padding(20), random_trees(1, 192)),
  packed(chain(200), random_trees(2, 250, 0.2), padding(62)),
  chain(512),
  padding(512),
)


def dense(q, k, v, mask, softcap):
  """One softmax over all keys."""
  scores = attention_lib.soft_cap(jnp.einsum("BKGQH,BKSH->BKGQS", q, k), softcap)
  weights = jax.nn.softmax(jnp.where(mask.dense()[:, None, None], scores, -jnp.inf), axis=-1)
  return jnp.einsum("BKGQS,BKSH->BKGQH", weights, v)


def inputs(seed, K, G, H, B=4, T=512, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  shapes = ((B, K, G, T, H), (B, K, T, H), (B, K, T, H))
  q, k, v = (rng.normal(size=shape) for shape in shapes)
  return [jnp.asarray(x, dtype) for x in (q * H**-0.5, k, v)]


@functools.partial(jax.jit, static_argnums=(0, 5))
def value_and_gradients(attend, q, k, v, mask, softcap=0.0):
  def loss(q, k, v):
    out = attend(q, k, v, mask, softcap).astype(jnp.float32)
    return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

  (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
  return out, *gradients


def assert_equal_to_dense(attend, x, mask, softcap=0.0):
  """Values and gradients, to 1e-5 of the largest: float32 sums are made in another order, and a
  gradient of 0 is the remainder of two of them."""
  got = value_and_gradients(attend, *x, mask, softcap)
  wanted = value_and_gradients(dense, *x, mask, softcap)
  for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max(), err_msg=name)


@pytest.mark.parametrize(
  ("H", "K", "G", "window", "softcap"),
  [
    (32, 2, 1, None, 0.0),
    (64, 1, 2, None, 0.0),
    (128, 1, 4, None, 0.0),
    (64, 2, 1, 70, 0.0),
    (32, 1, 4, None, 3.0),
    (128, 1, 2, 200, 3.0),
    (256, 1, 1, None, 0.0),
  ],
)
def test_the_kernel_equals_one_softmax(H, K, G, window, softcap):
  """Kernel = reference, values and gradients: random trees, deep chains, padding."""
  assert_equal_to_dense(kernel, inputs(0, K, G, H), tree_mask(*ROWS, window=window), softcap)


def test_blocks_of_unequal_length():
  """Kernel = reference where many heads share keys, and a block of queries is the shorter one."""
  x = inputs(0, 1, 8, 256, B=1)
  assert tree_kernel.block_sizes(x[0].shape, x[0].dtype) == (128, 512)
  whole = functools.partial(tree_kernel.attention, interpret=True)
  assert_equal_to_dense(whole, x, tree_mask(ROWS[0]))


@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
@settings(max_examples=15, deadline=None)
def test_gradients_on_any_trees(seed, branching):
  """Kernel = reference, values and gradients, on random trees."""
  mask = tree_mask(random_trees(seed, 256, branching))
  assert_equal_to_dense(kernel, inputs(seed, 1, 2, 32, B=1, T=256), mask)


WINDOWS = st.integers(1, 300) | st.just(2**31 - 1)  # the last is that of a layer without one


@given(st.integers(0, 2**32 - 1), st.floats(0, 1), WINDOWS)
@settings(max_examples=25, deadline=None)
def test_values_on_any_trees_with_a_window(seed, branching, window):
  """Kernel = reference, with a window that is not known when the kernel is compiled."""
  x = inputs(seed, 1, 1, 32, B=1, T=256)
  mask = tree_mask(random_trees(seed, 256, branching), window=window)
  np.testing.assert_allclose(forward(kernel, *x, mask), forward(dense, *x, mask), 1e-5, 1e-5)


@functools.partial(jax.jit, static_argnums=0)
def forward(attend, q, k, v, mask):
  return attend(q, k, v, mask, 0.0)


def test_bfloat16_is_near_the_exact_result():
  """Attention weights are rounded to 8 bits; sums and the softmax are float32."""
  x, mask = inputs(1, 1, 2, 64, dtype=jnp.bfloat16), tree_mask(*ROWS)
  exact = [a.astype(jnp.float32) for a in x]
  got = value_and_gradients(kernel, *x, mask)
  for a, b in zip(got, value_and_gradients(dense, *exact, mask)):
    np.testing.assert_allclose(np.asarray(a, np.float32), b, atol=0.02 * np.abs(b).max())


@pytest.mark.parametrize(
  ("parents", "window", "masked"),
  [
    (packed(chain(256), chain(256)), None, slice(0, 256)),
    # two branches after the first block: one of the second, one of the others
    (np.concatenate([chain(256), [127], np.arange(256, 511)]), None, slice(128, 256)),
    (chain(512), 100, slice(0, 128)),
  ],
  ids=["another example", "a branch that ended", "outside the window"],
)
def test_masked_blocks_are_not_read(parents, window, masked):
  """NaN in one of two blocks that do not attend to each other leaves the other as it was."""
  mask, rest = tree_mask(parents, window=window), slice(256, None)
  q, k, v = inputs(2, 1, 1, 32, B=1)
  spoil = lambda x, where: x.at[..., where, :].set(jnp.nan)
  clean = value_and_gradients(kernel, q, k, v, mask)
  spoiled = value_and_gradients(kernel, q, spoil(k, masked), spoil(v, masked), mask)
  for a, b in zip(spoiled[:2], clean[:2]):  # out, dq
    np.testing.assert_array_equal(a[..., rest, :], b[..., rest, :])
  assert np.isnan(dense(q, k, spoil(v, masked), mask, 0.0)[..., rest, :]).all()
  spoiled = value_and_gradients(kernel, spoil(q, rest), k, v, mask)
  for a, b in zip(spoiled[2:], clean[2:]):  # dk, dv
    np.testing.assert_array_equal(a[..., masked, :], b[..., masked, :])


@pytest.mark.parametrize("outer_kv", [False, True])
def test_grid_steps_are_the_active_pairs(outer_kv):
  """Each pair once, outer blocks in order; a row with fewer pairs repeats its last."""
  active = block_mask.active_blocks(tree_mask(*ROWS, window=100), 2 * BLOCK, BLOCK)
  active = np.asarray(active.swapaxes(1, 2) if outer_kv else active)
  tables, count = jax.jit(tree_kernel.grid_steps)(active)
  outer, inner, flags = (np.asarray(table).reshape(len(active), -1) for table in tables)
  assert count == active.sum((1, 2)).max() and count < active[0].size
  for b, wanted in enumerate(active):
    pairs = np.argwhere(wanted)
    n = len(pairs)
    np.testing.assert_array_equal(np.stack([outer[b], inner[b]], 1)[:n], pairs)
    assert (outer[b, n:] == outer[b, n - 1]).all() and (inner[b, n:] == inner[b, n - 1]).all()
    edges = np.flatnonzero(np.diff(pairs[:, 0]))
    assert (flags[b] & tree_kernel.ACTIVE > 0).sum() == n and not flags[b, n:].any()
    assert np.flatnonzero(flags[b] & tree_kernel.FIRST).tolist() == [0, *(edges + 1)]
    assert np.flatnonzero(flags[b] & tree_kernel.LAST).tolist() == [*edges, n - 1]


def test_blocks_divide_the_row_and_fit():
  """Many heads make a block of queries shorter; a row of no whole number of lanes is refused."""
  size = lambda G, T, H, dtype="bfloat16": tree_kernel.block_sizes((1, 1, G, T, H), dtype)
  assert size(2, 4096, 128) == (512, 512)
  assert size(4, 4096, 64) == (512, 512)
  assert size(7, 4096, 64) == (512, 512)
  assert size(7, 4096, 128) == (256, 512)
  assert size(8, 4096, 256) == (128, 512)
  assert size(2, 640, 128) == (128, 128)
  assert size(1, 768, 128) == (384, 384)
  with pytest.raises(ValueError, match="rows of 100 tokens"):
    size(1, 100, 64)


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (14, 2)])
def test_the_kernel_compiles_for_a_chip_without_one(heads, kv_heads):
  """The TPU compiler accepts all three kernels, and memory holds little beside q, k and v."""
  pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install libtpu")
  from benchmarks import kernel as benchmark
  from benchmarks import runner

  case = ("v5e:2x2", 4096, (heads, kv_heads, 64))
  figures = runner.apart(benchmark.memory, *case, **benchmark.COMPILER)
  of_qkv = 2 * 4096 * 64 * (heads + 2 * kv_heads)
  assert figures["arguments"] < 1.01 * of_qkv and figures["temporaries"] < 1.1 * of_qkv  # results
