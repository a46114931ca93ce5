"""Rotary position embedding, with the scalings of public models."""

import jax
import jax.numpy as jnp
import numpy as np

from prm_jax import config as config_lib


def frequencies(c: config_lib.Model) -> np.ndarray:
  """Returns the radians per token of each pair of a head's coordinates, float32 `[H / 2]`.

  It computes in float64, as positions multiply the error.
  """
  frequency = float(c.rope_theta) ** -np.linspace(0, 1, c.head_size // 2, endpoint=False)
  if c.rope_scaling == "linear":
    frequency = frequency / c.rope_factor
  elif c.rope_scaling == "llama3":  # low frequencies are divided, high ones kept, others blended
    turns = c.rope_original_length * frequency / (2 * np.pi)
    kept = np.clip((turns - c.rope_low_factor) / (c.rope_high_factor - c.rope_low_factor), 0, 1)
    frequency = frequency * (kept + (1 - kept) / c.rope_factor)
  return frequency.astype(np.float32)


def rotate(x: jax.Array, positions: jax.Array, frequency: jax.Array | np.ndarray) -> jax.Array:
  """Rotates each pair of coordinates by position times frequency, in float32 (arXiv:2104.09864).

  Args:
    x: `[B, T, N, H]`; coordinate i is paired with i + H / 2, as in transformers.
    positions: int32 `[B, T]`.
    frequency: float32 `[H / 2]`.
  """
  angle = positions[:, :, None, None] * frequency
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(x.dtype)
