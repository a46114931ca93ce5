"""The scores of a solution's steps, as any program may write them on a line."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from prm_jax import config as config_lib
from prm_jax.runtime.json_lines import BadLine

Probability = Annotated[float, msgspec.Meta(ge=0)]


class Rating(msgspec.Struct, gc=False):
  """The probabilities of a step's three ratings; a missing one is 0."""

  wrong: Probability = msgspec.field(name="-1", default=0.0)
  neutral: Probability = msgspec.field(name="0", default=0.0)
  right: Probability = msgspec.field(name="1", default=0.0)

  def __post_init__(self):
    if not 0.99 <= self.wrong + self.neutral + self.right <= 1.01:  # bfloat16 rounds
      raise ValueError("expected probabilities of -1, 0 and 1 that add up to 1")


class ScoredSteps(msgspec.Struct, gc=False, kw_only=True):
  """The keys of a line with its steps and their scores; None: the line has no such key."""

  steps: list[str] = []
  rating_probs: list[Rating] | None = None
  step_scores: list[config_lib.Share] | None = None  # P(right); `rating_probs` win
  step_std: list[config_lib.Share] | None = None  # of P(right) over an ensemble

  def check(self, steps: Sequence[str], where: str = "") -> None:
    """Raises BadLine, which begins with `where`, unless each list has one value for each step.

    A text that is not split into steps may have any number of `step_scores`.
    """
    count = len(steps) or len(self.step_scores or ())
    given = (self.rating_probs, self.step_scores, self.step_std)
    for name, values in zip(("rating_probs", "step_scores", "step_std"), given):
      if isinstance(values, list) and len(values) != count:
        raise BadLine(f"{where}{len(values)} {name} of {count} steps")
