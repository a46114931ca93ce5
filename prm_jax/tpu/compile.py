"""Does a run fit a TPU slice?  Its train or score step is compiled for the slice, without one.

Compiling shards, lowers and lays out memory as on the chips; it says nothing of numerics.  Time is
an estimate (`estimate.seconds`).  Each compilation is a process of its own (`compiled`), because
the compiler may abort, and its result stays in a file, so that it is done once.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from typing import Any, Literal

import jax
import msgspec
import numpy as np
from jax.experimental import topologies

from prm_jax import config as config_lib
from prm_jax.input_pipeline import tokenizers
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import json_lines
from prm_jax.tpu import cost_model, hlo
from prm_jax.training import initialization, trainable
from prm_jax.training import programs as programs_lib
from prm_jax.training import step as step_lib
from prm_jax.training.step import TrainState
from prm_jax.types import CLASSES, Batch

TOKENS_PER_READ = 8  # room for the head's reads: a step of PRM800K has about 30 tokens
PACKAGE = pathlib.Path(__file__).resolve().parents[1]
# of the package, what a compiled step and its figures depend on
TRAINING = ("ahead_of_time", "loss", "mesh", "parameters", "programs", "step")
CODE = ("model/*.py", *(f"training/{name}.py" for name in TRAINING))
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax")
# libtpu asks for a machine's metadata and for its chips, unless told that there are none
ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
DROPPED = ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS", "LIBTPU_INIT_ARGS")
ALLOCATED = re.compile(r"default \(color=0\)\nTotal bytes: (\d+)")  # color 0 is HBM
UNITS = {"K": 2**-20, "M": 2**-10, "G": 1.0}
NOT_FITTING = re.compile(r"Used ([\d.]+)([KMG]) of ([\d.]+)G hbm")
TEMPORARIES_ALONE = re.compile(
  r"temporaries \(([\d.]+)([KMG])\) exceeds available HBM \(([\d.]+)G\)"
)
REMATERIALISED = "Involuntary full rematerialization"


@dataclasses.dataclass(frozen=True)
class Job:
  """What is compiled, and for which chips."""

  config: config_lib.Experiment
  topology: str  # generation and shape of a slice, as "v5e:4x4" (16 chips) or "v5p:2x4x4" (32)
  step: Literal["train", "score"] = "train"
  slices: int = 1

  def chip(self) -> cost_model.Chip:
    """One of the slice; ValueError: a generation that is not known, or no shape."""
    kind = self.topology.split(":")[0]
    if kind not in cost_model.CHIPS:
      names = ", ".join(cost_model.CHIPS)
      raise ValueError(f"--topology={self.topology}: expected one of {names} and a shape")
    chip = cost_model.CHIPS[kind]
    return chip if all(self.wrap()) else dataclasses.replace(chip, links=chip.links / 2)

  def chips(self) -> int:
    """How many they are; ValueError: the shape is none."""
    return math.prod(self.shape()) * self.slices

  def shape(self) -> tuple[int, ...]:
    """Of one slice; ValueError: it is none."""
    shape = re.fullmatch(r"\w+:(\d+(?:x\d+)*)", self.topology)
    if not shape:
      raise ValueError(f"--topology={self.topology}: expected a shape, as in v5e:4x4 or v5p:2x4x4")
    return tuple(int(size) for size in shape[1].split("x"))

  def wrap(self) -> tuple[bool, ...]:
    """Along which axes the links close to a ring, which libtpu does not assume by itself.

    Of v5p in slices of whole cubes of 4 x 4 x 4; of v5e and v6e where an axis is the pod's (Cloud
    TPU documentation, "TPU v5p" and "TPU v5e").
    """
    shape = self.shape()
    if self.topology.startswith("v5p"):
      return (all(size % 4 == 0 for size in shape),) * len(shape)
    return tuple(size == 16 for size in shape)


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler said."""

  gib: dict[str, float] | None  # of a chip: arguments, temporaries, temp_size; None: does not fit
  needed: float  # GiB of a chip: arguments and temporaries
  text: str | None  # of the program; None: there is none
  why_no_text: str  # in the compiler's words
  seconds: float
  date: str = ""
  rematerialised: int | None = None  # warnings of copies that no one asked for; None: not listened


