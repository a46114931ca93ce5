"""Verdicts on a solution's first wrong step, as generative judges give them, and their vote."""

import collections
from collections.abc import Sequence

NONE_WRONG = -1  # as ProcessBench's label
UNDECIDED = -2  # in place of a vote without a decided verdict
Verdict = int | None  # the first wrong step, from 0, or NONE_WRONG; None: undecided


def plurality(verdicts: Sequence[Verdict]) -> Verdict:
  """The verdict of most, among those decided: maj@k of ProcessBench.

  A tie goes to the earliest error, and to an error rather than to "none wrong"; upstream's
  `Counter.most_common` takes the one that was sampled first.
  """
  votes = collections.Counter(each for each in verdicts if each is not None)
  return min(votes, key=lambda i: (-votes[i], i == NONE_WRONG, i), default=None)
