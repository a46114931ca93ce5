"""Exact oracles of the aggregator: the mean over every subset, in rational arithmetic."""

import itertools
from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

# One shape for all of hypothesis' pools, so that nothing compiles twice: shorter ones use `sizes`.
M = 7
ALL_N = range(1, M + 1)


@st.composite
def pools(draw):
  """A problem of up to M candidates: scores that tie, missing ones, answers, right or wrong."""
  size = draw(st.integers(1, M))

  def slots(values):
    return np.array(draw(st.lists(values, min_size=size, max_size=size)) + [0] * (M - size))

  scores = slots(st.sampled_from([-np.inf, -2.0, -1.0, -0.0, 0.0, 1.5])).astype(np.float32)
  return (
    size,
    scores,
    *(slots(st.booleans()).astype(bool) for _ in range(2)),
    slots(st.integers(0, 2)),
  )


def subsets(size, n):
  return itertools.combinations(range(size), min(n, size))


def mean(values):
  values = list(values)
  return sum(values, Fraction(0)) / len(values)


def slow_best_of_n(size, scores, correct, valid, n):
  def pick(drawn):
    drawn = [i for i in drawn if valid[i]]
    best = [i for i in drawn if scores[i] == max(scores[j] for j in drawn)]
    return mean(Fraction(int(correct[i])) for i in best) if best else Fraction(0)

  return mean(pick(drawn) for drawn in subsets(size, n))


def slow_vote(size, answers, correct, valid, n, weights=None):
  weights = [1] * size if weights is None else [Fraction(float(w)) for w in weights]
  members = {a: [i for i in range(size) if valid[i] and answers[i] == a] for a in set(answers)}

  def pick(drawn):
    votes = {}
    for i in drawn:
      if valid[i]:
        votes[answers[i]] = votes.get(answers[i], 0) + weights[i]
    best = [a for a in votes if votes[a] == max(votes.values())]
    if not best:
      return Fraction(0)
    return mean(mean(Fraction(int(correct[i])) for i in members[a]) for a in best)

  return mean(pick(drawn) for drawn in subsets(size, n))


def generated(problems, m, *, seed=0, answers=6):
  rng = np.random.default_rng(seed)
  scores = rng.normal(size=(problems, m)).astype(np.float32)
  correct = rng.random((problems, m)) < 1 / (1 + np.exp(1 - scores))
  answer_ids = np.where(correct, 0, rng.integers(1, answers, (problems, m)))
  return scores, correct, rng.random((problems, m)) < 0.9, answer_ids
