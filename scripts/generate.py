"""Samples n candidate solutions of each problem from a language model, ready to be scored.

  python scripts/generate.py --model=models/qwen2.5-coder-0.5b --input=problems.jsonl \\
    --output=samples.jsonl --n=16 --max_new_tokens=512 --temperature=0.8

--input has JSON records with `problem`; their other keys are kept, except those that judge
a solution.  --output gets one record for each sample, with `text`, `steps`, `answer`, `tokens`,
`logprob` and `finished`; a sample that was cut off is not finished and has no answer.  grade.py,
score.py and rerank.py read the output.

--model is a public or exported language model; --checkpoint is a run of train.py on text.  --url is
a server instead: its key is read from OPENAI_API_KEY, and --model, if given, has its tokenizer and
chat template.  --prompt=chat uses the model's template; few_shot puts the solved
problems of --examples first; plain gives the problem and a newline.  The same --seed gives the same
samples, whatever --batch is.

--search=RULE searches instead, guided by the reward model --prm: n solutions of a problem grow at
once, and after each step the rule chooses which continue.  beam: the best n / expansions, each
expansions times; dvts: the best of each of n / expansions subtrees; lookahead: beam with scores
read some steps later; particles: drawn in proportion to their odds; best_of_n: all.  Records then
have score.py's keys too.

After a kill, the same command resumes with the unfinished problems; a finished --output is an
error.  Several hosts share the problems if they share the disk of --output.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import dataclasses
import pathlib
from typing import Literal

from prm_jax import config as config_lib
from prm_jax import reductions
from prm_jax.generation import options
from prm_jax.runtime import command_line, storage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args(options.Generator):
  input: pathlib.Path  # problems
  output: pathlib.Path  # a line for each sample
  n: config_lib.Count = 16  # samples of each problem
  # Searches instead of sampling, with n solutions of a problem at once.
  search: Literal["", "best_of_n", "beam", "dvts", "lookahead", "particles"] = ""
  prm: str = ""  # reward model: work directory of train.py, or a published or exported model
  readout: str = ""  # how a published reward model is read
  expansions: config_lib.Count = 4  # copies of each solution that continues
  reduction: reductions.Reduction = "product"  # from step scores to a solution's score
  lookahead: config_lib.Count = 1  # steps that --search=lookahead looks ahead
  max_steps: config_lib.Count = 40  # limit of steps of a solution, in a search
  max_step_tokens: config_lib.Count = 256  # in a search, longer steps are cut off
  hosts: config_lib.Hosts = config_lib.Hosts()  # for jobs whose hosts JAX does not detect


def main() -> None:
  args = command_line.parse(Args, __doc__)
  import jax

  from prm_jax.generation import samples, search
  from prm_jax.runtime import distributed, journal, progress

  check(args)
  given = (args.n, args.sampling, args.limits, args.seed, args.prompt, args.steps)
  settings = samples.Settings(*given)
  if args.search:
    rule = (args.search, args.expansions, args.reduction, args.lookahead, args.max_steps)
    settings = search.Settings(*given, *rule, args.max_step_tokens)
  with distributed.job(args.hosts):
    distributed.check_same_command(args, [args.input])
    journal.check_output(args.output)
    problems = samples.read(args.input)
    with progress.waiting(f"loading {args.name}"):
      engine = args.load()
    make = args.maker(engine.tokenizer)
    run, own = samples.generate, -(-len(problems) // jax.process_count())
    if args.search:
      with progress.waiting(f"loading {args.prm}"):
        scorer = load_reward_model(args, min(args.batch // args.n, own))
      engine, run = search.Search(engine, scorer, settings), samples.search
    # The first prompt represents template, system prompt and examples.
    facts = dataclasses.asdict(settings) | engine.facts()
    facts["input"] = storage.sha256_of(args.input)
    facts["prompt"] = make(problems[0]["problem"], 0).text
    work = lambda opened, left: run(problems, left, engine, make, settings, opened)
    if records := journal.run(args.output, len(problems), facts, work):
      print("\n".join(samples.table(records)))
      print(f"-> {args.output}")


def check(args: Args) -> None:
  """Raises ValueError for flags that do not go together."""
  published = bool(args.prm) and (pathlib.Path(args.prm) / "config.json").is_file()
  args.check_model(elsewhere=["dtype"] * published)
  storage.refuse_inputs([args.output], [args.input])
  if bool(args.search) != bool(args.prm):
    raise ValueError("--search=RULE and --prm=DIR go together")
  if args.search and args.url:
    raise ValueError("--search needs --model or --checkpoint: it cannot run on a server")
  if not args.search:
    names = ("readout", "expansions", "reduction", "lookahead", "max_steps", "max_step_tokens")
    command_line.refuse(args, names, "is for a search: give --search=RULE and --prm=DIR")
  unused = ["lookahead"] * (args.search != "lookahead")
  unused += ["expansions"] * (args.search in ("best_of_n", "particles"))
  command_line.refuse(args, unused, f"has no effect with --search={args.search}")
  if args.readout and not published:
    raise ValueError(f"--readout goes with a published model; --prm={args.prm} has no config.json")
  greedy = "--top_k=1" if args.top_k == 1 else ""
  if args.temperature < 2.0**-126:  # `sampling.TINY`, whose module imports JAX
    greedy = "--temperature=0"
  if args.n > 1 and greedy:
    raise ValueError(f"--n={args.n} samples at {greedy} are all equal: give --n=1")
  if args.search and args.batch < args.n:
    raise ValueError(f"--batch={args.batch} is below --n={args.n}: a search runs n lanes at once")


def load_reward_model(args: Args, contexts: int):
  """Loads the reward model for a search of `contexts` problems at once."""
  import jax

  from prm_jax.generation.cached_scorer import CachedScorer
  from prm_jax.scoring.scorer import Scorer

  devices = jax.local_devices()  # each host searches its own problems
  if (pathlib.Path(args.prm) / "config.json").is_file():
    scorer = Scorer.load_model(args.prm, args.readout, args.dtype, devices=devices)
  else:
    scorer = Scorer.load(args.prm, devices=devices)
  return CachedScorer(scorer, contexts)


if __name__ == "__main__":
  exits.run(main)
