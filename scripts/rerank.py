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


@dataclasses.dataclass(frozen=True)
class Args:
  input: tuple[pathlib.Path, ...]
  """Scored samples, JSON lines, or a bundle. Several files hold the same candidates scored by
  different models: their keys are merged line by line."""
  output_dir: pathlib.Path
  """Where report.json, best_of_n.png and report.html go."""
  n: tuple[int, ...] | tuple[Literal["all"]] = ()
  """Values of N; none given: powers of two up to the number of candidates, and that number. all:
  every N, without the votes that --methods does not name."""
  methods: tuple[str, ...] = ()
  """prm_product, prm_min, prm_mean, prm_last, prm_soft_min, orm, majority, oracle, random,
  all_correct, and weighted_NAME or weighted_mean_NAME: a vote by the sum, or the mean, of an
  answer's scores. None given: all that the file allows of those usually compared."""
  by: tuple[Literal["level", "subject", "difficulty"], ...] = ()
  """Breakdowns; none given: all that the file allows. Difficulty: fifths of the problems, by the
  share of their candidates that is right."""
  band: Literal["pointwise", "simultaneous", "generation"] = "pointwise"
  """Error bars of the curves. pointwise: bootstrap over problems, each N by itself; simultaneous:
  for all N of a curve or difference at once; generation: other candidates for the same problems,
  up to M/5."""
  format: Literal["table", "json", "csv"] = "table"
  """What standard output gets. json: the content of report.json; csv: every curve, difference and
  group, a row for each N."""
  neutral: Literal["positive", "negative"] = "positive"
  """How a neutral step counts in the PRM's scores."""
  pad_short: bool = True
  """What a problem with fewer candidates than others lacks counts as drawn and missing, as in
  OpenAI's evaluation. False: it was never generated, and N beyond it draws all there are."""
  write_bundle: pathlib.Path | None = None
  """A file for the scores that were read, which --input reads again at once."""
  seed: int = 0
  """Of the bootstrap and of the orders of the votes."""
  resamples: int = 10_000
  """Bootstrap resamples of the problems."""
  permutations: int = 32
  """Random orders for each vote that is not exact."""


def main() -> None:
  args = config_lib.parse(Args, __doc__)
  try:
    rerank(args)
  except (ValueError, OSError) as error:
    raise SystemExit(f"rerank.py: {error}") from error


def rerank(args: Args) -> None:
  from prm_jax.evaluation import report as report_files
  from prm_jax.evaluation import report_tables, reranking, score_bundle, scored_samples
  from prm_jax.evaluation.report_figures import printable

  if args.write_bundle and args.write_bundle.resolve() in [p.resolve() for p in args.input]:
    raise ValueError(f"--write_bundle {args.write_bundle} is an input: give another name")
  samples = scored_samples.read_scored_samples(args.input, progress=True)
  args.output_dir.mkdir(parents=True, exist_ok=True)  # fails here rather than at the end
  if args.write_bundle:
    score_bundle.write_bundle(samples, args.write_bundle)
  report, scores = reranking.rerank(
    samples,
    "all" if args.n == ("all",) else args.n or None,
    methods=args.methods,
    by=args.by,
    band=args.band,
    neutral=args.neutral,
    pad_short=args.pad_short,
    seed=args.seed,
    resamples=args.resamples,
    permutations=args.permutations,
    progress=True,
  )
  report = report_files.with_examples(report, samples, scores)
  paths = report_files.write_report(report, args.output_dir)
  if args.write_bundle:
    paths.append(args.write_bundle)
  if args.format == "table":
    print(report_tables.format_table(report) + "\n")
  elif args.format == "csv":
    sys.stdout.write(report_tables.format_csv(report))
  else:
    sys.stdout.write((args.output_dir / "report.json").read_text())
  for path in paths:
    print(printable(str(path)), file=sys.stdout if args.format == "table" else sys.stderr)


if __name__ == "__main__":
  main()
