"""What prefix trees save, measured in this code alone: the same rows flattened and as trees.

Training: labelled solutions (a) as public trainers have them, one padded row for each path from the
problem to a last step, four rows to a batch; (b) those paths packed; (c) the solutions of a problem
merged into a tree, trees packed.  Every form has the model, the train step and the optimiser of a
run, on random weights, and an update of (b) or (c) is one row of the same length.  The labels
counted are the distinct ones, which all three train: what differs is how many tokens they cost.

Epochs run side by side: the form that is least far along makes the next update, so that a machine
that slows down does so for all.  Of (a), whose batches differ in length and in nothing else that
takes time, two of each length are timed and count for the others.  Compilation is not counted, and
rows are built beforehand.

Scoring: candidates of a problem as one tree, or each by itself, through `scoring.rows.read`, all of
it counted but compilation.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from benchmarks import training
from benchmarks.training_report import table

from prm_jax import config as config_lib
from prm_jax.datasets import arithmetic, prm800k
from prm_jax.datasets.arithmetic import solver
from prm_jax.datasets.prm800k import recipes
from prm_jax.input_pipeline import packing, prefix_tree, step_dataset, token_tree, tokenizers
from prm_jax.input_pipeline.token_tree import TokenTree
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import json_lines
from prm_jax.scoring import batching as scoring_rows
from prm_jax.scoring import candidates
from prm_jax.training import initialization as start_lib
from prm_jax.training import programs as programs_lib
from prm_jax.types import Batch, StepContract, StepTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
POOLS = "reranking/qwen25math_math100_bo8.jsonl"  # beside --source: eight solutions to a problem
FORMS = {
  "padded": "a: one padded row a path, four a batch",
  "packed": "b: paths, packed",
  "trees": "c: trees, packed",
}
BATCH = 4  # rows of (a), as TRL's
# Tokens of a row.  Phase 1's sample is one tree a problem, six in all: a row that holds them, as
# shorter ones would be cut or stay half empty, which a larger set's are not.
ROW_LENGTH = {"phase 1": 5632, "phase 2": 2048, "arithmetic": 1024, "real solutions": 4096}
SIZES = {
  "round": 64,  # a batch of (a) is as long as its longest row, rounded up: few shapes to compile
  # updates of a form: shorter epochs are repeated
  "least": {"phase 1": 4, "phase 2": 4, "arithmetic": 300},
  "sums": 800,  # arithmetic problems, of two solutions each
  "pools": ((1600, 4), (800, 16), (800, 64)),  # arithmetic problems, samples of each
  "real_pools": 35,  # problems
  "chains": {"phase 2": 16, "arithmetic": 400},  # problems, a path of each
  "lone": 1600,  # candidates scored, one a problem
  "repeats": {"chains": 4, "pools": 5, "real": 1},  # with and without merging, in turn
  "seconds": 40.0,  # of chains, at least, together: a few per cent are looked for
  "paths": None,  # of each phase; as --rows says
  "model": None,  # in place of the public model's layers and the quickstart's
}
QUICK = {
  "round": 1024,
  "least": {"phase 1": 1, "phase 2": 1, "arithmetic": 1},
  "sums": 4,
  "pools": ((4, 4),),
  "real_pools": 1,
  "chains": {"phase 2": 2, "arithmetic": 4},
  "lone": 4,
  "repeats": {"chains": 1, "pools": 1, "real": 1},
  "seconds": 0.0,
  "paths": 8,
  "model": config_lib.Model(width=32, layers=1, heads=2, kv_heads=1, head_size=16, mlp_width=32),
}


class Compiled:
  """A jitted function that is compiled for each shape of its last argument, apart from its calls.

  `seconds`: what that took so far.  With `run_once` the first call's overhead is in it as well; a
  function that donates its arguments cannot be run for that.
  """

  def __init__(self, function, run_once: bool = False):
    self.seconds = 0.0
    self._function, self._run_once, self._found = function, run_once, {}

  def __call__(self, *args):
    self.prepare(*args)
    return self._found[self._shapes(args)](*args)

  def prepare(self, *args) -> None:
    shapes = self._shapes(args)
    if shapes not in self._found:
      start = time.perf_counter()
      self._found[shapes] = self._function.lower(*args).compile()
      if self._run_once:
        jax.block_until_ready(self._found[shapes](*args))
      self.seconds += time.perf_counter() - start

  @staticmethod
  def _shapes(args) -> tuple:
    return tuple(leaf.shape for leaf in jax.tree.leaves(args[-1]))


@dataclasses.dataclass
class Model:
  """A run's programs and state on one device, and what turns text into its rows."""

  tokenizer: tokenizers.Tokenizer
  contract: StepContract
  mesh: jax.sharding.Mesh
  state: Any
  step: Compiled
  forward: Compiled  # params, batch -> class log-probabilities

  @classmethod
  def make(cls, c: config_lib.Experiment, tokenizer, vocab_size: int) -> Model:
    """Random weights; `c` as resolved."""
    contract = token_tree.step_contract(tokenizer, c.data.separator, "process", "benchmark")
    mesh = sharding_lib.make_mesh(config_lib.Mesh(), jax.devices()[:1])
    with jax.set_mesh(mesh):
      programs = programs_lib.make(c, vocab_size, len(contract.classes), mesh)
      state = programs.init(jax.random.key(0))
    compiled = Compiled(programs.train_step), Compiled(programs.read, run_once=True)
    return cls(tokenizer, contract, mesh, state, *compiled)

  def on_mesh(self, batch: Batch) -> Batch:
    return jax.device_put(batch, sharding_lib.batch_sharding(self.mesh))

  def prepare(self, batches: Iterable[Batch]) -> float:
    """Compiles the train step for their shapes; the seconds that took."""
    before = self.step.seconds
    with jax.set_mesh(self.mesh):
      for batch in batches:
        self.step.prepare(self.state, self.on_mesh(batch))
    return self.step.seconds - before

  def update(self, batch: Batch) -> float:
    """Seconds of one update, to its end."""
    with jax.set_mesh(self.mesh):
      start = time.perf_counter()
      self.state, metrics = self.step(self.state, self.on_mesh(batch))
      metrics["loss"].block_until_ready()
      return time.perf_counter() - start

  def score(self, pool: Pool, row_length: int, merge: bool) -> float:
    """Seconds in which a pool is read, without compilation."""
    before, start = self.forward.seconds, time.perf_counter()
    forward = lambda batch: self.forward(self.state.params, batch)
    scoring_rows.read(pool.token_trees, pool.problems, forward, self.mesh, row_length, merge)
    return time.perf_counter() - start - (self.forward.seconds - before)


