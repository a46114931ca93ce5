"""Majority vote: the exact expectation over draws without replacement, in float64 on the host.

Take each of M candidates with probability p = N/M, independently.  The votes X_g of answer g, which
m_g candidates give, are then independent Binomial(m_g, p).  Given that S = N candidates are taken,
they are a uniform draw of N without replacement.  A Fourier sum over L angles theta = 2 pi l / L
conditions on S = N.  With z = e^{i theta}, Z = 1-p + p z and phi_c(theta) = E[z^S; c wins],

  P(c wins | N) = 1 / (L P(S = N))  sum_theta z^-N phi_c(theta)                     (`_win_chance`)
  phi_c = Z^missing sum_{k>=1} b_c(k) z^k int_0^1 prod_{g!=c} (F_g + u b_g(k) z^k) du      (`_phi`)
  b_g(k) = P(X_g = k) = C(m_g, k) p^k (1-p)^(m_g-k)                                  (`_binomials`)
  F_g = sum_{j<k} b_g(j) z^j = Z^m_g - sum_{j>=k} b_g(j) z^j                     (`_large_answers`)

As int u^t du = 1 / (t+1), the integral gives c an even share when t others tie with it.  The
expected correctness is the sum over the right answers c.

Four approximations make this cheap, and each leaves out less than about 1e-10: only the k at which
c may win are summed (`_contests`); answers unlikely to reach k enter to first order
(`_small_answers`); the integral takes few nodes (`_quadrature`); and few angles matter, as phi_c
falls off like the transform of a Gaussian (`_angles`).  Nearby values of N share one phi_c, and
answers of equal size share one factor, raised to a power.

The error is below 3e-12 against integer arithmetic at M = 60..300 and below 3e-11 at M = 1860; at
1e6, where log-factorials round, the chances of all answers sum to 1 within 2e-9.  500 problems x
1860 candidates x 14 values of N take about 3-5 s of CPU.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from prm_jax.aggregation import candidates

NEGLIGIBLE = 1e-11  # the most that an omitted term may add to a probability
DEVIATIONS = 8.0  # a binomial strays further with probability about e^(-8^2 / 2) = 1e-14
SPAN = 6.0  # standard deviations of S that values of N sharing one phi_c may span
FEW_ANGLES = 30  # with fewer, choosing among them saves nothing
BLOCK = 2**20  # complex numbers in memory at once, roughly
NODES = np.array([2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512])


def exact_majority(answer_ids, correct, valid, n, sizes) -> np.ndarray:
  """Returns the expected correctness `[P, K]` of the answer with most votes among N candidates.

  Args:
    answer_ids: `[P, M]` integers, 0 or more where valid.
    correct, valid: bool `[P, M]`, as `candidates.mask` returns them.
    n: `[K]` integers in 1..M.
    sizes: `[P]`, or None, as in `best_of_n`.

  Raises:
    ValueError: `jax.jit` or `jax.vmap` traces an array.
  """
  if candidates.is_traced(answer_ids, correct, valid):
    raise ValueError(
      "the exact majority vote is computed on the host and cannot be traced by jit or vmap: "
      "use key and permutations"
    )
  answer_ids, correct, valid = map(np.asarray, (answer_ids, correct, valid))
  problems, m = answer_ids.shape
  values, column = np.unique(n, return_inverse=True)
  log_factorial = np.array([math.lgamma(i + 1) for i in range(m + 1)])
  result = np.zeros((problems, values.size))
  for p, votes in enumerate(valid):
    if correct[p].any():  # correct implies valid
      size = m if sizes is None else int(sizes[p])
      drawn = np.minimum(values, size)
      result[p] = _one_problem(answer_ids[p, votes], correct[p, votes], drawn, size, log_factorial)
  return result[:, column]


class _Draw(NamedTuple):
  """Nearby values of N, which share one distribution of S."""

  n: np.ndarray  # [K] ascending, below m
  m: int  # candidates
  p: float  # probability of taking a candidate
  chance: np.ndarray  # [K] P(S = N)
  angles: int  # L, odd
  log_factorial: np.ndarray  # of 0..m

  @property
  def tolerance(self) -> float:
    """The most that an omitted term may add to phi."""
    return NEGLIGIBLE * self.chance.min()


class _Contest(NamedTuple):
  """A right answer c against the R sizes of other answers, for k `[V]` votes, descending."""

  k: np.ndarray
  start: int  # c cannot win with more than k[start] votes
  size_c: int  # candidates of c
  b_c: np.ndarray  # [V] P(X_c = k)
  b: np.ndarray  # [R, V] P(X_g = k) of an answer of each size
  size: np.ndarray  # [R] descending
  alike: np.ndarray  # [R] the number of answers of each size
  missing: int  # candidates that do not vote, or whose answers are too small to win
  wins: np.ndarray  # [V] chance that c has k votes and no answer has more
  tied: np.ndarray  # [V] expected number of others at k, given that none is above


def _one_problem(answers, correct, n, m, log_factorial):
  """Returns the expected correctness `[K]` for ascending n, from the valid candidates of m."""
  _, answer = np.unique(answers, return_inverse=True)
  members = np.bincount(answer)
  right = np.bincount(answer, weights=correct) / members
  # Answers of one size are alike: how many there are, and how many of them are right.
  size, kind = np.unique(-members, return_inverse=True)
  size, alike, right = -size, np.bincount(kind), np.bincount(kind, weights=right)
  result = np.full(n.size, right[0] / alike[0])  # if all are drawn, the largest answers win
  first = 0
  while first < n.size and n[first] < m:
    middle = (n[first:] + n[first]) / 2
    near = n[first:] - n[first] <= SPAN * np.sqrt(middle * (1 - middle / m))
    last = first + int((near & (n[first:] < m)).sum())
    draw = _draw(n[first:last], m, log_factorial)
    result[first:last] = sum(
      share * _win_chance(contest, draw) for share, contest in _contests(draw, size, alike, right)
    )
    first = last
  return np.clip(result, 0, 1)


def _draw(n, m, log_factorial) -> _Draw:
  """Returns the values of N with P(S = N) = C(M, N) p^N (1-p)^(M-N) and the number L of angles.

  The sum over L angles cannot tell S = N +- L from S = N, so L exceeds 7.5 standard deviations, or
  is at least M.
  """
  p = (n[0] + n[-1]) / 2 / m
  log_ways = log_factorial[m] - log_factorial[n] - log_factorial[m - n]
  chance = np.exp(log_ways + n * math.log(p) + (m - n) * math.log(1 - p))
  angles = math.ceil(7.5 * math.sqrt(m * p * (1 - p))) + 10 + int(n[-1] - n[0]) // 2
  return _Draw(n, m, p, chance, min(m, angles) | 1, log_factorial)


def _binomials(size, k, draw: _Draw):
  """Returns b_g(k) = C(m_g, k) p^k (1-p)^(m_g-k), `[R, V]`."""
  p, log_factorial = draw.p, draw.log_factorial
  rest = size[:, None] - k
  log_rest = log_factorial[np.maximum(rest, 0)] + log_factorial[k] - k * math.log(p / (1 - p))
  b = np.exp((log_factorial[size] + size * math.log(1 - p))[:, None] - log_rest)
  b[rest < 0] = 0
  return b


def _contests(draw: _Draw, size, alike, right) -> Iterator[tuple[float, _Contest]]:
  """Yields the contest of each right answer size, with the number of right answers of that size.

  Bernstein's inequality bounds the vote counts.  Within its bounds, a count k is kept if the chance
  that c wins with it is not negligible: wins = b_c(k) prod_{g!=c} P(X_g <= k).
  """
  variance = draw.p * (1 - draw.p)
  slack = DEVIATIONS * np.sqrt(size * variance) + DEVIATIONS**2 / 3
  low = max(1, math.ceil(size[0] * draw.p - slack[0]))
  high = int(min(size[0], size[0] * draw.p + slack[0]))
  # A sharp cut in k leaves phi_c large at far angles, so it needs a sum over all angles.
  if draw.angles < FEW_ANGLES:
    high = min(high, int(draw.n[-1]))
  able = int((np.minimum(size, size * draw.p + slack) >= low).sum())
  size, alike, right = size[:able], alike[:able], right[:able]
  missing = draw.m - int(size @ alike)
  k = np.arange(high, low - 1, -1)  # descending, so that running sums are upper tails
  b = _binomials(size, k, draw)
  log_no_more = np.log1p(b - np.minimum(b.cumsum(axis=1), 1 - 1e-16))  # log P(X_g <= k)
  at_k = b * np.exp(-log_no_more)
  for c in np.flatnonzero(right):
    others = alike - (np.arange(able) == c)
    wins = b[c] * np.exp(others @ log_no_more)
    kept = np.flatnonzero(wins > draw.tolerance / k.size)
    if kept.size:
      rows, stop = np.flatnonzero(others), kept[-1] + 1
      yield right[c], _Contest(
        k[:stop], kept[0], size[c], b[c, :stop], b[rows, :stop], size[rows], others[rows], missing,
        wins[:stop], (others @ at_k)[:stop],
      )  # fmt: skip


def _win_chance(contest: _Contest, draw: _Draw):
  """Returns P(c wins | N) = 1 / (L P(S = N)) sum_l z^-N phi_c(2 pi l / L), `[K]`."""
  l = np.arange(draw.angles // 2 + 1)  # the other angles give the conjugates
  if draw.angles >= FEW_ANGLES:
    l = _angles(contest, draw, l)
  root = np.exp(2j * np.pi / draw.angles * np.arange(draw.angles))
  total = np.zeros(draw.n.size)
  for part in np.array_split(l, 1 + 4 * contest.b.size * l.size // BLOCK):
    z_k = root[contest.k[:, None] * part % draw.angles]
    phi = _phi(contest, z_k, _log_z(2 * np.pi / draw.angles * part, draw.p), draw.tolerance)
    phi = phi * np.where(part == 0, 1, 2)
    total += (root[-draw.n[:, None] * part % draw.angles] * phi).sum(axis=1).real
  return total / (draw.angles * draw.chance)


def _log_z(theta, p):
  """Returns log Z = log(1-p + p e^{i theta}), computed without cancellation."""
  modulus = 0.5 * np.log1p(-4 * p * (1 - p) * np.sin(theta / 2) ** 2)
  return modulus + 1j * np.arctan2(p * np.sin(theta), 1 - p + p * np.cos(theta))


def _angles(contest: _Contest, draw: _Draw, l):
  """Returns the l at which phi_c may exceed the tolerance.

  Where c ties with r-1 others at k, their votes turn as z^(rk).  These terms add up in phase at
  theta = 2 pi j / r, and elsewhere cancel by the spread of k; the terms of all other candidates
  cancel on their own.  The r-1 largest answers leave the fewest others.  The chance of a tie is at
  most the expected number of ties, s^(r-1) / (r-1)!, and each tie costs a factor 1 / |1 - z|.
  """
  theta = 2 * np.pi / draw.angles * l
  size, alike = contest.size[:11], np.minimum(contest.alike[:11], 11)
  tying = np.concatenate([[contest.size_c], np.repeat(size, alike)[:11]])
  r = np.arange(1, tying.size + 1)[:, None]
  wins, tied = contest.wins[contest.start :], contest.tied[contest.start :]
  factors = np.vstack([wins, tied / np.maximum(r[1:] - 1, 1)])
  ties = np.log(np.cumprod(factors, axis=0).sum(axis=1) + 1e-300)[:, None]
  half = np.maximum(np.sin(theta / 2), 1e-3)
  spread = np.sin(r * theta / 2) ** 2 / np.cumsum(1 / tying)[:, None]
  spread += half**2 * (draw.m - np.cumsum(tying))[:, None]
  bound = ties - (r - 1) * np.log(2 * half) - 2 * draw.p * (1 - draw.p) * spread
  return l[(bound.max(axis=0) > math.log(draw.tolerance)) | (l < 3)]


def _phi(contest: _Contest, z_k, log_z, tolerance):
  """Returns phi_c `[A]` at A angles, from z^k `[V, A]` and log Z `[A]`.

  The descending k are processed in stretches, because more answers reach a lower k.  An answer is
  an exact factor of the product from the first k that two answers of its size or smaller both
  reach with a chance above the tolerance.
  """
  chance = (contest.alike[:, None] * contest.b.cumsum(axis=1))[::-1].cumsum(axis=0)[::-1]
  enter = (chance < math.sqrt(tolerance)).sum(axis=1)  # [R] place in k
  phi, start = 0, contest.start
  while start < contest.k.size:
    more = 2 * int((enter <= start).sum()) + 1
    end = enter[more] if more < enter.size else contest.k.size
    large, here = int((enter < end).sum()), slice(start, end)
    below, vote = _large_answers(contest, large, here, z_k, log_z)
    few_below, few_vote = _small_answers(contest, large, here, z_k, log_z)
    factors = int(contest.alike[:large].sum()) + 1
    u, weight = _quadrature(contest.wins[here], contest.tied[here], factors, tolerance)
    product = weight * (few_below + u * few_vote)
    product = product * _product(below[:, None] + u * vote[:, None], contest.alike[:large])
    phi = phi + (contest.b_c[here, None] * z_k[here] * product.sum(axis=0)).sum(axis=0)
    start = end
  return phi


def _large_answers(contest: _Contest, large: int, here: slice, z_k, log_z):
  """Returns F_g and b_g(k) z^k of the first `large` sizes, each `[R, V, A]`."""
  whole = np.exp(contest.size[:large, None] * log_z)
  vote = contest.b[:large, here, None] * z_k[here]
  below = whole - contest.b[:large, : here.start] @ z_k[: here.start]
  return below[:, None] - vote.cumsum(axis=1), vote


def _small_answers(contest: _Contest, large: int, here: slice, z_k, log_z):
  """Returns `below` and `vote`, each `[V, A]`: one factor below + u vote for the other answers.

  The factor also holds the missing candidates.  To first order in b_g, with f candidates in all:
  vote = sum_g Z^(f-m_g) b_g(k) z^k and below = Z^f - sum_{j>=k} vote(j).
  """
  size, alike = contest.size[large:], contest.alike[large:]
  free = contest.missing + int(size @ alike)
  without = alike[:, None] * np.exp((free - size[:, None]) * log_z)
  vote = (contest.b[large:, : here.stop].T @ without) * z_k[: here.stop]
  below = np.exp(free * log_z) - vote.cumsum(axis=0)
  return below[here.start :], vote[here.start :]


def _product(x, power):
  """Returns prod_g x_g^power_g, by repeated squaring."""
  odd = power % 2 == 1
  result = np.multiply.reduce(x if odd.all() else x[odd], axis=0)
  more = power > 1
  return result * _product(x[more] ** 2, power[more] // 2) if more.any() else result


def _quadrature(wins, tied, factors: int, tolerance):
  """Returns Gauss-Legendre nodes and weights `[U, 1, 1]` for int_0^1 du of a product of `factors`.

  U nodes integrate degree 2U - 1 exactly; fewer nodes suffice where an error bound says so.  With
  s = tied the product falls at least as fast as exp(-s (1-u)), so the integral starts at 1-h.  In
  the complex plane it grows no faster than exp(s (u-1)), and the best ellipse in the error bound of
  the quadrature gives, with x = 4 U / (s h),

    log error = s h (sqrt(1 + x^2) - 1) / 2 - 2 U asinh(x).

  The product and the error are largest at angle 0.
  """
  exact = factors // 2 + 1
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


_legendre = functools.cache(np.polynomial.legendre.leggauss)


def _gauss(nodes: int, h: float):
  """Returns Gauss-Legendre nodes and weights `[U, 1, 1]` on [1-h, 1]."""
  x, weight = _legendre(nodes)
  return (1 - h / 2 * (1 - x))[:, None, None], (h / 2 * weight)[:, None, None]
