"""Exact oracles of the aggregator: the mean over every subset, in rational arithmetic."""

import itertools
from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

# One shape for all of hypothesis' pools, so that nothing compiles twice: shorter ones use `sizes`.
M = 7
SHUFFLED_N = (5, 1, 7, 3, 2, 6, 4, 3)  # every N, one of them twice


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
  """Every draw of `n` of `size` candidates, or of all of them if they are fewer."""
  return itertools.combinations(range(size), min(n, size))


def mean(values):
  """The mean of fractions."""
  values = list(values)
  return sum(values, Fraction(0)) / len(values)


def slow_best_of_n(size, scores, correct, valid, n):
  """Best-of-N as the mean over all draws; tied candidates share the pick."""

  def pick(drawn):
    drawn = [i for i in drawn if valid[i]]
    best = [i for i in drawn if scores[i] == max(scores[j] for j in drawn)]
    return mean(Fraction(int(correct[i])) for i in best) if best else Fraction(0)

  return mean(pick(drawn) for drawn in subsets(size, n))


def slow_vote(size, answers, correct, valid, n, weights=None, combine="sum"):
  """The vote as the mean over all draws; an answer has the sum or the mean of its weights."""
  weights = [1] * size if weights is None else [Fraction(float(w)) for w in weights]
  combined = {"sum": sum, "mean": mean}[combine]
  members = {a: [i for i in range(size) if valid[i] and answers[i] == a] for a in set(answers)}

  def pick(drawn):
    votes = {}
    for i in drawn:
      if valid[i]:
        votes.setdefault(answers[i], []).append(weights[i])
    if not votes:
      return Fraction(0)
    votes = {answer: combined(given) for answer, given in votes.items()}
    best = [answer for answer in votes if votes[answer] == max(votes.values())]
    return mean(mean(Fraction(int(correct[i])) for i in members[a]) for a in best)

  return mean(pick(drawn) for drawn in subsets(size, n))


def generated(problems, m, *, seed=0, answers=6):
  """Random scores, correctness that follows them, valid (nine in ten) and answers, 0 if right."""
  rng = np.random.default_rng(seed)
  scores = rng.normal(size=(problems, m)).astype(np.float32)
  correct = rng.random((problems, m)) < 1 / (1 + np.exp(1 - scores))
  answer_ids = np.where(correct, 0, rng.integers(1, answers, (problems, m)))
  return scores, correct, rng.random((problems, m)) < 0.9, answer_ids
