"""Estimated votes: equal to the mean over all subsets, within standard errors that are true."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from oracles import M, generated, pools, slow_vote

from prm_jax.aggregation import voting
from prm_jax.aggregation.voting import majority_vote


def weights_like(scores, seed=0):
  """Weights that grow with the scores, with noise."""
  return np.exp(scores + np.random.default_rng(seed).normal(size=scores.shape)).astype(np.float32)


def assert_honest(difference, variance):
  """Asserts that differences `[P, K]` have mean 0 and this variance, pooled over problems."""
  total = np.asarray(variance).sum(axis=0)
  assert np.all(np.abs(np.asarray(difference).sum(axis=0)) < 4 * np.sqrt(total))
  # 200 squares of about normal differences, of unequal variances: a standard deviation near 0.12.
  ratio = np.square(difference).sum(axis=0) / total
  assert np.all(np.abs(ratio - 1) < 0.45), ratio


@settings(max_examples=60, deadline=None)
@given(pools(), st.sampled_from([None, "sum", "mean"]))
def test_estimates_equal_the_mean_over_all_subsets(pool, combine):
  """An estimated vote lies within its standard error of the truth, and is exact at N = M.

  A missing candidate's weight plays no part.
  """
  size, scores, correct, valid, answers = pool
  weights = given_weights = None
  if combine:
    weights = np.where(np.isfinite(scores), np.abs(scores), 0)
    given_weights = np.where(valid, weights, np.nan)[None]
  all_n = range(1, M + 1)
  got, error = majority_vote(
    answers[None],
    correct[None],
    valid[None],
    n=all_n,
    weights=given_weights,
    combine=combine or "sum",
    sizes=[size],
    key=jax.random.key(size),
    permutations=256,
    num_answers=3,
  )
  pool = (size, answers, correct, valid)
  expected = np.array([float(slow_vote(*pool, n, weights, combine or "sum")) for n in all_n])
  # Five standard errors; 0.04 covers outcomes so rare that no order showed them (p < 0.04 for
  # 256 orders leaves e^-10 a chance of that), whose estimated error is then zero.
  assert np.all(np.abs(got[0] - expected) <= 5 * error[0] + 0.04)
  np.testing.assert_allclose(got[0, size - 1 :], expected[size - 1 :], atol=1e-6)
  assert np.all(error[0, size - 1 :] == 0)


@pytest.mark.parametrize("ragged", [False, True])
def test_blocks_are_unbiased_and_their_errors_honest(ragged):
  """Over many problems, estimate - exact has mean 0 and the variance that the errors claim.

  The values of N share blocks or leave an incomplete block, and problems of different sizes have
  different numbers of blocks.
  """
  problems, n = 200, (1, 2, 3, 5, 10, 20, 25)
  _, correct, valid, answers = generated(problems, 40, seed=3)
  sizes = np.random.default_rng(0).integers(26, 41, problems) if ragged else None
  exact, _ = majority_vote(answers, correct, valid, n, sizes=sizes)
  got, error = majority_vote(
    answers, correct, valid, n, sizes=sizes, key=jax.random.key(1), permutations=100
  )
  assert_honest(got - exact, np.square(error))


def test_disjoint_blocks_beat_single_draws():
  """At small N, one random order counts as many draws, so the error is far below one draw's."""
  _, correct, valid, answers = generated(20, 64)
  estimate, error = majority_vote(
    answers, correct, valid, (2,), key=jax.random.key(0), permutations=100, num_answers=6
  )
  single = np.sqrt(estimate * (1 - estimate) / 100)
  # 32 blocks: the error of independent draws would be 0.18 of a single one's.
  assert np.sqrt(np.square(error).mean()) < 0.25 * np.sqrt(np.square(single).mean())


def test_control_is_unbiased_and_sharpens():
  """With the exact plain vote as control, a weighted vote is unbiased and has a smaller error.

  The columns follow the values of N, in any order and with repetitions.
  """
  problems, n = 200, (2, 5, 20)
  scores, correct, valid, answers = generated(problems, 40, seed=5)
  weights = np.exp(0.3 * scores)  # correlated with the plain vote, and not equal to it
  control, _ = majority_vote(answers, correct, valid, n)

  def vote(n, key, permutations, **options):
    options |= {"weights": weights, "num_answers": 6, "key": jax.random.key(key)}
    return majority_vote(answers, correct, valid, n, permutations=permutations, **options)

  reference, reference_error = vote(n, 2, 1000)
  got, error = vote(n, 3, 60, control=control)
  assert_honest(got - reference, np.square(error) + np.square(reference_error))
  plain_variance = np.square(reference_error).sum(axis=0) * 1000 / 60
  assert np.all(np.square(error).sum(axis=0) < 0.9 * plain_variance)
  columns = [2, 0, 1, 0]
  again = vote([n[column] for column in columns], 3, 60, control=control[:, columns])
  np.testing.assert_allclose(again, (got[:, columns], error[:, columns]), atol=1e-6)


def test_equal_weights_with_the_exact_control_give_the_exact_vote():
  """Equal weights give the plain vote, ties included: its exact control leaves no error."""
  _, correct, _, answers = generated(4, 16)
  n = (1, 2, 4, 12, 16)
  exact, _ = majority_vote(answers, correct, n=n)
  weights = np.full(correct.shape, 0.1, np.float32)
  options = {"weights": weights, "key": jax.random.key(0), "permutations": 50}
  controlled, error = majority_vote(answers, correct, n=n, control=exact, **options)
  np.testing.assert_allclose(controlled, exact, atol=1e-5)
  assert error.max() < 1e-3


