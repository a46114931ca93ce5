"""Counts the floating-point operations of a step, and estimates its time on TPU chips.

Nothing here was measured on a TPU.  Every assumption is a constant below, and the estimate names
it.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp

from prm_jax import config as config_lib
from prm_jax.model import block_mask, decoder, tree_kernel
from prm_jax.tpu import hlo
from prm_jax.training import trainable

KERNEL_SHARE = 0.5  # share of a chip's peak that the attention kernel's matrix products reach
FORWARD, BACKWARD = 2, 7  # the kernel's products per pair of blocks; the mathematics needs 2 and 4


@dataclasses.dataclass(frozen=True)
class Chip:
  """A TPU chip's memory and peak rates."""

  memory: float  # GiB that a program may use
  flops: float  # bfloat16 operations a second; a multiply-add counts as two
  clock: float  # Hz: peak operations a second divided by operations a cycle
  links: float  # bytes a second into a chip from its neighbours on the torus, all links together
  network: float  # bytes a second into a chip from other slices


# From the Cloud TPU documentation: links are half of its "bidirectional" figure, networks have 25,
# 50 and 100 Gbit/s a chip.  Memory is the limit that the compiler names when it is exceeded.
CHIPS = {
  "v5e": Chip(15.75, 197e12, 1.5e9, 200e9, 3.125e9),
  "v5p": Chip(95.0, 459e12, 1.75e9, 600e9, 6.25e9),
  "v6e": Chip(31.25, 918e12, 1.75e9, 400e9, 12.5e9),
}


def step_flops(c: config_lib.Experiment, params: trainable.Params, training: bool = True) -> float:
  """Returns the floating-point operations that a step needs, without recomputation.

  Each token and matrix entry needs two forward, two where the gradient passes back through the
  entry, and two where the entry itself is trained.  Causal attention (scores, and sums of values)
  covers half of the row.  Norms, biases and the step head, which reads few tokens, are left out.

  Args:
    c: the resolved experiment.
    params: the parameters, as shapes.
    training: False counts a forward pass that reads step probabilities.
  """
  trained = trainable.select(params, c.loss, c.optim) if training else {}
  backward, a_token = _has_backward(c, training), 0
  for name, x in params["blocks"].items():
    if not name.endswith(("norm", "bias")):
      weight_gradient = 2 * (name in trained.get("blocks", {}))
      a_token += x.size * (2 + (2 + weight_gradient) * backward)
  if training and (c.loss.objective == "language_model" or c.loss.language_model_weight):
    name = "embedding" if c.model.tied_embeddings else "language_model"
    a_token += params[name].size * (2 + 2 * backward + 2 * (name in trained))
  m, T = c.model, c.data.row_length
  a_token += 2 * T * m.heads * m.head_size * m.layers * (1 + 2 * backward)  # scores and sums
  return float(c.train.batch_rows * T * a_token)


def _has_backward(c: config_lib.Experiment, training: bool) -> bool:
  """Returns whether a step has a backward pass through the layers."""
  return training and c.optim.trained != "head"


def kernel_flops(c: config_lib.Experiment, training: bool) -> float:
  """Returns the operations of the attention kernel on whole blocks, for a row that is one chain."""
  m, T = c.model, c.data.row_length
  T += -T % tree_kernel.multiple(T)
  shape = (1, m.kv_heads, m.heads // m.kv_heads, T, m.head_size)
  queries, keys = tree_kernel.block_sizes(shape, m.dtype)
  sliding = decoder.sliding_layers(m)
  windows = collections.Counter(m.window if slides and m.window else None for slides in sliding)
  active = 0  # pairs of blocks in all layers
  for window, layers in windows.items():
    chain = block_mask.TreeMask(jnp.full((1, T), T), jnp.arange(T)[None], window)
    active += layers * int(block_mask.active_blocks(chain, queries, keys).sum())
  again = m.remat in ("dots", "dots_no_batch") or (m.remat == "full" and "attention" not in m.saved)
  products = FORWARD + (FORWARD * again + BACKWARD) * _has_backward(c, training)
  # A head smaller than the matrix unit takes as long as one that fills it.
  head_size = max(m.head_size, tree_kernel.LANES)
  return float(2 * head_size * m.heads * active * products * queries * keys)


def estimate(
  c: config_lib.Experiment,
  chip: Chip,
  mesh: Mapping[str, int],
  flops: float,
  program: hlo.Program,
  training: bool = True,
) -> dict:
  """Estimates seconds of a step, tokens a second and MFU, with their parts and assumptions.

  Args:
    c: the resolved experiment.
    mesh: devices along each mesh axis.
    flops: `step_flops` of the batch.
    program: the compiled program, with the compiler's cycles.
    training: False for the score step.
  """
  parts = {
    "compiled_code": program.cycles / chip.clock,
    "attention_kernel": _kernel_seconds(c, chip, mesh, training),
  }
  arithmetic, peak = sum(parts.values()), math.prod(mesh.values()) * chip.flops
  parts |= _collective_seconds(program, chip)
  total = max(arithmetic, parts["collectives_beside_arithmetic"]) + parts["collectives_alone"]
  total += parts.get("between_slices", 0.0)
  exchanges = sum(parts.values()) - arithmetic
  return {
    "seconds_per_step": total,
    "seconds_per_step_low": max(arithmetic, exchanges),  # every exchange beside arithmetic
    "seconds_per_step_high": arithmetic + exchanges,  # none
    "parts": parts,
    "mfu": flops / (total * peak),
    # Attention's operations are counted, its time is not: the kernel has no cycles.
    "mfu_by_cycles_alone": flops / (parts["compiled_code"] * peak),
    "tokens_per_second": c.train.batch_rows * c.data.row_length / total,
    "assumptions": [
      f"attention kernel: rows are one chain each, {KERNEL_SHARE:.0%} of {chip.flops:.3g}/s",
      f"compiled code: the compiler's estimated cycles at {chip.clock:.3g} Hz",
      f"collectives: their bytes at {chip.links / 1e9:.0f} GB/s, between slices at "
      f"{chip.network * 8 / 1e9:.0f} Gbit/s a chip; asynchronous ones within a slice cost nothing "
      "while they are shorter than the arithmetic",
    ],
    "left_out": ["input", "host", "waiting for other chips", "operations in without_cycles"],
    "cycles": program.cycles,
    "without_cycles": program.without_cycles,
  }


def _kernel_seconds(
  c: config_lib.Experiment, chip: Chip, mesh: Mapping[str, int], training: bool
) -> float:
  """Returns seconds in the attention kernel; 0 if the rows or the config do not use it."""
  if c.data.row_length < tree_kernel.LANES or c.model.attention not in ("auto", "kernel"):
    return 0.0
  heads = mesh["tensor"] if c.model.heads % mesh["tensor"] == 0 else 1
  chips = mesh["data"] * mesh["fsdp"] * heads  # over which rows and heads are sharded
  return kernel_flops(c, training) * c.train.batch_rows / chips / (chip.flops * KERNEL_SHARE)


def _collective_seconds(program: hlo.Program, chip: Chip) -> dict[str, float]:
  """Returns seconds of collectives alone, beside arithmetic, and between slices if any."""
  out = {"collectives_alone": 0.0, "collectives_beside_arithmetic": 0.0}
  for each in program.collectives:
    if each.kind == hlo.BETWEEN_SLICES:
      out["between_slices"] = out.get("between_slices", 0.0) + each.traffic / chip.network
    else:
      out[f"collectives_{'beside_arithmetic' if each.overlapped else 'alone'}"] += (
        each.traffic / chip.links
      )
  return out
