"""Prefix trees of solutions: what solutions of a problem have in common is encoded once.

A decoder's state at a token depends on the tokens before it and on nothing else, so solutions that
begin with the same tokens can share them.  `merge` makes one tree of many, `piece` cuts a part of a
tree out again together with the prefix before it, and `sequences` takes a tree apart into paths.

Trees are cut between leaves.  `starts` are the indices where a leaf's branch begins; cutting there
encodes the `positions[starts]` tokens of the path before it a second time.
"""

from __future__ import annotations

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

  Small branches then stand together behind the large one instead of between its tokens, so that
  fewer blocks of attention are active for a few tokens.

  Args:
    every_read: keep a read once for each tree that has it.  Otherwise reads at the same token with
      the same target are one; another target is always another read.

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
  merged = TokenTree.of(
    tokens[order],
    depths[order],
    np.arange(len(tokens)) + sizes[order],
    np.where(predicted, parents, -1),
    *_reads(trees, indices, every_read),
  )
  return merged, indices


def _union(trees: Sequence[TokenTree]) -> tuple:
  """The distinct tokens of all trees, in preorder, their paths sorted.

  Returns:
    Of each token int arrays `[t]` of id, depth, parent (-1: none) and size of its subtree; and the
    index in them of each token of each tree.
  """
  paths = []  # (token ids as bytes that sort like them, tree, indices of the path's tokens in it)
  for i, tree in enumerate(trees):
    for leaf in starts(tree)[1:] - 1:
      path = np.flatnonzero(tree.subtree_end[: leaf + 1] > leaf)
      paths.append((tree.tokens[path].astype(">u4").tobytes(), i, path))
  paths.sort(key=lambda path: path[:2])
  ids = np.frombuffer(b"".join(path[0] for path in paths), ">u4").astype(np.int32)
  edges = np.append(0, np.cumsum([len(path) for *_, path in paths]))
  depth, new, index = _overlay(ids, edges)

  lengths, added = np.diff(edges), np.add.reduceat(new, edges[:-1], dtype=int)
  # A path ends below what the next one shares with it, at the number of tokens there are by then.
  kept = np.append((lengths - added)[1:], 0)
  ends = depth >= np.repeat(kept, lengths)
  subtree_end = np.zeros(added.sum(), int)
  subtree_end[index[ends]] = np.repeat(np.cumsum(added), lengths)[ends]

  parents = np.where(depth[new] > 0, index[np.flatnonzero(new) - 1], -1)
  indices = [np.zeros(len(tree), np.int64) for tree in trees]
  for (start, stop), (_, i, path) in zip(itertools.pairwise(edges), paths):
    indices[i][path] = index[start:stop]
  return ids[new], depth[new], parents, subtree_end - np.arange(len(subtree_end)), indices


def _overlay(ids: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Finds what each path shares with the one before it, for sorted paths.

  Args:
    ids: token ids of all paths, one path after another.
    edges: where each path begins, and the end.

  Returns:
    Of each token its depth; whether it is new, that is, not shared with the path before; and the
    index among the new tokens of itself or of the one that it shares.
  """
  index, lengths = np.arange(len(ids)), np.diff(edges)
  depth = index - np.repeat(edges[:-1], lengths)
  before = np.repeat(np.append(0, lengths[:-1]), lengths)  # tokens of the path before
  differs = np.flatnonzero((depth >= before) | (ids != ids[index - before]))
  first = np.append(differs, len(ids))[np.searchsorted(differs, edges[:-1])]
  new = index >= np.repeat(np.minimum(first, edges[1:]), lengths)
  node = np.cumsum(new) - 1
  # A shared token is the last new one of its depth before it.
  column = np.argsort(depth, kind="stable")
  node[column] = node[column][np.maximum.accumulate(np.where(new[column], index, 0))]
  return depth, new, node


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


def _reads(
  trees: Sequence[TokenTree], indices: Sequence[np.ndarray], every_read: bool
) -> np.ndarray:
  """Read positions and targets `[2, r]` of a merged tree, sorted; see `merge`."""
  reads = np.stack(
    [
      np.concatenate([index[tree.read_positions] for tree, index in zip(trees, indices)]),
      np.concatenate([tree.read_targets for tree in trees]),
    ]
  )
  return reads[:, np.lexsort(reads[::-1])] if every_read else np.unique(reads, axis=1)


def piece(tree: TokenTree, start: int, stop: int) -> TokenTree:
  """The tokens from `start` to `stop`, two of `starts`, behind the path that leads to them.

  Reads and language-model targets of that path are left to the piece with its first occurrence: the
  pieces from the first start to the last have each of them once.
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
  """The tree without the reads beyond `longest` tokens of a path and without tokens after them."""
  reads = tree.positions[tree.read_positions] < longest
  # A token is kept if there is a read between it and the end of its subtree.
  before = np.searchsorted(np.sort(tree.read_positions[reads]), np.arange(len(tree) + 1))
  index = np.flatnonzero(before[tree.subtree_end] > before[:-1])
  return _subset(tree, index, np.ones(len(index), bool), reads)


def _subset(
  tree: TokenTree, index: np.ndarray, predicted: np.ndarray, reads: np.ndarray
) -> TokenTree:
  """The tree of some tokens of a tree.

  Args:
    index: of these tokens, ascending; of each token the parent is among them.
    predicted: which of them stay language-model targets, if they are any, bool `[t]`.
    reads: which reads are kept, bool `[r]`.
  """
  previous = tree.previous[index]
  return TokenTree.of(
    tree.tokens[index],
    tree.positions[index],
    np.searchsorted(index, tree.subtree_end[index]),
    np.where(predicted & (previous >= 0), np.searchsorted(index, previous), -1),
    np.searchsorted(index, tree.read_positions[reads]),
    tree.read_targets[reads],
  )
