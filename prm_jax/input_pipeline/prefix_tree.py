"""Prefix trees of several solutions: what they have in common is encoded once.

A decoder's state at a token depends on the tokens before it and on nothing else, so solutions that
begin with the same tokens may share them.  `merge` makes one tree of many, `piece` cuts part of a
tree out again with the prefix it hangs off, and `sequences` takes it apart into paths.

The leaves of a tree in preorder are the unit of cutting.  From one leaf to the next, `starts` are
the places where a new branch begins and `positions[starts]` is how much of the path before is kept:
the price, in tokens encoded again, of cutting there.
"""

from __future__ import annotations

import dataclasses
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
  """One tree of the distinct tokens of many; of branches, the largest comes first.

  Small branches then stand together behind the large one instead of between its tokens, so that
  fewer blocks of attention are live for a few tokens.

  Args:
    every_read: keep a read that several trees have at the same token with the same target, so that
      each counts.  Otherwise it counts once; one with another target is always kept beside it.

  Returns:
    The tree, its reads in order of position; and for each of `trees` the place of its tokens in it.
  """
  paths = []  # (token ids as bytes that sort like them, tree, the path's tokens in it)
  for i, tree in enumerate(trees):
    for leaf in starts(tree)[1:] - 1:
      path = np.flatnonzero(tree.subtree_end[: leaf + 1] > leaf)
      paths.append((tree.tokens[path].astype(">u4").tobytes(), i, path))
  paths.sort(key=lambda path: path[:2])
  ids = np.frombuffer(b"".join(path[0] for path in paths), ">u4").astype(np.int32)
  edges = np.append(0, np.cumsum([len(path) for *_, path in paths]))
  spans = list(itertools.pairwise(edges))
  depth, new, overlaid = _overlay(ids, edges)
  added = np.add.reduceat(new, edges[:-1], dtype=int)  # tokens that each path brings
  tokens, positions, total = ids[new], depth[new], added.sum()
  parents = np.where(positions > 0, overlaid[np.flatnonzero(new) - 1], -1)
  # Where a path leaves the one before, what is left of that one ends.
  subtree_end = np.full(total, total)
  kept = (np.diff(edges) - added)[1:]
  for (start, stop), shared, end in zip(spans, kept, np.cumsum(added)):
    subtree_end[overlaid[start + shared : stop]] = end
  places = [np.zeros(len(tree), np.int64) for tree in trees]
  for (start, stop), (_, i, path) in zip(spans, paths):
    places[i][path] = overlaid[start:stop]
  moved = _largest_first(parents, subtree_end)
  old = np.argsort(moved)
  tokens, positions = tokens[old], positions[old]
  parents = np.append(moved, -1)[parents[old]]
  subtree_end = np.arange(total) + (subtree_end - np.arange(total))[old]
  places = [moved[place] for place in places]
  predicted = np.zeros(total, bool)
  for tree, place in zip(trees, places):
    predicted[place[tree.previous >= 0]] = True
  reads = np.stack(
    [
      np.concatenate([place[tree.read_positions] for tree, place in zip(trees, places)]),
      np.concatenate([tree.read_targets for tree in trees]),
    ]
  )
  if every_read:
    reads = reads[:, np.lexsort(reads[::-1])]
  else:
    reads = np.unique(reads, axis=1)
  fields = (tokens, positions, subtree_end, np.where(predicted, parents, -1), *reads)
  return TokenTree(*(np.asarray(field, np.int32) for field in fields)), places


def _overlay(ids: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Lays sorted paths over one another: their token ids, one path after another between `edges`.

  Returns:
    For each token how deep in its path it stands, whether it is new, that is, not shared with the
    path before, and its place among the new ones: the one it is or the one it shares.
  """
  index, lengths = np.arange(len(ids)), np.diff(edges)
  depth = index - np.repeat(edges[:-1], lengths)
  before = np.repeat(np.append(0, lengths[:-1]), lengths)  # tokens of the path before
  differs = np.flatnonzero((depth >= before) | (ids != ids[index - before]))
  first = np.append(differs, len(ids))[np.searchsorted(differs, edges[:-1])]
  new = index >= np.repeat(np.minimum(first, edges[1:]), lengths)
  place = np.cumsum(new) - 1
  # What is shared has the place of the last new token of its depth before it.
  column = np.argsort(depth, kind="stable")
  place[column] = place[column][np.maximum.accumulate(np.where(new[column], index, 0))]
  return depth, new, place


def _largest_first(parents: np.ndarray, subtree_end: np.ndarray) -> np.ndarray:
  """Where each token goes when siblings stand by the size of their subtrees; -1 is no parent."""
  size = subtree_end - np.arange(len(parents))
  order = np.lexsort((-size, parents))  # stable: equals stay in their order
  before = np.cumsum(size[order]) - size[order]
  first = np.searchsorted(parents[order], parents[order])  # of each one's siblings
  step = np.zeros(len(parents) + 1, np.int64)  # from one's parent's place to one's own
  step[order] = before - before[first] + (parents[order] >= 0)
  # A place is the sum of such steps along the path: each counts until its subtree ends.
  return np.cumsum(step[:-1] - np.bincount(subtree_end, step[:-1], len(step))[:-1]).astype(int)


def piece(tree: TokenTree, start: int, stop: int) -> TokenTree:
  """The tokens from `start` to `stop`, two of `starts`, behind the path they hang off.

  The path's own reads and language-model targets stay with the piece that has its tokens in their
  first place, so that pieces from the first start to the last have each of them once.
  """
  prefix = np.flatnonzero(tree.subtree_end[:start] > start)
  index = np.concatenate([prefix, np.arange(start, stop)])
  new = np.full(len(tree) + 1, -1)
  new[index] = np.arange(len(index))
  previous = tree.previous[index]
  previous[: len(prefix)] = -1
  read = (tree.read_positions >= start) & (tree.read_positions < stop)
  fields = (
    tree.tokens[index],
    tree.positions[index],
    new[np.clip(tree.subtree_end[index], 0, stop) - 1] + 1,
    np.where(previous < 0, -1, new[previous]),
    new[tree.read_positions[read]],
    tree.read_targets[read],
  )
  return TokenTree(*(np.asarray(field, np.int32) for field in fields))


def sequences(trees: Iterable[TokenTree]) -> list[TokenTree]:
  """Each path from root to leaf by itself; what is read where paths agree stays with the first."""
  cuts = ((tree, starts(tree)) for tree in trees)
  return [piece(tree, *ends) for tree, at in cuts for ends in itertools.pairwise(at)]


def shorten(tree: TokenTree, longest: int) -> TokenTree:
  """The tree without reads beyond that many tokens of a path, and tokens that lead to no read."""
  read = tree.positions[tree.read_positions] < longest
  kept = tree.read_positions[read]
  # How many kept reads stand before each place, and so between a token and its subtree's end.
  before = np.searchsorted(np.sort(kept), np.arange(len(tree) + 1))
  index = np.flatnonzero(before[tree.subtree_end] > before[:-1])
  new = np.full(len(tree), -1)
  new[index] = np.arange(len(index))
  at = np.searchsorted(index, tree.subtree_end[index])  # tokens kept before the subtree's end
  previous = tree.previous[index]
  fields = (
    tree.tokens[index],
    tree.positions[index],
    at,
    np.where(previous < 0, -1, new[previous]),
    new[kept],
    tree.read_targets[read],
  )
  return dataclasses.replace(
    tree, **{f.name: np.asarray(v, np.int32) for f, v in zip(dataclasses.fields(tree), fields)}
  )
