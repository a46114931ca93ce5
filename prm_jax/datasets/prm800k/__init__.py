"""PRM800K: the format of its records, the TFDS dataset of them, and recipes for its labels."""

from prm_jax.datasets.prm800k.prm800k_dataset_builder import Builder, RecordsBuilder, stored_records
from prm_jax.datasets.prm800k.records import numbered, read_records

__all__ = ["Builder", "RecordsBuilder", "numbered", "read_records", "stored_records"]
