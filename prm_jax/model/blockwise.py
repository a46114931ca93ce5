"""Attention block by block: no array of tokens by tokens, and no work on blocks nobody sees.

The arithmetic is that of arXiv:2205.14135 (a running maximum and sum over blocks of keys; the
backward pass computes weights anew).  Each block of queries goes through the blocks of keys that
any of its tokens sees (`live_blocks`), so neither packed examples nor finished branches of one's
own tree cost anything.

The rows of a batch, one after another, are one long row of trees, and are treated as such: a row
does not wait for another in which more is seen.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from prm_jax.model import block_mask

MASK_VALUE = -1e30  # finite: a block without a visible key must not make nan of the running maximum


class Tree(NamedTuple):
  """Who sees whom, in blocks that count through all rows; N of them."""

  ends: jax.Array  # int32 [N, size]: subtree ends, from the first token of the first row
  depths: jax.Array | None  # int32 [N, size], with a window
  window: jax.Array | int | None
  order: jax.Array  # int32 [N, T / size]: blocks of keys that a block of queries sees
  count: jax.Array  # int32 [N]: how many


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  subtree_end: jax.Array,
  positions: jax.Array | None,
  window: jax.Array | int | None,
  softcap: float,
  *,
  size: int,
) -> jax.Array:
  """Grouped-query attention under the tree rule.

  Args:
    q: `[B, K, G, T, H]`, scaled; k, v: `[B, K, T, H]`; T a multiple of size.
    subtree_end, positions: int32 `[B, T]`; positions are needed only with a window.
    window: tokens seen, by depth; None: all.
    softcap: see `attention.attention`.
    size: tokens of a block.

  Returns:
    `[B, K, G, T, H]` in v's dtype; sums are float32.
  """
  return _attention(q, k, v, _tree(subtree_end, positions, window, size), softcap)


def _tree(
  subtree_end: jax.Array,
  positions: jax.Array | None,
  window: jax.Array | int | None,
  size: int,
) -> Tree:
  B, T = subtree_end.shape
  row = jnp.arange(B, dtype=jnp.int32)[:, None]
  order, count = block_mask.listed(block_mask.live(subtree_end, positions, window, size, size))
  return Tree(
    ends=(subtree_end + row * T).reshape(-1, size),
    depths=None if window is None else positions.reshape(-1, size),
    window=window,
    order=(order + row[:, :, None] * (T // size)).reshape(-1, T // size),
    count=count.reshape(-1),
  )


def _blocks(x: jax.Array, size: int) -> jax.Array:
  """`[B, K, G, T, H]` in the blocks of all rows, `[N, K, G * size, H]`."""
  B, K, G, _, H = x.shape
  x = x.reshape(B, K, G, -1, size, H).transpose(0, 3, 1, 2, 4, 5)
  return x.reshape(-1, K, G * size, H)


def _rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """The inverse of `_blocks`."""
  B, K, G, _, H = shape
  x = x.reshape(B, -1, K, G, x.shape[2] // G, H).transpose(0, 2, 3, 1, 4, 5)
  return x.reshape(shape)


def _at(x: jax.Array, block: jax.Array) -> jax.Array:
  return jax.lax.dynamic_index_in_dim(x, block, keepdims=False)


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _scores(
  q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array, tree: Tree, softcap: float
) -> tuple[jax.Array, jax.Array]:
  """Masked scores float32 `[K, G * size, size]` of two blocks, and the soft-cap's derivative."""
  K, size, _ = k.shape
  index = jnp.arange(size)
  seen = block_mask.sees(
    (i * size + index)[:, None],
    j * size + index,
    _at(tree.ends, j),
    None if tree.window is None else _at(tree.depths, i)[:, None] - _at(tree.depths, j),
    tree.window,
  )
  scores = _product("KQH,KSH->KQS", q, k)
  slope = jnp.ones(())
  if softcap:
    scores = softcap * jnp.tanh(scores / softcap)
    slope = 1 - jnp.square(scores / softcap)
  masked = jnp.where(seen, scores.reshape(K, -1, size, size), MASK_VALUE)
  return masked.reshape(scores.shape), slope


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, tree: Tree, softcap: float) -> jax.Array:
  return _forward(q, k, v, tree, softcap)[0]