def compile_step(
  c: config_lib.Experiment, topology: str, step: Literal["train", "score"] = "train"
) -> dict:
  """Compiles a step of an experiment for a slice, here and now.

  Of `init.checkpoint` only config.json is read, or the metadata of a run; of weights, data and,
  with a checkpoint, tokenizer nothing.

  Returns:
    What `compile.json` holds: see `report`.

  Raises:
    ValueError: no such topology, or the rows of a batch cannot be split over its chips.
    FileNotFoundError: there is neither a checkpoint nor a tokenizer to say how many rows the
      embedding has.
    jax.errors.JaxRuntimeError: it cannot be compiled, for another reason than the chip's memory.
  """
  job = Job(c, topology, step)
  return report(job, compile_here(job))


def compile_here(job: Job) -> Compiled:
  """As `compile_step`, but what the compiler said."""
  chip = job.chip()
  options = {"num_slices": job.slices} if job.slices > 1 else {}
  if any(job.wrap()):
    options["wrap"] = job.wrap()
  try:
    devices = topologies.get_topology_desc(
      platform="tpu", topology_name=job.topology, **options
    ).devices
  except Exception as error:  # of libtpu, in whatever class
    raise ValueError(f"--topology={job.topology}: {str(error).splitlines()[0]}") from error
  c, vocab_size = resolved(job.config)
  mesh = sharding_lib.make_mesh(c.mesh, devices)
  programs = programs_lib.make(c, vocab_size, len(CLASSES[c.loss.objective]), mesh)
  batch = abstract_batch(c, mesh)
  clock, today = time.perf_counter(), time.strftime("%Y-%m-%d")
  with jax.set_mesh(mesh):
    if job.step == "train":
      lowered = programs.train_step.lower(programs.abstract, batch)
    else:
      lowered = programs.read.lower(programs.abstract.params, batch)
    try:
      compiled, gib = measured(lowered)
    except jax.errors.JaxRuntimeError as error:
      state = programs.abstract if job.step == "train" else programs.abstract.params
      arguments = sharding_lib.bytes_of_a_device((state, batch)) / 2**30
      needed = refused(str(error), arguments, chip.memory)
      if needed is None:
        raise
      return Compiled(None, needed, None, "it does not fit", time.perf_counter() - clock, today)
  needed = gib["arguments"] + gib["temporaries"]
  text, why = None, ""
  try:
    text = compiled.as_text()
  except jax.errors.JaxRuntimeError as error:  # of some generations libtpu cannot write it
    why = str(error).splitlines()[0]
  return Compiled(gib, needed, text, why, time.perf_counter() - clock, today)


def measured(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, dict[str, float]]:
  """Compiles for a TPU; and what a chip then holds, in GiB.

  Returns:
    The program; "arguments"; "temporaries", all that the compiler's own report allocates beside
    them, results included that do not take an argument's place; and "temp_size", temporaries as JAX
    has them, which may be far more than is allocated.
  """
  with tempfile.TemporaryDirectory() as directory:
    options = {"xla_dump_to": directory, "xla_dump_hlo_as_text": True}
    compiled = lowered.compile(compiler_options=options)
    (report,) = pathlib.Path(directory).rglob("*memory-usage-report.txt")
    allocated = int(ALLOCATED.search(report.read_text())[1])
  memory = compiled.memory_analysis()
  arguments = memory.argument_size_in_bytes
  sizes = {
    "arguments": arguments,
    "temporaries": allocated - arguments,
    "temp_size": memory.temp_size_in_bytes,
  }
  return compiled, {name: size / 2**30 for name, size in sizes.items()}


def refused(error: str, arguments: float, memory: float) -> float | None:
  """GiB that a program needs which the compiler refused for its size; None: for something else.

  Args:
    arguments: GiB of them, which are not always in the message.
    memory: GiB of a chip, of which the compiler may keep some for itself.
  """
  if found := NOT_FITTING.search(error):
    arguments = 0.0
  elif not (found := TEMPORARIES_ALONE.search(error)):
    return None
  return float(found[1]) * UNITS[found[2]] + arguments + memory - float(found[3])


