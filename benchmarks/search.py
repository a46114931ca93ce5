"""What a search over all problems at once saves, in this code, on the CPU.

1. Beam search with 16 lanes over 100 arithmetic problems, 32 under way, beside one at a time
   with the same programs.  Language model and reward model are small ones, trained first.
2. A reward model with a cache reads solutions as they grow by a step a round, beside reading each
   distinct one from its start, by itself or as the prefix tree of the round. The model has the
   shape of --model and random weights; the solutions are those of --candidates.
3. A language model of the same shape writes 6 steps of 32 tokens in 16 lanes a problem, of which
   4 go on after each step, beside two engines without the cache of a search: one generates each
   solution from its prompt, one reads the text of each lane again before each step.

Targets: all at once is at least 5 times faster; and at least 0.9 of the saving that arithmetic
promises (tokens from the start over tokens with a cache) is found again in seconds, by both models.
Compilation is not timed.  Takes 8 minutes, compilation included.
"""

import collections
import dataclasses
import functools
import json
import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np

from benchmarks import runner
from prm_jax import config as config_lib
from prm_jax.datasets import arithmetic
from prm_jax.experiments import alternatives
from prm_jax.experiments import search as experiment
from prm_jax.experiments.plan import Plan
from prm_jax.experiments.workspace import Workspace
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
  model: pathlib.Path = pathlib.Path("models/smollm2-135m")  # whose shape and tokenizer are used
  layers: int = 4  # the number of its first layers that are used
  candidates: pathlib.Path | None = None  # lines with problem and steps or text; None: arithmetic
  problems: int = 4  # of the candidates, 16 solutions of each
  updates: int = 600  # of each of the two small models
  contexts: int = 32  # problems under way at once in the beam search
  repeats: int = 3


def run(args: Args) -> dict:
  """Measures both."""
  jax.config.update("jax_platforms", "cpu")
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
  """Seconds of a beam search over the problems together, and one after the other."""
  plan = command_line.read(str(PLAN), Plan)
  updates, count = (20, 4) if args.quick else (args.updates, 100)
  sizes = dataclasses.replace(plan.search, updates=updates, labelled=100, problems=count)
  quick = dataclasses.replace(plan.quickstart, process_updates=updates)
  plan = dataclasses.replace(plan, search=sizes, quickstart=quick)
  with tempfile.TemporaryDirectory() as directory:
    space = Workspace(pathlib.Path(directory), {}, 0)
    made = experiment.Made(alternatives.with_quickstart(plan, space), space)
    model, scorer, asked = made.language_model, made.reward_model, made.prompts(made.test)
  writing = step_writer.Settings(Sampling(), experiment.LIMITS, 32)
  of = lambda contexts: search.Search(
    model, CachedScorer(scorer, contexts), search.Settings("beam", LANES), writing
  )
  together, single = of(min(args.contexts, count)), of(1)
  alone = [[each] for each in asked]
  seconds = {}
  for engine, batches in ((together, [asked]), (single, alone)):
    for batch in batches:  # compiles
      for _ in engine.run(batch):
        pass
    times = [_seconds(engine, batches) for _ in range(1 if args.quick else args.repeats)]
    seconds[engine is together] = statistics.median(times)
  return {
    "problems": count,
    "seconds, all at once": seconds[True],
    "seconds, one at a time": seconds[False],
    "times as long": seconds[False] / seconds[True],
  }


def _seconds(engine: search.Search, batches: list) -> float:
  start = time.perf_counter()
  for batch in batches:
    for _ in engine.run(batch):
      pass
  return time.perf_counter() - start


def growing(args: Args) -> dict:
  """Seconds to read solutions after every step, with and without a cache."""
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
  found: dict[str, list[float]] = collections.defaultdict(list)
  cached = CachedScorer(scorer, len(solutions))
  untimed = 2  # contexts grow in the first, so both compile
  for _ in range(untimed + (1 if args.quick else args.repeats)):
    cached.places = [Places() for _ in solutions]
    cached.encoded = [0] * len(solutions)
    start = time.perf_counter()
    for asked in rounds:
      cached.probabilities(asked)
      cached.keep(asked)
    found["seconds, cached"].append(time.perf_counter() - start)
    for name, reader in (("each from its start", whole), ("the tree of a round", scorer)):
      start = time.perf_counter()
      for pairs in flat:
        reader.by_head(pairs)
      found[f"seconds, {name}"].append(time.perf_counter() - start)
  tokens = sum(cached.length(*pair) for pairs in flat for pair in pairs)
  row = {"solutions": sum(map(len, solutions)), "rounds": len(rounds)}
  row |= {"tokens with a cache": sum(cached.encoded), "tokens from the start": tokens}
  return row | {name: statistics.median(times[untimed:]) for name, times in found.items()}


