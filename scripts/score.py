"""Scores candidate solutions with a trained model, or with a published one.

  python scripts/score.py --checkpoint=runs/prm --input=samples.jsonl --output=scored.jsonl
  python scripts/score.py --model=Qwen2.5-Math-PRM-7B --readout=qwen2.5-math-prm --dtype=bfloat16 \\
    --input=samples.jsonl --output=scored.jsonl

Input: JSON lines (plain or .gz), one candidate each, with `problem` and `steps` (or `text`, which
is split at the model's separator); every other key is kept.  Output: the same lines with
`rating_probs` and `prm_score` from a process model, `orm_score` from an outcome model, in the form
of OpenAI's scored-test-samples.jsonl.  prm_score is the product over steps of P(positive) +
P(neutral) (paper section 2.6 and F.2); of P(positive) alone if the model's recipe counts neutral as
negative (then give rerank.py --neutral=negative).

A published model is a hub directory (config.json, safetensors, tokenizer); its readout says how it
is prompted and where it is read: qwen2.5-math-prm, math-shepherd, rlhflow, skywork-o1-prm or trl.
These have two classes; "0" gets probability 0.  A directory of export.py needs no readout.  With
--model, OUTPUT.contract.json says how the model was read; --checkpoint removes that of a past run.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import sys
import time
from typing import Literal

from prm_jax import config as config_lib

CHUNK = 16_384  # lines in memory at once


@dataclasses.dataclass(frozen=True)
class Args:
  input: pathlib.Path  # candidate solutions
  output: pathlib.Path  # the same with scores
  checkpoint: str = ""  # work directory of train.py
  step: str = "latest"  # of the checkpoint: "latest", "best" by train.best_metric, or a number
  model: str = ""  # or directory of a published or exported model
  readout: str = ""  # of a published model
  dtype: Literal["float32", "bfloat16"] = "float32"  # of a published or exported model
  separator: str = ""  # of a published model, between steps (\n: line break); "": its authors'
  merge: bool = True  # encode what candidates of a problem share once; False: to compare
  hosts: config_lib.Hosts = config_lib.Hosts()


def main() -> None:
  args = config_lib.parse(Args, __doc__)
  from prm_jax.runtime import distributed
  from prm_jax.scoring.scorer import Scorer

  of_model = args.readout or args.separator or args.dtype != "float32"
  if bool(args.checkpoint) == bool(args.model) or (args.checkpoint and of_model):
    raise SystemExit(
      "score.py: give one of --checkpoint=DIR and --model=DIR; --readout, --separator and --dtype "
      "go with --model"
    )
  note = pathlib.Path(f"{args.output}.contract.json")
  noted = distributed.written_once(note) if args.model else contextlib.nullcontext()
  try:
    # The outputs first: a place that cannot be written is an error before any work.
    with distributed.job(args.hosts), distributed.written_once(args.output) as out, noted as about:
      distributed.check_same_command(args, [args.input])
      if args.model:
        separator = args.separator.replace("\\n", "\n")
        scorer = Scorer.load_model(args.model, args.readout, args.dtype, separator)
      else:
        scorer = Scorer.load(args.checkpoint, args.step)
      facts = scorer.facts() if args.model else None
      distributed.check_same({"step": scorer.step, "model": facts})
      started = time.perf_counter()
      count = score(args.input, dataclasses.replace(scorer, merge=args.merge), out)
      if args.model:
        about.write(json.dumps(facts, ensure_ascii=False, indent=2) + "\n")
      elif distributed.is_first():
        note.unlink(missing_ok=True)  # an earlier run's with --model: it is not about these scores
  except (ValueError, OSError) as error:
    raise SystemExit(f"score.py: {error}") from error
  seconds = time.perf_counter() - started
  print(f"{count:,} solutions in {seconds:.1f} s -> {args.output}", file=sys.stderr)


def score(path: pathlib.Path, scorer, out) -> int:
  """Writes the scored lines of a file; returns the number of solutions."""
  import tqdm

  from prm_jax.runtime import json_lines
  from prm_jax.scoring import candidates
  from prm_jax.scoring.scorer import SolutionError

  count, size = 0, os.path.getsize(path)
  with tqdm.tqdm(total=size, unit="B", unit_scale=True, disable=None, desc="scoring") as bar:
    lines = json_lines.read(path, lambda position: bar.update(position - bar.n))
    while chunk := list(itertools.islice(lines, CHUNK)):
      solutions = [
        candidates.solution(record, scorer.contract.separator, f"{path}:{number}")
        for number, _, record in chunk
      ]
      try:
        scores = scorer.probabilities(solutions)
      except SolutionError as error:
        raise json_lines.BadLine(f"{path}:{chunk[error.index][0]}: {error}") from error
      for (_, _, record), (_, steps), probabilities in zip(chunk, solutions, scores):
        record = candidates.scored(record, steps, probabilities, scorer.contract)
        out.write(json.dumps(record, ensure_ascii=False) + "\n")
      count += len(chunk)
  if not count:
    raise ValueError(f"{path}: empty")
  return count


if __name__ == "__main__":
  main()
