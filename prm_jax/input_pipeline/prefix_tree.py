"""Prefix trees of solutions: tokens that solutions of a problem share are encoded once.

A decoder's state at a token depends only on the tokens before it, so solutions that begin with the
same tokens can share them.  A tree can be cut where a leaf's branch begins (`starts`); the cut
repeats the `positions[starts]` tokens of the path to that branch.
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from prm_jax.input_pipeline.token_tree import TokenTree


def starts(tree: TokenTree) -> np.ndarray:
  """Returns the token at which each leaf's branch begins, and the tree's end: `[leaves + 1]`."""
  leaves = np.flatnonzero(tree.subtree_end == np.arange(len(tree)) + 1)
  return np.concatenate([[0], leaves + 1])


def merge(
  trees: Sequence[TokenTree], every_read: bool = False
) -> tuple[TokenTree, list[np.ndarray]]:
  """Merges trees into one prefix tree, in which the largest of sibling subtrees comes first.

  This order groups small branches, so that fewer attention blocks are active for a few tokens each.

  Args:
    every_read: keep the reads of every tree.  Otherwise the first tree's read stands for all reads
      at the same token with the same target.

  Returns:
    The merged tree, with reads sorted by position; and, for each tree, the indices of its tokens in
    the merged one.
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
  keys = np.column_stack([positions, -targets])  # reads at one token are sorted by class
  kept = np.lexsort(keys.T[::-1]) if every_read else np.unique(keys, axis=0, return_index=True)[1]
  end = np.arange(len(tokens)) + sizes[order]
  previous = np.where(predicted, parents, -1)
  reads = positions[kept], targets[kept], solutions[kept]
  return TokenTree(tokens[order], depths[order], end, previous, *reads), indices


def _union(trees: Sequence[TokenTree]) -> tuple:
  """Finds the distinct tokens of all trees, in preorder.

  Returns:
    Ids, depths, parents (-1: none) and subtree sizes; and, for each tree, its tokens' indices.
  """
  paths = []  # (token ids as bytes that sort like them, tree, indices of the path's tokens in it)
  for i, tree in enumerate(trees):
    is_chain = len(tree) == tree.subtree_end.min()  # most trees are, and need no search
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
  """Returns each token's new index in preorder when siblings are sorted by subtree size."""
  order = np.lexsort((-sizes, parents))  # stable: equal siblings stay in their order
  before = np.cumsum(sizes[order]) - sizes[order]
  first = np.searchsorted(parents[order], parents[order])  # of each token's siblings
  step = np.zeros(len(parents) + 1, np.int64)  # from the parent's new index to the token's
  step[order] = before - before[first] + (parents[order] >= 0)
  # The new index is the sum of the steps along the path: each counts until its subtree ends.
  end = np.arange(len(parents)) + sizes
  return np.cumsum(step[:-1] - np.bincount(end, step[:-1], len(step))[:-1]).astype(int)


def piece(tree: TokenTree, start: int, stop: int) -> TokenTree:
  """Returns the tokens from `start` to `stop`, two of `starts`, after the path that leads to them.

  The path has neither reads nor targets here: they belong to the first piece that holds it.
  """
  prefix = np.flatnonzero(tree.subtree_end[:start] > start)
  index = np.concatenate([prefix, np.arange(start, stop)])
  reads = (tree.read_positions >= start) & (tree.read_positions < stop)
  return _subset(tree, index, index >= start, reads)


def tokens_of_paths(tree: TokenTree) -> int:
  """Returns the total number of tokens of the paths from root to leaf, without sharing."""
  leaves = starts(tree)[1:] - 1
  return int((tree.positions[leaves] + 1).sum())


def sequences(trees: Iterable[TokenTree]) -> list[TokenTree]:
  """Returns each path from root to leaf as a chain; a shared read stays with the first path."""
  cuts = ((tree, starts(tree)) for tree in trees)
  return [piece(tree, *ends) for tree, at in cuts for ends in itertools.pairwise(at)]


def shorten(tree: TokenTree, longest: int) -> TokenTree:
  """Keeps only the reads in the first `longest` tokens of a path, and the paths to them."""
  reads = tree.positions[tree.read_positions] < longest
  # A token is kept if there is a read between it and the end of its subtree.
  before = np.searchsorted(np.sort(tree.read_positions[reads]), np.arange(len(tree) + 1))
  index = np.flatnonzero(before[tree.subtree_end] > before[:-1])
  return _subset(tree, index, np.ones(len(index), bool), reads)


def _subset(
  tree: TokenTree, index: np.ndarray, predicted: np.ndarray, reads: np.ndarray
) -> TokenTree:
  """Returns the tree of the tokens at `index`, which is ascending and has every token's parent.

  Args:
    predicted: bool `[t]`; where it is False, tokens are not language-model targets.
    reads: mask of the reads to keep.
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
