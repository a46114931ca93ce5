"""Measures what prefix trees save: the same solutions as trees and flattened, on the CPU.

Training packs either the path from a problem to each last step, or the solutions of a problem
merged into one tree.  Both forms train the same distinct labels with the same model and train step,
in rows of one length, one row per update.  Scoring reads the candidates of a problem as one tree,
or each by itself.

Target: seconds show at least 0.9 of the saving that the token counts promise (tokens of all paths
over distinct tokens), and at least 0.97 where nothing is shared.  Takes 12 minutes.
"""

import dataclasses
import functools
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
from prm_jax.runtime import command_line
from prm_jax.scoring import batching
from prm_jax.training import initialization
from prm_jax.training import step as step_lib
from prm_jax.types import Batch, StepTree

# Tokens of a row.  The sample of phase 1 is six trees, which fit one row: shorter rows would cut
# them or stay half empty, unlike rows of a larger set.
ROW_LENGTH = {"phase1": 5632, "phase2": 2048, "arithmetic": 1024}
LEAST = {"phase1": 4, "phase2": 4, "arithmetic": 300}  # timed updates of each form
# Arithmetic problems to score, and candidates of each; with one candidate nothing is shared.
POOLS = ((1600, 4), (800, 16), (800, 64), (1600, 1))
TINY = config_lib.Model(width=32, layers=1, heads=2, kv_heads=1, head_size=16, mlp_width=32)


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  source: pathlib.Path = runner.ROOT / "data/prm800k_upstream"  # folder of PRM800K's files
  config: pathlib.Path = training.CONFIG  # this project's settings
  model: pathlib.Path | None = None  # gives the shape and the tokenizer; by default the config's
  layers: int = 2  # number of the model's first layers to use
  rows: int = 240  # paths of each phase, from whole problems at random


class Model:
  """A model with random weights on one device, with its programs and train state."""

  def __init__(self, c: config_lib.Experiment, tokenizer: tokenizers.Tokenizer, vocab_size: int):
    self.tokenizer = tokenizer
    self.contract = token_tree.step_contract(tokenizer, c.data.separator, "process", "benchmark")
    self.mesh = sharding_lib.make_mesh(config_lib.Mesh(), jax.devices()[:1])
    with jax.set_mesh(self.mesh):
      self.programs = step_lib.make(c, vocab_size, len(self.contract.classes), self.mesh)
      self.state = self.programs.init(jax.random.key(0))

  def update(self, batch: Batch) -> float:
    """Makes one update, and returns its seconds."""
    with jax.set_mesh(self.mesh):
      start = time.perf_counter()
      batch = jax.device_put(batch, sharding_lib.batch_sharding(self.mesh))
      self.state, metrics = self.programs.train_step(self.state, batch)
      metrics["loss"].block_until_ready()
      return time.perf_counter() - start

  def score(self, pool: list[tuple[str, TokenTree]], row_length: int, merge: bool) -> None:
    """Merges, packs and reads a pool of (problem, candidate)."""
    problems, trees = zip(*pool)
    forward = lambda batch: self.programs.read(self.state.params, batch)
    batching.read(trees, problems, forward, self.mesh, row_length, merge)


def run(args: Args) -> dict:
  """Measures training on three sets of solutions, and scoring of several pools."""
  sources = {
    name: [args.source / file for file in files] for name, (files, *_) in training.PHASES.items()
  }
  training.check_files(args.config, *sources["phase1"], *sources["phase2"])
  jax.config.update("jax_platforms", "cpu")
  model, trained = public(args), []
  for name, (_, recipe, *_) in training.PHASES.items():
    solutions = some(training.solutions(sources[name], recipe), args)
    trained.append(train(name, model, solutions, args.quick))
  solutions, model = generated(args.quick)
  trained.append(train("arithmetic", model, solutions, args.quick))
  pools, repeats = (((4, 4), (4, 1)), 1) if args.quick else (POOLS, 5)
  scored = [score(model, *sizes, repeats) for sizes in pools]
  return {
    "targets": targets(trained + scored),
    "tables": {"Training": trained, "Scoring": scored},
    "notes": f"PRM800K: {args.layers} layers of the shape of {training.model_path(args).name}, "
    f"random weights, settings {args.config.name}; arithmetic: the model of configs/arithmetic.py.",
  }


def targets(rows: list[dict]) -> list[dict]:
  """Returns a target for each row; nothing is shared if both forms have the same tokens."""
  shared, none = "share of the arithmetic saving, {of}", "flattened / merged seconds, {of}"
  return [
    runner.target(none.format(**row), ">=", 0.97, row["share"])
    if row["flattened / distinct"] == 1
    else runner.target(shared.format(**row), ">=", 0.9, row["share"])
    for row in rows
  ]


def public(args: Args) -> Model:
  """Returns a model with the shape and tokenizer of a public one, and fewer layers."""
  c = command_line.read(str(args.config))
  c = dataclasses.replace(c, init=config_lib.Init(checkpoint=str(training.model_path(args))))
  c, tokenizer, vocab_size = initialization.find(c, None)
  shape = dataclasses.replace(c.model, layers=min(args.layers, c.model.layers))
  c = dataclasses.replace(c, init=config_lib.Init(), model=TINY if args.quick else shape)
  return Model(c, tokenizer, vocab_size)


