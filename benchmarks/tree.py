"""What prefix trees save in this code: the same solutions as trees and flattened, on the CPU.

Training takes three forms: (a) one padded row for each path from the problem to a last step, four
rows to a batch, as public trainers have them; (b) those paths packed; (c) the solutions of a
problem merged into one tree, and trees packed.  All train the same distinct labels with the same
model and train step; (b) and (c) have rows of one length, one row to an update.  Scoring reads the
candidates of a problem as one tree or each by itself.

Target: at least 0.9 of the saving that arithmetic promises (tokens of all paths over distinct
tokens) is found again in seconds, and where nothing is shared at least 0.97.  Takes 15 minutes.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np

from benchmarks import runner, training
from prm_jax import config as config_lib
from prm_jax.datasets import arithmetic, prm800k
from prm_jax.datasets.prm800k import recipes
from prm_jax.input_pipeline import packing, prefix_tree, token_tree, tokenizers
from prm_jax.input_pipeline.token_tree import TokenTree
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import json_lines
from prm_jax.scoring import batching, candidates
from prm_jax.training import initialization
from prm_jax.training import programs as programs_lib
from prm_jax.types import Batch, StepTree

POOLS = "reranking/qwen25math_math100_bo8.jsonl"  # beside --source: eight solutions to a problem
FORMS = {
  "padded": "a: one padded row a path, four a batch",
  "packed": "b: paths, packed",
  "trees": "c: trees, packed",
}
BATCH = 4  # rows of (a), as TRL's
# Tokens of a row.  The sample of phase 1 is six trees: one row that holds them all, as shorter
# rows would cut them or stay half empty, which those of a larger set are not.
ROW_LENGTH = {"phase 1": 5632, "phase 2": 2048, "arithmetic": 1024, "real solutions": 4096}
LEAST = {"phase 1": 4, "phase 2": 4, "arithmetic": 300}  # timed updates of each form


@dataclasses.dataclass(frozen=True)
class Sizes:
  round: int = 64  # lengths of (a)'s batches are multiples of this, so that few are compiled
  sums: int = 800  # arithmetic problems to train on
  # Arithmetic problems to score, and candidates to each; with one, nothing is shared.
  pools: tuple[tuple[int, int], ...] = ((1600, 4), (800, 16), (800, 64), (1600, 1))
  real_pools: int = 35  # problems of POOLS
  repeats: int = 5  # of scoring a pool
  model: config_lib.Model | None = None  # in place of the public model and the quickstart's


TINY = config_lib.Model(width=32, layers=1, heads=2, kv_heads=1, head_size=16, mlp_width=32)
QUICK = Sizes(1024, 4, ((4, 4), (4, 1)), 1, 1, TINY)


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  source: pathlib.Path = runner.ROOT / "data/prm800k_upstream"
  """Folder of phase1_train.jsonl, phase1_test.jsonl and phase2_train.jsonl of PRM800K."""
  config: pathlib.Path = training.CONFIG
  """This project's settings."""
  model: pathlib.Path | None = None
  """Public model whose shape and tokenizer are used, not its weights; by default the config's."""
  layers: int = 2
  """The number of its first layers that are used."""
  rows: int = 240
  """Paths of each phase, in whole problems at random."""


