"""Products of activations with weights, and the dtypes of their sums and gradients."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from prm_jax.model import attention
from prm_jax.model.sharding import Axis, constrain, fitting


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def weight_product(
  x: jax.Array, weight: jax.Array, gradient_dtype: str, axes: tuple[Axis, ...] = ()
) -> jax.Array:
  """Contracts all axes of x but the first with the first axes of the weight.

  Args:
    x: `[S, ...]`, the activations of S tokens.
    weight: has the contracted axes, then those of the output; it is cast to x's dtype.
    gradient_dtype: the dtype in which the weight's gradient is computed, and reduced across
      devices; without this rule it would be x's.
    axes: mesh axis of each dimension of the weight (`decoder.abstract_params`).  With them a CPU
      gathers the weight once and keeps it for the gradient; without, twice.

  Returns:
    `[S, ...]` in x's dtype.
  """
  weight = _gathered(weight, x.dtype, axes)
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


def _forward(x, weight, gradient_dtype, axes):
  gathered = _gathered(weight, x.dtype, axes)
  like = jnp.zeros(0, weight.dtype)  # the gradient has the dtype of the weight before its cast
  return weight_product(x, gathered, gradient_dtype), (x, gathered, like)


def _backward(gradient_dtype, axes, saved, dy):
  x, weight, like = saved
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
    on_tpu = attention.platform() == "tpu"
    # libtpu would otherwise fuse the operations that produce dy into both products, which then take
    # longer to compile and to run.
    dy = jax.lax.optimization_barrier(dy) if on_tpu else dy
    outputs = ([*range(1, dy.ndim)], [*range(x.ndim - 1, weight.ndim)])  # axes in dy, in weight
    dx = jnp.tensordot(dy, weight.astype(x.dtype), outputs)
    # On v6e libtpu would otherwise transpose dx, and copy activations to match.  But it gathers an
    # array whose layout is constrained if there are mesh axes beside fsdp.
    mesh = jax.sharding.get_abstract_mesh()
    if on_tpu and mesh.size <= mesh.shape.get("fsdp", 1):
      dx = with_layout_constraint(dx, Layout(tuple(range(dx.ndim))))
    dw = jnp.tensordot(x, dy, (0, 0), preferred_element_type=preferred)
  return dx, dw.astype(like.dtype)


weight_product.defvjp(_forward, _backward)


def _gathered(weight: jax.Array, dtype: jnp.dtype, axes: tuple[Axis, ...]) -> jax.Array:
  """Casts a weight and gathers it over `fsdp`, once for the product and its gradient.

  XLA's CPU backend would gather it for each of them, and bfloat16 as float32; it gathers integers
  as they are.
  """
  mesh = jax.sharding.get_abstract_mesh()
  axes = fitting(axes, weight.shape, mesh)
  if mesh.shape.get("fsdp", 1) == 1 or "fsdp" not in axes or attention.platform() != "cpu":
    return weight
  bits = jax.lax.bitcast_convert_type(weight.astype(dtype), f"uint{8 * dtype.itemsize}")
  bits = constrain(bits, *axes)  # or XLA would gather before it converts
  bits = constrain(bits, *(None if axis == "fsdp" else axis for axis in axes))
  return jax.lax.bitcast_convert_type(bits, dtype)


def _transposed(x: jax.Array) -> jax.Array:
  """Returns the transpose of x `[S, I]`.

  XLA's CPU backend would fuse a plain transpose into the product, which it then computes in
  float32.  It does not fuse a transpose of three axes, which needs an even I.
  """
  if x.shape[1] % 2:
    return x.T
  pairs = x.reshape(len(x), -1, 2)
  return pairs.transpose(1, 2, 0).reshape(-1, len(x))
