"""Step trees to token trees: what the model reads, and where its head is read.

A sequence is  [bos] problem separator step separator step separator ...  Problem, steps and
separators are encoded apart and joined as ids, so that a separator is always the same tokens and
training and scoring cannot disagree about where a step ends (ProcessBench pull request 12: 56.1
against 60.3 mean F1 for that alone).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from prm_jax.input_pipeline.tokenizers import Tokenizer
from prm_jax.types import CLASSES, RATINGS, StepContract, StepTree


@dataclasses.dataclass(frozen=True)
class TokenTree:
  """A step tree in preorder.  All arrays int32; indices count from the tree's first token."""

  tokens: np.ndarray  # [t]
  positions: np.ndarray  # [t] depth
  subtree_end: np.ndarray  # [t] index just past the last descendant
  previous: np.ndarray  # [t] index of the token before it on its path; -1 in the problem
  read_positions: np.ndarray  # [r] where the head reads
  read_targets: np.ndarray  # [r] class index

  def __len__(self) -> int:
    return len(self.tokens)


def step_contract(
  tokenizer: Tokenizer, separator: str, objective: str, recipe: str, neutral: str = "positive"
) -> StepContract:
  """The contract that training with these settings produces."""
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
  """Lays a step tree out in preorder, with the training targets of the contract's objective."""
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
  return dataclasses.replace(tokens, read_positions=_int32(reads), read_targets=_int32(targets))


def last_read(tree: TokenTree) -> TokenTree:
  """The tree with its last read only: where an outcome model's verdict stands."""
  return dataclasses.replace(
    tree, read_positions=tree.read_positions[-1:], read_targets=tree.read_targets[-1:]
  )


def encode_candidate(
  problem: str, steps: Sequence[str], tokenizer: Tokenizer, contract: StepContract
) -> TokenTree:
  """A solution to be scored: read after each step (process) or at its end (outcome)."""
  nothing = (None,) * len(steps)
  chain = StepTree(problem, tuple(steps), tuple(range(-1, len(steps) - 1)), nothing)
  tokens, step_ends = _lay_out(chain, tokenizer, contract)
  reads = (step_ends if contract.objective == "process" else step_ends[-1:]) - 1
  return dataclasses.replace(
    tokens, read_positions=_int32(reads), read_targets=np.zeros(len(reads), np.int32)
  )


def _lay_out(
  tree: StepTree, tokenizer: Tokenizer, contract: StepContract
) -> tuple[TokenTree, np.ndarray]:
  """Tokens of a tree without reads, and the index just past each step's separator `[S]`."""
  separator = list(contract.separator_ids)
  prompt = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  prompt += tokenizer.encode(tree.problem) + separator
  pieces = [prompt] + [tokenizer.encode(step) + separator for step in tree.steps]
  parents = [-1] + [parent + 1 for parent in tree.parents]  # node 0 is the problem

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

  node = np.repeat(np.arange(len(pieces)), sizes)  # of each token
  empty = np.zeros(0, np.int32)
  tokens = TokenTree(
    tokens=_int32([token for piece in pieces for token in piece]),
    positions=_int32(depth[node] + np.arange(ends[-1]) - starts[node]),
    subtree_end=_int32(subtree_ends[node]),
    previous=_int32(previous),
    read_positions=empty,
    read_targets=empty,
  )
  return tokens, ends[1:]


def chain(ids: Sequence[int], reads: Sequence[int] = (), first: int = 1) -> TokenTree:
  """Token ids as a tree without branches.

  Args:
    reads: where the head reads; their targets are class 0.
    first: the first language-model target; the very first token is never one.
  """
  index = np.arange(len(ids))
  return TokenTree(
    tokens=_int32(ids),
    positions=_int32(index),
    subtree_end=_int32(np.full(len(ids), len(ids))),
    previous=_int32(np.where(index >= max(first, 1), index - 1, -1)),
    read_positions=_int32(reads),
    read_targets=np.zeros(len(reads), np.int32),
  )


def _int32(values) -> np.ndarray:
  return np.asarray(values, np.int32)
