"""Measures what a search over all problems at once saves in this code, on the CPU.

1. A beam search with 16 lanes over 100 arithmetic problems, 32 of them at once, is compared with
   a search of one problem at a time.  Both use the same small language model and reward model,
   which are trained first.
2. A reward model with a cache reads solutions that grow by a step a round.  It is compared with
   reading each distinct solution from its start, by itself or in the prefix tree of the round.  The
   model has the shape of --model and random weights; --candidates has the solutions.
3. A language model of the same shape writes 6 steps of 32 tokens in 16 lanes per problem, of which
   4 continue after each step.  It is compared with two engines without a search's cache: one
   generates each solution from its prompt, the other reads each lane's text again before each step.

Targets: all at once is at least 5 times as fast, and the speedup of each model, in seconds, is at
least 0.9 of its speedup in tokens (tokens from the start over tokens with a cache).  Compilation is
not timed.  Takes 8 minutes, compilation included.
"""

import collections
import dataclasses
import functools
import json
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Sequence

import jax
import numpy as np

from benchmarks import runner
from prm_jax import config as config_lib
from prm_jax.datasets import arithmetic
from prm_jax.experiments import search as experiment
from prm_jax.experiments.plan import Plan
from prm_jax.generation import prompts, search, step_writer
from prm_jax.generation.cached_scorer import CachedScorer
from prm_jax.generation.engines import Limits, Prompt
from prm_jax.generation.places import Places
from prm_jax.generation.sampler import Sampler
from prm_jax.generation.sampling import Sampling
from prm_jax.generation.step_writer import Lane, StepWriter
from prm_jax.input_pipeline import token_tree, tokenizers
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import command_line
from prm_jax.scoring import readouts
from prm_jax.scoring.scorer import Scorer
from prm_jax.training import initialization
from prm_jax.training import step as step_lib

LANES = 16
PLAN = runner.ROOT / "configs" / "experiments" / "cpu.py"


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  model: pathlib.Path = pathlib.Path("models/smollm2-135m")  # gives the shape and the tokenizer
  layers: int = 4  # number of the model's first layers to use
  candidates: pathlib.Path | None = None  # lines with problem and steps or text; None: arithmetic
  problems: int = 4  # problems of the candidates, with 16 solutions each
  updates: int = 600  # updates of each of the two small models
  contexts: int = 32  # problems that the beam search works on at once
  repeats: int = 3


def run(args: Args) -> dict:
  """Measures a beam search, and both models on their own."""
  jax.config.update("jax_platforms", "cpu")
  if args.quick:
    args = dataclasses.replace(args, repeats=1)
  at_once, read, written = all_at_once(args), growing(args), writing(args)
  for row in (read, written):
    row["promised saving"] = row["tokens from the start"] / row["tokens with a cache"]
    saving = row["seconds, each from its start"] / row["seconds, cached"]
    row["share of it"] = saving / row["promised saving"]
  return {
    "targets": [
      runner.target("one problem at a time, in times as long", ">=", 5, at_once["times as long"]),
      runner.target("share of the promised saving, reading", ">=", 0.9, read["share of it"]),
      runner.target("share of the promised saving, writing", ">=", 0.9, written["share of it"]),
    ],
    "tables": {
      "Beam search, 16 lanes": [at_once],
      "Reading solutions as they grow": [read],
      "Writing steps": [written],
    },
  }


