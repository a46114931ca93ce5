"""Best-of-N, pass@N and scores of solutions: equal to brute force, in rational arithmetic."""

import doctest
import sys
from fractions import Fraction
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles import SHUFFLED_N, generated, mean, pools, slow_best_of_n, subsets

from prm_jax import aggregation as agg


@settings(max_examples=150, deadline=None)
@given(pools())
def test_estimates_equal_the_mean_over_all_subsets(pool):
  """Best-of-N, pass@N and all-correct are exact means over all draws, for N in any order.

  Tied candidates share the pick, missing ones are drawn and never right, sizes differ, and the
  arguments may be plain lists.
  """
  size, scores, correct, valid, _ = pool
  right, options = correct & valid, {"n": SHUFFLED_N, "sizes": [size]}
  best = [float(slow_best_of_n(size, scores, correct, valid, n)) for n in SHUFFLED_N]
  draws = [[right[list(s)] for s in subsets(size, n)] for n in SHUFFLED_N]
  any_right = [float(mean(Fraction(int(drawn.any())) for drawn in each)) for each in draws]
  all_right = [float(mean(Fraction(int(drawn.all())) for drawn in each)) for each in draws]
  scores, *candidates = (x[None].tolist() for x in (scores, correct, valid))
  # A few float32 roundings of values <= 1.
  np.testing.assert_allclose(agg.best_of_n(scores, *candidates, **options), [best], atol=1e-6)
  np.testing.assert_allclose(agg.pass_at_n(*candidates, **options), [any_right], atol=1e-6)
  np.testing.assert_allclose(agg.all_correct_at_n(*candidates, **options), [all_right], atol=1e-6)


@settings(max_examples=100, deadline=None)
@example([3.0, -2.0, 1e-30, 0.0, 0.0], False)  # nearly as far apart as sort keys hold
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=5, max_size=5), st.booleans())
def test_no_float32_scores_are_ranked_in_a_wrong_order(scores, traced):
  """Any float32 scores are ranked as numbers, or give NaN if sort keys cannot hold them."""
  scores = np.array([scores + [scores[0], np.inf, -np.inf]], np.float32)
  scores[np.abs(scores) < np.finfo(np.float32).tiny] = 0  # as XLA takes them
  call = jax.jit(agg.best_of_n, static_argnames="n") if traced else agg.best_of_n
  for right in range(8):
    correct = np.arange(8)[None] == right
    got = call(scores, correct, n=(1, 3, 8))[0]
    if np.isnan(got).any():  # as both signs span over 254 powers of two
      finite = np.abs(scores[np.isfinite(scores) & (scores != 0)])
      assert np.log2(finite.max()) - np.log2(finite.min()) > 120
    else:
      valid = np.ones(8, bool)
      expected = [float(slow_best_of_n(8, scores[0], correct[0], valid, n)) for n in (1, 3, 8)]
      np.testing.assert_allclose(got, expected, atol=1e-6)


def float64_best_of_n(scores, correct, valid, n):
  """Best-of-N by float64 weights and group means, one problem at a time."""
  m = scores.shape[1]
  if m < 2000:
    weights = [[Fraction(comb(m - 1 - d, k - 1), comb(m, k)) for d in range(m)] for k in n]
  else:  # the chance that the best of N lies at depth d or below, in logarithms
    d = np.arange(m - 1)
    weights = []
    for k in n:
      with np.errstate(divide="ignore"):
        ratios = np.log(np.maximum(m - d - k, 0) / (m - 1 - d))
      weights.append(np.exp(np.log(k / m) + np.concatenate([[0], np.cumsum(ratios)])))
  weights = np.array(weights, float)
  result = []
  for s, c, v in zip(scores, correct, valid):
    _, group = np.unique(-s[v], return_inverse=True)
    share = np.bincount(group, c[v]) / np.maximum(np.bincount(group), 1)
    result.append(weights[:, : v.sum()] @ share[np.sort(group)])
  return np.array(result)