@dataclasses.dataclass
class Model:
  """Programs and state of a run on one device, with random weights."""

  c: config_lib.Experiment
  tokenizer: tokenizers.Tokenizer
  vocab_size: int

  def __post_init__(self):
    separator = self.c.data.separator
    self.contract = token_tree.step_contract(self.tokenizer, separator, "process", "benchmark")
    self.mesh = sharding_lib.make_mesh(config_lib.Mesh(), jax.devices()[:1])
    with jax.set_mesh(self.mesh):
      classes = len(self.contract.classes)
      self.programs = programs_lib.make(self.c, self.vocab_size, classes, self.mesh)
      self.state = self.programs.init(jax.random.key(0))
    self.steps = {}  # compiled train steps, by the shapes of a batch

  def encode(self, trees: list[StepTree]) -> list[TokenTree]:
    return [token_tree.encode(tree, self.tokenizer, self.contract) for tree in trees]

  def prepare(self, batches: list[Batch]) -> float:
    """Seconds to compile the train step for the shapes of the batches."""
    start = time.perf_counter()
    with jax.set_mesh(self.mesh):
      for batch in batches:
        if shapes(batch) not in self.steps:
          lowered = self.programs.train_step.lower(self.state, self._placed(batch))
          self.steps[shapes(batch)] = lowered.compile()
    return time.perf_counter() - start

  def update(self, batch: Batch) -> float:
    """Seconds of one update, to its end."""
    with jax.set_mesh(self.mesh):
      start = time.perf_counter()
      self.state, metrics = self.steps[shapes(batch)](self.state, self._placed(batch))
      metrics["loss"].block_until_ready()
      return time.perf_counter() - start

  def score(self, pool: list[tuple[str, TokenTree]], row_length: int, merge: bool) -> float:
    """Seconds to read a pool of (problem, candidate), merging and packing included."""
    problems, trees = zip(*pool)
    forward = lambda batch: self.programs.read(self.state.params, batch)
    start = time.perf_counter()
    batching.read(trees, problems, forward, self.mesh, row_length, merge)
    return time.perf_counter() - start

  def _placed(self, batch: Batch) -> Batch:
    return jax.device_put(batch, sharding_lib.batch_sharding(self.mesh))


def shapes(batch: Batch) -> tuple:
  return tuple(leaf.shape for leaf in jax.tree.leaves(batch))


def run(args: Args) -> dict:
  """Measures training on three sets of solutions and scoring of several pools."""
  if min(args.layers, args.rows) < 1:
    raise ValueError("--layers and --rows: at least 1")
  sizes, rows = (QUICK, 8) if args.quick else (Sizes(), args.rows)
  files = {
    "phase 1": [args.source / "phase1_train.jsonl", args.source / "phase1_test.jsonl"],
    "phase 2": [args.source / "phase2_train.jsonl"],
  }
  training.check_files(args.config, *itertools.chain(*files.values()))
  jax.config.update("jax_platforms", "cpu")
  forms, trained, scored = [], [], []
  model = public(args, sizes)
  for name, recipe in (("phase 1", "trl"), ("phase 2", "paper")):
    solutions = some(training.solutions(files[name], recipe), rows)
    forms += (found := train(name, model, solutions, sizes))[0]
    trained.append(found[1])
  pools = args.source.resolve().parent / POOLS
  if pools.is_file():
    pool = real_pool(pools, model, sizes.real_pools)
    scored.append(score("real solutions", model, pool, "real solutions", 1))
  else:
    runner.say(f"{pools}: not there, so real solutions are not scored")
  solutions, model = generated(sizes)
  forms += (found := train("arithmetic", model, solutions, sizes))[0]
  trained.append(found[1])
  for problems, count in sizes.pools:
    pool = sampled_pool(model, problems, count)
    name = f"arithmetic, {count} sample{'s' * (count > 1)}"
    scored.append(score(name, model, pool, "arithmetic", sizes.repeats))
  return {
    "targets": targets(trained, scored),
    "tables": {"An epoch in each form": forms, "Training": trained, "Scoring": scored},
    "notes": f"PRM800K and real solutions: {args.layers} layers of the shape of "
    f"{training.model_path(args).name}, random weights, settings {args.config.name}; arithmetic: "
    "the model of configs/arithmetic.py.",
  }


def targets(trained: list[dict], scored: list[dict]) -> list[dict]:
  rows = []
  for about in trained:
    what = f"share of the arithmetic saving, training on {about['training on']}"
    rows.append(runner.target(what, ">=", 0.9, about["share"]))
  for about in scored:
    name = about["scoring"]
    if about["flattened / distinct"] == 1:
      what = f"flattened / merged seconds where nothing is shared, scoring {name}"
      rows.append(runner.target(what, ">=", 0.97, about["seconds, ratio"]))
    elif name.startswith("arithmetic"):
      what = f"share of the arithmetic saving, scoring {name}"
      rows.append(runner.target(what, ">=", 0.9, about["share"]))
  return rows


def public(args: Args, sizes: Sizes) -> Model:
  """The shape and tokenizer of a public model, its first layers, random weights."""
  c = config_lib.read(str(args.config))
  c = dataclasses.replace(c, init=config_lib.Init(checkpoint=str(training.model_path(args))))
  c, tokenizer, vocab_size = initialization.find(c, None)
  shape = dataclasses.replace(c.model, layers=min(args.layers, c.model.layers))
  c = dataclasses.replace(c, init=config_lib.Init(), model=sizes.model or shape)
  return Model(c, tokenizer, vocab_size)


