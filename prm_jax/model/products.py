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
    x: its first axis is that of tokens, as in the result; the other axes are summed.
  """
  return _product(equation, x, weight.astype(x.dtype))


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
  # XLA's CPU backend multiplies bfloat16 twice as fast if it returns the float32 sums.
  sums = jnp.float32 if attention.platform() == "cpu" else None
  return jnp.einsum(equation, x, y, preferred_element_type=sums).astype(x.dtype)


def _forward(equation, x, weight, gradient_dtype):
  return weight_einsum(equation, x, weight, gradient_dtype), (x, weight)


def _backward(equation, gradient_dtype, saved, dy):
  x, weight = saved
  x_axes, weight_axes, y_axes = equation.replace("->", ",").split(",")
  dx = _product(f"{y_axes},{weight_axes}->{x_axes}", dy, weight.astype(x.dtype))
  tensor = jax.sharding.get_abstract_mesh().shape.get("tensor", 1)
  # Over "tensor" a gather would move activations between devices.
  if x.dtype == jnp.bfloat16 and attention.platform() == "cpu" and tensor == 1:
    x, x_axes = _transposed(x), f"{x_axes[1:]}{x_axes[0]}"
  dw = jnp.einsum(
    f"{x_axes},{y_axes}->{weight_axes}", x, dy, preferred_element_type=jnp.dtype(gradient_dtype)
  )
  return dx, dw.astype(weight.dtype)


weight_einsum.defvjp(_forward, _backward)


def _transposed(x: jax.Array) -> jax.Array:
  """Returns x `[S, ...]` with its first axis last, by a gather.

  XLA's CPU backend joins a transpose with the product, which it then computes in float32.
  """
  S, *rest = x.shape
  x = x.reshape(S, -1)
  columns = jax.lax.broadcasted_iota(jnp.int32, (x.shape[1], S, 1), 0)
  numbers = jax.lax.GatherDimensionNumbers(
    offset_dims=(),
    collapsed_slice_dims=(1,),
    start_index_map=(1,),
    operand_batching_dims=(0,),  # so that rows that are split over devices stay where they are
    start_indices_batching_dims=(1,),
  )
  x = jax.lax.gather(x, columns, numbers, (1, 1), mode="promise_in_bounds")
  return x.reshape(*rest, S)
