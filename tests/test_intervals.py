"""Error bars over problems: coverage against a known truth, and agreement with theory."""

import jax
import numpy as np
import pytest

from prm_jax.aggregation import intervals

# One shape for most of the tests, so that each function compiles once.
PROBLEMS, COLUMNS, RESAMPLES = 100, 20, 1000
simultaneous_band = jax.jit(intervals.simultaneous_band, static_argnames=("resamples", "level"))


def curves(experiments, seed=0, noise=0.05):
  """Curves like best-of-N's: a problem's difficulty moves a column like its neighbours.

  The true mean of every column is 0.
  """
  rng = np.random.default_rng(seed)
  steps = rng.normal(size=(experiments, PROBLEMS, COLUMNS)).cumsum(axis=2)
  return (steps * noise).astype(np.float32)


def test_standard_error_is_that_of_a_mean():
  """The analytic error is std / sqrt(P) with ddof 1, and NaN for a single problem."""
  values = curves(1)[0]
  expected = values.std(axis=0, ddof=1) / 10
  np.testing.assert_allclose(intervals.standard_error(values), expected, rtol=1e-5)
  assert np.isnan(intervals.standard_error(values[:1])).all()


def test_bootstrap_agrees_with_the_analytic_standard_error():
  """The bootstrap interval of a mean is 1.96 analytic standard errors on either side."""
  values = np.random.default_rng(0).random((400, 3)).astype(np.float32)
  low, high = intervals.bootstrap(values, jax.random.key(0), 4000)
  expected = 1.96 * np.asarray(intervals.standard_error(values))
  # A 2.5 % quantile of 4000 resamples has a relative error of about 2 %; four of those.
  np.testing.assert_allclose((high - low) / 2, expected, rtol=0.08)
  np.testing.assert_allclose((high + low) / 2, values.mean(axis=0), atol=0.08 * expected.max())


def test_bootstrap_covers_the_truth():
  """95 % intervals of repeated experiments hold the true mean about 95 % of the time."""
  experiments = np.random.default_rng(1).random((200, 400)).astype(np.float32)
  low, high = intervals.bootstrap(experiments, jax.random.key(0), 1000)
  covered = ((low <= 0.5) & (high >= 0.5)).mean()
  assert 0.90 < covered < 0.985  # 400 experiments: a standard deviation is 0.011


def test_bootstrap_of_negated_values_is_negated():
  """Sorting is right for negative, zero and mixed means, in both precisions."""
  for x64 in (False, True):
    with jax.enable_x64(x64):
      values = np.random.default_rng(0).normal(size=(PROBLEMS, COLUMNS)) * 10.0 ** np.arange(
        COLUMNS
      )
      values[:, 0] = 0
      low, high = intervals.bootstrap(values, jax.random.key(0), RESAMPLES)
      assert np.all(low <= high)
      negated = intervals.bootstrap(-values, jax.random.key(0), RESAMPLES)
      np.testing.assert_allclose(negated, (-high, -low), rtol=1e-5)


def test_a_nan_problem_is_not_hidden():
  """A NaN makes the interval of its column NaN, and of no other."""
  values = curves(1)[0].copy()
  values[3, 5] = np.nan
  low, high = intervals.bootstrap(values, jax.random.key(0), RESAMPLES)
  for bound in (low, high):
    np.testing.assert_array_equal(np.isnan(bound), np.arange(COLUMNS) == 5)


def test_paired_differences_share_their_resamples():
  """Methods that differ by a constant differ by exactly that on every resample."""
  a = np.random.default_rng(0).random((50, 2)).astype(np.float32)
  difference, low, high = intervals.paired_bootstrap(a, a - 0.25, jax.random.key(0), 500)
  for bound in (difference, low, high):
    np.testing.assert_allclose(bound, 0.25, atol=1e-5)
  with pytest.raises(ValueError, match="equal shapes"):
    intervals.paired_bootstrap(a, a[:, :1], jax.random.key(0))


