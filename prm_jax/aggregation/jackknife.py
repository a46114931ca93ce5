"""How much best-of-N would change if the candidates were generated again."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from prm_jax.aggregation.best_of_n import as_array, check_scores, check_shapes
from prm_jax.aggregation.ranking import over_ties, sorted_keys
from prm_jax.aggregation.weights import MAX_ENTRIES, check_n, depth_weights

LARGEST_SHARE = 5  # valid up to N = M / 5


def generation_error(scores, correct, valid=None, n: Sequence[int] | None = None, *, sizes=None):
  """Standard error of each problem's best-of-N over fresh pools of M candidates.

  The delete-one jackknife, in closed form.  Let h(i) be the expectation of a draw that holds
  candidate i.  E = N/M h(i) + (1 - N/M) E_without_i for every i, hence

    variance = (M-1)/M sum_i (E_without_i - E)^2 = (M-1)/M (N / (M-N))^2 sum_i (h(i) - E)^2.

  This is the noise of generation alone, for these very problems: the error of a mean over them is
  `sqrt(sum of squares) / P`.  The spread over problems (`standard_error`, `bootstrap`) holds it
  too, beside the choice of problems.  Near N = M, pools of M say little about draws of N: against
  regenerated pools the error is true to 5 % up to N = M/20, 10 % too large at M/4, a third at
  0.8 M.  It is given up to N = M/5.

  Args:
    scores: `[P, M]` as in `best_of_n`.
    correct: `[P, M]` as in `best_of_n`.
    valid: `[P, M]` as in `best_of_n`.
    n: as in `best_of_n`; memory grows with M x values of N.
    sizes: as in `best_of_n`.

  Returns:
    `[P, K]`, NaN where N is over a fifth of the problem's candidates.

  Raises:
    ValueError: as `best_of_n`.
  """
  scores = check_scores(scores)
  p, m = check_shapes(scores.shape, correct, valid, sizes)
  n = check_n(n, m)
  different, row = np.unique([m] * p if sizes is None else sizes, return_inverse=True)
  values, column = np.unique(n, return_inverse=True)
  values = values[values * LARGEST_SHARE <= m]
  if different.size * values.size * m > MAX_ENTRIES:
    raise ValueError(f"{values.size} values of N x {m} candidates: give fewer values of n")
  # Of a draw of N from M, and of the other N - 1 from M - 1 when one candidate is in it.
  first = np.zeros((different.size, values.size, m), np.float32)
  above = np.zeros_like(first)
  for u, size in enumerate(different):
    first[u, :, :size] = depth_weights(size, values, size)
    if size > 1:
      others = depth_weights(size - 1, np.maximum(values - 1, 1), size - 1)
      above[u, :, : size - 1] = np.where(values[:, None] > 1, others, 0)

  sizes = None if sizes is None else np.asarray(sizes)
  correct, valid = as_array(correct), None if valid is None else as_array(valid)
  keys, undefined = sorted_keys(scores, correct, valid, sizes)
  error = _errors(keys, jnp.asarray(different)[row], row, values, first, above)
  error = jnp.pad(error, ((0, 0), (0, column.max() + 1 - values.size)), constant_values=jnp.nan)
  large = n * LARGEST_SHARE > different[row][:, None]
  return jnp.where(large | undefined[:, None], jnp.nan, error[:, column])


@jax.jit
def _errors(keys, size, row, values, first, above):
  """`[P, K]`; `first` and `above` are `[U, K, M]`, of which each problem takes a row."""
  keys = keys[:, ::-1]  # best first; missing ones last, as one group, all wrong
  total = over_ties(keys)
  right = (keys & 1).astype(first.dtype)
  members = total(jnp.ones_like(right))
  right_members = total(right)
  depth = jnp.broadcast_to(jnp.arange(keys.shape[1], dtype=first.dtype), keys.shape)
  begins = (total(depth) / members - (members - 1) / 2).round().astype(jnp.int32)
  others_right = (right_members - right) / jnp.maximum(members - 1, 1)
  exists = depth < size[:, None]

  def one(x):
    n, first, above = x
    first, above = first[row], above[row]

    def before_group(x):  # the sum over all depths above those tied
      return jnp.take_along_axis(jnp.cumsum(x, axis=1) - x, begins, axis=1)

    won_above = before_group(above * right_members / members)
    none_above = 1 - before_group(above)
    picked = total(first) / members * size[:, None] / n
    # Given that a candidate is drawn: one above it wins; or it is picked; or one tied with it is.
    given = won_above + right * picked + others_right * (none_above - picked)
    mean = jnp.where(exists, given, 0).sum(axis=1) / size
    squares = jnp.where(exists, given - mean[:, None], 0) ** 2
    variance = (size - 1) / size * (n / (size - n)) ** 2 * squares.sum(axis=1)
    return jnp.sqrt(variance)

  result = jax.lax.map(one, (values, first.swapaxes(0, 1), above.swapaxes(0, 1)))
  return result.T
