"""Does a run fit a TPU slice?  Its train step is compiled for the slice, without one.

Compiling shards, lowers and lays out memory as on the chips; it says nothing of numerics, and the
step's time here is arithmetic on stated assumptions.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time

import jax
import numpy as np
from jax.experimental import topologies

from prm_jax import config as config_lib
from prm_jax.input_pipeline import tokenizers
from prm_jax.training import loop, parameters, start
from prm_jax.training import mesh as mesh_lib
from prm_jax.types import CLASSES, Batch

TOKENS_PER_READ = 8  # room for the head's reads: a step of PRM800K has about 30 tokens
UTILISATION = 0.4  # share of a chip's peak that the time estimate assumes


@dataclasses.dataclass(frozen=True)
class Chip:
  memory: float  # GiB
  flops: float  # bfloat16 multiply-adds count two, a second


# As the Cloud TPU documentation gives them.
CHIPS = {
  "v4": Chip(32, 275e12),
  "v5e": Chip(16, 197e12),
  "v5p": Chip(95, 459e12),
  "v6e": Chip(32, 918e12),
}


def compile_step(c: config_lib.Experiment, topology: str) -> dict:
  """Compiles the train step of an experiment for a slice.

  Of `init.checkpoint` only config.json is read, or the metadata of a run; of weights, data and,
  with a checkpoint, tokenizer nothing.

  Args:
    topology: generation and shape, as "v5e:4x4" (16 chips) or "v5p:2x4x4" (32).

  Returns:
    What `compile.json` holds: GiB a chip and whether they fit, floating-point operations, and the
    time of a step if the chips did them at `UTILISATION` of their peak.

  Raises:
    ValueError: no such topology, or the rows of a batch cannot be split over its chips.
    FileNotFoundError: there is neither a checkpoint nor a tokenizer to say how many rows the
      embedding has.
  """
  kind = topology.split(":")[0]
  if kind not in CHIPS:
    raise ValueError(f"--topology={topology}: expected one of {', '.join(CHIPS)} and a shape")
  try:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
  except Exception as error:  # of libtpu, in whatever class
    raise ValueError(f"--topology={topology}: {str(error).splitlines()[0]}") from error
  mesh = mesh_lib.make_mesh(c.mesh, devices)
  loop.check_rows(c.train, mesh)
  c, vocab_size = resolved(c)
  programs = loop.make_programs(c, vocab_size, len(CLASSES[c.loss.objective]), mesh)
  T, rows = c.data.row_length, c.train.batch_rows
  sizes = {"read_positions": T // TOKENS_PER_READ, "read_targets": T // TOKENS_PER_READ}
  batch = Batch(
    **{
      field.name: jax.ShapeDtypeStruct(
        (rows, sizes.get(field.name, T)), np.int32, sharding=mesh_lib.batch_sharding(mesh)
      )
      for field in dataclasses.fields(Batch)
    }
  )
  clock = time.perf_counter()
  with jax.set_mesh(mesh):
    compiled = programs.train_step.lower(programs.abstract, batch).compile()
  memory, chip = compiled.memory_analysis(), CHIPS[kind]
  gib = {
    "arguments": memory.argument_size_in_bytes / 2**30,
    "temporaries": memory.temp_size_in_bytes / 2**30,
    "peak": memory.peak_memory_in_bytes / 2**30,
  }
  gib["needed"] = max(gib["peak"], gib["arguments"] + gib["temporaries"])
  flops = step_flops(c, rows, programs.abstract.params)
  seconds = flops / (len(devices) * chip.flops * UTILISATION)
  return {
    "checkpoint": pathlib.Path(c.init.checkpoint).name,
    "topology": topology,
    "chips": len(devices),
    "mesh": dict(mesh.shape),
    "parameters": sum(x.size for x in jax.tree.leaves(programs.abstract.params)),
    "rows": rows,
    "row_length": T,
    "gib_per_chip": gib,
    "gib_of_a_chip": chip.memory,
    "fits": gib["needed"] < chip.memory,
    "flops_per_step": flops,
    "assumed_utilisation": UTILISATION,
    "estimated_seconds_per_step": seconds,
    "estimated_tokens_per_second": rows * T / seconds,
    "compile_seconds": time.perf_counter() - clock,
  }


def resolved(c: config_lib.Experiment) -> tuple[config_lib.Experiment, int]:
  """The experiment with its checkpoint's architecture, and the number of rows of its embedding."""
  if c.init.checkpoint:
    known, rows = start.architecture(c.init.checkpoint)
    return start.resolve(c, known), rows
  return c, tokenizers.load(start.named_tokenizer(c)).vocab_size


def step_flops(c: config_lib.Experiment, rows: int, params: parameters.Params) -> float:
  """Floating-point operations of an update that the arithmetic needs; recomputation is not counted.

  For each token and entry of a matrix two forward; two more where the gradient passes through, on
  its way to what is trained; two more if the entry itself is trained.  Attention is to half of the
  row, which is causal.  Left out: norms, biases, and the step head, which reads few tokens.

  Args:
    c: as resolved.
    params: the parameters, described.
  """
  m, T, trained = c.model, c.data.row_length, parameters.Choice.of(c).cut(params)
  # layers that the gradient passes through
  passed = {"head": 0, "last_layers": c.optim.last_layers}.get(c.optim.trained, m.layers)
  scores = 2 * T * m.heads * m.head_size  # and values: two products with half of the row
  a_token = scores * (m.layers + 2 * passed)
  for name, x in params["blocks"].items():
    if not name.endswith(("norm", "bias")):
      own = 2 * (name in trained.get("blocks", {}))
      a_token += x.size // m.layers * (2 * m.layers + (2 + own) * passed)
  if c.loss.objective == "language_model" or c.loss.language_model_weight:
    name = "embedding" if m.tied_embeddings else "language_model"
    a_token += params[name].size * (2 + 2 * (passed > 0) + 2 * (name in trained))
  return float(rows * T * a_token)
