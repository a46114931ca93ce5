"""Compiles a step for a TPU slice, without a TPU: does it fit, and how fast should it be?

  python -m pip install libtpu
  python scripts/compile_for_tpu.py --config=configs/prm800k_qwen2.5_math_7b.py \\
    --topology=v5p:2x4x4 --output=compile.json

The production configs include their model's shape, so no checkpoint is needed.  If there is one,
only its config.json is read, and must agree with the config.  Memory and collectives are the
compiler's figures.  Time is an estimate, printed with its assumptions and as a range: from every
exchange between chips hidden behind arithmetic to none.  --price_per_chip_hour adds the run's cost.

--sweep compiles the step with one, two and four times the rows, each with as many activations saved
as fit, at most --compiles times.  It sorts the reports by estimated tokens a second, the fastest
that fits first, and leaves out variants at which the compiler aborts.

--decode_batch=64 compiles the sampler's step of generate.py instead, with 64 slots.
"""

from __future__ import annotations

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import dataclasses
import json
import math
import multiprocessing
import os
import pathlib
import sys
from concurrent import futures
from importlib import util
from typing import TYPE_CHECKING, Literal

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cached program has no memory report

from prm_jax import config as config_lib
from prm_jax.runtime import command_line, storage

if TYPE_CHECKING:
  from prm_jax.tpu import compilation


@dataclasses.dataclass(frozen=True)
class Args:
  topology: str  # generation and shape: v5e:4x4, v5p:2x4x4 (v5p-64), v5p:4x4x8 (v5p-256)
  step: Literal["train", "score"] = "train"  # score: the forward pass that reads probabilities
  slices: int = 1  # number of slices of that topology, along the mesh axis data
  output: pathlib.Path = pathlib.Path("compile.json")  # report with every number
  sweep: bool = False  # try more rows and less recomputation; the output is a list of reports
  compiles: int = 8  # maximum number of compilations of a sweep
  decode_batch: int = 0  # slots of a decoding step to compile instead; 0: none
  decode_context: int = 512  # maximum tokens of a prompt
  decode_ring: int = 1024  # maximum tokens of a sample
  price_per_chip_hour: float = 0.0  # in dollars, depends on region and tier; 0: unknown
  config: config_lib.Experiment = config_lib.Experiment()  # --config=FILE sets the defaults


def main() -> None:
  args = command_line.parse(Args, __doc__)
  from prm_jax.tpu import compilation

  price = args.price_per_chip_hour
  job = compilation.Job(args.config, args.topology, args.step, args.slices, price)
  least = {"slices": 1, "compiles": 1, "decode_batch": 0, "decode_context": 1, "decode_ring": 1}
  for flag, value in least.items():
    if getattr(args, flag) < value:
      raise ValueError(f"--{flag}={getattr(args, flag)}: expected at least {value}")
  if not 0 <= price < math.inf:
    raise ValueError(f"--price_per_chip_hour={price}: expected 0 or more")
  if args.decode_batch and (args.sweep or price or args.step != "train"):
    raise ValueError("--decode_batch takes no --sweep, --step or --price_per_chip_hour")
  if price and args.step == "score":
    raise ValueError("--price_per_chip_hour goes with --step=train: it prices a run")
  goes_with = {"compiles": "sweep", "decode_context": "decode_batch", "decode_ring": "decode_batch"}
  for flag, other in goes_with.items():
    if not getattr(args, other):
      command_line.refuse(args, [flag], f"has no effect without --{other}")
  job.chip()
  if util.find_spec("libtpu") is None:
    raise ValueError("the TPU compiler is not installed: pip install libtpu")
  if args.decode_batch:
    return decode(args, job)
  with storage.written(args.output) as out:
    reports = sweep(job, args.compiles) if args.sweep else [compilation.compiled_report(job)]
    out.write(json.dumps(reports if args.sweep else reports[0], indent=1) + "\n")
  print("\n".join(map(one_line, reports) if args.sweep else lines(reports[0])))
  print(f"-> {args.output}")
  if not reports[0]["fits"]:
    raise ValueError(
      "does not fit: save fewer activations (--config.model.remat=full and fewer in "
      "--config.model.saved), or use more microbatches, fewer rows or more chips"
    )


def decode(args: Args, job: compilation.Job) -> None:
  """Compiles the sampler's step, and writes and prints its report."""
  from prm_jax.generation import tpu_step

  with storage.written(args.output) as out:
    report = tpu_step.compiled_report(job, args.decode_batch, args.decode_context, args.decode_ring)
    out.write(json.dumps(report, indent=1) + "\n")
  print("\n".join([*tpu_step.lines(report), f"-> {args.output}"]))


