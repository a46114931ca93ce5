"""Compiles the train or score step of an experiment for a TPU slice, without a TPU.

The compiler partitions and lowers the step and lays out memory as it would for the chips, so memory
and collectives are its own figures.  Time is an estimate (`cost_model.estimate`).
"""

import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import topologies

from prm_jax import config as config_lib
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import compiler_options, distributed, exits, progress, storage
from prm_jax.tpu import cost_model, hlo
from prm_jax.training import initialization
from prm_jax.training import step as step_lib
from prm_jax.training.step import TrainState
from prm_jax.types import CLASSES, Batch

TOKENS_PER_READ = 8  # in an abstract batch; a step of PRM800K has about 30 tokens
# Without these, libtpu asks for the machine's metadata and waits for chips; its log names them.
LIBTPU = {
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-1",
  "TPU_WORKER_HOSTNAMES": "localhost",
}
# Slices that Cloud TPU offers (its pages "TPU v5e", "TPU v6e" and "TPU v5p"), as in launch_tpu.sh.
# v5p slices beyond SMALL consist of cubes of 4 x 4 x 4, up to 6144 chips.
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SMALL = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
CUBES = {
  "x".join(map(str, sides))
  for sides in itertools.combinations_with_replacement(range(4, 6144 // 16 + 1, 4), 3)
  if math.prod(sides) <= 6144
}
ALLOCATED = re.compile(r"default \(color=0\)\nTotal bytes: (\d+)")  # color 0 is HBM
REMATERIALISED = "Involuntary full rematerialization"  # XLA's warning of a copy it could not shard


@dataclasses.dataclass(frozen=True)
class Job:
  """A step of an experiment, and the slices to compile it for."""

  config: config_lib.Experiment
  topology: str  # generation and shape of a slice: "v5e:4x4" (16 chips), "v5p:2x4x4" (32)
  step: Literal["train", "score"] = "train"
  slices: int = 1
  price: float = 0.0  # of a chip-hour; 0: unknown

  def shape(self) -> tuple[int, ...]:
    """Returns the chips along each axis; raises ValueError if Cloud TPU offers no such slice."""
    generation, _, shape = self.topology.partition(":")
    if generation not in cost_model.CHIPS:
      raise ValueError(
        f"--topology={self.topology}: expected v5e or v6e and one of {', '.join(FLAT)}, or v5p and "
        f"one of {', '.join(SMALL)} or ascending multiples of 4, as in v5e:4x4; Cloud TPU's v5e-64 "
        "is v5e:8x8 (64 chips), its v5p-64 is v5p:2x4x4 (64 cores: 32 chips of two)"
      )
    shapes, cubes = (SMALL, CUBES) if generation == "v5p" else (FLAT, ())
    if shape not in shapes and shape not in cubes:
      more = ", and ascending multiples of 4, as in 4x4x8" if cubes else ""
      listed = ", ".join(shapes) + more
      raise ValueError(f"--topology={self.topology}: {generation} has slices of {listed}")
    return tuple(int(size) for size in shape.split("x"))

  def rings(self) -> tuple[bool, ...]:
    """Returns whether the links along each axis form a ring, which libtpu does not infer.

    They do on v5p in slices of whole cubes of 4 x 4 x 4, and on v5e and v6e along an axis of 16,
    the pod's side (Cloud TPU documentation, "TPU v5p" and "TPU v5e").
    """
    shape = self.shape()
    if self.topology.startswith("v5p"):
      return (all(size % 4 == 0 for size in shape),) * len(shape)
    return tuple(size == 16 for size in shape)

  def chip(self) -> cost_model.Chip:
    """Returns the chip, with half of the link bandwidth unless every axis is a ring."""
    rings, chip = self.rings(), cost_model.CHIPS[self.topology.split(":")[0]]
    return chip if all(rings) else dataclasses.replace(chip, links=chip.links / 2)

  def devices(self) -> list[jax.Device]:
    """Returns the chips of the slices, as descriptions to compile for."""
    options = {"num_slices": self.slices} if self.slices > 1 else {}
    options |= {"wrap": self.rings()} if any(self.rings()) else {}
    if math.prod(self.shape()) == 1:  # otherwise a host has four chips
      options["chips_per_host_bounds"] = (1, 1, 1)
    os.environ.update(LIBTPU)
    return topologies.get_topology_desc(self.topology, "tpu", **options).devices


def compiled_report(job: Job) -> dict[str, Any]:
  """Compiles a job in this process, and returns its `report`.

  Reads no weights and no data: only config.json of `init.checkpoint`, or the metadata of a run, or
  without a checkpoint the tokenizer's size.

  Raises:
    ValueError: the topology is unknown, or the rows of a batch cannot be sharded over its chips.
    FileNotFoundError: neither a checkpoint nor a tokenizer gives the size of the vocabulary.
    jax.errors.JaxRuntimeError: the compiler has no such topology, or failed for another reason
      than the chip's memory.
  """
  c, vocab_size = resolved(job.config)
  with progress.waiting(f"describing {job.topology}"):
    devices = job.devices()
  mesh = sharding_lib.make_mesh(c.mesh, devices)
  programs = step_lib.make(c, vocab_size, classes(c), mesh)
  step, state = programs.train_step, programs.abstract
  if job.step == "score":
    step, state = programs.read, state.params
  batch, gib, text, why = abstract_batch(c, mesh), {"needed": None}, None, ""
  start = time.perf_counter()
  with jax.set_mesh(mesh), library_messages() as messages:
    with progress.waiting(f"tracing the {job.step} step"):
      lowered = step.lower(state, batch)
    try:
      faster = " (less with --config.model.unroll_layers=False)" * c.model.unroll_layers
      with progress.waiting(f"compiling it for {mesh.size} chip(s), which takes minutes{faster}"):
        compiled, gib = memory_of(lowered)
      text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
      # The program does not fit, or libtpu cannot write its text.
      if not gib["needed"] and not re.search(r"memory (space|on) hbm", str(error), re.IGNORECASE):
        raise
      why = str(error).splitlines()[0]
  compiled_facts = {
    "gib_per_chip": gib,
    "no_collectives_because": why,
    "involuntary_rematerialisations": messages[0].count(REMATERIALISED),
    "compile_seconds": time.perf_counter() - start,
    "compiler_options": compiler_options.of(c.tpu, devices[0], job.step),
  }
  return report(job, c, programs.abstract, compiled_facts, text)


@contextlib.contextmanager
def library_messages() -> Iterator[list[str]]:
  """Captures the standard error of compiled libraries; the list receives the text after the block.

  `tee` prints the text too, so that it is seen even if the compiler aborts this process.
  """
  with tempfile.NamedTemporaryFile("r") as copy:
    messages, stderr = [], os.dup(2)
    tee = subprocess.Popen(["tee", copy.name], stdin=subprocess.PIPE, stdout=stderr)
    os.dup2(tee.stdin.fileno(), 2)
    try:
      yield messages
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
      tee.communicate()
      messages.append(copy.read())


def memory_of(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, dict[str, float]]:
  """Compiles for a TPU and reads the compiler's own report of memory.

  Returns:
    The program, and in GiB of a chip: "arguments"; "temporaries", all other allocations, including
    results that do not reuse an argument's buffer; and "needed", both together.  (JAX's own figure
    for temporaries may be far more than is allocated.)
  """
  with exits.scratch_directory() as directory:
    options = {"xla_dump_to": str(directory), "xla_dump_hlo_as_text": True}
    compiled = lowered.compile(compiler_options=options)
    (report,) = directory.rglob("*memory-usage-report.txt")
    needed = int(ALLOCATED.search(report.read_text())[1])
  arguments = compiled.memory_analysis().argument_size_in_bytes
  sizes = {"arguments": arguments, "temporaries": needed - arguments, "needed": needed}
  return compiled, {name: size / 2**30 for name, size in sizes.items()}


def abstract_batch(c: config_lib.Experiment, mesh: jax.sharding.Mesh) -> Batch:
  """Returns a batch of `ShapeDtypeStruct`s, with a read position per `TOKENS_PER_READ` tokens."""

  def shape(name: str) -> jax.ShapeDtypeStruct:
    length = c.data.row_length // (TOKENS_PER_READ if name.startswith("read_") else 1)
    size, dtype = (c.train.batch_rows, length), np.int32
    if name == "read_targets":
      size, dtype = (*size, classes(c)), np.float32
    return jax.ShapeDtypeStruct(size, dtype, sharding=sharding_lib.batch_sharding(mesh))

  return Batch(**{field.name: shape(field.name) for field in dataclasses.fields(Batch)})


def report(
  job: Job,
  c: config_lib.Experiment,
  state: TrainState,
  compiled: dict[str, Any],
  text: str | None,
) -> dict[str, Any]:
  """Returns the contents of `compile.json`, from the resolved experiment and its abstract state.

  It has the GiB allocated on a chip, beside the chip's memory (None: more than that, as the
  compiler's message says); collectives by kind and dtype, with the bytes that reach a chip in a
  step (None: the compiler gave no text); operations; and, if the text has the compiler's cycles, an
  estimate of time with its assumptions, and the cost of the whole run.
  """
  chip, gib = job.chip(), compiled["gib_per_chip"]
  training, mesh = job.step == "train", state.step.sharding.mesh
  flops = cost_model.step_flops(c, state.params, training)
  program = None if text is None else hlo.read(text)
  out = compiled | {
    "checkpoint": pathlib.Path(c.init.checkpoint).name,
    "shape_from": "the checkpoint" if has_checkpoint(c) else "the config",
    "topology": job.topology,
    "slices": job.slices,
    "wrapped_axes": list(job.rings()),
    "chips": mesh.size,
    "mesh": dict(mesh.shape),
    "step": job.step,
    "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
    "rows": c.train.batch_rows,
    "row_length": c.data.row_length,
    "microbatches": c.train.microbatches,
    "remat": c.model.remat,
    "saved": list(c.model.saved),
    "gradient_dtype": c.model.gradient_dtype,
    "gib_of_a_chip": chip.memory,
    "headroom": gib["needed"] and 1 - gib["needed"] / chip.memory,
    "fits": bool(gib["needed"]) and gib["needed"] <= chip.memory,
    "collectives": program and collectives_of(program),
    "flops_per_step": flops,
    "date": time.strftime("%Y-%m-%d"),
    "versions": distributed.versions(),
  }
  if not (program and program.cycles) or program.unknown_loops:
    return out
  out["estimate"] = guess = cost_model.estimate(c, chip, mesh.shape, flops, program, training)
  if training and not c.train.epochs:  # the number of steps of epochs depends on the data
    rows = c.train.steps * c.train.batch_rows
    out["run"] = {"steps": c.train.steps, "tokens": rows * c.data.row_length}
    for end in ("", "_low", "_high"):
      hours = guess[f"seconds_per_step{end}"] * c.train.steps / 3600
      out["run"] |= {f"hours{end}": hours, f"chip_hours{end}": hours * mesh.size}
      if job.price:
        out["run"][f"dollars{end}"] = hours * mesh.size * job.price
  return out


def collectives_of(program: hlo.Program) -> dict[str, Any]:
  """Returns collectives by kind, dtype and overlap, and their number in one trip of each loop."""
  totals: dict[tuple, dict[str, Any]] = {}
  for op in program.collectives:
    key = {"kind": op.kind, "dtype": op.dtype, "beside_arithmetic": op.overlapped}
    zeros = {"times": 0, "gib": 0.0, "gib_over_links": 0.0}
    total = totals.setdefault(tuple(key.values()), key | zeros)
    total["times"] += op.times
    total["gib"] += op.times * op.bytes / 2**30
    total["gib_over_links"] += op.traffic / 2**30
  return {
    "by_kind": sorted(totals.values(), key=lambda total: -total["gib_over_links"]),
    "in_a_trip": [{"trips": n} | program.in_loop(name) for name, n in program.loops.items()],
    "loops_of_unknown_length": program.unknown_loops,
  }


def resolved(c: config_lib.Experiment) -> tuple[config_lib.Experiment, int]:
  """Returns the experiment with its checkpoint's architecture, and its vocabulary size.

  If the checkpoint does not exist, the config's own shape is used.
  """
  if not c.init.checkpoint:
    return c, initialization.find(c, None)[2]
  if has_checkpoint(c):
    known = initialization.architecture(c.init.checkpoint)
    return initialization.resolve(c, known), known.vocab_size
  if not c.model.vocab_size:
    raise FileNotFoundError(
      f"{c.init.checkpoint}: no such directory; provide its config.json, or set the model's shape "
      "in the section model of the config, with vocab_size"
    )
  return c, c.model.vocab_size


def classes(c: config_lib.Experiment) -> int:
  """Returns the number of classes that the config implies; training reads it from the manifest."""
  two = c.loss.objective == "process" and len(c.loss.class_weights) == 2
  return 2 if two else len(CLASSES[c.loss.objective])


def has_checkpoint(c: config_lib.Experiment) -> bool:
  """Returns whether the checkpoint that the experiment starts from exists."""
  return bool(c.init.checkpoint) and storage.path(c.init.checkpoint).exists()
