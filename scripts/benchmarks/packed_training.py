"""This project's side of the training benchmark, in a process of its own.

  python packed_training.py SETTINGS.json

The code that is timed is that of `prm_jax.training`: its compiled programs, batches and
evaluation rows.  What a run does between updates (metrics, checkpoints) is left out, as it is of
the peer.  Rows are packed as the peer has them, or merged into the trees of their problems first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import platform
import sys
import time
from importlib import metadata

import jax
import numpy as np

from prm_jax import config as config_lib
from prm_jax.input_pipeline import packing, prefix_tree, token_tree
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import export
from prm_jax.runtime import json_lines
from prm_jax.training import initialization as start_lib
from prm_jax.training import programs as programs_lib
from prm_jax.types import Batch, StepTree


def main() -> None:
  settings = json.loads(pathlib.Path(sys.argv[1]).read_text())
  if settings["task"] == "export":
    return export_model(settings)
  jax.config.update("jax_num_cpu_devices", settings["devices"])
  result = measure(settings)
  packages = ("jax", "jaxlib", "flax", "optax")
  result["versions"] = {name: metadata.version(name) for name in packages}
  result["versions"]["python"] = platform.python_version()
  with json_lines.written(settings["output"]) as file:
    file.write(json.dumps(result) + "\n")


def experiment(settings: dict) -> config_lib.Experiment:
  """The config file's experiment with the optimiser, the rows and the model of the comparison."""
  c = config_lib.read(settings["config"])
  return dataclasses.replace(
    c,
    data=dataclasses.replace(
      c.data,
      tokenizer=settings["model"],
      separator=settings["separator"],
      row_length=settings["row_length"],
    ),
    init=dataclasses.replace(c.init, checkpoint=settings["model"]),
    optim=dataclasses.replace(
      c.optim,
      learning_rate=settings["learning_rate"],
      final_fraction=0.0,
      warmup_steps=settings["warmup_updates"],
      weight_decay=settings["weight_decay"],
      b1=settings["b1"],
      b2=settings["b2"],
      clip_norm=settings["clip_norm"],
    ),
    train=dataclasses.replace(
      c.train, seed=settings["seed"], batch_rows=max(c.train.batch_rows, settings["devices"])
    ),
  )


