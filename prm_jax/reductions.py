"""The names of the reductions of step scores to one score; command lines read them without JAX."""

from typing import Literal

Reduction = Literal["product", "min", "mean", "last", "soft_min"]
