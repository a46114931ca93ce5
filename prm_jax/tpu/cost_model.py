"""Arithmetic about a step on TPU chips: operations, bytes that are kept, and an estimate of time.

Nothing here was measured on a TPU.  What is assumed stands in ASSUMPTIONS and beside each number
that rests on it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax.numpy as jnp

from prm_jax import config as config_lib
from prm_jax.model import block_mask, tree_kernel
from prm_jax.tpu import hlo
from prm_jax.training import trainable

KERNEL_SHARE = 0.5  # of a chip's peak, in the attention kernel's products
MATMUL_SHARE = 0.75  # of the peak, in all else, where the compiler gives no cycles
FORWARD, BACKWARD = 2, 7  # products of the kernel for a pair of blocks; arithmetic needs 2 and 4


@dataclasses.dataclass(frozen=True)
class Chip:
  memory: float  # GiB that a program may have
  flops: float  # bfloat16 multiply-adds count two, a second
  clock: float  # cycles a second: the peak over the multiply-adds of one cycle
  links: (
    float  # bytes a second that reach a chip of a torus from its neighbours, all links together
  )
  network: float  # bytes a second that reach a chip from other slices


# As the Cloud TPU documentation gives them: links are half of the "bidirectional" figure; a network
# of 25, 50 and 100 Gbit/s a chip.  Memory is what the compiler allows, which says so when it is
# exceeded.
CHIPS = {
  "v5e": Chip(15.75, 197e12, 1.5e9, 200e9, 3.125e9),
  "v5p": Chip(95.0, 459e12, 1.75e9, 600e9, 6.25e9),
  "v6e": Chip(31.25, 918e12, 1.75e9, 400e9, 12.5e9),
}


def step_flops(
  c: config_lib.Experiment, rows: int, params: trainable.Params, training: bool = True
) -> float:
  """Floating-point operations of an update that the arithmetic needs; recomputation is not counted.

  For each token and entry of a matrix two forward; two more where the gradient passes through, on
  its way to what is trained; two more if the entry itself is trained.  Attention is to half of the
  row, which is causal.  Left out: norms, biases, and the step head, which reads few tokens.

  Args:
    c: as resolved.
    params: the parameters, described.
    training: False: of a forward pass that reads step probabilities.
  """
  m, T = c.model, c.data.row_length
  trained = trainable.Trainable.of(c).select(params) if training else {}
  passed = layers_passed(c) if training else 0
  a_token = 0
  for name, x in params["blocks"].items():
    if not name.endswith(("norm", "bias")):
      own = 2 * (name in trained.get("blocks", {}))
      a_token += x.size // m.layers * (2 * m.layers + (2 + own) * passed)
  if training and (c.loss.objective == "language_model" or c.loss.language_model_weight):
    name = "embedding" if m.tied_embeddings else "language_model"
    a_token += params[name].size * (2 + 2 * (passed > 0) + 2 * (name in trained))
  return attention_flops(c, rows, training) + float(rows * T * a_token)


def layers_passed(c: config_lib.Experiment) -> int:
  """Layers that the gradient passes through."""
  return 0 if c.optim.trained == "head" else c.model.layers


def attention_flops(c: config_lib.Experiment, rows: int, training: bool) -> float:
  """Of `step_flops`, those of scores and of sums of values."""
  m, T = c.model, c.data.row_length
  a_layer = 2 * T * m.heads * m.head_size  # two products with half of the row
  return float(rows * T * a_layer * (m.layers + (2 * layers_passed(c) if training else 0)))


def widths(m: config_lib.Model) -> dict[str, int]:
  """Elements of a token in a layer that each name of `model.saved` keeps, in two bytes each."""
  heads = m.heads * m.head_size
  return {
    "attention": heads + 2 * m.heads,  # and the normaliser, float32
    "query": heads,
    "key": m.kv_heads * m.head_size,
    "value": m.kv_heads * m.head_size,
    "output": m.width,
    "gate": m.mlp_width,
    "up": m.mlp_width,
    "down": m.width,
  }


def kept_bytes(c: config_lib.Experiment, mesh: Mapping[str, int]) -> dict[str, float]:
  """Bytes of a chip that each name of `model.saved` costs, and "residual": between layers."""
  m = c.model
  rows = c.train.batch_rows / (mesh["data"] * mesh["fsdp"]) / c.train.microbatches
  tokens = rows * c.data.row_length * m.layers * (2 if m.dtype == "bfloat16" else 4)
  whole = ("output", "down")  # not split over the axis tensor
  kept = {
    name: tokens * width / (1 if name in whole else mesh["tensor"])
    for name, width in widths(m).items()
  }
  return kept | {"residual": tokens * m.width}


def recomputed_flops(c: config_lib.Experiment) -> float:
  """Of projections, in the backward pass of a batch: what `model.saved` does not keep."""
  m = c.model
  if m.remat != "full":
    return 0.0
  D, heads = m.width, m.heads * m.head_size
  inputs = dict.fromkeys(("query", "key", "value", "gate", "up"), D) | {"output": heads}
  size = widths(m)
  a_token = sum(2 * inputs[n] * size[n] for n in inputs if n not in m.saved)
  return float(c.train.batch_rows * c.data.row_length * layers_passed(c) * a_token)


def expected_traffic(c: config_lib.Experiment, mesh: Mapping[str, int], training: bool) -> float:
  """Bytes that reach a chip in a step by collectives that arithmetic does not hide.

  As programs were seen to be compiled: at each pass an all-reduce of the gradients of the layers'
  matrices, and of a layer whose heads are split one of activations after each half, both ways.
  """
  m, apart = c.model, mesh["data"] * mesh["fsdp"]
  heads = (2 * m.heads + 2 * m.kv_heads) * m.head_size
  passed = layers_passed(c) if training else 0
  layers = 0 if c.optim.trained == "lora" else passed  # whose matrices are trained
  weights = layers * m.width * (heads + 3 * m.mlp_width) / mesh["tensor"]
  narrow = m.dtype == "bfloat16"
  size = 2 if narrow and m.gradient_dtype == "activations" else 4
  total = 2 * size * weights * (apart - 1) / apart * c.train.microbatches if training else 0.0
  activations = c.train.batch_rows / apart * c.data.row_length * m.width
  sums = 2 * (m.layers + passed) * (mesh["tensor"] - 1) / mesh["tensor"]
  return total + 2 * sums * activations * (2 if narrow else 4)


def kernel_flops(c: config_lib.Experiment, rows: int, training: bool) -> float:
  """What the attention kernel executes for rows that are one chain each: live blocks, whole."""
  m, lanes = c.model, tree_kernel.LANES
  T = math.ceil(c.data.row_length / lanes) * lanes
  shape = (1, m.kv_heads, m.heads // m.kv_heads, T, m.head_size)
  queries, keys = tree_kernel.block_sizes(shape, m.dtype)
  pattern = [m.window_pattern[i % len(m.window_pattern)] == "s" for i in range(m.layers)]
  live = [_live(T, m.window if slides and m.window else None, queries, keys) for slides in pattern]
  passed = live[m.layers - layers_passed(c) :] if training else []
  again = m.remat in ("dots", "dots_no_batch") or (m.remat == "full" and "attention" not in m.saved)
  blocks = FORWARD * sum(live) + (FORWARD * again + BACKWARD) * sum(passed)
  # a head smaller than the matrix unit takes as long as one that fills it
  return float(2 * max(m.head_size, lanes) * m.heads * blocks * queries * keys * rows)


@functools.cache
def _live(T: int, window: int | None, queries: int, keys: int) -> int:
  """Pairs of blocks in which a token of a chain sees another."""
  mask = block_mask.TreeMask(jnp.full((1, T), T), jnp.arange(T)[None], window)
  return int(block_mask.active_blocks(mask, queries, keys).sum())


def seconds(
  c: config_lib.Experiment,
  chip: Chip,
  chips: int,
  mesh: Mapping[str, int],
  flops: float,
  program: hlo.Program | None,
  training: bool = True,
) -> dict:
  """An estimate of a step's seconds, its parts, and what each rests on.

  Args:
    flops: as `step_flops` counts them.
    program: as compiled; None: the compiler gave no text.
  """
  kernel = 0.0
  heads = mesh["tensor"] if c.model.heads % mesh["tensor"] == 0 else 1
  if c.data.row_length >= tree_kernel.LANES and c.model.attention in ("auto", "kernel"):
    rows = c.train.batch_rows / (mesh["data"] * mesh["fsdp"])
    kernel = kernel_flops(c, 1, training) * rows / heads / (chip.flops * KERNEL_SHARE)
  assumptions = [
    f"attention kernel: every row one chain, {KERNEL_SHARE:.0%} of the peak of {chip.flops:.3g}/s",
  ]
  counted = program is not None and program.cycles > 0 and not program.unknown_loops
  if counted:
    compiled = program.cycles / chip.clock
    assumptions.append(f"compiled code: the compiler's estimated cycles at {chip.clock:.3g} Hz")
  else:
    extra = recomputed_flops(c) if training else 0.0
    products = flops - attention_flops(c, c.train.batch_rows, training) + extra
    compiled = products / (chips * chip.flops * MATMUL_SHARE)
    assumptions.append(
      f"no cycles from the compiler: products of weights at {MATMUL_SHARE:.0%} of the peak"
    )
  parts = {"compiled_code": compiled, "attention_kernel": kernel}
  total = compiled + kernel
  if program is None:
    exposed = expected_traffic(c, mesh, training) / chip.links
    parts["collectives_alone"] = exposed
    total += exposed
    assumptions.append(
      "collectives: by arithmetic, for want of compiled text: gradients of the layers' matrices "
      f"and sums of split layers, at {chip.links / 1e9:.0f} GB/s"
    )
  else:
    by_links = [x for x in program.collectives if x.kind != hlo.BETWEEN]
    hidden = sum(x.traffic for x in by_links if x.hidden) / chip.links
    exposed = sum(x.traffic for x in by_links if not x.hidden) / chip.links
    parts |= {"collectives_alone": exposed, "collectives_beside_arithmetic": hidden}
    total = max(total, hidden) + exposed
    if between := sum(x.traffic for x in program.collectives if x.kind == hlo.BETWEEN):
      parts["between_slices"] = between / chip.network
      total += parts["between_slices"]
      assumptions.append(
        f"between slices: {chip.network * 8 / 1e9:.0f} Gbit/s a chip, beside nothing else"
      )
    assumptions.append(
      f"collectives: their bytes at {chip.links / 1e9:.0f} GB/s; asynchronous ones cost nothing "
      "while they are shorter than the arithmetic"
    )
  return {
    "seconds_per_step": total,
    "compiled_code_from": "cycles" if counted else "arithmetic",
    "parts": parts,
    "mfu": flops / (total * chips * chip.flops),
    "tokens_per_second": c.train.batch_rows * c.data.row_length / total,
    "assumptions": assumptions,
    "left_out": ["input", "host", "waiting for other chips", "operations in without_cycles"],
  }


def changes(
  c: config_lib.Experiment, mesh: Mapping[str, int], arguments: float, excess: float
) -> list[str]:
  """What would make a step fit, each by itself, by arithmetic.

  Args:
    arguments: GiB of a chip that state and batch take.
    excess: GiB that are missing.
  """
  gib = {name: size / 2**30 for name, size in kept_bytes(c, mesh).items()}
  out, freed = [], 0.0
  if c.model.remat != "full":
    out.append("--config.model.remat=full: keeps only what goes from layer to layer")
  dropped = []
  for name in sorted(c.model.saved, key=lambda name: -gib[name]):
    dropped.append(name)
    freed += gib[name]
    if freed >= excess:
      kept = [name for name in c.model.saved if name not in dropped]
      out.append(
        f"{' '.join(['--config.model.saved', *kept])}: without {', '.join(dropped)} "
        f"{freed:.1f} GiB less"
      )
      break
  activations = gib["residual"] + sum(gib[name] for name in c.model.saved)
  rows = c.train.batch_rows // (mesh["data"] * mesh["fsdp"])
  for times in range(2, rows // c.train.microbatches + 1):
    less = activations * (1 - 1 / times)
    if rows % (c.train.microbatches * times) == 0 and less >= excess:
      out.append(f"--config.train.microbatches={c.train.microbatches * times}: {less:.1f} GiB less")
      out.append(f"--config.train.batch_rows={c.train.batch_rows // times}: the same")
      break
  for times in (2, 4, 8, 16):
    if arguments * (1 - 1 / times) >= excess:
      out.append(
        f"a slice of {times} times the chips, rows of each as they are: "
        f"{arguments * (1 - 1 / times):.1f} GiB less"
      )
      break
  return out or ["nothing by itself: fewer saved, microbatches and more chips together"]
