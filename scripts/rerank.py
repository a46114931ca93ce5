"""Best-of-N curves from scored candidate solutions.

  python scripts/rerank.py --input scored.jsonl --output_dir report

Reads files in the form of OpenAI's scored-test-samples.jsonl, plain or .gz; prints a table and
writes report.json, best_of_n.png and report.html.
"""

import dataclasses
import pathlib
from typing import Literal

from prm_jax import config as config_lib


@dataclasses.dataclass(frozen=True)
class Args:
  input: tuple[pathlib.Path, ...]
  """Scored samples, JSON lines. Several files hold the same candidates scored by different models:
  their keys are merged line by line."""
  output_dir: pathlib.Path
  """Where report.json, best_of_n.png and report.html go."""
  n: tuple[int, ...] = ()
  """Values of N; none given: powers of two up to the number of candidates, and that number."""
  neutral: Literal["positive", "negative"] = "positive"
  """How a neutral step counts in the PRM's scores."""
  pad_short: bool = True
  """What a problem with fewer candidates than others lacks counts as drawn and missing, as in
  OpenAI's evaluation. False: it was never generated, and N beyond it draws all there are."""
  seed: int = 0
  """Of the bootstrap and of the orders of the votes."""
  resamples: int = 10_000
  """Bootstrap resamples of the problems."""
  permutations: int = 400
  """Random orders for each vote."""


def main() -> None:
  args = config_lib.parse(Args, __doc__)
  from prm_jax.evaluation import report as report_files
  from prm_jax.evaluation.reranking import rerank
  from prm_jax.evaluation.scored_samples import read_scored_samples

  try:
    samples = read_scored_samples(args.input, progress=True)
    args.output_dir.mkdir(parents=True, exist_ok=True)  # fails here rather than at the end
    report, scores = rerank(
      samples,
      args.n or None,
      neutral=args.neutral,
      pad_short=args.pad_short,
      seed=args.seed,
      resamples=args.resamples,
      permutations=args.permutations,
    )
  except (ValueError, OSError) as error:
    raise SystemExit(f"rerank.py: {error}") from error
  print(report_files.format_table(report))
  print()
  try:
    for path in report_files.write_report(report, samples, scores, args.output_dir):
      print(path)
  except OSError as error:
    raise SystemExit(f"rerank.py: {error}") from error


if __name__ == "__main__":
  main()
