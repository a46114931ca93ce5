"""Checks the arguments that all estimators share: scores, labels and values of N."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_array(x: Any) -> Any:
  """Returns None or a JAX array as it is, and anything else as a numpy array."""
  return x if x is None or isinstance(x, jax.Array) else np.asarray(x)


def is_traced(*arrays) -> bool:
  """Returns whether `jax.jit` or `jax.vmap` is tracing any of the arrays."""
  return any(isinstance(x, jax.core.Tracer) for x in arrays)


def on_one_cpu(*arrays) -> bool:
  """Returns whether numpy can read all arrays: they are concrete and on a single CPU device."""
  if is_traced(*arrays) or jax.default_backend() != "cpu":
    return False
  devices = [[d.platform for d in x.devices()] for x in arrays if isinstance(x, jax.Array)]
  return all(platforms == ["cpu"] for platforms in devices)


def wide(ids) -> np.ndarray | jax.Array:
  """Returns ids as an array; integers have 32 bits or more, so that every number of ids fits."""
  ids = as_array(ids)
  narrow = jnp.issubdtype(ids.dtype, jnp.integer) and ids.dtype.itemsize < 4
  return ids.astype(np.int32) if narrow else ids


def check_scores(scores) -> np.ndarray | jax.Array:
  """Returns `scores` as an array; raises ValueError unless it holds floats."""
  scores = as_array(scores)
  if not jnp.issubdtype(scores.dtype, jnp.floating):
    raise ValueError(f"scores of dtype {scores.dtype}: expected floats")
  return scores


def check_n(n: Sequence[int] | None, m: int) -> np.ndarray:
  """Returns the values of N as an array `[K]`; None stands for all of 1..M."""
  n = np.arange(1, m + 1) if n is None else np.asarray(n)
  if n.ndim != 1 or not n.size or n.dtype.kind not in "iu" or n.min() < 1 or n.max() > m:
    raise ValueError(f"n={n}: expected whole numbers in 1..{m}, the number of candidates")
  return n.astype(np.int64)  # a narrow or unsigned type would wrap in products and differences


def check_shapes(shape, correct, valid, sizes) -> tuple[int, int]:
  """Returns `(P, M)`; raises ValueError if shapes disagree or a dtype or value is wrong."""
  if len(shape) != 2 or not all(shape):
    raise ValueError(f"candidates {tuple(shape)}: expected [P, M] with at least 1 of each")
  for name, array in (("correct", correct), ("valid", valid)):
    if array is None:
      continue
    array = as_array(array)
    if array.shape != tuple(shape):
      raise ValueError(f"{name} {array.shape}: expected {tuple(shape)}")
    if array.dtype == bool:
      continue
    if not jnp.issubdtype(array.dtype, jnp.integer):
      raise ValueError(f"{name} of dtype {array.dtype}: expected bool")
    if not is_traced(array) and (array.min() < 0 or array.max() > 1):
      raise ValueError(f"{name} holds {array.min()} to {array.max()}: expected 0 and 1")
  if sizes is not None:
    sizes = np.asarray(sizes)
    whole = sizes.shape == (shape[0],) and sizes.dtype.kind in "iu"
    if not whole or sizes.min() < 1 or sizes.max() > shape[1]:
      raise ValueError(f"sizes {sizes}: expected {shape[0]} whole numbers in 1..{shape[1]}")
  return tuple(shape)


def mask(correct, valid, sizes) -> tuple[jax.Array, jax.Array]:
  """Returns `correct`, False where missing, and `valid`, False beyond `sizes`: bool `[P, M]`."""
  correct = jnp.asarray(correct).astype(bool)
  valid = jnp.ones(correct.shape, bool) if valid is None else jnp.asarray(valid).astype(bool)
  if sizes is not None:
    valid &= jnp.arange(correct.shape[1]) < jnp.asarray(sizes)[:, None]
  return correct & valid, valid