def all_at_once(args: Args) -> dict:
  """Measures a beam search over all problems at once, and over one after the other."""
  plan = command_line.read(str(PLAN), Plan)
  updates, count = (20, 4) if args.quick else (args.updates, 100)
  sizes = dataclasses.replace(plan.search, updates=updates, labelled=100, problems=count)
  quick = dataclasses.replace(plan.quickstart, process_updates=updates)
  plan = dataclasses.replace(plan, search=sizes, quickstart=quick)
  with tempfile.TemporaryDirectory() as directory:
    study = experiment.study(plan, pathlib.Path(directory), seed=0)
    model, scorer, asked = study.language_model, study.reward_model, study.prompts(study.test)
  s = search.Settings(LANES, limits=experiment.LIMITS, max_step_tokens=32)
  engine = lambda contexts: search.Search(model, CachedScorer(scorer, contexts), s)
  several, one = engine(min(args.contexts, count)), engine(1)
  forms = {
    "seconds, all at once": lambda: [*several.run(asked)],
    "seconds, one at a time": lambda: [[*one.run([prompt])] for prompt in asked],
  }
  row = {"problems": count} | medians(forms, args.repeats)
  return row | {"times as long": row["seconds, one at a time"] / row["seconds, all at once"]}


def medians(forms: dict[str, Callable], repeats: int, untimed: int = 1) -> dict[str, float]:
  """Returns the median seconds of each form's calls."""
  seconds = runner.by_turns(forms, repeats, untimed)
  return {name: statistics.median(times) for name, times in seconds.items()}


def growing(args: Args) -> dict:
  """Measures a reward model that reads solutions after every step, with and without a cache."""
  solutions, scorer = candidates(args), random_scorer(args)
  rounds: list[dict[int, list]] = []
  for r in range(1, 1 + max(len(steps) for several in solutions for _, steps in several)):
    asked = {
      g: [(problem, steps[:r]) for problem, steps in several if len(steps) >= r]
      for g, several in enumerate(solutions)
    }
    rounds.append({g: several for g, several in asked.items() if several})
  whole = dataclasses.replace(scorer, merge=False)
  flat = [[*{pair: 0 for several in asked.values() for pair in several}] for asked in rounds]
  cached = CachedScorer(scorer, len(solutions))

  def read_cached() -> None:
    cached.places = [Places() for _ in solutions]
    cached.encoded = [0] * len(solutions)
    for asked in rounds:
      cached.probabilities(asked)
      cached.keep(asked)

  forms = {
    "seconds, cached": read_cached,
    "seconds, each from its start": lambda: [*map(whole.by_head, flat)],
    "seconds, the tree of a round": lambda: [*map(scorer.by_head, flat)],
  }
  seconds = medians(forms, args.repeats, untimed=2)  # contexts grow in the first call: both compile
  tokens = sum(cached.length(*pair) for pairs in flat for pair in pairs)
  row = {"solutions": sum(map(len, solutions)), "rounds": len(rounds)}
  row |= {"tokens with a cache": sum(cached.encoded), "tokens from the start": tokens}
  return row | seconds


class Continued(Sampler):
  """A sampler whose prompts are JSON lists of tokens."""

  def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
    return [json.loads(prompt.problem) for prompt in prompts]


class EvenSteps(StepWriter):
  """A writer of steps of one length, because random weights write no line breaks."""

  def _ends_step(self, part) -> bool:
    return len(part) == self.max_step_tokens


def writing(args: Args) -> dict:
  """Measures a language model that writes the steps of a search, with and without its cache."""
  scorer, problems = random_scorer(args), [x[0][0] for x in candidates(args)[: args.problems]]
  rounds, count = (2, 8) if args.quick else (6, 32)
  asked = [scorer.tokenizer.encode(problem) for problem in problems]
  model = Continued.of(
    scorer.params, scorer.config, scorer.tokenizer, frozenset(), scorer.mesh, LANES * len(asked)
  )
  limits = Limits(max_new_tokens=rounds * count)
  settings = step_writer.Settings(LANES, limits=limits)
  longest = max(map(len, asked))

  def sample(starts: Sequence[Sequence[int]], n: int, tokens: int) -> None:
    prompts = [Prompt("", json.dumps([*map(int, start)]), "", seed=0) for start in starts]
    collections.deque(model.generate(prompts, n, Sampling(), Limits(tokens)), maxlen=0)

  write = lambda: _steps(EvenSteps(model, len(asked), longest, settings, count), asked, rounds)
  paths, spent = write()
  forms = {
    "seconds, cached": lambda: write()[1],  # not its paths: `by_turns` waits for every number
    "seconds, each from its start": lambda: [
      sample(asked, LANES, (r + 1) * count) for r in range(rounds)
    ],
    "seconds, prefixes read again": lambda: [sample(prefixes, 1, count) for prefixes in paths],
  }
  seconds = medians(forms, args.repeats)
  lanes = LANES * len(asked)
  prompt_tokens = sum(len(tokens) - 1 for tokens in asked)
  row = {"lanes": lanes, "rounds": rounds, "tokens with a cache": spent["read"]}
  row["tokens from the start"] = sum(
    prompt_tokens + lanes * r * count for r in range(1, rounds + 1)
  )
  row["tokens with prefixes read again"] = spent["read_from_start"]
  return row | seconds


