"""A decoder-only transformer and the head that reads step probabilities off it.

Pre-norm RMSNorm, rotary positions, grouped-query attention, SwiGLU.  Each tensor is declared once,
in a module's `__init__`, as (shape, fan-in, mesh axes).  Layers are stacked along a first axis and
run by a scan.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from prm_jax import config as config_lib
from prm_jax.model import attention as attention_lib

ROWS = ("data", "fsdp")  # mesh axes over which the rows of a batch are split


def weight(
  rngs: nnx.Rngs, shape: tuple[int, ...], std: float, axes: tuple[str | None, ...]
) -> nnx.Param:
  """A float32 parameter; `axes` are the mesh axes it is split over, one per dimension."""
  return nnx.Param(std * jax.random.normal(rngs.params(), shape), axes=axes)


def scale(width: int) -> nnx.Param:
  return nnx.Param(jnp.ones(width), axes=(None,))


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
  """Splits an activation over the mesh in use; without one, does nothing."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
  square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
  return (x * jax.lax.rsqrt(square + epsilon)).astype(x.dtype) * scale.astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
  """Rotary position embedding (arXiv:2104.09864), halves layout.  x: `[B, T, N, H]`."""
  frequency = theta ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
  angle = positions[:, :, None, None] * frequency
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(x.dtype)


class Block(nnx.Module):
  """One layer: attention, then feed-forward, each added to the residual."""

  def __init__(self, c: config_lib.Model, rngs: nnx.Rngs):
    D, N, K, H, F = c.width, c.heads, c.kv_heads, c.head_size, c.mlp_width
    self.attention_norm = scale(D)
    self.query = weight(rngs, (D, N, H), D**-0.5, ("fsdp", "tensor", None))
    self.key = weight(rngs, (D, K, H), D**-0.5, ("fsdp", "tensor", None))
    self.value = weight(rngs, (D, K, H), D**-0.5, ("fsdp", "tensor", None))
    self.output = weight(rngs, (N, H, D), (N * H) ** -0.5, ("tensor", None, "fsdp"))
    self.mlp_norm = scale(D)
    self.gate = weight(rngs, (D, F), D**-0.5, ("fsdp", "tensor"))
    self.up = weight(rngs, (D, F), D**-0.5, ("fsdp", "tensor"))
    self.down = weight(rngs, (F, D), F**-0.5, ("tensor", "fsdp"))
    self.config = c

  def __call__(self, x: jax.Array, positions: jax.Array, subtree_end: jax.Array) -> jax.Array:
    c, dtype = self.config, x.dtype
    y = rms_norm(x, self.attention_norm[...], c.norm_epsilon)
    q = jnp.einsum("BTD,DNH->BTNH", y, self.query[...].astype(dtype))
    k = jnp.einsum("BTD,DKH->BTKH", y, self.key[...].astype(dtype))
    v = jnp.einsum("BTD,DKH->BTKH", y, self.value[...].astype(dtype))
    q = constrain(rotate(q, positions, c.rope_theta), ROWS, None, "tensor", None)
    k = rotate(k, positions, c.rope_theta)
    y = attention_lib.attention(q, k, v, subtree_end)
    x = x + jnp.einsum("BTNH,NHD->BTD", y, self.output[...].astype(dtype))
    y = rms_norm(x, self.mlp_norm[...], c.norm_epsilon)
    gate = jnp.einsum("BTD,DF->BTF", y, self.gate[...].astype(dtype))
    up = jnp.einsum("BTD,DF->BTF", y, self.up[...].astype(dtype))
    y = constrain(jax.nn.silu(gate) * up, ROWS, None, "tensor")
    x = x + jnp.einsum("BTF,FD->BTD", y, self.down[...].astype(dtype))
    return constrain(x, ROWS, None, None)


class StepScorer(nnx.Module):
  """Decoder with a step head (C classes) and, for its auxiliary loss, a language-model head."""

  def __init__(self, c: config_lib.Model, vocab_size: int, num_classes: int, rngs: nnx.Rngs):
    D = c.width
    self.embedding = weight(rngs, (vocab_size, D), c.embedding_std, ("fsdp", "tensor"))
    stack = nnx.vmap(lambda r: Block(c, r), in_axes=0, out_axes=0)
    self.blocks = stack(rngs.split(c.layers))
    self.final_norm = scale(D)
    # Zero weights: training starts from uniform probabilities, whatever the trunk.
    self.head = nnx.Param(jnp.zeros((D, num_classes)), axes=("fsdp", None))
    self.head_bias = nnx.Param(jnp.zeros(num_classes), axes=(None,))
    if not c.tied_embeddings:
      self.language_model = weight(rngs, (D, vocab_size), D**-0.5, ("fsdp", "tensor"))
    self.config = c

  def hidden(self, tokens: jax.Array, positions: jax.Array, subtree_end: jax.Array) -> jax.Array:
    """Final hidden states `[B, T, D]` of packed rows; arguments int32 `[B, T]` (types.Batch)."""
    c = self.config
    x = self.embedding[...].astype(c.dtype).at[tokens].get(mode="clip")
    x = constrain(x, ROWS, None, None)
    block, layers = nnx.split(self.blocks)

    def layer(x, weights):
      return nnx.merge(block, weights)(x, positions, subtree_end), None

    if c.remat:
      layer = jax.checkpoint(layer)
    x, _ = jax.lax.scan(layer, x, layers, unroll=c.layers if c.unroll_layers else 1)
    return rms_norm(x, self.final_norm[...], c.norm_epsilon)

  def read(self, hidden: jax.Array, read_positions: jax.Array) -> jax.Array:
    """Class logits, float32 `[B, R, C]`, at the given positions `[B, R]` only."""
    at = jnp.take_along_axis(hidden, read_positions[..., None], axis=1).astype(jnp.float32)
    return jnp.einsum("BRD,DC->BRC", at, self.head[...]) + self.head_bias[...]

  def next_token_logits(self, hidden: jax.Array) -> jax.Array:
    """Vocabulary logits, float32 `[B, T, V]`."""
    if self.config.tied_embeddings:
      matrix = self.embedding[...].T
    else:
      matrix = self.language_model[...]
    return jnp.einsum(
      "BTD,DV->BTV", hidden, matrix.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
