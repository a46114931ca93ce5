"""Candidate solutions from a language model: n samples of each problem, in the form to be scored.

  python scripts/generate.py --model=models/qwen2.5-coder-0.5b --input=problems.jsonl \\
    --output=samples.jsonl --n=16 --max_new_tokens=512 --temperature=0.8

--input: JSON lines with `problem`; other keys are kept.  --output: one line for each sample, with
`text`, `steps`, `answer`, `tokens`, `logprob` and `finished`; one that was cut off is not finished
and has no answer.  grade.py, score.py and rerank.py read them.

--model is a public model or an export of a language model, --checkpoint a run of train.py on
text.  --url is a server instead; its key is read from OPENAI_API_KEY, and --model, if given, has
its tokenizer and chat template.  --prompt=chat uses the model's template; few_shot puts the solved
problems of --examples first; plain gives the problem and a newline.  The same --seed gives the same
samples, whatever --batch is.

--search=RULE searches instead, guided by the reward model --prm: n solutions of a problem are under
way at once, and after each step the rule says which go on.  beam: the best n / expansions, each
expansions times; dvts: the same in n / expansions subtrees; lookahead: beam, judged after further
steps; particles: drawn in proportion to their odds; best_of_n: all.  Lines then have score.py's
keys too.

Run again after a kill, it goes on with the problems that were not done; a finished --output is an
error.  Several hosts share the problems if they share the disk of --output.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before what takes time to import

import dataclasses
import pathlib
from typing import Literal

from prm_jax import config as config_lib
from prm_jax import reductions
from prm_jax.generation import options
from prm_jax.runtime import command_line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args(options.Generator):
  input: pathlib.Path
  output: pathlib.Path
  n: config_lib.Count = 16  # samples of each problem
  # A search instead of n samples, with n solutions of a problem under way at once.
  search: Literal["", "best_of_n", "beam", "dvts", "lookahead", "particles"] = ""
  prm: str = ""  # reward model: work directory of train.py, or a published or exported model
  readout: str = ""  # of a published one
  expansions: config_lib.Count = 4  # of each solution that goes on
  reduction: reductions.Reduction = "product"  # of steps, to compare solutions
  lookahead: config_lib.Count = 1  # steps that --search=lookahead looks ahead
  max_steps: config_lib.Count = 40
  max_step_tokens: config_lib.Count = 256
  hosts: config_lib.Hosts = config_lib.Hosts()  # several: where JAX does not find them itself


def main() -> None:
  args = command_line.parse(Args, __doc__)
  import jax

  from prm_jax.datasets import download
  from prm_jax.generation import samples, search, step_writer
  from prm_jax.runtime import distributed, journal, progress

  check(args)
  rule = None
  if args.search:
    steps = (args.reduction, args.lookahead, args.max_steps)
    rule = search.Settings(args.search, args.n, args.expansions, *steps)
  with distributed.job(args.hosts):
    distributed.check_same_command(args, [args.input])
    journal.check_output(args.output)
    problems = samples.read(args.input)
    with progress.waiting(f"loading {args.name}"):
      engine = args.load()
    make, given = args.maker(engine.tokenizer), (args.sampling, args.limits)
    settings = samples.Settings(args.n, *given, args.seed, args.prompt, args.steps)
    own, run = problems[jax.process_index() :: jax.process_count()], samples.generate
    if args.search:
      with progress.waiting(f"loading {args.prm}"):
        scorer = load_reward_model(args, max(min(args.batch // args.n, len(own)), 1))
      given += (args.max_step_tokens, rule.steps_ahead)
      writing = step_writer.Settings(*given, args.prompt, args.steps)
      engine, run = search.Search(engine, scorer, rule, writing), samples.search
    # The first prompt stands for template, system prompt and examples.
    facts = dataclasses.asdict(settings) | engine.facts()
    facts["input"] = download.sha256_of(args.input)
    facts["prompt"] = make(problems[0].text, 0).text
    work = lambda opened: run(own, engine, make, settings, opened)
    if written := journal.run(args.output, len(problems), facts, work):
      print("\n".join(samples.table(written)))
      print(f"-> {args.output}")


def check(args: Args) -> None:
  """Raises ValueError for flags that do not go together."""
  args.check_model()
  if args.output.resolve() == args.input.resolve():
    raise ValueError(f"--output={args.output} is the input: give another name")
  if bool(args.search) != bool(args.prm):
    raise ValueError("--search=RULE and --prm=DIR go together")
  if args.search and args.url:
    raise ValueError("--search needs --model or --checkpoint: a server gives no steps")
  names = ("readout", "expansions", "reduction", "lookahead", "max_steps", "max_step_tokens")
  given = [name for name in names if getattr(args, name) != getattr(Args, name)]
  if given and not args.search:
    raise ValueError(f"--{given[0]} is of a search: give --search=RULE and --prm=DIR")
  if args.search and args.batch < args.n:
    raise ValueError(f"--batch={args.batch} is below --n={args.n}: a search runs n lanes at once")


def load_reward_model(args: Args, contexts: int):
  """The reward model of a search, for so many problems at once."""
  import jax

  from prm_jax.generation.cached_scorer import CachedScorer
  from prm_jax.scoring.scorer import Scorer

  devices = jax.local_devices()  # hosts search problems of their own
  if (pathlib.Path(args.prm) / "config.json").is_file():
    scorer = Scorer.load_model(args.prm, args.readout, args.dtype, devices=devices)
  else:
    scorer = Scorer.load(args.prm, devices=devices)
  return CachedScorer(scorer, contexts)


if __name__ == "__main__":
  exits.run(main)
