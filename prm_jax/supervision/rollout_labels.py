"""Step labels from counts of rollouts: how often completions from a step have the right answer.

Rollouts are completions sampled after the steps so far; `k` of `n` have the right final answer.

  Math-Shepherd (Wang et al. 2023, arXiv 2312.08935), section 3.2: a step is right if any rollout
  is (hard), or right to the share k / n (soft).  It labels all steps; hard labels here end at the
  first wrong step, as in PRM800K.
  OmegaPRM (Luo et al. 2024, arXiv 2406.06592), section 3.2: the first wrong step is found by a
  binary search, as nothing that follows it leads to the answer.
  SCAN (Ding et al. 2025, arXiv 2509.16548): a language model is sure of a problem if its solutions
  from the start are right; it sees errors late, so the labels just before an error are soft.

The labels of a problem, and the rollouts that it still needs, follow from its counts alone.
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
  # hard: true, and false for the first wrong step, where labels end; soft: k / n of every step;
  # counts: [k, n]; tolerant, as in SCAN: hard as 1 and 0, but min(share / share from the start, 1)
  # for the last --tolerance steps before the first wrong one
  labels: Literal["hard", "soft", "counts", "tolerant"] = "hard"
  # all: rollouts after every step; binary: a binary search for the first wrong step
  search: Literal["all", "binary"] = "all"
  rollouts: config_lib.Count = 8  # limit of rollouts after a step
  wrong_share: config_lib.Share = 0.0  # a step is wrong if at most this share of rollouts is right
  width: config_lib.Share = 0.0  # stop when the 95 % interval of k / n is this narrow; 0: never
  # No labels for a problem if a smaller share of rollouts from its start is right; 0: label all.
  sure: config_lib.Share = 0.0
  tolerance: config_lib.Count = 2  # number of soft labels before the first wrong step (tolerant)

  def _rules(self):
    every = self.search == "binary" and self.labels != "hard"
    yield every, "search labels", "hard labels with a binary search, which skips most steps"
    unused = self.labels in ("soft", "counts") and self.wrong_share > 0
    yield unused, "labels wrong_share", "hard or tolerant labels, which alone end at a wrong step"
    unused = self.labels != "tolerant" and self.tolerance != Settings.tolerance
    yield unused, "labels tolerance", "tolerant labels, which alone use it"


@dataclasses.dataclass
class Count:
  """Rollouts after some steps: `n` in all, of which `k` are right."""

  n: int = 0
  k: int = 0

  @property
  def share(self) -> float:
    return self.k / self.n


@dataclasses.dataclass(frozen=True)
class Solution:
  record: dict[str, Any]
  steps: Steps
  ended: bool  # it has a final answer, so nothing is sampled after its last step
  right: bool | None  # its answer is right; None: not known yet


@dataclasses.dataclass
class Problem:
  """The solutions of a problem, and the counts of rollouts after their prefixes."""

  text: str
  answer: str
  solutions: list[Solution]
  counts: dict[Steps, Count] = dataclasses.field(default_factory=dict)
  tokens: int = 0  # of all rollouts


def is_wrong(count: Count, s: Settings) -> bool:
  """Returns whether the step before these rollouts is wrong."""
  return count.share <= s.wrong_share


def is_enough(count: Count, s: Settings) -> bool:
  """Returns whether a step needs no more rollouts.

  It needs none if all are made, if more would not change its label, or if the confidence interval
  of the share of right ones is at most `width` wide.
  """
  if not count.n or count.n >= s.rollouts:
    return bool(count.n)
  worst, best = (Count(s.rollouts, k) for k in (count.k, count.k + s.rollouts - count.n))
  if s.labels == "hard" and is_wrong(worst, s) == is_wrong(best, s):
    return True
  if not s.width:
    return False
  from scipy import stats  # slow: most of a second

  interval = stats.binomtest(count.k, count.n).proportion_ci(LEVEL, "wilson")
  return interval.high - interval.low <= s.width


def wanted(problem: Problem, s: Settings) -> list[Steps]:
  """Returns the distinct prefixes of solutions that need more rollouts now."""
  root = problem.counts.get((), Count())
  if (s.sure or s.labels == "tolerant") and root.n < s.rollouts:
    return [()]
  if s.sure and root.share < s.sure:
    return []
  prefixes = itertools.chain(*(_wanted(each, problem.counts, s) for each in problem.solutions))
  return [*dict.fromkeys(prefixes)]


def _wanted(solution: Solution, counts: dict[Steps, Count], s: Settings) -> Iterator[Steps]:
  if s.search == "binary":
    _, length = _search(solution, counts, s)
    if length:
      yield solution.steps[:length]
    return
  for length in range(1, len(solution.steps) + (not solution.ended)):
    prefix = solution.steps[:length]
    if not is_enough(counts.get(prefix, Count()), s):
      yield prefix
    # Steps after the first wrong one have no hard label.
    elif s.labels in ("hard", "tolerant") and is_wrong(counts[prefix], s):
      return


def _search(
  solution: Solution, counts: dict[Steps, Count], s: Settings
) -> tuple[int | None, int | None]:
  """Returns the first wrong step, or None and the step after which rollouts are needed.

  Steps are numbered from 1; `len(steps) + 1` means that no step is wrong.
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
  """Returns the labels of a solution's steps and their sources, once `wanted` is empty.

  Sources: "rollouts"; "answer", for the last step of a solution that has one; "search", for a step
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
    labels = [*map(float, labels)]
    if first <= len(steps) and root.k:
      for i in range(max(first - 1 - s.tolerance, 0), first - 1):
        labels[i] = min(counts[i].share / root.share, 1.0)
  return labels + after, sources[:first] + after
