"""Votes against the exact oracle over all subsets, and the truth of their standard errors."""

from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from oracles import ALL_N, M, generated, mean, pools, slow_vote, subsets

from prm_jax.aggregation import voting
from prm_jax.aggregation.voting import majority_vote

# The tests share these shapes, so that most of them compile nothing new.
N = (1, 2, 4, 12, 16)
VOTE = {"key": jax.random.key(0), "permutations": 50, "num_answers": 6}


def slow_mean_vote(size, answers, correct, valid, n, weights):
  """An answer's weight is the mean over its drawn members."""
  members = {a: [i for i in range(size) if valid[i] and answers[i] == a] for a in set(answers)}

  def pick(drawn):
    votes = {}
    for i in drawn:
      if valid[i]:
        votes.setdefault(answers[i], []).append(Fraction(float(weights[i])))
    if not votes:
      return Fraction(0)
    votes = {a: mean(w) for a, w in votes.items()}
    best = [a for a in votes if votes[a] == max(votes.values())]
    return mean(mean(Fraction(int(correct[i])) for i in members[a]) for a in best)

  return mean(pick(drawn) for drawn in subsets(size, n))


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
def test_vote_equals_all_subsets(pool, combine):
  """An estimate lies within its own standard error of the truth, and is exact at N = M."""
  size, scores, correct, valid, answers = pool
  weights = None
  if combine:
    weights = np.where(np.isfinite(scores), np.abs(scores), 0)
  got, error = majority_vote(
    answers[None],
    correct[None],
    valid[None],
    n=ALL_N,
    weights=None if weights is None else weights[None],
    combine=combine or "sum",
    sizes=[size],
    key=jax.random.key(size),
    permutations=256,
    num_answers=3,
  )
  slow = slow_mean_vote if combine == "mean" else slow_vote
  expected = np.array([float(slow(size, answers, correct, valid, n, weights)) for n in ALL_N])
  # Five standard errors; 0.04 covers outcomes so rare that no order showed them (p < 0.04 for
  # 256 orders leaves e^-10 a chance of that), whose estimated error is then zero.
  assert np.all(np.abs(got[0] - expected) <= 5 * error[0] + 0.04)
  np.testing.assert_allclose(got[0, size - 1 :], expected[size - 1 :], atol=1e-6)
  assert np.all(error[0, size - 1 :] == 0)


@settings(max_examples=50, deadline=None)
@given(pools())
def test_plain_vote_without_a_key_is_exact(pool):
  """Without weights or key the vote equals the count of all subsets, with error 0."""
  size, _, correct, valid, answers = pool
  got, error = majority_vote(answers[None], correct[None], valid[None], n=ALL_N, sizes=[size])
  expected = [float(slow_vote(size, answers, correct, valid, n)) for n in ALL_N]
  np.testing.assert_allclose(got[0], expected, atol=1e-6)
  assert not error.any()
  limited, _ = majority_vote(
    answers[None], correct[None], valid[None], n=ALL_N, sizes=[size], num_answers=2
  )
  expected = [float(slow_vote(size, answers, correct, valid & (answers < 2), n)) for n in ALL_N]
  np.testing.assert_allclose(limited[0], expected, atol=1e-6)


