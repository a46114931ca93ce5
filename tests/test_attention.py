"""Long rows: whatever form attention takes, it is the rule of `visible` under one softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prm_jax import config as config_lib
from prm_jax.model import attention as attention_lib
from prm_jax.model import blockwise
from prm_jax.model import live_blocks as live_lib
from prm_jax.training import mesh as mesh_lib

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


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(
  ("heads", "window", "softcap"), [(HEADS[0], None, 0.0), (HEADS[1], 60, 2.0), (HEADS[2], 60, 0.0)]
)
def test_long_rows_equal_one_softmax(platform, heads, window, softcap, monkeypatch):
  """Block by block (CPU) and split in four (elsewhere): values and all gradients, random trees."""
  rng = np.random.default_rng(0)
  T = 512
  end, positions = packed_trees(rng, 2, T)
  q, k, v = inputs(rng, 2, T, heads)
  given = (end, positions, window)
  wanted = value_and_gradients(
    lambda *x: reference(*x, *given, softcap), q, k, v
  )  # float32 sums in another order: 1e-5
  monkeypatch.setattr(attention_lib, "_platform", lambda: platform)
  got = value_and_gradients(
    lambda *x: attention_lib.attention(*x, *given, softcap=softcap), q, k, v
  )
  for a, b in zip(got, wanted):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_blocks_start_where_something_is_seen():
  """An example that ended before a block of queries costs it nothing; its own block is live."""
  lengths = (100, 28, 130, 254)
  ends = np.repeat(np.cumsum(lengths), lengths)[None]
  assert blockwise.SIZE == 64
  first = blockwise.first_blocks(jnp.asarray(ends, jnp.int32))
  assert first.tolist() == [0, 0, 2, 2, 2, 4, 4, 4]
  both = np.concatenate([ends, np.full((1, 512), 512)])  # the other row sees everything
  assert blockwise.first_blocks(jnp.asarray(both, jnp.int32)).tolist() == [0] * 8


def test_blocks_in_bfloat16_are_as_near_as_dense_ones():
  """Weights are rounded to 8 bits either way; sums are float32."""
  rng = np.random.default_rng(1)
  end, positions = packed_trees(rng, 1, 512)
  q, k, v = inputs(rng, 1, 512, HEADS[1], dtype=jnp.bfloat16)
  exact = reference(*(x.astype(jnp.float32) for x in (q, k, v)), end, positions, None, 0.0)
  got = attention_lib.attention(q, k, v, end, positions)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(got, np.float32), exact, atol=0.02)


def test_blocks_over_devices_equal_one_device():
  """Rows over four devices and heads over two: the same values and gradients."""
  rng = np.random.default_rng(2)
  end, positions = packed_trees(rng, 4, 512)
  q, k, v = inputs(rng, 4, 512, HEADS[0])
  attend = functools.partial(
    attention_lib.attention, subtree_end=end, positions=positions, window=90
  )
  alone = value_and_gradients(attend, q, k, v)
  mesh = mesh_lib.make_mesh(config_lib.Mesh(fsdp=4, tensor=2))
  spec = jax.sharding.PartitionSpec(("data", "fsdp"), None, "tensor", None)
  with jax.set_mesh(mesh):
    split = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in (q, k, v)]
    got = value_and_gradients(attend, *split)
  for a, b in zip(got, alone):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_long_rows_make_no_array_of_tokens_by_tokens():
  """8,192 tokens, forward and backward, in a small part of one [T, T] array's memory."""
  T, (N, K), H = 8192, HEADS[1], 8
  shapes = [jax.ShapeDtypeStruct((1, T, n, H), jnp.float32) for n in (N, K, K)]
  index = jax.ShapeDtypeStruct((1, T), jnp.int32)

  def loss(q, k, v, end, positions):
    return attention_lib.attention(q, k, v, end, positions).sum()

  compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes, index, index).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * T * T / 16


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


@settings(deadline=None)
@given(packed_rows(), BLOCKS, st.sampled_from([None, 1, 3, 9, 40]))
def test_live_blocks_are_those_in_which_a_token_is_seen(rows, sizes, window):
  """All of them always; without a window no others."""
  end, positions = rows
  (B, T), (queries, keys) = end.shape, sizes
  seen = np.asarray(attention_lib.visible(end, positions, window))
  wanted = seen.reshape(B, T // queries, queries, T // keys, keys).any((2, 4))
  live = np.asarray(live_lib.live(end, positions, window, queries, keys))
  assert live[wanted].all()
  if window is None:
    assert (live == wanted).all()
  for transposed in (False, True):
    order, count = live_lib.live_blocks(end, positions, window, *sizes, transposed)
    table = live.swapaxes(1, 2) if transposed else live
    assert order.dtype == count.dtype == jnp.int32 and order.shape == table.shape
    for at in np.ndindex(count.shape):
      blocks = np.flatnonzero(table[at]).tolist()
      tail = [blocks[-1]] * (table.shape[-1] - len(blocks))  # repeats the last: nothing to fetch
      assert count[at] == len(blocks) and order[at].tolist() == blocks + tail


@pytest.mark.parametrize("window", [1, 17, 64, 100])
def test_live_blocks_of_a_chain_are_those_in_the_window(window):
  """What has slid out of the window is skipped as what has ended is."""
  T = 256
  end, positions = jnp.full((1, T), T), jnp.arange(T)[None]
  seen = np.asarray(attention_lib.visible(end, positions, window))
  wanted = seen.reshape(T // 32, 32, T // 16, 16).any((1, 3))
  assert (live_lib.live(end, positions, window, 32, 16)[0] == wanted).all()


def test_finished_siblings_are_not_live():
  """Between a trunk and its last branch lies what only other branches see."""
  trunk, branch, branches = 8, 16, 5
  T = trunk + branch * branches
  end = np.full(T, T)
  end[trunk:] = np.repeat(trunk + branch * np.arange(1, branches + 1), branch)
  order, count = live_lib.live_blocks(jnp.asarray(end)[None], None, None, 8, 8)
  assert order[0, -1, :3].tolist() == [0, 9, 10] and count[0, -1] == 3
