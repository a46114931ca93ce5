"""Labels the steps of candidate solutions without people.

  python scripts/annotate.py --checkpoint=runs/prm --input=samples.jsonl --output=labels.jsonl
  python scripts/annotate.py --method=rollouts --model=models/qwen2.5-coder-0.5b \\
    --rollouts=8 --input=samples.jsonl --output=rollouts.jsonl
  python scripts/annotate.py --method=judge --url=http://127.0.0.1:8000/v1 --served_model=NAME \\
    --template=critic --votes=8 --input=samples.jsonl --output=judged.jsonl

--input: one candidate on each line, with `problem` and `steps` (or `text`).  --output: the same
lines with `labels`, `is_correct` and `provenance`, which prepare_data.py --dataset=stepwise reads.

--method=model: a reward model labels, as in section 4 of *Let's Verify Step by Step*.  A step is
wrong if the probability of -1 exceeds --threshold; labels end at the first wrong step.
`is_correct` is the input's, from the final answer; with --outcome=labeller, it is true if no step
is wrong.

--method=rollouts: a language model continues from each step, --rollouts times; a step is wrong if
no rollout reaches `ground_truth_answer`.  --labels=soft writes the share of right rollouts,
--labels=counts the numbers of right and of all rollouts.  --search=binary looks only for the first
wrong step, with fewer rollouts.  --sure=0.75 gives no labels to problems for which under 75 % of
rollouts from the start are right.  The output has a problem's lines together.

--method=judge: a generative verifier names the first wrong step, --votes times, and the plurality
wins.  Lines also get `rating_probs` and `prm_score`, which evaluate.py and rerank.py read.

All methods resume after a kill if the command is run again.  For rollouts and judge, a finished
--output is an error, and several hosts share the work if they share the disk of --output.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import collections
import dataclasses
import hashlib
import json
import pathlib
from typing import Any, Literal

from prm_jax import config as config_lib
from prm_jax.generation import options
from prm_jax.runtime import command_line, storage
from prm_jax.supervision import rollout_labels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args(options.Generator, rollout_labels.Settings):
  input: pathlib.Path  # candidate solutions
  output: pathlib.Path  # the same lines with labels
  method: Literal["model", "rollouts", "judge"] = "model"  # what labels: see above
  readout: str = ""  # how a published reward model is read (model)
  threshold: config_lib.Share = 0.2  # a step is wrong if P(-1) is above it (model)
  outcome: Literal["answer", "labeller"] = "answer"  # source of is_correct (model)
  # Label as many right as wrong solutions of a problem, at most this many of each; problems without
  # both are left out.  0: label all solutions (rollouts).
  balanced: config_lib.Whole = 0
  template: Literal["critic", "thinkprm", "genprm"] = "critic"  # prompt (judge)
  votes: config_lib.Count = 8  # verdicts on each solution (judge)
  max_new_tokens: config_lib.Count | None = None  # of a sample; None: 512, or 8,192 for a judge
  hosts: config_lib.Hosts = config_lib.Hosts()  # for jobs whose hosts JAX does not detect


OF_SETTINGS = {field.name for field in dataclasses.fields(rollout_labels.Settings)}
OF_GENERATOR = {field.name for field in dataclasses.fields(options.Generator)}
PROMPTS = {"prompt", "system", "examples", "stop"}
FLAGS = {  # of each method, apart from the flags of all methods
  "model": {"model", "checkpoint", "step", "readout", "threshold", "outcome"},
  "rollouts": OF_GENERATOR | OF_SETTINGS | {"balanced", "hosts"},
  "judge": (OF_GENERATOR - PROMPTS) | {"template", "votes", "hosts"},
}


def main() -> None:
  args = command_line.parse(Args, __doc__)
  from prm_jax.runtime import distributed, journal

  check(args)
  if args.max_new_tokens is None:
    args = dataclasses.replace(args, max_new_tokens=8192 if args.method == "judge" else 512)
  if args.method == "model":
    lines = by_model(args)
  else:
    with distributed.job(args.hosts):
      distributed.check_same_command(args, [args.input])
      journal.check_output(args.output)
      lines = by_rollouts(args) if args.method == "rollouts" else by_judge(args)
  if lines:
    print("\n".join(lines))
    print(f"-> {args.output}")


def check(args: Args) -> None:
  """Raises ValueError for flags that do not go together."""
  others = vars(args).keys() - FLAGS[args.method] - {"input", "output", "method"}
  command_line.refuse(args, others, f"does not go with --method={args.method}")
  if args.method == "model":
    if bool(args.checkpoint) == bool(args.model) or (args.checkpoint and args.readout):
      raise ValueError("give one of --checkpoint=DIR and --model=DIR; --readout goes with --model")
    if args.model and args.step != "latest":
      raise ValueError(f"--step={args.step} goes with --checkpoint")
  else:
    args.check_model()
    if args.method == "judge" and args.url and args.model:
      raise ValueError("--model has no effect with --method=judge --url: a chat needs no tokenizer")
  for name, method in (("votes", "judge"), ("rollouts", "rollouts")):
    count = getattr(args, name)
    if args.method == method and count > 1 and not args.temperature:
      raise ValueError(f"--{name}={count} at --temperature=0 are all equal: raise --temperature")
  storage.refuse_inputs([args.output], [args.input])


def by_model(args: Args) -> list[str]:
  """Writes a reward model's labels, and returns a table."""
  from prm_jax.runtime import progress
  from prm_jax.scoring import batch_journal
  from prm_jax.scoring.scorer import Scorer
  from prm_jax.supervision import synthetic

  with batch_journal.beside(args.output) as journal, storage.written(args.output) as out:
    with progress.waiting(f"loading {args.name}"):
      if args.model:
        scorer = Scorer.load_model(args.model, args.readout)
      else:
        scorer = Scorer.load(args.checkpoint, args.step)
    journal.open(scorer.identity(), scorer.mesh)
    scorer = dataclasses.replace(scorer, journal=journal)
    given = (args.input, scorer, args.name, args.threshold, counts := collections.Counter())
    for line in synthetic.annotated(*given, outcome_by_labeller=args.outcome == "labeller"):
      out.write(json.dumps(line, ensure_ascii=False) + "\n")
  return synthetic.table(counts)


