"""Rotary position embedding (arXiv:2104.09864), its context extensions, and theta of each layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from prm_jax import config as config_lib


def frequencies(c: config_lib.Model) -> np.ndarray:
  """Radians per token for each pair of a head's coordinates, float32 `[H / 2]`, of a full layer.

  Computed in float64: an error here is multiplied by the position.
  """
  frequency = _unscaled(c.rope_theta, c.head_size)
  if c.rope_scaling == "linear":
    frequency = frequency / c.rope_factor
  elif c.rope_scaling == "llama3":
    frequency = _llama3(c, frequency)
  return frequency.astype(np.float32)


def layer_frequencies(c: config_lib.Model, sliding: jax.Array | bool) -> jax.Array | np.ndarray:
  """`frequencies` of a sliding or a full layer; they differ where `c.local_rope_theta` is set.

  Args:
    sliding: bool `[]`, may be traced.
  """
  if not c.local_rope_theta:
    return frequencies(c)
  local = _unscaled(c.local_rope_theta, c.head_size).astype(np.float32)
  return jnp.where(sliding, local, frequencies(c))


def _unscaled(theta: float, head_size: int) -> np.ndarray:
  return float(theta) ** -np.linspace(0, 1, head_size // 2, endpoint=False)


def _llama3(c: config_lib.Model, frequency: np.ndarray) -> np.ndarray:
  """Llama 3.1's scaling: low frequencies are divided by the factor, high ones kept.

  Between `rope_low_factor` and `rope_high_factor` turns within the original context length the two
  are blended linearly.
  """
  turns = c.rope_original_length * frequency / (2 * np.pi)
  low, high = c.rope_low_factor, c.rope_high_factor
  kept = np.clip((turns - low) / (high - low), 0, 1)
  return frequency * (kept + (1 - kept) / c.rope_factor)


def rotate(x: jax.Array, positions: jax.Array, frequency: jax.Array | np.ndarray) -> jax.Array:
  """Rotates each pair of coordinates by position times frequency, in float32.

  Args:
    x: `[B, T, N, H]`; coordinate i is paired with i + H / 2, as in transformers.
    positions: int32 `[B, T]`.
    frequency: float32 `[H / 2]`.

  Returns:
    `[B, T, N, H]` in the dtype of x.
  """
  angle = positions[:, :, None, None] * frequency
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(x.dtype)
