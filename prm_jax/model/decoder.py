"""A decoder-only transformer and the head that reads step probabilities off it.

RMSNorm, rotary positions, grouped-query attention, a gated feed-forward.  What sets the public
families apart is configuration, a field of `config.Model` each.  Each tensor is declared once, in
a module's `__init__`, as (shape, fan-in, mesh axes).  Layers are stacked along a first axis and run
by a scan; a layer that slides differs from a full one by a flag.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from prm_jax import config as config_lib
from prm_jax.model import attention as attention_lib
from prm_jax.model import rotary

ROWS = ("data", "fsdp")  # mesh axes over which the rows of a batch are split
EVERYTHING = np.iinfo(np.int32).max  # the window of a layer without one
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}


def weight(
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  std: float,
  axes: tuple[str | None, ...],
  dtype: str = "float32",
) -> nnx.Param:
  """A random parameter; `axes` are the mesh axes it is split over, one per dimension."""
  return nnx.Param((std * jax.random.normal(rngs.params(), shape)).astype(dtype), axes=axes)


def constant(
  value: float, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: str
) -> nnx.Param:
  return nnx.Param(jnp.full(shape, value, dtype), axes=axes)


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
  """Splits an activation over the mesh in use; without one, does nothing."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def rms_norm(x: jax.Array, scale: jax.Array, c: config_lib.Model) -> jax.Array:
  """Over the last axis, in float32; Gemma's offset scale is applied before rounding."""
  square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
  normal = x * jax.lax.rsqrt(square + c.norm_epsilon)
  if c.norm_offset:
    return (normal * (1 + scale.astype(jnp.float32))).astype(x.dtype)
  return normal.astype(x.dtype) * scale.astype(x.dtype)


class Block(nnx.Module):
  """One layer: attention, then feed-forward, each added to the residual."""

  def __init__(self, c: config_lib.Model, rngs: nnx.Rngs):
    D, N, K, H, F, dtype = c.width, c.heads, c.kv_heads, c.head_size, c.mlp_width, c.param_dtype
    scale = lambda size: constant(0 if c.norm_offset else 1, (size,), (None,), dtype)
    self.attention_norm = scale(D)
    self.query = weight(rngs, (D, N, H), D**-0.5, ("fsdp", "tensor", None), dtype)
    self.key = weight(rngs, (D, K, H), D**-0.5, ("fsdp", "tensor", None), dtype)
    self.value = weight(rngs, (D, K, H), D**-0.5, ("fsdp", "tensor", None), dtype)
    self.output = weight(rngs, (N, H, D), (N * H) ** -0.5, ("tensor", None, "fsdp"), dtype)
    self.mlp_norm = scale(D)
    self.gate = weight(rngs, (D, F), D**-0.5, ("fsdp", "tensor"), dtype)
    self.up = weight(rngs, (D, F), D**-0.5, ("fsdp", "tensor"), dtype)
    self.down = weight(rngs, (F, D), F**-0.5, ("tensor", "fsdp"), dtype)
    if c.attention_bias:
      self.query_bias = constant(0, (N, H), ("tensor", None), dtype)
      self.key_bias = constant(0, (K, H), ("tensor", None), dtype)
      self.value_bias = constant(0, (K, H), ("tensor", None), dtype)
    if c.query_key_norm:
      self.query_norm, self.key_norm = scale(H), scale(H)
    if c.post_norms:
      self.post_attention_norm, self.post_mlp_norm = scale(D), scale(D)
    self.config = c

  def __call__(
    self,
    x: jax.Array,
    positions: jax.Array,
    subtree_end: jax.Array,
    sliding: jax.Array | bool = False,
  ) -> jax.Array:
    """`[B, T, D]` to the same; `sliding`, bool `[]`, says whether this layer has the window."""
    c = self.config
    y = self.attend(rms_norm(x, self.attention_norm[...], c), positions, subtree_end, sliding)
    x = x + (rms_norm(y, self.post_attention_norm[...], c) if c.post_norms else y)
    y = self.feed_forward(rms_norm(x, self.mlp_norm[...], c))
    x = x + (rms_norm(y, self.post_mlp_norm[...], c) if c.post_norms else y)
    return constrain(x, ROWS, None, None)

  def attend(
    self,
    x: jax.Array,
    positions: jax.Array,
    subtree_end: jax.Array,
    sliding: jax.Array | bool,
  ) -> jax.Array:
    c, dtype = self.config, x.dtype
    q = jnp.einsum("BTD,DNH->BTNH", x, self.query[...].astype(dtype))
    k = jnp.einsum("BTD,DKH->BTKH", x, self.key[...].astype(dtype))
    v = jnp.einsum("BTD,DKH->BTKH", x, self.value[...].astype(dtype))
    if c.attention_bias:
      q = q + self.query_bias[...].astype(dtype)
      k = k + self.key_bias[...].astype(dtype)
      v = v + self.value_bias[...].astype(dtype)
    if c.query_key_norm:
      q, k = rms_norm(q, self.query_norm[...], c), rms_norm(k, self.key_norm[...], c)
    frequency = rotary.layer_frequencies(c, sliding)
    q = constrain(rotary.rotate(q, positions, frequency), ROWS, None, "tensor", None)
    k = rotary.rotate(k, positions, frequency)
    y = attention_lib.attention(
      q,
      k,
      v,
      subtree_end,
      positions=positions,
      window=jnp.where(sliding, c.window, EVERYTHING) if c.window else None,
      scale=(c.attention_scalar or c.head_size) ** -0.5,
      softcap=c.attention_softcap,
    )
    return jnp.einsum("BTNH,NHD->BTD", y, self.output[...].astype(dtype))

  def feed_forward(self, x: jax.Array) -> jax.Array:
    gate = jnp.einsum("BTD,DF->BTF", x, self.gate[...].astype(x.dtype))
    up = jnp.einsum("BTD,DF->BTF", x, self.up[...].astype(x.dtype))
    y = constrain(ACTIVATIONS[self.config.activation](gate) * up, ROWS, None, "tensor")
    return jnp.einsum("BTF,FD->BTD", y, self.down[...].astype(x.dtype))