@pytest.mark.parametrize("ragged", [False, True])
def test_blocks_are_unbiased_and_their_errors_honest(ragged):
  """Over many problems, estimate - exact has mean 0 and the variance that the errors claim.

  At values of N that share blocks or leave an incomplete block, and for problems of different
  sizes, which have different numbers of blocks.
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
  """At small N an order counts as many draws: the error is far below that of one draw."""
  _, correct, valid, answers = generated(20, 64)
  mean, error = majority_vote(
    answers, correct, valid, (2,), key=jax.random.key(0), permutations=100, num_answers=6
  )
  single = np.sqrt(mean * (1 - mean) / 100)
  # 32 blocks: the error of independent draws would be 0.18 of a single one's.
  assert np.sqrt(np.square(error).mean()) < 0.25 * np.sqrt(np.square(single).mean())


def test_control_is_unbiased_and_sharpens():
  """With the exact plain vote as control, a weighted vote is unbiased and has a smaller error."""
  problems, n = 200, (2, 5, 20)
  scores, correct, valid, answers = generated(problems, 40, seed=5)
  weights = np.exp(0.3 * scores)  # correlated with the plain vote, and not equal to it
  control, _ = majority_vote(answers, correct, valid, n)
  options = {"weights": weights, "key": jax.random.key(2), "num_answers": 6}
  candidates = (answers, correct, valid, n)
  reference, reference_error = majority_vote(*candidates, **options, permutations=1000)
  options["key"] = jax.random.key(3)
  _, plain_error = majority_vote(*candidates, **options, permutations=60)
  got, error = majority_vote(*candidates, **options, permutations=60, control=control)
  assert_honest(got - reference, np.square(error) + np.square(reference_error))
  assert np.all(np.square(error).sum(axis=0) < 0.9 * np.square(plain_error).sum(axis=0))
  # The control's columns go with n, in whatever order n comes.
  order = [2, 0, 1]
  shuffled, _ = majority_vote(
    answers,
    correct,
    valid,
    np.array(n)[order],
    **options,
    permutations=60,
    control=control[:, order],
  )
  np.testing.assert_allclose(shuffled, got[:, order], atol=1e-6)


def test_equal_weights_are_a_majority_and_their_control_is_exact():
  """Equal weights give the plain vote, ties included; with the exact control, the exact vote."""
  _, correct, _, answers = generated(4, 16)
  constant = np.full(correct.shape, 0.1, np.float32)  # a sum of 0.1s depends on its order
  weighted, _ = majority_vote(answers, correct, n=N, weights=constant, **VOTE)
  plain, _ = majority_vote(answers, correct, n=N, **VOTE)
  np.testing.assert_allclose(weighted, plain, atol=1e-6)
  exact, _ = majority_vote(answers, correct, n=N)
  controlled, error = majority_vote(answers, correct, n=N, weights=constant, control=exact, **VOTE)
  np.testing.assert_allclose(controlled, exact, atol=1e-5)
  assert error.max() < 1e-3


def test_all_n_agrees_with_chosen_n():
  """n=None estimates every N, each within its error of the exact vote."""
  _, correct, valid, answers = generated(4, 16)
  exact, _ = majority_vote(answers, correct, valid)
  got, error = majority_vote(answers, correct, valid, **VOTE)
  assert got.shape == (4, 16)
  assert np.all(np.abs(got - exact) <= 5 * error + 0.02)
  np.testing.assert_allclose(got[:, -1], exact[:, -1], atol=1e-6)


def test_order_of_n_does_not_matter():
  """Permuted and repeated values of N permute and repeat the columns."""
  _, correct, valid, answers = generated(4, 16)
  a, a_error = majority_vote(answers, correct, valid, (12, 1, 16, 4, 2, 12), **VOTE)
  b, b_error = majority_vote(answers, correct, valid, N, **VOTE)
  columns = [3, 0, 4, 2, 1, 3]
  np.testing.assert_array_equal(a, b[:, columns])
  np.testing.assert_array_equal(a_error, b_error[:, columns])


def test_problems_with_fewer_candidates():
  """N beyond a problem's size draws all of it; slots beyond the size do not exist."""
  scores, correct, valid, answers = generated(4, 16)
  sizes = np.array([12, 16, 3, 16])
  got, error = majority_vote(answers, correct, valid, N, weights_like(scores), sizes=sizes, **VOTE)
  for p, first in ((0, 3), (2, 2)):
    assert len(set(got[p, first:].tolist())) == 1
    assert not error[p, first:].any()
  every_one, _ = majority_vote(answers, correct, valid, N, sizes=np.ones(4, int), **VOTE)
  expected = np.repeat((correct & valid)[:, :1], len(N), axis=1)
  np.testing.assert_array_equal(every_one, expected)