def generated(sizes: Sizes) -> tuple[list[StepTree], Model]:
  """Arithmetic with five alternatives to a step, and the model of configs/arithmetic.py."""
  generator = arithmetic.Generator(train_problems=sizes.sums, test_problems=0, alternatives=5)
  records = prm800k.numbered(generator.rows()["train"], "arithmetic_train")
  solutions, _ = recipes.convert_all(records, recipes.RECIPES["paper"])
  c = config_lib.read(str(runner.ROOT / "configs/arithmetic.py"))
  c = dataclasses.replace(c, model=sizes.model or c.model)
  with tempfile.TemporaryDirectory() as directory:
    texts = (text for tree in solutions for text in (tree.problem, *tree.steps))
    path = pathlib.Path(directory, "tokenizer.model")
    tokenizer = tokenizers.train_sentencepiece(texts, path, 320)
  return solutions, Model(c, tokenizer, tokenizer.vocab_size)


def some(solutions: list[StepTree], paths: int) -> list[StepTree]:
  """All solutions of random problems, until there are so many paths."""
  problems = grouped((tree.problem, tree) for tree in solutions)
  random.Random(0).shuffle(problems)
  out = []
  for group in problems:
    if sum(len(training.paths(tree)) for tree in out) >= paths:
      break
    out += group
  return out


def grouped(pairs) -> list[list]:
  """The values of (problem, value) pairs, by problem."""
  groups = collections.defaultdict(list)
  for problem, value in pairs:
    groups[problem].append(value)
  return list(groups.values())


def train(
  name: str, model: Model, solutions: list[StepTree], sizes: Sizes
) -> tuple[list[dict], dict]:
  """An epoch in each form: a row of the table for each form, and one that compares them."""
  row_length = ROW_LENGTH[name]
  encoded = zip(solutions, model.encode(solutions))
  kept = [(tree.problem, tokens) for tree, tokens in encoded if tokens.positions.max() < row_length]
  paths = prefix_tree.sequences([tokens for _, tokens in kept])
  merged = [prefix_tree.merge(group)[0] for group in grouped(kept)]
  labels = sum(len(tree.read_targets) for tree in merged)
  flattened, distinct = (sum(map(len, several)) for several in (paths, merged))
  runner.say(f"{name}: {len(paths):,} paths of {flattened:,} tokens, {distinct:,} distinct")
  plans = [packing.PackedRows(each, row_length) for each in (paths, merged)]
  reads = max(plan.reads for plan in plans)  # one shape, and so one program, for (b) and (c)
  plans = [dataclasses.replace(plan, round_reads_to=reads) for plan in plans]
  batches = {"padded": padded(paths, sizes.round)}
  for form, plan in zip(("packed", "trees"), plans):
    batches[form] = [packing.stack([plan[i]]) for i in range(len(plan))]
  compilation = {form: model.prepare(batches[form]) for form in FORMS}
  for form in FORMS:
    model.update(batches[form][0])  # not counted: the first touches new memory
  seconds = side_by_side(model.update, batches, 1 if sizes.model else LEAST[name])
  rows = []
  for form, words in FORMS.items():
    slots = sum(batch.tokens.size for batch in batches[form])
    rows.append(
      {
        "training on": name,
        "form": words,
        "updates": len(batches[form]),
        "token slots": slots,
        "slots a label": slots / labels,
        "seconds an epoch": seconds[form],
        "labels a second": labels / seconds[form],
        "compilation s": compilation[form],
      }
    )
  ratio = seconds["packed"] / seconds["trees"]
  return rows, {
    "training on": name,
    "left out, too long": len(solutions) - len(kept),
    "problems": len(merged),
    "paths": len(paths),
    "labels": labels,
    "tokens a row": row_length,
    "flattened tokens": flattened,
    "distinct tokens": distinct,
    "flattened / distinct": flattened / distinct,
    "seconds b / c": ratio,
    "share": ratio * distinct / flattened,
    "seconds a / c": seconds["padded"] / seconds["trees"],
  }


