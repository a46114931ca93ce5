"""Names of the reductions of step scores to one score, for command lines that do not import JAX."""

from typing import Literal

Reduction = Literal["product", "min", "mean", "last", "soft_min"]
