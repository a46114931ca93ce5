"""PRMBench: which steps of a solution are wrong, by class of error?"""

from prm_jax.datasets.prm_bench.prm_bench_dataset_builder import (
  Builder,
  Line,
  Solution,
  read,
  solutions,
)

__all__ = ["Builder", "Line", "Solution", "read", "solutions"]
