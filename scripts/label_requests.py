"""Asks people for step labels, and reads their answers.

  python scripts/label_requests.py --input=scored.jsonl --output=requests.jsonl --count=2
  python scripts/label_requests.py --answers=answers.jsonl --requests=requests.jsonl \\
    --output=labels.jsonl

The first command chooses solutions of a scored file (from score.py, with `is_correct`) by --rule,
--count of each problem, or in all with --globally.  It writes requests in random order, mixes in
quality-control items with known labels, and asks two labellers about some solutions.  The requests
show only problem and steps; requests.key.jsonl, beside them, holds everything else.  For another
round, after retraining, pass the labels of earlier rounds as --labelled: their solutions are not
asked again.

The second command reads answers {"request": ID, "labeller": NAME, "labels": [1, 0, -1]}, leaves out
labellers who agree with less than 75 % of quality control, prints the agreement of labellers, and
writes labelled solutions with their provenance for prepare_data.py --dataset=stepwise.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import dataclasses
import itertools
import json
import pathlib
from typing import Literal

from prm_jax import config as config_lib
from prm_jax.runtime import command_line, json_lines, storage


@dataclasses.dataclass(frozen=True)
class Args(config_lib.Checked):
  output: pathlib.Path  # requests, or with --answers, labelled solutions
  input: pathlib.Path | None = None  # scored candidates to choose from
  # How solutions are chosen; docs/labelling.md describes the rules.
  rule: Literal["uniform", "convincing", "entropy", "uncertain", "coverage"] = "convincing"
  neutral: Literal["positive", "negative"] = "positive"  # how neutral counts, as in training
  count: config_lib.Count = 1  # solutions of each problem
  globally: bool = False  # choose --count solutions of all problems together
  labelled: tuple[pathlib.Path, ...] = ()  # labels of earlier rounds, not asked again
  quality_control: pathlib.Path | None = None  # lines with problem, steps and exact labels
  shared: config_lib.Share = 0.1  # share of the chosen solutions that two labellers label
  seed: config_lib.Whole = 0  # of the choice and the order
  answers: pathlib.Path | None = None  # answers to read, in place of --input
  requests: pathlib.Path | None = None  # the requests that were answered


def main() -> None:
  args = command_line.parse(Args, __doc__)
  from prm_jax.supervision import label_answers, label_choice, label_requests

  check(args)
  with storage.written_together() as output:
    if args.input:
      read = lambda path, kind: [item for _, item in json_lines.structs(path, kind)]
      known = read(args.quality_control, label_requests.Known) if args.quality_control else []
      labelled = (read(path, label_requests.Item) for path in args.labelled)
      done = itertools.chain(known, *labelled)
      chosen = label_choice.choose(
        args.input, args.rule, args.count, args.seed, args.globally, done, args.neutral
      )
      asked = label_requests.requests(chosen, known, shared=args.shared, seed=args.seed)
      label_requests.write(asked, output(args.output), output(label_requests.key(args.output)))
      lines = [f"{len(chosen):,} solutions to label, {len(known):,} for quality control"]
    else:
      answers = json_lines.structs(args.answers, label_answers.Answer)
      labelled, report = label_answers.collect(label_requests.read(args.requests), answers)
      lines = label_answers.table(report)
      if not labelled:
        print("\n".join(lines))
        raise ValueError(f"{args.answers}: no answer gives a label; nothing was written")
      out = output(args.output)
      out.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in labelled)
  print("\n".join(lines))
  print(f"-> {args.output}")


def check(args: Args) -> None:
  """Raises ValueError for flags that do not go together."""
  if bool(args.input) == bool(args.answers) or bool(args.answers) != bool(args.requests):
    raise ValueError("give --input=FILE to ask, or --answers=FILE with --requests=FILE to read")
  if args.answers:
    asking = vars(args).keys() - {"output", "answers", "requests"}
    command_line.refuse(args, asking, "goes with --input, not with --answers")
  from prm_jax.supervision.label_requests import key

  read = [args.input, args.answers, args.requests, args.quality_control, *args.labelled]
  read += [key(args.requests)] if args.requests else []
  storage.refuse_inputs([args.output, *([key(args.output)] if args.input else [])], read)


if __name__ == "__main__":
  exits.run(main)
