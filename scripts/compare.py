"""Compares reward models, votes and the generator's own likelihood on the same candidates.

  python scripts/compare.py --input=graded.jsonl --scores people=people.jsonl rollouts=roll.jsonl \\
    --output_dir=report

--input: candidates of grade.py.  --scores: the same candidates scored by score.py, each NAME=FILE;
NAME/2 is the model NAME trained on half of the labelled problems, and NAME:min reduces its steps by
min.  Every method is compared with the majority, with the generator's log-probability and with the
methods of --against.  --process_bench: results of evaluate.py --benchmark=process_bench, each
NAME=FILE.

Writes comparison.json (every number, with 95 % bootstrap intervals over problems), comparison.png,
and comparison.html, which also shows solutions where a model's pick and the majority disagree and
one of them is right.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import dataclasses
import pathlib
import sys

from prm_jax import config as config_lib
from prm_jax import reductions
from prm_jax.evaluation.answers import grading
from prm_jax.evaluation.figure_files import Vector
from prm_jax.runtime import command_line


@dataclasses.dataclass(frozen=True)
class Args(config_lib.Checked):
  input: pathlib.Path
  output_dir: pathlib.Path
  scores: tuple[str, ...] = ()  # NAME=FILE, NAME/2=FILE, NAME:min=FILE, NAME/2:min=FILE
  process_bench: tuple[str, ...] = ()  # NAME=FILE
  reduction: reductions.Reduction = "product"  # of steps
  against: tuple[str, ...] = ()  # further methods that every other is compared with
  n: tuple[config_lib.Count, ...] = ()  # values of N; none: powers of two, and all candidates
  seed: config_lib.Whole = 0
  figures: tuple[Vector, ...] = ()  # comparison.png as .pdf, .svg too
  title: str = "Which solution to choose?"


def main() -> None:
  args = command_line.parse(Args, __doc__)
  from prm_jax.evaluation import scored_samples
  from prm_jax.evaluation.report import printable
  from prm_jax.experiments import comparison, comparison_page

  scores = command_line.named_files("--scores", args.scores)
  judged = command_line.named_files("--process_bench", args.process_bench)
  f1 = {name: comparison.process_bench(pathlib.Path(file)) for name, file in judged.items()}
  files = {name: pathlib.Path(file) for name, file in scores.items()}
  with grading.Grader(cache=grading.CACHE) as grader:
    candidates = comparison.read(args.input, files, args.reduction, grader.classes)
  flag = '--scores NAME=FILE, where "orm_score" has it'
  used = args.input in files.values()
  if warning := scored_samples.unused_warning([args.input], candidates.samples, flag, used):
    print(printable(f"{exits.script()}: {warning}"), file=sys.stderr)
  found = comparison.compare(candidates, args.n, args.seed, args.against)
  found |= {"input": str(args.input), "scores": {k: str(v) for k, v in files.items()}}
  found |= {"reduction": args.reduction, "process_bench": f1}
  lines = comparison_page.write(candidates, found, args.output_dir, args.title, args.figures)
  print("\n".join(lines))


if __name__ == "__main__":
  exits.run(main)
