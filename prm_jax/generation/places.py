"""Which token stands at which place of a context: a trie of token sequences whose nodes are places.

Sequences that begin alike share places, so that a problem's prompt and the steps that solutions
have in common are encoded and stored once.  A place is free when no sequence that is kept needs it.
"""

from collections.abc import Iterable, Sequence


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