def generated(quick: bool) -> tuple[list[StepTree], Model]:
  """Returns arithmetic with five alternatives to a step, and the model of configs/arithmetic.py."""
  sums = {"train_problems": 4 if quick else 800, "test_problems": 0}
  rows = arithmetic.Generator(**sums, alternatives=5).rows()["train"]
  records = prm800k.numbered(rows, "arithmetic_train")
  solutions, _ = recipes.convert_all(records, recipes.RECIPES["paper"])
  c = command_line.read(str(runner.ROOT / "configs/arithmetic.py"))
  c = dataclasses.replace(c, model=TINY if quick else c.model)
  with tempfile.TemporaryDirectory() as directory:
    texts = (text for tree in solutions for text in (tree.problem, *tree.steps))
    path = pathlib.Path(directory, "tokenizer.model")
    tokenizer = tokenizers.train_sentencepiece(texts, path, 320)
  return solutions, Model(c, tokenizer, tokenizer.vocab_size)


def some(solutions: list[StepTree], args: Args) -> list[StepTree]:
  """Returns all solutions of random problems, until they have `args.rows` paths."""
  problems = runner.grouped((tree.problem, tree) for tree in solutions)
  random.Random(0).shuffle(problems)
  out = []
  for group in problems:
    if sum(len(training.paths(tree)) for tree in out) >= (8 if args.quick else args.rows):
      break
    out += group
  return out


def train(name: str, model: Model, solutions: list[StepTree], quick: bool) -> dict:
  """Returns a row of the table: an epoch of the paths and one of the trees."""
  row_length = ROW_LENGTH[name]
  encode = lambda tree: token_tree.encode(tree, model.tokenizer, model.contract)
  kept = [(tree.problem, encode(tree)) for tree in solutions]
  kept = [(problem, tree) for problem, tree in kept if tree.positions.max() < row_length]
  forms = {
    "paths": prefix_tree.sequences([tree for _, tree in kept]),
    "trees": training.merged(kept),
  }
  plans = {form: packing.PackedRows(trees, row_length) for form, trees in forms.items()}
  reads = max(plan.reads for plan in plans.values())  # one shape, so one program
  batches = {}
  for form, plan in plans.items():
    plan = dataclasses.replace(plan, round_reads_to=reads)
    batches[form] = [packing.stack([plan[i]]) for i in range(len(plan))]
    model.update(batches[form][0])  # not timed: it compiles and touches new memory
  seconds = side_by_side(model.update, batches, 1 if quick else LEAST[name])
  about = {
    "of": f"training on {name}",
    "left out, too long": len(solutions) - len(kept),
    "problems": len(forms["trees"]),
    "paths": len(forms["paths"]),
    "labels": sum(len(tree.read_targets) for tree in forms["trees"]),
    "tokens a row": row_length,
    "updates as paths": len(batches["paths"]),
    "as trees": len(batches["trees"]),
  }
  ratio = seconds["paths"] / seconds["trees"]
  return about | compared(*forms.values(), seconds["paths"], seconds["trees"], ratio)


def compared(paths, trees, alone: float, merged: float, ratio: float) -> dict:
  """Returns columns of both tables, from the token trees and seconds of both forms."""
  flattened, distinct = (sum(map(len, several)) for several in (paths, trees))
  runner.say(f"seconds {ratio:.2f}, arithmetic {flattened / distinct:.2f}")
  return {
    "flattened tokens": flattened,
    "distinct tokens": distinct,
    "seconds flattened": alone,
    "merged": merged,
    "flattened / distinct": flattened / distinct,
    "seconds, ratio": ratio,
    "share": ratio * distinct / flattened,
  }


def side_by_side(
  update: Callable[[Batch], float], batches: dict[str, list[Batch]], least: int
) -> dict[str, float]:
  """Returns seconds per epoch of each form, over whole epochs with at least `least` updates.

  The form that has completed least of its epochs makes the next update, so a machine that slows
  down slows all forms.
  """
  epochs = {form: -(-least // len(several)) for form, several in batches.items()}
  turns = []  # completed share of its epochs, form, batch
  for form, several in batches.items():
    timed = several * epochs[form]
    turns += [((i + 0.5) / len(timed), form, batch) for i, batch in enumerate(timed)]
  seconds = dict.fromkeys(batches, 0.0)
  for _, form, batch in sorted(turns, key=lambda turn: turn[:2]):
    seconds[form] += update(batch) / epochs[form]
  return seconds


def score(model: Model, problems: int, count: int, repeats: int) -> dict:
  """Returns a row of the table: seconds to read generated candidates, flattened and as trees.

  Equal candidates are one, as in scoring.  Seconds are medians; the ratio is the median over the
  turns, whose two measurements are neighbours in time.
  """
  rng, candidates = np.random.default_rng(0), []
  for problem in arithmetic.distinct_problems(0, problems):
    candidates += [(problem.text, arithmetic.solve(problem, rng).steps) for _ in range(count)]
  pool = [
    (problem, token_tree.encode_candidate(problem, steps, model.tokenizer, model.contract))
    for problem, steps in dict.fromkeys(candidates)
  ]
  read = functools.partial(model.score, pool, ROW_LENGTH["arithmetic"])
  forms = {str(merge): functools.partial(read, merge) for merge in (False, True)}
  alone, merged = runner.by_turns(forms, repeats).values()
  ratio = statistics.median(a / b for a, b in zip(alone, merged))
  about = {
    "of": f"scoring {count} sample{'s' * (count > 1)} a problem",
    "problems": problems,
    "distinct candidates": len(pool),
  }
  paths, trees = [tree for _, tree in pool], training.merged(pool)
  return about | compared(paths, trees, statistics.median(alone), statistics.median(merged), ratio)
