"""The exact majority vote against every subset and integer polynomials."""

import functools
import itertools
import math
from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from oracles import SHUFFLED_N, pools, slow_vote

from prm_jax import aggregation as agg
from prm_jax.aggregation import exact_vote


def vote(answer_ids, correct, valid=None, n=None, **options):
  """The exact expectation `[P, K]`: `majority_vote` without a key, whose error is 0."""
  mean, error = agg.majority_vote(answer_ids, correct, valid, n, **options)
  assert not error.any()
  return mean


def pool_of(counts, missing=0):
  """Answer ids and valid, each `[1, M]`: counts[g] candidates of answer g, then missing ones."""
  ids = np.repeat(np.arange(len(counts) + 1), [*counts, missing])[None]
  return ids, ids < len(counts)


def by_polynomials(counts, c, missing):
  """P(answer c wins) at N = 1..M, in rational arithmetic.

  Given that c has k votes, the ways for the others are the coefficients of prod_g
  (sum_{j<k} C(m_g, j) z^j + y C(m_g, k) z^k), where y counts those that tie.  A polynomial in z is
  one integer, its coefficients `bits` apart.
  """
  others = [count for g, count in enumerate(counts) if g != c]
  m = sum(counts) + missing
  shares = math.lcm(*range(1, len(counts) + 1))
  bits = m + shares.bit_length() + 8
  ways = [0] * (m + 1)
  for k in range(1, counts[c] + 1):
    tied = [(1 + (1 << bits)) ** missing]  # by the number of ties
    for count in others:
      below = sum(math.comb(count, j) << (bits * j) for j in range(min(k, count + 1)))
      at_k = math.comb(count, k) << (bits * k)
      joined = [0, *(x * at_k for x in tied)] if at_k else [0] * len(tied)
      tied = [
        a + b for a, b in itertools.zip_longest((x * below for x in tied), joined, fillvalue=0)
      ]
    total = sum(x * (shares // (t + 1)) for t, x in enumerate(tied))
    for n in range(k, m + 1):
      ways[n] += math.comb(counts[c], k) * (total >> (bits * (n - k)) & ((1 << bits) - 1))
  return [float(Fraction(ways[n], shares * math.comb(m, n))) for n in range(1, m + 1)]


@settings(max_examples=150, deadline=None)
@given(pools())
def test_the_vote_equals_the_mean_over_all_subsets(pool):
  """The exact vote is the mean over all draws, for N in any order and arguments as plain lists.

  Answers tie or are right in part, candidates are missing, sizes differ, and votes for ids from
  `num_answers` on do not count.
  """
  size, _, correct, valid, answers = pool
  lists = [x[None].tolist() for x in (answers, correct, valid)]
  for num_answers in (None, 2):
    got = vote(*lists, n=SHUFFLED_N, sizes=[size], num_answers=num_answers)[0]
    counted = valid & (answers < (num_answers or 3))
    expected = [float(slow_vote(size, answers, correct, counted, n)) for n in SHUFFLED_N]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
  ("counts", "c", "missing"),
  [
    ((30, 30), 0, 0),
    ((61, 59), 1, 0),
    ((150, 150), 0, 0),
    ((100, 80, 20), 1, 0),
    ((75, 75, 75, 75), 3, 0),
    ((59, 1), 0, 0),
    ((59, 1), 1, 0),
    ((50, 50, 40, 40, 1, 1, 1), 2, 10),
    ((30, *[1] * 30), 0, 0),
    ((6,) * 10, 0, 0),
    ((1,) * 60, 0, 3),
    ((120, 60, 10, 5, 3, 1, 1), 1, 40),
    ((9, 8, 7, 6, 5, 4, 3, 2, 1), 2, 155),
    ((5,), 0, 55),
  ],
)
def test_the_vote_equals_integer_polynomials(counts, c, missing):
  """With every approximation in use, each N is right to 1e-9, alone and among other values of N.

  Two answers without anything else tie only at even N: the worst case for leaving out angles.
  """
  ids, valid = pool_of(counts, missing)
  expected = by_polynomials(counts, c, missing)
  together = vote(ids, ids == c, valid)[0]
  np.testing.assert_allclose(together, expected, rtol=0, atol=1e-9)
  some = range(1, ids.size + 1, max(1, ids.size // 15))
  alone = [vote(ids, ids == c, valid, n=[n])[0, 0] for n in some]
  np.testing.assert_allclose(alone, [expected[n - 1] for n in some], rtol=0, atol=1e-9)


def test_the_approximations_are_negligible(monkeypatch):
  """At 1860 candidates, the approximations change no result by more than 1e-9."""
  rng = np.random.default_rng(4)
  rows = [
    rng.choice(g, 1860, p=rng.dirichlet(np.full(g, a))) for g, a in ((2, 9), (4, 9), (45, 0.5))
  ]
  ids = np.stack(rows)
  some = [1, 2, 6, 20, 64, 100, 500, 1500, 1859]
  got = vote(ids, ids == 1, n=some)
  monkeypatch.setattr(exact_vote, "FEW_ANGLES", 10**9)
  monkeypatch.setattr(exact_vote, "NEGLIGIBLE", 1e-15)
  monkeypatch.setattr(exact_vote, "SPAN", 0.0)
  np.testing.assert_allclose(got, vote(ids, ids == 1, n=some), rtol=0, atol=1e-9)


@pytest.mark.parametrize("members", [1, 2, 31])
def test_many_equal_answers_share_evenly(members):
  """3,000 answers of equal size win with the same chance, 1/3000, at every N."""
  ids, valid = pool_of((members,) * 3000)
  some = [1, 2, 50, 300, 1500, 2500, ids.size - 1, ids.size]
  got = vote(ids, ids == 7, valid, n=some)[0]
  np.testing.assert_allclose(got * 3000, 1, rtol=0, atol=1e-6)


def test_a_million_candidates():
  """Two symmetric answers win half of the draws each, whatever the pool's size."""
  ids, valid = pool_of((480_000, 480_000), 40_000)
  some = [1, 2, 1000, 500_000]
  got = vote(ids, ids == 1, valid, n=some)[0]
  no_vote = [0.04, 0.04 * 39_999 / 999_999, 0, 0]
  np.testing.assert_allclose(got, (1 - np.array(no_vote)) / 2, rtol=0, atol=1e-7)


def test_bad_input_is_an_error():
  """A negative id is named, and the error under jit names the arguments that work there."""
  right = np.ones((1, 2), bool)
  cases = [
    ("answer id -1", lambda: vote([[0, -1]], right)),
    ("use key and permutations", lambda: jax.jit(vote)(np.zeros((1, 2), int), right)),
    ("use key and permutations", lambda: jax.jit(functools.partial(vote, [[0, 1]]))(right)),
  ]
  for message, call in cases:
    with pytest.raises(ValueError, match=message):
      call()
