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

from prm_jax.runtime import exits

exits.on_signals()  # before what takes time to import

import dataclasses
import itertools
import json
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
  separator: config_lib.Escaped = ""  # of a published model, between steps; "": its authors'
  merge: bool = True  # encode what candidates of a problem share once; False: to compare
  hosts: config_lib.Hosts = config_lib.Hosts()  # several: where JAX does not find them itself


def main() -> None:
  args = config_lib.parse(Args, __doc__)
  from prm_jax.runtime import distributed, progress
  from prm_jax.scoring.scorer import Scorer

  of_model = args.readout or args.separator or args.dtype != "float32"
  if bool(args.checkpoint) == bool(args.model) or (args.checkpoint and of_model):
    raise ValueError(
      "give one of --checkpoint=DIR and --model=DIR; --readout, --separator and --dtype "
      "go with --model"
    )
  if args.output.resolve() == args.input.resolve():
    raise ValueError(f"--output={args.output} is the input: give another name")
  note = pathlib.Path(f"{args.output}.contract.json")
  with distributed.job(args.hosts), distributed.written_together() as output:
    out = output(args.output)  # a place that cannot be written is an error before any work
    about = output(note) if args.model else None
    distributed.check_same_command(args, [args.input])
    with progress.waiting(f"loading {args.model or args.checkpoint}"):
      if args.model:
        scorer = Scorer.load_model(args.model, args.readout, args.dtype, args.separator)
      else:
        scorer = Scorer.load(args.checkpoint, args.step)
      facts = scorer.facts() if args.model else None
    distributed.check_same({"step": scorer.step, "model": facts})
    print(f"steps end with {scorer.contract.described_separator}", file=sys.stderr)
    started = time.perf_counter()
    count = score(args.input, dataclasses.replace(scorer, merge=args.merge), out)
    if args.model:
      about.write(json.dumps(facts, ensure_ascii=False, indent=2) + "\n")
    elif distributed.is_first():
      note.unlink(missing_ok=True)  # an earlier run's with --model: it is not about these scores
  seconds = time.perf_counter() - started
  print(f"{count:,} solutions in {seconds:.1f} s -> {args.output}", file=sys.stderr)


def score(path: pathlib.Path, scorer, out) -> int:
  """Writes the scored lines of a file; returns the number of solutions."""
  from prm_jax.runtime import json_lines, progress
  from prm_jax.scoring import candidates
  from prm_jax.scoring.scorer import SolutionError

  count, total = 0, sum(1 for _ in json_lines.lines(path))
  with progress.Progress(desc="scoring", total=total, unit="solutions") as bar:
    lines = json_lines.read(path)
    while chunk := list(itertools.islice(lines, CHUNK)):
      solutions = [
        candidates.solution(record, scorer.contract.separator, f"{path}:{number}")
        for number, _, record in chunk
      ]
      on_share = lambda share, done=count, more=chunk: bar.reach(done + share * len(more))
      try:
        scores = scorer.by_head(solutions, on_share)
      except SolutionError as error:
        raise json_lines.BadLine(f"{path}:{chunk[error.index][0]}: {error}") from error
      for (_, _, record), (_, steps), probabilities in zip(chunk, solutions, scores):
        record = candidates.scored(record, steps, probabilities, scorer.contract)
        out.write(json.dumps(record, ensure_ascii=False) + "\n")
      bar.reach(count := count + len(chunk))
  return count


if __name__ == "__main__":
  exits.run(main)