def abstract_batch(c: config_lib.Experiment, mesh: jax.sharding.Mesh) -> Batch:
  """A batch as `ShapeDtypeStruct`s, with `TOKENS_PER_READ`."""
  T, rows = c.data.row_length, c.train.batch_rows
  sizes = {"read_positions": T // TOKENS_PER_READ, "read_targets": T // TOKENS_PER_READ}
  sharding = sharding_lib.batch_sharding(mesh)
  shapes = {field.name: (rows, sizes.get(field.name, T)) for field in dataclasses.fields(Batch)}
  return Batch(
    **{
      name: jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
      for name, shape in shapes.items()
    }
  )


def compiled(job: Job, work: pathlib.Path) -> Compiled:
  """What the compiler said, from its file in `work` or from a process that writes it.

  Raises:
    ValueError, OSError: as `compile_step`, before anything is compiled.
    RuntimeError: the process ended without a result; its last words are in the message.
  """
  job.chip()
  work.mkdir(parents=True, exist_ok=True)
  kept = work / f"{fingerprint(job)[:16]}.json"
  hlo_file = kept.with_suffix(".hlo.gz")
  if not kept.exists():
    environment = {k: v for k, v in os.environ.items() if k not in DROPPED}
    paths = [str(PACKAGE.parent), *filter(None, [environment.get("PYTHONPATH")])]
    with (work / f"{kept.stem}.log").open("w+") as log:
      done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import answer; answer()"],
        input=json.dumps(dataclasses.asdict(job)),
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)},
      )
      log.seek(0)
      words = log.read()
    if done.returncode:
      lines = [line for line in words.splitlines() if line.strip()]
      for line in reversed(lines[-5:]):  # libtpu may talk after the error
        if line.startswith(("ValueError: ", "FileNotFoundError: ")):
          raise ValueError(line.split(": ", 1)[1])
      last = "\n".join(lines[-15:])
      raise RuntimeError(f"{job.topology}: the compiler ended with {done.returncode}:\n{last}")
    facts = json.loads(done.stdout)
    if facts["text"] is not None:
      with gzip.open(hlo_file, "wt") as file:
        file.write(facts["text"])
    with json_lines.written(kept) as file:
      file.write(
        json.dumps(facts | {"text": None, "rematerialised": words.count(REMATERIALISED)}) + "\n"
      )
    (work / f"{kept.stem}.log").unlink()
  facts = json.loads(kept.read_text())
  if hlo_file.exists():
    with gzip.open(hlo_file, "rt") as file:
      facts["text"] = file.read()
  return Compiled(**facts)


def fingerprint(job: Job) -> str:
  """Of what a compiled step depends on."""
  c, vocab_size = resolved(job.config)
  sections = (c.model, c.loss, c.optim, c.mesh)
  sizes = (vocab_size, c.data.row_length, c.train.batch_rows, c.train.microbatches)
  asked = [*map(repr, (*sections, sizes)), job.topology, job.slices, job.step]
  asked += [job.wrap(), programs_lib.TPU_OPTIONS, *(metadata.version(name) for name in PACKAGES)]
  found = hashlib.sha256("\n".join(map(str, asked)).encode())
  for file in sorted(path for name in CODE for path in PACKAGE.glob(name)):
    found.update(file.read_bytes())
  return found.hexdigest()


