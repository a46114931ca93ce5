"""Step-level evaluation of a trained model on a benchmark's labels.

  python scripts/evaluate.py --checkpoint=runs/prm --benchmark=prm800k --data_dir=data/prm800k \
    --output=evaluation.json

prm800k: the test split of a dataset written by prepare_data.py, labels by the recipe the model was
trained with: negative log-likelihood, accuracy by class, step AUROC (is the step right?), expected
calibration error with its bins.  No solution is cut: long ones are scored in longer rows.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before what takes time to import

import dataclasses
import json
import pathlib
import sys
from typing import Literal

from prm_jax import config as config_lib


@dataclasses.dataclass(frozen=True)
class Args:
  checkpoint: str  # work directory of train.py
  data_dir: pathlib.Path  # the benchmark's data
  output: pathlib.Path  # JSON with every number
  benchmark: Literal["prm800k"] = "prm800k"
  split: str = "test"  # of the prepared dataset
  step: str = "latest"  # of the checkpoint: "latest", "best" by train.best_metric, or a number
  hosts: config_lib.Hosts = config_lib.Hosts()  # several: where JAX does not find them itself


def main() -> None:
  args = config_lib.parse(Args, __doc__)
  from prm_jax.evaluation import prm800k_steps
  from prm_jax.runtime import distributed, progress
  from prm_jax.scoring.scorer import Scorer

  with distributed.job(args.hosts), distributed.written_together() as output:
    out = output(args.output)  # a place that cannot be written is an error before any work
    # its manifest.json says how the split's rows are read
    files = [args.data_dir / "manifest.json", *args.data_dir.rglob(f"*-{args.split}.*")]
    distributed.check_same_command(args, sorted(files))
    with progress.waiting(f"loading {args.checkpoint}"):
      scorer = Scorer.load(args.checkpoint, args.step)
    distributed.check_same({"step": scorer.step})
    print(f"steps end with {scorer.contract.described_separator}", file=sys.stderr)
    result = prm800k_steps.evaluate(scorer, args.data_dir, args.split)
    out.write(json.dumps({"benchmark": args.benchmark, **result}, indent=1) + "\n")
  print(prm800k_steps.table(result))
  print(f"-> {args.output}")


if __name__ == "__main__":
  exits.run(main)
