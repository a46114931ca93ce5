"""The generation-noise jackknife against its definition, and against pools made again."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from oracles import generated, pools, slow_best_of_n

from prm_jax import aggregation as agg


def slow_jackknife(size, scores, correct, valid, n):
  """Delete each candidate in turn and count all subsets of the rest."""
  keep = [np.delete(np.arange(size), i) for i in range(size)]
  left = [
    float(slow_best_of_n(size - 1, scores[i], correct[i], valid[i], n) if size > 1 else 0)
    for i in keep
  ]
  whole = float(slow_best_of_n(size, scores, correct, valid, n))
  return np.sqrt((size - 1) / size * np.square(np.array(left) - whole).sum())


@settings(max_examples=60, deadline=None)
@given(pools())
def test_closed_form_equals_deleting_each_candidate(pool):
  """The error equals that of deleting each candidate in turn, with ties and missing ones."""
  size, scores, correct, valid, _ = pool
  got = agg.generation_error(scores[None], correct[None], valid[None], n=[1], sizes=[size])[0]
  if size < 5:
    assert np.isnan(got)
  else:
    expected = slow_jackknife(size, scores, correct, valid, 1)
    np.testing.assert_allclose(got, [expected], atol=1e-6)


@pytest.mark.parametrize("ties", [False, True])
def test_several_n(ties):
  """The same at N = 2 and 3 of 15, with different sizes; NaN beyond a fifth of a pool."""
  scores, correct, valid, _ = generated(3, 15)
  scores = scores.round() if ties else scores
  sizes = [15, 12, 15]
  got = agg.generation_error(scores, correct, valid, n=[3, 2, 8], sizes=sizes)
  for p, size in enumerate(sizes):
    for k, n in enumerate([3, 2, 8]):
      if 5 * n > size:
        assert np.isnan(got[p, k])
      else:
        expected = slow_jackknife(size, scores[p], correct[p], valid[p], n)
        np.testing.assert_allclose(got[p, k], expected, atol=1e-6)


def test_it_is_the_spread_over_regenerated_pools():
  """The error is the spread of best-of-N over regenerated pools, ties included."""
  m, n, pools_made = 200, [5, 20, 40], 400
  scores, correct, valid, _ = generated(pools_made, m, seed=3)
  scores = scores.round(1)
  spread = np.asarray(agg.best_of_n(scores, correct, valid, n)).std(axis=0, ddof=1)
  error = np.sqrt(np.square(agg.generation_error(scores, correct, valid, n)).mean(axis=0))
  # 400 pools leave 3.5 % of noise in a spread; the jackknife itself is 5 to 10 % large at M/5.
  np.testing.assert_allclose(error / spread, 1, atol=0.15)


def test_undefined_scores_and_tracing():
  """A NaN score makes its problem NaN; under jit the numbers are the same."""
  scores, correct, valid, _ = generated(3, 20)
  valid[1, 0] = True
  scores[1, 0] = np.nan
  plain = agg.generation_error(scores, correct, valid, [1, 4])
  assert np.isnan(plain[1]).all()
  assert np.isfinite(plain[::2]).all()
  jitted = jax.jit(lambda *x: agg.generation_error(*x, [1, 4]))(scores, correct, valid)
  np.testing.assert_allclose(jitted, plain, rtol=1e-5)
