"""ProcessBench: which step of a solution is the first wrong one?"""

from prm_jax.datasets.process_bench.process_bench_dataset_builder import Builder, Solution, read

__all__ = ["Builder", "Solution", "read"]
