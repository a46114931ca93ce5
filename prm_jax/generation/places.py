"""Which token stands at which place of a context: a trie of token sequences whose nodes are places.

Sequences that begin alike share places, so that a problem's prompt and the steps that solutions
have in common are encoded and stored once.  A place is free when no sequence that is kept needs it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from prm_jax.generation import cached_decoder
from prm_jax.generation.cached_decoder import Cache


class Places:
  """The places of one context."""

  def __init__(self):
    self.size = 0  # places that were ever needed at once
    self._child: dict[tuple[int, int], int] = {}  # (place before, token) to place; -1: the start
    self._free: list[int] = []

  def find(self, tokens: Sequence[int]) -> list[int]:
    """The places of the longest beginning of the sequence that is there."""
    places, at = [], -1
    for token in tokens:
      at = self._child.get((at, token))
      if at is None:
        break
      places.append(at)
    return places

  def add(self, tokens: Sequence[int]) -> list[int]:
    """The places of the whole sequence; what is missing gets free ones, or new ones at the end."""
    places = self.find(tokens)
    for token in tokens[len(places) :]:
      if not self._free:
        self._free, self.size = [self.size], self.size + 1
      place = self._free.pop()
      self._child[places[-1] if places else -1, token] = place
      places.append(place)
    return places

  def keep(self, sequences: Iterable[Sequence[int]]) -> None:
    """Frees the places that none of these sequences needs."""
    needed = {place for tokens in sequences for place in self.find(tokens)}
    self._child = {key: place for key, place in self._child.items() if place in needed}
    self._free = sorted(set(range(self.size)) - needed, reverse=True)


def keep_tokens(
  cache: Cache, moved: Mapping[tuple[int, int], tuple[int, int, int]], new: Any = None
) -> Cache:
  """`cached_decoder.keep` of tokens by context and place: their row, index and position."""
  M = power_of_two(len(moved), 64)
  target = np.full((M, 2), np.iinfo(np.int32).max, np.int32)
  source, positions = np.zeros((M, 2), np.int32), np.zeros(M, np.int32)
  target[: len(moved)] = [*moved]
  found = np.array([*moved.values()], np.int32)
  source[: len(moved)], positions[: len(moved)] = found[:, :2], found[:, 2]
  return _keep(cache, source, target, positions, new)


_keep = jax.jit(cached_decoder.keep, donate_argnums=0)
grow = jax.jit(cached_decoder.grown, static_argnums=1)


def power_of_two(count: int, least: int) -> int:
  """The smallest power of two times `least` that is not below the count."""
  return least * 2 ** max(-(-count // least) - 1, 0).bit_length()
