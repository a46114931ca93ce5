"""Attention over packed trees."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -jnp.inf  # every token sees itself, so no softmax is over nothing


def visible(subtree_end: jax.Array) -> jax.Array:
  """Which tokens each token sees: `j <= i < subtree_end[j]`.

  Args:
    subtree_end: int32 `[B, T]`, index just past each token's last descendant.

  Returns:
    bool `[B, T, T]`, query by key.  Every token sees itself.
  """
  index = jnp.arange(subtree_end.shape[1])
  before = index[None, :] <= index[:, None]
  return before[None] & (index[None, :, None] < subtree_end[:, None, :])


def attention(q: jax.Array, k: jax.Array, v: jax.Array, subtree_end: jax.Array) -> jax.Array:
  """Dense grouped-query attention under the tree rule.

  Args:
    q: `[B, T, N, H]`, k and v: `[B, T, K, H]`, with N a multiple of K.
    subtree_end: int32 `[B, T]`.

  Returns:
    `[B, T, N, H]`, in q's dtype; the softmax is float32.
  """
  B, T, N, H = q.shape
  K = k.shape[2]
  G = N // K
  # Heads before tokens, so that both products are batches of plain matrices: twice as fast on CPU
  # as contracting [B, T, K, G, H] in place, and B and K stay apart for the mesh to split.
  q = q.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H) * H**-0.5
  k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
  scores = jnp.einsum("BKQH,BKSH->BKQS", q, k, preferred_element_type=jnp.float32)
  scores = jnp.where(visible(subtree_end)[:, None], scores.reshape(B, N, T, T), MASKED)
  weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
  total = weights.sum(-1).reshape(B, K, G * T, 1)
  weights = weights.reshape(B, K, G * T, T).astype(v.dtype)
  out = jnp.einsum("BKQS,BKSH->BKQH", weights, v, preferred_element_type=jnp.float32) / total
  return out.astype(v.dtype).reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