@dataclasses.dataclass(frozen=True)
class Pool:
  """Candidate solutions, of each problem several, no two alike."""

  token_trees: list[TokenTree]
  problems: list[str]  # of each


def run(args) -> dict:
  """Measures all parts.  `args` are those of scripts/benchmark.py."""
  sizes = QUICK if args.quick else SIZES
  phases = {
    "phase 1": [args.source / name for name in ("phase1_train.jsonl", "phase1_test.jsonl")],
    "phase 2": [args.source / "phase2_train.jsonl"],
  }
  for path in (args.model, args.config, *phases["phase 1"], *phases["phase 2"]):
    if not path.exists():
      raise FileNotFoundError(f"{path}: no such file; --source, --model and --config say where")
  jax.config.update("jax_platforms", "cpu")
  result = {"layers": args.layers, "model": args.model.name, "config": args.config.name}
  result |= {"training": [], "scoring": [], "chains": []}

  model = public(args.model, args.config, args.layers, sizes["model"])
  for name, recipe in (("phase 1", "trl"), ("phase 2", "paper")):
    solutions = some(training.solutions(phases[name], recipe), sizes["paths"] or args.rows)
    result["training"].append(train(name, model, solutions, sizes))
  result["chains"].append(chains("phase 2", model, solutions, sizes))
  path = args.source.resolve().parent / POOLS
  if path.is_file():
    pool = real_pool(path, model, sizes["real_pools"])
    result["scoring"].append(score("real solutions", model, pool, sizes["repeats"]["real"]))
  else:
    say(f"{path}: not there, so real solutions are not scored")

  solutions, model = generated(sizes["sums"], sizes["model"])
  result["training"].append(train("arithmetic", model, solutions, sizes))
  for problems, count in sizes["pools"]:
    pool = sampled_pool(model, problems, count)
    about = score("arithmetic", model, pool, sizes["repeats"]["pools"])
    result["scoring"].append(about | {"sampled": count})
  result["chains"].append(chains("arithmetic", model, solutions, sizes))
  pool = sampled_pool(model, sizes["lone"], 1)
  about = score("arithmetic", model, pool, sizes["repeats"]["chains"], sizes["seconds"])
  result["chains"].append(about | {"what": "scoring"})
  result["targets"] = targets(result)
  return result


