"""Rules that choose which candidate solutions of a pool to label.  Each rule is a function:

  rule(pool, members, count, rng) -> at most `count` of the members, first choice first

`members` are indices into the pool: the candidates of one problem, or all of them (`select`).  A
pool holds each distinct solution of a problem once, because labelling a text twice teaches nothing.
Ties are broken at random, so the order of a file does not matter.

Source: *Let's Verify Step by Step* (arXiv 2305.20050) section 4.2; ActPRM (arXiv 2504.10559).
"""

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from scipy import special

from prm_jax import step_metrics

WRONG_SHARE = 0.8  # share of convincing wrong answers in a selection (section 4.2)


@dataclasses.dataclass(frozen=True)
class Pool:
  """C candidate solutions, with the step probabilities by which to select."""

  problems: np.ndarray  # [C] number of the problem
  correct: np.ndarray  # [C] bool: the final answer is right
  steps: Sequence[tuple[str, ...]]  # [C]
  times: np.ndarray  # [C] samples that had these steps
  right: Sequence[np.ndarray]  # [C], each float64 [steps, K]: P(right) by each of K heads

  @functools.cached_property
  def entropies(self) -> np.ndarray:
    """`[C]` mean over steps of the entropy of the mean P(right), in nats."""
    # Sums of class probabilities may be rounded to more than 1, where the entropy is undefined.
    means = [np.minimum(right.mean(1), 1) for right in self.right]
    return np.array([special.entr(p).mean() + special.entr(1 - p).mean() for p in means])

  @functools.cached_property
  def scores(self) -> np.ndarray:
    """`[C]` `log_scores` of the candidates."""
    return log_scores(self.right)


def log_scores(right: Sequence[np.ndarray]) -> np.ndarray:
  """Returns the log of the product over steps of the mean P(right) (paper section 2.6), `[C]`.

  Args:
    right: of each candidate, P(right) by step and head, `[steps, K]`.
  """
  with np.errstate(divide="ignore"):
    return np.array([np.log(each.mean(1)).sum() for each in right])


Rule = Callable[[Pool, np.ndarray, int, np.random.Generator], np.ndarray]


def uniform(pool: Pool, members: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
  """Draws samples at random; returns distinct members in the order of their first draws."""
  if not len(members):
    return members
  times = pool.times[members]
  return rng.choice(members, min(count, len(members)), replace=False, p=times / times.sum())


def convincing(pool: Pool, members: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
  """Takes the members with the highest scores, 80 % of them wrong answers: the paper's rule.

  The share is rounded up or down at random, so that it holds over many problems.  The other places
  go to the highest scores among all remaining members, right or wrong, as do places for which there
  are too few wrong answers.
  """
  order = _descending(pool.scores, members, rng)
  wrong = order[~pool.correct[order]][: int(WRONG_SHARE * count + rng.random())]
  rest = order[~np.isin(order, wrong)]
  return np.concatenate([wrong, rest])[:count]


def entropy(pool: Pool, members: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
  """Takes the members with the highest mean entropy of P(right), the least certain ones."""
  return _descending(pool.entropies, members, rng)[:count]


def uncertain(pool: Pool, members: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
  """Draws at random among members with a step that an ensemble is unsure of: ActPRM's rule.

  See `step_metrics.certain`; the standard deviation over heads divides by K, as in ActPRM's offline
  filter, not by K - 1.  May return fewer than `count`, even none.
  """
  certain = lambda right: step_metrics.certain(right.mean(1), right.std(1))
  chosen = [i for i in members if not certain(pool.right[i])]
  return uniform(pool, np.array(chosen, int), count, rng)


def coverage(pool: Pool, members: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
  """Takes members one by one, each time one that adds the most steps not covered yet.

  Two steps are equal if their problems, their texts and all steps before them are: a prefix tree.
  """
  nodes = {
    i: [(pool.problems[i], pool.steps[i][: k + 1]) for k in range(len(pool.steps[i]))]
    for i in members.tolist()
  }
  covered, chosen = set(), []
  # Ordered by minus an upper bound of the steps that a member adds; the bound only falls as others
  # are chosen.  Of equal bounds, the one pushed last comes first.
  number = itertools.count(0, -1)
  heap = [(-len(nodes[i]), next(number), i) for i in rng.permutation(members).tolist()]
  heapq.heapify(heap)
  while heap and len(chosen) < count:
    bound, _, i = heapq.heappop(heap)
    adds = sum(node not in covered for node in nodes[i])
    if adds < -bound:
      heapq.heappush(heap, (-adds, next(number), i))
    else:
      chosen.append(i)
      covered.update(nodes[i])
  return np.array(chosen, int)


RULES: dict[str, Rule] = {
  "uniform": uniform,
  "convincing": convincing,
  "entropy": entropy,
  "uncertain": uncertain,
  "coverage": coverage,
}


def select(
  pool: Pool,
  rule: str,
  count: int,
  seed: int,
  per_problem: bool = True,
  among: np.ndarray | None = None,
) -> np.ndarray:
  """Returns the indices of the chosen candidates.

  Args:
    count: solutions to choose, of each problem or in all.
    per_problem: choose among the solutions of each problem; False: among all.
    among: ascending indices of the candidates to choose from; None: all of the pool.
  """
  rng = np.random.default_rng(seed)
  among = np.arange(len(pool.problems)) if among is None else among
  groups = [among[np.argsort(pool.problems[among], kind="stable")]]
  if per_problem:
    groups = np.split(groups[0], np.flatnonzero(np.diff(pool.problems[groups[0]])) + 1)
  chosen = [RULES[rule](pool, members, count, rng) for members in groups if len(members)]
  return np.concatenate([np.zeros(0, int), *chosen])


def _descending(scores: np.ndarray, members: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Returns members in descending order of their scores, equal ones in random order."""
  shuffled = rng.permutation(members)
  return shuffled[np.argsort(-scores[shuffled], kind="stable")]
