"""Best-of-N curves from scored candidate solutions.

  python scripts/rerank.py --input scored.jsonl --output_dir report

Reads files in the form of OpenAI's scored-test-samples.jsonl or of one problem a line with its
samples, plain or .gz, and bundles of --write_bundle; prints a table and writes report.json,
best_of_n.png and report.html.
"""

import dataclasses
import pathlib
import sys
from typing import Literal

from prm_jax import config as config_lib
from prm_jax.evaluation import report as report_files
from prm_jax.evaluation import reranking, scored_samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args(reranking.Options):
  input: tuple[pathlib.Path, ...]
  """Scored samples, JSON lines, or a bundle. Several files hold the same candidates scored by
  different models: their keys are merged line by line."""
  output_dir: pathlib.Path
  """Where report.json, best_of_n.png and report.html go."""
  format: Literal["table", "json", "csv"] = "table"
  """What standard output gets. json: the content of report.json; csv: every curve, difference and
  group, a row for each N."""
  write_bundle: pathlib.Path | None = None
  """A file for the scores that were read, which --input reads again at once."""


def main() -> None:
  args = config_lib.parse(Args, __doc__)
  try:
    rerank(args)
  except (ValueError, OSError) as error:
    raise SystemExit(f"rerank.py: {error}") from error


def rerank(args: Args) -> None:
  if args.write_bundle and args.write_bundle.resolve() in [p.resolve() for p in args.input]:
    raise ValueError(f"--write_bundle {args.write_bundle} is an input: give another name")
  samples = scored_samples.read_scored_samples(args.input, progress=True)
  args.output_dir.mkdir(parents=True, exist_ok=True)  # fails here rather than at the end
  if args.write_bundle:
    scored_samples.write_bundle(samples, args.write_bundle)
  report, scores = reranking.rerank(samples, args, progress=True)
  report = report_files.with_examples(report, samples, scores)
  paths = report_files.write_report(report, args.output_dir)
  if args.write_bundle:
    paths.append(args.write_bundle)
  if args.format == "table":
    print(report_files.format_table(report) + "\n")
  elif args.format == "csv":
    sys.stdout.write(report_files.format_csv(report))
  else:
    sys.stdout.write((args.output_dir / "report.json").read_text())
  log = sys.stdout if args.format == "table" else sys.stderr
  for path in paths:
    print(report_files.printable(str(path)), file=log)


if __name__ == "__main__":
  main()
