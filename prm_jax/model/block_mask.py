"""The tree rule, of tokens and of blocks: what attention block by block need not touch.

A packed row of trees is mostly blocks in which nobody sees anybody: other examples, and what stands
below the finished siblings of one's own ancestors.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sees(
  query: jax.Array,
  key: jax.Array,
  end: jax.Array,
  distance: jax.Array | None = None,
  window: jax.Array | int | None = None,
) -> jax.Array:
  """Whether one token sees another, elementwise: `key <= query < end`, and within the window.

  A window counts depth in the tree: along a token's own path that is the distance in its sequence,
  whatever stands between them in the row.

  Args:
    query, key: indices in the row.
    end: index just past the key's last descendant.
    distance: depth of the query less that of the key; needed only with a window.
    window: tokens seen, oneself included; None: all.
  """
  seen = (key <= query) & (query < end)
  return seen if window is None else seen & (distance < window)


def live(
  subtree_end: jax.Array,
  positions: jax.Array | None,
  window: jax.Array | int | None,
  queries: int,
  keys: int,
) -> jax.Array:
  """Which blocks of keys each block of queries sees anything of.

  Without a window exactly those: if a token sees a key of an earlier block, so does the first token
  of its own block, and the furthest subtree end of the keys decides; blocks that overlap share a
  token, which sees itself.  A window is applied to the shallowest query and the deepest key of the
  two, whether or not one sees the other: exact in a chain; in a tree too many blocks may be live.

  Args:
    subtree_end: int32 `[B, T]`, index just past each token's last descendant.
    positions: int32 `[B, T]`, depth of each token; needed only with a window.
    window: tokens seen, by depth, oneself included; None: all.
    queries, keys: tokens of a block; both divide T.

  Returns:
    bool `[B, T / queries, T / keys]`.
  """
  B, T = subtree_end.shape
  first, end = jnp.arange(0, T, queries)[:, None], subtree_end.reshape(B, 1, -1, keys).max(-1)
  seen = (jnp.arange(0, T, keys) < first + queries) & (first < end)
  if window is not None:
    shallowest = positions.reshape(B, -1, 1, queries).min(-1)
    seen &= shallowest - positions.reshape(B, 1, -1, keys).max(-1) < window
  return seen


def listed(seen: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The columns that are true in each row of bool `[..., I, J]`, which has one at least.

  Returns:
    order, int32 `[..., I, J]`: they, in increasing order; what is left repeats the last of them, so
    that a pipeline which fetches it fetches nothing new.
    count, int32 `[..., I]`: how many they are.
  """
  column = jnp.arange(seen.shape[-1], dtype=jnp.int32)
  last = jnp.max(jnp.where(seen, column, 0), -1, keepdims=True)
  return jnp.sort(jnp.where(seen, column, last), -1), seen.sum(-1, dtype=jnp.int32)
