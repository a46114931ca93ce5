"""A generative judge's verdicts on a solution's first wrong step, and their vote."""

import collections
from collections.abc import Sequence

NONE_WRONG = -1  # ProcessBench's label of a solution without a wrong step
UNDECIDED = -2  # the vote if no verdict is decided
Verdict = int | None  # the first wrong step, from 0, or NONE_WRONG; None: undecided


def plurality(verdicts: Sequence[Verdict]) -> Verdict:
  """Returns the most frequent decided verdict (maj@k of ProcessBench), or None if there is none.

  A tie goes to the earliest error, and to an error rather than to NONE_WRONG.  Upstream's
  `Counter.most_common` takes the verdict that was sampled first.
  """
  votes = collections.Counter(each for each in verdicts if each is not None)
  return min(votes, key=lambda i: (-votes[i], i == NONE_WRONG, i), default=None)


def labels(first: Verdict, count: int) -> list[int | None]:
  """Returns 1 before the first wrong step, -1 at it and None after it; undecided: None for all."""
  if first is None:
    return [None] * count
  return [1] * count if first == NONE_WRONG else [1] * first + [-1] + [None] * (count - first - 1)