def padded(paths: list[TokenTree], multiple: int) -> list[Batch]:
  """Batches of shuffled paths, each batch as long as its longest path, rounded up."""
  reads = max(len(path.read_targets) for path in paths)
  order = random.Random(0).sample(paths, len(paths))
  out = []
  for start in range(0, len(order), BATCH):
    group = order[start : start + BATCH]
    length = -(-max(map(len, group)) // multiple) * multiple
    rows = [packing.PackedRows([path], length, reads)[0] for path in group]
    out.append(packing.stack(rows))
  return out


def side_by_side(
  update: Callable[[Batch], float], batches: dict[str, list[Batch]], least: int
) -> dict[str, float]:
  """Seconds of an epoch of each form; `least` is the number of timed updates of a form.

  The form that is least far along makes the next update, so that a machine that slows down does so
  for all.  A batch takes the mean time of its shape; of (a) two batches of each shape are timed.
  """
  turns = []  # how far into its epochs, form, batch
  for form, several in batches.items():
    timed = several
    if form == "padded":
      by_shape = collections.defaultdict(list)
      for batch in several:
        by_shape[batch.tokens.shape].append(batch)
      timed = [batch for same in by_shape.values() for batch in (same[0], same[-1])]
    timed = timed * -(-least // len(timed))
    turns += [((i + 0.5) / len(timed), form, batch) for i, batch in enumerate(timed)]
  seconds = {form: collections.defaultdict(list) for form in batches}
  for _, form, batch in sorted(turns, key=lambda turn: turn[:2]):
    seconds[form][batch.tokens.shape].append(update(batch))
  return {
    form: sum(statistics.mean(seconds[form][batch.tokens.shape]) for batch in several)
    for form, several in batches.items()
  }


def sampled_pool(model: Model, problems: int, count: int) -> list[tuple[str, TokenTree]]:
  """Samples of the arithmetic solver, `count` to a problem."""
  rng = np.random.default_rng(0)
  return make_pool(
    model,
    [
      (problem.text, arithmetic.solve(problem, rng).steps)
      for problem in arithmetic.distinct_problems(0, problems)
      for _ in range(count)
    ],
  )


def real_pool(path: pathlib.Path, model: Model, problems: int) -> list[tuple[str, TokenTree]]:
  """Sampled solutions from a file of {"problem", "samples": [{"text"}]}."""
  solutions = []
  for number, _, record in itertools.islice(json_lines.read(path), problems):
    for sample in record["samples"]:
      where = f"{path.name}:{number}"
      solutions.append(candidates.solution(sample | {"problem": record["problem"]}, "\n\n", where))
  return make_pool(model, solutions)


def make_pool(
  model: Model, solutions: list[tuple[str, tuple[str, ...]]]
) -> list[tuple[str, TokenTree]]:
  """(problem, candidate) pairs; equal candidates are one, as in scoring."""
  encode = lambda each: token_tree.encode_candidate(*each, model.tokenizer, model.contract)
  return [(each[0], encode(each)) for each in dict.fromkeys(solutions)]


def score(
  name: str, model: Model, pool: list[tuple[str, TokenTree]], rows: str, repeats: int
) -> dict:
  """A row of the table: seconds to read a pool flattened and as trees.

  They take turns.  Seconds are medians; the ratio is the median of the ratios of each turn, whose
  two measurements are neighbours in time.
  """
  flattened = sum(len(tree) for _, tree in pool)
  distinct = sum(len(prefix_tree.merge(group)[0]) for group in grouped(pool))
  seconds = {True: [], False: []}
  for turn in range(repeats + 1):
    for merge in (True, False) if turn % 2 else (False, True):
      seconds[merge].append(model.score(pool, ROW_LENGTH[rows], merge))
  trees, alone = seconds[True][1:], seconds[False][1:]  # the first turn compiled
  ratio = statistics.median(a / b for a, b in zip(alone, trees))
  runner.say(f"scoring {name}: {ratio:.2f}, arithmetic {flattened / distinct:.2f}")
  return {
    "scoring": name,
    "problems": len({problem for problem, _ in pool}),
    "distinct candidates": len(pool),
    "flattened tokens": flattened,
    "distinct tokens": distinct,
    "seconds flattened": statistics.median(alone),
    "as trees": statistics.median(trees),
    "flattened / distinct": flattened / distinct,
    "seconds, ratio": ratio,
    "share": ratio * distinct / flattened,
  }
