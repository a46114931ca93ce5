"""The packed rows that a run is trained and evaluated on, and its batches of them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import grain
import jax

from prm_jax import config as config_lib
from prm_jax.datasets import labelled
from prm_jax.input_pipeline import packing, step_dataset, text_dataset, token_tree, tokenizers
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import distributed, storage
from prm_jax.training import initialization
from prm_jax.training.checkpoint import Metadata
from prm_jax.types import Batch

PREFETCHED = 2  # batches built ahead


@dataclasses.dataclass(frozen=True)
class Rows:
  """The rows of a run, its tokenizer, and the metadata of its checkpoints."""

  train: packing.PackedRows
  evaluation: packing.PackedRows
  manifest: dict[str, Any]  # counts of what was read, packed and dropped, by split
  tokenizer: tokenizers.Tokenizer
  metadata: Metadata  # its config is resolved

  def facts(self, workdir: storage.Path) -> dict[str, Any]:
    """What all hosts of a job must have in common: settings, data, packages, work directory."""
    metadata = dataclasses.asdict(self.metadata)
    del metadata["config"]
    return {
      **config_lib.settings(self.metadata.config, leave_out=config_lib.PER_HOST),
      **metadata,
      **distributed.versions(),
      "hash of the evaluation rows": self.evaluation.hash,
      "python": sys.version.split()[0],
      "workdir": str(workdir),
    }


def read_rows(c: config_lib.Experiment, workdir: storage.Path | None = None) -> Rows:
  """Reads, converts, tokenises and packs both splits.

  Args:
    workdir: of the run, which may have checkpoints; None: of a new run.
  """
  c, tokenizer, vocab_size = initialization.find(c, workdir)
  data, split = c.data, c.data.eval_split
  if c.loss.objective == "language_model":
    contract = text_dataset.contract(tokenizer)
    train = text_dataset.load(data.text_train, tokenizer, data.row_length)
    evaluation = text_dataset.load(data.text_eval, tokenizer, data.row_length)
  else:
    recipe = labelled.read_manifest(data.directory).recipe
    contract = token_tree.step_contract(
      tokenizer,
      data.separator,
      c.loss.objective,
      recipe=recipe.name,
      neutral="negative" if recipe.neutral == "negative" else "positive",
    )
    print(f"reading {data.directory}", file=sys.stderr, flush=True)
    train = step_dataset.load(data, "train", tokenizer, contract)
    evaluation = step_dataset.load(data, split, tokenizer, contract, evaluation=True)
  return Rows(
    train=train[0],
    evaluation=evaluation[0],
    manifest={"train": train[1], split: evaluation[1]},
    tokenizer=tokenizer,
    metadata=Metadata(c, contract, vocab_size, train[0].hash),
  )


def train_batches(
  rows: packing.PackedRows, c: config_lib.Train, mesh: jax.sharding.Mesh, step: int
) -> Iterator[Batch]:
  """The batches of the updates after `step`, built ahead by a thread."""
  order = packing.shuffled(rows, c.seed)

  def batch(step: int) -> Batch:
    return sharding_lib.global_batch(lambda i: order[step * c.batch_rows + i], c.batch_rows, mesh)

  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCHED)
  return iter(grain.MapDataset.range(step, c.steps).map(batch).to_iter_dataset(options))


def eval_batches(
  rows: packing.PackedRows, c: config_lib.Train, mesh: jax.sharding.Mesh
) -> Iterator[Batch]:
  """The batches of an evaluation during training, with each of its rows once."""
  for numbers in packing.eval_order(rows, c.batch_rows, c.eval_rows):
    yield sharding_lib.global_batch(lambda i, of=numbers: rows[of[i]], c.batch_rows, mesh)