def measure(settings: dict) -> dict:
  start = time.perf_counter()
  c, tokenizer, vocab_size = start_lib.find(experiment(settings), None)
  contract = token_tree.step_contract(tokenizer, c.data.separator, "process", "rows of the peer")
  given, test = (chains(settings[key]) for key in ("train", "test"))
  test = [token_tree.encode(chain, tokenizer, contract) for chain in test]
  token_trees = laid_out(given, tokenizer, contract, settings["layout"])
  packed = packing.PackedRows(token_trees, c.data.row_length)
  updates = settings["max_updates"]
  if updates < 0:
    updates = -(-len(packed) // c.train.batch_rows)  # one epoch
  c = dataclasses.replace(c, train=dataclasses.replace(c.train, steps=updates))
  mesh = sharding_lib.make_mesh(c.mesh)
  programs = programs_lib.make(c, vocab_size, len(contract.classes), mesh)
  prepared = time.perf_counter() - start

  def on_mesh(batch: Batch) -> Batch:
    return jax.device_put(batch, sharding_lib.batch_sharding(mesh))

  order = packing.shuffled(packed, c.train.seed)

  def of_update(step: int) -> Batch:
    first = step * c.train.batch_rows
    return packing.stack([order[first + i] for i in range(c.train.batch_rows)])

  with contextlib.ExitStack() as stack:
    stack.enter_context(jax.set_mesh(mesh))
    start = time.perf_counter()
    params = start_lib.public_params(c, tokenizer, programs.abstract.params)
    state = jax.block_until_ready(programs.begin(params))
    loaded = time.perf_counter() - start
    before = evaluate(state.params, test, c, programs.read, on_mesh)

    start = time.perf_counter()
    train_step = programs.train_step.lower(state, on_mesh(of_update(0))).compile()
    compiled = time.perf_counter() - start
    counts, losses = {"slots": 0, "tokens": 0, "targets": 0}, []
    times, cpu = [time.perf_counter()], [time.process_time()]
    for step in range(updates):
      batch = of_update(step)
      counts["slots"] += batch.tokens.size
      counts["tokens"] += real_tokens(batch)
      counts["targets"] += int((batch.read_targets >= 0).sum())
      state, metrics = train_step(state, on_mesh(batch))
      losses.append(float(metrics["loss"]))  # waits
      times.append(time.perf_counter())
      cpu.append(time.process_time())
    after = evaluate(state.params, test, c, programs.read, on_mesh)
  # Of a part of an epoch, labels in proportion.
  labels = sum(len(chain.labels) for chain in given)
  targets = sum(len(tree.read_targets) for tree in token_trees)
  return {
    "layout": settings["layout"],
    "prepare_seconds": prepared,
    "load_seconds": loaded,
    "compile_seconds": compiled,
    "train_seconds": times[-1] - times[0],
    "train_cpu_seconds": cpu[-1] - cpu[0],
    "update_seconds": np.diff(times).tolist(),
    "updates": updates,
    "rows": len(given),
    "packed_rows": len(packed),
    "tokens_repeated_by_cuts": packed.repeated,
    "batch_rows": c.train.batch_rows,
    "row_length": c.data.row_length,
    **counts,
    "steps": round(counts["targets"] * labels / targets),
    "losses": losses,
    "before": before,
    "after": after,
  }


def chains(path: str) -> list[StepTree]:
  """The peer's rows, each a solution of its own; right is class 1 and wrong is class -1."""
  return [
    StepTree(
      problem=row["prompt"],
      steps=tuple(row["completions"]),
      parents=tuple(range(-1, len(row["completions"]) - 1)),
      labels=tuple(1 if label else -1 for label in row["labels"]),
      source=f"{pathlib.Path(path).name}:{number}",
    )
    for number, _, row in json_lines.read(path)
  ]


def laid_out(rows: list[StepTree], tokenizer, contract, layout: str) -> list[token_tree.TokenTree]:
  """The rows as they are ("packed"), or those of each problem as one ("trees")."""
  encoded = [token_tree.encode(row, tokenizer, contract) for row in rows]
  if layout == "packed":
    return encoded
  by_problem: dict[str, list[token_tree.TokenTree]] = {}
  for row, tree in zip(rows, encoded):
    by_problem.setdefault(row.problem, []).append(tree)
  return [prefix_tree.merge(group)[0] for group in by_problem.values()]


def real_tokens(batch: Batch) -> int:
  """Tokens that are not padding: of a padding token, position and index in the row tell."""
  alone = batch.subtree_end == np.arange(1, batch.tokens.shape[1] + 1)
  padding = alone & (batch.positions == 0)
  return int(padding.size - padding.sum())


def evaluate(params, rows: list[token_tree.TokenTree], c, read, on_mesh) -> dict:
  """P(not -1) at each labelled separator, by row; and the labels, 0 or 1."""
  if not rows:
    return {"scores": [], "labels": [], "seconds": 0.0}
  start = time.perf_counter()
  packed = packing.PackedRows(rows, c.data.row_length)
  order = packing.eval_order(packed, c.train.batch_rows)
  batches = [packing.stack([packed[i] for i in batch]) for batch in order]
  found = [np.asarray(read(params, on_mesh(batch)), np.float64) for batch in batches]
  by_row = packed.by_tree(np.exp(np.concatenate(found))[..., 1:].sum(-1))
  return {
    "scores": [scores.tolist() for scores in by_row],
    "labels": [(row.read_targets != 0).astype(int).tolist() for row in rows],
    "seconds": time.perf_counter() - start,
  }


def export_model(settings: dict) -> None:
  """The model as the peer reads it: a transformers directory, with the tokenizer, in float32."""
  c = config_lib.Experiment(
    data=config_lib.Data(tokenizer=settings["model"]),
    init=config_lib.Init(checkpoint=settings["model"]),
  )
  c, tokenizer, vocab_size = start_lib.find(c, None)
  mesh = sharding_lib.make_mesh(c.mesh)
  params = start_lib.public_params(
    c, tokenizer, sharding_lib.abstract_params(c.model, vocab_size, len("-01"), mesh)
  )
  with export.written_directory(settings["output"]) as new:
    export.write(new, params, c.model, vocab_size, contract=None, kind="causal-lm")
    tokenizer.save(new)


if __name__ == "__main__":
  main()
