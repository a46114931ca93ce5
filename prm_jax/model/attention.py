"""Attention over packed trees behind one signature: dense, blockwise, or the TPU kernel."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from prm_jax.model import blockwise, tree_kernel
from prm_jax.model.block_mask import TreeMask
from prm_jax.model.sharding import HEADS, ROWS, divides

BLOCKWISE_FROM = 512  # shortest row, in tokens, for which "auto" is blockwise on CPU and GPU
# Tokens per block.  On CPU a block fits the cache.  On GPU each loop iteration pays kernel-launch
# latency, so blocks are larger; this size is reasoned, not measured.
CPU_BLOCK, GPU_BLOCK = 64, 256


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
  """Returns `cap * tanh(x / cap)` (Gemma 2), or `x` if the cap is 0."""
  return cap * jnp.tanh(x / cap) if cap else x


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: TreeMask,
  *,
  scale: float | None = None,
  softcap: float = 0.0,
  implementation: str = "auto",
) -> jax.Array:
  """Computes grouped-query attention under a tree mask.

  Args:
    q: `[B, T, N, H]`.
    k, v: `[B, T, K, H]`; N is a multiple of K.
    mask: the mask of B rows of T tokens.
    scale: multiplies the scores; None: `H**-0.5`.
    softcap: cap of the scaled scores, see `soft_cap`; 0: none.
    implementation: see `config.Model.attention`.  Rows are padded to a multiple of its block size.

  Returns:
    `[B, T, N, H]`, in the dtype of v; the softmax is float32.

  Raises:
    ValueError: `implementation` is "kernel" and the devices are not TPUs.
  """
  B, T, N, H = q.shape
  K = k.shape[2]
  attend, multiple = _choose(implementation, T)
  if extra := -T % multiple:
    q, k, v = (jnp.pad(x, [(0, 0), (0, extra), (0, 0), (0, 0)]) for x in (q, k, v))
    mask = mask.padded(extra)
  # Heads come before tokens, so that both einsums are batched matrix products: twice as fast on CPU
  # as contracting [B, T, K, G, H] in place.  B and K stay separate axes, so that each is sharded.
  q = q.reshape(B, -1, K, N // K, H).transpose(0, 2, 3, 1, 4)
  q = q * (H**-0.5 if scale is None else scale)
  k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
  q, k, v = (checkpoint_name(x, "attention_inputs") for x in (q, k, v))
  out = attend(q, k, v, mask, softcap)
  return out.transpose(0, 3, 1, 2, 4).reshape(B, -1, N, H)[:, :T]


def _choose(implementation: str, T: int) -> tuple[Callable, int]:
  """Returns the attention function, and the number that must divide its T."""
  on = platform()
  if implementation == "auto" and on == "tpu":
    implementation = "kernel" if T >= tree_kernel.LANES else "dense"
  elif implementation == "auto":
    implementation = "blockwise" if T >= BLOCKWISE_FROM else "dense"
  if implementation == "kernel":
    if on != "tpu":
      raise ValueError(
        f'model.attention="kernel" needs TPUs, but the platform is {on}; leave it at "auto", or '
        'choose "blockwise" or "dense"'
      )
    return functools.partial(_per_device, tree_kernel.attention), tree_kernel.multiple(T)
  block = CPU_BLOCK if on == "cpu" else GPU_BLOCK
  if implementation == "blockwise" and block < T:  # a single block has nothing to skip
    attend = functools.partial(blockwise.attention, block=block)
    return functools.partial(_per_device, attend), block
  return _dense, 1


def platform() -> str:
  """Returns the current mesh's platform, also of an abstract mesh; without one, JAX's default."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def _dense(q: jax.Array, k: jax.Array, v: jax.Array, mask: TreeMask, softcap: float) -> jax.Array:
  """Computes `blockwise.attention` with one softmax over all T keys."""
  B, K, G, T, H = q.shape
  q = q.reshape(B, K, G * T, H)
  scores = jnp.einsum("BKQH,BKSH->BKQS", q, k, preferred_element_type=jnp.float32)
  scores = soft_cap(scores, softcap).reshape(B, K * G, T, T)
  scores = jnp.where(mask.dense()[:, None], scores, -jnp.inf)
  weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
  total = weights.sum(-1).reshape(B, K, G * T, 1)
  weights = weights.reshape(B, K, G * T, T).astype(v.dtype)
  out = jnp.einsum("BKQS,BKSH->BKQH", weights, v, preferred_element_type=jnp.float32) / total
  return out.astype(v.dtype).reshape(B, K, G, T, H)


def _per_device(
  attend: Callable, q: jax.Array, k: jax.Array, v: jax.Array, mask: TreeMask, softcap: float
) -> jax.Array:
  """Runs `attend` on each device's shard of rows and heads, or on all of them without a mesh.

  Rows or heads that a mesh axis does not divide are replicated over it: all its devices compute the
  same result.  If the axis divides the query heads but not the key heads, the key heads are first
  repeated until it divides them, so that each device holds the keys of its queries.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return attend(q, k, v, mask, softcap)
  B, K, G, T, H = q.shape
  rows = ROWS if divides(ROWS, B, mesh) else None
  heads = HEADS if divides(HEADS, K * G, mesh) else None
  if heads:
    times = math.lcm(K, mesh.shape[HEADS]) // K
    q = q.reshape(B, K * times, G // times, T, H)
    k, v = (jnp.repeat(x, times, axis=1) for x in (k, v))
  spec, of_rows = PartitionSpec(rows, heads), PartitionSpec(rows)
  split = jax.shard_map(
    functools.partial(attend, softcap=softcap),
    in_specs=(spec, spec, spec, TreeMask(of_rows, of_rows, PartitionSpec())),
    out_specs=spec,
    check_vma=False,  # a Pallas call does not declare over which axes its results vary
  )
  return split(q, k, v, mask).reshape(B, K, G, T, H)
