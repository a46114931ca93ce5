"""Attention over packed trees, behind one signature: dense, block by block, or a TPU kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from prm_jax.model import block_mask, blockwise, tree_kernel

ROWS = ("data", "fsdp")  # mesh axes over which the rows of a batch are split
HEADS = "tensor"  # and heads
MASKED = -jnp.inf  # every token sees itself, so no softmax is over nothing
LONG = 512  # tokens from which a row is worth splitting on a CPU or GPU
# Tokens of a block.  On a CPU what is at work at once fits its cache.  On a GPU a loop of small
# programs waits for each to start, so there are fewer: by that argument, not by measurement.
CPU_BLOCK, GPU_BLOCK = 64, 256

Implementation = Literal["auto", "dense", "blockwise", "kernel"]


def visible(
  subtree_end: jax.Array,
  positions: jax.Array | None = None,
  window: jax.Array | int | None = None,
) -> jax.Array:
  """Which tokens each token sees, by the rule of `live_blocks.sees`.

  Args:
    subtree_end: int32 `[B, T]`, index just past each token's last descendant.
    positions: int32 `[B, T]`, depth of each token; needed only with a window.
    window: tokens seen, oneself included; None: all.

  Returns:
    bool `[B, T, T]`, query by key.  Every token sees itself.
  """
  index = jnp.arange(subtree_end.shape[1])
  distance = None if window is None else positions[:, :, None] - positions[:, None]
  return block_mask.sees(index[:, None], index, subtree_end[:, None], distance, window)


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
  implementation: Implementation = "auto",
) -> jax.Array:
  """Grouped-query attention under the tree rule.

  Args:
    q: `[B, T, N, H]`, k and v: `[B, T, K, H]`, with N a multiple of K.
    subtree_end, positions: int32 `[B, T]`; positions are needed only with a window.
    window: see `visible`.
    scale: of the scores; None: 1 / sqrt(H).
    softcap: scores become `softcap * tanh(scores / softcap)`; 0: they stay.
    implementation: see `config.Model.attention`.  Rows that are too short for the blocks of one,
      or end within one, are padded for it.

  Returns:
    `[B, T, N, H]`, in q's dtype; the softmax is float32.

  Raises:
    ValueError: the kernel is asked for, and the devices are no TPUs.
  """
  B, T, N, H = q.shape
  K = k.shape[2]
  attend, block = _form(implementation, T)
  if extra := -T % block:
    q, k, v, subtree_end, positions = _padded(extra, q, k, v, subtree_end, positions)
  # Heads before tokens, so that both products are batches of plain matrices: twice as fast on CPU
  # as contracting [B, T, K, G, H] in place, and B and K stay apart for the mesh to split.
  q = q.reshape(B, -1, K, N // K, H).transpose(0, 2, 3, 1, 4)
  q = q * (H**-0.5 if scale is None else scale)
  k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
  out = attend(q, k, v, subtree_end, positions, window, softcap)
  return out.transpose(0, 3, 1, 2, 4).reshape(B, -1, N, H)[:, :T]


def _form(implementation: Implementation, T: int) -> tuple[Callable, int]:
  """What computes attention of rows of T tokens, and of how many tokens they must be a multiple."""
  platform = _platform()
  if implementation == "auto" and platform == "tpu":
    implementation = "kernel" if T >= tree_kernel.LANES else "dense"
  elif implementation == "auto":
    implementation = "blockwise" if T >= LONG else "dense"
  if implementation == "kernel":
    if platform != "tpu":
      raise ValueError(
        f'model.attention="kernel" is for TPUs, and the devices are of the platform {platform}; '
        'leave it at "auto", or choose "blockwise" or "dense"'
      )
    # of a length that large blocks divide, if it is long enough for them
    block = tree_kernel.LANES if T < tree_kernel.BLOCK else tree_kernel.BLOCK
    return functools.partial(_per_device, tree_kernel.attention), block
  if implementation == "blockwise":
    size = CPU_BLOCK if platform == "cpu" else GPU_BLOCK
    return functools.partial(_per_device, functools.partial(blockwise.attention, size=size)), size
  return _dense, 1


def _platform() -> str:
  """Of the mesh in use, which may be of devices that are not here; without one, of those here."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def _padded(extra: int, *arrays: jax.Array | None) -> list[jax.Array | None]:
  """q, k, v, subtree_end and positions of rows with so many tokens more, which see themselves."""
  q, k, v, end, positions = (
    x if x is None else jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2)) for x in arrays
  )
  index = jnp.arange(end.shape[1], dtype=end.dtype)
  return [q, k, v, jnp.maximum(end, index + 1), positions]


def _dense(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  subtree_end: jax.Array,
  positions: jax.Array | None,
  window: jax.Array | int | None,
  softcap: float,
) -> jax.Array:
  """One softmax over all keys: `[B, K, G, T, H]` over `[B, K, T, H]`, scaled."""
  B, K, G, T, H = q.shape
  q = q.reshape(B, K, G * T, H)
  scores = jnp.einsum("BKQH,BKSH->BKQS", q, k, preferred_element_type=jnp.float32)
  scores = soft_cap(scores, softcap).reshape(B, K * G, T, T)
  scores = jnp.where(visible(subtree_end, positions, window)[:, None], scores, MASKED)
  weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
  total = weights.sum(-1).reshape(B, K, G * T, 1)
  weights = weights.reshape(B, K, G * T, T).astype(v.dtype)
  out = jnp.einsum("BKQS,BKSH->BKQH", weights, v, preferred_element_type=jnp.float32) / total
  return out.astype(v.dtype).reshape(B, K, G, T, H)


def _per_device(attend, q, k, v, subtree_end, positions, window, softcap) -> jax.Array:
  """`attend` on each device's own rows and heads; without a mesh, on all of them.

  What a mesh axis does not divide is not split over it, as of parameters: all devices along it
  compute the same.  Where it divides the heads of queries but not those of keys, these are repeated
  until it does, and each device has the keys of its own queries.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return attend(q, k, v, subtree_end, positions, window, softcap)
  B, K, G, T, H = q.shape
  rows = ROWS if B % math.prod(mesh.shape[axis] for axis in ROWS) == 0 else None
  heads = HEADS if K * G % mesh.shape[HEADS] == 0 else None
  if heads:
    times = math.lcm(K, mesh.shape[HEADS]) // K
    q = q.reshape(B, K * times, G // times, T, H)
    k, v = (jnp.repeat(x, times, axis=1) for x in (k, v))
  spec = PartitionSpec(rows, heads)
  split = jax.shard_map(
    functools.partial(attend, softcap=softcap),
    in_specs=(spec, spec, spec, PartitionSpec(rows), PartitionSpec(rows), PartitionSpec()),
    out_specs=spec,
    check_vma=False,  # a Pallas call does not say over which axes its results vary
  )
  return split(q, k, v, subtree_end, positions, window).reshape(B, K, G, T, H)
