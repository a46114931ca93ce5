"""Compiles a step for a TPU slice: does it fit, and how fast should it be?  No TPU is needed.

  python -m pip install libtpu
  python scripts/compile_for_tpu.py --config=configs/prm800k_qwen2.5_math_7b.py \\
    --topology=v5p:2x4x4 --output=compile.json

The production configs carry their model's shape, so no checkpoint is needed; of one that is there
only config.json is read, and must agree.  Memory and collectives are the compiler's.  Time is an
estimate, printed with its assumptions and as a range: from every exchange between chips hidden
behind arithmetic to none.  With --price_per_chip_hour the run's cost is in dollars too.

With --sweep the step is compiled with one, two and four times the rows, each with as many
activations saved as fit, --compiles times at most.  The reports are listed by estimated tokens a
second, the fastest that fits first.

With --decode_batch=64 it is the sampler's step of generate.py, with so many slots.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before what takes time to import

import dataclasses
import json
import math
import multiprocessing
import os
import pathlib
import sys
from concurrent import futures
from importlib import util
from typing import Literal

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cached program has no report of memory

from prm_jax import config as config_lib
from prm_jax.runtime import command_line, storage
from prm_jax.tpu import compilation

PROJECTIONS = ("attention", "query", "key", "value", "output", "gate", "up")
# Values of model.saved that a sweep tries, from the most memory to the least.
SAVED = (PROJECTIONS, PROJECTIONS[:5], PROJECTIONS[:1], ())


@dataclasses.dataclass(frozen=True)
class Args:
  topology: str  # generation and shape: v5e:4x4, v5p:2x4x4 (v5p-64), v5p:4x4x8 (v5p-256)
  step: Literal["train", "score"] = "train"  # score: the forward pass that reads probabilities
  slices: int = 1  # number of slices of that topology; config.mesh.data is split over them
  output: pathlib.Path = pathlib.Path("compile.json")  # every number
  sweep: bool = False  # try more rows and less recomputation; the output is a list of reports
  compiles: int = 8  # of a sweep, at most
  decode_batch: int = 0  # slots of a decoding step, which is compiled instead
  decode_context: int = 512  # most tokens of a prompt
  decode_ring: int = 1024  # most tokens of a sample
  price_per_chip_hour: float = 0.0  # in dollars, by region and tier; 0: not known
  config: config_lib.Experiment = config_lib.Experiment()  # --config=FILE sets the defaults


def main() -> None:
  args = command_line.parse(Args, __doc__)
  price = args.price_per_chip_hour
  job = compilation.Job(args.config, args.topology, args.step, args.slices, price)
  if args.slices < 1 or args.compiles < 1 or not 0 <= price < math.inf:
    raise ValueError("--slices and --compiles: at least 1; --price_per_chip_hour: not negative")
  job.chip()
  if util.find_spec("libtpu") is None:
    raise ValueError("the TPU compiler is not installed: pip install libtpu")
  if args.decode_batch:
    return decode(args, job)
  with storage.written(args.output) as out:
    found = sweep(job, args.compiles) if args.sweep else [compilation.compiled_report(job)]
    out.write(json.dumps(found if args.sweep else found[0], indent=1) + "\n")
  print("\n".join(map(one_line, found) if args.sweep else lines(found[0])))
  print(f"-> {args.output}")
  if not found[0]["fits"]:
    raise SystemExit(
      "does not fit: save fewer activations (--config.model.remat=full and fewer in "
      "--config.model.saved), or take more microbatches, fewer rows or more chips"
    )


def decode(args: Args, job: compilation.Job) -> None:
  """Compiles and reports the sampler's step."""
  from prm_jax.generation import tpu_step

  with storage.written(args.output) as out:
    found = tpu_step.compiled_report(job, args.decode_batch, args.decode_context, args.decode_ring)
    out.write(json.dumps(found, indent=1) + "\n")
  print("\n".join([*tpu_step.lines(found), f"-> {args.output}"]))


