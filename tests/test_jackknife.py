"""The jackknife error of generation: equal to its definition, and to the spread of new pools."""

import jax
import numpy as np
from hypothesis import given, settings
from oracles import M, generated, pools, slow_best_of_n

from prm_jax import aggregation as agg


def slow_jackknife(size, scores, correct, valid, n):
  """The error from all subsets of the pools that lack one of the candidates."""
  keep = [np.delete(np.arange(size), i) for i in range(size)]
  left = [
    float(slow_best_of_n(size - 1, scores[i], correct[i], valid[i], n) if size > 1 else 0)
    for i in keep
  ]
  whole = float(slow_best_of_n(size, scores, correct, valid, n))
  return np.sqrt((size - 1) / size * np.square(np.array(left) - whole).sum())


@settings(max_examples=60, deadline=None)
@given(pools())
def test_the_error_equals_deleting_each_candidate(pool):
  """The error equals that of deleting each candidate in turn, with ties and missing candidates.

  Each candidate is there twice: so N = 2 is at most a fifth of the pool, and all scores tie.
  """
  half, *arrays, _ = pool
  size = 2 * half
  scores, correct, valid = (
    np.concatenate([x[:half], x[:half], np.zeros(2 * (M - half), x.dtype)]) for x in arrays
  )
  lists = [x[None].tolist() for x in (scores, correct, valid)]
  got = agg.generation_error(*lists, n=[2], sizes=[size])[0]
  if size < 10:
    assert np.isnan(got)
  else:
    expected = slow_jackknife(size, scores, correct, valid, 2)
    np.testing.assert_allclose(got, [expected], atol=1e-6)


def test_the_error_is_right_at_several_n_and_sizes():
  """At N = 2 and 3 of 15 or 12, the error is right with ties and without, and under jit.

  It is NaN where N is over a fifth of a pool, and for a problem with a NaN score.
  """
  scores, correct, valid, _ = generated(5, 15)
  scores[2:4] = scores[2:4].round()
  scores[4, 0], valid[4, 0] = np.nan, True
  sizes, some = [15, 12, 15, 12, 15], [3, 2, 8]
  got = agg.generation_error(scores, correct, valid, some, sizes=sizes)
  expected = np.full((5, 3), np.nan)
  for p, size in enumerate(sizes[:4]):
    for k, n in enumerate(some):
      if 5 * n <= size:
        expected[p, k] = slow_jackknife(size, scores[p], correct[p], valid[p], n)
  np.testing.assert_allclose(got, expected, atol=1e-6)
  jitted = jax.jit(lambda *x: agg.generation_error(*x, some, sizes=sizes))
  np.testing.assert_allclose(jitted(scores, correct, valid), got, rtol=1e-5)


def test_the_error_of_a_million_candidates():
  """Ties of hundreds of thousands lose no precision: the error falls as 1 / sqrt(M)."""
  scores, correct = np.float32([[0, 1, 1, 2, 2]]), np.array([[0, 0, 1, 0, 1]], bool)
  tiled = ([np.tile(x, m // 5) for x in (scores, correct)] for m in (10_000, 1_000_000))
  small, large = (agg.generation_error(*pool, n=[2]) for pool in tiled)
  np.testing.assert_allclose(small, 10 * large, rtol=1e-3)


def test_the_error_is_the_spread_over_regenerated_pools():
  """The error is the spread of best-of-N over regenerated pools, ties included."""
  m, n, count = 200, [5, 20, 40], 400
  scores, correct, valid, _ = generated(count, m, seed=3)
  scores = scores.round(1)
  spread = np.asarray(agg.best_of_n(scores, correct, valid, n)).std(axis=0, ddof=1)
  error = np.sqrt(np.square(agg.generation_error(scores, correct, valid, n)).mean(axis=0))
  # 400 pools leave 3.5 % of noise in a spread; the jackknife itself is 5 to 10 % large at M/5.
  np.testing.assert_allclose(error / spread, 1, atol=0.15)
