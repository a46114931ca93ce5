"""Does a run fit a TPU slice, and how fast should it be?  Compiles its step; no TPU is needed.

  python -m pip install libtpu
  python scripts/compile_for_tpu.py --config=configs/prm800k_qwen2.5_math_7b.py \
    --topology=v5p:2x4x4 --output=compile.json

Of a public checkpoint only config.json is read.  Memory and collectives are the compiler's.  Time
is an estimate, with its assumptions beside it.

With --sweep: rows of a batch, microbatches, mesh and what is recomputed are tried, up to --compiles
of them, and those that fit are listed by estimated tokens a second.  What was compiled stays in
--work and is not compiled again.
"""

import dataclasses
import json
import os
import pathlib
import sys
from importlib import util
from typing import Literal

from prm_jax import config as config_lib


@dataclasses.dataclass(frozen=True)
class Args:
  topology: str  # generation and shape: v5e:4x4, v5p:2x4x4 (v5p-64), v5p:4x4x8 (v5p-256)
  step: Literal["train", "score"] = "train"  # score: the forward pass that reads probabilities
  slices: int = 1  # of that topology, over which config.mesh.data is split
  output: pathlib.Path = pathlib.Path("compile.json")  # every number
  sweep: bool = False  # look for the fastest way that fits; the output is a list of what was tried
  compiles: int = 8  # of a sweep, at most
  work: pathlib.Path = pathlib.Path("runs/compile")  # what was compiled
  config: config_lib.Experiment = config_lib.Experiment()  # --config=FILE sets the defaults


def main() -> None:
  args = config_lib.parse(Args, __doc__)
  os.environ["JAX_PLATFORMS"] = "cpu"  # this process only counts
  from prm_jax.runtime import json_lines
  from prm_jax.tpu import compile, sweep

  try:
    if args.slices < 1 or args.compiles < 1:
      raise ValueError("--slices and --compiles: at least 1")
    if args.sweep and args.step != "train":
      raise ValueError(f"--sweep is for the train step, not --step={args.step}")
    job = compile.Job(args.config, args.topology, args.step, args.slices)
    job.chip()
    if util.find_spec("libtpu") is None:
      raise ValueError("the TPU compiler is not installed: pip install libtpu")
    with json_lines.written(args.output) as out:
      if args.sweep:
        say = lambda line: print(line, file=sys.stderr, flush=True)
        found = sweep.run(job, args.work, args.compiles, say)
      else:
        found = compile.report(job, compile.compiled(job, args.work))
      out.write(json.dumps(found, indent=1) + "\n")
  except (ValueError, OSError, RuntimeError) as error:
    raise SystemExit(f"compile_for_tpu.py: {error}") from error
  if args.sweep:
    print("\n".join([*map(sweep.row, found), f"-> {args.output}"]))
    if not found[0]["fits"]:
      raise SystemExit("none of them fits: fewer rows (--config.train.batch_rows) or more chips")
    return
  print("\n".join([*lines(found), f"-> {args.output}"]))
  if not found["fits"]:
    raise SystemExit("does not fit; by arithmetic:\n  " + "\n  ".join(found["changes"]))


def lines(found: dict) -> list[str]:
  """A report in words."""
  gib = found["gib_per_chip"]
  mesh = "x".join(str(size) for size in found["mesh"].values())
  out = [
    f"{found['parameters']:,} parameters, {found['step']} step on {found['chips']} chips of "
    f"{found['topology']} as {mesh}, {found['rows']} rows of {found['row_length']}"
  ]
  if not found["fits"]:
    needed = f"{gib['needed']:.2f} GiB a chip of {found['gib_of_a_chip']:.2f}"
    return [*out, f"memory: {needed}: DOES NOT FIT"]
  out.append(
    f"memory: {gib['arguments']:.2f} GiB of arguments and {gib['temporaries']:.2f} of temporaries "
    f"a chip of {found['gib_of_a_chip']:.2f}: fits, "
    f"{found['headroom']:.0%} left"
  )
  if found["collectives"] is None:
    out.append(f"collectives: not known ({found['no_collectives_because']})")
  else:
    out += [
      f"  {row['kind']} {row['dtype']}, {row['times']} times, {row['gib_over_links']:.2f} GiB over "
      f"the links{' beside arithmetic' if row['beside_arithmetic'] else ''}"
      for row in found["collectives"]["by_kind"]
      if row["gib_over_links"] >= 0.01
    ]
  guess = found["estimate"]
  parts = ", ".join(f"{name} {value:.3f}" for name, value in guess["parts"].items())
  out.append(
    f"estimated: {guess['seconds_per_step']:.3f} s a step, {guess['tokens_per_second']:,.0f} "
    f"tokens/s, {guess['mfu']:.1%} of the chips' peak ({parts.replace('_', ' ')})"
  )
  if "mfu_by_cycles_alone" in guess:
    out.append(
      f"by the compiler's cycles alone, which leave out attention and collectives: "
      f"{guess['mfu_by_cycles_alone']:.1%} of the peak, "
      f"{guess['mfu_by_cycles_without_attention']:.1%} without attention's operations"
    )
  out += [f"  assumed: {each}" for each in guess["assumptions"]]
  out.append(f"  left out: {', '.join(guess['left_out'])}")
  if "run" in found:
    run = found["run"]
    out.append(
      f"the run: {run['steps']} steps, {run['hours']:.2f} hours, {run['chip_hours']:.1f} chip-hours"
    )
  return out


if __name__ == "__main__":
  main()
