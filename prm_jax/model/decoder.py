"""A decoder-only transformer and the head that reads step probabilities off it.

RMSNorm, rotary positions, grouped-query attention, a gated feed-forward.  What sets the public
families apart is configuration, a field of `config.Model` each.  Each tensor is declared once, in
a module's `__init__`, as (shape, fan-in, mesh axes).  Layers are stacked along a first axis and run
by a scan; a layer that slides differs from a full one by a flag.

Low-rank factors (LoRA) are parameters of the layers, `query_lora_in [L, D, r]` and `query_lora_out
[L, r, N, H]` and so on.  Not by qwix, which would add them from outside: 0.1.8 traces modules one
by one and fails on layers that are merged inside a scan (IndexError, with JAX 0.10 and 0.12).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from prm_jax import config as config_lib
from prm_jax.model import attention as attention_lib
from prm_jax.model import rotary
from prm_jax.model.attention import ROWS

EVERYTHING = np.iinfo(np.int32).max  # the window of a layer without one
POLICIES = {
  "dots": jax.checkpoint_policies.dots_saveable,
  "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
EQUATIONS = {  # of input and weight, for each of config.PROJECTIONS; S is B times T
  "query": "SD,DNH->SNH",
  "key": "SD,DKH->SKH",
  "value": "SD,DKH->SKH",
  "output": "SNH,NHD->SD",
  "gate": "SD,DF->SF",
  "up": "SD,DF->SF",
  "down": "SF,FD->SD",
}
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}
COLUMNS = ("tensor", "fsdp")  # mesh axes over which the columns of the embedding are split
Axis = str | tuple[str, ...] | None  # of the mesh, or several: over which a dimension is split


def weight(
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  std: float,
  axes: tuple[Axis, ...],
  dtype: str = "float32",
  otherwise: tuple[Axis, ...] | None = None,
) -> nnx.Param:
  """A random parameter.

  Args:
    axes: the mesh axes it is split over, one per dimension.
    otherwise: where they do not divide it.
  """
  value = (std * jax.random.normal(rngs.params(), shape)).astype(dtype)
  return nnx.Param(value, axes=axes, otherwise=otherwise)


def constant(value: float, shape: tuple[int, ...], axes: tuple[Axis, ...], dtype: str) -> nnx.Param:
  return nnx.Param(jnp.full(shape, value, dtype), axes=axes)


def constrain(x: jax.Array, *axes: Axis) -> jax.Array:
  """Splits an activation over the mesh in use; without one, does nothing."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def constrain_columns(width: int) -> Callable[..., jax.Array]:
  """`constrain`, or what does nothing where the mesh in use cannot split so many columns."""
  sizes = jax.sharding.get_abstract_mesh().shape
  pieces = math.prod(sizes.get(axis, 1) for axis in COLUMNS)
  return constrain if width % pieces == 0 else lambda x, *axes: x


def rms_norm(x: jax.Array, scale: jax.Array, c: config_lib.Model) -> jax.Array:
  """Over the last axis, in float32; Gemma's offset scale is applied before rounding."""
  square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
  normal = x * jax.lax.rsqrt(square + c.norm_epsilon)
  if c.norm_offset:
    return (normal * (1 + scale.astype(jnp.float32))).astype(x.dtype)
  return normal.astype(x.dtype) * scale.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def product(equation: str, x: jax.Array, weight: jax.Array, wide: bool) -> jax.Array:
  """`einsum(equation, x, weight)` in x's dtype.

  The gradient of the weight leaves the product of backward in float32 if `wide`, otherwise in x's
  dtype.  Each device has summed its own tokens by then, so that is also the dtype in which it is
  summed over devices, of which plain differentiation would leave no choice: the one of x.
  """
  return jnp.einsum(equation, x, weight.astype(x.dtype))


def _product_forward(equation, x, weight, wide):
  return product(equation, x, weight, wide), (x, weight)


def _product_backward(equation, wide, saved, gradient):
  x, weight = saved
  inputs, of_weight, output = equation.replace("->", ",").split(",")
  for_x = jnp.einsum(f"{output},{of_weight}->{inputs}", gradient, weight.astype(x.dtype))
  dtype = jnp.float32 if wide else x.dtype
  equation = f"{inputs},{output}->{of_weight}"
  for_weight = jnp.einsum(equation, x, gradient, preferred_element_type=dtype)
  return for_x, for_weight.astype(weight.dtype)


product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up(table: jax.Array, tokens: jax.Array, c: config_lib.Model) -> jax.Array:
  """Rows of the embedding `[V, D]`, in the dtype of activations: `[B, T, D]`.

  Its gradient is added up, over tokens and devices, in the dtype of `product`'s.

  Each device looks up its own columns, for all rows of its part of "data", and none ever holds more
  of the table, or of its gradient, than it stores.  Where the mesh does not divide the columns, the
  table is split by rows (`StepScorer`), and XLA gathers all of it.
  """
  split = constrain_columns(table.shape[1])
  table = split(table.astype(c.dtype), None, COLUMNS)
  x = split(table.at[split(tokens, "data", None)].get(mode="clip"), "data", None, COLUMNS)
  # In two exchanges, one axis each: for both at once XLA would gather x whole.
  return split(x, ROWS, None, "tensor")


def _look_up_forward(table, tokens, c):
  return look_up(table, tokens, c), (table, tokens)


