"""Selection of solutions to label: each rule agrees with a slow statement of its definition."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prm_jax.supervision import active

PROBABILITIES = st.sampled_from([0.0, 0.05, 0.1, 0.3, 0.5, 0.9, 0.95, 1.0])  # so that many tie


@st.composite
def pools(draw) -> active.Pool:
  """Pools of up to three problems with distinct solutions of up to three steps, by two heads."""
  solutions = draw(
    st.lists(
      st.tuples(st.integers(0, 2), st.lists(st.sampled_from("ab"), min_size=1, max_size=3)),
      min_size=1,
      max_size=12,
      unique_by=lambda solution: (solution[0], tuple(solution[1])),
    )
  )
  steps = [tuple(each) for _, each in solutions]
  right = [
    np.array(draw(st.lists(PROBABILITIES, min_size=2 * len(s), max_size=2 * len(s)))).reshape(-1, 2)
    for s in steps
  ]
  count = len(solutions)
  return active.Pool(
    problems=np.array([problem for problem, _ in solutions]),
    correct=np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count))),
    steps=steps,
    times=np.array(draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))),
    right=right,
  )


def score(pool: active.Pool, i: int) -> float:
  """The product over steps of a candidate's mean P(right)."""
  return float(np.prod(pool.right[i].mean(1)))


def close(a, b) -> bool:
  """Whether two lists of scores agree: the pool has the logarithm of a product as a sum."""
  return np.allclose(a, b, atol=1e-12, rtol=0)


@settings(max_examples=150, deadline=None)
@given(pool=pools(), count=st.integers(1, 8), seed=st.integers(0, 99))
def test_convincing_takes_the_best_wrong_answers_then_the_best_of_the_rest(pool, count, seed):
  """The rule takes 80 % wrong answers, rounded up or down, and fills up with the best others."""
  for p in np.unique(pool.problems):
    members = np.flatnonzero(pool.problems == p)
    chosen = active.convincing(pool, members, count, np.random.default_rng(seed)).tolist()
    assert len(set(chosen)) == len(chosen) == min(count, len(members))
    scores = {i: score(pool, i) for i in members.tolist()}
    wrong = sorted((scores[i] for i in members if not pool.correct[i]), reverse=True)
    allowed = []
    for quota in {int(np.floor(0.8 * count)), int(np.ceil(0.8 * count))}:
      first = wrong[:quota]
      left = sorted(scores.values(), reverse=True)
      for each in first:
        left.remove(each)
      allowed.append((first, left[: max(count - len(first), 0)]))
    mine = [scores[i] for i in chosen]
    assert any(
      close(mine, first + rest) and not pool.correct[chosen[: len(first)]].any()
      for first, rest in allowed
      if len(first) + len(rest) == len(mine)
    )


def test_the_share_of_wrong_answers_holds_over_many_problems():
  """If one solution of each problem is chosen, four in five of the chosen have wrong answers."""
  count = 3000
  pool = active.Pool(
    problems=np.repeat(np.arange(count), 2),
    correct=np.tile([True, False], count),
    steps=[(x,) for x in "ab" * count],
    times=np.ones(2 * count, int),
    right=[np.array([[0.9]]), np.array([[0.2]])] * count,
  )
  chosen = active.select(pool, "convincing", 1, seed=0)
  assert len(chosen) == count
  # Five standard deviations of a binomial of 3,000 draws at 0.8.
  assert abs(np.mean(~pool.correct[chosen]) - 0.8) < 5 * np.sqrt(0.8 * 0.2 / count)
  of_all = active.select(pool, "convincing", 1000, seed=0, per_problem=False)
  assert np.sum(~pool.correct[of_all]) == 800