def test_every_n_of_a_pool_of_1860_with_ties():
  """Every N of the paper's pool is exact to the dtype's precision, though bfloat16 scores tie."""
  scores, correct, valid, _ = generated(3, 1860)
  scores = np.asarray(jnp.asarray(scores, jnp.bfloat16).astype(jnp.float32))
  assert len(np.unique(scores[0])) < 1000
  some = np.array([1, 2, 17, 60, 250, 500, 1000, 1859, 1860])
  expected = float64_best_of_n(scores, correct, valid, some)
  right = [int(c) for c in (correct & valid).sum(axis=1)]
  oracle = [[float(1 - Fraction(comb(1860 - c, k), comb(1860, k))) for k in some] for c in right]
  for x64, tolerance in ((False, 1e-6), (True, 1e-12)):
    with jax.enable_x64(x64):
      best = agg.best_of_n(scores, correct, valid)[:, some - 1]
      np.testing.assert_allclose(best, expected, atol=tolerance, rtol=0)
      any_right = agg.pass_at_n(correct, valid)[:, some - 1]
      np.testing.assert_allclose(any_right, oracle, atol=tolerance, rtol=0)


def test_a_million_candidates():
  """At M = 1e6, float32 stays within 1e-6 of float64, with distinct scores and with ties."""
  m = 1_000_000
  scores, correct, valid, _ = generated(2, m)
  scores = np.array(jax.nn.sigmoid(scores))
  scores[1] = scores[1].astype(jnp.bfloat16)
  n = [1, 3, 100, 10_000, m // 2, m]
  expected = float64_best_of_n(scores, correct, valid, n)
  for call in (agg.best_of_n, jax.jit(agg.best_of_n, static_argnames="n")):
    got = call(scores, correct, valid, n=tuple(n))
    np.testing.assert_allclose(got, expected, atol=1e-6, rtol=0)


def test_problems_do_not_affect_each_other(monkeypatch):
  """Each of many problems of different sizes gets the numbers that it gets alone."""
  monkeypatch.setattr(sys.modules["prm_jax.aggregation.best_of_n"], "BLOCK", 2**18)
  scores, correct, valid, _ = generated(700, 1000)  # three blocks, the last overlapping
  scores = scores.round(1)
  sizes = np.random.default_rng(0).choice([600, 900, 1000], 700)
  whole = agg.best_of_n(scores, correct, valid, [1, 7, 300], sizes=sizes)
  for p in (0, 233, 234, 466, 699):
    one = slice(p, p + 1)
    alone = agg.best_of_n(scores[one], correct[one], valid[one], [1, 7, 300], sizes=sizes[one])
    np.testing.assert_allclose(whole[one], alone, atol=1e-6)


def test_a_nan_score_makes_its_problem_nan():
  """A problem with a valid NaN score is NaN, and a missing candidate's NaN plays no part."""
  scores = np.array([[np.nan, 5, 2], [np.nan, 1, 2]], np.float32)
  valid = np.array([[0, 1, 1], [1, 1, 1]], bool)
  got = agg.best_of_n(scores, scores > 2, valid, n=[3])
  np.testing.assert_array_equal(got, [[1], [np.nan]])


def test_jit_vmap_and_sharding_agree_with_plain_calls():
  """Tracing, mapping over a leading axis and sharding over problems do not change the numbers."""
  n = (1, 4, 12, 16)
  scores, correct, valid, _ = generated(8, 16)
  arrays = scores.round(1), correct, valid
  plain = agg.best_of_n(*arrays, n)
  mesh = jax.make_mesh((8,), ("problems",), axis_types=(jax.sharding.AxisType.Auto,))
  over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("problems"))
  sharded = [jax.device_put(x, over) for x in arrays]
  for call in (agg.best_of_n, jax.jit(agg.best_of_n, static_argnums=3)):
    result = call(*sharded, n)
    np.testing.assert_allclose(result, plain, atol=1e-6)
    assert result.sharding.is_equivalent_to(over, 2)
  halves = [x.reshape(2, 4, 16) for x in arrays]
  mapped = jax.vmap(lambda *x: agg.best_of_n(*x, n))(*halves)
  np.testing.assert_allclose(mapped.reshape(8, 4), plain, atol=1e-6)
  mapped = jax.vmap(lambda *x: agg.pass_at_n(*x, n))(*halves[1:])
  np.testing.assert_allclose(mapped.reshape(8, 4), agg.pass_at_n(*arrays[1:], n), atol=1e-6)


