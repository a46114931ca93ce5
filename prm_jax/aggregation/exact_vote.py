"""Majority vote: the exact expectation over draws without replacement, in float64 on the host.

Take each of M candidates with probability p = N/M, independently.  The votes X_g of answer g, of
m_g candidates, are then independent Binomial(m_g, p), and given a total S = N (missing candidates
included) the draw is one of N without replacement.  A Fourier sum over L angles theta = 2 pi l / L
picks S = N out of phi_c(theta) = E[z^S; c wins], z = e^{i theta}:

  P(c wins | N) = 1 / P(S = N)  1/L sum_theta z^-N phi_c(theta)
  phi_c = (1-p + p z)^missing  sum_{k>=1} b_c(k) z^k  int_0^1 prod_{g!=c} (F_g + u b_g(k) z^k) du

with b_g(k) = P(X_g = k) and F_g = sum_{j<k} b_g(j) z^j.  As int u^t du = 1 / (t+1), the integral
over u gives c an even share when t others tie with it.  The expected correctness is the sum over
the answers c that are right.

What makes this cheap leaves out less than about 1e-10 each time:
  * only k at which c may win, and among them only answers that may reach k, are multiplied out;
    the others enter to first order, 1 - sum of chances to reach k;
  * the integral takes as few Gauss-Legendre nodes as an error bound allows (`_shares`);
  * c wins or not whatever is added to all counts alike, so that phi_c vanishes like a Gaussian's
    transform: about ten angles matter, not L (`_angles`);
  * values of N within some standard deviations of S share one phi_c.

Answers of equal size are one factor to a power.  The error is below 3e-12 against integer
arithmetic at M = 60..300 and below 3e-11 at M = 1860; at 1e6, where log-factorials round, the
chances of all answers sum to 1 within 2e-9.  500 problems x 1860 candidates x 14 values of N take
about 3-5 s of CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from prm_jax.aggregation.best_of_n import as_array, check_candidates, check_n

NEGLIGIBLE = 1e-11  # what a term left out may add to a probability
DEVIATIONS = 8.0  # a binomial strays further with probability e^(-8^2 / 2) = 1e-14
SPAN = 6.0  # standard deviations of S that values of N sharing one phi_c may span
FEW_ANGLES = 30  # fewer than this are not worth choosing among
BLOCK = 2**20  # complex numbers held at once, roughly
NODES = np.array([2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512])


def exact_majority(
  answer_ids, correct, valid=None, n: Sequence[int] | None = None, *, sizes=None
) -> np.ndarray:
  """Expected correctness of the answer with most votes among N candidates, exactly.

  N of a problem's M candidates are drawn uniformly without replacement; answers that tie share
  evenly.  Missing candidates may be drawn and do not vote; a draw without votes is wrong.

  Args:
    answer_ids: `[P, M]` integers: equal within a problem means the same answer.
    correct: `[P, M]` bool or 0/1 integers.  An answer counts as right in the proportion of its
      valid candidates that are: 0 or 1 unless a grader disagreed with itself.
    valid: `[P, M]` bool, or None; False: missing, as in `best_of_n`.
    n: as in `best_of_n`.
    sizes: as in `best_of_n`.

  Returns:
    `[P, K]` float64 numpy array.

  Raises:
    ValueError: as in `best_of_n`; answer ids that are not integers, or negative where valid;
      arrays traced by `jax.jit` or `jax.vmap`.
  """
  traced = isinstance(answer_ids, jax.core.Tracer)
  answer_ids = as_array(answer_ids)
  correct, valid = check_candidates(answer_ids.shape, correct, valid, sizes)
  if traced or any(isinstance(x, jax.core.Tracer) for x in (correct, valid)):
    raise ValueError(
      "the exact majority vote is computed on the host and cannot be traced by jit or vmap: "
      "use key and permutations"
    )
  answer_ids, correct, valid = (np.asarray(x) for x in (answer_ids, correct, valid))
  if answer_ids.dtype.kind not in "iu":
    raise ValueError(f"answer_ids of dtype {answer_ids.dtype}: expected integers")
  if (valid & (answer_ids < 0)).any():
    lowest = answer_ids[valid].min()
    raise ValueError(f"answer id {lowest}: expected 0 or more (missing: valid=False)")
  problems, m = answer_ids.shape
  values, column = np.unique(check_n(n, m), return_inverse=True)
  log_factorial = np.array([math.lgamma(i + 1) for i in range(m + 1)])
  result = np.zeros((problems, values.size))
  for p, votes in enumerate(valid):
    if correct[p].any():  # correct implies valid
      size = m if sizes is None else int(sizes[p])
      drawn = np.minimum(values, size)
      result[p] = _one_problem(answer_ids[p, votes], correct[p, votes], drawn, size, log_factorial)
  return result[:, column]


def _one_problem(answers, correct, n, m, log_factorial):
  """Expected correctness `[K]` for ascending n, from the valid candidates of m."""
  _, answer = np.unique(answers, return_inverse=True)
  members = np.bincount(answer)
  right = np.bincount(answer, weights=correct) / members
  # Answers of one size are alike: how many there are, and how many of them right.
  size, kind = np.unique(-members, return_inverse=True)
  size, alike, right = -size, np.bincount(kind), np.bincount(kind, weights=right)
  result = np.full(n.size, right[0] / alike[0])  # the largest win where every candidate is drawn
  first = 0
  while first < n.size and n[first] < m:
    middle = (n[first:] + n[first]) / 2
    near = n[first:] - n[first] <= SPAN * np.sqrt(middle * (1 - middle / m))
    last = first + int((near & (n[first:] < m)).sum())
    result[first:last] = _nearby(n[first:last], m, size, alike, right, log_factorial)
    first = last
  return np.clip(result, 0, 1)


class _Contest(NamedTuple):
  """One right answer c against the R sizes of other answers, k `[V]` descending."""

  k: np.ndarray
  b_c: np.ndarray  # [V]
  b: np.ndarray  # [R, V]
  size: np.ndarray  # [R] descending
  alike: np.ndarray  # [R] how many answers have this size
  missing: int  # candidates that do not vote, or whose answers are too small to win
  wins: np.ndarray  # [V] chance that c has k votes and no answer has more
  tied: np.ndarray  # [V] expected number of others at k, given that none is above


def _nearby(n, m, size, alike, right, log_factorial):
  """Expected correctness `[K]` for values of N close together, all below m."""
  p = (n[0] + n[-1]) / 2 / m
  q = 1 - p
  log_pmf = log_factorial[m] - log_factorial[n] - log_factorial[m - n]
  pmf = np.exp(log_pmf + n * math.log(p) + (m - n) * math.log(q))  # P(S = N)
  # The sum over L angles takes N + L, N - L, ... for N.
  angles = math.ceil(7.5 * math.sqrt(m * p * q)) + 10 + int(n[-1] - n[0]) // 2
  angles = min(m, angles) | 1
  # Bernstein's inequality bounds what counts can be.
  slack = DEVIATIONS * np.sqrt(size * (p * q)) + DEVIATIONS**2 / 3
  low = max(1, math.ceil(size[0] * p - slack[0]))
  high = int(min(size[0], size[0] * p + slack[0]))
  if angles < FEW_ANGLES:  # a sharp cut in k would not vanish at far angles
    high = min(high, int(n[-1]))
  able = int((np.minimum(size, size * p + slack) >= low).sum())
  size, alike, right = size[:able], alike[:able], right[:able]
  missing = m - int(size @ alike)
  k = np.arange(high, low - 1, -1)  # descending, so that running sums are upper tails
  rest = size[:, None] - k
  log_rest = log_factorial[np.maximum(rest, 0)] + log_factorial[k] - k * math.log(p / q)
  b = np.exp((log_factorial[size] + size * math.log(q))[:, None] - log_rest)
  b[rest < 0] = 0
  log_no_more = np.log1p(b - np.minimum(b.cumsum(axis=1), 1 - 1e-16))  # log P(X_g <= k)
  at_k = b * np.exp(-log_no_more)
  result = np.zeros(n.size)
  for c in np.flatnonzero(right):
    others = alike - (np.arange(able) == c)
    wins = b[c] * np.exp(others @ log_no_more)
    kept = np.flatnonzero(wins > NEGLIGIBLE * pmf.min() / k.size)
    if kept.size:
      rows, stop = np.flatnonzero(others), kept[-1] + 1
      contest = _Contest(
        k[:stop], b[c, :stop], b[rows, :stop], size[rows], others[rows], missing,
        wins[:stop], (others @ at_k)[:stop],
      )  # fmt: skip
      result += right[c] * _win_chance(contest, kept[0], size[c], n, m, p, angles, pmf)
  return result


def _win_chance(contest, start, size_c, n, m, p, angles, pmf):
  """P(c wins | N) `[K]`; phi_c summed over k[start:]."""
  tolerance = NEGLIGIBLE * pmf.min()
  l = np.arange(angles // 2 + 1)  # the others are conjugate
  if angles >= FEW_ANGLES:
    l = _angles(contest, start, size_c, l, 2 * np.pi / angles * l, m, p, tolerance)
  root = np.exp(2j * np.pi / angles * np.arange(angles))
  pieces = 1 + 4 * contest.b.size * l.size // BLOCK
  total = np.zeros(n.size)
  for part in np.array_split(l, pieces):
    theta = 2 * np.pi / angles * part
    # log(1-p + p z), free of cancellation.
    log_z = 0.5 * np.log1p(-4 * p * (1 - p) * np.sin(theta / 2) ** 2)
    log_z = log_z + 1j * np.arctan2(p * np.sin(theta), 1 - p + p * np.cos(theta))
    phi = _phi(contest, start, root[contest.k[:, None] * part % angles], log_z, tolerance)
    phi = phi * np.where(part == 0, 1, 2)
    total += (root[-n[:, None] * part % angles] * phi).sum(axis=1).real
  return total / (angles * pmf)


def _angles(contest, start, size_c, l, theta, m, p, tolerance):
  """The l at which phi_c may exceed the tolerance.

  Where c ties with r-1 others at k, their votes turn as z^(rk), which adds up in step at theta =
  2 pi j / r and else dies out with the spread of k; all other candidates die out by themselves.
  The r-1 largest answers leave the fewest others.  Tying at all costs the expected number of ties,
  s^(r-1) / (r-1)!, over |1 - z| each.
  """
  size, alike = contest.size[:11], np.minimum(contest.alike[:11], 11)
  tying = np.concatenate([[size_c], np.repeat(size, alike)[:11]])
  r = np.arange(1, tying.size + 1)[:, None]
  factors = np.vstack([contest.wins[start:], contest.tied[start:] / np.maximum(r[1:] - 1, 1)])
  ties = np.log(np.cumprod(factors, axis=0).sum(axis=1) + 1e-300)[:, None]
  half = np.maximum(np.sin(theta / 2), 1e-3)
  spread = np.sin(r * theta / 2) ** 2 / np.cumsum(1 / tying)[:, None]
  spread += half**2 * (m - np.cumsum(tying))[:, None]
  bound = ties - (r - 1) * np.log(2 * half) - 2 * p * (1 - p) * spread
  return l[(bound.max(axis=0) > math.log(tolerance)) | (l < 3)]


def _phi(contest, start, z_k, log_z, tolerance):
  """phi_c `[A]` at the angles whose z^k `[V, A]` and log(1-p + p z) `[A]` are given."""
  k, b_c, b, size, alike, missing, wins, tied = contest
  chance = (alike[:, None] * b.cumsum(axis=1))[::-1].cumsum(axis=0)[::-1]
  # From where on each answer is multiplied out: two smaller ones reach k with chance < tolerance.
  enter = (chance < math.sqrt(tolerance)).sum(axis=1)
  whole = np.exp(size[:, None] * log_z)
  phi = 0
  while start < k.size:  # stretches of k, down from the highest, as more answers come in
    more = 2 * int((enter <= start).sum()) + 1
    end = enter[more] if more < enter.size else k.size
    seen = int((enter < end).sum())
    here = slice(start, end)
    vote = b[:seen, here, None] * z_k[here]
    below = whole[:seen] - b[:seen, :start] @ z_k[:start]
    below = below[:, None] - vote.cumsum(axis=1)
    free = missing + int(size[seen:] @ alike[seen:])
    without = alike[seen:, None] * np.exp((free - size[seen:, None]) * log_z)
    few_vote = (b[seen:, :end].T @ without) * z_k[:end]
    few_below = np.exp(free * log_z) - few_vote.cumsum(axis=0)[start:]
    u, weight = _shares(wins[here], tied[here], int(alike[:seen].sum()) + 1, tolerance)
    product = weight * (few_below + u * few_vote[start:])
    product = product * _product(below[:, None] + u * vote[:, None], alike[:seen])
    phi = phi + (b_c[here, None] * z_k[here] * product.sum(axis=0)).sum(axis=0)
    start = end
  return phi


def _product(x, power):
  """prod_g x_g^power_g."""
  odd = power % 2 == 1
  result = np.multiply.reduce(x if odd.all() else x[odd], axis=0)
  more = power > 1
  return result * _product(x[more] ** 2, power[more] // 2) if more.any() else result


def _shares(wins, tied, others, tolerance):
  """Gauss-Legendre nodes and weights for int_0^1 du, `[U, 1, 1]`, of products of `others` factors.

  With s = tied the product falls at least as fast as exp(-s (1-u)): the integral starts at 1-h.
  Off the interval it grows no faster than exp(s (u-1)); the best ellipse in the quadrature's error
  bound gives s h (sqrt(1 + x^2) - 1) / 2 - 2 U asinh(x), x = 4 U / (s h), as the error's
  logarithm.  At angles other than 0 both are smaller.
  """
  exact = others // 2 + 1  # U nodes integrate degree 2 U - 1
  nodes = NODES[: np.searchsorted(NODES, exact)]
  if not nodes.size:
    return _gauss(exact, 1.0)
  least = tied[wins > tolerance / wins.size].min(initial=np.inf)
  h = min(1.0, -math.log(tolerance) / least) if least > 0 else 1.0
  x = 4 * nodes[:, None] / np.maximum(tied * h, 1e-100)
  error = tied * (h / 2) * (np.sqrt(1 + x * x) - 1) - 2 * nodes[:, None] * np.arcsinh(x)
  enough = np.exp(np.minimum(error, 0)) @ wins < tolerance
  if enough.any():
    exact = nodes[enough.argmax()]
  return _gauss(min(int(exact), int(NODES[-1])), h)


@functools.cache
def _legendre(nodes):
  return np.polynomial.legendre.leggauss(nodes)


def _gauss(nodes, h):
  """Nodes and weights on [1-h, 1]."""
  x, weight = _legendre(nodes)
  return (1 - h / 2 * (1 - x))[:, None, None], (h / 2 * weight)[:, None, None]