def _look_up_backward(c, saved, gradient):
  table, tokens = saved
  dtype = jnp.float32 if c.gradient_dtype == "float32" else gradient.dtype
  split = constrain_columns(table.shape[1])
  gradient = split(split(gradient, ROWS, None, "tensor"), "data", None, COLUMNS)
  out = split(jnp.zeros(table.shape, dtype), None, COLUMNS)
  out = out.at[split(tokens, "data", None)].add(gradient.astype(dtype), mode="clip")
  return split(out, None, COLUMNS).astype(table.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)


def recomputed(layer: Callable, c: config_lib.Model) -> Callable:
  """A layer of which the backward pass computes again what `c.remat` says."""
  if c.remat == "none":
    return layer
  if c.remat == "full":
    policy = jax.checkpoint_policies.save_only_these_names(*c.saved)
  else:
    policy = POLICIES[c.remat]
  # Inside a loop nothing can be merged with the forward pass: no barriers are needed, and they
  # would keep the compiler from fusing.
  return jax.checkpoint(layer, policy=policy, prevent_cse=c.unroll_layers)


def low_rank(equation: str) -> tuple[str, str, str, str]:
  """Axes of a projection's input, of its weight that are summed over, of those left, of its output.

  `SNH,NHD->SD` has SNH, NH, D and SD.
  """
  inputs, weight, output = equation.replace("->", ",").split(",")
  summed = "".join(axis for axis in weight if axis in inputs)
  return inputs, summed, weight[len(summed) :], output


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
    for name in c.lora_targets if c.lora_rank else ():
      self.add_factors(name, rngs)

  def add_factors(self, name: str, rngs: nnx.Rngs) -> None:
    """Low-rank factors of a weight, float32; the second is zero, so that nothing changes yet."""
    param, rank = getattr(self, name), self.config.lora_rank
    shape, axes = param.get_value().shape, param.get_metadata()["axes"]
    inputs = len(EQUATIONS[name].split(",")[0]) - 1  # its axes that are summed over come first
    std = float(np.prod(shape[:inputs])) ** -0.5
    first = weight(rngs, (*shape[:inputs], rank), std, (*axes[:inputs], None))
    second = constant(0, (rank, *shape[inputs:]), (None, *axes[inputs:]), "float32")
    setattr(self, f"{name}_lora_in", first)
    setattr(self, f"{name}_lora_out", second)

  def project(self, x: jax.Array, name: str) -> jax.Array:
    """The product with one of the layer's weights, and with its low-rank factors.

    Rows and tokens are one axis: XLA's CPU backend multiplies matrices a third faster than stacks.
    """
    c, equation, (B, T, *_) = self.config, EQUATIONS[name], x.shape
    wide = c.gradient_dtype == "float32"
    x = x.reshape(B * T, *x.shape[2:])
    y = product(equation, x, getattr(self, name)[...], wide)
    if c.lora_rank and name in c.lora_targets:
      inputs, summed, new, output = low_rank(equation)
      low = product(f"{inputs},{summed}r->Sr", x, getattr(self, f"{name}_lora_in")[...], wide)
      high = getattr(self, f"{name}_lora_out")[...]
      y += c.lora_alpha / c.lora_rank * product(f"Sr,r{new}->{output}", low, high, wide)
    y = checkpoint_name(y, name)
    return y.reshape(B, T, *y.shape[1:])

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
    q, k, v = (self.project(x, name) for name in ("query", "key", "value"))
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
      implementation=c.attention,
    )
    return self.project(y, "output")

  def feed_forward(self, x: jax.Array) -> jax.Array:
    gate, up = self.project(x, "gate"), self.project(x, "up")
    y = constrain(ACTIVATIONS[self.config.activation](gate) * up, ROWS, None, "tensor")
    return self.project(y, "down")


class StepScorer(nnx.Module):
  """Decoder with a step head (C classes) and a language-model head, which only its losses use."""

  def __init__(self, c: config_lib.Model, vocab_size: int, num_classes: int, rngs: nnx.Rngs):
    D, dtype = c.width, c.param_dtype
    self.embedding = weight(
      rngs, (vocab_size, D), c.embedding_std, (None, COLUMNS), dtype, otherwise=("fsdp", "tensor")
    )
    stack = nnx.vmap(lambda r: Block(c, r), in_axes=0, out_axes=0)
    self.blocks = stack(rngs.split(c.layers))
    self.final_norm = constant(0 if c.norm_offset else 1, (D,), (None,), dtype)
    # Zero weights: training starts from uniform probabilities, whatever the trunk.
    self.head = nnx.Param(jnp.zeros((D, num_classes)), axes=("fsdp", None))
    self.head_bias = nnx.Param(jnp.zeros(num_classes), axes=(None,))
    if not c.tied_embeddings:
      self.language_model = weight(rngs, (D, vocab_size), D**-0.5, ("fsdp", "tensor"), dtype)
    self.config = c

  def hidden(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    subtree_end: jax.Array,
  ) -> jax.Array:
    """Final hidden states `[B, T, D]` of packed rows; arguments int32 `[B, T]` (types.Batch)."""
    c = self.config
    x = look_up(self.embedding[...], tokens, c)
    if c.scale_embeddings:
      x = x * jnp.asarray(c.width**0.5, x.dtype)  # rounded first: bfloat16 checkpoints expect it
    x = constrain(x, ROWS, None, None)
    block, layers = nnx.split(self.blocks)
    slides = np.array([c.window_pattern[i % len(c.window_pattern)] == "s" for i in range(c.layers)])

    def layer(x, inputs):
      weights, sliding = inputs
      return nnx.merge(block, weights)(x, positions, subtree_end, sliding), None

    unroll = c.layers if c.unroll_layers else 1
    x, _ = jax.lax.scan(recomputed(layer, c), x, (layers, slides), unroll=unroll)
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
