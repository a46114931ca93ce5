"""The interface of reward models: solutions in, class probabilities of their steps out."""

import abc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from prm_jax import config as config_lib
from prm_jax.input_pipeline.token_tree import TokenTree
from prm_jax.runtime import json_lines
from prm_jax.scoring import batching
from prm_jax.scoring.batch_journal import BatchJournal
from prm_jax.types import Batch, StepContract

MAX_TOKENS = 16_384  # of a solution: bounds the cost of one line of a file
UNDEFINED = "the model gives NaN in place of probabilities"
Solution = tuple[str, Sequence[str]]  # a problem and steps


class SolutionError(ValueError):
  """A solution cannot be scored; `index` is its place among those given."""

  def __init__(self, index: int, message: str):
    super().__init__(message)
    self.index = index


def undefined(results: Sequence[np.ndarray]) -> list[int]:
  """Returns the indices of the solutions whose probabilities are not all finite."""
  return [i for i, probabilities in enumerate(results) if not np.isfinite(probabilities).all()]


class Rater(abc.ABC):
  """A model that rates steps: `Scorer`, or `ImplicitScorer` of two language models."""

  contract: StepContract  # the meaning of its probabilities
  config: config_lib.Model
  vocab_size: int  # rows of the embedding
  mesh: jax.sharding.Mesh  # of the parameters
  row_length: int  # tokens; longer solutions get longer rows
  merge: bool  # encode the shared prefixes of a problem's solutions once
  step: int | None  # of a checkpoint
  journal: BatchJournal | None  # results of finished batches, from which a run resumes
  layout: str  # describes for people how a solution is laid out

  @abc.abstractmethod
  def lay_out(self, problem: str, steps: Sequence[str]) -> TokenTree:
    """Returns a solution's tokens and read positions; ValueError if it cannot be laid out."""

  @abc.abstractmethod
  def forward(self, batch: Batch) -> jax.Array:
    """Returns class log-probabilities at a batch's read positions, `[B, R, K, C]`.

    A subclass may return other values, which its own `of_steps` converts.
    """

  @abc.abstractmethod
  def facts(self) -> dict[str, Any]:
    """Returns what the probabilities mean and which model files they come from."""

  @abc.abstractmethod
  def identity(self) -> dict[str, Any]:
    """Returns what determines a batch's probabilities: weights, architecture, readout."""

  def of_steps(self, tree: TokenTree, found: np.ndarray) -> np.ndarray:
    """Converts the output of `forward` at a solution's reads to step probabilities, float64."""
    return np.exp(found.astype(np.float64))

  def read(
    self,
    token_trees: Sequence[TokenTree],
    problems: Sequence[str],
    on_share: Callable[[float], None] = lambda share: None,
  ) -> list[np.ndarray]:
    """Returns the class probabilities of encoded solutions, as `by_head` does."""
    found = batching.read(
      token_trees,
      problems,
      self.forward,
      self.mesh,
      self.row_length,
      self.merge,
      on_share,
      self.journal,
    )
    return [self.of_steps(*each) for each in zip(token_trees, found)]

  def encode(self, problem: str, steps: Sequence[str]) -> TokenTree:
    """Lays out a solution and checks it; warns once if one exceeds the model's context length.

    Raises:
      ValueError: as `lay_out`; or the solution has no steps, is too long, or has tokens that the
        model lacks.
    """
    if not steps:
      raise ValueError("a solution without steps")
    tree = self.lay_out(problem, steps)
    if len(tree) > MAX_TOKENS:
      raise ValueError(f"a solution of {len(tree)} tokens; at most {MAX_TOKENS} can be scored")
    if (highest := tree.tokens.max()) >= self.vocab_size:
      raise ValueError(f"token {highest} is beyond the embedding's {self.vocab_size} rows")
    if 0 < (most := self.config.context_length) <= tree.positions.max():
      warnings.warn(
        f"a solution is longer than the model's context of {most:,} tokens; its probabilities may "
        "mean nothing",
        stacklevel=2,
      )
    return tree

  def probabilities(self, solutions: Sequence[Solution]) -> list[np.ndarray]:
    """Returns the mean over heads of `by_head`, each `[steps, C]` or `[1, C]`."""
    solutions = list(solutions)
    for i, given in enumerate(solutions):  # a string would be read as one step per letter
      if not isinstance(given, tuple | list) or len(given) != 2 or isinstance(given[1], str):
        message = f"solution {i} is {json_lines.show(given)}: expected (problem, [step, ...])"
        raise SolutionError(i, message)
    return [probabilities.mean(1) for probabilities in self.by_head(solutions)]

  def by_head(
    self, solutions: Sequence[Solution], on_share: Callable[[float], None] = lambda share: None
  ) -> list[np.ndarray]:
    """Returns the class probabilities of solutions; equal solutions are scored once.

    Args:
      on_share: called now and then with the share of the work done so far.

    Returns:
      float64 arrays in the order of the solutions, each `[steps, K, C]` for a process model, `[1,
      K, C]` for an outcome model: by head, and in the class order of the contract.

    Raises:
      SolutionError: `encode` cannot encode a solution, or its probabilities are `undefined`.
    """
    return self.rate(solutions, on_share)[0]

  def rate(
    self, solutions: Sequence[Solution], on_share: Callable[[float], None] = lambda share: None
  ) -> tuple[list[np.ndarray], int]:
    """Returns what `by_head` does, and the number of tokens of the distinct solutions."""
    distinct: dict[tuple[str, tuple[str, ...]], int] = {}
    index = [distinct.setdefault((p, tuple(steps)), len(distinct)) for p, steps in solutions]
    encoded = []
    for i, (problem, steps) in enumerate(distinct):
      try:
        encoded.append(self.encode(problem, steps))
      except ValueError as error:
        raise SolutionError(index.index(i), str(error)) from error
    results = self.read(encoded, [problem for problem, _ in distinct], on_share)
    if bad := undefined(results):
      raise SolutionError(index.index(bad[0]), UNDEFINED)
    return [results[i] for i in index], sum(map(len, encoded))
