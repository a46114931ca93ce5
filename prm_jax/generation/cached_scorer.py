"""A reward model with a cache, for searches: a token of a solution is encoded once, however often
the solution is read as it grows, and once for all solutions of a problem that begin with it.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from prm_jax.generation import cached_decoder
from prm_jax.generation.cached_decoder import Row
from prm_jax.generation.places import Places, grow, keep_tokens, power_of_two
from prm_jax.input_pipeline import prefix_tree, token_tree
from prm_jax.scoring.scorer import Scorer
from prm_jax.training import checkpoint

ROW_TOKENS = 1024  # of a row of new tokens, unless one solution has more
BATCH_TOKENS = 4096  # of the rows that are encoded at once
Solution = tuple[str, tuple[str, ...]]  # a problem and steps
Path = tuple[int, ...]  # tokens up to where a solution is read


class _New(NamedTuple):
  """New tokens of a row, and for each of its paths where they are."""

  group: int
  paths: list[Path]
  cached: list[int]  # tokens of each path that are in the context
  row: dict[str, np.ndarray]  # the fields of `cached_decoder.Row`, before padding
  at: list[np.ndarray]  # index in the row of each path's new tokens


class CachedScorer:
  """A reward model that reads solutions of several problems, each in a context, as they grow."""

  def __init__(self, scorer: Scorer, contexts: int):
    """Raises ValueError for an outcome model, which rates no steps."""
    if scorer.contract.objective == "outcome":
      raise ValueError("an outcome model rates no steps: a search needs a process model")
    self.scorer = scorer
    self.config = scorer.config
    self.places = [Places() for _ in range(contexts)]
    # A solution is asked about several times while it is the newest.
    self._path = functools.lru_cache(2**16)(self._path)
    self.encoded = [0] * contexts  # tokens of each, padding not counted
    with jax.set_mesh(scorer.mesh):
      prepare = functools.partial(cached_decoder.prepare, c=self.config)
      self._weights = jax.jit(prepare)(scorer.params)
      empty = lambda: cached_decoder.empty(self.config, 0, contexts, 256, 1)
      self._cache = jax.jit(empty)()
    self._read: list[tuple[list[_New], Any, Any]] = []  # rows, keys and values since `keep`

  def probabilities(self, asked: Mapping[int, Sequence[Solution]]) -> dict[int, list[np.ndarray]]:
    """Class probabilities after the last step of each solution, float64 `[K, C]`.

    Args:
      asked: solutions by context.  What they share with those that were kept is not encoded again.

    Raises:
      ValueError: a solution cannot be scored.
    """
    paths = {group: [self._path(*each) for each in several] for group, several in asked.items()}
    rows = [row for group, several in paths.items() for row in self._rows(group, several)]
    found: dict[tuple[int, Path], np.ndarray] = {}
    rows.sort(key=lambda new: len(new.row["tokens"]))  # rows of a batch are padded to the longest
    while rows:
      size = _size(len(rows[-1].row["tokens"]))
      batch = rows[-max(BATCH_TOKENS // size, 1) :]
      del rows[-len(batch) :]
      padded = self._padded(batch, power_of_two(len(batch), 1), size)
      with jax.set_mesh(self.scorer.mesh):
        log_probs, keys, values = self._extend(
          self._weights, self.scorer.params, self.scorer.head, self._cache, padded
        )
      self._read.append((batch, keys, values))
      for new, each in zip(batch, np.exp(np.asarray(log_probs, np.float64))):
        found |= {(new.group, path): each[k] for k, path in enumerate(new.paths)}
        self.encoded[new.group] += len(new.row["tokens"])
    return {group: [found[group, path] for path in each] for group, each in paths.items()}

  def keep(self, kept: Mapping[int, Sequence[Solution]]) -> None:
    """Keeps these solutions in their contexts, of those that were last read, and no others."""
    paths = {group: {self._path(*each) for each in several} for group, several in kept.items()}
    for group, several in paths.items():
      self.places[group].keep(several)
    for batch, keys, values in self._read:
      moved: dict[tuple[int, int], tuple[int, int, int]] = {}  # to place: from row and index, depth
      for r, new in enumerate(batch):
        for path, cached, at in zip(new.paths, new.cached, new.at):
          if path in paths.get(new.group, ()):
            places = self.places[new.group].add(path)
            for depth in range(cached, len(path)):
              moved[new.group, places[depth]] = (r, at[depth - cached], depth)
      self._keep(moved, keys, values)
    self._read = []

  def facts(self) -> dict[str, Any]:
    """What decides its scores, as JSON."""
    if self.scorer.directory:
      return {key: value for key, value in self.scorer.facts().items() if key != "model"}
    return dataclasses.asdict(self.scorer.contract) | {
      "weights": checkpoint.digest(self.scorer.params)
    }

  def begin(self, context: int) -> None:
    """Empties a context, for the next problem."""
    self.places[context] = Places()

  @property
  def right_classes(self) -> list[int]:
    """Indices of the classes whose probabilities add up to P(right)."""
    return self.scorer.contract.right_classes

  def length(self, problem: str, steps: Sequence[str]) -> int:
    """Tokens of a solution that is scored from its start."""
    return len(self._path(problem, steps))

  def _path(self, problem: str, steps: Sequence[str]) -> Path:
    """The tokens up to the one where the last step is read."""
    tree = self.scorer.encode(problem, steps)
    read = tree.read_positions[-1]
    return tuple(tree.tokens[: read + 1][tree.subtree_end[: read + 1] > read].tolist())

  def _rows(self, group: int, paths: Sequence[Path]) -> list[_New]:
    """The new tokens of these paths, in as few rows as hold them."""
    cached: dict[Path, list[int]] = {}
    shorter: list[Path] = []  # asked paths that begin this one
    for path in sorted(set(paths)):
      while shorter and path[: len(shorter[-1])] != shorter[-1]:
        shorter.pop()
      shorter.append(path)
      # The last token of each is encoded again, even if it is cached: it is read.
      cached[path] = self.places[group].find(path)[: len(shorter[0]) - 1]
    rows: list[list[Path]] = [[]]
    tokens = 0
    for path in sorted(cached):
      tokens += len(path) - len(cached[path])
      if rows[-1] and tokens > ROW_TOKENS:
        rows.append([])
        tokens = len(path) - len(cached[path])
      rows[-1].append(path)
    return [_merged(group, several, cached) for several in rows if several]

  def _padded(self, batch: Sequence[_New], B: int, S: int) -> Row:
    P = power_of_two(max(len(new.paths) for new in batch), 16)
    C = self._cache.positions.shape[1]
    shape = {"tokens": S, "positions": S, "subtree_end": S, "past": S, "reads": P}
    out = {name: np.zeros((B, size), np.int32) for name, size in shape.items()}
    seen, groups = np.zeros((B, P, C), bool), np.zeros(B, np.int32)
    for r, new in enumerate(batch):
      groups[r] = new.group
      for name, value in new.row.items():
        out[name][r, : len(value)] = value
      for p, (path, cached) in enumerate(zip(new.paths, new.cached)):
        seen[r, p, self.places[new.group].find(path)[:cached]] = True
    return Row(groups, seen=seen, **out)

  def _keep(self, moved: dict, keys: Any, values: Any) -> None:
    if not moved:
      return
    needed = power_of_two(max(each.size for each in self.places), 256)
    with jax.set_mesh(self.scorer.mesh):
      if needed > self._cache.positions.shape[1]:
        self._cache = grow(self._cache, needed)
      self._cache = keep_tokens(self._cache, moved, (keys, values))

  @functools.cached_property
  def _extend(self):
    def extend(weights, params, head, cache, rows: Row):
      hidden, keys, values = cached_decoder.extend(weights, cache, rows, c=self.config)
      B, R, _ = hidden.shape
      at = jnp.broadcast_to(jnp.arange(R), (B, R))
      return self.scorer.log_probs(params, head, hidden, at), keys, values

    return jax.jit(extend)


def _merged(group: int, paths: list[Path], places: Mapping[Path, Sequence[int]]) -> _New:
  """The row of the new tokens of some paths, as a tree."""
  tree, index = prefix_tree.merge([token_tree.chain(path) for path in paths])
  cached = [len(places[path]) for path in paths]
  new = np.ones(len(tree), bool)
  for at, count in zip(index, cached):
    new[at[:count]] = False
  new = np.flatnonzero(new)
  row_index = [np.searchsorted(new, at[count:]) for at, count in zip(index, cached)]
  past = np.zeros(len(new), np.int32)
  for p, at in enumerate(row_index):
    past[at] = p
  row = {
    "tokens": tree.tokens[new],
    "positions": tree.positions[new],
    "subtree_end": np.searchsorted(new, tree.subtree_end[new]),
    "past": past,
    "reads": np.array([at[-1] for at in row_index]),
  }
  return _New(group, paths, cached, row, row_index)


def _size(count: int) -> int:
  """Tokens of a row: the next of 64, 96, 128, 192, 256, ..., so that few programs are compiled."""
  whole = power_of_two(count, 64)
  return whole * 3 // 4 if 64 < count <= whole * 3 // 4 else whole
