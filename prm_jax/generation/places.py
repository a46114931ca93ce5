"""A trie of the token sequences in a context, whose nodes are places of the cache.

Sequences share the places of a common prefix, so that a problem's prompt and the steps that
solutions share are encoded and stored once.  A place is free when no kept sequence needs it.
"""

from collections.abc import Iterable


class Places:
  """The places of one context."""

  def __init__(self):
    self.size = 0  # most places in use at once so far
    self._child: dict[tuple[int, int], int] = {}  # (place before, token) to place; -1: the start
    self._free: list[int] = []
    self._known: dict[tuple[int, ...], list[int]] = {}  # whole sequences to their places

  def find(self, tokens: tuple[int, ...]) -> list[int]:
    """Returns the places of the sequence's longest stored prefix."""
    if tokens in self._known:
      return self._known[tokens]
    places, place = [], -1
    for token in tokens:
      place = self._child.get((place, token))
      if place is None:
        break
      places.append(place)
    return places

  def add(self, tokens: tuple[int, ...]) -> list[int]:
    """Returns the places of the sequence; missing tokens get free or new places."""
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
    """Frees the places that these sequences do not need."""
    needed = {place for tokens in {*sequences} for place in self.find(tokens)}
    self._known = {}
    self._child = {key: place for key, place in self._child.items() if place in needed}
    self._free = sorted(set(range(self.size)) - needed, reverse=True)


def power_of_two(count: int) -> int:
  """Returns the least power of two that is at least `count`."""
  return 1 << (count - 1).bit_length()


def size(count: int, least: int) -> int:
  """Returns `count` rounded up to a power of two or to 3/4 of one, at least `least`.

  Arrays of these sizes have few shapes, so that few programs are compiled.
  """
  if count <= least:
    return least
  step = max(power_of_two(count) // 4, 1)
  return -(-count // step) * step
