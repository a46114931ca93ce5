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
from prm_jax.model import families
from prm_jax.training import loop, start
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

  Of `init.checkpoint` only config.json is read; of weights, data and, with a checkpoint, tokenizer
  nothing.

  Args:
    topology: generation and shape, as "v5e:4x4" (16 chips) or "v5p:2x4x4" (32).

  Returns:
    What `compile.json` holds: GiB a chip and whether they fit, floating-point operations, and the
    time of a step if the chips did them at `UTILISATION` of their peak.

  Raises:
    ValueError: no such topology, or the rows of a batch cannot be split over its chips.
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
  if c.init.checkpoint:
    c, vocab_size = start.resolve(c), families.read(c.init.checkpoint).vocab_size
  else:
    vocab_size = tokenizers.load(c.data.tokenizer).vocab_size
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
  params = {path: np.prod(x.shape) for path, x in _leaves(programs.abstract.params)}
  flops = step_flops(c, rows, sum(params.values()) - params.get("['embedding']", 0))
  seconds = flops / (len(devices) * chip.flops * UTILISATION)
  return {
    "checkpoint": pathlib.Path(c.init.checkpoint).name,
    "topology": topology,
    "chips": len(devices),
    "mesh": dict(mesh.shape),
    "parameters": int(sum(params.values())),
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


def _leaves(tree):
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat]


def step_flops(c: config_lib.Experiment, rows: int, multiplied: int) -> float:
  """Floating-point operations of an update that the arithmetic needs; recomputation is not counted.

  Six for each token and multiplied parameter (forward, and twice that backward), and attention to
  half of the row, which is causal.

  Args:
    multiplied: parameters that are a factor of some matrix product: all but the embedding.
  """
  m, T = c.model, c.data.row_length
  attention = 6 * T * m.layers * m.heads * m.head_size
  return float(rows * T * (6 * multiplied + attention))
