"""Evaluates a model on labelled steps: ProcessBench, PRMBench, or PRM800K's own test split.

  python scripts/evaluate.py --checkpoint=runs/prm --benchmark=process_bench \\
    --data_dir=process_bench --output=evaluation.json
  python scripts/evaluate.py --model=Qwen2.5-Math-PRM-7B --readout=qwen2.5-math-prm \\
    --benchmark=process_bench --data_dir=process_bench --output=qwen.json
  python scripts/evaluate.py --input=scored.jsonl --benchmark=process_bench --output=mine.json
  python scripts/evaluate.py --compare evaluation.json mine.json

process_bench and prm_bench: --data_dir holds their published files, or what prepare_data.py
wrote.  prm800k: --data_dir is a dataset of prepare_data.py (prm800k, stepwise or arithmetic).
--input takes the benchmark's own lines, to which any model has added `rating_probs` or
`step_scores`, P(right) of each step (docs/judging.md).

A step that scores below the threshold is decided wrong.  The threshold is --threshold, or the one
that finds first wrong steps best on the solutions of --threshold_data, or 0.5 (PRMBench has its own
for skywork-o1-prm); the result says which.  OUTPUT has every number, and OUTPUT.png shows
calibration and the curve over thresholds.  Intervals are 95 % bootstrap intervals over problems.
No solution is truncated.  An outcome model (prm800k only) is read at the end of each solution; its
result has no threshold, intervals or figure.  After an interruption the same command continues
where it stopped.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import dataclasses
import json
import pathlib
import sys
from typing import Annotated, Any, Literal

import msgspec

from prm_jax import config as config_lib
from prm_jax.runtime import command_line, json_lines
from prm_jax.scoring import options

Threshold = Annotated[float, msgspec.Meta(ge=-1, le=1)]  # also of differences between scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args(options.RewardModel):
  benchmark: Literal["process_bench", "prm_bench", "prm800k"] = "prm800k"
  output: pathlib.Path | None = None  # JSON with every number; also OUTPUT.png
  data_dir: pathlib.Path | None = None  # the benchmark's data, for a model to score
  input: pathlib.Path | None = None  # scored lines of the benchmark, in place of model and data_dir
  neutral: Literal["positive", "negative"] = "positive"  # how neutral counts in scored lines
  split: str = ""  # prm800k: a split, "test" if not given; else a subset or class, all if not given
  threshold: Threshold | None = None  # a step that scores below it is decided wrong
  threshold_data: pathlib.Path | None = None  # labelled solutions to find the threshold on instead
  compare: tuple[pathlib.Path, pathlib.Path] | None = None  # two results of this script
  hosts: config_lib.Hosts = config_lib.Hosts()  # for jobs whose hosts JAX does not detect


def main() -> None:
  args = command_line.parse(Args, __doc__)
  from prm_jax.runtime import distributed, storage
  from prm_jax.scoring import batch_journal

  check(args)
  if args.output:
    storage.refuse_inputs([args.output, pathlib.Path(f"{args.output}.png")], inputs(args))
  with distributed.job(args.hosts):
    if args.compare:
      lines = compared(args)
    else:
      with batch_journal.beside(args.output) as journal, distributed.written_together() as output:
        lines = judged(args, output, journal)
  print("\n".join(map(json_lines.printable, lines)))  # a line may have a group's name


def check(args: Args) -> None:
  """Raises ValueError for flags that do not go together."""
  if args.compare:
    unread = vars(args).keys() - {"compare", "output", "hosts"}
    return command_line.refuse(args, unread, "has no effect with --compare")
  if sum(map(bool, (args.checkpoint, args.model, args.input))) != 1:
    raise ValueError("give one of --checkpoint=DIR, --model=DIR and --input=FILE")
  if not args.output:
    raise ValueError("give --output=FILE.json")
  if bool(args.data_dir) == bool(args.input):
    raise ValueError("--data_dir=DIR goes with --checkpoint or --model; --input has its own labels")
  if args.split and args.input and args.benchmark == "prm800k":
    raise ValueError("--split chooses from --data_dir; scored lines of prm800k have no splits")
  if not args.input:
    args.check_model()
  else:
    of_models = ("step", "readout", "separator", "dtype", "reference", "beta")
    command_line.refuse(args, of_models, "goes with a model, not with --input")
  if args.threshold is not None and args.threshold_data:
    raise ValueError("give --threshold or --threshold_data, not both")
  if args.neutral != "positive" and not args.input and not args.threshold_data:
    raise ValueError("--neutral goes with --input or --threshold_data: a model knows its own")


def inputs(args: Args) -> list[pathlib.Path]:
  """Returns the files that are read, without those of models and earlier results."""
  from prm_jax.evaluation import step_benchmarks

  outputs = [args.output, pathlib.Path(f"{args.output}.png")] if args.output else []
  earlier = {path.resolve() for path in outputs if step_benchmarks.is_result(path)}
  files = [args.input, args.threshold_data, *(args.compare or ())]
  if args.data_dir:
    below = (p for p in args.data_dir.rglob("*") if p.is_file() and not p.name.startswith("."))
    files += sorted(p for p in below if p.resolve() not in earlier)
  return [*filter(None, files)]


def compared(args: Args) -> list[str]:
  """Compares two results, writes the comparison to --output if given, and returns its table."""
  from prm_jax.evaluation import step_comparison
  from prm_jax.runtime import distributed

  comparison = step_comparison.compared(args.compare)
  lines = step_comparison.table(comparison)
  if args.output:
    with distributed.written_together() as output:
      output(args.output).write(json.dumps(comparison, indent=1) + "\n")
    lines.append(f"-> {args.output}")
  return lines


def judged(args: Args, output, journal) -> list[str]:
  """Evaluates the model, writes the result and returns its table."""
  from prm_jax.evaluation import diagnostics, prm800k_steps, step_benchmarks, step_figure
  from prm_jax.runtime import distributed

  out = output(args.output)  # an unwritable path fails before the work
  distributed.check_same_command(args, inputs(args))
  own = step_benchmarks.DIFFERENCES.get(args.readout) if args.benchmark == "prm_bench" else None
  if own is not None and args.threshold_data:
    raise ValueError(
      f"--threshold_data finds a threshold for scores, but PRMBench decides {args.readout} by "
      "differences between them: give --threshold"
    )
  # Read the data first: a large model loads for minutes.
  if not args.input:
    solutions, trees = step_benchmarks.read(args.benchmark, args.data_dir, args.split)
  known = []  # solutions to find the threshold on
  if args.threshold_data:
    known = step_benchmarks.threshold_data(args.threshold_data, args.neutral)
  scorer, how = None, {"input": str(args.input)}
  if not args.input:
    scorer, how = load(args)
    journal.open(scorer.identity(), scorer.mesh)
    scorer = dataclasses.replace(scorer, journal=journal)
  if args.benchmark == "prm800k" and scorer:
    prm800k_steps.check_recipe(scorer, args.data_dir)
    if scorer.contract.objective == "outcome":
      if args.threshold is not None or args.threshold_data:
        raise ValueError(f"{args.name}: an outcome model decides no steps, and takes no threshold")
      result = {"benchmark": args.benchmark, "split": args.split or "test", "model": how}
      result |= prm800k_steps.evaluate_outcomes(scorer, args.data_dir, result["split"])
      out.write(json.dumps(result, indent=1) + "\n")
      return [described(how), *prm800k_steps.table(result), f"-> {args.output}"]
  speed: dict[str, Any] = {}
  if args.input:
    scored, trees = step_benchmarks.scored(args.benchmark, args.input, args.split, args.neutral)
  elif solutions:
    scored, trees, speed = step_benchmarks.judge(scorer, solutions, trees)
  else:  # the data has only outcomes
    raise ValueError(f"{args.data_dir}, split {args.split or 'test'}: no labelled step")
  threshold, origin = step_benchmarks.choose_threshold(
    args.threshold, args.threshold_data, known, scorer, scored, own
  )
  # The result has no times, so the same command writes the same file.
  result = {"benchmark": args.benchmark, "model": how, "tokens": speed.get("tokens")}
  if not args.input:
    result |= {"data_dir": str(args.data_dir), "split": args.split}
  result |= {"threshold": threshold, "threshold_from": origin}
  result |= step_benchmarks.result(args.benchmark, scored, trees, threshold, own is not None)
  out.write(json.dumps(result, indent=1) + "\n")
  if distributed.is_first():
    output(f"{args.output}.png", "wb").write(step_figure.draw(result))
  lines = [described(how), f"threshold {threshold:.4g}: {origin}"]
  lines += step_benchmarks.MODULES[args.benchmark].table(result)
  lines += diagnostics.table(result["diagnostics"])
  if "tokens_per_second" in speed and not journal.resumed:  # stored batches took no time
    lines.append(
      f"{speed['solutions']:,} solutions, {speed['tokens']:,} tokens in {speed['seconds']:,.0f} s: "
      f"{speed['tokens_per_second']:,.0f} tokens/s"
    )
  return [*lines, f"-> {args.output}, {args.output}.png"]


def load(args: Args) -> tuple[Any, dict[str, Any]]:
  """Returns the scorer, and how it reads a solution, for the result and the log."""
  from prm_jax.runtime import distributed, progress

  with progress.waiting(f"loading {args.name}"):
    scorer = args.load(args.benchmark)
  contract = scorer.contract
  how = {"path": args.name, "checkpoint_step": scorer.step, "dtype": scorer.config.dtype}
  how |= dataclasses.asdict(contract) | {"prompt": scorer.layout}
  distributed.check_same({"model": how})
  print(f"steps end with {contract.described_separator}", file=sys.stderr)
  return scorer, how


def described(how: dict[str, Any]) -> str:
  """Describes the model and how its scores are read, on one line."""
  if "input" in how:
    return f"scores of {how['input']}"
  step = "" if how["checkpoint_step"] is None else f", step {how['checkpoint_step']}"
  heads = f", mean of {how['heads']} heads" if how["heads"] > 1 else ""
  return f"{how['path']}{step}: read {how['read']}; {how['prompt']}{heads}"


if __name__ == "__main__":
  exits.run(main)