def test_bad_arguments_are_errors_that_show_the_value():
  """Each kind of wrong shape, dtype or value raises an error that shows it."""
  scores, correct, valid, answers = generated(2, 5)
  cases = [
    (r"1\.\.5", lambda: agg.best_of_n(scores, correct, n=[6])),
    (r"\(1, 5\)", lambda: agg.best_of_n(scores, correct, valid[:1])),
    (r"\[P, M\]", lambda: agg.best_of_n(scores[0], correct[0])),
    ("expected floats", lambda: agg.generation_error(answers, correct)),
    ("expected bool", lambda: agg.best_of_n(scores, scores)),
    ("holds -1 to 1", lambda: agg.pass_at_n(np.where(correct, 1, -1))),
    ("sizes", lambda: agg.best_of_n(scores, correct, sizes=[5, 6])),
    (
      "fewer values of n",
      lambda: agg.pass_at_n(np.zeros((3000, 9000), bool), sizes=np.arange(3000) + 6000),
    ),
    ("num_solutions=0", lambda: agg.reduce_steps(scores[0], answers[0], 0)),
    ("temperature=1e-38", lambda: agg.reduce_steps(scores[0], answers[0], 6, temperature=1e-38)),
    ("temperature=0", lambda: agg.reduce_steps(scores[0], answers[0], 6, temperature=0)),
    ("expected integers", lambda: agg.reduce_steps(scores[0], scores[0], 2)),
    ("how='mode'", lambda: agg.reduce_steps(scores[0], answers[0], 2, how="mode")),
    (r"\[T\]", lambda: agg.reduce_steps(scores[0], answers[0, :2], 2)),
    (r"\[\.\.\., 3\]", lambda: agg.step_log_scores(np.ones((4, 2)))),
    ("neutral='maybe'", lambda: agg.step_log_scores(np.ones((4, 3)), neutral="maybe")),
  ]
  for message, call in cases:
    with pytest.raises(ValueError, match=message):
      call()


def test_reductions_over_ragged_steps():
  """Each reduction equals its definition, for interleaved solutions and padding too.

  One solution has no steps, one a step of probability zero.  Without any steps all are NaN.
  """
  probs = {0: [0.5, 0.25, 0.9], 2: [0.0, 0.4], 3: [0.125]}
  flat = [(0, 0.5), (2, 0.0), (-1, 0.3), (0, 0.25), (3, 0.125), (2, 0.4), (9, 0.1), (0, 0.9)]
  ids, values = np.array([i for i, _ in flat]), np.array([p for _, p in flat])
  expected = {
    "product": np.prod,
    "min": np.min,
    "mean": np.mean,
    "last": lambda p: p[-1],
    "soft_min": lambda p: np.average(p, weights=np.exp(-np.array(p) / 0.1)),
  }
  assert tuple(expected) == agg.REDUCTIONS
  with np.errstate(divide="ignore"):
    log_probs = np.log(values.astype(np.float32))
  at_once = agg.reduce_steps(log_probs, ids, 4, agg.REDUCTIONS)
  np.testing.assert_array_equal(agg.reduce_steps(log_probs, ids, 4, "mean"), at_once[2])
  for (how, reduction), scores in zip(expected.items(), at_once):
    assert np.isnan(scores[1]), how
    for solution, steps in probs.items():
      np.testing.assert_allclose(np.exp(scores[solution]), reduction(steps), rtol=1e-6, err_msg=how)
  assert np.isnan(agg.reduce_steps(np.zeros(0), np.zeros(0, int), 2, agg.REDUCTIONS)).all()


@pytest.mark.parametrize(("neutral", "wrong"), [("positive", 1e-9), ("negative", 3e-9)])
def test_rounded_probabilities_keep_the_order_of_nearly_certain_steps(neutral, wrong):
  """P(right) is divided by the sum of the classes: it is at most 1, and P(wrong) keeps its digits.

  The probabilities of a float32 softmax may add up to more than 1, as those of bfloat16 do.
  """
  rounded = np.array([1e-9, 2e-9, 1 + 6e-8])
  with jax.enable_x64(True):
    got = agg.step_log_scores(
      [rounded, rounded * 1.003, [0.2, 0.3, 0.503], [1.0, 0.0, 0.0]], neutral
    )
  half = 0.803 / 1.003 if neutral == "positive" else 0.503 / 1.003
  np.testing.assert_allclose(got, [-wrong, -wrong, np.log(half), -np.inf], rtol=1e-6)
  counts = agg.step_log_scores(np.array([[200, 100, 100], [0, 0, 0]], np.uint8))
  np.testing.assert_allclose(counts, [np.log(0.5), -np.inf], rtol=1e-6)


def test_means_keep_the_order_of_nearly_certain_steps():
  """The float32 means have the precision of P(wrong), and of steps that are far from certain."""
  log_probs, ids = np.float32([-1e-7, -2e-7, -3e-7, -14, np.log(0.9)]), np.array([0, 0, 0, 1, 1])
  got = agg.reduce_steps(log_probs, ids, 2, ("mean", "soft_min"))
  p, weight = np.exp(np.float64(log_probs[3:])), np.exp(-np.exp(np.float64(log_probs[3:])) / 0.1)
  np.testing.assert_allclose(got[:, 0], -2e-7, rtol=1e-4)
  np.testing.assert_allclose(got[:, 1], [np.log(p.mean()), np.log(np.average(p, weights=weight))])


