"""A reward model with a key-value cache, for searches.

A token is encoded once, however often its growing solution is scored, and once for all solutions of
a problem that share the prefix up to it.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from prm_jax import config as config_lib
from prm_jax.generation import cache as cache_lib
from prm_jax.generation import cached_decoder
from prm_jax.generation.cached_decoder import Blocks
from prm_jax.generation.places import Places, power_of_two, size
from prm_jax.input_pipeline import prefix_tree, token_tree
from prm_jax.scoring import readouts
from prm_jax.scoring.rater import UNDEFINED, undefined
from prm_jax.scoring.scorer import Scorer

# Limit of a tree's new tokens, as memory grows with their square; a single solution may exceed it.
TREE_TOKENS = 1024
BLOCK = 16  # tokens of a block; the last block of a tree is padded
BATCH_BLOCKS = 64  # limit of blocks encoded at once; a single tree may exceed it
Solution = tuple[str, tuple[str, ...]]  # a problem and steps
Path = tuple[int, ...]  # tokens up to the one at which a solution is read


class _Tree(NamedTuple):
  """New tokens that continue one path of a context."""

  group: int
  past: Sequence[int]  # the places of the path
  paths: list[Path]  # including the past
  new: token_tree.TokenTree  # the tokens of the paths after the past
  at: list[np.ndarray]  # of each path, the indices of its tokens in the tree

  @property
  def blocks(self) -> int:
    return -(-len(self.new) // BLOCK)


class CachedScorer:
  """A reward model that scores solutions as they grow, with a context for each problem."""

  def __init__(self, scorer: Scorer, contexts: int):
    """Raises ValueError for an outcome model, which rates no steps."""
    if scorer.contract.objective == "outcome":
      raise ValueError("an outcome model rates no steps: a search needs a process model")
    self.scorer = scorer
    self.places = [Places() for _ in range(contexts)]
    # A search asks for the paths of its newest solutions several times, and not for older ones.
    self._path = functools.lru_cache(2**12)(functools.partial(_path, scorer))
    self.encoded = [0] * contexts  # tokens encoded so far in each context, without padding
    self._extend = _extend(scorer.graph, scorer.config)
    with jax.set_mesh(scorer.mesh):
      self._weights = cached_decoder.prepare(scorer.params, scorer.config)
      self._cache = cache_lib.empty(scorer.config, 0, contexts, 256, 1)
    # Trees, keys and values of the batches encoded since the last `keep`.
    self._batches: list[tuple[list[_Tree], Any, Any]] = []

  def probabilities(self, asked: Mapping[int, Sequence[Solution]]) -> dict[int, list[np.ndarray]]:
    """Returns class probabilities after the last step of each solution, float64 `[K, C]`.

    Args:
      asked: solutions by context.  The prefixes that they share with kept solutions are not encoded
        again.

    Raises:
      ValueError: a solution cannot be scored, or its probabilities are `undefined`.
    """
    paths = {group: [self._path(*each) for each in several] for group, several in asked.items()}
    trees = [tree for group, several in paths.items() for tree in self._trees(group, several)]
    trees.sort(key=lambda tree: tree.blocks)  # so that the trees of a batch are of similar size
    probabilities: dict[tuple[int, Path], np.ndarray] = {}
    while trees:
      batch, count = [], 0
      while trees and (not batch or count + trees[-1].blocks <= BATCH_BLOCKS):
        batch.append(trees.pop())
        count += batch[-1].blocks
      with jax.set_mesh(self.scorer.mesh):
        log_probs, keys, values = self._extend(
          self._weights, self.scorer.params, self.scorer.head, self._cache, _blocks(batch)
        )
      self._batches.append((batch, keys, values))
      read = [(tree.group, path) for tree in batch for path in tree.paths]
      probabilities |= zip(read, np.exp(np.asarray(log_probs, np.float64)))
      for tree in batch:
        self.encoded[tree.group] += len(tree.new)
    if undefined([*probabilities.values()]):
      raise ValueError(UNDEFINED)
    return {group: [probabilities[group, path] for path in each] for group, each in paths.items()}

  def keep(self, kept: Mapping[int, Sequence[Solution]]) -> None:
    """Stores the tokens of these solutions in their contexts and drops all other tokens there."""
    paths = {group: {self._path(*each) for each in several} for group, several in kept.items()}
    for group, several in paths.items():
      self.places[group].keep(several)
    for batch, keys, values in self._batches:
      moved, start = [], 0
      for tree in batch:
        for path, at in zip(tree.paths, tree.at):
          if path in paths.get(tree.group, ()):
            places = self.places[tree.group].add(path)[len(tree.past) :]
            row, column = divmod(start + at, BLOCK)
            moved.append(cache_lib.moves(tree.group, places, row, column, len(tree.past)))
        start += tree.blocks * BLOCK
      needed = max(each.size for each in self.places)
      with jax.set_mesh(self.scorer.mesh):
        while needed > (C := self._cache.positions.shape[1]):
          # Doubling gives few sizes: each is compiled.
          self._cache = cache_lib.grown(self._cache, 2 * C)
        self._cache = cache_lib.keep(self._cache, moved, (keys, values))
    self._batches = []

  def begin(self, context: int) -> None:
    """Empties a context, for the next problem."""
    self.places[context] = Places()

  def length(self, problem: str, steps: Sequence[str]) -> int:
    """Returns the number of tokens encoded when a solution is scored from its start."""
    return len(self._path(problem, steps))

  def _trees(self, group: int, paths: Sequence[Path]) -> Iterator[_Tree]:
    """Yields the new tokens of these paths as trees; each continues one path of the context."""
    by_past: dict[tuple[int, ...], list[Path]] = {}
    for path in sorted(set(paths)):
      past = self.places[group].find(path[:-1])  # the last token is encoded even if it is cached
      by_past.setdefault(tuple(past), []).append(path)
    for past, several in by_past.items():
      yield from _merged(group, past, several)


def _path(scorer: Scorer, problem: str, steps: Sequence[str]) -> Path:
  """Returns the tokens up to the one at which the last step is read."""
  tree = scorer.encode(problem, steps)
  read = tree.read_positions[-1]
  return tuple(tree.tokens[: read + 1][tree.subtree_end[: read + 1] > read].tolist())


@functools.lru_cache(8)  # searches of one architecture share the compiled program
def _extend(graph: nnx.GraphDef, c: config_lib.Model):
  def extend(weights, params, head, cache, new: Blocks):
    hidden, keys, values = cached_decoder.extend(weights, cache, new, c=c)
    model, at = nnx.merge(graph, params), jnp.arange(len(hidden))[None]
    return readouts.log_probs(model, head, hidden[None], at)[0], keys, values

  return jax.jit(extend)


def _merged(group: int, past: Sequence[int], paths: list[Path]) -> list[_Tree]:
  """Merges the new tokens of sorted paths with a common past into a tree, or into several."""
  tree, at = prefix_tree.merge([token_tree.chain(path[len(past) :]) for path in paths])
  if len(tree) <= TREE_TOKENS or len(paths) == 1:
    return [_Tree(group, past, paths, tree, at)]
  half = len(paths) // 2
  return _merged(group, past, paths[:half]) + _merged(group, past, paths[half:])


def _ancestors(subtree_end: np.ndarray) -> list[np.ndarray]:
  """Returns, for each block of a tree, itself and the blocks with ancestors of its tokens."""
  starts = np.arange(0, len(subtree_end), BLOCK)
  end = np.maximum.reduceat(subtree_end, starts)
  return [np.flatnonzero(end[: b + 1] > start) for b, start in enumerate(starts)]


def _blocks(batch: Sequence[_Tree]) -> Blocks:
  """Cuts the trees into blocks."""
  ancestors = [_ancestors(tree.new.subtree_end) for tree in batch]
  B = size(sum(tree.blocks for tree in batch), 1)
  W = power_of_two(max(len(each) for several in ancestors for each in several))
  P = size(max(len(tree.past) for tree in batch), 64)
  tokens, positions, subtree_end = np.zeros((3, B * BLOCK), np.int32)
  past, (group, past_length) = np.zeros((B, P), np.int32), np.zeros((2, B), np.int32)
  attended, reads, block = np.full((B, W), B, np.int32), [], 0
  for tree, several in zip(batch, ancestors):
    start, blocks = block * BLOCK, slice(block, block + tree.blocks)
    new = slice(start, start + len(tree.new))
    tokens[new], positions[new] = tree.new.tokens, len(tree.past) + tree.new.positions
    subtree_end[new] = start + tree.new.subtree_end
    for b, each in enumerate(several, block):
      attended[b, : len(each)] = block + each
    group[blocks], past_length[blocks] = tree.group, len(tree.past)
    past[blocks, : len(tree.past)] = tree.past
    reads += [start + at[-1] for at in tree.at]
    block += tree.blocks
  reads = np.pad(np.array(reads, np.int32), (0, max(power_of_two(len(reads)), 16) - len(reads)))
  tokens, positions, subtree_end = (x.reshape(B, BLOCK) for x in (tokens, positions, subtree_end))
  return Blocks(tokens, positions, subtree_end, attended, group, past, past_length, reads)
