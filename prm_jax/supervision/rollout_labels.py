"""Step labels from counts: how often completions that go on from a step end right.

`k` of `n` rollouts, completions sampled after the steps so far, have the right final answer.

  Math-Shepherd (Wang et al. 2023, arXiv 2312.08935), section 3.2: a step is right if any rollout
  is (hard), or right to the share k / n (soft).  It labels all steps; hard labels here end at the
  first wrong one, as PRM800K's.
  OmegaPRM (Luo et al. 2024, arXiv 2406.06592), section 3.2: the first wrong step is found by a
  binary search, as nothing that follows it leads to the answer.
  SCAN (Ding et al. 2025, arXiv 2509.16548): a language model is sure of a problem if its solutions
  from the start are right; it sees errors late, so the labels just before one are soft.

What a problem still needs, and its labels, follow from its counts alone.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

from prm_jax import config as config_lib

LEVEL = 0.95  # of the interval of k / n (Wilson)
Steps = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(config_lib.Checked):
  # hard: true and false up to the first wrong step; soft: k / n of every step; counts: [k, n];
  # tolerant, as SCAN: 1, then min(share / confidence, 1) of the last steps before the first wrong
  # one, then 0
  labels: Literal["hard", "soft", "counts", "tolerant"] = "hard"
  search: Literal["all", "binary"] = "all"  # rollouts after all steps, or to find the first wrong
  rollouts: config_lib.Count = 8  # of a step, at most
  wrong_share: config_lib.Share = 0.0  # a step is wrong if at most this share of rollouts is right
  width: config_lib.Share = 0.0  # stop when the 95 % interval of k / n is this narrow; 0: never
  # No labels for a problem if a smaller share of rollouts from its start is right; 0: label all.
  sure: config_lib.Share = 0.0
  tolerance: config_lib.Count = 2  # steps before the first wrong one with soft labels (tolerant)

  def _rules(self):
    every = self.search == "binary" and self.labels != "hard"
    yield every, "search labels", "hard labels with a binary search: the others are of every step"


@dataclasses.dataclass
class Count:
  """How many rollouts there are after some steps, and how many of them are right."""

  n: int = 0
  k: int = 0  # right ones

  @property
  def share(self) -> float:
    return self.k / self.n


@dataclasses.dataclass(frozen=True)
class Solution:
  record: dict[str, Any]
  steps: Steps
  ended: bool  # it has a final answer, so nothing is sampled after its last step
  right: bool | None  # its answer is; None: unknown yet


@dataclasses.dataclass
class Problem:
  """Solutions of a problem, and the counts after each of their beginnings."""

  text: str
  answer: str
  solutions: list[Solution]
  counts: dict[Steps, Count] = dataclasses.field(default_factory=dict)
  tokens: int = 0  # of all rollouts


def is_wrong(count: Count, s: Settings) -> bool:
  """Whether the step before these rollouts is wrong."""
  return count.share <= s.wrong_share


def is_enough(count: Count, s: Settings) -> bool:
  """Whether a step needs no more rollouts: all are made, or more would not change its label."""
  if not count.n or count.n >= s.rollouts:
    return bool(count.n)
  limit, most = s.wrong_share * s.rollouts, count.k + s.rollouts - count.n
  if s.labels == "hard" and not count.k <= limit < most:
    return True
  if not s.width:
    return False
  from scipy import stats  # takes most of a second

  interval = stats.binomtest(count.k, count.n).proportion_ci(LEVEL, "wilson")
  return interval.high - interval.low <= s.width


def wanted(problem: Problem, s: Settings) -> list[Steps]:
  """The distinct prefixes of solutions that need more rollouts now."""
  root = problem.counts.get((), Count())
  if (s.sure or s.labels == "tolerant") and root.n < s.rollouts:
    return [()]
  if s.sure and root.share < s.sure:
    return []
  found = itertools.chain(*(_wanted(each, problem.counts, s) for each in problem.solutions))
  return [*dict.fromkeys(found)]


def _wanted(solution: Solution, counts: dict[Steps, Count], s: Settings) -> Iterator[Steps]:
  need = lambda length: not is_enough(counts.get(solution.steps[:length], Count()), s)
  if s.search == "binary":
    _, length = _search(solution, counts, s)
    if length:
      yield solution.steps[:length]
    return
  for length in range(1, len(solution.steps) + (not solution.ended)):
    if need(length):
      yield solution.steps[:length]
    # Steps after the first wrong one have no hard label.
    elif s.labels in ("hard", "tolerant") and is_wrong(counts[solution.steps[:length]], s):
      return


def _search(
  solution: Solution, counts: dict[Steps, Count], s: Settings
) -> tuple[int | None, int | None]:
  """The first wrong step, or None while it is unknown, and then where rollouts are needed.

  Steps are numbered from 1; with `len(steps) + 1` for the first wrong one, none is.
  """
  low, high = 0, len(solution.steps) + (not solution.ended)
  if solution.ended and solution.right:
    return high + 1, None
  while high - low > 1:
    middle = (low + high) // 2
    count = counts.get(solution.steps[:middle], Count())
    if not is_enough(count, s):
      return None, middle
    low, high = (low, middle) if is_wrong(count, s) else (middle, high)
  return high, None


def label(problem: Problem, solution: Solution, s: Settings) -> tuple[list, list[str | None]]:
  """The labels of a solution's steps, once `wanted` is empty, and where each is from.

  Sources: "rollouts"; "answer", of the last step of a solution that has one; "search", of a step
  that the binary search has passed over; None without a label.
  """
  steps, root = solution.steps, problem.counts.get((), Count())
  if s.sure and root.share < s.sure:
    return [None] * len(steps), [None] * len(steps)
  counts = [problem.counts.get(steps[:length]) for length in range(1, len(steps) + 1)]
  sources = ["rollouts" if each else "search" for each in counts]
  if solution.ended:
    counts[-1], sources[-1] = Count(s.rollouts, s.rollouts * bool(solution.right)), "answer"
  if s.labels == "soft":
    return [each.share for each in counts], sources
  if s.labels == "counts":
    return [[each.k, each.n] for each in counts], sources
  if s.search == "binary":
    first, _ = _search(solution, problem.counts, s)
  else:
    wrong = (number for number, each in enumerate(counts, 1) if is_wrong(each, s))
    first = next(wrong, len(steps) + 1)
  after = [None] * (len(steps) - first)
  labels = [True] * (first - 1) + [False] * (first <= len(steps))
  if s.labels == "tolerant":
    for i in range(max(first - 1 - s.tolerance, 0), first - 1):
      if first <= len(steps) and root.k:
        labels[i] = min(counts[i].share / root.share, 1.0)
    labels = [*map(float, labels)]
  return labels + after, sources[:first] + after