def _steps(
  writer: StepWriter, asked: list[list[int]], rounds: int
) -> tuple[list[list[tuple[int, ...]]], collections.Counter]:
  """Writes steps for several rounds; after each, four lanes continue, each as four copies.

  Returns the tokens before each step, by round, and the writer's token counts.
  """
  rng, spent = np.random.default_rng(0), collections.Counter()
  for g, tokens in enumerate(asked):
    writer.begin(g, tokens, g, [Lane(k, 0) for k in range(LANES)])
  done, paths = [0] * len(asked), [[] for _ in range(rounds)]
  paths[0] = [(*tokens,) for tokens in asked for _ in range(LANES)]
  while min(done) < rounds:
    continued = {}
    for g in writer.write():
      done[g] += 1
      if done[g] == rounds:
        spent += writer.end(g)
        continue
      lanes = [lane for lane, _ in writer.written(g)]
      parents = np.repeat(rng.choice(LANES, LANES // 4, replace=False), 4).tolist()
      children = [dataclasses.replace(lanes[k], stream=i) for i, k in enumerate(parents)]
      continued[g] = children, parents
      paths[done[g]] += [(*asked[g], *lanes[k].tokens) for k in parents]
    writer.go_on(continued)
  return paths, spent


def generated(count: int) -> list[list[tuple[str, tuple[str, ...]]]]:
  """Returns 16 solutions of each of `count` arithmetic problems, as (problem, steps)."""
  rng, problems = np.random.default_rng(0), arithmetic.distinct_problems(0, count, arithmetic.HARD)
  return [
    [(each.text, arithmetic.solve(each, rng).steps) for _ in range(LANES)] for each in problems
  ]


def candidates(args: Args) -> list[list[tuple[str, tuple[str, ...]]]]:
  """Returns solutions of some problems, 16 of each, as (problem, steps)."""
  if args.candidates is None:
    return generated(4 if args.quick else 64)
  solutions = []
  for record in map(json.loads, args.candidates.open()):
    steps = record.get("steps") or prompts.split(record["text"], "paragraphs")
    solutions.append((record["problem"], (record["problem"], tuple(steps))))
  return [several[:LANES] for several in runner.grouped(solutions)[: args.problems]]


def random_scorer(args: Args) -> Scorer:
  """Returns a reward model with random weights."""
  model = dataclasses.replace(
    initialization.architecture(str(args.model)), layers=1 if args.quick else args.layers
  )
  tokenizer = tokenizers.load(args.model)
  contract = token_tree.step_contract(tokenizer, "\n\n", "process", "benchmark")
  mesh = sharding_lib.make_mesh(config_lib.Mesh(), jax.devices()[:1])
  with jax.set_mesh(mesh):
    sizes = {"config": model, "vocab_size": model.vocab_size, "num_classes": 3}
    params = jax.jit(functools.partial(step_lib.init_params, **sizes))(jax.random.key(0))
  readout = readouts.trained(tokenizer, contract)
  return Scorer(contract, tokenizer, readout, model, model.vocab_size, params, mesh)
