"""Best-of-N, pass@N and all-N-correct: exact expectations under sampling without replacement."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from prm_jax.aggregation.ranking import blocks, mask, on_one_cpu, rank_correctness
from prm_jax.aggregation.weights import check_n, draw_weights, weighted_sum

BLOCK = 2**26  # candidates worked on at a time on a CPU: 256 MiB of float32


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

  Works under `jax.jit`, `jax.vmap` and sharded over problems; `n` and `sizes` must be concrete.
  Time is that of one sort; memory beside the arguments O(M log M).

  Args:
    scores: `[P, M]` higher is better; any monotone scale, -inf included.  float64 scores are
      rounded to float32 unless `jax.enable_x64` is on: that can tie neighbours, never swap them.
      Magnitudes below the smallest normal number (float32: 1.2e-38) count as 0: rank by logarithms.
      A problem is NaN throughout where a valid candidate's score is NaN, or where finite scores
      on both sides of zero together span more powers of two than sort keys hold (float32: 254).
    correct: `[P, M]` bool or 0/1 integers.
    valid: `[P, M]` bool; False marks a missing candidate (never generated, or without an answer):
      it may be drawn, is never chosen and never correct.  None: all valid.
    n: the values of N, each in 1..M, missing candidates counted.  None: all of 1..M.
    sizes: `[P]` how many candidates each problem has, where this differs: only its first
      `sizes[p]` slots exist, and N beyond them draws them all.  This is not the same as marking
      the other slots missing, which says that they were drawn and failed, as OpenAI counts
      solutions cut off at the token limit.  None: M each.

  Returns:
    `[P, K]` expected correctness for each problem and N.

  Raises:
    ValueError: shapes that disagree, `correct` of a float type, N or sizes outside 1..M.
  """
  scores = check_scores(scores)
  _, m = check_shapes(scores.shape, correct, valid, sizes)
  weights = draw_weights(m, check_n(n, m), sizes)
  return _expected(rank_correctness, weights, scores, correct, valid, sizes)


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
  _, m = check_shapes(np.shape(correct), correct, valid, sizes)
  weights = draw_weights(m, check_n(n, m), sizes)
  return _expected(_right_ones_on_top, weights, correct, valid, sizes)


def all_correct_at_n(correct, valid=None, n: Sequence[int] | None = None, *, sizes=None):
  """Chance that all of N candidates are right, exactly: C(c, N) / C(M, N), c being right.

  Args:
    correct: `[P, M]` bool or 0/1 integers.
    valid: `[P, M]` bool, or None; a missing candidate is never correct.
    n: as in `best_of_n`.
    sizes: as in `best_of_n`.

  Returns:
    `[P, K]` probabilities.
  """
  _, m = check_shapes(np.shape(correct), correct, valid, sizes)
  weights = draw_weights(m, check_n(n, m), sizes)
  return 1 - _expected(_others_on_top, weights, correct, valid, sizes)


@jax.jit
def _right_ones_on_top(correct, valid, sizes):
  """`[P, M]` best last: the best drawn is right wherever one that is right is drawn."""
  correct, _ = mask(correct, valid, sizes)
  m = correct.shape[1]
  return jnp.arange(m) >= m - correct.sum(axis=1, keepdims=True)


@jax.jit
def _others_on_top(correct, valid, sizes):
  """`[P, M]` best last: the best drawn is right only where all drawn are; inverted."""
  correct, _ = mask(correct, valid, sizes)
  m = correct.shape[1]
  existing = m if sizes is None else sizes[:, None]
  return jnp.arange(m) >= m - (existing - correct.sum(axis=1, keepdims=True))


def _expected(rank, weights, *arrays) -> jax.Array:
  """The weighted sum over depths of `rank(*arrays)` `[P, M]`, a block of problems at a time."""
  arrays = [None if x is None else as_array(x) for x in arrays]
  if not on_one_cpu(*arrays):
    return weighted_sum(rank(*arrays), weights)
  p, m = arrays[0].shape
  arrays = [None if x is None else np.asarray(x) for x in arrays]
  parts, done = [], 0
  for block in blocks(p, -(-BLOCK // m)):
    some = weights if arrays[-1] is None else dataclasses.replace(weights, row=weights.row[block])
    part = weighted_sum(rank(*(None if x is None else x[block] for x in arrays)), some)
    parts.append(part[done - block.start :] if done > block.start else part)
    done = block.stop
  return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def check_scores(scores) -> np.ndarray | jax.Array:
  """`scores` as an array of floats, or a ValueError."""
  scores = as_array(scores)
  if not jnp.issubdtype(scores.dtype, jnp.floating):
    raise ValueError(f"scores of dtype {scores.dtype}: expected floats")
  return scores


def as_array(x) -> np.ndarray | jax.Array:
  return x if isinstance(x, jax.Array) else np.asarray(x)


def check_shapes(shape, correct, valid, sizes) -> tuple[int, int]:
  """`(P, M)`, or a ValueError: what disagrees, or is of another type."""
  if len(shape) != 2 or not all(shape):
    raise ValueError(f"candidates {tuple(shape)}: expected [P, M] with at least one of each")
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
    if not isinstance(array, jax.core.Tracer) and (array.min() < 0 or array.max() > 1):
      raise ValueError(f"{name} holds {array.min()} to {array.max()}: expected 0 and 1")
  if sizes is not None:
    sizes = np.asarray(sizes)
    fine = sizes.shape == (shape[0],) and sizes.dtype.kind in "iu"
    if not fine or sizes.min() < 1 or sizes.max() > shape[1]:
      raise ValueError(f"sizes {sizes}: expected {shape[0]} whole numbers in 1..{shape[1]}")
  return tuple(shape)


def check_candidates(shape, correct, valid, sizes) -> tuple[jax.Array, jax.Array]:
  """`correct` (False where missing) and `valid` as bool `[P, M]`, or a ValueError."""
  check_shapes(shape, correct, valid, sizes)
  sizes = None if sizes is None else np.asarray(sizes)
  return mask(jnp.asarray(correct), None if valid is None else jnp.asarray(valid), sizes)
