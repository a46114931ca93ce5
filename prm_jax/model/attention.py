"""Attention over packed trees."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from prm_jax.model import blockwise

MASKED = -jnp.inf  # every token sees itself, so no softmax is over nothing
BLOCK = 128  # queries, at least, that share one range of keys
BLOCKS = 4  # at most: each is compiled on its own
LONG = 512  # tokens from which a row is worth splitting


def visible(
  subtree_end: jax.Array,
  positions: jax.Array | None = None,
  window: jax.Array | int | None = None,
  start: int = 0,
) -> jax.Array:
  """Which tokens each token sees: `j <= i < subtree_end[j]`, and within the window if there is one.

  A window counts depth in the tree, `positions[i] - positions[j] < window`: along a token's own
  path that is the distance in its sequence, whatever stands between them in the row.

  Args:
    subtree_end: int32 `[B, S]`, index just past each token's last descendant.
    positions: int32 `[B, S]`, depth of each token; needed only with a window.
    window: tokens seen, oneself included; None: all.
    start: the first query; queries end where the keys do.

  Returns:
    bool `[B, S - start, S]`, query by key.  Every token sees itself.
  """
  index = jnp.arange(subtree_end.shape[1])
  query = index[start:, None]
  seen = (index <= query)[None] & (query[None] < subtree_end[:, None, :])
  if window is not None:
    seen &= positions[:, start:, None] - positions[:, None, :] < window
  return seen


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
  return cap * jnp.tanh(x / cap) if cap else x


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  subtree_end: jax.Array,
  positions: jax.Array | None = None,
  window: jax.Array | int | None = None,
  scale: float | None = None,
  softcap: float = 0.0,
) -> jax.Array:
  """Grouped-query attention under the tree rule.

  Long rows go block by block on a CPU (`blockwise`).  Elsewhere they are dense, but for what no
  token sees: a row is split into blocks of queries, each of which multiplies only with the keys up
  to its own end.

  Args:
    q: `[B, T, N, H]`, k and v: `[B, T, K, H]`, with N a multiple of K.
    subtree_end, positions: int32 `[B, T]`.
    window: see `visible`.
    scale: of the scores; None: 1 / sqrt(H).
    softcap: scores become `softcap * tanh(scores / softcap)`; 0: they stay.

  Returns:
    `[B, T, N, H]`, in q's dtype; the softmax is float32.
  """
  B, T, N, H = q.shape
  K = k.shape[2]
  # Heads before tokens, so that both products are batches of plain matrices: twice as fast on CPU
  # as contracting [B, T, K, G, H] in place, and B and K stay apart for the mesh to split.
  q = q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4) * (H**-0.5 if scale is None else scale)
  k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
  if T >= LONG and T % blockwise.SIZE == 0 and _platform() == "cpu":
    positions = subtree_end if positions is None else positions  # not looked at without a window
    out = blockwise.attention(q, k, v, subtree_end, positions, window, softcap)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
  out = []
  size = _block(T)
  for start in range(0, T, size):
    end = start + size
    seen = visible(
      subtree_end[:, :end], None if window is None else positions[:, :end], window, start
    )
    out.append(_block_attention(q[..., start:end, :], k[:, :, :end], v[:, :, :end], seen, softcap))
  out = jnp.concatenate(out, 3) if len(out) > 1 else out[0]
  return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def _platform() -> str:
  """Of the mesh in use, which may be of devices that are not here; without one, of those here."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def _block(T: int) -> int:
  """Queries that share one range of keys: T itself for short rows and those that do not divide."""
  if T < LONG:
    return T
  return T // max(n for n in range(1, BLOCKS + 1) if T % n == 0 and T // n >= BLOCK)


def _block_attention(
  q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, softcap: float
) -> jax.Array:
  """Queries `[B, K, G, Q, H]` over keys and values `[B, K, S, H]`, `seen` bool `[B, Q, S]`."""
  B, K, G, Q, H = q.shape
  q = q.reshape(B, K, G * Q, H)
  scores = jnp.einsum("BKQH,BKSH->BKQS", q, k, preferred_element_type=jnp.float32)
  scores = soft_cap(scores, softcap)
  scores = jnp.where(seen[:, None], scores.reshape(B, K * G, Q, -1), MASKED)
  weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
  total = weights.sum(-1).reshape(B, K, G * Q, 1)
  weights = weights.reshape(B, K, G * Q, -1).astype(v.dtype)
  out = jnp.einsum("BKQS,BKSH->BKQH", weights, v, preferred_element_type=jnp.float32) / total
  return out.astype(v.dtype).reshape(B, K, G, Q, H)
