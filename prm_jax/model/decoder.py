"""The process reward model: a decoder-only transformer with a class head that reads each step.

Each parameter is declared once, in an `__init__`, with its shape, standard deviation and mesh axes.
The layers are stacked along a leading axis L, and one scan runs them.

Low-rank factors (LoRA) are parameters of the layers, such as `query_lora_in [L, D, r]` and
`query_lora_out [L, r, N, H]`.  qwix 0.1.8, which would add them from outside, fails on layers that
are merged inside a scan (IndexError, with JAX 0.10 and 0.12).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from prm_jax import config as config_lib
from prm_jax.model import attention as attention_lib
from prm_jax.model.block_mask import TreeMask
from prm_jax.model.embedding import COLUMNS, residual_stream
from prm_jax.model.normalization import rms_norm
from prm_jax.model.products import weight_product
from prm_jax.model.rotary import rotate, tables
from prm_jax.model.sharding import ROWS, Axis, constrain, fitting

NO_WINDOW = np.iinfo(np.int32).max  # the window of a full-attention layer beside sliding ones
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}
REMAT_POLICIES = {
  "dots": jax.checkpoint_policies.dots_saveable,
  "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
# Maps rotated queries [B, T, N, H], rotated keys and plain values [B, T, K, H], and the layer's
# window (None: the model has none) to [B, T, N, H].
Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]


class StepScorer(nnx.Module):
  """A decoder with a class head and, unless embeddings are tied, a language-model head."""

  def __init__(
    self,
    c: config_lib.Model,
    vocab_size: int,
    num_classes: int,
    rngs: nnx.Rngs,
    heads: int = 1,
  ):
    """Declares the parameters, with an ensemble of `heads` class heads on one trunk."""
    D, dtype, outputs = c.width, c.param_dtype, heads * num_classes
    # If COLUMNS does not divide the width, rows are sharded too: see `embedding`.
    self.embedding = weight(
      rngs, (vocab_size, D), c.embedding_std, (None, COLUMNS), dtype, otherwise=("fsdp", "tensor")
    )
    stack = nnx.vmap(lambda r: Block(c, r), in_axes=0, out_axes=0)
    self.blocks = stack(rngs.split(c.layers))
    self.final_norm = constant(0 if c.norm_offset else 1, (D,), (None,), dtype)
    # The class head, in float32: all parameters named head*, which only `class_logits` reads.  It
    # starts at zero, so that training starts from uniform probabilities.
    self.head = constant(0, (D, outputs), ("fsdp", None), "float32")
    self.head_bias = constant(0, (outputs,), (None,), "float32")
    if not c.tied_embeddings:
      self.language_model = weight(rngs, (D, vocab_size), D**-0.5, ("fsdp", "tensor"), dtype)
    self.config, self.num_classes = c, num_classes

  def class_logits(self, hidden: jax.Array, read_positions: jax.Array) -> jax.Array:
    """Returns the class logits of K heads at positions `[B, R]`: float32 `[B, R, K, C]`."""
    # The heads come before the gather, so that the gradient scatters K * C values per read, not D.
    # HIGHEST is full float32 on TPUs too, where it is not the default.
    x = hidden.astype(jnp.float32)
    every = jnp.einsum("BTD,DC->BTC", x, self.head[...], precision=jax.lax.Precision.HIGHEST)
    logits = jnp.take_along_axis(every, read_positions[..., None], axis=1) + self.head_bias[...]
    heads = logits.shape[-1] // self.num_classes
    return logits.reshape(*read_positions.shape, heads, self.num_classes)

  def class_log_probs(self, hidden: jax.Array, read_positions: jax.Array) -> jax.Array:
    """Returns the class log-probabilities, float32 `[B, R, K, C]`, for the loss and for scores."""
    return jax.nn.log_softmax(self.class_logits(hidden, read_positions))

  def next_token_logits(self, hidden: jax.Array) -> jax.Array:
    """Returns the vocabulary logits, float32 `[B, T, V]`."""
    c = self.config
    matrix = self.embedding[...].T if c.tied_embeddings else self.language_model[...]
    logits = jnp.einsum(
      "BTD,DV->BTV", hidden, matrix.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    return attention_lib.soft_cap(logits, c.logit_softcap)

  def hidden(self, tokens: jax.Array, positions: jax.Array, subtree_end: jax.Array) -> jax.Array:
    """Returns the final hidden states `[B, T, D]`, from int32 `[B, T]` arrays of `types.Batch`."""
    c = self.config
    x = residual_stream(self.embedding[...], tokens, c)
    block, weights = nnx.split(self.blocks)
    attend = tree_attention(TreeMask(subtree_end, positions), c)
    rotations = tables(positions, c)

    def layer(x, inputs):
      weights, sliding = inputs
      return nnx.merge(block, weights)(x, rotations, attend, sliding), None

    unroll = c.layers if c.unroll_layers else 1
    x, _ = jax.lax.scan(remat(layer, c), x, (weights, sliding_layers(c)), unroll=unroll)
    return rms_norm(x, self.final_norm[...], c)


def tree_attention(mask: TreeMask, c: config_lib.Model) -> Attention:
  """Returns the attention function of packed rows."""

  def attend(q, k, v, window):
    masked = mask if window is None else dataclasses.replace(mask, window=window)
    return attention_lib.attention(
      q, k, v, masked, scale=scale(c), softcap=c.attention_softcap, implementation=c.attention
    )

  return attend


def scale(c: config_lib.Model) -> float:
  """Returns the scale of attention scores."""
  return (c.attention_scalar or c.head_size) ** -0.5


def sliding_layers(c: config_lib.Model) -> np.ndarray:
  """Returns whether each layer has the window, bool `[L]`, by repeating `window_pattern`."""
  return np.resize([kind == "s" for kind in c.window_pattern], c.layers)


def is_head(name: str) -> bool:
  """Returns whether a parameter of `StepScorer` belongs to the class head."""
  return name.startswith("head")


class Block(nnx.Module):
  """A layer: attention, then feed-forward, each added to the residual stream."""

  def __init__(self, c: config_lib.Model, rngs: nnx.Rngs):
    D, N, K, H, F, dtype = c.width, c.heads, c.kv_heads, c.head_size, c.mlp_width, c.param_dtype
    gain = lambda size: constant(0 if c.norm_offset else 1, (size,), (None,), dtype)
    self.attention_norm = gain(D)
    self.query = weight(rngs, (D, N, H), D**-0.5, ("fsdp", "tensor", None), dtype)
    self.key = weight(rngs, (D, K, H), D**-0.5, ("fsdp", "tensor", None), dtype)
    self.value = weight(rngs, (D, K, H), D**-0.5, ("fsdp", "tensor", None), dtype)
    self.output = weight(rngs, (N, H, D), (N * H) ** -0.5, ("tensor", None, "fsdp"), dtype)
    self.mlp_norm = gain(D)
    self.gate = weight(rngs, (D, F), D**-0.5, ("fsdp", "tensor"), dtype)
    self.up = weight(rngs, (D, F), D**-0.5, ("fsdp", "tensor"), dtype)
    self.down = weight(rngs, (F, D), F**-0.5, ("tensor", "fsdp"), dtype)
    for name, heads in {"query": N, "key": K, "value": K}.items() if c.attention_bias else ():
      setattr(self, f"{name}_bias", constant(0, (heads, H), ("tensor", None), dtype))
    if c.query_key_norm:
      self.query_norm, self.key_norm = gain(H), gain(H)
    if c.post_norms:
      self.post_attention_norm, self.post_mlp_norm = gain(D), gain(D)
    self.config = c
    for name in c.lora_targets if c.lora_rank else ():
      self.add_lora(name, rngs)

  def add_lora(self, name: str, rngs: nnx.Rngs) -> None:
    """Declares the low-rank factors of a weight, in float32; the second factor is zero at first."""
    param, rank = getattr(self, name), self.config.lora_rank
    shape, axes = param.get_value().shape, param.get_metadata()["axes"]
    inputs = input_axes(name)
    std = math.prod(shape[:inputs]) ** -0.5
    lora_in = weight(rngs, (*shape[:inputs], rank), std, (*axes[:inputs], None))
    lora_out = constant(0, (rank, *shape[inputs:]), (None, *axes[inputs:]), "float32")
    setattr(self, f"{name}_lora_in", lora_in)
    setattr(self, f"{name}_lora_out", lora_out)

  def __call__(
    self,
    x: jax.Array,
    rotations: jax.Array,
    attention: Attention,
    sliding: jax.Array | bool = False,
  ) -> jax.Array:
    """Maps the residual stream `[B, T, D]` to that after this layer.

    Args:
      rotations: `[1 or 2, 2, B, T, 1, H / 2]`, from `rotary.tables`, for the tokens' positions.
      attention: maps queries, keys and values to the output; cached decoding passes its own.
      sliding: bool `[]`, whether the layer has the window of the config.
    """
    c = self.config
    y = self.attend(rms_norm(x, self.attention_norm[...], c), rotations, attention, sliding)
    x = x + (rms_norm(y, self.post_attention_norm[...], c) if c.post_norms else y)
    x = checkpoint_name(x, "residual")
    y = rms_norm(x, self.mlp_norm[...], c)
    gate, up = self.project(y, "gate"), self.project(y, "up")
    y = constrain(ACTIVATIONS[c.activation](gate) * up, ROWS, None, "tensor")
    y = self.project(y, "down")
    x = x + (rms_norm(y, self.post_mlp_norm[...], c) if c.post_norms else y)
    return constrain(x, ROWS, None, None)

  def attend(
    self, x: jax.Array, rotations: jax.Array, attention: Attention, sliding: jax.Array | bool
  ) -> jax.Array:
    """Applies attention to normalised `[B, T, D]`, and projects back to the same shape."""
    c = self.config
    q, k, v = (self.project(x, name) for name in ("query", "key", "value"))
    if c.query_key_norm:
      q, k = rms_norm(q, self.query_norm[...], c), rms_norm(k, self.key_norm[...], c)
    table = rotations[jnp.asarray(sliding, jnp.int32) if c.local_rope_theta else 0]
    q = constrain(rotate(q, table), ROWS, None, "tensor", None)
    k = rotate(k, table)
    window = jnp.where(sliding, c.window, NO_WINDOW) if c.window else None
    return self.project(attention(q, k, v, window), "output")

  def project(self, x: jax.Array, name: str) -> jax.Array:
    """Multiplies `x` by one of the layer's weights and its low-rank factors, and adds the bias.

    Rows and tokens are flattened into one axis: XLA's CPU backend computes one matrix product a
    third faster than a batch of them.
    """
    B, T, *_ = x.shape
    y = self.with_low_rank(x.reshape(B * T, *x.shape[2:]), name)
    y = checkpoint_name(y, name)
    y = y.reshape(B, T, *y.shape[1:])
    bias = getattr(self, f"{name}_bias", None)
    return y if bias is None else y + bias[...].astype(y.dtype)

  def with_low_rank(self, x: jax.Array, name: str) -> jax.Array:
    """Multiplies tokens `[S, ...]` by a weight and adds the product with its low-rank factors."""
    c, y = self.config, self.product(x, name)
    if c.lora_rank and name in c.lora_targets:
      high = self.product(self.product(x, f"{name}_lora_in"), f"{name}_lora_out")
      y += c.lora_alpha / c.lora_rank * high
    return y

  def product(self, x: jax.Array, name: str) -> jax.Array:
    """Multiplies tokens `[S, ...]` by one parameter."""
    c, param = self.config, getattr(self, name)
    # A scan over the layers would store all gathered weights, stacked.
    axes = param.get_metadata()["axes"] if c.unroll_layers else ()
    gradient_dtype = c.dtype if c.gradient_dtype == "activations" else "float32"
    return weight_product(x, param[...], gradient_dtype, axes)


def weight(
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  std: float,
  axes: tuple[Axis, ...],
  dtype: str = "float32",
  otherwise: tuple[Axis, ...] | None = None,
) -> nnx.Param:
  """Returns a parameter drawn from a normal distribution.

  Args:
    axes: mesh axis of each dimension (`abstract_params`).
    otherwise: the axes to use where the mesh axes `axes` do not divide the shape.
  """
  value = (std * jax.random.normal(rngs.params(), shape)).astype(dtype)
  return nnx.Param(value, axes=axes, otherwise=otherwise)


def constant(value: float, shape: tuple[int, ...], axes: tuple[Axis, ...], dtype: str) -> nnx.Param:
  """Returns a parameter that is `value` everywhere, with the `axes` of `weight`."""
  return nnx.Param(jnp.full(shape, value, dtype), axes=axes)


def abstract_params(
  c: config_lib.Model,
  vocab_size: int,
  num_classes: int,
  mesh: Mesh | AbstractMesh,
  heads: int = 1,
) -> Any:
  """Returns the parameters as a nested dict of `ShapeDtypeStruct`s with shardings.

  A parameter is sharded over the mesh axes that it was declared with (`weight`); the leading axis
  of stacked layers is not sharded.  Neither is a dimension that its mesh axes do not divide, unless
  the parameter declares other axes for that case.
  """

  def describe(param: nnx.Variable) -> jax.ShapeDtypeStruct:
    shape, dtype, declared = param.get_value().shape, param.get_value().dtype, param.get_metadata()
    fit = lambda axes: fitting(axes, shape[-len(axes) :], mesh)
    axes, otherwise = declared["axes"], declared.get("otherwise")
    if otherwise and fit(axes) != axes:
      axes = otherwise
    spec = (None,) * (len(shape) - len(axes)) + fit(axes)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

  model = nnx.eval_shape(lambda: StepScorer(c, vocab_size, num_classes, nnx.Rngs(0), heads))
  return nnx.to_pure_dict(
    jax.tree.map(describe, nnx.state(model), is_leaf=lambda x: isinstance(x, nnx.Variable))
  )


def input_axes(name: str) -> int:
  """Returns the number of leading axes of a projection's weight that are contracted."""
  return 2 if name == "output" else 1  # heads and their width


def remat(layer: Callable, c: config_lib.Model) -> Callable:
  """Returns the layer with the rematerialisation of `c.remat` in its backward pass."""
  if c.remat == "none":
    return layer
  saved = jax.checkpoint_policies.save_only_these_names(*c.saved)
  policy = saved if c.remat == "full" else REMAT_POLICIES[c.remat]
  # Inside a loop, XLA's CSE cannot merge recomputation with the forward pass: barriers are not
  # needed there, and would prevent fusion.
  return jax.checkpoint(layer, policy=policy, prevent_cse=c.unroll_layers)
