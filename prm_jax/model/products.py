"""Products of activations with weights, and the dtypes of their sums and gradients."""

import functools

import jax
import jax.numpy as jnp

from prm_jax import config as config_lib
from prm_jax.model import attention


def gradient_dtype(c: config_lib.Model) -> str:
  """Returns the dtype in which the gradients of matrices are reduced across devices."""
  return c.dtype if c.gradient_dtype == "activations" else "float32"


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def weight_product(x: jax.Array, weight: jax.Array, gradient_dtype: str) -> jax.Array:
  """Contracts all axes of x but the first with the first axes of the weight.

  Args:
    x: `[S, ...]`, the activations of S tokens.
    weight: has the contracted axes, then those of the output; it is cast to x's dtype.
    gradient_dtype: the dtype in which the weight's gradient is computed, and reduced across
      devices; without this rule it would be x's.

  Returns:
    `[S, ...]` in x's dtype.
  """
  if attention.platform() == "cpu":
    y = _sums("SI,IO->SO", *_matrices(x, weight)).astype(x.dtype)
    return y.reshape(len(x), *weight.shape[x.ndim - 1 :])
  return jnp.tensordot(x, weight.astype(x.dtype), x.ndim - 1)


# XLA's CPU backend multiplies bfloat16 twice as fast if it returns the float32 sums.
_sums = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _matrices(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns x as `[S, I]` and the weight as `[I, O]`: XLA's CPU backend would copy other shapes."""
  x = x.reshape(len(x), -1)
  return x, weight.reshape(x.shape[1], -1).astype(x.dtype)


def _forward(x, weight, gradient_dtype):
  return weight_product(x, weight, gradient_dtype), (x, weight)


def _backward(gradient_dtype, saved, dy):
  x, weight = saved
  preferred = jnp.dtype(gradient_dtype)
  if attention.platform() == "cpu":
    (rows, matrix), dy = _matrices(x, weight), dy.reshape(len(dy), -1)
    dx = _sums("SO,IO->SI", dy, matrix).astype(x.dtype).reshape(x.shape)
    if x.dtype == jnp.bfloat16 and preferred == jnp.float32:
      dw = _sums("IS,SO->IO", _transposed(rows), dy)
    else:
      dw = jnp.einsum("SI,SO->IO", rows, dy, preferred_element_type=preferred)
    dw = dw.reshape(weight.shape)
  else:
    outputs = ([*range(1, dy.ndim)], [*range(x.ndim - 1, weight.ndim)])  # axes in dy, in weight
    dx = jnp.tensordot(dy, weight.astype(x.dtype), outputs)
    dw = jnp.tensordot(x, dy, (0, 0), preferred_element_type=preferred)
  return dx, dw.astype(weight.dtype)


weight_product.defvjp(_forward, _backward)


def _transposed(x: jax.Array) -> jax.Array:
  """Returns the transpose of x `[S, I]`, by a gather.

  XLA's CPU backend fuses a transpose into the product, which it then computes in float32.
  """
  starts = jnp.zeros((x.shape[1], 1), jnp.int32)  # of each column
  numbers = jax.lax.GatherDimensionNumbers(
    offset_dims=(1,),
    collapsed_slice_dims=(),
    start_index_map=(0,),
    operand_batching_dims=(1,),  # so that columns that are sharded over devices stay in place
    start_indices_batching_dims=(0,),
  )
  return jax.lax.gather(x, starts, numbers, (len(x), 1), mode="promise_in_bounds")
