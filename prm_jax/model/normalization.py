"""RMSNorm, and its gradient on CPUs."""

import jax
import jax.numpy as jnp

from prm_jax import config as config_lib
from prm_jax.model import attention


def rms_norm(x: jax.Array, scale: jax.Array, c: config_lib.Model) -> jax.Array:
  """Applies RMSNorm over the last axis, in float32; Gemma's 1 + scale comes before rounding."""
  # With the gradient for CPUs, libtpu would overlap one weight gather fewer in each layer.
  return (_cpu_norm if attention.platform() == "cpu" else _norm)(x, scale, c)


def _norm(x, scale, c):
  normal = x * _inverse_size(x, c)
  if c.norm_offset:
    return (normal * (1 + scale.astype(jnp.float32))).astype(x.dtype)
  return normal.astype(x.dtype) * scale.astype(x.dtype)


def _inverse_size(x, c):
  square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
  return jax.lax.rsqrt(square + c.norm_epsilon)


def _norm_forward(x, scale, c):
  return _norm(x, scale, c), (x, scale)


def _norm_backward(c, saved, dy):
  """Sums with einsums, which XLA's CPU backend computes faster than the sums of JAX's gradient."""
  x, scale = saved
  inverse, gain = _inverse_size(x, c), c.norm_offset + scale.astype(jnp.float32)
  dy = dy.astype(jnp.float32)
  along = jnp.einsum("...d,d->...", dy * x, gain)[..., None] * inverse**3 / len(gain)
  dscale = jnp.einsum("...,...d->d", inverse[..., 0], dy * x)
  return (dy * gain * inverse - x * along).astype(x.dtype), dscale.astype(scale.dtype)


_cpu_norm = jax.custom_vjp(_norm, nondiff_argnums=(2,))
_cpu_norm.defvjp(_norm_forward, _norm_backward)
