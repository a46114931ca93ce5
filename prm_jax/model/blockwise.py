"""Blockwise attention for CPU and GPU: no `[T, T]` array, and no work on masked blocks.

This is FlashAttention (arXiv:2205.14135).  A block of queries visits only its active blocks of keys
(`block_mask.active_blocks`), so neither the other examples of a row nor the finished branches of
the same tree cost time.

The rows of a batch are laid end to end and treated as one long row, so that a row with few active
blocks does not wait for one with many.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from prm_jax.model import block_mask
from prm_jax.model.block_mask import MASK_VALUE, TreeMask


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attention(
  q: jax.Array, k: jax.Array, v: jax.Array, mask: TreeMask, softcap: float, block: int
) -> jax.Array:
  """Computes grouped-query attention under a tree mask.

  Args:
    q: `[B, K, G, T, H]`, scaled.
    k, v: `[B, K, T, H]`.
    mask: the mask of B rows of T tokens.
    softcap: see `attention.soft_cap`.
    block: tokens of a block; divides T.

  Returns:
    `[B, K, G, T, H]` in the dtype of v; sums are float32.
  """
  return _forward(q, k, v, mask, softcap, block)[0]


def _cut(mask: TreeMask, block: int) -> tuple[TreeMask, jax.Array, jax.Array]:
  """Cuts the mask into the A blocks of all rows; indices count from the first row's start.

  Returns:
    The mask `[A, block]`; the active key blocks of each query block, int32 `[A, T / block]`, the
    last one repeated to the end; and their number, int32 `[A]`.
  """
  B, T = mask.subtree_end.shape
  row = jnp.arange(B, dtype=jnp.int32)[:, None]
  kv_blocks, count = block_mask.active_indices(block_mask.active_blocks(mask, block, block))
  kv_blocks = (kv_blocks + row[:, :, None] * (T // block)).reshape(-1, T // block)
  end = (mask.subtree_end + row * T).reshape(-1, block)
  positions = None if mask.window is None else mask.positions.reshape(-1, block)
  return TreeMask(end, positions, mask.window), kv_blocks, count.reshape(-1)


def _to_blocks(x: jax.Array, block: int) -> jax.Array:
  """Cuts `[B, K, G, T, H]` into the blocks of all rows, `[A, K, G * block, H]`."""
  B, K, G, _, H = x.shape
  x = x.reshape(B, K, G, -1, block, H).transpose(0, 3, 1, 2, 4, 5)
  return x.reshape(-1, K, G * block, H)


def _to_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Inverts `_to_blocks`."""
  B, K, G, _, H = shape
  x = x.reshape(B, -1, K, G, x.shape[2] // G, H).transpose(0, 2, 3, 1, 4, 5)
  return x.reshape(shape)


def _take(x: jax.Array, i: jax.Array) -> jax.Array:
  return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _scores(
  q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array, mask: TreeMask, softcap: float
) -> tuple[jax.Array, jax.Array]:
  """Returns masked scores of query block i and key block j, and the derivative of the soft cap.

  Both are float32 `[K, G * block, block]`; without a soft cap the derivative is `[]`.
  """
  K, block, _ = k.shape
  index = jnp.arange(block)
  attends = block_mask.attends(
    (i * block + index)[:, None],
    j * block + index,
    _take(mask.subtree_end, j),
    None if mask.window is None else _take(mask.positions, i)[:, None] - _take(mask.positions, j),
    mask.window,
  )
  scores = _einsum("KQH,KSH->KQS", q, k)
  slope = jnp.ones(())
  if softcap:
    scores = softcap * jnp.tanh(scores / softcap)
    slope = 1 - jnp.square(scores / softcap)
  masked = jnp.where(attends, scores.reshape(K, -1, block, block), MASK_VALUE)
  return masked.reshape(scores.shape), slope


def _forward(q, k, v, mask, softcap, block) -> tuple[jax.Array, Any]:
  mask, kv_blocks, count = _cut(mask, block)
  queries = _to_blocks(q, block)
  keys, values = (_to_blocks(x[:, :, None], block) for x in (k, v))

  def query_block(_, inputs):
    i, q, kv_blocks, count = inputs

    def key_block(n, carry):
      maximum, total, out = carry
      j = kv_blocks[n]
      scores, _ = _scores(q, _take(keys, j), i, j, mask, softcap)
      new = jnp.maximum(maximum, scores.max(-1))
      weights, decay = jnp.exp(scores - new[..., None]), jnp.exp(maximum - new)
      added = _einsum("KQS,KSH->KQH", weights.astype(v.dtype), _take(values, j))
      return new, total * decay + weights.sum(-1), out * decay[..., None] + added

    zeros = jnp.zeros(q.shape[:2], jnp.float32)
    start = (zeros + MASK_VALUE, zeros, jnp.zeros(q.shape, jnp.float32))
    # Masked scores add to a query's sums until its first unmasked score, where `decay` becomes
    # exp(MASK_VALUE - score) = 0.  There always is one: the token attends to itself.
    maximum, total, out = jax.lax.fori_loop(0, count, key_block, start)
    return None, (out / total[..., None], maximum + jnp.log(total))

  inputs = (jnp.arange(len(queries)), queries, kv_blocks, count)
  _, (out, lse) = jax.lax.scan(query_block, None, inputs)
  out, lse = (checkpoint_name(x, "attention") for x in (out, lse))
  saved = (queries, keys, values, mask, kv_blocks, count, out, lse)
  return _to_rows(out, q.shape).astype(v.dtype), saved


def _backward(softcap, block, saved, gradient):
  queries, keys, values, mask, kv_blocks, count, out, lse = saved
  do = _to_blocks(gradient, block)
  delta = (do.astype(jnp.float32) * out).sum(-1)

  def query_block(carry, inputs):
    i, q, do, lse, delta, kv_blocks, count = inputs
    # XLA's CPU backend is slow at products with a transposed first factor.  So the loop-invariant
    # factors are transposed here, and the gradients of keys and values are accumulated transposed.
    q_columns, do_columns = q.swapaxes(1, 2), do.swapaxes(1, 2)

    def key_block(n, carry):
      dq, dk, dv = carry
      j = kv_blocks[n]
      key, value = _take(keys, j), _take(values, j)
      scores, slope = _scores(q, key, i, j, mask, softcap)
      weights = jnp.exp(scores - lse[..., None])
      ds = weights * (_einsum("KQH,KSH->KQS", do, value) - delta[..., None]) * slope
      ds, weights = ds.astype(q.dtype), weights.astype(q.dtype)
      dq += _einsum("KQS,KSH->KQH", ds, key)
      to_key = _einsum("KHQ,KQS->KHS", q_columns, ds)
      to_value = _einsum("KHQ,KQS->KHS", do_columns, weights)

      def add(x, new):
        return jax.lax.dynamic_update_index_in_dim(x, _take(x, j) + new, j, 0)

      return dq, add(dk, to_key), add(dv, to_value)

    start = (jnp.zeros(q.shape, jnp.float32), *carry)
    dq, *carry = jax.lax.fori_loop(0, count, key_block, start)
    return tuple(carry), dq

  zeros = jnp.zeros(keys.swapaxes(2, 3).shape, jnp.float32)  # [A, K, H, block]
  inputs = (jnp.arange(len(queries)), queries, do, lse, delta, kv_blocks, count)
  (dk, dv), dq = jax.lax.scan(query_block, (zeros, zeros), inputs)
  B, K, _, T, H = gradient.shape
  dk, dv = (_to_rows(x.swapaxes(2, 3), (B, K, 1, T, H))[:, :, 0] for x in (dk, dv))
  dq = _to_rows(dq, gradient.shape).astype(queries.dtype)
  return dq, dk.astype(keys.dtype), dv.astype(values.dtype), None


attention.defvjp(_forward, _backward)
