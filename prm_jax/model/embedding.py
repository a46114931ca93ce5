"""The token embedding, whose table is sharded over all devices of a replica."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from prm_jax import config as config_lib
from prm_jax.model.sharding import ROWS, constrain, divides

COLUMNS = ("tensor", "fsdp")  # mesh axes of the table's columns


def residual_stream(table: jax.Array, tokens: jax.Array, c: config_lib.Model) -> jax.Array:
  """Returns the residual stream before the first layer, `[B, T, D]`, from int32 `[B, T]`."""
  x = embed(table, tokens, c)
  if c.scale_embeddings:
    x = x * jnp.asarray(c.width**0.5, x.dtype)  # rounded first, as bfloat16 models expect
  return constrain(x, ROWS, None, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed(table: jax.Array, tokens: jax.Array, c: config_lib.Model) -> jax.Array:
  """Looks up embeddings, `[B, T, D]` in `c.dtype`; their gradient is summed in float32.

  Each device looks up its own columns, for all rows of its shard along "data", and never holds more
  of the table or of its gradient than its shard.  Where the mesh does not divide the columns, rows
  and columns are both sharded (`decoder.StepScorer`), and XLA gathers the whole table.
  """
  split = _split_columns(table)
  table = split(table.astype(c.dtype), None, COLUMNS)
  x = split(table.at[split(tokens, "data", None)].get(mode="clip"), "data", None, COLUMNS)
  # One axis is exchanged here, the other by the caller: given both at once, XLA would gather x.
  return split(x, ROWS, None, "tensor")


def _split_columns(table: jax.Array) -> Callable[..., jax.Array]:
  """Returns `constrain` if the current mesh divides the table's columns, otherwise the identity."""
  mesh = jax.sharding.get_abstract_mesh()
  return constrain if divides(COLUMNS, table.shape[1], mesh) else lambda x, *axes: x


def _embed_forward(table, tokens, c):
  return embed(table, tokens, c), (table, tokens)


def _embed_backward(c, saved, dx):
  table, tokens = saved
  split = _split_columns(table)
  dx = split(split(dx, ROWS, None, "tensor"), "data", None, COLUMNS)
  # A sum in bfloat16 would lose most of a token's thousands of occurrences.
  out = split(jnp.zeros(table.shape, jnp.float32), None, COLUMNS)
  out = out.at[split(tokens, "data", None)].add(dx.astype(jnp.float32), mode="clip")
  return split(out, None, COLUMNS).astype(table.dtype), None


embed.defvjp(_embed_forward, _embed_backward)