def public(
  path: pathlib.Path, config: pathlib.Path, layers: int, other: config_lib.Model | None
) -> Model:
  """The shape and tokenizer of a public model, some of its layers, random weights.

  Args:
    other: in place of that shape.
  """
  c = config_lib.read(config)
  c = dataclasses.replace(c, init=config_lib.Init(checkpoint=str(path)))
  c, tokenizer, vocab_size = start_lib.find(c, None)
  shape = other or dataclasses.replace(c.model, layers=min(layers, c.model.layers))
  c = dataclasses.replace(c, init=config_lib.Init(), model=shape)
  return Model.make(c, tokenizer, vocab_size)


def generated(problems: int, other: config_lib.Model | None) -> tuple[list[StepTree], Model]:
  """Arithmetic with five alternatives a step, and the model of configs/arithmetic.py or another."""
  generator = arithmetic.Generator(train_problems=problems, test_problems=0, alternatives=5)
  records = prm800k.numbered(generator.rows()["train"], "arithmetic_train")
  solutions, _ = recipes.convert_all(records, recipes.RECIPES["paper"])
  c = config_lib.read(ROOT / "configs/arithmetic.py")
  c = dataclasses.replace(c, model=other or c.model)
  with tempfile.TemporaryDirectory() as directory:
    texts = (text for tree in solutions for text in (tree.problem, *tree.steps))
    path = pathlib.Path(directory) / "tokenizer.model"
    tokenizer = tokenizers.train_sentencepiece(texts, path, 320)
  return solutions, Model.make(c, tokenizer, tokenizer.vocab_size)


def some(solutions: list[StepTree], paths: int) -> list[StepTree]:
  """All solutions of some problems at random, with so many paths or more, if there are."""
  by_problem = grouped(solutions, [tree.problem for tree in solutions])
  random.Random(0).shuffle(by_problem)
  out = []
  for group in by_problem:
    if sum(len(training.paths(tree)) for tree in out) >= paths:
      break
    out += group
  return out


def grouped(values: list, problems: list[str]) -> list[list]:
  groups = collections.defaultdict(list)
  for value, problem in zip(values, problems):
    groups[problem].append(value)
  return list(groups.values())