def report(job: Job, found: Compiled) -> dict[str, Any]:
  """What `compile.json` holds.

  Memory in GiB of a chip, as allocated, against what it has, and what would make it fit;
  collectives, by kind and dtype, with the bytes that reach a chip in a step (None: the compiler
  gave no text to read them from); operations; an estimate of time with its assumptions; the cost of
  the run.
  """
  (c, state), chip = described(job), job.chip()
  mesh = state.step.sharding.mesh
  training, sizes = job.step == "train", dict(mesh.shape)
  flops = cost_model.step_flops(c, c.train.batch_rows, state.params, training)
  program = None if found.text is None else hlo.read(found.text)
  out = {
    "checkpoint": pathlib.Path(c.init.checkpoint).name,
    "topology": job.topology,
    "slices": job.slices,
    "wrapped_axes": list(job.wrap()),
    "chips": mesh.size,
    "mesh": sizes,
    "step": job.step,
    "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
    "rows": c.train.batch_rows,
    "row_length": c.data.row_length,
    "microbatches": c.train.microbatches,
    "remat": c.model.remat,
    "saved": list(c.model.saved),
    "gradient_dtype": c.model.gradient_dtype,
    "gib_per_chip": (found.gib or {}) | {"needed": found.needed},
    "gib_of_a_chip": chip.memory,
    "headroom": 1 - found.needed / chip.memory,
    "fits": found.gib is not None and found.needed <= chip.memory,
    "collectives": None if program is None else collectives(program),
    "no_collectives_because": found.why_no_text if program is None else "",
    "involuntary_rematerialisations": found.rematerialised,
    "flops_per_step": flops,
    "compile_seconds": found.seconds,
    "date": found.date,
    "versions": {name: metadata.version(name) for name in PACKAGES},
  }
  if not out["fits"]:
    arguments = sharding_lib.bytes_of_a_device(state) / 2**30
    out["changes"] = cost_model.changes(c, sizes, arguments, found.needed - chip.memory)
    return out
  guess = cost_model.seconds(c, chip, mesh.size, sizes, flops, program, training)
  if program is not None:
    guess |= {"cycles": program.cycles, "without_cycles": program.without_cycles}
  if guess["compiled_code_from"] == "cycles":
    # in this, attention counts as work but takes no time; and with it left out of both
    peak = guess["parts"]["compiled_code"] * mesh.size * chip.flops
    attention = cost_model.attention_flops(c, c.train.batch_rows, training)
    guess["mfu_by_cycles_alone"] = flops / peak
    guess["mfu_by_cycles_without_attention"] = (flops - attention) / peak
  out["estimate"] = guess
  if training:
    hours = guess["seconds_per_step"] * c.train.steps / 3600
    out["run"] = {"steps": c.train.steps, "hours": hours, "chip_hours": hours * mesh.size}
  return out


def described(job: Job) -> tuple[config_lib.Experiment, TrainState]:
  """The experiment as resolved, and its training state on the chips, which need not be there."""
  c, vocab_size = resolved(job.config)
  mesh = sharding_lib.abstract_mesh(c.mesh, job.chips())
  params = sharding_lib.abstract_params(c.model, vocab_size, len(CLASSES[c.loss.objective]), mesh)
  optimizer = step_lib.make_optimizer(c.optim, c.train.steps)
  return c, programs_lib.abstract_state(params, optimizer, mesh, trainable.Trainable.of(c))


def collectives(program: hlo.Program) -> dict[str, Any]:
  """By kind, dtype, and whether arithmetic hides them; and how many a trip of each loop has."""
  groups: dict[tuple, list[hlo.Collective]] = {}
  for each in program.collectives:
    groups.setdefault((each.kind, each.dtype, each.hidden), []).append(each)
  rows = [
    {
      "kind": kind,
      "dtype": dtype,
      "beside_arithmetic": hidden,
      "times": sum(each.times for each in several),
      "gib": sum(each.times * each.bytes for each in several) / 2**30,
      "gib_over_links": sum(each.traffic for each in several) / 2**30,
    }
    for (kind, dtype, hidden), several in groups.items()
  ]
  return {
    "by_kind": sorted(rows, key=lambda row: -row["gib_over_links"]),
    "in_a_trip": [{"trips": trips} | program.in_loop(i) for i, trips in enumerate(program.loops)],
    "loops_of_unknown_length": program.unknown_loops,
  }


def resolved(c: config_lib.Experiment) -> tuple[config_lib.Experiment, int]:
  """The experiment with its checkpoint's architecture, and the number of rows of its embedding."""
  if c.init.checkpoint:
    known, rows = initialization.architecture(c.init.checkpoint)
    return initialization.resolve(c, known), rows
  return c, tokenizers.load(initialization.named_tokenizer(c)).vocab_size


def answer() -> None:
  """The other side of `compiled`: a job from standard input, what the compiler said to output."""
  job = msgspec.convert(json.load(sys.stdin), Job)
  json.dump(dataclasses.asdict(compile_here(job)), sys.stdout)
