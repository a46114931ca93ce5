"""Compares reward models, votes and the generator's own likelihood on the same candidates.

  python scripts/compare.py --input=graded.jsonl --scores people=people.jsonl rollouts=roll.jsonl \\
    --output_dir=report

--input has the candidates, graded by grade.py.  --scores has the same candidates scored by
score.py, as NAME=FILE; NAME/2 is the model NAME trained on half of the labelled problems, and
NAME:min reduces its steps by min.  NAME:calibrated is the product of step probabilities that are
calibrated to the outcomes of other problems.  With --neutral=negative a neutral step counts as
wrong, for all models.  Every method is compared with the majority vote, with the generator's
log-probability and with the methods of --against.  --process_bench has results of evaluate.py
--benchmark=process_bench, as NAME=FILE.

Writes comparison.json (every number, with 95 % bootstrap intervals over problems), comparison.png,
and comparison.html, which also shows solutions where a model's pick and the majority disagree and
one of them is right.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import dataclasses
import pathlib
import sys
from typing import Literal

from prm_jax import config as config_lib
from prm_jax import reductions
from prm_jax.evaluation.answers import grading
from prm_jax.evaluation.figure_files import Vector
from prm_jax.runtime import command_line, json_lines, storage


@dataclasses.dataclass(frozen=True)
class Args(config_lib.Checked):
  input: pathlib.Path  # graded candidates
  output_dir: pathlib.Path  # of comparison.json, .png and .html
  scores: tuple[str, ...] = ()  # NAME=FILE, NAME/2=FILE, NAME:min=FILE, NAME/2:calibrated=FILE
  process_bench: tuple[str, ...] = ()  # NAME=FILE
  reduction: reductions.Reduction = "product"  # of step scores to a solution's score
  neutral: Literal["positive", "negative"] = "positive"  # how a neutral step counts
  against: tuple[str, ...] = ()  # further methods with which every other is compared
  n: tuple[config_lib.Count, ...] = ()  # values of N; none: powers of two, and all candidates
  seed: config_lib.Whole = 0  # of the bootstrap and of the orders of weighted votes
  figures: tuple[Vector, ...] = ()  # further formats of comparison.png
  title: str = "Which solution to choose?"  # of the page


def main() -> None:
  args = command_line.parse(Args, __doc__)
  from prm_jax.evaluation import scored_samples
  from prm_jax.experiments import comparison, comparison_files, comparison_page

  scores, judged = (
    {name: pathlib.Path(file) for name, file in command_line.named_files(flag, given).items()}
    for flag, given in (("--scores", args.scores), ("--process_bench", args.process_bench))
  )
  paths = comparison_page.paths(args.output_dir, args.figures)
  storage.refuse_inputs(paths, [args.input, *scores.values(), *judged.values()])
  with storage.written_together() as output:
    files = [output(path, "wb") for path in paths]  # an unwritable path fails before the work
    f1 = {name: comparison_files.process_bench(path) for name, path in judged.items()}
    with grading.Grader(cache=grading.CACHE) as grader:
      candidates = comparison_files.read(
        args.input, scores, args.reduction, grader.classes, args.neutral
      )
    flag = '--scores NAME=FILE, where "orm_score" has it'
    used = args.input in scores.values()
    scored_samples.warn_of_unused([args.input], candidates.samples, flag, used)
    for notice in candidates.notices():
      print(json_lines.printable(f"{exits.script()}: {notice}"), file=sys.stderr)
    found = comparison.compare(candidates, args.n, args.seed, args.against)
    found |= {"input": str(args.input), "scores": {k: str(v) for k, v in scores.items()}}
    found |= {"reduction": args.reduction, "neutral": args.neutral, "process_bench": f1}
    contents, lines = comparison_page.contents(candidates, found, args.title, args.figures)
    for file, data in zip(files, contents):
      file.write(data)
  print("\n".join(lines))
  print(f"-> {paths[0]}, {', '.join(path.suffix for path in paths[1:])}")


if __name__ == "__main__":
  exits.run(main)
