"""The generated default dataset, stored as records of PRM800K's format."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow_datasets as tfds

from prm_jax.datasets.prm800k import RecordsBuilder, examples, numbered


class Builder(RecordsBuilder):
  """Arithmetic problems with simulated step-by-step solutions and exact labels."""

  VERSION = tfds.core.Version("1.0.0")

  def __init__(self, *, rows: Mapping[str, Iterable[dict[str, Any]]] | None = None, **kwargs):
    """Args: rows: JSON objects of each split; needed to write, not to read."""
    self._rows = rows
    super().__init__(**kwargs)

  def _shard_iterators_per_split(self, dl_manager):
    return {
      split: [functools.partial(examples, numbered(objects, f"arithmetic_{split}"))]
      for split, objects in (self._rows or {}).items()
    }
