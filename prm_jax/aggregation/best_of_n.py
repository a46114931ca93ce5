"""Best-of-N and pass@N: exact expectations under sampling without replacement."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 64  # terms summed serially before the pairwise tree takes over
MAX_TABLE = 2**28  # entries of a weight table: 2 GiB of float64 on the host


def best_of_n(scores, correct, valid=None, n: Sequence[int] | None = None, *, sizes=None):
  """Expected correctness of the best-scored of N candidates, exactly.

  N of a problem's M candidates are drawn uniformly without replacement, and the valid one with
  the highest score is chosen; among equal scores each is as likely.  A draw without a valid
  candidate is wrong.  With candidates sorted best first, depth d = 0..M-1, and a_d the mean
  correctness of the candidates tied with depth d,

    E(N) = sum_d a_d w_d(N),    w_d(N) = C(M-1-d, N-1) / C(M, N),

  since w_d is the chance that depth d is drawn and nothing above it is.  Given that the best
  drawn score belongs to a tied group, the pick is uniform over the group: hence a_d.  This is
  what the shuffled trials of OpenAI's `prm800k/eval/eval.py` estimate (Figure 3 of the paper).

  Works under `jax.jit` and `jax.vmap`, where `n` and `sizes` must be concrete.

  Args:
    scores: `[P, M]` higher is better; any monotone scale, -inf included.  A NaN score of a valid
      candidate makes its problem's row NaN.  float64 scores are rounded to float32 unless
      `jax.enable_x64` is on: that can tie neighbours, never swap them.
    correct: `[P, M]` bool or 0/1 integers.
    valid: `[P, M]` bool; False marks a missing candidate (never generated, or without an answer):
      it may be drawn, is never chosen and never correct.  None: all valid.
    n: the values of N, each in 1..M, missing candidates counted.  None: all of 1..M, which
      takes an M x M table.
    sizes: `[P]` how many candidates each problem has, where this differs: only its first
      `sizes[p]` slots exist, and N beyond them draws them all.  This is not the same as marking
      the other slots missing, which says that they were drawn and failed, as OpenAI counts
      solutions cut off at the token limit.  None: M each.

  Returns:
    `[P, K]` expected correctness for each problem and N.

  Raises:
    ValueError: shapes that disagree, `correct` of a float type, N or sizes outside 1..M.
  """
  scores = jnp.asarray(scores)
  if not jnp.issubdtype(scores.dtype, jnp.floating):
    raise ValueError(f"scores of dtype {scores.dtype}: expected floats")
  correct, valid = check_candidates(scores.shape, correct, valid, sizes)
  n = check_n(n, scores.shape[1])
  weights, row = _weight_table(scores.shape[1], n, sizes)
  return _best_of_n(scores, correct, valid, weights, row)


def pass_at_n(correct, valid=None, n: Sequence[int] | None = None, *, sizes=None):
  """Chance that at least one of N candidates is right: the oracle's best-of-N, exactly.

  1 - C(M-c, N) / C(M, N), c of a problem's M candidates being right.

  Args:
    correct: `[P, M]` bool or 0/1 integers.
    valid: `[P, M]` bool, or None; a missing candidate is never correct.
    n: as in `best_of_n`.
    sizes: as in `best_of_n`.

  Returns:
    `[P, K]` probabilities.
  """
  correct, _ = check_candidates(jnp.shape(correct), correct, valid, sizes)
  n = check_n(n, correct.shape[1])
  weights, row = _weight_table(correct.shape[1], n, sizes)
  # Some right candidate is drawn exactly when the best drawn depth is below c, right ones first.
  table = np.pad(np.cumsum(weights, axis=-1), ((0, 0), (0, 0), (1, 0)))
  table = np.minimum(table, 1).astype(jax.dtypes.canonicalize_dtype(np.float64))
  return _look_up(table, row, correct)


def check_candidates(shape, correct, valid, sizes) -> tuple[jax.Array, jax.Array]:
  """`correct` (False where missing) and `valid` as bool `[P, M]`, or a ValueError."""
  if len(shape) != 2 or not all(shape):
    raise ValueError(f"candidates {tuple(shape)}: expected [P, M] with at least one of each")
  correct = jnp.asarray(correct)
  valid = jnp.ones(shape, bool) if valid is None else jnp.asarray(valid)
  for name, array in (("correct", correct), ("valid", valid)):
    if array.shape != tuple(shape):
      raise ValueError(f"{name} {array.shape}: expected {tuple(shape)}")
    if not (array.dtype == bool or jnp.issubdtype(array.dtype, jnp.integer)):
      raise ValueError(f"{name} of dtype {array.dtype}: expected bool")
  valid = valid.astype(bool)
  if sizes is not None:
    sizes = np.asarray(sizes)
    if sizes.shape != (shape[0],) or sizes.min() < 1 or sizes.max() > shape[1]:
      raise ValueError(f"sizes {sizes}: expected {shape[0]} numbers in 1..{shape[1]}")
    valid &= np.arange(shape[1]) < sizes[:, None]
  return correct.astype(bool) & valid, valid


def check_n(n: Sequence[int] | None, m: int) -> np.ndarray:
  """The values of N as an array, or a ValueError."""
  n = np.arange(1, m + 1) if n is None else np.asarray(n)
  if n.ndim != 1 or not n.size or n.dtype.kind not in "iu" or n.min() < 1 or n.max() > m:
    raise ValueError(f"n={n}: expected whole numbers in 1..{m}, the number of candidates")
  return n


def _weight_table(m: int, n: np.ndarray, sizes) -> tuple[np.ndarray, np.ndarray | int]:
  """float64 w_d(N) `[U, K, M]` of each different size, and the row of each problem.

  On the host in float64, by w_{d+1} = w_d (M-d-N) / (M-1-d): exact to 1e-13, where differences
  of float32 log-gammas are off by 1e-3 at M = 1860 and meaningless at 1e6.
  """
  different, row = (np.array([m]), 0) if sizes is None else np.unique(sizes, return_inverse=True)
  if different.size * n.size * m > MAX_TABLE:
    raise ValueError(
      f"{different.size} sizes x {n.size} values of N x {m} candidates is too large a table: "
      "give fewer values of n"
    )
  table = np.zeros((different.size, n.size, m))
  for weights, size in zip(table, different):
    drawn = np.minimum(n, size)[:, None]
    d = np.arange(size - 1)
    weights[:, 0] = drawn[:, 0] / size
    weights[:, 1:size] = np.maximum(size - d - drawn, 0) / (size - 1 - d)
    np.cumprod(weights[:, :size], axis=1, out=weights[:, :size])
  return table, row


@jax.jit
def _look_up(table, row, correct):
  return table[row, :, correct.sum(axis=1)]


@jax.jit
def _best_of_n(scores, correct, valid, weights, row):
  """The sum over depths; `weights` is `[U, K, M]` and `row` the problems' rows in it."""
  rank = _shared_correctness(scores, correct, valid).astype(weights.dtype)
  if len(weights) == 1:
    result = _weighted_sum(rank, weights[0])
  else:  # one problem at a time, so that P tables are never held at once
    result = jax.lax.map(lambda x: _weighted_sum(x[0][None], weights[x[1]])[0], (rank, row))
  # Rounding may leave the sum a hair outside.  A NaN stays a NaN.
  return jnp.clip(result, 0, 1)


