"""Does a run fit a TPU slice?  Compiles its train step for the slice; no TPU is needed.

  python -m pip install libtpu
  python scripts/compile_for_tpu.py --config=configs/prm800k_qwen2.5_math_7b.py \
    --topology=v5p:2x4x4 --output=compile.json

Of a public checkpoint only config.json is read.  Memory is the compiler's; time is arithmetic, with
its assumption beside it.
"""

import dataclasses
import json
import os
import pathlib

from prm_jax import config as config_lib


@dataclasses.dataclass(frozen=True)
class Args:
  topology: str  # generation and shape: v5e:4x4, v5p:2x4x4 (v5p-64), v5p:4x4x8 (v5p-256)
  output: pathlib.Path = pathlib.Path("compile.json")  # every number
  config: config_lib.Experiment = config_lib.Experiment()  # --config=FILE sets the defaults


def main() -> None:
  args = config_lib.parse(Args, __doc__)
  # libtpu asks for a machine's metadata and for its chips, unless told that there are none
  os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
  )
  from prm_jax import json_lines
  from prm_jax.training import ahead_of_time

  try:
    with json_lines.written(args.output) as out:
      found = ahead_of_time.compile_step(args.config, args.topology)
      out.write(json.dumps(found, indent=1) + "\n")
  except (ValueError, OSError) as error:
    raise SystemExit(f"compile_for_tpu.py: {error}") from error
  gib = found["gib_per_chip"]
  print(
    f"{found['parameters']:,} parameters on {found['chips']} chips of {args.topology}, "
    f"{found['rows']} rows of {found['row_length']}\n"
    f"memory: {gib['arguments']:.2f} GiB of state and {gib['temporaries']:.2f} of temporaries a "
    f"chip (peak {gib['peak']:.2f}) of {found['gib_of_a_chip']:.0f}: "
    f"{'fits' if found['fits'] else 'DOES NOT FIT'}\n"
    f"time: {found['estimated_seconds_per_step']:.2f} s a step at an assumed "
    f"{found['assumed_utilisation']:.0%} of the chips' peak\n"
    f"-> {args.output}"
  )
  if not found["fits"]:
    raise SystemExit(
      "does not fit: fewer rows (--config.train.batch_rows), --config.train.microbatches, "
      "--config.model.remat, or more chips"
    )


if __name__ == "__main__":
  main()
