"""Labels the steps of candidate solutions with a reward model, in place of people.

  python scripts/annotate.py --checkpoint=runs/prm --input=samples.jsonl --output=labels.jsonl

The model is a large PRM, as in section 4 of *Let's Verify Step by Step*: a step is wrong if the
probability of -1 exceeds --threshold; labels end at the first wrong step; the outcome is right when
every step passes.  Input: one candidate on each line, with `problem` and `steps` (or `text`).
Output: the same lines with `labels`, `is_correct` and `provenance`, which prepare_data.py
--dataset=stepwise reads.  `is_correct` is the line's own, of its final answer;
--outcome=labeller takes the labeller's.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before what takes time to import

import dataclasses
import json
import pathlib
from typing import Literal

from prm_jax import config as config_lib


@dataclasses.dataclass(frozen=True)
class Args:
  input: pathlib.Path  # candidate solutions
  output: pathlib.Path  # labelled ones
  checkpoint: str = ""  # work directory of train.py
  model: str = ""  # or directory of a published or exported model
  readout: str = ""  # of a published model
  threshold: config_lib.Share = 0.2  # of P(-1), above which a step is wrong
  outcome: Literal["answer", "labeller"] = "answer"  # where is_correct is from


def main() -> None:
  args = config_lib.parse(Args, __doc__)
  from prm_jax.runtime import progress, storage
  from prm_jax.scoring.scorer import Scorer
  from prm_jax.supervision import synthetic

  if bool(args.checkpoint) == bool(args.model):
    raise ValueError("give one of --checkpoint=DIR and --model=DIR")
  if args.output.resolve() == args.input.resolve():
    raise ValueError(f"--output={args.output} is the input: give another name")
  with storage.written(args.output) as out:
    with progress.waiting(f"loading {args.model or args.checkpoint}"):
      model = (
        Scorer.load_model(args.model, args.readout) if args.model else Scorer.load(args.checkpoint)
      )
    name = args.model or args.checkpoint
    annotator = synthetic.Annotator(model, name, args.threshold, args.outcome == "labeller")
    for line in annotator.lines(args.input):
      out.write(json.dumps(line, ensure_ascii=False) + "\n")
  print("\n".join(annotator.table()))
  print(f"-> {args.output}")


if __name__ == "__main__":
  exits.run(main)