def train(name: str, model: Model, solutions: list[StepTree], sizes: dict) -> dict:
  """An epoch in each form, side by side."""
  row_length = ROW_LENGTH[name]
  encoded = [token_tree.encode(tree, model.tokenizer, model.contract) for tree in solutions]
  fits = [tree.positions.max() < row_length for tree in encoded]
  kept = [tree for tree, fit in zip(encoded, fits) if fit]
  paths = prefix_tree.sequences(kept)
  problems = [tree.problem for tree, fit in zip(solutions, fits) if fit]
  merged = [prefix_tree.merge(group)[0] for group in grouped(kept, problems)]
  labels = sum(len(tree.read_targets) for tree in merged)
  flattened, distinct = (sum(map(len, several)) for several in (paths, merged))
  say(f"{name}: {len(paths):,} paths of {flattened:,} tokens, of which {distinct:,} are distinct")
  plans = [packing.PackedRows(each, row_length) for each in (paths, merged)]
  reads = max(plan.reads for plan in plans)  # one shape, and so one program, for both
  plans = [dataclasses.replace(plan, round_reads_to=reads) for plan in plans]
  batches = dict(zip(FORMS, (padded(paths, sizes["round"]), *map(packed, plans))))
  compilation = {form: model.prepare(batches[form]) for form in FORMS}
  for form in FORMS:
    model.update(batches[form][0])  # not counted: the first touches new memory
  seconds = side_by_side(model.update, batches, sizes["least"][name])
  forms = {
    form: {
      "updates": len(batches[form]),
      "slots": sum(batch.tokens.size for batch in batches[form]),
      "seconds": seconds[form],
      "compile_seconds": compilation[form],
    }
    for form in FORMS
  }
  about = {
    "name": name,
    "row_length": row_length,
    "solutions": len(kept),
    "left_out": fits.count(False),  # longer than a row
    "problems": len(merged),
    "paths": len(paths),
    "labels": labels,
    "flattened": flattened,
    "distinct": distinct,
    "forms": forms,
  } | ratios(flattened / distinct, forms["packed"]["seconds"] / forms["trees"]["seconds"])
  about["padded_to_trees"] = forms["padded"]["seconds"] / forms["trees"]["seconds"]
  say(f"{name}: measured {about['measured']:.2f}, arithmetic {about['arithmetic']:.2f}")
  return about