def test_vmap_and_sharding_under_jit_agree_with_plain_calls():
  """Under jit, mapping over a leading axis or spreading over devices gives the same numbers."""
  scores, correct, valid, answers = generated(8, 16)
  weights, n = weights_like(scores), (2, 16)
  control, _ = majority_vote(answers, correct, valid, n)
  options = {"key": jax.random.key(0), "permutations": 50, "num_answers": 6}

  def vote(answers, correct, valid, weights, control):
    return majority_vote(answers, correct, valid, n, weights, control=control, **options)

  arrays = (answers, correct, valid, weights, control)
  plain = vote(*arrays)
  mapped = jax.jit(jax.vmap(vote))(*(np.stack([x, x[::-1]]) for x in arrays))
  np.testing.assert_allclose([x[0] for x in mapped], plain, atol=1e-6)
  alone = vote(*(x[::-1] for x in arrays))
  np.testing.assert_allclose([x[1] for x in mapped], alone, atol=1e-6)

  mesh = jax.make_mesh((8,), ("problems",), axis_types=(jax.sharding.AxisType.Auto,))
  with jax.set_mesh(mesh):
    sharding = NamedSharding(mesh, PartitionSpec("problems"))
    sharded = [jax.device_put(x, sharding) for x in arrays]
    np.testing.assert_allclose(jax.jit(vote)(*sharded), plain, atol=1e-6)


def test_bad_arguments_are_errors_that_show_the_value():
  """Each kind of wrong value, shape or option raises an error that shows it."""
  _, correct, valid, answers = generated(2, M)
  key = jax.random.key(0)
  vote = {"key": key, "permutations": 4}

  def weighted(value):
    weights = np.ones(answers.shape, np.float32)
    weights[np.nonzero(valid)[0][0], np.nonzero(valid)[1][0]] = value
    return majority_vote(answers, correct, valid, weights=weights, **vote)

  ones = np.ones(answers.shape, np.float32)
  cases = [
    ("-1", lambda: majority_vote(answers - 1, correct, **vote)),
    ("float32", lambda: majority_vote(ones, correct, **vote)),
    ("float16", lambda: majority_vote(ones.astype(np.float16), correct, **vote)),
    ("weight -0.5 .*not negative", lambda: weighted(-0.5)),
    ("weight inf", lambda: weighted(np.inf)),
    (r"weights \(2, 3\)", lambda: majority_vote(answers, correct, weights=ones[:, :3], **vote)),
    ("permutations=1: .*at least 2", lambda: majority_vote(answers, correct, permutations=1)),
    ("both", lambda: majority_vote(answers, correct, permutations=4)),
    ("weights without a key", lambda: majority_vote(answers, correct, weights=ones)),
    ("combine='max'", lambda: majority_vote(answers, correct, combine="max", **vote)),
    ("weights=None", lambda: majority_vote(answers, correct, control=ones, **vote)),
    (
      r"control \(2, 7\)",
      lambda: majority_vote(answers, correct, n=[1], weights=ones, control=ones, **vote),
    ),
    ("num_answers", lambda: jax.jit(lambda a: majority_vote(a, correct, **vote))(answers)),
    (
      "too large a tally",
      lambda: majority_vote(answers, correct, n=[1], num_answers=2**29, **vote),
    ),
  ]
  for message, call in cases:
    with pytest.raises(ValueError, match=message):
      call()


def test_answer_ids_of_64_bits_and_far_apart():
  """64-bit hashes work as answer ids: they stay distinct and need no tally up to their value."""
  answers = np.array([[1, 2**32 + 1, 2**40]])
  right = np.array([[1, 0, 1]], bool)
  exact, _ = majority_vote(answers, right, n=[1, 3])
  np.testing.assert_allclose(exact, [[2 / 3, 2 / 3]])
  got, _ = majority_vote(answers, right, n=[1, 3], key=jax.random.key(0), permutations=4)
  np.testing.assert_allclose(got[0, 1], 2 / 3, rtol=1e-6)


def test_only_ratios_of_weights_matter():
  """Scaling a problem's weights does not change the vote, even beyond the range of float32."""
  answers, right = np.array([[0, 1, 1]]), np.array([[1, 0, 0]], bool)
  for scale in (np.exp(-140.0), 1e50, 3e38):
    got, _ = majority_vote(
      answers, right, n=[3], weights=scale * np.array([[1, 0.4, 0.01]]),
      key=jax.random.key(0), permutations=2,
    )  # fmt: skip
    assert got[0, 0] == 1


def test_equal_sums_of_many_weights_tie():
  """Answers with the same 100,000 weights tie, although the sums are rounded in another order."""
  half = np.random.default_rng(0).random(100_000)
  answers = np.repeat([[0, 1]], 100_000, axis=1)
  weights = np.concatenate([half, half[::-1]])[None]
  got, _ = majority_vote(
    answers, answers == 0, n=[200_000], weights=weights, key=jax.random.key(0), permutations=2
  )
  assert got[0, 0] == 0.5


def test_every_n_is_estimated_within_the_limit_of_memory(monkeypatch):
  """n=None estimates every N, also if the limit on a tally splits the values of N."""
  rng = np.random.default_rng(0)
  answers = rng.integers(0, 20, (2, 12))
  right = answers < 3
  exact, _ = majority_vote(answers, right)
  monkeypatch.setattr(voting, "GROUP_CELLS", 200)
  got, error = majority_vote(answers, right, key=jax.random.key(0), permutations=400)
  assert np.all(np.abs(got - exact) <= 5 * error + 0.02)
