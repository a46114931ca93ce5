"""The MATH problems as PRM800K splits them."""

from prm_jax.datasets.math_splits.math_splits_dataset_builder import Builder, read_problems

__all__ = ["Builder", "read_problems"]