def sweep(job: compilation.Job, compiles: int) -> list[dict]:
  """Reports on variants of a job, the fastest that fits first."""
  c, reports, spawn = job.config, [], multiprocessing.get_context("spawn")
  for times in (1, 2, 4):
    steps = max(c.train.steps // times, 1)  # over as much data
    train = dataclasses.replace(c.train, batch_rows=c.train.batch_rows * times, steps=steps)
    for saved in SAVED[: compiles - len(reports)]:
      model = dataclasses.replace(c.model, remat="full", saved=saved)
      variant = dataclasses.replace(job, config=dataclasses.replace(c, model=model, train=train))
      print(f"variant {len(reports) + 1} of at most {compiles}", file=sys.stderr, flush=True)
      # a process of its own, as the compiler may abort it
      with futures.ProcessPoolExecutor(1, spawn) as process:
        reports.append(process.submit(compilation.compiled_report, variant).result())
      print(one_line(reports[-1]), file=sys.stderr, flush=True)
      if reports[-1]["fits"]:
        break
  speed = lambda report: report.get("estimate", {}).get("tokens_per_second", report["fits"])
  return sorted(reports, key=speed, reverse=True)


def one_line(found: dict) -> str:
  """A report in short."""
  text = f"{found['rows']} rows, saved {' '.join(found['saved']) or 'nothing'}: "
  if not found["fits"]:
    return text + "does not fit"
  text += f"{found['gib_per_chip']['needed']:.2f} GiB, "
  if (guess := found.get("estimate")) is None:
    return text + "no estimate of time"
  return text + f"{guess['tokens_per_second']:,.0f} tokens/s, {guess['mfu']:.1%} of the peak"


def lines(found: dict) -> list[str]:
  """A report in words."""
  gib, mesh = found["gib_per_chip"], "x".join(str(size) for size in found["mesh"].values())
  out = [
    f"{found['parameters']:,} parameters, {found['step']} step on {found['chips']} chips of "
    f"{found['topology']} as {mesh}, {found['rows']} rows of {found['row_length']}",
    f"the model's shape is that of {found['shape_from']}",
  ]
  if not found["fits"]:
    return [*out, f"memory: DOES NOT FIT: {found['no_collectives_because']}"]
  out.append(
    f"memory: {gib['arguments']:.2f} GiB of arguments and {gib['temporaries']:.2f} of temporaries "
    f"a chip of {found['gib_of_a_chip']:.2f}: fits, {found['headroom']:.0%} left"
  )
  if found["collectives"] is None:
    out.append(f"collectives: not known ({found['no_collectives_because']})")
  for row in found["collectives"]["by_kind"] if found["collectives"] else ():
    if row["gib_over_links"] >= 0.01:
      beside = " beside arithmetic" if row["beside_arithmetic"] else ""
      text = f"  {row['kind']} {row['dtype']}, {row['times']} times, "
      out.append(f"{text}{row['gib_over_links']:.2f} GiB over the links{beside}")
  if (guess := found.get("estimate")) is None:
    return [*out, "no estimate of time: the compiler gave no cycles"]
  parts = ", ".join(f"{name} {value:.3f}" for name, value in guess["parts"].items())
  out.append(
    f"estimated: {guess['seconds_per_step']:.3f} s a step, {guess['tokens_per_second']:,.0f} "
    f"tokens/s, {guess['mfu']:.1%} of the chips' peak ({parts.replace('_', ' ')}); "
    f"{guess['seconds_per_step_low']:.3f} s if every exchange were hidden, "
    f"{guess['seconds_per_step_high']:.3f} if none"
  )
  share = guess["mfu_by_cycles_alone"]
  out.append(f"by the compiler's cycles, without attention and collectives: {share:.1%}")
  out += [f"  assumed: {each}" for each in guess["assumptions"]]
  out.append(f"  left out: {', '.join(guess['left_out'])}")
  if run := found.get("run"):
    out.append(
      f"the run: {run['steps']} steps of {found['rows']} rows = {run['steps'] * found['rows']:,} "
      f"rows ({run['tokens']:,} tokens): {cost(run)}"
    )
  elif found["step"] == "train":
    out.append(
      "the run: the steps of train.epochs follow from the data; for its cost give "
      "--config.train.epochs=0 --config.train.steps=N"
    )
  return out


def cost(run: dict) -> str:
  """Time, chip-hours and dollars of a run, each with its range."""
  unit, size = ("minutes", 60) if run["hours_high"] < 2 else ("hours", 1)
  shown = {unit: ("hours", size), "chip-hours": ("chip_hours", 1), "dollars": ("dollars", 1)}
  return ", ".join(
    f"{run[key] * size:,.1f} {name} ({run[key + '_low'] * size:,.1f} to "
    f"{run[key + '_high'] * size:,.1f})"
    for name, (key, size) in shown.items()
    if key in run
  )


if __name__ == "__main__":
  exits.run(main)
