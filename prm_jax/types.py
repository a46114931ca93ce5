"""Types that several subpackages share.  Imports nothing heavier than JAX."""

import dataclasses

import jax
import numpy as np

RATINGS = (-1, 0, 1)  # PRM800K's step ratings: negative, neutral, positive
# Ratings of a right step, by the meaning of neutral (*Let's Verify Step by Step*, appendix F.2).
RIGHT_RATINGS = {"positive": (0, 1), "negative": (1,)}
TWO_CLASSES = ("-1", "1")  # of step labels without neutral: wrong and right
CLASSES = {  # outputs of the class head by objective, in order
  "process": tuple(str(rating) for rating in RATINGS),
  "outcome": ("incorrect", "correct"),
  "language_model": ("none",),  # the head exists, but nothing reads it
}


def problem_key(problem: str) -> str:
  """Returns a problem's text with white space normalised, which identifies the problem."""
  return " ".join(problem.split())


@dataclasses.dataclass(frozen=True)
class StepTree:
  """A labelled solution as a tree of steps under the problem.

  Steps are in preorder: a step's descendants directly follow it.  The parent -1 is the problem.
  Alternatives for a step are siblings: they share a parent, and only the chosen one has children.
  """

  problem: str
  steps: tuple[str, ...]
  parents: tuple[int, ...]  # of each step
  # Of each step: -1, 0 or 1; or weights of (wrong, right), which are (1 - p, p) for a soft label
  # and (n - k, k) for k right rollouts among n; or None for context without a label.
  labels: tuple[int | tuple[float, float] | None, ...]
  outcome: bool | None = None  # whether the final answer is right; None: unknown
  source: str = ""  # file and line, e.g. "phase2_train.jsonl:17"

  def __post_init__(self):
    if not len(self.steps) == len(self.parents) == len(self.labels):
      raise ValueError(
        f"{self.source}: {len(self.steps)} steps, {len(self.parents)} parents, "
        f"{len(self.labels)} labels"
      )
    path = [-1]  # the step before, below its ancestors
    for i, parent in enumerate(self.parents):
      while path and path[-1] != parent:
        path.pop()
      if not path:
        raise ValueError(f"{self.source}: step {i} has parent {parent}; steps must be in preorder")
      path.append(i)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """Packed rows on device.  Token i attends to token j when j <= i < subtree_end[j].

  This rule is the causal mask, and also separates packed examples and sibling branches.  Each
  padding token is a tree of its own.
  """

  tokens: jax.Array  # int32 [B, T]
  positions: jax.Array  # int32 [B, T]: depth of the token in its tree
  subtree_end: jax.Array  # int32 [B, T]: index just past the token's last descendant
  previous: jax.Array  # int32 [B, T]: index of the token's parent; -1: no language-model target
  read_positions: jax.Array  # int32 [B, R]: indices of the tokens that the head reads
  read_targets: jax.Array  # float32 [B, R, C]: weight of each class; zeros: not a target
  read_solutions: jax.Array  # int32 [B, R]: number of the solution, for the bootstrap


@dataclasses.dataclass(frozen=True)
class StepContract:
  """The meaning of a checkpoint's probabilities, stored with the weights; scoring follows it."""

  objective: str  # "process": a class per step; "outcome": a class per solution
  classes: tuple[str, ...]  # of the head's outputs, in order
  separator: str  # text after the problem and after each step, encoded on its own
  separator_ids: tuple[int, ...]
  read: str  # "last separator token" (process) or "last solution token" (outcome)
  neutral: str  # how the neutral class counts in a score: "positive", "negative"; "none": no class
  tokenizer_hash: str  # `Tokenizer.hash`: SHA-256 of the tokenizer's file and first-token setting
  recipe: str  # conversion recipe of the training labels
  heads: int = 1  # of an ensemble; the probability is their mean

  @property
  def described_separator(self) -> str:
    """The separator and its tokens, as text."""
    return f"the separator {self.separator!r}, tokens {[*self.separator_ids]}"

  @property
  def labels(self) -> tuple[int, ...]:
    """The classes as numbers, wrong first; 0 and 1 for an outcome model."""
    return tuple(map(int, self.classes)) if self.objective == "process" else (0, 1)

  @property
  def right_classes(self) -> list[int]:
    """Indices of the classes whose probabilities add up to P(right)."""
    if self.objective == "outcome":
      return [self.classes.index("correct")]
    ratings = RIGHT_RATINGS.get(self.neutral, (1,))  # published models may lack the neutral class
    return [self.classes.index(str(rating)) for rating in ratings]

  def right(self, probabilities: np.ndarray) -> np.ndarray:
    """Returns P(right) `[...]` of class probabilities `[..., C]`, divided by their sum.

    The sum of float32 probabilities is near 1; undivided, it would hide a small P(wrong).
    """
    return probabilities[..., self.right_classes].sum(-1) / probabilities.sum(-1)
