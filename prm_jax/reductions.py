"""The names of the reductions of step scores to one score for a solution.

Command lines offer them, so this module does not import JAX.
"""

from typing import Literal, get_args

Reduction = Literal["product", "min", "mean", "last", "soft_min"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
LEAST_TEMPERATURE = 1e-6  # of a softmin: much below it, 1 / temperature is infinite in float32
