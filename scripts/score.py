"""Scores candidate solutions with a trained model, or with a published one.

  python scripts/score.py --checkpoint=runs/prm --input=samples.jsonl --output=scored.jsonl
  python scripts/score.py --model=Qwen2.5-Math-PRM-7B --readout=qwen2.5-math-prm --dtype=bfloat16 \\
    --input=samples.jsonl --output=scored.jsonl
  python scripts/score.py --model=policy --reference=base --readout=implicit --beta=0.05 \\
    --input=samples.jsonl --output=scored.jsonl

Input: JSON lines (plain or .gz), one candidate each, with `problem` and `steps` (or `text`, which
is split at the model's separator).  Output: the same lines with `rating_probs` and `prm_score` from
a process model, `orm_score` from an outcome model, in the form of OpenAI's
scored-test-samples.jsonl.  Every other key is kept, but an earlier model's scores of the same kind
are dropped.  prm_score is the product over steps of P(positive) + P(neutral) (paper section 2.6 and
F.2), or of P(positive) alone if the model's recipe counts neutral as negative (then give
--neutral=negative to the scripts that read the file).
With --skip_cut_off, candidates with `finished` false, which are never chosen, get no scores.
After an interruption the same command continues where it stopped.

A published model is a hub directory (config.json, safetensors, tokenizer).  --readout says how it
is prompted and where it is read: qwen2.5-math-prm, math-shepherd, rlhflow, skywork-o1-prm, trl or
trl-joined.  These have two classes, so "0" gets probability 0.  A directory written by
export.py needs no readout.  With --model or --readout, OUTPUT.contract.json says how the model was
read; other runs remove that file.

--readout=implicit reads two language models of one tokenizer: P(right) of a step is the sigmoid of
beta * log(pi / pi_ref), summed over its tokens (Yuan et al. 2024; docs/rewards.md).  Each is a hub
directory or a run of train.py on text.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import dataclasses
import json
import pathlib
import sys
import time

from prm_jax import config as config_lib
from prm_jax.runtime import command_line
from prm_jax.scoring import options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args(options.RewardModel):
  input: pathlib.Path  # candidate solutions
  output: pathlib.Path  # the same lines with scores
  skip_cut_off: bool = False  # do not score candidates with `finished` false
  merge: bool = True  # encode shared prefixes of candidates once; False: for comparison
  hosts: config_lib.Hosts = config_lib.Hosts()  # for jobs whose hosts JAX does not detect


def main() -> None:
  args = command_line.parse(Args, __doc__)
  args.check_model()
  from prm_jax.runtime import distributed, json_lines, progress, storage
  from prm_jax.scoring import batch_journal, candidates

  storage.refuse_inputs([args.output], [args.input])
  note = pathlib.Path(f"{args.output}.contract.json")
  with (
    distributed.job(args.hosts),
    batch_journal.beside(args.output) as journal,
    distributed.written_together() as output,
  ):
    out = output(args.output)  # fails before any work if it cannot be written
    described = bool(args.model or args.readout)
    about = output(note) if described else None
    next(json_lines.lines(args.input))  # a wrong file fails before the model is loaded
    distributed.check_same_command(args, [args.input])
    with progress.waiting(f"loading {args.name}"):
      scorer = args.load()
      facts = scorer.facts() if described else None
    distributed.check_same({"step": scorer.step, "model": facts})
    print(f"steps end with {scorer.contract.described_separator}", file=sys.stderr)
    started = time.perf_counter()
    journal.open(scorer.identity(), scorer.mesh)
    scorer, count = dataclasses.replace(scorer, merge=args.merge, journal=journal), 0
    for line in candidates.rated(args.input, scorer, "scoring", args.skip_cut_off):
      if line.probabilities is None:
        record = candidates.unscored(line.record, scorer.contract)
      else:
        record = candidates.scored(line.record, line.steps, line.probabilities, scorer.contract)
        count += 1
      out.write(json.dumps(record, ensure_ascii=False) + "\n")
    if described:
      about.write(json.dumps(facts, ensure_ascii=False, indent=2) + "\n")
  if not described and distributed.is_first():
    note.unlink(missing_ok=True)  # it describes overwritten scores
  seconds = time.perf_counter() - started
  print(f"{count:,} solutions in {seconds:.1f} s -> {args.output}", file=sys.stderr)


if __name__ == "__main__":
  exits.run(main)