def _forward(q, k, v, tree, softcap) -> tuple[jax.Array, Any]:
  size = tree.ends.shape[1]
  queries = _blocks(q, size)
  keys, values = (_blocks(x[:, :, None], size) for x in (k, v))

  def block(_, inputs):
    i, q, order, count = inputs

    def with_keys(n, carry):
      most, total, out = carry
      j = order[n]
      scores, _ = _scores(q, _at(keys, j), i, j, tree, softcap)
      new = jnp.maximum(most, scores.max(-1))
      weights, kept = jnp.exp(scores - new[..., None]), jnp.exp(most - new)
      added = _product("KQS,KSH->KQH", weights.astype(v.dtype), _at(values, j))
      return new, total * kept + weights.sum(-1), out * kept[..., None] + added

    zeros = jnp.zeros(q.shape[:2], jnp.float32)
    start = (zeros + MASK_VALUE, zeros, jnp.zeros(q.shape, jnp.float32))
    # A token sees itself, so the last block leaves nothing of what MASK_VALUE put into the sums.
    most, total, out = jax.lax.fori_loop(0, count, with_keys, start)
    return None, (out / total[..., None], most + jnp.log(total))

  inputs = (jnp.arange(len(queries)), queries, tree.order, tree.count)
  _, (out, normaliser) = jax.lax.scan(block, None, inputs)
  out, normaliser = (checkpoint_name(x, "attention") for x in (out, normaliser))
  saved = (queries, keys, values, tree, out, normaliser)
  return _rows(out, q.shape).astype(v.dtype), saved


def _backward(softcap, saved, gradient):
  queries, keys, values, tree, out, normaliser = saved
  outer = _blocks(gradient, tree.ends.shape[1])
  along = (outer.astype(jnp.float32) * out).sum(-1)  # of the softmax's own derivative

  def block(carry, inputs):
    i, q, outer, normaliser, along, order, count = inputs

    def with_keys(n, carry):
      dq, dk, dv = carry
      j = order[n]
      key, value = _at(keys, j), _at(values, j)
      scores, slope = _scores(q, key, i, j, tree, softcap)
      weights = jnp.exp(scores - normaliser[..., None])
      ds = weights * (_product("KQH,KSH->KQS", outer, value) - along[..., None]) * slope
      ds, weights = ds.astype(q.dtype), weights.astype(q.dtype)
      dq += _product("KQS,KSH->KQH", ds, key)
      for_key = _product("KQS,KQH->KSH", ds, q)
      for_value = _product("KQS,KQH->KSH", weights, outer)

      def put(x, new):
        return jax.lax.dynamic_update_index_in_dim(x, _at(x, j) + new, j, 0)

      return dq, put(dk, for_key), put(dv, for_value)

    start = (jnp.zeros(q.shape, jnp.float32), *carry)
    dq, *carry = jax.lax.fori_loop(0, count, with_keys, start)
    return tuple(carry), dq

  zeros = jnp.zeros(keys.shape, jnp.float32)
  inputs = (jnp.arange(len(queries)), queries, outer, normaliser, along, tree.order, tree.count)
  (dk, dv), dq = jax.lax.scan(block, (zeros, zeros), inputs)
  B, K, _, T, H = gradient.shape
  dk, dv = (_rows(x, (B, K, 1, T, H))[:, :, 0] for x in (dk, dv))
  dq = _rows(dq, gradient.shape).astype(queries.dtype)
  return dq, dk.astype(keys.dtype), dv.astype(values.dtype), None


_attention.defvjp(_forward, _backward)
