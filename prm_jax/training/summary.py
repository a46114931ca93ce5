"""The first lines of a run on the screen: model, data and devices, and what may be a mistake."""

from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

from prm_jax import config as config_lib
from prm_jax.input_pipeline import packing, step_dataset
from prm_jax.runtime import compiler_options
from prm_jax.training import evaluations
from prm_jax.training.checkpoint import Metadata


def lines(
  metadata: Metadata, manifest: dict[str, Any], mesh: Mesh, params: int, start: int
) -> Iterator[str]:
  """Yields the lines about model, data and devices.

  Args:
    manifest: of the training rows (`step_dataset.load`).
    params: number of parameters.
    start: updates made before this process.
  """
  c, objective = metadata.config, metadata.config.loss.objective
  targets = ", ".join(f"{count} {name}" for name, count in manifest["targets"].items())
  if objective == "outcome":
    targets = f"targets, one a token: {targets}"
  examples = "texts" if objective == "language_model" else "solutions"
  epochs = c.train.steps * c.train.batch_rows / manifest["rows"]
  devices = f"{mesh.size} {mesh.devices.flat[0].platform} device(s) as {dict(mesh.shape)}"
  yield f"{objective.replace('_model', '')} model, {params:,} parameters, on {devices}"
  yield (
    f"{manifest['examples']:,} {examples} ({targets}), {manifest['tokens']:,} tokens in "
    f"{manifest['rows']:,} rows of {c.data.row_length} ({manifest['fill']:.1%} full), "
    f"{c.train.steps} steps = {epochs:.1f} epochs"
  )
  if manifest.get("merged"):
    paths, times = manifest["tokens_of_paths"], manifest["tokens_of_paths"] / manifest["tokens"]
    yield f"prefix trees: {paths:,} tokens path by path, {times:.2f} times as many"
  if longer := manifest["longer_than_a_row"]:
    what, lost = "longer than a row, left out", 0
    if objective != "outcome":
      what, lost = "cut at a row's end", sum(each.get("targets_lost", 0) for each in longer)
    labels = f", {lost:,} of their labels lost" if lost else ""
    yield f"{what}: {len(longer)} of the {examples}{labels}; {step_dataset.room(longer)}"
  if objective != "language_model":
    yield f"steps end with {metadata.contract.described_separator}"
  options = compiler_options.of(c.tpu, mesh.devices.flat[0], "train")
  if options:
    yield f"compiler options: {' '.join(f'{k}={v}' for k, v in options.items())}"
  elif c.tpu.compiler_options:
    yield "tpu.compiler_options are ignored: the devices are not TPUs"
  if start:
    yield f"resuming at step {start}"


def warnings(c: config_lib.Experiment, rows: packing.PackedRows, start: int) -> Iterator[str]:
  """Yields why a run of these settings on these rows may not do what its user expects."""
  longest = max(int(tree.positions.max()) for tree in rows.trees) + 1
  if 0 < c.model.context_length < longest:
    yield (
      f"a training example has {longest:,} tokens, more than the model's context of "
      f"{c.model.context_length:,}: later tokens may mean nothing"
    )
  if c.train.profile_at > c.train.steps:
    yield f"no trace: the run ends before update {c.train.profile_at}"
  if 0 < c.train.profile_at <= start:
    yield f"no trace: update {c.train.profile_at} was made before"
  if c.optim.warmup_steps >= c.train.steps:
    few = f"{c.train.steps} steps of optim.warmup_steps={c.optim.warmup_steps}"
    yield f"the learning rate rises to the end of the run: {few}"
  if why := evaluations.why_too_few(c.train):
    yield why