def test_tiny_probabilities_do_not_underflow():
  """Mean and soft-min of steps with probabilities like 1e-100 stay finite in log space."""
  log_probs = np.array([-230.0, -231.0, -0.1, -300.0], np.float32)
  ids = np.array([0, 0, 1, 1])
  got = agg.reduce_steps(log_probs, ids, 2, ("mean", "soft_min"))
  mean = np.logaddexp(-230, -231) - np.log(2)
  np.testing.assert_allclose(got[:, 0], [mean, mean], rtol=1e-6)  # equal weights at zero
  weight = np.exp(-np.exp(-0.1) / 0.1)
  np.testing.assert_allclose(got[1, 1], -0.1 + np.log(weight / (1 + weight)), rtol=1e-5)


def test_narrow_integers_are_numbers_like_others():
  """N and the ids of solutions and answers may have any integer dtype: no count wraps."""
  _, correct, valid, answers = generated(2, 300)
  n = [1, 30, 100]
  ids, steps = np.zeros(300, int), np.full(300, -0.5, np.float32)
  functions = {
    "uint8": [
      lambda dtype: agg.majority_vote(answers, correct, valid, n=np.asarray(n, dtype))[0],
      lambda dtype: agg.generation_error(np.float32(answers), correct, n=np.asarray(n, dtype)),
      lambda dtype: agg.reduce_steps(steps, jnp.asarray(ids, dtype), 300, "mean"),
    ],
    "int8": [
      lambda dtype: agg.majority_vote(
        jnp.asarray(answers, dtype), correct, valid, n=n, num_answers=200
      )[0]
    ],
  }
  for narrow, calls in functions.items():
    for call in calls:
      np.testing.assert_array_equal(call(narrow), call("int32"))


def test_bfloat16_steps_are_summed_in_float32():
  """The product of 300 bfloat16 steps has float32's precision."""
  log_probs = jnp.full(300, -0.01, jnp.bfloat16)
  each = float(log_probs[0])
  got = agg.reduce_steps(log_probs, np.zeros(300, int), 1, ["product", "mean", "soft_min"])
  np.testing.assert_allclose(got[:, 0], [300 * each, each, each], rtol=1e-5)


def test_a_row_of_the_released_samples():
  """The rating_probs of a row that OpenAI released give the row's prm_score.

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


def test_the_documented_example_prints_what_it_shows():
  """The example in the package's docstring prints the output that it shows."""
  result = doctest.testmod(agg)
  assert result.attempted > 10
  assert result.failed == 0


@settings(deadline=None)  # the first case compiles
@given(st.permutations([0.1, 0.2, 0.3, 0.55]), st.integers(1, 3))
def test_the_order_of_steps_does_not_break_ties(order, scale):
  """Solutions with the same probabilities in another order tie; other probabilities do not."""
  with jax.enable_x64(True):
    parts = np.array([[0.1, 0.2, 0.3, 0.55], order, [0.1, 0.2, 0.3, 0.55 + 1e-9 * scale]])
    steps = np.log(parts.ravel())
    reduced = agg.reduce_steps(steps, np.repeat(np.arange(3), 4), 3, ("product", "mean"))
    for scores in reduced:
      first, second, other = agg.join_ties(scores[None])[0]
      assert first == second < other


def test_scores_that_differ_by_rounding_are_joined():
  """A run of scores with gaps of rounding becomes its lowest score, under jit as on the host.

  Infinities and NaN stay, and the tolerance grows with the score.
  """
  with jax.enable_x64(True):
    scores = np.array(
      [
        [-np.inf, 0.0, 5e-13, 1e-12, 1.0, np.nan, np.inf, -np.inf],
        [1e6, 1e6 + 1e-7, 3, 2, 1, 1, 0, 9],
        [-np.inf, np.inf, np.nan, np.inf, -np.inf, -np.inf, np.inf, -np.inf],
      ]
    )
    joined = agg.join_ties(scores)
    expected = scores.copy()
    expected[0, 1:4], expected[1, 1] = 0, 1e6
    np.testing.assert_array_equal(joined, expected)
    np.testing.assert_array_equal(jax.jit(agg.join_ties)(scores), expected)
    np.testing.assert_array_equal(agg.join_ties(scores, tolerance=0), scores)
