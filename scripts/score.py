"""Scores candidate solutions with a trained model.

  python scripts/score.py --checkpoint=runs/prm --input=samples.jsonl --output=scored.jsonl

Input: JSON lines (plain or .gz), one candidate each, with `problem` and `steps` (or `text`, which
is split at the model's separator); every other key is kept.  Output: the same lines with
`rating_probs` and `prm_score` from a process model, `orm_score` from an outcome model, in the form
of OpenAI's scored-test-samples.jsonl.  prm_score is the product over steps of P(positive) +
P(neutral) (paper section 2.6 and F.2); of P(positive) alone if the model's recipe counts neutral as
negative (then give rerank.py --neutral=negative).
"""

import dataclasses
import itertools
import json
import os
import pathlib
import sys
import time

from prm_jax import config as config_lib

CHUNK = 16_384  # lines in memory at once


@dataclasses.dataclass(frozen=True)
class Args:
  checkpoint: str  # work directory of train.py
  input: pathlib.Path  # candidate solutions
  output: pathlib.Path  # the same with scores


def main() -> None:
  args = config_lib.parse(Args, __doc__)
  import numpy as np
  import tqdm

  from prm_jax import json_lines
  from prm_jax.scoring import candidates
  from prm_jax.scoring import rows as rows_lib
  from prm_jax.scoring.score import Scorer

  try:
    # The output first: a place that cannot be written is an error before any work.
    with json_lines.written(args.output) as out:
      scorer = Scorer.load(args.checkpoint)
      process = scorer.contract.objective == "process"
      right = candidates.right_classes(scorer.contract)
      started, count, steps = time.perf_counter(), 0, 0
      bar = tqdm.tqdm(
        total=os.path.getsize(args.input), unit="B", unit_scale=True, disable=None, desc="scoring"
      )
      with bar:
        lines = json_lines.read(args.input, lambda position: bar.update(position - bar.n))
        while chunk := list(itertools.islice(lines, CHUNK)):
          solutions = [
            candidates.solution(record, scorer.contract.separator, f"{args.input}:{number}")
            for number, _, record in chunk
          ]
          try:
            scores = scorer.probabilities(solutions)
          except rows_lib.SolutionError as error:
            raise json_lines.BadLine(f"{args.input}:{chunk[error.index][0]}: {error}") from error
          for (_, _, record), (_, texts), probabilities in zip(chunk, solutions, scores):
            record["steps"] = texts
            chance = float(np.prod(probabilities[:, right].sum(1)))
            if process:
              record["rating_probs"] = [
                dict(zip(scorer.contract.classes, map(float, p))) for p in probabilities
              ]
              record["prm_score"] = chance
            else:
              record["orm_score"] = chance
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
            steps += len(probabilities)
          count += len(chunk)
        if not count:
          raise ValueError(f"{args.input}: empty")
  except (ValueError, OSError) as error:
    raise SystemExit(f"score.py: {error}") from error
  seconds = time.perf_counter() - started
  print(
    f"{count:,} solutions, {steps:,} probabilities in {seconds:.1f} s -> {args.output}",
    file=sys.stderr,
  )


if __name__ == "__main__":
  main()
