"""PRM800K: the format of its records, the TFDS dataset of them, and recipes for its labels."""

from prm_jax.datasets.prm800k.prm800k_dataset_builder import (
  Builder,
  RecordsBuilder,
  examples,
)
from prm_jax.datasets.prm800k.recipes import step_trees
from prm_jax.datasets.prm800k.records import Record, numbered, read_records
from prm_jax.datasets.prm800k.stored import find_dataset, stored_records

__all__ = [
  "Builder",
  "Record",
  "RecordsBuilder",
  "examples",
  "find_dataset",
  "numbered",
  "read_records",
  "step_trees",
  "stored_records",
]
