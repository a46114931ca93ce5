"""Error bars of generation: how much best-of-N would differ on newly generated candidates."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from prm_jax.aggregation.candidates import as_array, check_n, check_scores, check_shapes
from prm_jax.aggregation.order_statistics import MAX_ENTRIES, depth_weights
from prm_jax.aggregation.ranking import over_ties, sorted_keys

LARGEST_SHARE = 5  # the error is given up to N = M / 5


def generation_error(
  scores, correct, valid=None, n: Sequence[int] | None = None, *, sizes=None
) -> jax.Array:
  """Returns the standard error of each problem's best-of-N over newly generated pools of M.

  This is the delete-one jackknife, in closed form.  Let h(i) be the expected correctness of a draw
  that holds candidate i.  As E = N/M h(i) + (1 - N/M) E_without_i for every i,

    variance = (M-1)/M sum_i (E_without_i - E)^2 = (M-1)/M (N / (M-N))^2 sum_i (h(i) - E)^2.

  This error covers generation alone, for fixed problems.  The error of a mean over them is
  sqrt(sum of squares) / P.  (`standard_error` and `bootstrap` include the choice of problems as
  well.)  Compared with regenerated pools, the error is right within 5 % up to N = M/20, 10 % too
  large at M/4 and a third too large at 0.8 M, so it is returned only up to N = M/5.

  Takes the arguments and raises the errors of `best_of_n`.  Memory grows with M x the number of
  values of N.

  Returns:
    `[P, K]`; NaN where N is over a fifth of the problem's candidates, or where `best_of_n` is NaN.
  """
  scores = check_scores(scores)
  p, m = check_shapes(scores.shape, correct, valid, sizes)
  n = check_n(n, m)
  sizes = np.full(p, m) if sizes is None else np.asarray(sizes)
  different, row = np.unique(sizes, return_inverse=True)
  values, column = np.unique(n, return_inverse=True)
  values = values[values * LARGEST_SHARE <= m]
  if different.size * values.size * m > MAX_ENTRIES:
    raise ValueError(f"{values.size} values of N x {m} candidates: give fewer values of n")
  keys, undefined = sorted_keys(scores, as_array(correct), as_array(valid), sizes)
  whole = depth_weights(different, values, m).astype(np.float32)
  rest = depth_weights(different - 1, values - 1, m).astype(np.float32)
  error = _errors(keys, jnp.asarray(sizes), row, values, whole, rest)
  too_large = int(column.max()) + 1 - values.size
  error = jnp.pad(error, ((0, 0), (0, too_large)), constant_values=jnp.nan)
  large = n * LARGEST_SHARE > sizes[:, None]
  return jnp.where(large | undefined[:, None], jnp.nan, error[:, column])


@jax.jit
def _errors(keys, size, row, values, whole, rest):
  """Returns the errors `[P, K]` from sorted keys.

  `whole` and `rest` are weights w_d(N) `[U, K, M]`, of which problem p uses row `row[p]`.  `whole`
  is for a draw of N from M, `rest` for N - 1 from the M - 1 candidates other than a given one.
  """
  keys = keys[:, ::-1]  # best first; missing candidates last, tied, all wrong
  total = over_ties(keys)
  right = (keys & 1).astype(whole.dtype)
  members = total(jnp.ones_like(right))
  right_members = total(right)
  depth = jnp.arange(keys.shape[1])
  changes = jnp.pad((keys[:, 1:] ^ keys[:, :-1]) > 1, ((0, 0), (1, 0)))
  begins = jax.lax.cummax(jnp.where(changes, depth, 0), axis=1)
  others_right = (right_members - right) / jnp.maximum(members - 1, 1)
  exists = depth < size[:, None]

  def before_ties(x):  # sums over all depths with better scores
    return jnp.take_along_axis(jnp.cumsum(x, axis=1) - x, begins, axis=1)

  def error(x):
    n, whole, rest = x
    whole, rest = whole[row], rest[row]
    won_above = before_ties(rest * right_members / members)
    none_above = 1 - before_ties(rest)
    picked = total(whole) / members * size[:, None] / n
    # h(i): the pick is a candidate above i, or i itself, or one that ties with i.
    given = won_above + right * picked + others_right * (none_above - picked)
    mean = jnp.where(exists, given, 0).sum(axis=1) / size
    squares = jnp.where(exists, given - mean[:, None], 0) ** 2
    variance = (size - 1) / size * (n / (size - n)) ** 2 * squares.sum(axis=1)
    return jnp.sqrt(variance)

  return jax.lax.map(error, (values, whole.swapaxes(0, 1), rest.swapaxes(0, 1))).T
