"""The aggregator against brute force: every subset counted, in rational arithmetic."""

import doctest
import subprocess
import sys
from fractions import Fraction
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ALL_N, generated, pools, slow_best_of_n, slow_pass_at_n, slow_vote

from prm_jax import aggregation as agg


@settings(max_examples=150, deadline=None)
@given(pools())
def test_best_of_n_equals_all_subsets(pool):
  """Best-of-N is the exact mean over all draws: ties shared, missing never chosen."""
  size, scores, correct, valid, _ = pool
  got = agg.best_of_n(scores[None], correct[None], valid[None], n=ALL_N, sizes=[size])[0]
  expected = [float(slow_best_of_n(size, scores, correct, valid, n)) for n in ALL_N]
  np.testing.assert_allclose(got, expected, atol=1e-6)  # a few float32 roundings of values <= 1


@settings(max_examples=150, deadline=None)
@given(pools())
def test_pass_at_n_equals_all_subsets(pool):
  """pass@N is the exact chance that a draw holds a right candidate."""
  size, _, correct, valid, _ = pool
  got = agg.pass_at_n(correct[None], valid[None], n=ALL_N, sizes=[size])[0]
  expected = [float(slow_pass_at_n(size, correct, valid, n)) for n in ALL_N]
  np.testing.assert_allclose(got, expected, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(pools(), st.booleans())
def test_vote_equals_all_subsets(pool, weighted):
  """A vote's estimate lies within its own standard error of the truth, and is exact at N = M."""
  size, scores, correct, valid, answers = pool
  weights = np.where(np.isfinite(scores), np.abs(scores), 0) if weighted else None
  got, error = agg.majority_vote(
    answers[None],
    correct[None],
    valid[None],
    n=ALL_N,
    weights=None if weights is None else weights[None],
    sizes=[size],
    key=jax.random.key(size),
    permutations=512,
    num_answers=3,
  )
  expected = np.array([float(slow_vote(size, answers, correct, valid, n, weights)) for n in ALL_N])
  # Five standard errors; 0.02 covers outcomes so rare that no order showed them (p < 0.02 / 512
  # orders leaves e^-10 a chance of that), whose estimated error is then zero.
  assert np.all(np.abs(got[0] - expected) <= 5 * error[0] + 0.02)
  np.testing.assert_allclose(got[0, size - 1 :], expected[size - 1 :], atol=1e-6)
  assert np.all(error[0, size - 1 :] == 0)


def float64_best_of_n(scores, correct, valid, n):
  """Best-of-N by exact integer binomials and float64 group means, one problem at a time."""
  m = scores.shape[1]
  weights = np.array(
    [[Fraction(comb(m - 1 - d, k - 1), comb(m, k)) for d in range(m)] for k in n], float
  )
  result = []
  for s, c, v in zip(scores, correct, valid):
    _, group = np.unique(-s[v], return_inverse=True)
    share = np.bincount(group, c[v]) / np.maximum(np.bincount(group), 1)
    result.append(weights[:, : v.sum()] @ share[np.sort(group)])
  return np.array(result)


def test_bfloat16_ties_at_1860():
  """The paper's M with scores rounded to bfloat16, which tie massively: right to 1e-6."""
  scores, correct, valid, _ = generated(4, 1860)
  scores = np.asarray(jnp.asarray(scores, jnp.bfloat16).astype(jnp.float32))
  assert len(np.unique(scores[0])) < 1000
  n = [1, 2, 10, 100, 1000, 1859, 1860]
  expected = float64_best_of_n(scores, correct, valid, n)
  got = agg.best_of_n(scores, correct, valid, n)
  np.testing.assert_allclose(got, expected, atol=1e-6)
  with jax.enable_x64(True):
    got = agg.best_of_n(scores, correct, valid, n)
    np.testing.assert_allclose(got, expected, atol=1e-12)


# The tests below share these shapes, so that each function compiles once for most of them.
N = (1, 4, 12, 16)
VOTE = {"key": jax.random.key(0), "permutations": 50, "num_answers": 6}


def test_all_n_equals_chosen_n():
  """n=None returns column N-1 for N: the same numbers as asking for each N."""
  scores, correct, valid, answers = generated(4, 16)
  columns = np.array(N) - 1
  every = agg.best_of_n(scores, correct, valid)
  np.testing.assert_allclose(every[:, columns], agg.best_of_n(scores, correct, valid, N), atol=1e-6)
  every = agg.pass_at_n(correct, valid)
  np.testing.assert_allclose(every[:, columns], agg.pass_at_n(correct, valid, N), atol=1e-6)
  every, _ = agg.majority_vote(answers, correct, valid, **VOTE)
  some, _ = agg.majority_vote(answers, correct, valid, N, **VOTE)
  np.testing.assert_allclose(every[:, columns], some, atol=1e-6)


def test_order_of_candidates_and_of_n_does_not_matter():
  """Permuting the candidates of a file, or the values of N, changes nothing but the columns."""
  scores, correct, valid, answers = generated(4, 16)
  scores = scores.round(1)
  order = np.random.default_rng(1).permutation(16)
  shuffled_n, columns = (12, 1, 16, 4), [2, 0, 3, 1]
  a = agg.best_of_n(scores, correct, valid, shuffled_n)
  b = agg.best_of_n(scores[:, order], correct[:, order], valid[:, order], N)
  np.testing.assert_allclose(a, b[:, columns], atol=1e-6)
  a, _ = agg.majority_vote(answers, correct, valid, shuffled_n, **VOTE)
  b, _ = agg.majority_vote(answers, correct, valid, N, **VOTE)
  np.testing.assert_array_equal(a, b[:, columns])


def test_equal_scores_are_a_random_pick_and_equal_weights_a_majority():
  """Scores or weights that say nothing change nothing, whatever their value."""
  _, correct, _, answers = generated(4, 16)
  constant = np.full(correct.shape, 0.1, np.float32)  # a sum of 0.1s depends on its order
  got = agg.best_of_n(constant, correct, n=N)
  np.testing.assert_allclose(got, np.repeat(correct.mean(1)[:, None], 4, 1), atol=1e-6)
  weighted, _ = agg.majority_vote(answers, correct, n=N, weights=constant, **VOTE)
  plain, _ = agg.majority_vote(answers, correct, n=N, **VOTE)
  np.testing.assert_allclose(weighted, plain, atol=1e-6)


def test_sizes_are_not_missing_candidates():
  """A problem with fewer candidates equals that problem alone; marking slots missing differs."""
  scores, correct, valid, answers = generated(4, 16)
  sizes = np.array([12, 16, 16, 16])
  alone = agg.best_of_n(scores[:1, :12], correct[:1, :12], valid[:1, :12], N[:3])
  ragged = agg.best_of_n(scores, correct, valid, N, sizes=sizes)
  np.testing.assert_allclose(ragged[:1, :3], alone, atol=1e-6)
  np.testing.assert_allclose(ragged[1:], agg.best_of_n(scores, correct, valid, N)[1:], atol=1e-6)
  exists = np.arange(16) < sizes[:, None]
  assert agg.best_of_n(scores, correct, valid & exists, N)[0, 0] < alone[0, 0] - 0.01
  # N beyond a problem's size draws all it has.
  assert ragged[0, 3] == ragged[0, 2]
  mean, error = agg.majority_vote(answers, correct, valid, N, sizes=sizes, **VOTE)
  assert mean[0, 2] == mean[0, 3]
  assert error[0, 2] == error[0, 3] == 0


def test_a_single_candidate():
  """With M = 1 every method picks the one there is."""
  scores, right = np.zeros((2, 1)), np.array([[True], [False]])
  assert agg.best_of_n(scores, right).tolist() == [[1], [0]]
  assert agg.pass_at_n(right).tolist() == [[1], [0]]


def test_everything_missing_is_wrong_and_never_an_error():
  """A problem without a valid candidate is never solved, by any method."""
  scores, correct, _, answers = generated(4, 16)
  missing = np.zeros((4, 16), bool)
  assert not agg.best_of_n(scores, correct, missing, N).any()
  assert not agg.pass_at_n(correct, missing, N).any()
  mean, error = agg.majority_vote(answers, correct, missing, N, **VOTE)
  assert not mean.any()
  assert not error.any()


def test_infinite_and_nan_scores():
  """-inf (a product with a zero) is the worst valid score, above missing; NaN is never hidden."""
  scores = np.array([[-np.inf, 5.0, -np.inf], [np.nan, 1.0, 2.0]], np.float32)
  correct = np.array([[1, 0, 0], [1, 1, 1]], bool)
  valid = np.array([[1, 0, 0], [1, 1, 1]], bool)
  got = agg.best_of_n(scores, correct, valid, n=[3])
  assert got[0, 0] == 1
  assert np.isnan(got[1, 0])


def test_jit_and_vmap_agree_with_plain_calls():
  """Everything is traceable: jit, vmap over a leading axis, and both give the same numbers."""
  scores, correct, valid, answers = generated(4, 16)
  best = agg.best_of_n(scores, correct, valid, N)
  jitted = jax.jit(lambda *x: agg.best_of_n(*x, N))(scores, correct, valid)
  np.testing.assert_allclose(jitted, best, atol=1e-6)
  halves = [x.reshape(2, 2, 16) for x in (scores, correct, valid)]
  mapped = jax.vmap(lambda *x: agg.best_of_n(*x, N))(*halves)
  np.testing.assert_allclose(mapped.reshape(4, 4), best, atol=1e-6)
  mapped = jax.vmap(lambda *x: agg.pass_at_n(*x, N))(*halves[1:])
  np.testing.assert_allclose(mapped.reshape(4, 4), agg.pass_at_n(correct, valid, N), atol=1e-6)
  plain = agg.majority_vote(answers, correct, valid, N, **VOTE)
  jitted = jax.jit(lambda *x: agg.majority_vote(*x, N, **VOTE))(answers, correct, valid)
  np.testing.assert_allclose(jitted, plain, atol=1e-6)


def test_bad_arguments_are_errors_that_show_the_value():
  """Shapes, types and ranges are checked where they enter."""
  scores, correct, valid, answers = generated(2, 5)
  vote = {"key": jax.random.key(0), "permutations": 4}
  cases = [
    (r"1\.\.5", lambda: agg.best_of_n(scores, correct, n=[6])),
    (r"1\.\.5", lambda: agg.best_of_n(scores, correct, n=[0])),
    (r"1\.\.5", lambda: agg.pass_at_n(correct, n=[2.0])),
    (r"\(2, 4\)", lambda: agg.best_of_n(scores, correct[:, :4])),
    (r"\(1, 5\)", lambda: agg.best_of_n(scores, correct, valid[:1])),
    (r"\[P, M\]", lambda: agg.best_of_n(scores[0], correct[0])),
    (r"\[P, M\]", lambda: agg.pass_at_n(correct[:, :0])),
    ("expected bool", lambda: agg.best_of_n(scores, scores)),
    ("sizes", lambda: agg.best_of_n(scores, correct, sizes=[5, 6])),
    ("-1", lambda: agg.majority_vote(answers - 1, correct, **vote)),
    ("not negative", lambda: agg.majority_vote(answers, correct, weights=scores, **vote)),
    ("at least 2", lambda: agg.majority_vote(answers, correct, key=None, permutations=1)),
    ("num_answers", lambda: jax.jit(lambda a: agg.majority_vote(a, correct, **vote))(answers)),
    ("too large a table", lambda: agg.pass_at_n(np.zeros((1, 20_000), bool))),
    ("how='mode'", lambda: agg.reduce_steps(scores[0], answers[0], 2, how="mode")),
    (r"\[T\]", lambda: agg.reduce_steps(scores[0], answers[0, :2], 2)),
    (r"\[\.\.\., 3\]", lambda: agg.step_log_scores(np.ones((4, 2)))),
    ("neutral='maybe'", lambda: agg.step_log_scores(np.ones((4, 3)), neutral="maybe")),
    (r"\[P, K\]", lambda: agg.bootstrap(scores[0], jax.random.key(0))),
  ]
  for message, call in cases:
    with pytest.raises(ValueError, match=message):
      call()


def test_reductions_over_ragged_steps():
  """Each reduction on interleaved solutions, one without steps, one with a zero, and padding."""
  probs = {0: [0.5, 0.25, 0.9], 2: [0.0, 0.4], 3: [0.125]}
  flat = [(0, 0.5), (2, 0.0), (-1, 0.3), (0, 0.25), (3, 0.125), (2, 0.4), (9, 0.1), (0, 0.9)]
  ids, values = np.array([i for i, _ in flat]), np.array([p for _, p in flat])
  expected = {"product": np.prod, "min": np.min, "mean": np.mean, "last": lambda p: p[-1]}
  assert set(expected) == set(agg.REDUCTIONS)
  for how, reduction in expected.items():
    with np.errstate(divide="ignore"):
      scores = agg.reduce_steps(np.log(values.astype(np.float32)), ids, 4, how)
    assert np.isnan(scores[1]), how
    for solution, steps in probs.items():
      np.testing.assert_allclose(np.exp(scores[solution]), reduction(steps), rtol=1e-6, err_msg=how)


def test_a_row_of_the_released_samples():
  """rating_probs of OpenAI's released row give its prm_score: exactly in float64, 1e-6 in float32.

  The product of P(1) + P(0) is the paper's solution score (section 2.6).
  """
  rating_probs = [  # in the order -1, 0, 1
    [0.593068042770836, 0.01925049232449113, 0.387681464904673],
    [0.05710269249567796, 0.0327972565325028, 0.9101000509718192],
    [0.04241488752473914, 0.028413614709511318, 0.9291714977657496],
    [0.7507610598005641, 0.11073959768554346, 0.1384993425138924],
  ]
  ids = np.zeros(4, int)
  for x64, tolerance in ((False, 1e-6), (True, 1e-12)):
    with jax.enable_x64(x64):
      score = agg.reduce_steps(agg.step_log_scores(np.array(rating_probs)), ids, 1)
      assert np.exp(float(score[0])) == pytest.approx(0.09157553704097245, rel=tolerance)
      strict = agg.reduce_steps(agg.step_log_scores(np.array(rating_probs), "negative"), ids, 1)
      product = np.prod([p[2] for p in rating_probs])
      assert np.exp(float(strict[0])) == pytest.approx(product, rel=tolerance)


def test_bootstrap_agrees_with_the_analytic_standard_error():
  """For a mean the bootstrap must say what theory says: 1.96 standard errors either side."""
  values = np.random.default_rng(0).random((400, 3)).astype(np.float32)
  low, high = agg.bootstrap(values, jax.random.key(0), 4000)
  expected = 1.96 * values.std(axis=0) / np.sqrt(400)
  # A 2.5 % quantile of 4000 resamples has a relative error of about 2 %; four of those.
  np.testing.assert_allclose((high - low) / 2, expected, rtol=0.08)
  np.testing.assert_allclose((high + low) / 2, values.mean(axis=0), atol=0.08 * expected.max())


def test_bootstrap_covers_the_truth():
  """95 % intervals of repeated experiments hold the true mean about 95 % of the time."""
  experiments = np.random.default_rng(1).random((200, 400)).astype(np.float32)
  low, high = agg.bootstrap(experiments, jax.random.key(0), 1000)
  covered = ((low <= 0.5) & (high >= 0.5)).mean()
  assert 0.90 < covered < 0.985  # 400 experiments: a standard deviation is 0.011


def test_paired_differences_share_their_resamples():
  """Methods that differ by a constant differ by exactly that on every resample."""
  a = np.random.default_rng(0).random((50, 2)).astype(np.float32)
  difference, low, high = agg.paired_bootstrap(a, a - 0.25, jax.random.key(0), 500)
  for bound in (difference, low, high):
    np.testing.assert_allclose(bound, 0.25, atol=1e-5)
  with pytest.raises(ValueError, match="equal shapes"):
    agg.paired_bootstrap(a, a[:, :1], jax.random.key(0))


def test_the_documentation_is_true():
  """The example in the package's docstring runs and prints what it says."""
  result = doctest.testmod(agg)
  assert result.attempted > 10
  assert result.failed == 0


def test_import_is_light():
  """The aggregator installs nothing but JAX on whoever trains elsewhere."""
  code = (
    "import sys, prm_jax.aggregation\n"
    "heavy = {'flax', 'orbax', 'grain', 'tensorflow', 'tensorflow_datasets', 'matplotlib'}\n"
    "found = heavy & {name.split('.')[0] for name in sys.modules}\n"
    "assert not found, found"
  )
  subprocess.run([sys.executable, "-c", code], check=True)
