"""PRM800K: raw rows, their exact stored form, and the TFDS builder."""

from prm_jax.datasets.prm800k.prm800k_dataset_builder import (
  Builder,
  Rows,
  RowsBuilder,
  find_dataset,
  numbered,
  read_rows,
)
from prm_jax.datasets.prm800k.records import BadRecord, BadRecords, Record, check_row, read_records

__all__ = [
  "BadRecord",
  "BadRecords",
  "Builder",
  "Record",
  "Rows",
  "RowsBuilder",
  "check_row",
  "find_dataset",
  "numbered",
  "read_records",
  "read_rows",
]