def by_rollouts(args: Args) -> list[str]:
  """Writes the labels of rollouts, and returns a table on the first host."""
  from prm_jax.evaluation.answers import grading
  from prm_jax.generation import prompts
  from prm_jax.runtime import journal, progress
  from prm_jax.supervision import rollouts

  s = rollout_labels.Settings(**{name: getattr(args, name) for name in OF_SETTINGS})
  with grading.Grader(cache=grading.CACHE) as grader:
    problems = rollouts.read(args.input, args.steps, grader, args.balanced)
    with progress.waiting(f"loading {args.name}"):
      engine = args.load()
    about = {"labeller": args.name, "seed": args.seed, **dataclasses.asdict(s)}
    about["balanced"] = args.balanced
    sampling, limits, form = args.sampling, args.limits, args.prompt
    about |= dataclasses.asdict(sampling) | dataclasses.asdict(limits)
    make, separator = args.maker(engine.tokenizer), prompts.SEPARATORS[args.steps]
    # Eight times the slots, so that few of them wait at the end of a round.
    at_once = 8 * (args.concurrency if args.url else args.batch)
    annotator = rollouts.Annotator(
      engine, make, sampling, limits, separator, grader, s, args.seed, about, at_once, form
    )
    more = {"prompt": make(problems[0].text, 0).text}
    if args.balanced:  # a grading timeout may have changed the choice in another run
      chosen = [(problem.text, [each.steps for each in problem.solutions]) for problem in problems]
      more["solutions"] = hashlib.sha256(repr(chosen).encode()).hexdigest()
    facts = run_facts(args, engine, about | more)
    work = lambda opened, left: annotator.run(problems, left, opened)
    lines = journal.run(args.output, len(problems), facts, work)
  return rollouts.table(lines) if lines else []


def by_judge(args: Args) -> list[str]:
  """Writes a judge's labels and scores, and returns a table on the first host."""
  from prm_jax.generation import prompts
  from prm_jax.runtime import journal, json_lines, progress
  from prm_jax.scoring import candidates
  from prm_jax.supervision import judge

  separator = prompts.SEPARATORS[args.steps]
  solutions = [
    (record, *candidates.solution(record, separator, where))
    for where, record in json_lines.records(args.input)
  ]
  with progress.waiting(f"loading {args.name}"):
    engine = args.load(chat=True)
  make = judge.message if args.url else prompts.maker("chat", engine.tokenizer, "")
  s = judge.Settings(args.template, args.votes, args.sampling, args.limits, args.seed)
  about = {"labeller": args.name, "template": args.template, "votes": args.votes}
  about |= dataclasses.asdict(args.sampling) | {"seed": args.seed}
  facts = run_facts(args, engine, about | dataclasses.asdict(args.limits))
  work = lambda opened, left: judge.annotate(solutions, left, engine, make, s, about, opened)
  lines = journal.run(args.output, len(solutions), facts, work)
  return judge.table(lines) if lines else []


def run_facts(args: Args, engine: Any, about: dict[str, Any]) -> dict[str, Any]:
  """Returns all settings that determine the output; a resumed run must have the same."""
  facts = {"method": args.method, "steps": args.steps, "input": storage.sha256_of(args.input)}
  return about | facts | engine.facts()


if __name__ == "__main__":
  exits.run(main)
