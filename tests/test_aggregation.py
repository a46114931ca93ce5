"""The aggregator against brute force: every subset counted, in rational arithmetic."""

import doctest
from fractions import Fraction
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ALL_N, generated, mean, pools, slow_best_of_n, subsets

from prm_jax import aggregation as agg


@settings(max_examples=150, deadline=None)
@given(pools())
def test_expectations_equal_all_subsets(pool):
  """best_of_n, pass_at_n and all_correct_at_n are exact means over all draws.

  Ties share the pick, missing candidates are drawn and never right, and sizes differ.
  """
  size, scores, correct, valid, _ = pool
  right, options = correct & valid, {"n": ALL_N, "sizes": [size]}
  best = [float(slow_best_of_n(size, scores, correct, valid, n)) for n in ALL_N]
  any_right = [float(mean(any(right[i] for i in s) for s in subsets(size, n))) for n in ALL_N]
  all_right = [float(mean(all(right[i] for i in s) for s in subsets(size, n))) for n in ALL_N]
  candidates = correct[None], valid[None]
  # A few float32 roundings of values <= 1.
  np.testing.assert_allclose(agg.best_of_n(scores[None], *candidates, **options), [best], atol=1e-6)
  np.testing.assert_allclose(agg.pass_at_n(*candidates, **options), [any_right], atol=1e-6)
  np.testing.assert_allclose(agg.all_correct_at_n(*candidates, **options), [all_right], atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=5, max_size=5), st.booleans())
def test_any_floats_are_ordered(scores, traced):
  """Any float32 scores are ranked rightly, or give NaN: never a wrong order."""
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