def test_simultaneous_band_covers_whole_curves():
  """The band holds all of a true curve about 95 % of the time; pointwise intervals do not."""
  experiments = curves(200)
  whole, pointwise = 0, 0
  for values in experiments:
    low, high, _ = simultaneous_band(values, jax.random.key(0), resamples=RESAMPLES)
    whole += bool(((low <= 0) & (high >= 0)).all())
    reach = 1.96 * values.std(axis=0, ddof=1) / 10
    pointwise += bool((np.abs(values.mean(axis=0)) <= reach).all())
  # A standard deviation is 0.015 here; 100 problems and 1000 resamples cost about 1 % more.
  assert 0.90 <= whole / 200 <= 0.99
  assert pointwise / 200 < 0.90


def test_critical_value_lies_between_one_column_and_bonferroni():
  """The critical value lies between 1.96 and Bonferroni's; the band holds the interval."""
  normal = 1.96
  bonferroni = 3.02  # of 20 columns: the 1 - 0.025 / 20 quantile of the normal distribution
  values = curves(1)[0]
  low, high, critical = simultaneous_band(values, jax.random.key(0), resamples=RESAMPLES)
  assert normal + 0.1 < critical < bonferroni - 0.1
  inner_low, inner_high = intervals.bootstrap(values, jax.random.key(0), RESAMPLES)
  assert np.all(low < inner_low)
  assert np.all(high > inner_high)
  one = values[:, :1]
  # One column: 1.96 but for the noise of 10,000 resamples (0.03) and 100 problems (0.02).
  assert float(simultaneous_band(one, jax.random.key(0))[2]) == pytest.approx(normal, abs=0.1)
  # The same column twenty times over is still one.
  same = np.repeat(one, COLUMNS, axis=1)
  repeated = simultaneous_band(same, jax.random.key(0), resamples=RESAMPLES)[2]
  assert float(repeated) == pytest.approx(normal, abs=0.2)


def test_constant_columns_have_no_width_and_no_say():
  """A column equal for all problems has width 0 and leaves the band of the others as it is."""
  values = curves(1)[0].copy()
  values[:, :5] = 0.1  # not a binary fraction: its mean rounds
  low, high, critical = simultaneous_band(values, jax.random.key(0), resamples=RESAMPLES)
  np.testing.assert_array_equal(low[:5], high[:5])
  np.testing.assert_allclose(low[:5], 0.1, rtol=1e-5)
  others = intervals.simultaneous_band(values[:, 5:], jax.random.key(0), RESAMPLES)
  assert float(critical) == pytest.approx(float(others[2]), rel=1e-4)
  values[:] = 1
  low, high, critical = simultaneous_band(values, jax.random.key(0), resamples=RESAMPLES)
  assert np.all(low == 1)
  assert np.all(high == 1)
  assert critical == 0


def test_bad_arguments_are_errors_that_show_the_value():
  """Shapes, counts and levels are checked where they enter."""
  values, key = curves(1)[0], jax.random.key(0)
  cases = [
    (r"\(20,\).*\[P, K\]", lambda: intervals.standard_error(values[0])),
    (r"\(0, 20\).*\[P, K\]", lambda: intervals.bootstrap(values[:0], key)),
    ("resamples=0", lambda: intervals.bootstrap(values, key, 0)),
    ("level=95", lambda: intervals.simultaneous_band(values, key, level=95)),
    (r"\(1, 20\).*at least 2", lambda: intervals.simultaneous_band(values[:1], key)),
  ]
  for message, call in cases:
    with pytest.raises(ValueError, match=message):
      call()


def test_differences_of_whole_numbers():
  """Differences of unsigned or bool outcomes are -1, 0 and 1."""
  for dtype in (np.uint8, bool):
    a, b = np.array([[1], [0]], dtype), np.array([[1], [1]], dtype)
    difference, low, high = intervals.paired_bootstrap(a, b, jax.random.key(0), 100)
    assert (difference[0], low[0], high[0]) == (-0.5, -1, 0)
