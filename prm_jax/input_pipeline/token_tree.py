"""Step trees to token trees: what the model reads, and where the class head reads it.

A sequence is  [bos] problem separator step separator step separator ...  Problem, steps and
separators are encoded apart and joined as ids, so that a separator is always the same tokens and
training and scoring agree about where a step ends.  (ProcessBench pull request 12: 56.1 against
60.3 mean F1 for that alone.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from prm_jax.input_pipeline.tokenizers import Tokenizer
from prm_jax.types import CLASSES, RATINGS, StepContract, StepTree


@dataclasses.dataclass(frozen=True)
class TokenTree:
  """A tree of tokens in preorder.  All arrays int32; indices count from the tree's first token."""

  tokens: np.ndarray  # [t]
  positions: np.ndarray  # [t] depth
  subtree_end: np.ndarray  # [t] index just past the last descendant
  previous: np.ndarray  # [t] index of the parent; -1: not a language-model target
  read_positions: np.ndarray  # [r] where the head reads
  read_targets: np.ndarray  # [r] class index

  @classmethod
  def of(cls, *fields) -> TokenTree:
    """A tree of these fields, converted to int32."""
    return cls(*(np.asarray(field, np.int32) for field in fields))

  def __len__(self) -> int:
    return len(self.tokens)


def step_contract(
  tokenizer: Tokenizer, separator: str, objective: str, recipe: str, neutral: str = "positive"
) -> StepContract:
  """The contract of a model that is trained with these settings.

  Raises:
    ValueError: the separator is empty.
  """
  ids = tuple(tokenizer.encode(separator))
  if not ids:
    raise ValueError("the separator is empty: there is no token at which to read a step")
  process = objective == "process"
  return StepContract(
    objective=objective,
    classes=CLASSES[objective],
    separator=separator,
    separator_ids=ids,
    read="last separator token" if process else "last solution token",
    neutral=neutral,
    tokenizer_hash=tokenizer.hash,
    recipe=recipe,
  )


def encode(tree: StepTree, tokenizer: Tokenizer, contract: StepContract) -> TokenTree:
  """The tokens of a labelled solution, with the training targets of the contract's objective.

  Raises:
    ValueError: an outcome is to be trained on, and the solution has none.
  """
  tokens, step_ends = _lay_out(tree, tokenizer, contract)
  if contract.objective == "process":
    labelled = [i for i, label in enumerate(tree.labels) if label is not None]
    reads = step_ends[labelled] - 1
    targets = [RATINGS.index(tree.labels[i]) for i in labelled]
  else:
    if tree.outcome is None:
      raise ValueError(f"{tree.source}: no outcome to train an outcome model on")
    reads = np.flatnonzero(tokens.previous >= 0)  # every solution token
    targets = np.full(len(reads), int(tree.outcome))
  return _with_reads(tokens, reads, targets)


def last_read(tree: TokenTree) -> TokenTree:
  """The tree with its last read only, where an outcome model's verdict stands."""
  return _with_reads(tree, tree.read_positions[-1:], tree.read_targets[-1:])


def encode_candidate(
  problem: str, steps: Sequence[str], tokenizer: Tokenizer, contract: StepContract
) -> TokenTree:
  """The tokens of a solution to be scored, read after each step (process) or at its end (outcome).

  The targets are class 0.
  """
  nothing = (None,) * len(steps)
  tree = StepTree(problem, tuple(steps), tuple(range(-1, len(steps) - 1)), nothing)
  tokens, step_ends = _lay_out(tree, tokenizer, contract)
  reads = (step_ends if contract.objective == "process" else step_ends[-1:]) - 1
  return _with_reads(tokens, reads, np.zeros(len(reads)))


def chain(ids: Sequence[int], reads: Sequence[int] = (), first: int = 1) -> TokenTree:
  """Token ids as a tree without branches.

  Args:
    reads: where the head reads; the targets are class 0.
    first: the first language-model target; token 0 is never one.
  """
  index = np.arange(len(ids))
  previous = np.where(index >= max(first, 1), index - 1, -1)
  return TokenTree.of(ids, index, np.full(len(ids), len(ids)), previous, reads, [0] * len(reads))


def _with_reads(tree: TokenTree, positions: np.ndarray, targets: Sequence[int]) -> TokenTree:
  return TokenTree.of(
    tree.tokens, tree.positions, tree.subtree_end, tree.previous, positions, targets
  )


def _lay_out(
  tree: StepTree, tokenizer: Tokenizer, contract: StepContract
) -> tuple[TokenTree, np.ndarray]:
  """Tokens of a tree without reads, and the index just past each step's separator `[S]`."""
  separator = list(contract.separator_ids)
  prompt = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  prompt += tokenizer.encode(tree.problem) + separator
  pieces = [prompt] + [tokenizer.encode(step) + separator for step in tree.steps]
  parents = [-1] + [parent + 1 for parent in tree.parents]  # of nodes; node 0 is the problem

  sizes = [len(piece) for piece in pieces]
  ends = np.cumsum(sizes)
  starts = ends - sizes
  subtree_ends = ends.copy()  # of each node
  for node in range(len(pieces) - 1, 0, -1):
    subtree_ends[parents[node]] = max(subtree_ends[parents[node]], subtree_ends[node])
  depth = np.zeros(len(pieces), np.int64)  # of each node's first token
  previous = np.arange(ends[-1]) - 1
  previous[: ends[0]] = -1  # no language-model target in the problem
  for node in range(1, len(pieces)):
    depth[node] = depth[parents[node]] + sizes[parents[node]]
    previous[starts[node]] = ends[parents[node]] - 1

  tokens = [token for piece in pieces for token in piece]
  node = np.repeat(np.arange(len(pieces)), sizes)  # of each token
  positions = depth[node] + np.arange(ends[-1]) - starts[node]
  return TokenTree.of(tokens, positions, subtree_ends[node], previous, [], []), ends[1:]
