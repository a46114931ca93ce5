"""The check of step scores in a line that another program may have written."""

from collections.abc import Mapping, Sequence
from typing import Any

from prm_jax.runtime import json_lines


def near_one(total: Any) -> Any:
  """Returns whether sums of probabilities are 1 up to the rounding of bfloat16."""
  return (total >= 0.99) & (total <= 1.01)


def check(
  steps: Sequence[str],
  rating_probs: Sequence[Mapping[str, float]] | None,
  **others: Sequence[float] | None,
) -> None:
  """Raises ValueError unless each step has one of each, and probabilities that sum to 1.

  None: the line has no such key.
  """
  for name, given in {"rating_probs": rating_probs, **others}.items():
    if given is not None and len(given) != len(steps):
      raise ValueError(f"{len(given)} {name} of {len(steps)} steps")
  for i, row in enumerate(rating_probs or ()):
    if not near_one(sum(row.get(name, 0.0) for name in ("-1", "0", "1"))):
      shown = json_lines.show(row)
      raise ValueError(f"rating_probs[{i}] is {shown}: expected probabilities of -1, 0 and 1")
