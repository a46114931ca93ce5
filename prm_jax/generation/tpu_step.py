"""The sampler's step, compiled for a TPU slice; no TPU is needed (`prm_jax.tpu.compilation`)."""

import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np

from prm_jax.generation import cache as cache_lib
from prm_jax.generation import cached_decoder, sampler
from prm_jax.generation.sampling import Sampling
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import compiler_options, progress
from prm_jax.tpu import compilation, cost_model, hlo

SAMPLES = 8  # of a prompt, which share a context


def compiled_report(job: compilation.Job, B: int, C: int, T: int) -> dict[str, Any]:
  """Reports a chip's memory in GiB, and a step's estimated time and tokens per second.

  Args:
    job: its config gives model and mesh; the weights have the dtype of the activations.
    B: slots.
    C: places of a context.
    T: places of a ring.

  Raises:
    As `compilation.compiled_report`; and JaxRuntimeError, if the step does not fit.
  """
  c, vocab_size = compilation.resolved(job.config)
  model = dataclasses.replace(c.model, param_dtype=c.model.dtype, attention="auto")
  with progress.waiting(f"describing {job.topology}"):
    mesh = sharding_lib.make_mesh(c.mesh, job.devices())
  params = decoder.abstract_params(model, vocab_size, 2, mesh)
  G, start = min(-(-B // SAMPLES) + 2, B), time.perf_counter()
  with jax.set_mesh(mesh), progress.waiting(f"compiling a step for {mesh.size} chip(s)"):
    weights = _abstract(functools.partial(cached_decoder.prepare, c=model), params)
    cache = _abstract(lambda: cache_lib.empty(model, B, G, C, T))
    inputs = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_lib.replicated(mesh)),
      (np.int32(0), sampler.slots_of([None] * B, G, SAMPLES), np.zeros(B, np.int32)),
    )
    decode = sampler.decoding_step(model, c.tpu, mesh.devices.flat[0])
    lowered = decode.lower(weights, cache, *inputs, sampling=Sampling(0.8))
    compiled, gib = compilation.memory_of(lowered)
  program = hlo.read(compiled.as_text())
  # A step is a batch of B rows of one token, which attends to C + T / 2 others on average.
  data = dataclasses.replace(c.data, row_length=1)
  train = dataclasses.replace(c.train, batch_rows=B)
  rows = dataclasses.replace(c, model=model, data=data, train=train)
  seen = 4 * (C + T // 2) * model.heads * model.head_size * model.layers
  flops = cost_model.step_flops(rows, params, training=False)
  flops += B * (2 * params["embedding"].size + seen)
  chip = job.chip()
  return {
    "topology": job.topology,
    "chips": mesh.size,
    "mesh": dict(mesh.shape),
    "compiler_options": compiler_options.of(c.tpu, mesh.devices.flat[0], "sample"),
    "parameters": sum(x.size for x in jax.tree.leaves(params)),
    "slots": B,
    "context": C,
    "ring": T,
    "gib_per_chip": gib,
    "gib_of_a_chip": chip.memory,
    "fits": gib["needed"] <= chip.memory,
    "collectives": compilation.collectives_of(program),
    "estimate": cost_model.estimate(rows, chip, mesh.shape, flops, program, training=False),
    "compile_seconds": time.perf_counter() - start,
  }


def lines(report: dict[str, Any]) -> list[str]:
  """Renders a report for the screen."""
  gib, guess, mesh = report["gib_per_chip"], report["estimate"], report["mesh"].values()
  return [
    f"{report['parameters']:,} parameters, a decoding step of {report['slots']} slots, contexts of "
    f"{report['context']} and rings of {report['ring']}, on {report['chips']} chips of "
    f"{report['topology']} as {'x'.join(map(str, mesh))}",
    f"memory: {gib['arguments']:.2f} GiB of arguments and {gib['temporaries']:.2f} of temporaries "
    f"a chip of {report['gib_of_a_chip']:.2f}",
    f"estimated: {1e3 * guess['seconds_per_step']:.2f} ms a step, "
    f"{guess['tokens_per_second']:,.0f} tokens/s ({1e3 * guess['seconds_per_step_low']:.2f} ms if "
    f"every exchange were hidden, {1e3 * guess['seconds_per_step_high']:.2f} if none)",
  ]


def _abstract(function: Any, *args: Any) -> Any:
  """Returns a function's result as shapes, with the shardings that the compiler chooses."""
  function = jax.jit(function)
  out = jax.eval_shape(function, *args)
  shardings = function.lower(*args).compile().output_shardings
  return jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), out, shardings
  )
