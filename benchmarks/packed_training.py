"""This project's side of the training benchmark.

Programs, batches and evaluation rows are those of `prm_jax.training`; what a run does between
updates (metrics, checkpoints) is left out, as it is of the peer.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time

import jax
import numpy as np

from prm_jax import config as config_lib
from prm_jax.input_pipeline import packing, prefix_tree, token_tree
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import json_lines
from prm_jax.training import initialization
from prm_jax.training import step as step_lib
from prm_jax.types import Batch, StepTree


def experiment(settings: dict) -> config_lib.Experiment:
  """The config file's experiment with the optimiser, the rows and the model of the comparison."""
  c, model = config_lib.read(str(settings["config"])), settings["model"]
  same = ("learning_rate", "weight_decay", "b1", "b2", "clip_norm")
  optim = {name: settings[name] for name in same} | {"warmup_steps": settings["warmup_updates"]}
  data = {name: settings[name] for name in ("separator", "row_length")} | {"tokenizer": model}
  rows = max(c.train.batch_rows, settings["devices"])
  return dataclasses.replace(
    c,
    data=dataclasses.replace(c.data, **data),
    init=dataclasses.replace(c.init, checkpoint=model),
    optim=dataclasses.replace(c.optim, final_fraction=0.0, **optim),
    train=dataclasses.replace(c.train, seed=settings["seed"], batch_rows=rows),
  )


def measure(settings: dict) -> dict:
  """Trains one epoch: its seconds, counts, losses, and the scores of the test rows.

  "steps" are the labelled steps of the peer's rows, in proportion for a part of an epoch.
  """
  jax.config.update("jax_num_cpu_devices", settings["devices"])
  c, tokenizer, vocab_size = initialization.find(experiment(settings), None)
  contract = token_tree.step_contract(tokenizer, c.data.separator, "process", "rows of the peer")
  encode = lambda tree: token_tree.encode(tree, tokenizer, contract)
  given, test = (chains(settings[key]) for key in ("train", "test"))
  trees, test = laid_out(given, encode, settings["layout"]), list(map(encode, test))
  rows, batch_rows = packing.PackedRows(trees, c.data.row_length), c.train.batch_rows
  updates = settings["max_updates"]
  updates = -(-len(rows) // batch_rows) if updates < 0 else updates
  c = dataclasses.replace(c, train=dataclasses.replace(c.train, steps=updates))
  mesh = sharding_lib.make_mesh(c.mesh)
  programs = step_lib.make(c, vocab_size, len(contract.classes), mesh)
  on_mesh = lambda batch: jax.device_put(batch, sharding_lib.batch_sharding(mesh))
  order = packing.shuffled(rows, c.train.seed)
  batch_of = lambda i: packing.stack([order[i * batch_rows + j] for j in range(batch_rows)])
  counts, losses = {"slots": 0, "tokens": 0, "targets": 0}, []
  with jax.set_mesh(mesh):
    params = initialization.public_params(c, tokenizer, programs.abstract.params)
    state = jax.block_until_ready(programs.begin(params))
    before = evaluate(state.params, test, c, programs.read, on_mesh)
    start = time.perf_counter()
    train_step = programs.train_step.lower(state, on_mesh(batch_of(0))).compile()
    compiled = time.perf_counter() - start
    start, cpu = time.perf_counter(), time.process_time()
    for i in range(updates):
      batch = batch_of(i)
      counts["slots"] += batch.tokens.size
      counts["tokens"] += real_tokens(batch)
      counts["targets"] += int((batch.read_targets >= 0).sum())
      state, metrics = train_step(state, on_mesh(batch))
      losses.append(float(metrics["loss"]))  # waits for the update
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    after = evaluate(state.params, test, c, programs.read, on_mesh)
  labels = sum(len(chain.labels) for chain in given)
  targets = sum(len(tree.read_targets) for tree in trees)
  return counts | {
    "layout": settings["layout"],
    "compile_seconds": compiled,
    "train_seconds": seconds,
    "train_cpu_seconds": cpu,
    "updates": updates,
    "rows": len(given),
    "packed_rows": len(rows),
    "batch_rows": batch_rows,
    "steps": round(counts["targets"] * labels / targets),
    "losses": losses,
    "before": before,
    "after": after,
  }


def chains(path: str) -> list[StepTree]:
  """The peer's rows, each as a solution; right is class 1 and wrong is class -1."""
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


def laid_out(rows: list[StepTree], encode, layout: str) -> list[token_tree.TokenTree]:
  """The rows as they are ("packed"), or those of each problem as one tree ("trees")."""
  by_problem: dict[str | int, list[token_tree.TokenTree]] = {}
  for i, row in enumerate(rows):
    by_problem.setdefault(row.problem if layout == "trees" else i, []).append(encode(row))
  return [prefix_tree.merge(group)[0] for group in by_problem.values()]


def real_tokens(batch: Batch) -> int:
  """Tokens that are not padding, which is its own subtree at position 0."""
  alone = batch.subtree_end == np.arange(1, batch.tokens.shape[1] + 1)
  return int((~(alone & (batch.positions == 0))).sum())


def evaluate(params, rows: list[token_tree.TokenTree], c, read, on_mesh) -> dict:
  """P(not -1) at each labelled separator, by row; and the labels, 0 or 1."""
  if not rows:
    return {"scores": [], "labels": []}
  packed = packing.PackedRows(rows, c.data.row_length)
  order = packing.eval_order(packed, c.train.batch_rows)
  batches = [packing.stack([packed[i] for i in batch]) for batch in order]
  found = [np.asarray(read(params, on_mesh(batch)), np.float64) for batch in batches]
  by_row = packed.by_tree(np.exp(np.concatenate(found))[..., 1:].sum(-1))
  return {
    "scores": [scores.tolist() for scores in by_row],
    "labels": [(row.read_targets != 0).astype(int).tolist() for row in rows],
  }
