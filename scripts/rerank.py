"""Draws best-of-N curves from scored candidate solutions.

  python scripts/rerank.py --input scored.jsonl --output_dir report
  python scripts/rerank.py --input mine.jsonl --output_dir report --score my_rm --label "My RM"

Reads JSON lines, plain or .gz, in the form of OpenAI's scored-test-samples.jsonl or with a problem
and its samples a line; or a bundle of --write_bundle.  Prints a table and writes report.json,
best_of_n.png and report.html.  --score ranks by any key with a number (docs/reranking.md).
"""

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import dataclasses
import pathlib
import sys
from typing import Literal

from prm_jax.evaluation import reranking, sample_arrays, scored_samples
from prm_jax.evaluation.answers import grading
from prm_jax.evaluation.figure_files import Vector
from prm_jax.runtime import command_line, json_lines, storage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args(reranking.Options):
  input: tuple[pathlib.Path, ...]
  """JSON lines of scored samples, or a bundle. Several files must hold the same candidates, scored
  by different models; their keys are merged line by line."""
  output_dir: pathlib.Path
  """Directory of report.json, best_of_n.png and report.html."""
  format: Literal["table", "json", "csv"] = "table"
  """Format of standard output. json: the content of report.json; csv: every curve, difference and
  group, a row for each N."""
  figures: tuple[Vector, ...] = ()
  """Further formats of the figure, best_of_n.pdf and best_of_n.svg."""
  write_bundle: pathlib.Path | None = None
  """File for a bundle of the scores that were read; --input reads it in a fraction of a second."""


def main() -> None:
  args = command_line.parse(Args, __doc__)
  from prm_jax.evaluation import report as report_files
  from prm_jax.evaluation import report_table

  paths = [args.output_dir / name for name in report_files.file_names(args.figures)]
  paths += [args.write_bundle] * bool(args.write_bundle)
  storage.refuse_inputs(paths, args.input)
  with grading.Grader(cache=grading.CACHE) as grader:
    join = grader.classes if args.votes == "value" else None
    samples = scored_samples.read_scored_samples(args.input, join=join, scores=args.score)
  if not args.score and not args.methods:
    scored_samples.warn_of_unused(args.input, samples, "--score {}")
  with storage.written_together() as output:
    files = [output(path, "wb") for path in paths]  # an unwritable path fails before the work
    if args.write_bundle:
      sample_arrays.write_bundle(samples, files[-1])
    report, scores = reranking.rerank(samples, args)
    problems, notices = report_files.solutions(samples, scores, report)
    report["notices"] += notices
    contents = report_files.contents(report, problems, args.figures)
    for file, data in zip(files, contents.values()):
      file.write(data)
  if args.format == "table":
    print(report_table.format_table(report) + "\n")
  elif args.format == "csv":
    sys.stdout.write(report_table.format_csv(report))
  else:
    sys.stdout.write(contents["report.json"].decode())
  log = sys.stdout if args.format == "table" else sys.stderr
  for path in paths:
    print(json_lines.printable(str(path)), file=log)


if __name__ == "__main__":
  exits.run(main)
