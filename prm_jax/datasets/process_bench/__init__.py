"""ProcessBench: which step of a solution is the first wrong one?"""

from prm_jax.datasets.process_bench.process_bench_dataset_builder import (
  SUBSETS,
  Builder,
  Solution,
  files,
  read,
)

__all__ = ["SUBSETS", "Builder", "Solution", "files", "read"]
