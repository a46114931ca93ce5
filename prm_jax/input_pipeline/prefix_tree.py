"""Prefix trees of solutions: what solutions of a problem have in common is encoded once.

A decoder's state at a token depends on the tokens before it only, so solutions that begin with the
same tokens can share them.  Trees are cut where a leaf's branch begins (`starts`); cutting there
encodes the `positions[starts]` tokens of the path before it a second time.
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from prm_jax.input_pipeline.token_tree import TokenTree


def starts(tree: TokenTree) -> np.ndarray:
  """Where each leaf's branch begins, and the tree's end: int `[leaves + 1]`."""
  leaves = np.flatnonzero(tree.subtree_end == np.arange(len(tree)) + 1)
  return np.concatenate([[0], leaves + 1])


def merge(
  trees: Sequence[TokenTree], every_read: bool = False
) -> tuple[TokenTree, list[np.ndarray]]:
  """One tree of the distinct tokens of many; among siblings, the largest subtree comes first.

  Small branches then stand together, so that fewer blocks of attention are active for a few tokens.

  Args:
    every_read: keep a read once for each tree that has it.  Otherwise reads at the same token with
      the same target are one, of the first tree; another target is always another read.

  Returns:
    The tree, its reads sorted by position; and the index in it of each token of each tree.
  """
  tokens, depths, parents, sizes, indices = _union(trees)
  moved = _largest_first(parents, sizes)
  order = np.argsort(moved)
  parents = np.append(moved, -1)[parents[order]]  # the appended -1 is a root's
  indices = [moved[index] for index in indices]
  predicted = np.zeros(len(tokens), bool)
  for tree, index in zip(trees, indices):
    predicted[index[tree.previous >= 0]] = True
  positions = np.concatenate([index[tree.read_positions] for tree, index in zip(trees, indices)])
  targets, solutions = (
    np.concatenate([getattr(tree, name) for tree in trees])
    for name in ("read_targets", "read_solutions")
  )
  keys = np.column_stack([positions, -targets])  # of reads at a token, the first class comes first
  kept = np.lexsort(keys.T[::-1]) if every_read else np.unique(keys, axis=0, return_index=True)[1]
  end = np.arange(len(tokens)) + sizes[order]
  previous = np.where(predicted, parents, -1)
  reads = positions[kept], targets[kept], solutions[kept]
  return TokenTree(tokens[order], depths[order], end, previous, *reads), indices


def _union(trees: Sequence[TokenTree]) -> tuple:
  """The distinct tokens of all trees in preorder: ids, depths, parents (-1: none), subtree sizes.

  Last come the indices of each tree's tokens among them.
  """
  paths = []  # (token ids as bytes that sort like them, tree, indices of the path's tokens in it)
  for i, tree in enumerate(trees):
    is_chain = len(tree) == tree.subtree_end.min()  # as most are: found without a search
    for leaf in [len(tree) - 1] if is_chain else starts(tree)[1:] - 1:
      path = np.arange(leaf + 1)
      path = path if is_chain else path[tree.subtree_end[: leaf + 1] > leaf]
      paths.append((tree.tokens[path].astype(">u4").tobytes(), i, path))
  paths.sort(key=lambda path: path[:2])

  ids, depths, parents, sizes = table = np.zeros((4, sum(map(len, trees))), int)
  indices = [np.zeros(len(tree), int) for tree in trees]
  count = 0
  before = at = np.zeros(0, int)  # ids and indices of the tokens of the path before
  for _, i, path in paths:
    tokens = trees[i].tokens[path]
    shorter = min(len(before), len(path))
    shared = int(np.append(before[:shorter] != tokens[:shorter], True).argmax())
    new = slice(count, count + len(path) - shared)
    sizes[at[shared:]] = count - at[shared:]
    at = np.append(at[:shared], np.arange(new.start, new.stop))
    ids[new], depths[new] = tokens[shared:], np.arange(shared, len(path))
    parents[new] = np.append(-1, at)[shared:-1]
    indices[i][path] = at
    before, count = tokens, new.stop
  sizes[at] = count - at
  return *table[:, :count], indices


def _largest_first(parents: np.ndarray, sizes: np.ndarray) -> np.ndarray:
  """The new index of each token of a tree in preorder when siblings are sorted by subtree size."""
  order = np.lexsort((-sizes, parents))  # stable: equal siblings stay in their order
  before = np.cumsum(sizes[order]) - sizes[order]
  first = np.searchsorted(parents[order], parents[order])  # of each token's siblings
  step = np.zeros(len(parents) + 1, np.int64)  # from the parent's new index to the token's
  step[order] = before - before[first] + (parents[order] >= 0)
  # The new index is the sum of the steps along the path: each counts until its subtree ends.
  end = np.arange(len(parents)) + sizes
  return np.cumsum(step[:-1] - np.bincount(end, step[:-1], len(step))[:-1]).astype(int)


def piece(tree: TokenTree, start: int, stop: int) -> TokenTree:
  """The tokens from `start` to `stop`, two of `starts`, behind the path that leads to them.

  That path has no reads and targets: they belong to the piece in which it occurs first.
  """
  prefix = np.flatnonzero(tree.subtree_end[:start] > start)
  index = np.concatenate([prefix, np.arange(start, stop)])
  reads = (tree.read_positions >= start) & (tree.read_positions < stop)
  return _subset(tree, index, index >= start, reads)


def sequences(trees: Iterable[TokenTree]) -> list[TokenTree]:
  """Each path from root to leaf by itself; a read that paths share stays with the first."""
  cuts = ((tree, starts(tree)) for tree in trees)
  return [piece(tree, *ends) for tree, at in cuts for ends in itertools.pairwise(at)]


def shorten(tree: TokenTree, longest: int) -> TokenTree:
  """The tree cut to the reads in the first `longest` tokens of a path, and the paths to them."""
  reads = tree.positions[tree.read_positions] < longest
  # A token is kept if there is a read between it and the end of its subtree.
  before = np.searchsorted(np.sort(tree.read_positions[reads]), np.arange(len(tree) + 1))
  index = np.flatnonzero(before[tree.subtree_end] > before[:-1])
  return _subset(tree, index, np.ones(len(index), bool), reads)


def _subset(
  tree: TokenTree, index: np.ndarray, predicted: np.ndarray, reads: np.ndarray
) -> TokenTree:
  """The tree of the tokens at `index` (ascending; with each token its parent), and of some reads.

  Tokens outside `predicted`, bool `[t]`, stop being language-model targets.
  """
  previous = tree.previous[index]
  return TokenTree(
    tree.tokens[index],
    tree.positions[index],
    np.searchsorted(index, tree.subtree_end[index]),
    np.where(predicted & (previous >= 0), np.searchsorted(index, previous), -1),
    np.searchsorted(index, tree.read_positions[reads]),
    tree.read_targets[reads],
    tree.read_solutions[reads],
  )