def sweep(job: compilation.Job, compiles: int) -> list[dict]:
  """Compiles variants of a job; returns their reports, the fastest that fits first.

  Raises:
    ValueError: the compiler aborted at all of them.
  """
  from prm_jax.tpu import compilation

  reports, tried, spawn = [], 0, multiprocessing.get_context("spawn")
  c, _ = compilation.resolved(job.config)
  for times in (1, 2, 4):
    steps = max(c.train.steps // times, 1)  # same amount of data
    train = dataclasses.replace(c.train, batch_rows=c.train.batch_rows * times, steps=steps)
    for saved in saved_activations(c.model)[: compiles - tried]:
      tried += 1
      model = dataclasses.replace(c.model, remat="full", saved=saved)
      variant = dataclasses.replace(job, config=dataclasses.replace(c, model=model, train=train))
      print(f"variant {tried} of at most {compiles}", file=sys.stderr, flush=True)
      try:  # in a process of its own, as the compiler may abort the process
        with futures.ProcessPoolExecutor(1, spawn) as process:
          reports.append(process.submit(compilation.compiled_report, variant).result())
      except futures.process.BrokenProcessPool:
        print(f"variant {tried} is left out: the compiler aborted", file=sys.stderr, flush=True)
        continue
      print(one_line(reports[-1]), file=sys.stderr, flush=True)
      if reports[-1]["fits"]:
        break
  if not reports:
    raise ValueError("the compiler aborted at every variant; its messages are above")
  speed = lambda report: report.get("estimate", {}).get("tokens_per_second", report["fits"])
  return sorted(reports, key=speed, reverse=True)


def saved_activations(c: config_lib.Model) -> tuple[tuple[str, ...], ...]:
  """Returns the values of `model.saved` that a sweep tries, from the most memory to the least."""
  inputs = ("query", "key", "value") if c.query_key_norm else ("attention_inputs",)
  kept = ("attention", *inputs, "output" if c.post_norms else "residual")
  return (*kept, "gate", "up"), kept, ("attention",), ()


def one_line(report: dict) -> str:
  """Returns a report in one line."""
  text = f"{report['rows']} rows, saved {' '.join(report['saved']) or 'nothing'}: "
  if not report["fits"]:
    return text + "does not fit"
  text += f"{report['gib_per_chip']['needed']:.2f} GiB, "
  if (guess := report.get("estimate")) is None:
    return text + "no estimate of time"
  return text + f"{guess['tokens_per_second']:,.0f} tokens/s, {guess['mfu']:.1%} of the peak"


def lines(report: dict) -> list[str]:
  """Returns the lines of a report in words."""
  gib, mesh = report["gib_per_chip"], "x".join(str(size) for size in report["mesh"].values())
  out = [
    f"{report['parameters']:,} parameters, {report['step']} step on {report['chips']} chip(s) of "
    f"{report['topology']} as {mesh}, {report['rows']} rows of {report['row_length']}",
    f"the model's shape is that of {report['shape_from']}",
  ]
  if not report["fits"]:
    return [*out, f"memory: DOES NOT FIT: {report['no_collectives_because']}"]
  out.append(
    f"memory: {gib['arguments']:.2f} GiB of arguments and {gib['temporaries']:.2f} of temporaries "
    f"a chip of {report['gib_of_a_chip']:.2f}: fits, {report['headroom']:.0%} left"
  )
  if report["collectives"] is None:
    out.append(f"collectives: not known ({report['no_collectives_because']})")
  for op in report["collectives"]["by_kind"] if report["collectives"] else ():
    if op["gib_over_links"] >= 0.01:
      beside = " beside arithmetic" if op["beside_arithmetic"] else ""
      text = f"  {op['kind']} {op['dtype']}, {op['times']} times, "
      out.append(f"{text}{op['gib_over_links']:.2f} GiB over the links{beside}")
  if (guess := report.get("estimate")) is None:
    return [*out, "no estimate of time: the compiler gave no cycles, or no length for a loop"]
  parts = ", ".join(f"{name} {value:.3f}" for name, value in guess["parts"].items())
  out.append(
    f"estimated: {guess['seconds_per_step']:.3f} s a step, {guess['tokens_per_second']:,.0f} "
    f"tokens/s, {guess['mfu']:.1%} of the chips' peak ({parts.replace('_', ' ')}); "
    f"{guess['seconds_per_step_low']:.3f} s if every exchange were hidden, "
    f"{guess['seconds_per_step_high']:.3f} if none"
  )
  share = guess["mfu_by_cycles_alone"]
  out.append(
    f"by the compiler's cycles alone: {share:.1%} (attention's operations counted, its time and "
    "that of collectives not)"
  )
  out += [f"  assumed: {each}" for each in guess["assumptions"]]
  out.append(f"  left out: {', '.join(guess['left_out'])}")
  if run := report.get("run"):
    out.append(
      f"the run: {run['steps']} steps of {report['rows']} rows = {run['steps'] * report['rows']:,} "
      f"rows ({run['tokens']:,} tokens): {cost(run)}"
    )
  elif report["step"] == "train":
    out.append(
      "the run: with train.epochs its length depends on the data; for its cost give "
      "--config.train.epochs=0 --config.train.steps=N"
    )
  return out


def cost(run: dict) -> str:
  """Returns time, chip-hours and dollars of a run, each with its range."""
  unit, size = ("minutes", 60) if run["hours_high"] < 2 else ("hours", 1)
  shown = {unit: ("hours", size), "chip-hours": ("chip_hours", 1), "dollars": ("dollars", 1)}
  number = lambda x: f"{x:,.1f}" if x >= 1 else f"{x:.2g}"
  return ", ".join(
    f"{number(run[key] * size)} {name} ({number(run[key + '_low'] * size)} to "
    f"{number(run[key + '_high'] * size)})"
    for name, (key, size) in shown.items()
    if key in run
  )


if __name__ == "__main__":
  exits.run(main)
