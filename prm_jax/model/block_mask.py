"""The attention mask of packed trees, and its active blocks: those not fully masked.

Most blocks of a packed row are fully masked: they pair two examples, or a token with a sibling
branch that ended before it.  Blockwise attention and the TPU kernel skip them.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

MASK_VALUE = -1e30  # a masked score; finite, so that a running maximum never leads to NaN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TreeMask:
  """The mask of packed rows: token i attends to token j if `j <= i < subtree_end[j]`.

  A window counts depth in the tree: the distance along a token's own path, whatever other branches
  lie between the two tokens in the row.
  """

  subtree_end: jax.Array  # int32 [B, T], index just past each token's last descendant
  positions: jax.Array | None = None  # int32 [B, T], depth of each token; needed with a window only
  window: jax.Array | int | None = None  # tokens attended to, the token itself included; None: all

  def dense(self) -> jax.Array:
    """Returns the whole mask, bool `[B, T, T]`, query by key.  Every token attends to itself."""
    index = jnp.arange(self.subtree_end.shape[1])
    distance = None
    if self.window is not None:
      distance = self.positions[:, :, None] - self.positions[:, None]
    return attends(index[:, None], index, self.subtree_end[:, None], distance, self.window)

  def padded(self, extra: int) -> Self:
    """Returns the mask of rows with `extra` more tokens at the end, each a tree of its own."""
    pad = lambda x: jnp.pad(x, [(0, 0), (0, extra)])
    end, positions = jax.tree.map(pad, (self.subtree_end, self.positions))
    index = jnp.arange(end.shape[1], dtype=end.dtype)
    return TreeMask(jnp.maximum(end, index + 1), positions, self.window)


def attends(
  q_index: jax.Array,
  kv_index: jax.Array,
  kv_end: jax.Array,
  distance: jax.Array | None = None,
  window: jax.Array | int | None = None,
) -> jax.Array:
  """Returns whether each query attends to its key, elementwise, bool.

  Args:
    kv_end: `subtree_end` of the key.
    distance: depth of the query minus depth of the key; needed with a window only.
  """
  inside = (kv_index <= q_index) & (q_index < kv_end)
  return inside if window is None else inside & (distance < window)


def active_blocks(mask: TreeMask, block_q: int, block_kv: int) -> jax.Array:
  """Returns which blocks are active: bool `[B, T / block_q, T / block_kv]`.

  Without a window this is exact: if any query of a later block attends to a key, so does the
  block's first query, so the largest `subtree_end` of the keys decides.  With a window, the
  shallowest query is compared with the deepest key of the two blocks.  That is exact for a chain;
  in a tree some fully masked blocks may count as active.
  """
  B, T = mask.subtree_end.shape
  first_q = jnp.arange(0, T, block_q)[:, None]
  end = mask.subtree_end.reshape(B, 1, -1, block_kv).max(-1)
  first_kv = jnp.arange(0, T, block_kv)
  active = (first_kv < first_q + block_q) & (first_q < end)
  if mask.window is not None:
    shallowest = mask.positions.reshape(B, -1, 1, block_q).min(-1)
    active &= shallowest - mask.positions.reshape(B, 1, -1, block_kv).max(-1) < mask.window
  return active


def active_indices(active: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Lists the indices of the true entries (one or more) along the last axis of bool `[..., I, J]`.

  Returns:
    indices: int32 `[..., I, J]`, ascending.  The last index repeats to the end, so that a pipeline
      that prefetches by index fetches nothing new there.
    count: int32 `[..., I]`, the number of true entries.
  """
  index = jnp.arange(active.shape[-1], dtype=jnp.int32)
  last = jnp.max(jnp.where(active, index, 0), -1, keepdims=True)
  return jnp.sort(jnp.where(active, index, last), -1), active.sum(-1, dtype=jnp.int32)