def test_bfloat16_ties_at_1860():
  """Massive ties: at the paper's M with bfloat16 scores, the error is below 1e-6."""
  scores, correct, valid, _ = generated(4, 1860)
  scores = np.asarray(jnp.asarray(scores, jnp.bfloat16).astype(jnp.float32))
  assert len(np.unique(scores[0])) < 1000
  n = [1, 2, 10, 100, 1000, 1859, 1860]
  expected = float64_best_of_n(scores, correct, valid, n)
  got = agg.best_of_n(scores, correct, valid, n)
  np.testing.assert_allclose(got, expected, atol=1e-6)
  with jax.enable_x64(True):
    got = agg.best_of_n(scores, correct, valid, n)
    np.testing.assert_allclose(got, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("m", [100_000, 1_000_000])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_large_pools(m, kind):
  """At M = 1e5 and 1e6, tied or not, float32 stays within 1e-6 of float64."""
  scores, correct, valid, _ = generated(2, m)
  scores = np.asarray(jnp.asarray(jax.nn.sigmoid(scores), kind).astype(jnp.float32))
  n = [1, 3, 100, 10_000, m // 2, m]
  got = agg.best_of_n(scores, correct, valid, n)
  expected = float64_best_of_n(scores, correct, valid, n)
  np.testing.assert_allclose(got, expected, atol=1e-6, rtol=0)
  jitted = jax.jit(lambda *x: agg.best_of_n(*x, n))(scores[:1], correct[:1], valid[:1])
  np.testing.assert_allclose(jitted, expected[:1], atol=1e-6, rtol=0)


def test_every_n_of_a_large_pool():
  """n=None at M = 5,000 returns every N, within 1e-6 of the exact values."""
  scores, correct, valid, _ = generated(3, 5000)
  n = [1, 2, 17, 500, 2500, 4999, 5000]
  expected = float64_best_of_n(scores, correct, valid, n)
  every = agg.best_of_n(scores, correct, valid)
  np.testing.assert_allclose(every[:, np.array(n) - 1], expected, atol=1e-6, rtol=0)
  c = (correct & valid).sum(axis=1)
  for k, some in zip(n, agg.pass_at_n(correct, valid)[:, np.array(n) - 1].T):
    exact = [float(1 - Fraction(comb(5000 - int(i), k), comb(5000, k))) for i in c]
    np.testing.assert_allclose(some, exact, atol=1e-6, rtol=0)


def test_blocks_of_problems():
  """Ranking in blocks gives each problem what it gives alone."""
  scores, correct, valid, _ = generated(700, 1000)  # three blocks of sorting, the last overlapping
  scores = scores.round(1)
  sizes = np.random.default_rng(0).choice([600, 900, 1000], 700)
  whole = agg.best_of_n(scores, correct, valid, [1, 7, 300], sizes=sizes)
  for p in (0, 233, 234, 466, 699):
    one = slice(p, p + 1)
    alone = agg.best_of_n(scores[one], correct[one], valid[one], [1, 7, 300], sizes=sizes[one])
    np.testing.assert_allclose(whole[one], alone, atol=1e-6)


# The tests below share these shapes, so that each function compiles once for most of them.
N = (1, 4, 12, 16)


def test_order_of_candidates_and_of_n_does_not_matter():
  """Permuting the candidates, or the values of N, permutes the columns and nothing else."""
  scores, correct, valid, _ = generated(4, 16)
  scores = scores.round(1)
  order = np.random.default_rng(1).permutation(16)
  shuffled_n, columns = (12, 1, 16, 4), [2, 0, 3, 1]
  a = agg.best_of_n(scores, correct, valid, shuffled_n)
  b = agg.best_of_n(scores[:, order], correct[:, order], valid[:, order], N)
  np.testing.assert_allclose(a, b[:, columns], atol=1e-6)


def test_equal_scores_are_a_random_pick():
  """If all scores are equal, best-of-N is the mean correctness at every N."""
  _, correct, _, _ = generated(4, 16)
  constant = np.full(correct.shape, 0.1, np.float32)
  got = agg.best_of_n(constant, correct, n=N)
  np.testing.assert_allclose(got, np.repeat(correct.mean(1)[:, None], 4, 1), atol=1e-6)


def test_sizes_are_not_missing_candidates():
  """A problem with fewer candidates equals that problem alone; marking slots missing differs."""
  scores, correct, valid, _ = generated(4, 16)
  sizes = np.array([12, 16, 16, 16])
  alone = agg.best_of_n(scores[:1, :12], correct[:1, :12], valid[:1, :12], N[:3])
  ragged = agg.best_of_n(scores, correct, valid, N, sizes=sizes)
  np.testing.assert_allclose(ragged[:1, :3], alone, atol=1e-6)
  np.testing.assert_allclose(ragged[1:], agg.best_of_n(scores, correct, valid, N)[1:], atol=1e-6)
  exists = np.arange(16) < sizes[:, None]
  assert agg.best_of_n(scores, correct, valid & exists, N)[0, 0] < alone[0, 0] - 0.01
  # N beyond a problem's size draws all it has.
  assert ragged[0, 3] == ragged[0, 2]


def test_infinite_and_nan_scores():
  """-inf (a product with a zero) ranks above missing; a NaN score makes its problem NaN."""
  scores = np.array([[-np.inf, 5.0, -np.inf], [np.nan, 1.0, 2.0]], np.float32)
  correct = np.array([[1, 0, 0], [1, 1, 1]], bool)
  valid = np.array([[1, 0, 0], [1, 1, 1]], bool)
  got = agg.best_of_n(scores, correct, valid, n=[3])
  assert got[0, 0] == 1
  assert np.isnan(got[1, 0])
  # Infinities of both signs beside numbers of both signs, which float keys just about hold.
  scores = np.array([[np.inf, 3.0, -2.0, -np.inf, 1e-30, 0.0]], np.float32)
  for best in range(6):
    rest = np.ones((1, 6), bool)
    rest[0, np.argsort(-scores[0])[:best]] = False
    right = np.arange(6)[None] == np.argsort(-scores[0])[best]
    assert agg.best_of_n(scores, right, rest, n=[6])[0, 0] == 1


def test_jit_vmap_and_sharding_agree_with_plain_calls():
  """Traced, mapped over a leading axis or sharded over problems: the same numbers."""
  scores, correct, valid, _ = generated(4, 16)
  best = agg.best_of_n(scores, correct, valid, N)
  jitted = jax.jit(lambda *x: agg.best_of_n(*x, N))(scores, correct, valid)
  np.testing.assert_allclose(jitted, best, atol=1e-6)
  halves = [x.reshape(2, 2, 16) for x in (scores, correct, valid)]
  mapped = jax.vmap(lambda *x: agg.best_of_n(*x, N))(*halves)
  np.testing.assert_allclose(mapped.reshape(4, 4), best, atol=1e-6)
  mesh = jax.make_mesh((8,), ("problems",), axis_types=(jax.sharding.AxisType.Auto,))
  over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("problems"))
  many = [np.concatenate([x, x]) for x in (scores.round(1), correct, valid)]
  plain = agg.best_of_n(*many, N)
  sharded = [jax.device_put(x, over) for x in many]
  for call in (agg.best_of_n, jax.jit(agg.best_of_n, static_argnums=3)):
    result = call(*sharded, N)
    np.testing.assert_allclose(result, plain, atol=1e-6)
    assert result.sharding.is_equivalent_to(over, 2)
  mapped = jax.vmap(lambda *x: agg.pass_at_n(*x, N))(*halves[1:])
  np.testing.assert_allclose(mapped.reshape(4, 4), agg.pass_at_n(correct, valid, N), atol=1e-6)


def test_bad_arguments_are_errors_that_show_the_value():
  """Shapes, dtypes and ranges are checked: one case for each kind of error."""
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
  """Each reduction on interleaved solutions, one without steps, one with a zero, and padding."""
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
  for (how, reduction), row in zip(expected.items(), at_once):
    scores = agg.reduce_steps(log_probs, ids, 4, how)
    np.testing.assert_array_equal(row, scores)
    assert np.isnan(scores[1]), how
    for solution, steps in probs.items():
      np.testing.assert_allclose(np.exp(scores[solution]), reduction(steps), rtol=1e-6, err_msg=how)


def test_logits_give_the_log_probabilities_without_their_rounding():
  """Logits keep steps apart whose float32 probabilities all round to 1."""
  logits = np.array([[0.5, -1, 2], [-20, 0, 19], [30, 0, 0]], np.float32)
  exact = np.exp(logits.astype(np.float64))
  for neutral, right in (("positive", exact[:, 1] + exact[:, 2]), ("negative", exact[:, 2])):
    wrong = exact.sum(axis=1) - right if neutral == "negative" else exact[:, 0]
    got = agg.step_log_scores(logits, neutral, logits=True)
    np.testing.assert_allclose(got, -np.log1p(wrong / right), rtol=1e-5)


def test_long_and_tiny_products_do_not_underflow():
  """Mean and soft-min of steps with probabilities like 1e-100 stay finite in log space."""
  log_probs = np.array([-230.0, -231.0, -0.1, -300.0], np.float32)
  ids = np.array([0, 0, 1, 1])
  got = agg.reduce_steps(log_probs, ids, 2, ("mean", "soft_min"))
  mean = np.logaddexp(-230, -231) - np.log(2)
  np.testing.assert_allclose(got[:, 0], [mean, mean], rtol=1e-6)  # equal weights at zero
  weight = np.exp(-np.exp(-0.1) / 0.1)
  np.testing.assert_allclose(got[1, 1], -0.1 + np.log(weight / (1 + weight)), rtol=1e-5)


def test_steps_in_16_bits_are_summed_in_32():
  """300 bfloat16 steps are summed in float32; without any steps every solution is NaN."""
  log_probs = jnp.full(300, -0.01, jnp.bfloat16)
  each = float(log_probs[0])
  got = agg.reduce_steps(log_probs, np.zeros(300, int), 1, list(agg.REDUCTIONS))
  np.testing.assert_allclose(got[:, 0], [300 * each, each, each, each, each], rtol=1e-5)
  assert np.isnan(agg.reduce_steps(np.zeros(0), np.zeros(0, int), 2, agg.REDUCTIONS)).all()


def test_lists_are_arrays():
  """Every estimator takes plain Python lists."""
  scores, right = [[0.3, 0.2, 0.1, 0.4, 0.5]], [[True, False, True, False, False]]
  assert agg.best_of_n(scores, right, n=[5]).tolist() == [[0.0]]
  assert agg.pass_at_n(right, n=[5]).tolist() == [[1.0]]
  assert agg.all_correct_at_n(right, right, n=[5]).tolist() == [[0.0]]
  assert agg.generation_error(scores, right, n=[1]).shape == (1, 1)
  assert agg.majority_vote([[0, 1, 0, 2, 3]], right, n=[5])[0].tolist() == [[1.0]]


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


def test_the_documentation_is_true():
  """The example in the package's docstring prints what it shows."""
  result = doctest.testmod(agg)
  assert result.attempted > 10
  assert result.failed == 0


@settings(deadline=None)  # the first case compiles
@given(st.permutations([0.1, 0.2, 0.3, 0.55]), st.integers(1, 3))
def test_sums_in_any_order_tie(order, scale):
  """The same probabilities in another order give the same score, and other ones another."""
  with jax.enable_x64(True):
    parts = np.array([[0.1, 0.2, 0.3, 0.55], order, [0.1, 0.2, 0.3, 0.55 + 1e-9 * scale]])
    steps = np.log(parts.ravel())
    made = agg.reduce_steps(steps, np.repeat(np.arange(3), 4), 3, ("product", "mean"))
    for scores in made:
      first, second, other = agg.join_ties(scores[None])[0]
      assert first == second < other


def test_ties_are_joined_from_neighbour_to_neighbour():
  """Under jit as on the host; infinities and NaN stay, and the tolerance grows with the score."""
  with jax.enable_x64(True):
    scores = np.array(
      [
        [-np.inf, 0.0, 5e-13, 1e-12, 1.0, np.nan, np.inf, -np.inf],
        [1e6, 1e6 + 1e-7, 3, 2, 1, 1, 0, 9],
      ]
    )
    joined = agg.join_ties(scores)
    expected = scores.copy()
    expected[0, 1:4], expected[1, 1] = 0, 1e6
    np.testing.assert_array_equal(joined, expected)
    np.testing.assert_array_equal(jax.jit(agg.join_ties)(scores), expected)
    np.testing.assert_array_equal(agg.join_ties(scores, tolerance=0), scores)