class StepScorer(nnx.Module):
  """Decoder with a step head (C classes) and a language-model head, which only its losses use."""

  def __init__(self, c: config_lib.Model, vocab_size: int, num_classes: int, rngs: nnx.Rngs):
    D, dtype = c.width, c.param_dtype
    self.embedding = weight(rngs, (vocab_size, D), c.embedding_std, ("fsdp", "tensor"), dtype)
    stack = nnx.vmap(lambda r: Block(c, r), in_axes=0, out_axes=0)
    self.blocks = stack(rngs.split(c.layers))
    self.final_norm = constant(0 if c.norm_offset else 1, (D,), (None,), dtype)
    # Zero weights: training starts from uniform probabilities, whatever the trunk.
    self.head = nnx.Param(jnp.zeros((D, num_classes)), axes=("fsdp", None))
    self.head_bias = nnx.Param(jnp.zeros(num_classes), axes=(None,))
    if not c.tied_embeddings:
      self.language_model = weight(rngs, (D, vocab_size), D**-0.5, ("fsdp", "tensor"), dtype)
    self.config = c

  def hidden(self, tokens: jax.Array, positions: jax.Array, subtree_end: jax.Array) -> jax.Array:
    """Final hidden states `[B, T, D]` of packed rows; arguments int32 `[B, T]` (types.Batch)."""
    c = self.config
    x = self.embedding[...].astype(c.dtype).at[tokens].get(mode="clip")
    if c.scale_embeddings:
      x = x * jnp.asarray(c.width**0.5, x.dtype)  # rounded first: bfloat16 checkpoints expect it
    x = constrain(x, ROWS, None, None)
    block, layers = nnx.split(self.blocks)
    pattern = [c.window_pattern[i % len(c.window_pattern)] == "s" for i in range(c.layers)]

    def layer(x, inputs):
      weights, sliding = inputs
      return nnx.merge(block, weights)(x, positions, subtree_end, sliding), None

    if c.remat:
      layer = jax.checkpoint(layer)
    inputs = (layers, np.array(pattern))
    x, _ = jax.lax.scan(layer, x, inputs, unroll=c.layers if c.unroll_layers else 1)
    return rms_norm(x, self.final_norm[...], c)

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
    logits = jnp.einsum(
      "BTD,DV->BTV", hidden, matrix.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    return attention_lib.soft_cap(logits, self.config.logit_softcap)
