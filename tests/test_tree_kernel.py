"""The TPU kernel, interpreted: one softmax under the tree mask; masked blocks are not read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_attention as shared
from conftest import needs_libtpu
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import reference, tree_mask, value_and_gradients

from prm_jax.model import attention as attention_lib
from prm_jax.model import block_mask, tree_kernel

BLOCK = 128  # the smallest, so that rows of 512 tokens have masked blocks
smallest = functools.partial(tree_kernel.attention, block=BLOCK, interpret=True)
kernel = functools.partial(shared.by_tokens, smallest)


chain = lambda T: np.arange(T) - 1
padding = lambda T: np.full(T, -1)


def packed(*trees):
  """Returns the parents of one row of several trees."""
  starts = np.cumsum([0] + [len(tree) for tree in trees])
  trees = map(np.asarray, trees)
  return np.concatenate([np.where(t < 0, -1, t + start) for t, start in zip(trees, starts)])


RNG = np.random.default_rng(0)
ROWS = (
  packed(shared.random_trees(RNG, 300), padding(20), shared.random_trees(RNG, 192)),
  packed(chain(200), shared.random_trees(RNG, 250, 0.2), padding(62)),
  chain(512),
  padding(512),
)


@pytest.mark.parametrize(
  ("H", "K", "G", "window", "softcap"), [(128, 1, 3, None, 0.0), (64, 2, 2, 70, 3.0)]
)
def test_the_kernel_equals_one_softmax(H, K, G, window, softcap):
  """The kernel has the values and gradients of one softmax for trees, chains and padding."""
  x = shared.inputs(0, 4, 512, (K * G, K), H)
  shared.assert_equals_reference(kernel, x, tree_mask(*ROWS, window=window), softcap)


def test_the_kernel_with_short_blocks_of_queries_equals_one_softmax():
  """The kernel is right where large heads make blocks of queries shorter than those of keys."""
  assert tree_kernel.block_sizes((1, 1, 2, 512, 512), jnp.float32, 256) == (128, 256)
  attend = functools.partial(tree_kernel.attention, block=256, interpret=True)
  attend = functools.partial(shared.by_tokens, attend)
  shared.assert_equals_reference(attend, shared.inputs(0, 1, 512, (2, 1), 512), tree_mask(ROWS[0]))


NO_WINDOW = 2**31 - 1  # the traced window of a full-attention layer beside sliding ones


@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.integers(1, 300) | st.just(NO_WINDOW))
@settings(max_examples=25, deadline=None)
def test_the_kernel_equals_one_softmax_on_any_trees(seed, branching, window):
  """The kernel has the values and gradients of one softmax for any trees and any traced window."""
  mask = tree_mask(shared.random_trees(np.random.default_rng(seed), 512, branching), window=window)
  shared.assert_equals_reference(kernel, shared.inputs(seed, 1, 512, (2, 1), 32), mask)


@pytest.mark.parametrize("attend", [kernel, attention_lib.attention], ids=["kernel", "blockwise"])
def test_bfloat16_is_near_the_exact_result(attend):
  """bfloat16 inputs give values and gradients within 2% of the exact ones."""
  x, mask = shared.inputs(1, 4, 512, (2, 1), 64, jnp.bfloat16), tree_mask(*ROWS)
  exact = [a.astype(jnp.float32) for a in x]
  got = value_and_gradients(attend, *x, mask)
  assert {each.dtype.name for each in got[1:]} == {"bfloat16"}
  for a, b in zip(got, value_and_gradients(reference, *exact, mask)):
    np.testing.assert_allclose(np.asarray(a, np.float32), b, atol=0.02 * np.abs(b).max())


@pytest.mark.parametrize(
  ("parents", "window", "masked"),
  [
    (packed(chain(256), chain(256)), NO_WINDOW, slice(0, 256)),
    # two branches after the first block: one fills the second block, the other the last two
    (np.concatenate([chain(256), [127], np.arange(256, 511)]), NO_WINDOW, slice(128, 256)),
    (chain(512), 100, slice(0, 128)),
  ],
  ids=["another example", "a branch that ended", "outside the window"],
)
def test_masked_blocks_are_not_read(parents, window, masked):
  """NaN in one of two blocks that do not attend to each other does not reach the other."""
  mask, rest = tree_mask(parents, window=window), slice(256, None)
  q, k, v = shared.inputs(2, 1, 512, (2, 1), 32)
  spoil = lambda x, where: x.at[:, where].set(jnp.nan)
  clean = value_and_gradients(kernel, q, k, v, mask)
  spoiled = value_and_gradients(kernel, q, spoil(k, masked), spoil(v, masked), mask)
  for a, b in zip(spoiled[:2], clean[:2]):  # out, dq
    np.testing.assert_array_equal(a[:, rest], b[:, rest])
  assert np.isnan(reference(q, k, spoil(v, masked), mask)[:, rest]).all()
  spoiled = value_and_gradients(kernel, spoil(q, rest), k, v, mask)
  for a, b in zip(spoiled[2:], clean[2:]):  # dk, dv
    np.testing.assert_array_equal(a[:, masked], b[:, masked])


@pytest.mark.parametrize("outer_kv", [False, True])
def test_grid_steps_are_the_active_pairs(outer_kv):
  """The grid visits each active pair once, in order; a row with fewer pairs repeats its last."""
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
    assert flags[b, :n].all() and not flags[b, n:].any()


def test_blocks_divide_the_row_and_fit():
  """Blocks divide the row and fit the memory; a row of no whole number of lanes is an error."""
  size = lambda G, T, H: tree_kernel.block_sizes((1, 1, G, T, H), "bfloat16")
  assert size(2, 4096, 128) == size(7, 4096, 64) == (512, 512)
  assert size(7, 4096, 128) == (256, 512) and size(8, 4096, 256) == (128, 512)
  assert size(2, 640, 128) == (128, 128) and size(1, 768, 128) == (384, 384)
  with pytest.raises(ValueError, match="rows of 100 tokens"):
    size(1, 100, 64)


@pytest.mark.parametrize(
  ("heads", "kv_heads"),
  [(4, 2), *(pytest.param(*heads, marks=pytest.mark.slow) for heads in ((14, 2), (32, 8)))],
)
@needs_libtpu
def test_the_kernel_compiles_for_a_tpu(heads, kv_heads):
  """The TPU compiler accepts all three kernels, which need little memory beside q, k and v."""
  from benchmarks import kernel as benchmark
  from benchmarks import runner

  case = ("v5e:2x2", 4096, (heads, kv_heads, 64))
  figures = runner.apart(benchmark.memory, *case, **benchmark.COMPILER)
  of_qkv = 2 * 4096 * 64 * (heads + 2 * kv_heads)
  assert figures["arguments"] < 1.01 * of_qkv and figures["temporaries"] < 1.1 * of_qkv  # results
