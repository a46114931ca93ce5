"""Products of activations with weights, and the dtypes of their sums and gradients."""

import functools

import jax
import jax.numpy as jnp

from prm_jax.model import attention


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def weight_einsum(equation: str, x: jax.Array, weight: jax.Array, gradient_dtype: str) -> jax.Array:
  """Returns `einsum(equation, x, weight)` in x's dtype.

  The weight's gradient is computed, and reduced across devices, in `gradient_dtype`; without this
  rule it would be in x's dtype.

  Args:
    equation: such as "SNH,NHD->SD": the axes of x but the first are summed.
  """
  if attention.platform() == "cpu":
    y = _sums("SI,IO->SO", *_matrices(x, weight)).astype(x.dtype)
    return y.reshape(len(x), *weight.shape[x.ndim - 1 :])
  return jnp.einsum(equation, x, weight.astype(x.dtype))


# XLA's CPU backend multiplies bfloat16 twice as fast if it returns the float32 sums.
_sums = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _matrices(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns x as `[S, I]` and the weight as `[I, O]`, as XLA's CPU backend copies other arrays."""
  x = x.reshape(len(x), -1)
  return x, weight.reshape(x.shape[1], -1).astype(x.dtype)


def _forward(equation, x, weight, gradient_dtype):
  return weight_einsum(equation, x, weight, gradient_dtype), (x, weight)


def _backward(equation, gradient_dtype, saved, dy):
  x, weight = saved
  if attention.platform() == "cpu":
    (rows, matrix), dy = _matrices(x, weight), dy.reshape(len(dy), -1)
    dx = _sums("SO,IO->SI", dy, matrix).astype(x.dtype).reshape(x.shape)
    # Over "tensor" a gather would move activations between devices.
    split = jax.sharding.get_abstract_mesh().shape.get("tensor", 1) > 1
    if x.dtype == jnp.bfloat16 and gradient_dtype == "float32" and not split:
      dw = _sums("IS,SO->IO", _transposed(rows), dy)
    else:
      dw = jnp.einsum("SI,SO->IO", rows, dy, preferred_element_type=jnp.dtype(gradient_dtype))
    dw = dw.reshape(weight.shape)
  else:
    x_axes, weight_axes, y_axes = equation.replace("->", ",").split(",")
    dx = jnp.einsum(f"{y_axes},{weight_axes}->{x_axes}", dy, weight.astype(x.dtype))
    dw = jnp.einsum(
      f"{x_axes},{y_axes}->{weight_axes}", x, dy, preferred_element_type=jnp.dtype(gradient_dtype)
    )
  return dx, dw.astype(weight.dtype)


weight_einsum.defvjp(_forward, _backward)


def _transposed(x: jax.Array) -> jax.Array:
  """Returns the transpose of x `[S, I]`, by a gather.

  XLA's CPU backend joins a transpose with the product, which it then computes in float32.
  """
  columns = jax.lax.broadcasted_iota(jnp.int32, (*x.shape[::-1], 1), 0)
  numbers = jax.lax.GatherDimensionNumbers(
    offset_dims=(),
    collapsed_slice_dims=(1,),
    start_index_map=(1,),
    operand_batching_dims=(0,),  # so that rows that are split over devices stay where they are
    start_indices_batching_dims=(1,),
  )
  return jax.lax.gather(x, columns, numbers, (1, 1), mode="promise_in_bounds")
