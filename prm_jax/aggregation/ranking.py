"""Candidates sorted worst to best, each with the mean correctness of those it ties with."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 2**18  # candidates sorted at a time on a CPU: they stay in its cache


def rank_correctness(scores, correct, valid=None, sizes=None):
  """The candidates of each problem in order of score, as the mean correctness of their ties.

  One sort of integers that carry their label: `lax.sort` where the arrays are traced or on
  accelerators; numpy's where they stand on a CPU, which takes 3 ns an element (with AVX-512)
  where `lax.sort` takes 50.

  Args:
    scores: `[P, M]` floats.
    correct: `[P, M]` bool or 0/1.
    valid: `[P, M]` bool, or None: all.
    sizes: `[P]`, or None, as in `best_of_n`.

  Returns:
    `[P, M]` shares in 0..1, the best candidate last, missing ones first with 0.  A problem whose
    scores cannot be ordered (see `best_of_n`) is NaN.
  """
  arrays = (scores, correct, valid, sizes)
  if not on_one_cpu(*arrays):
    keys, undefined = _keys(*arrays)
    return _ranked(_sort(keys), undefined)
  p, m = scores.shape
  ranked = _empty((p, m), jax.dtypes.canonicalize_dtype(np.float64))
  for block in blocks(p, -(-BLOCK // m)):
    keys, undefined = _keys(*(None if x is None else x[block] for x in arrays))
    part = _ranked_on_host(_sort(keys))
    part[np.asarray(undefined)] = np.nan
    ranked[block] = part
  return ranked


def _empty(shape, dtype) -> np.ndarray:
  """As numpy.empty, aligned to 64 bytes: JAX on a CPU then reads it in place."""
  size = math.prod(shape) * np.dtype(dtype).itemsize
  buffer = np.empty(size + 64, np.uint8)
  start = -buffer.ctypes.data % 64
  return buffer[start : start + size].view(dtype).reshape(shape)


def sorted_keys(scores, correct, valid=None, sizes=None):
  """The sort keys behind `rank_correctness`, ascending, and which problems cannot be ordered.

  Returns:
    `[P, M]` unsigned integers, (places above the worst score) << 1 | right, 0 where missing; `[P]`
    bool.
  """
  keys, undefined = _keys(scores, correct, valid, sizes)
  return _sort(keys), undefined


def _sort(keys):
  return np.sort(keys, axis=1) if on_one_cpu(keys) else jax.lax.sort(keys, dimension=1)


def mask(correct, valid, sizes) -> tuple[jax.Array, jax.Array]:
  """`correct`, False where missing, and `valid`, False beyond `sizes`, as bool `[P, M]`."""
  valid = jnp.ones(correct.shape, bool) if valid is None else jnp.asarray(valid).astype(bool)
  if sizes is not None:
    valid &= jnp.arange(correct.shape[1]) < sizes[:, None]
  return correct.astype(bool) & valid, valid


def on_one_cpu(*arrays) -> bool:
  """Whether all values are at hand on a CPU, where numpy can work on them."""
  for array in arrays:
    if isinstance(array, jax.core.Tracer):
      return False
    if isinstance(array, jax.Array) and [d.platform for d in array.devices()] != ["cpu"]:
      return False
  return jax.default_backend() == "cpu"


def blocks(count: int, most: int) -> Iterator[slice]:
  """Slices of equal length that cover `count`, so that nothing compiles twice: some overlap."""
  number = -(-count // most)
  length = -(-count // number)
  for i in range(number):
    start = min(i * length, count - length)
    yield slice(start, start + length)


@jax.jit
def _keys(scores, correct, valid, sizes):
  """Sort keys `[P, M]`: (places above the worst score) << 1 | right, and 0 where missing.

  A float's bits, read as an integer, order its magnitude; one bit is left for the label once the
  gap around zero and the one below infinity, where a problem has no score, are closed.  Also
  `[P]`: whose scores cannot be ordered.
  """
  if jnp.finfo(scores.dtype).bits < 32:
    scores = scores.astype(jnp.float32)
  info = jnp.finfo(scores.dtype)
  signed, unsigned = jnp.dtype(f"int{info.bits}"), jnp.dtype(f"uint{info.bits}")
  largest = jnp.iinfo(signed).max
  correct, valid = mask(correct, valid, sizes)

  def magnitude(x):  # 0 for subnormal numbers, which compare as 0 too
    bits = jax.lax.bitcast_convert_type(x, signed) & largest
    return jnp.where(bits < np.asarray(info.tiny).view(signed), 0, bits)

  def row(reduce, keep, otherwise):  # floats: XLA:CPU does not vectorise reductions of integers
    return reduce(jnp.where(valid & keep, scores, otherwise), axis=1, keepdims=True)

  inf = jnp.inf
  highest = row(jnp.max, scores != inf, -inf)  # finite; NaN if there is one
  lowest = row(jnp.min, scores != -inf, inf)
  # Where the magnitudes of positive and of negative scores begin.  One sign alone needs no room.
  least_up, least_down = jax.lax.cond(
    ((lowest < 0) & (highest > 0)).any(),
    lambda: (
      magnitude(row(jnp.min, scores > 0, inf)) - 1,
      magnitude(row(jnp.max, scores < 0, -inf)) - 1,
    ),
    lambda: (jnp.zeros_like(highest, signed), jnp.zeros_like(highest, signed)),
  )
  most_up = jnp.where(highest > 0, jnp.maximum(magnitude(highest), least_up), least_up) + 1
  most_down = jnp.where(lowest < 0, jnp.maximum(magnitude(lowest), least_down), least_down) + 1

  size = magnitude(scores)
  up = jnp.minimum(size, most_up) - least_up
  down = jnp.minimum(size, most_down) - least_down
  above = jnp.where(size == 0, 0, jnp.where(scores > 0, up, -down))
  below = (most_down - least_down).astype(unsigned)
  key = ((above.astype(unsigned) + below + 1) << 1) | correct.astype(unsigned)
  reach = below + (most_up - least_up).astype(unsigned) + 1
  undefined = jnp.isnan(highest) | (reach > largest)
  return jnp.where(valid, key, 0), undefined[:, 0]


def _ranked_on_host(keys: np.ndarray) -> np.ndarray:
  """From sorted keys, in numpy, which can work on the ties alone where they are few."""
  dtype = jax.dtypes.canonicalize_dtype(np.float64)
  flat, m = keys.ravel(), keys.shape[1]
  right, ties = np.empty(flat.shape, dtype), []
  for i in range(0, flat.size, BLOCK):  # pieces that stay in the cache
    piece = flat[i : i + BLOCK + 1]
    right[i : i + BLOCK] = piece[:BLOCK] & 1
    ties.append(i + np.flatnonzero((piece[1:] ^ piece[:-1]) <= 1))  # the next has the same score
  at = np.concatenate(ties)
  at = at[(at % m != m - 1) & (flat[at] > 1)]  # not the next problem's, nor both missing
  if at.size * 8 > flat.size:
    first = np.ones(flat.size, bool)
    np.greater(flat[1:] ^ flat[:-1], 1, out=first[1:])
    first[::m] = True
    begins = np.flatnonzero(first)
    length = np.diff(begins, append=flat.size)
    mean = np.add.reduceat(right, begins) / length
    return np.repeat(mean.astype(dtype), length).reshape(keys.shape)
  begins, ends = np.diff(at, prepend=-2) > 1, np.diff(at, append=flat.size + 1) > 1
  pair = at[begins & ends]  # most ties are of two
  pair = pair[right[pair] != right[pair + 1]]
  right[pair] = right[pair + 1] = 0.5
  at = at[~(begins & ends)]
  if at.size:
    begins = np.flatnonzero(np.diff(at, prepend=-2) > 1)
    length = np.diff(begins, append=at.size) + 1
    offset = np.cumsum(length) - length  # of each run, the runs laid end to end
    members = np.repeat(at[begins] - offset, length) + np.arange(length.sum())
    right[members] = np.repeat(np.add.reduceat(right[members], offset) / length, length)
  return right.reshape(keys.shape)


@jax.jit
def _ranked(keys, undefined):
  """From sorted keys, as an array program."""
  dtype = jax.dtypes.canonicalize_dtype(np.float64)
  right = (keys & 1).astype(dtype)

  def shared():
    total = over_ties(keys)
    return total(right) / total(jnp.ones_like(right))

  mixed = ((keys[:, 1:] ^ keys[:, :-1]) == 1).any()
  return jnp.where(undefined[:, None], jnp.nan, jax.lax.cond(mixed, shared, lambda: right))


def over_ties(keys):
  """A function that gives each place of `[P, M]` values their sum over its equal scores."""
  changes = (keys[:, 1:] ^ keys[:, :-1]) > 1
  run = jnp.cumsum(jnp.pad(changes, ((0, 0), (1, 0))), axis=1)

  @jax.vmap
  def total(run, values):
    return jax.ops.segment_sum(values, run, run.size, indices_are_sorted=True)[run]

  return functools.partial(total, run)
