"""Writes a page of scored solutions: which step does the model doubt, and is it right?

  python scripts/view.py --input=scored.jsonl
  python scripts/view.py --input=scored.jsonl --labels=process_bench/gsm8k.jsonl --output=page.html

Input: candidates as score.py or grade.py write them, or as rerank.py reads them; candidates without
`rating_probs` or `step_scores` are shown without probabilities.  --labels names a file with labels
of the same solutions (lines of ProcessBench, of PRM800K, or of `problem`, `steps`, `labels`); the
page shows them beside the model's probabilities.  OUTPUT is one file that needs no network.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import dataclasses
import pathlib
import sys
from typing import Literal

from prm_jax import config as config_lib
from prm_jax.evaluation import candidate_table, page, scored_samples
from prm_jax.runtime import command_line, json_lines, storage

MAX_SOLUTIONS = 100_000


@dataclasses.dataclass(frozen=True)
class Args(config_lib.Checked):
  input: pathlib.Path
  output: pathlib.Path | None = None  # not given: INPUT.html
  labels: pathlib.Path | None = None  # file with labelled steps of the same solutions
  neutral: Literal["positive", "negative"] = "positive"  # how the neutral class counts
  threshold: config_lib.Share = 0.5  # a step below it is doubted
  problems: config_lib.Count | None = None  # how many of the first problems to show; default: all


def main() -> None:
  args = command_line.parse(Args, __doc__)
  path = args.output or args.input.with_suffix(".html")
  storage.refuse_inputs([path], [args.input, args.labels])
  with storage.written_together() as output:
    out = output(path)
    labels = {}
    if args.labels:
      from prm_jax.evaluation import step_benchmarks  # loads JAX

      for each in step_benchmarks.labelled(list(json_lines.records(args.labels))):
        labels[each.problem, tuple(each.steps)] = each.labels
    problems = read(args, labels)
    solutions = sum(len(problem.solutions) for problem in problems)
    marked = sum(
      any(isinstance(step.label, int) for step in solution.steps)
      for problem in problems
      for solution in problem.solutions
    )
    about = f"{len(problems):,} problems, {solutions:,} solutions"
    about += f", {marked:,} with labels" if args.labels else ""
    if args.labels and not marked:
      nothing = f"--labels={args.labels}: no solution there has the problem and steps of one that"
      text = f"{exits.script()}: {nothing} is shown"
      print(json_lines.printable(text), file=sys.stderr)
    out.write(page.render(problems, args.input.name, about, threshold=args.threshold))
  print(f"{about} -> {path}")


def read(args: Args, labels: dict) -> list[page.Problem]:
  """Returns the problems; raises BadLine: no candidate, or two problems with one unique_id."""
  records, names = [], {}
  for place, record in scored_samples.candidates(args.input, progress=True):
    where = scored_samples.place(args.input, *place[:2])
    json_lines.convert(record, page.Record, where)
    name = page.name_of(record)
    if name not in names and len(names) == args.problems:
      continue  # a later line may have another candidate of a problem that is shown
    about = {"problem": record["problem"]}
    known = names.setdefault(name, about)
    candidate_table.union(known, about, "before for the same unique_id", f"{where}: ")
    records.append(record)
    if len(records) > MAX_SOLUTIONS:
      raise ValueError(f"{args.input}: over {MAX_SOLUTIONS:,} solutions; give --problems=N")
  return page.from_records(records, labels, neutral=args.neutral)


if __name__ == "__main__":
  exits.run(main)
