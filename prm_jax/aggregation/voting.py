"""Majority and weighted voting: expectations by Monte-Carlo, each with its standard error."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from prm_jax.aggregation.best_of_n import check_candidates, check_n


def majority_vote(
  answer_ids,
  correct,
  valid=None,
  n: Sequence[int] | None = None,
  weights=None,
  *,
  key,
  permutations: int,
  sizes=None,
  num_answers: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Expected correctness of the answer with most votes among N candidates.

  N of a problem's M candidates are drawn uniformly without replacement; the answer with the
  most votes, or the largest sum of weights, wins, and answers that tie share evenly.  Missing
  candidates do not vote; a draw without votes is wrong.  No closed form serves every case, so
  this averages over random orders of the candidates, every N of one order being a prefix of it.
  Exact, with standard error 0, where N draws every candidate.

  Orders are shared by problems whose candidates were first shuffled apart, which makes the errors
  of different problems uncorrelated: the standard error of a mean over problems is
  sqrt(sum of squared standard errors) / P.

  Under `jax.jit`, `n`, `sizes`, `permutations` and `num_answers` must be concrete.

  Args:
    answer_ids: `[P, M]` integers: equal within a problem means the same answer.
    correct: `[P, M]` bool or 0/1 integers.  An answer counts as right in the proportion of its
      valid candidates that are: 0 or 1 unless a grader disagreed with itself.
    valid: `[P, M]` bool, or None; False: missing, as in `best_of_n`.
    n: as in `best_of_n`.  None takes memory P x M x answers.
    weights: `[P, M]` non-negative finite weight of each vote; None: 1 each.  Only their ratios
      within a problem matter.  Sums equal to within rounding tie.
    key: a `jax.random` key.
    permutations: how many orders, at least 2.
    sizes: as in `best_of_n`.
    num_answers: answer ids lie in 0..num_answers-1; a vote for any other is not counted.
      None: read from `answer_ids`, which must then be concrete.

  Returns:
    mean `[P, K]` and its Monte-Carlo standard error `[P, K]`.

  Raises:
    ValueError: as in `best_of_n`; a negative answer id; a weight that is negative or not finite
      (checked where the arrays are concrete); fewer than 2 permutations.
  """
  answer_ids = jnp.asarray(answer_ids)
  if not jnp.issubdtype(answer_ids.dtype, jnp.integer):
    raise ValueError(f"answer_ids of dtype {answer_ids.dtype}: expected integers")
  correct, valid = check_candidates(answer_ids.shape, correct, valid, sizes)
  problems, m = answer_ids.shape
  n = check_n(n, m)
  if permutations < 2:
    raise ValueError(f"permutations={permutations}: a standard error takes at least 2")
  if num_answers is None:
    if isinstance(answer_ids, jax.core.Tracer):
      raise ValueError("under jit or vmap, give num_answers: one more than the largest answer id")
    if answer_ids.min() < 0:
      raise ValueError(f"answer id {answer_ids.min()}: expected 0 or more (missing: valid=False)")
    num_answers = int(answer_ids.max()) + 1
  if problems * (len(n) + 1) * num_answers >= 2**31:
    raise ValueError(
      f"{problems} problems x {len(n)} values of N x {num_answers} answers is too large a tally: "
      "give fewer problems at once"
    )
  if weights is not None:
    weights = jnp.asarray(weights, jax.dtypes.canonicalize_dtype(np.float64))
    if weights.shape != answer_ids.shape:
      raise ValueError(f"weights {weights.shape}: expected {answer_ids.shape}")
    if not any(isinstance(x, jax.core.Tracer) for x in (weights, valid)):
      wrong = np.asarray(valid & ~(jnp.isfinite(weights) & (weights >= 0)))
      if wrong.any():
        raise ValueError(
          f"weight {weights[wrong][0]} of candidate {np.argwhere(wrong)[0]}: "
          "expected a finite number, not negative"
        )
  sizes = None if sizes is None else np.asarray(sizes)
  values, column = np.unique(n, return_inverse=True)  # ascending: prefixes of one order
  mean, error = _prefix_votes(
    answer_ids, correct, valid, weights, values, sizes, key, num_answers, permutations
  )
  return mean[:, column], error[:, column]


