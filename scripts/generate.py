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
import os
import pathlib
from typing import Annotated, Literal

import msgspec

from prm_jax import config as config_lib
from prm_jax.runtime import json_lines


@dataclasses.dataclass(frozen=True)
class Args(config_lib.Checked):
  input: pathlib.Path
  output: pathlib.Path
  model: str = ""  # directory of a public or exported language model
  checkpoint: str = ""  # or work directory of train.py, trained on text
  url: str = ""  # or a server of OpenAI's completions API, such as http://127.0.0.1:8000/v1
  served_model: str = ""  # the server's name of the model; --model then has its tokenizer
  concurrency: config_lib.Count = 64  # requests under way
  n: config_lib.Count = 16  # samples of each problem
  max_new_tokens: config_lib.Count = 512
  temperature: config_lib.NonNegative = 1.0
  top_k: config_lib.Whole = 0  # 0: all
  top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
  min_p: config_lib.Share = 0.0
  stop: tuple[json_lines.Text, ...] = ()  # texts that end a sample; they stay in it
  seed: config_lib.Whole = 0
  prompt: Literal["chat", "few_shot", "plain"] = "chat"
  system: str | None = None  # of chat; None: to reason step by step and box the answer
  examples: pathlib.Path | None = None  # of few_shot: lines with problem and steps
  steps: Literal["lines", "paragraphs"] = "lines"  # paragraphs: blank lines are between steps
  batch: config_lib.Count = 64  # samples under way at once
  dtype: Literal["float32", "bfloat16"] = "float32"  # of --model
  tensor: config_lib.Count = 1  # devices that share a copy of the model
  # A search instead of n samples, with n solutions of a problem under way at once.
  search: Literal["", "best_of_n", "beam", "dvts", "lookahead", "particles"] = ""
  prm: str = ""  # reward model: work directory of train.py, or a published or exported model
  readout: str = ""  # of a published one
  expansions: config_lib.Count = 4  # of each solution that goes on
  reduction: Literal["last", "min", "mean", "product"] = "product"  # of steps, to compare solutions
  lookahead: config_lib.Count = 1  # steps that --search=lookahead looks ahead
  max_steps: config_lib.Count = 40
  max_step_tokens: config_lib.Count = 256
  hosts: config_lib.Hosts = config_lib.Hosts()  # several: where JAX does not find them itself


def main() -> None:
  args = config_lib.parse(Args, __doc__)
  import jax

  from prm_jax.datasets import download
  from prm_jax.generation import prompts, samples, search, step_writer
  from prm_jax.generation.engines import Limits
  from prm_jax.generation.sampling import Sampling
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
    with progress.waiting(f"loading {args.url or args.model or args.checkpoint}"):
      engine = load(args)
    examples = prompts.read_examples(args.examples) if args.examples else []
    system = prompts.SYSTEM if args.system is None else args.system
    make = prompts.maker(args.prompt, engine.tokenizer, system, examples)
    stop = (*args.stop, prompts.NEXT) if args.prompt == "few_shot" else args.stop
    settings = samples.Settings(
      args.n,
      Sampling(args.temperature, args.top_k, args.top_p, args.min_p),
      Limits(args.max_new_tokens, stop),
      args.seed,
      args.prompt,
      args.steps,
    )
    own, run = problems[jax.process_index() :: jax.process_count()], samples.generate
    if args.search:
      with progress.waiting(f"loading {args.prm}"):
        scorer = load_reward_model(args, max(min(args.batch // args.n, len(own)), 1))
      given = (settings.sampling, settings.limits, args.max_step_tokens, rule.steps_ahead)
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
  """ValueError for flags that do not go together."""
  if bool(args.url) != bool(args.served_model):
    raise ValueError("--url and --served_model go together")
  if args.url and args.checkpoint:
    raise ValueError("--url and --checkpoint contradict each other")
  if not args.url and bool(args.model) == bool(args.checkpoint):
    raise ValueError("give one of --model=DIR and --checkpoint=DIR, or --url=URL")
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
    raise ValueError(f"--batch={args.batch} lanes hold no search of --n={args.n}: give more")


def load(args: Args):
  """The engine."""
  from prm_jax.generation import language_models, server
  from prm_jax.input_pipeline import tokenizers

  if args.url:
    key = os.environ.get("OPENAI_API_KEY", "")
    tokenizer = tokenizers.load(args.model) if args.model else None
    return server.Server(args.url, args.served_model, args.concurrency, key, tokenizer=tokenizer)
  if args.model:
    return language_models.load_model(args.model, args.dtype, args.batch, args.tensor)
  return language_models.load_checkpoint(args.checkpoint, args.batch, args.tensor)


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
