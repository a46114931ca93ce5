"""The generated default dataset, in PRM800K's own row format: it takes the same road.

rows = {"train": generate_rows(seed=0, ...), "test": generate_rows(seed=1, ...)}
Builder(rows=rows, data_dir="out").download_and_prepare()
prm800k.read_rows("out", "train")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow_datasets as tfds

from prm_jax.datasets import prm800k


class Builder(prm800k.RowsBuilder):
  """Arithmetic problems with simulated step-by-step solutions and exact labels."""

  VERSION = tfds.core.Version("1.0.0")

  def __init__(self, *, rows: Mapping[str, Iterable[dict[str, Any]]] | None = None, **kwargs):
    """Args: rows: PRM800K rows of each split; needed to write, not to read."""
    splits = None
    if rows is not None:
      splits = {s: prm800k.numbered(r, f"arithmetic_{s}") for s, r in rows.items()}
    super().__init__(splits=splits, **kwargs)