@functools.partial(jax.jit, static_argnames=("num_answers", "permutations"))
def _prefix_votes(
  answer_ids, correct, valid, weights, n, sizes, key, num_answers: int, permutations: int
):
  """Running mean and variance of the vote over random orders; `n` ascends strictly."""
  (problems, m), k = answer_ids.shape, len(n)
  dtype = jax.dtypes.canonicalize_dtype(np.float64)
  # A shuffle of each problem's candidates, then the orders all problems share.
  shuffles = jnp.argsort(jax.random.bits(key, (problems + permutations, m)), axis=1)
  slots, orders = shuffles[:problems], shuffles[problems:]

  def shuffle(x):
    return jnp.take_along_axis(x, slots, axis=1)

  # Which N first takes the candidate drawn first, second, ...; K: none does.
  interval = jnp.searchsorted(n, jnp.arange(1, m + 1)).astype(jnp.int32)
  exists = None if sizes is None else shuffle(jnp.arange(m) < sizes[:, None])
  voting = valid & (answer_ids >= 0) & (answer_ids < num_answers)
  # The cell of a vote in [P, K + 1, answers]; the last row of K takes what no N reaches.
  problem_cell = jnp.arange(problems)[:, None] * ((k + 1) * num_answers)
  cell = shuffle(jnp.where(voting, problem_cell + answer_ids, -1))
  weights = None if weights is None else shuffle(jnp.where(voting, weights, 0))

  members = jnp.zeros((problems, num_answers), jnp.int32)
  rows = jnp.arange(problems)[:, None]
  safe_ids = jnp.where(voting, answer_ids, num_answers)
  members = members.at[rows, safe_ids].add(1, mode="drop")
  right = jnp.zeros_like(members).at[rows, safe_ids].add(correct.astype(jnp.int32), mode="drop")
  answer_correct = right / jnp.maximum(members, 1).astype(dtype)

  def outcome(order):
    """`[P, K]` correctness of the winner among the first N of one order."""
    cells = cell[:, order]
    first_n = interval
    if exists is not None:  # slots that do not exist are skipped, not drawn
      first_n = interval[jnp.cumsum(exists[:, order], axis=1, dtype=jnp.int32) - 1]
    # Out of range, not negative: negative indices count from the end.
    cells = jnp.where(cells < 0, problems * (k + 1) * num_answers, cells + first_n * num_answers)

    def tally(vote, dtype):
      zeros = jnp.zeros(problems * (k + 1) * num_answers, dtype)
      each = zeros.at[cells.ravel()].add(vote, mode="drop")
      return jnp.cumsum(each.reshape(problems, k + 1, num_answers)[:, :k], axis=1)

    count = tally(1, jnp.int32)
    if weights is None:
      least = count.max(axis=-1, keepdims=True)
      votes = count
    else:
      votes = tally(weights[:, order].ravel(), dtype)
      # Equal sums added in another order differ by rounding; they are ties all the same.
      least = jnp.where(count > 0, votes, 0).max(axis=-1, keepdims=True)
      least = least * (1 - 64 * jnp.finfo(dtype).eps)
    wins = (votes >= least) & (count > 0)
    shared = (wins * answer_correct[:, None]).sum(axis=-1)
    return shared / jnp.maximum(wins.sum(axis=-1), 1)

  def accumulate(state, order):  # Welford's update: no cancellation
    seen, mean, squares, _ = state
    x = outcome(order)
    delta = x - mean
    mean = mean + delta / (seen + 1)
    return (seen + 1, mean, squares + delta * (x - mean), x), None

  zeros = jnp.zeros((problems, k), dtype)
  (_, mean, squares, latest), _ = jax.lax.scan(accumulate, (0, zeros, zeros, zeros), orders)
  error = jnp.sqrt(squares / (permutations - 1) / permutations)
  drew_all = n >= (m if sizes is None else sizes[:, None])
  mean = jnp.where(drew_all, latest, mean)  # every order says the same, but for rounding
  return mean, jnp.where(drew_all, 0, error)