def _shared_correctness(scores, correct, valid):
  """a_d `[P, M]`: candidates sorted best first, each with the mean correctness of its ties."""
  missing, sort_key, right = jax.lax.sort(
    (~valid, jnp.where(valid, -scores, 0), correct.astype(jnp.int32)), dimension=1, num_keys=2
  )
  differs = (sort_key[:, 1:] != sort_key[:, :-1]) | (missing[:, 1:] != missing[:, :-1])
  edge = jnp.ones((len(scores), 1), bool)
  first = jnp.concatenate([edge, differs], axis=1)
  last = jnp.concatenate([differs, edge], axis=1)

  def over_group(before, through):
    """through(last of the group) - before(first of it), both running counts."""
    low = jax.lax.cummax(jnp.where(first, before, 0), axis=1)
    big = jnp.iinfo(jnp.int32).max
    high = jax.lax.cummin(jnp.where(last, through, big), axis=1, reverse=True)
    return high - low

  depth = jnp.arange(scores.shape[1], dtype=jnp.int32)
  through = jnp.cumsum(right, axis=1, dtype=jnp.int32)
  dtype = jax.dtypes.canonicalize_dtype(np.float64)
  mean = over_group(through - right, through) / over_group(depth, depth + 1).astype(dtype)
  undefined = (valid & jnp.isnan(scores)).any(axis=1, keepdims=True)
  return jnp.where(undefined, jnp.nan, mean)


def _weighted_sum(values, weights):
  """`[P, M]` x `[K, M]` -> `[P, K]`: short blocks, then pairwise.

  A float32 matrix product may add M terms in a row: off by 1e-2 at M = 1e6.  This stays at 5e-7.
  """
  pad = ((0, 0), (0, -values.shape[1] % BLOCK))
  values = jnp.pad(values, pad).reshape(len(values), -1, BLOCK)
  weights = jnp.pad(weights, pad).reshape(len(weights), -1, BLOCK)
  sums = jnp.einsum("PbM,kbM->bPk", values, weights, precision="highest")
  while len(sums) > 1:
    if len(sums) % 2:
      sums = jnp.concatenate([sums, jnp.zeros_like(sums[:1])])
    sums = sums[0::2] + sums[1::2]
  return sums[0]