@settings(max_examples=100, deadline=None)
@given(pool=pools(), count=st.integers(1, 8), seed=st.integers(0, 99))
def test_entropy_takes_the_least_certain(pool, count, seed):
  """The rule takes the solutions with the highest mean entropy of P(right) over their steps."""

  def entropy(i: int) -> float:
    nats = []
    for p in pool.right[i].mean(1):
      nats.append(-sum(q * np.log(q) for q in (p, 1 - p) if q > 0))
    return float(np.mean(nats))

  members = np.arange(len(pool.problems))
  chosen = active.entropy(pool, members, count, np.random.default_rng(seed))
  expected = sorted((entropy(i) for i in members), reverse=True)[:count]
  assert close([entropy(i) for i in chosen], expected)


def test_a_probability_that_is_rounded_above_one_is_certain():
  """P(right) of 1 + 1e-7, a rounded sum over classes, has entropy 0, not minus infinity."""
  right = [np.array([[1 + 1e-7], [0.5]]), np.array([[0.9], [0.9]])]
  steps, two = [("a", "b"), ("c", "d")], np.zeros(2, int)
  pool = active.Pool(two, np.ones(2, bool), steps, np.ones(2, int), right)
  assert active.select(pool, "entropy", 1, seed=0) == [0]


@settings(max_examples=100, deadline=None)
@given(pool=pools(), seed=st.integers(0, 99))
def test_uncertain_takes_solutions_that_an_ensemble_doubts(pool, seed):
  """The rule takes the solutions that ActPRM calls uncertain.

  One of their steps, up to the first that is surely wrong, has a mean P(right) in (0.1, 0.9) or a
  standard deviation over 0.01.
  """

  def doubted(i: int) -> bool:
    for heads in pool.right[i]:
      mean = (heads[0] + heads[1]) / 2
      if abs(heads[0] - heads[1]) / 2 > 0.01 or (mean > 0.1 and mean < 0.9):
        return True
      if mean <= 0.1:
        return False
    return False

  members = np.arange(len(pool.problems))
  rng = np.random.default_rng(seed)
  chosen = active.uncertain(pool, members, len(members), rng).tolist()
  assert sorted(chosen) == [i for i in members if doubted(i)]


@settings(max_examples=100, deadline=None)
@given(pool=pools(), count=st.integers(1, 8), seed=st.integers(0, 99))
def test_coverage_is_greedy(pool, count, seed):
  """Each chosen solution adds as many new nodes to the prefix tree as any that is left could."""
  members = np.arange(len(pool.problems))
  chosen = active.coverage(pool, members, count, np.random.default_rng(seed)).tolist()
  assert len(set(chosen)) == len(chosen) == min(count, len(members))
  nodes = lambda i: {(pool.problems[i], pool.steps[i][: k + 1]) for k in range(len(pool.steps[i]))}
  covered = set()
  for k, i in enumerate(chosen):
    left = set(members.tolist()) - set(chosen[:k])
    assert len(nodes(i) - covered) == max(len(nodes(j) - covered) for j in left)
    covered |= nodes(i)


def test_uniform_draws_samples_and_skips_repeated_ones():
  """A solution that three of four samples have is chosen first three times in four."""
  pool = active.Pool(
    problems=np.zeros(2, int),
    correct=np.array([True, False]),
    steps=[("a",), ("b",)],
    times=np.array([3, 1]),
    right=[np.array([[0.5]])] * 2,
  )
  draws = 4000
  first = [active.select(pool, "uniform", 2, seed)[0] for seed in range(draws)]
  assert abs(np.mean(np.array(first) == 0) - 0.75) < 5 * np.sqrt(0.75 * 0.25 / draws)


@settings(max_examples=50, deadline=None)
@given(pool=pools(), count=st.integers(1, 4), seed=st.integers(0, 99))
def test_select_is_a_function_of_its_arguments_and_keeps_to_each_problem(pool, count, seed):
  """Each rule chooses at most `count` of each problem, or in all, and the same for a seed."""
  for rule, per_problem in itertools.product(active.RULES, (True, False)):
    chosen = active.select(pool, rule, count, seed, per_problem)
    again = active.select(pool, rule, count, seed, per_problem)
    assert chosen.tolist() == again.tolist()
    most = np.bincount(pool.problems[chosen]).max(initial=0) if per_problem else len(chosen)
    assert most <= count