def side_by_side(
  update: Callable[[Batch], float], batches: dict[str, list[Batch]], least: int
) -> dict[str, float]:
  """Seconds of an epoch of each form: for each of its batches, the mean of those of its shape.

  Args:
    least: timed updates of a form, at least.
  """
  turns = []  # how far into its epochs, form, batch
  for form, several in batches.items():
    timed = range(len(several))
    if form == "padded":
      of_shape = collections.defaultdict(list)
      for i, batch in enumerate(several):
        of_shape[batch.tokens.shape].append(i)
      timed = [i for same in of_shape.values() for i in {same[0], same[-1]}]
    timed = list(timed) * -(-least // len(timed))
    turns += [((turn + 0.5) / len(timed), form, i) for turn, i in enumerate(timed)]
  seconds = {form: collections.defaultdict(list) for form in batches}
  for _, form, i in sorted(turns):
    batch = batches[form][i]
    seconds[form][batch.tokens.shape].append(update(batch))
  return {
    form: sum(statistics.mean(seconds[form][batch.tokens.shape]) for batch in several)
    for form, several in batches.items()
  }


def ratios(arithmetic_ratio: float, measured: float) -> dict:
  return {
    "arithmetic": arithmetic_ratio,
    "measured": measured,
    "realised": measured / arithmetic_ratio,
  }


def padded(paths: list[TokenTree], multiple: int) -> list[Batch]:
  """Batches of paths in a shuffled order, each as long as its longest, rounded up."""
  reads = max(len(path.read_targets) for path in paths)
  order = random.Random(0).sample(paths, len(paths))
  out = []
  for start in range(0, len(order), BATCH):
    group = order[start : start + BATCH]
    length = -(-max(map(len, group)) // multiple) * multiple
    rows = [packing.PackedRows([path], length, reads)[0] for path in group]
    out.append(packing.stack(rows))
  return out


def packed(rows: packing.PackedRows) -> list[Batch]:
  """A batch for each row."""
  return [packing.stack([rows[i]]) for i in range(len(rows))]


def chains(name: str, model: Model, solutions: list[StepTree], sizes: dict) -> dict:
  """Packing and an epoch of one path a problem, with and without merging: nothing is shared."""
  first = {tree.problem: tree for tree in reversed(solutions)}
  alone = [first_path(tree) for tree in first.values()][: sizes["chains"][name]]
  given = (alone, model.tokenizer, model.contract, ROW_LENGTH[name])
  plans = {merge: step_dataset.pack(*given, merge)[0] for merge in (True, False)}
  for rows in plans.values():
    model.prepare(packed(rows)[:1])
    model.update(packed(rows)[0])  # not counted, as in training

  def measure(merge: bool) -> float:
    start = time.perf_counter()
    batches = packed(step_dataset.pack(*given, merge)[0])
    return time.perf_counter() - start + sum(map(model.update, batches))

  about = {
    "name": name,
    "what": "training",
    "problems": len(alone),
    "same_rows": plans[True].hash == plans[False].hash,
  } | alternately(measure, sizes["repeats"]["chains"], sizes["seconds"])
  say(f"{name}, chains: flattened / trees {about['measured']:.3f}")
  return about


def first_path(tree: StepTree) -> StepTree:
  """The first path from the problem to a last step, by itself."""
  steps = training.paths(tree)[0]
  return StepTree(
    problem=tree.problem,
    steps=tuple(tree.steps[i] for i in steps),
    parents=tuple(range(-1, len(steps) - 1)),
    labels=tuple(tree.labels[i] for i in steps),
    source=tree.source,
  )


def alternately(measure: Callable[[bool], float], repeats: int, least: float) -> dict:
  """Seconds with and without merging, in turn; which is first changes.

  Medians, and that of the ratio in each turn, whose two measurements are neighbours in time.

  Args:
    least: seconds of all repeats together, at least.
  """
  seconds = {True: [], False: []}
  while len(seconds[True]) < repeats or sum(map(sum, seconds.values())) < least:
    for merge in (True, False) if len(seconds[True]) % 2 else (False, True):
      seconds[merge].append(measure(merge))
  ratios = [flattened / trees for flattened, trees in zip(seconds[False], seconds[True])]
  forms = {"flattened": seconds[False], "trees": seconds[True]}
  return {
    "seconds": {form: statistics.median(values) for form, values in forms.items()},
    "measured": statistics.median(ratios),
  }


def sampled_pool(model: Model, problems: int, count: int) -> Pool:
  """So many samples of the arithmetic solver to each problem."""
  rng = np.random.default_rng(0)
  solutions = [
    (problem.text, solver.solve(problem, rng).steps)
    for problem in solver.problems(0, problems)
    for _ in range(count)
  ]
  return make_pool(model, solutions)


def real_pool(path: pathlib.Path, model: Model, problems: int) -> Pool:
  """Sampled solutions of some problems, in a file of {"problem", "samples": [{"text"}]}."""
  solutions = []
  for number, _, record in itertools.islice(json_lines.read(path), problems):
    for sample in record["samples"]:
      where = f"{path.name}:{number}"
      solutions.append(candidates.solution(sample | {"problem": record["problem"]}, "\n\n", where))
  return make_pool(model, solutions)


def make_pool(model: Model, solutions: list[tuple[str, tuple[str, ...]]]) -> Pool:
  """Equal candidates are one, as in scoring."""
  distinct = list(dict.fromkeys(solutions))
  encode = lambda each: token_tree.encode_candidate(*each, model.tokenizer, model.contract)
  return Pool([encode(each) for each in distinct], [problem for problem, _ in distinct])


def score(name: str, model: Model, pool: Pool, repeats: int, least: float = 0.0) -> dict:
  """A pool read flattened and as trees, as `alternately` says."""
  groups = grouped(pool.token_trees, pool.problems)
  flattened = sum(map(len, pool.token_trees))
  distinct = sum(len(prefix_tree.merge(group)[0]) for group in groups)
  measure = lambda merge: model.score(pool, ROW_LENGTH[name], merge)
  taken = alternately(measure, repeats, least)
  about = {
    "name": name,
    "problems": len(groups),
    "candidates": len(pool.token_trees),
    "flattened": flattened,
    "distinct": distinct,
    "seconds": taken["seconds"],
  } | ratios(flattened / distinct, taken["measured"])
  say(f"scoring {name}: measured {about['measured']:.2f}, arithmetic {about['arithmetic']:.2f}")
  return about


def targets(result: dict) -> list[dict]:
  """What the project asks of trees, and what was measured."""
  rows = [
    (f"share of the arithmetic saving, training on {about['name']}", about["realised"], 0.9)
    for about in result["training"]
  ]
  rows += [
    (
      f"flattened / merged seconds where nothing is shared, {about['what']} on {about['name']}",
      about["measured"],
      0.97,
    )
    for about in result["chains"]
  ]
  for about in result["scoring"]:
    if "sampled" in about:
      what = f"share of the arithmetic saving, scoring {about['sampled']} samples a problem"
      rows.append((what, about["realised"], 0.9))
  return [
    {"what": what, "target": f">= {asked}", "measured": value, "met": value >= asked}
    for what, value, asked in rows
  ]


def tables(figures: dict) -> str:
  """The figures as Markdown."""
  words = {True: "yes", False: "**no**"}
  rows = [
    (r["what"], r["target"], f"{r['measured']:.3f}", "" if figures["quick"] else words[r["met"]])
    for r in figures["targets"]
  ]
  parts = [table(("target", "asked", "measured", "met"), rows)]
  rows = []
  for about in figures["training"]:
    for form, words in FORMS.items():
      f = about["forms"][form]
      rows.append(
        (
          about["name"],
          words,
          f["updates"],
          f"{f['slots']:,}",
          f"{f['slots'] / about['labels']:.1f}",
          f"{f['seconds']:.1f}",
          f"{about['labels'] / f['seconds']:.2f}",
          f"{f['compile_seconds']:.0f}",
        )
      )
  head = ("training on", "form", "updates", "token slots", "slots a label", "seconds an epoch")
  parts.append(table((*head, "labels a second", "compilation s"), rows))
  rows = [
    (
      about["name"],
      f"{about['problems']:,}",
      f"{about['paths']:,}",
      f"{about['labels']:,}",
      f"{about['row_length']:,}",
      f"{about['flattened']:,}",
      f"{about['distinct']:,}",
      f"{about['arithmetic']:.2f}",
      f"{about['measured']:.2f}",
      f"{about['realised']:.2f}",
      f"{about['padded_to_trees']:.2f}",
    )
    for about in figures["training"]
  ]
  head = ("training on", "problems", "paths", "labels", "tokens a row", "flattened tokens")
  head += ("distinct tokens", "flattened / distinct", "seconds b / c", "share", "seconds a / c")
  parts.append(table(head, rows))
  rows = [
    (
      about["name"] + (f", {about['sampled']} samples" if "sampled" in about else ""),
      f"{about['problems']:,}",
      f"{about['candidates']:,}",
      f"{about['flattened']:,}",
      f"{about['distinct']:,}",
      *(f"{about['seconds'][form]:.2f}" for form in ("flattened", "trees")),
      f"{about['arithmetic']:.2f}",
      f"{about['measured']:.2f}",
      f"{about['realised']:.2f}",
    )
    for about in figures["scoring"]
  ]
  head = ("scoring", "problems", "distinct candidates", "flattened tokens", "distinct tokens")
  head += ("seconds flattened", "as trees", "flattened / distinct tokens", "seconds", "share")
  parts.append(table(head, rows))
  rows = [
    (
      f"{about['what']} on {about['name']}",
      f"{about['problems']:,}",
      *(f"{about['seconds'][form]:.2f}" for form in ("flattened", "trees")),
      f"{about['measured']:.3f}",
    )
    for about in figures["chains"]
  ]
  head = ("nothing shared", "problems", "seconds unmerged", "merged", "unmerged / merged")
  parts.append(table(head, rows))
  left_out = sum(about["left_out"] for about in figures["training"])
  parts.append(
    f"PRM800K and real solutions: {figures['layers']} layers of {figures['model']}'s shape, random "
    f"weights, settings {figures['config']}; arithmetic: the model of configs/arithmetic.py. Left "
    f"out: {left_out} solutions that are longer than a row."
  )
  return "\n\n".join(parts)


def say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