class Continued(Sampler):
  """A sampler of prompts that are lists of tokens."""

  def encode(self, prompt: Prompt) -> list[int]:
    return json.loads(prompt.problem)


class EvenSteps(StepWriter):
  """Steps of one length: random weights write no line breaks to end them."""

  def _ends_step(self, part) -> bool:
    return len(part) == self.s.max_step_tokens


def writing(args: Args) -> dict:
  """Seconds to write the steps of a search, with and without its cache."""
  scorer, problems = random_scorer(args), [several[0][0] for several in candidates(args)]
  rounds, count = (2, 8) if args.quick else (6, 32)
  asked = [scorer.tokenizer.encode(problem) for problem in problems]
  model = Continued.of(
    scorer.params, scorer.config, scorer.tokenizer, frozenset(), scorer.mesh, LANES * len(asked)
  )
  limits = Limits(max_new_tokens=rounds * count)
  how = step_writer.Settings(Sampling(), limits, count)
  longest = max(map(len, asked))
  begun = lambda tokens: Prompt("", json.dumps([int(t) for t in tokens]), "", seed=0)

  def sample(prompts: list[Prompt], n: int, tokens: int) -> None:
    for _ in model.generate(prompts, n, Sampling(), Limits(max_new_tokens=tokens)):
      pass

  found: dict[str, list[float]] = collections.defaultdict(list)
  for _ in range(1 + (1 if args.quick else args.repeats)):  # the first compiles
    start = time.perf_counter()
    paths, spent = _steps(EvenSteps(model, len(asked), LANES, longest, how), asked, rounds)
    found["seconds, cached"].append(time.perf_counter() - start)
    start = time.perf_counter()
    for r in range(rounds):
      sample([begun(tokens) for tokens in asked], LANES, (r + 1) * count)
    found["seconds, each from its start"].append(time.perf_counter() - start)
    start = time.perf_counter()
    for before in paths:
      sample([begun(tokens) for tokens in before], 1, count)
    found["seconds, prefixes read again"].append(time.perf_counter() - start)
  lanes = LANES * len(asked)
  prompts = sum(len(tokens) - 1 for tokens in asked)
  row = {"lanes": lanes, "rounds": rounds, "tokens with a cache": spent["read"]}
  row["tokens from the start"] = sum(prompts + lanes * r * count for r in range(1, rounds + 1))
  row["tokens with prefixes read again"] = spent["read_from_start"]
  return row | {name: statistics.median(times[1:]) for name, times in found.items()}


def _steps(
  writer: StepWriter, asked: list[list[int]], rounds: int
) -> tuple[list[list[tuple[int, ...]]], collections.Counter]:
  """The tokens before each step by rounds, and the tokens spent; four lanes go on, as four each."""
  rng, spent = np.random.default_rng(0), collections.Counter()
  for g, tokens in enumerate(asked):
    writer.begin(g, tokens, g, [Lane(k, 0) for k in range(LANES)])
  done, paths = [0] * len(asked), [[] for _ in range(rounds)]
  paths[0] = [(*tokens,) for tokens in asked for _ in range(LANES)]
  while min(done) < rounds:
    going = {}
    for g in writer.write():
      done[g] += 1
      if done[g] == rounds:
        spent += writer.end(g)
        continue
      lanes = [lane for lane, _ in writer.written(g)]
      parents = np.repeat(rng.choice(LANES, LANES // 4, replace=False), 4).tolist()
      going[g] = [dataclasses.replace(lanes[k], stream=i) for i, k in enumerate(parents)], parents
      paths[done[g]] += [(*asked[g], *lanes[k].tokens) for k in parents]
    writer.go_on(going)
  return paths, spent


def candidates(args: Args) -> list[list[tuple[str, tuple[str, ...]]]]:
  """Solutions of some problems, 16 of each, as (problem, steps)."""
  if args.candidates is None:
    rng = np.random.default_rng(0)
    problems = arithmetic.distinct_problems(0, 4 if args.quick else 64, arithmetic.HARD)
    return [
      [(each.text, arithmetic.solve(each, rng).steps) for _ in range(LANES)] for each in problems
    ]
  found: dict[str, list] = collections.defaultdict(list)
  for line in args.candidates.open():
    record = json.loads(line)
    steps = record.get("steps") or prompts.split(record["text"], "paragraphs")
    found[record["problem"]].append((record["problem"], tuple(steps)))
  return [several[:LANES] for several in found.values()][: args.problems]


def random_scorer(args: Args) -> Scorer:
  """A reward model of random weights."""
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
