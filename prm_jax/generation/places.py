"""A trie of the token sequences in a context, whose nodes are places of the cache.

Sequences that begin alike share places, so that a problem's prompt and the steps that solutions
have in common are encoded and stored once.  A place is free when no sequence that is kept needs it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from prm_jax.generation import cache as cache_lib
from prm_jax.generation.cache import Cache


class Places:
  """The places of one context."""

  def __init__(self):
    self.size = 0  # places that were ever needed at once
    self._child: dict[tuple[int, int], int] = {}  # (place before, token) to place; -1: the start
    self._free: list[int] = []
    self._known: dict[tuple[int, ...], list[int]] = {}  # places of sequences that are there

  def find(self, tokens: tuple[int, ...]) -> list[int]:
    """The places of the sequence's longest prefix that is stored."""
    if tokens in self._known:
      return self._known[tokens]
    places, at = [], -1
    for token in tokens:
      at = self._child.get((at, token))
      if at is None:
        break
      places.append(at)
    return places

  def add(self, tokens: tuple[int, ...]) -> list[int]:
    """The places of the whole sequence; what is missing gets free ones, or new ones at the end."""
    places = [*self.find(tokens)]
    for token in tokens[len(places) :]:
      if not self._free:
        self._free, self.size = [self.size], self.size + 1
      place = self._free.pop()
      self._child[places[-1] if places else -1, token] = place
      places.append(place)
    self._known[tokens] = places
    return places

  def keep(self, sequences: Iterable[tuple[int, ...]]) -> None:
    """Frees the places that none of these sequences needs."""
    needed = {place for tokens in {*sequences} for place in self.find(tokens)}
    self._known = {}
    self._child = {key: place for key, place in self._child.items() if place in needed}
    self._free = sorted(set(range(self.size)) - needed, reverse=True)


class Moved(NamedTuple):
  """Tokens that get places in a context; arrays are int32 `[M]`."""

  group: np.ndarray
  place: np.ndarray
  row: np.ndarray  # where their keys and values are now
  column: np.ndarray
  position: np.ndarray

  @classmethod
  def of(cls, group: int, place: Any, row: Any, column: Any, first: int) -> Self:
    """Tokens one after another; `first` is the position of the first."""
    position = np.arange(first, first + len(place), dtype=np.int32)
    given = (group, place, row, column, position)
    return cls(*(np.broadcast_to(np.asarray(x, np.int32), position.shape) for x in given))


def keep_tokens(cache: Cache, moved: Sequence[Moved], new: Any = None) -> Cache:
  """`cache.keep`, with as many tokens as one of a few compiled programs takes."""
  if not moved:
    return cache
  every = np.concatenate(moved, axis=1)
  _, once = np.unique(every[0].astype(np.int64) << 32 | every[1], return_index=True)
  every, count = every[:, once], len(once)
  group, place, row, column, position = np.pad(every, [(0, 0), (0, size(count, 64) - count)])
  place[count:] = np.iinfo(np.int32).max  # dropped
  target, source = np.stack([group, place], axis=1), np.stack([row, column], axis=1)
  return cache_lib.keep(cache, source, target, position, new)


def power_of_two(count: int) -> int:
  """The least power of two that is not below the count."""
  return 1 << (count - 1).bit_length()


def size(count: int, least: int) -> int:
  """The next power of two, or 3/4 of one, at least `least`.

  Arrays padded to it have few shapes, so that few programs are compiled.
  """
  if count <= least:
    return least
  step = max(power_of_two(count) // 4, 1)
  return -(-count // step) * step