def test_zero_weights():
  """Answers without any weight tie with each other, and lose against any weight."""
  answers, correct = np.array([[0, 1, 1, 2]]), np.array([[1, 0, 0, 0]], bool)
  vote = {"n": [4], "key": jax.random.key(0), "permutations": 2}
  got, _ = majority_vote(answers, correct, weights=np.zeros((1, 4)), **vote)
  np.testing.assert_allclose(got, [[1 / 3]], rtol=1e-6)
  got, _ = majority_vote(answers, correct, weights=np.array([[1e-30, 0, 0, 0]]), **vote)
  assert got == 1


def test_jit_vmap_and_sharding_agree_with_plain_calls():
  """Traced, mapped over a leading axis, and spread over eight devices: the same numbers."""
  scores, correct, valid, answers = generated(8, 16)
  weights, n = weights_like(scores), (2, 16)
  control, _ = majority_vote(answers, correct, valid, n)

  def vote(answers, correct, valid, weights, control):
    return majority_vote(answers, correct, valid, n, weights, control=control, **VOTE)

  arrays = (answers, correct, valid, weights, control)
  plain = vote(*arrays)
  np.testing.assert_allclose(jax.jit(vote)(*arrays), plain, atol=1e-6)

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
  """Values, shapes and options are checked: one case for each kind of error."""
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
    ("float", lambda: majority_vote(ones, correct, **vote)),
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
  # A missing candidate's weight is not looked at.
  weights = np.where(valid, 1, np.nan)
  got, _ = majority_vote(answers, correct, valid, (1, M), weights, **vote)
  assert np.isfinite(got).all()


def test_answer_ids_of_64_bits_and_far_apart():
  """64-bit hashes work as ids: they stay apart, and need no tally up to their value."""
  answers = np.array([[1, 2**32 + 1, 2**40]])
  right = np.array([[1, 0, 1]], bool)
  exact, _ = majority_vote(answers, right, n=[1, 3])
  np.testing.assert_allclose(exact, [[2 / 3, 2 / 3]])
  mean, _ = majority_vote(answers, right, n=[1, 3], key=jax.random.key(0), permutations=4)
  np.testing.assert_allclose(mean[0, 1], 2 / 3, rtol=1e-6)


def test_only_ratios_of_weights_matter():
  """Only ratios of weights count, also for weights outside of the range of float32."""
  answers, right = np.array([[0, 1, 1]]), np.array([[1, 0, 0]], bool)
  for scale in (np.exp(-140.0), 1e50, 3e38):
    mean, _ = majority_vote(
      answers, right, n=[3], weights=scale * np.array([[1, 0.4, 0.01]]),
      key=jax.random.key(0), permutations=2,
    )  # fmt: skip
    assert mean[0, 0] == 1


def test_large_pools_tie_still():
  """Equal sums of weights tie although they are added in another order, at M = 200,000."""
  half = np.random.default_rng(0).random(100_000)
  answers = np.repeat([[0, 1]], 100_000, axis=1)
  weights = np.concatenate([half, half[::-1]])[None]
  mean, _ = majority_vote(
    answers, answers == 0, n=[200_000], weights=weights, key=jax.random.key(0), permutations=2
  )
  assert mean[0, 0] == 0.5


def test_many_answers_at_every_n_stay_within_memory(monkeypatch):
  """A limit on the size of a tally splits the values of N; estimates stay as good."""
  rng = np.random.default_rng(0)
  answers = rng.integers(0, 20, (2, 12))
  right = answers < 3
  exact, _ = majority_vote(answers, right)
  monkeypatch.setattr(voting, "GROUP_CELLS", 200)
  mean, error = majority_vote(answers, right, key=jax.random.key(0), permutations=400)
  assert np.all(np.abs(mean - exact) <= 5 * error + 0.02)
