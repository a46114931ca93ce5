"""The rules of a search: which solutions it continues after each has a new step and a score.

A rule takes the lanes of one problem and returns the parents of the next lanes; the search copies a
parent that is returned more than once.  The rules, their sources and their differences from these:

* `beam`: the best `n / expansions` unfinished solutions, each `expansions` times (Snell et al.
  2024, arXiv 2408.03314; search-and-learn's beam_search.py).
* `dvts`: `n / expansions` independent subtrees, each of which continues its best solution (Beeching
  et al. 2024; diverse_verifier_tree_search.py).  Finished siblings are not lost.
* `particles`: all lanes drawn anew in proportion to r / (1 - r) of their scores r; finished lanes
  take part and stay as they are (Puri et al. 2025, arXiv 2502.01618).
* `best_of_n`: every unfinished solution.

Lookahead (Snell et al. 2024) is `beam` with scores read at the end of a rollout.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Scored:
  """The lanes of a problem, without those that were cut off."""

  scores: np.ndarray  # [lanes], probabilities
  finished: np.ndarray  # bool [lanes]
  trees: np.ndarray  # int [lanes], the subtree of each


def best_of_n(s: Scored, n: int, expansions: int, rng: np.random.Generator) -> list[int]:
  return [*np.flatnonzero(~s.finished)]


def beam(s: Scored, n: int, expansions: int, rng: np.random.Generator) -> list[int]:
  unfinished = np.flatnonzero(~s.finished)
  best = unfinished[np.argsort(-s.scores[unfinished], kind="stable")][: n // expansions]
  # If these are fewer, they take turns, so that no lane is idle (as in search-and-learn).
  return sorted(np.resize(best, n)) if len(best) else []


def dvts(s: Scored, n: int, expansions: int, rng: np.random.Generator) -> list[int]:
  best = [
    max(np.flatnonzero(s.trees == tree), key=lambda i: s.scores[i]) for tree in np.unique(s.trees)
  ]
  return [i for i in best if not s.finished[i] for _ in range(expansions)]


def particles(s: Scored, n: int, expansions: int, rng: np.random.Generator) -> list[int]:
  if s.finished.all():
    return []
  odds = s.scores / np.maximum(1 - s.scores, 1e-9)
  weights = odds / odds.sum() if odds.sum() > 0 else np.full(len(odds), 1 / len(odds))
  return sorted(rng.choice(len(odds), n, p=weights))


Rule = Callable[[Scored, int, int, np.random.Generator], Sequence[int]]
RULES: dict[str, Rule] = {
  "best_of_n": best_of_n,
  "beam": beam,
  "dvts": dvts,
  "lookahead": beam,
  "particles": particles,
}
