"""The MATH problems as PRM800K splits them."""

from prm_jax.datasets.math_splits.math_splits_dataset_builder import (
  FILES,
  Builder,
  Problem,
  find_test,
  read_problems,
)

__all__ = ["FILES", "Builder", "Problem", "find_test", "read_problems"]
