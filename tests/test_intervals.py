"""Error bars over problems: they cover a known truth and agree with theory."""

import jax
import numpy as np
import pytest

from prm_jax.aggregation import intervals

# One shape for most of the tests, so that each function compiles once.
PROBLEMS, COLUMNS, RESAMPLES = 100, 20, 512
simultaneous_band = jax.jit(intervals.simultaneous_band, static_argnames=("resamples", "level"))


def curves(experiments, seed=0, noise=0.05):
  """Curves like best-of-N's `[experiments, P, K]`, whose true mean is 0 in every column.

  A problem's difficulty moves a column like its neighbours.
  """
  rng = np.random.default_rng(seed)
  steps = rng.normal(size=(experiments, PROBLEMS, COLUMNS)).cumsum(axis=2)
  return (steps * noise).astype(np.float32)


def test_standard_error_is_that_of_a_mean():
  """The standard error is std / sqrt(P) with ddof 1, and NaN for a single problem."""
  values = curves(1)[0]
  expected = values.std(axis=0, ddof=1) / 10
  np.testing.assert_allclose(intervals.standard_error(values), expected, rtol=1e-5)
  assert np.isnan(intervals.standard_error(values[:1])).all()


def test_bootstrap_agrees_with_theory_and_covers_the_truth():
  """95 % intervals are 1.96 standard errors on either side, and hold the truth 95 % of the time."""
  experiments = np.random.default_rng(1).random((200, 400)).astype(np.float32)
  low, high = intervals.bootstrap(experiments, jax.random.key(0), 1000)
  error = 1.96 * np.asarray(intervals.standard_error(experiments))
  # A quantile of 1000 resamples has a relative error of about 4 %; the mean of 400 has little.
  np.testing.assert_allclose((high - low) / 2 / error, 1, atol=0.2)
  assert np.mean((high - low) / 2 / error) == pytest.approx(1, abs=0.02)
  assert np.mean(((high + low) / 2 - experiments.mean(axis=0)) / error) == pytest.approx(
    0, abs=0.02
  )
  covered = ((low <= 0.5) & (high >= 0.5)).mean()
  assert 0.90 < covered < 0.985  # 400 experiments: a standard deviation is 0.011


def test_bootstrap_of_negated_values_is_negated():
  """Means of any sign are sorted rightly: negated values have the negated interval."""
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


def test_a_nan_makes_the_interval_of_its_column_nan():
  """A NaN makes the interval of its column NaN, and that of no other column."""
  values = curves(1)[0].copy()
  values[3, 5] = np.nan
  low, high = intervals.bootstrap(values, jax.random.key(0), RESAMPLES)
  for bound in (low, high):
    np.testing.assert_array_equal(np.isnan(bound), np.arange(COLUMNS) == 5)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, bool])
def test_paired_differences_share_their_resamples(dtype):
  """Methods that differ by 1 on every problem differ by 1 on every resample, in any dtype."""
  a = np.zeros((PROBLEMS, COLUMNS), dtype)
  b = np.ones_like(a)
  if dtype == np.float32:
    noise = np.random.default_rng(0).random(a.shape).astype(dtype)
    a, b = a + noise, b + noise
  for bound in intervals.paired_bootstrap(a, b, jax.random.key(0), RESAMPLES):
    np.testing.assert_allclose(bound, -1, atol=1e-5)


def test_simultaneous_band_covers_whole_curves():
  """The band holds all of a true curve about 95 % of the time; pointwise intervals do not."""
  experiments = curves(200)
  whole, pointwise = 0, 0
  for values in experiments:
    low, high, _ = simultaneous_band(values, jax.random.key(0), resamples=RESAMPLES)
    whole += bool(((low <= 0) & (high >= 0)).all())
    reach = 1.96 * values.std(axis=0, ddof=1) / 10
    pointwise += bool((np.abs(values.mean(axis=0)) <= reach).all())
  # A standard deviation is 0.015 here; 100 problems and 512 resamples cost about 1 % more.
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
  # The same column twenty times over is one column: 1.96, but for the noise of the resamples.
  same = np.repeat(values[:, :1], COLUMNS, axis=1)
  repeated = simultaneous_band(same, jax.random.key(0), resamples=RESAMPLES)[2]
  assert float(repeated) == pytest.approx(normal, abs=0.2)


def test_constant_columns_do_not_affect_the_band_of_the_others():
  """A column equal for all problems has width 0 and leaves the band of the others as it is."""
  values = curves(1)[0].copy()
  values[:, :5] = 0.1  # not a binary fraction: its mean rounds
  low, high, critical = simultaneous_band(values, jax.random.key(0), resamples=RESAMPLES)
  np.testing.assert_array_equal(low[:5], high[:5])
  np.testing.assert_allclose(low[:5], 0.1, rtol=1e-5)
  values[:, :5] = values[:, 5:6]  # five copies of a column: the other columns alone
  others = simultaneous_band(values, jax.random.key(0), resamples=RESAMPLES)
  assert float(critical) == pytest.approx(float(others[2]), rel=1e-4)
  values[:] = 1
  low, high, critical = simultaneous_band(values, jax.random.key(0), resamples=RESAMPLES)
  assert np.all(low == 1)
  assert np.all(high == 1)
  assert critical == 0
  tiny = np.array([[1e-30], [0]], np.float32)  # float32 squares of these are 0
  low, high, critical = simultaneous_band(tiny, jax.random.key(0), resamples=RESAMPLES)
  np.testing.assert_allclose([low, high], 5e-31, rtol=1e-6)
  assert critical == 0


def test_bad_arguments_are_errors_that_show_the_value():
  """Each kind of wrong shape, count or level raises an error that shows it."""
  values, key = curves(1)[0], jax.random.key(0)
  cases = [
    (r"\(20,\).*\[P, K\]", lambda: intervals.standard_error(values[0])),
    (r"\(0, 20\).*\[P, K\]", lambda: intervals.bootstrap(values[:0], key)),
    ("resamples=0", lambda: intervals.bootstrap(values, key, 0)),
    ("level=95", lambda: intervals.simultaneous_band(values, key, level=95)),
    (r"\(1, 20\).*at least 2", lambda: intervals.simultaneous_band(values[:1], key)),
    ("equal shapes", lambda: intervals.paired_bootstrap(values, values[:, :1], key)),
  ]
  for message, call in cases:
    with pytest.raises(ValueError, match=message):
      call()
