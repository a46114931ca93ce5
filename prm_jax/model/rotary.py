"""Rotary position embedding, with the scalings of public models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from prm_jax import config as config_lib
from prm_jax.model.attention import platform


def frequencies(c: config_lib.Model) -> np.ndarray:
  """Returns the radians per token of each coordinate pair of a head, float32 `[H / 2]`.

  They are computed in float64, because positions multiply the error.
  """
  frequency = float(c.rope_theta) ** -np.linspace(0, 1, c.head_size // 2, endpoint=False)
  if c.rope_scaling == "linear":
    frequency = frequency / c.rope_factor
  elif c.rope_scaling == "llama3":  # low frequencies are divided, high ones kept, others blended
    turns = c.rope_original_length * frequency / (2 * np.pi)
    kept = np.clip((turns - c.rope_low_factor) / (c.rope_high_factor - c.rope_low_factor), 0, 1)
    frequency = frequency * (kept + (1 - kept) / c.rope_factor)
  return frequency.astype(np.float32)


def tables(positions: jax.Array, c: config_lib.Model) -> jax.Array:
  """Returns the cosines and sines by which `rotate` multiplies.

  Args:
    positions: int32 `[B, T]`.

  Returns:
    float32 `[1 or 2, 2, B, T, 1, H / 2]`.  With `local_rope_theta` there are 2 tables, for full and
    for sliding layers, otherwise 1.
  """
  kinds = [c]
  if c.local_rope_theta:
    kinds.append(dataclasses.replace(c, rope_theta=c.local_rope_theta, rope_scaling="none"))
  angle = positions[..., None, None] * np.stack([*map(frequencies, kinds)])[:, None, None, None]
  if platform() != "cpu":
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
  # A loop, because XLA's CPU backend would otherwise fuse the cosines into the operations that use
  # them, and recompute them for each head and layer.
  one = lambda odd: jnp.where(odd, jnp.sin(angle), jnp.cos(angle))
  return jax.lax.map(one, np.array([False, True])).swapaxes(0, 1)


def rotate(x: jax.Array, table: jax.Array) -> jax.Array:
  """Rotates each pair of coordinates by position times frequency, in float32 (arXiv:2104.09864).

  Args:
    x: `[B, T, N, H]`; coordinate i is paired with i + H / 2, as in transformers.
    table: `[2, B, T, 1, H / 2]`, from `tables`.
  """
  cos, sin = table
  left, right = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(x.dtype)
