"""Sorts candidates by score, and gives each the mean correctness of the candidates it ties with.

One sort orders the candidates and carries their labels: the sort key is an integer with the place
of the score in its upper bits and the label in its lowest.  XLA sorts integers on a CPU 5 to 7
times faster than floats or pairs, and numpy sorts them in 3 ns each where XLA takes 50.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from prm_jax.aggregation.candidates import mask, on_one_cpu

TIE = 1e-12  # of 1 + |score|: a hundred steps added in any order differ by less in float64


def join_ties(scores, tolerance: float = TIE) -> np.ndarray | jax.Array:
  """Makes scores that differ only by rounding equal, so that they share the pick.

  The same numbers added in another order, or 0.7 + 0.2 and 0.9, differ in their last digits.  In a
  run of a problem's sorted scores with gaps below `tolerance` x (1 + |score|), all scores become
  the lowest.  Meant for float64 scores, as `reduce_steps` gives under `jax.enable_x64`;
  distinct float32 scores may be as close as sums of equal ones.

  Args:
    scores: `[P, M]` floats; NaN stays NaN.

  Returns:
    `[P, M]`, a numpy array where the scores are on a CPU.
  """
  on_host = on_one_cpu(scores)
  xp, scores = (np, np.asarray(scores)) if on_host else (jnp, jnp.asarray(scores))
  order = xp.argsort(scores, axis=1)
  ascending = xp.take_along_axis(scores, order, axis=1)
  low, high = ascending[:, :-1], ascending[:, 1:]
  with np.errstate(invalid="ignore"):  # of infinities
    near = high - low < tolerance * (1 + xp.minimum(abs(low), abs(high)))
  begins = xp.pad(~near, ((0, 0), (1, 0)), constant_values=True)
  first = xp.maximum.accumulate(xp.where(begins, xp.arange(scores.shape[1]), 0), axis=1)
  joined = xp.take_along_axis(ascending, first, axis=1)
  return xp.take_along_axis(joined, xp.argsort(order, axis=1), axis=1)


def rank_correctness(scores, correct, valid, sizes) -> np.ndarray | jax.Array:
  """Returns the mean correctness of each candidate's ties, the best candidate last.

  Args:
    scores: `[P, M]` floats.
    correct: `[P, M]` bool or 0/1.
    valid: `[P, M]` bool, or None: all.
    sizes: `[P]`, or None, as in `best_of_n`.

  Returns:
    `[P, M]` in 0..1.  Missing candidates come first, with 0.  A problem whose scores cannot be
    ordered (see `best_of_n`) is NaN.
  """
  keys, undefined = sorted_keys(scores, correct, valid, sizes)
  if isinstance(keys, jax.Array):
    return _share_ties(keys, undefined)
  ranked = _share_ties_on_host(keys)
  ranked[np.asarray(undefined)] = np.nan
  return ranked


def sorted_keys(scores, correct, valid, sizes):
  """Returns each problem's sort keys in ascending order, and which problems cannot be ordered.

  Returns:
    `[P, M]` unsigned integers, (place of the score) << 1 | correct, 0 where missing; a numpy array
    if the arguments are on a CPU.
    `[P]` bool: True for a problem whose scores cannot be ordered (see `best_of_n`).
  """
  keys, undefined = _keys(scores, correct, valid, sizes)
  if on_one_cpu(keys):
    return np.sort(keys, axis=1), undefined
  return jax.lax.sort(keys, dimension=1), undefined


@jax.jit
def _keys(scores, correct, valid, sizes):
  """Returns unsorted keys `[P, M]`, and which problems cannot be ordered `[P]`.

  The bits of a float, read as an integer, order its magnitude.  To make room for the label's bit,
  the unused places around zero are closed: a gap is subtracted from the magnitudes of each sign.
  An infinity moves to the place next to the largest finite score of its sign.
  """
  if jnp.finfo(scores.dtype).bits < 32:
    scores = scores.astype(jnp.float32)
  info = jnp.finfo(scores.dtype)
  signed, unsigned = jnp.dtype(f"int{info.bits}"), jnp.dtype(f"uint{info.bits}")
  largest, inf = jnp.iinfo(signed).max, jnp.inf
  correct, valid = mask(correct, valid, sizes)

  def over_row(reduce, values, keep, otherwise):
    return reduce(jnp.where(valid & keep, values, otherwise), axis=1, keepdims=True)

  def magnitude(x):
    return jax.lax.bitcast_convert_type(x, signed) & largest

  # The places of -inf and inf.  A NaN score makes both NaN.
  top = over_row(jnp.max, scores, scores != inf, -inf)
  top = jnp.maximum(jnp.nextafter(top, inf), info.tiny)
  bottom = over_row(jnp.min, scores, scores != -inf, inf)
  bottom = jnp.minimum(jnp.nextafter(bottom, -inf), -info.tiny)
  # Scores of one sign fit once the gap of the subnormal numbers is closed.
  both_signs = (top > info.tiny) & (bottom < -info.tiny)
  least_up, least_down = jax.lax.cond(
    both_signs.any(),
    lambda: (
      over_row(jnp.min, scores, scores >= info.tiny, inf),
      -over_row(jnp.max, scores, scores <= -info.tiny, -inf),
    ),
    lambda: (jnp.full_like(top, info.tiny), jnp.full_like(top, info.tiny)),
  )
  gap_up = magnitude(jnp.minimum(least_up, top)) - 1
  gap_down = magnitude(jnp.minimum(least_down, -bottom)) - 1

  def place(x):  # 0 for zero and subnormal numbers
    up, down = magnitude(x) - gap_up, gap_down - magnitude(x)
    return jnp.where(x < 0, jnp.minimum(down, 0), jnp.maximum(up, 0)).astype(unsigned)

  above = place(jnp.clip(scores, bottom, top)) - place(bottom) + 1
  undefined = jnp.isnan(top) | (place(top) - place(bottom) + 1 > largest)
  keys = jnp.where(valid, above << 1 | correct.astype(unsigned), 0)
  return keys, undefined[:, 0]


def _share_ties_on_host(keys: np.ndarray) -> np.ndarray:
  """Returns the mean correctness of ties `[P, M]` by numpy, which visits only tied candidates."""
  flat, m = keys.ravel(), keys.shape[1]
  right = (flat & 1).astype(jax.dtypes.canonicalize_dtype(np.float64))
  changes = np.ones(flat.size + 1, bool)  # whether the score differs from the one before
  changes[1:-1] = (flat[1:] ^ flat[:-1]) > 1
  changes[::m] = True  # where a problem begins
  tied = ~(changes[:-1] & changes[1:])
  members = right[tied]  # of all ties, end to end
  begins = np.flatnonzero(changes[:-1][tied])
  length = np.diff(begins, append=members.size)
  right[tied] = np.repeat(np.add.reduceat(members, begins) / length, length)
  return right.reshape(keys.shape)


@jax.jit
def _share_ties(keys, undefined):
  """Returns the mean correctness of ties `[P, M]` from sorted keys, under `jax.jit`."""
  right = (keys & 1).astype(jax.dtypes.canonicalize_dtype(np.float64))

  def shared():
    total = over_ties(keys)
    return total(right) / total(jnp.ones_like(right))

  mixed = ((keys[:, 1:] ^ keys[:, :-1]) == 1).any()
  return jnp.where(undefined[:, None], jnp.nan, jax.lax.cond(mixed, shared, lambda: right))


def over_ties(keys):
  """Returns a function that sums values `[P, M]` over the candidates with equal scores."""
  changes = (keys[:, 1:] ^ keys[:, :-1]) > 1
  run = jnp.cumsum(jnp.pad(changes, ((0, 0), (1, 0))), axis=1)

  @jax.vmap
  def total(run, values):
    return jax.ops.segment_sum(values, run, run.size, indices_are_sorted=True)[run]

  return functools.partial(total, run)
