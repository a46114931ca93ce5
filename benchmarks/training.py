"""Measures fine-tuning on the CPU beside TRL's PRMTrainer, on the same rows.

Both sides train one epoch of the peer's rows.  Each row is a path from a problem to a last labelled
step, so alternatives repeat the steps and labels before them.  This project merges the rows of a
problem into one tree, which trains a repeated label once.  Speed is labelled steps of the peer's
rows a second.

Each side trains in the dtype and with the memory allocator of the smallest median of a few updates.
The first update does not count, because the system then clears memory for the process.

Targets: 2.5 times the peer's speed, 10 times on phase 1 (many alternatives), and a step AUROC that
is not below the peer's.  Takes 12 to 45 minutes; --work stores finished runs, so an interrupted
benchmark resumes where it stopped.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import numpy as np

from benchmarks import runner
from prm_jax import config as config_lib
from prm_jax import step_metrics
from prm_jax.datasets import prm800k
from prm_jax.datasets.prm800k import recipes
from prm_jax.input_pipeline import packing, prefix_tree, token_tree, tokenizers
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import command_line, distributed, json_lines, processes, storage
from prm_jax.scoring import batching
from prm_jax.training import initialization
from prm_jax.training import step as step_lib
from prm_jax.types import StepTree

HERE = pathlib.Path(__file__).parent
TRL = HERE / "trl_peer.py"
CONFIG = runner.ROOT / "configs/prm800k_smollm2_135m.py"
CODE = ("config.py", "types.py", "input_pipeline", "model", "pretrained", "training", "scoring")
PACKAGES = ("trl==1.9.2", "torch==2.13.0", "transformers", "datasets")
# By phase: files, recipe, token limit of the peer's rows, target in times the peer's speed.
PHASES = {
  "phase2": (["phase2_train.jsonl"], "paper", 1024, 2.5),
  "phase1": (["phase1_train.jsonl", "phase1_test.jsonl"], "trl", 2048, 10.0),
}
TEST = "phase2_test.jsonl"  # rows for the AUROC, by the paper's recipe
# Environment of both sides.
ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "JAX_ENABLE_COMPILATION_CACHE": "false",
  "PYTHONPATH": "",
}
SETTINGS = {  # of both sides; the optimiser has the settings of transformers' Trainer
  "batch": 4,  # rows of the peer; the config has the packed rows of this project's batches
  "learning_rate": 2e-5,  # of an update of `batch` rows; see `train_trees`
  "warmup_steps": 0,
  "weight_decay": 0.0,
  "b1": 0.9,
  "b2": 0.999,
  "clip_norm": 1.0,
  "separator": "\n",
  "max_updates": -1,  # one epoch
  "evaluate": True,  # on the test rows, before and after training
  "pad_id": 0,
}
RESAMPLES = 2000
TRIED = 4  # updates in each dtype and with each allocator, to choose the fastest
OURS, PEER = "this project", "TRL"
Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  peer: Literal["trl", "none"] = "trl"  # runs in its own environment (.venv-trl, some GB)
  rows_of: Literal["phase2", "phase1"] = "phase2"  # the phase of PRM800K
  row_length: int | None = None  # tokens of packed rows; by default the peer's limit
  source: pathlib.Path = runner.ROOT / "data/prm800k_upstream"  # folder of PRM800K's files
  config: pathlib.Path = CONFIG  # this project's settings that the comparison does not fix
  model: pathlib.Path | None = None  # hub directory for both sides; by default the config's
  rows: int = 240  # training rows, from whole problems at random
  test_rows: int = 60  # test rows, to measure the step AUROC
  seeds: tuple[int, ...] = (0,)  # of both sides, for the order of rows and the initial head
  dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")  # of activations, tried on both sides
  threads: int = 2  # cores of each side
  devices: int = 2  # CPU devices of this project; an update has at least a row for each
  peer_python: str = ""  # Python of an environment that has the peer installed
  work: pathlib.Path = runner.ROOT / "runs/benchmark_training"  # rows and figures of runs

  @property
  def section(self) -> str:
    return "" if self.rows_of == "phase2" else f"_{self.rows_of}"


def run(args: Args) -> dict:
  """Measures both sides and compares them."""
  train, recipe, length, _ = PHASES[args.rows_of]
  if args.threads > (here := len(processes.usable_cores())):
    raise ValueError(f"--threads {args.threads}: only {here} cores are usable")
  check_files(args.config, model := model_path(args), *(args.source / x for x in (*train, TEST)))
  settings = SETTINGS | {"max_length": 256 if args.quick else length, "threads": args.threads}
  settings |= {"max_updates": 1} if args.quick else {}
  files, notes = {"model": model, "config": args.config}, []
  tokenizer, problems = tokenizers.load(str(model)), []
  for split, names, by, count in (
    ("train", train, recipe, args.rows),
    ("test", [TEST], "paper", args.test_rows),
  ):
    rows = peer_rows([args.source / name for name in names], by)
    kept, long = choose(rows, 8 if args.quick else count, split, tokenizer, settings)
    files[split] = args.work / f"{args.rows_of}_{split}_{len(kept)}.jsonl"
    with storage.written(files[split]) as file:
      file.writelines(json.dumps(row) + "\n" for row in kept)
    notes.append(f"{len(kept)} {split} rows, {long} longer than {settings['max_length']} tokens")
    problems = [row["prompt"] for row in kept]  # at the end those of the test rows
  runs = measure_all(args, settings, files)
  notes.append(f"Model {model.name}; settings {args.config.name}")
  for side, last in {each["side"]: each for each in runs}.items():
    notes.append(f"{side}: {runner.listed(last['versions'])}")
  return {
    "settings": settings,
    "runs": runs,
    "targets": targets(PHASES[args.rows_of][-1], runs, problems),
    "tables": {
      "Runs": [row(each) for each in runs],
      "Seconds of an update, by form": tries(runs),
    },
    "notes": "; ".join(notes) + ".",
  }


def tries(runs: list[dict]) -> list[dict]:
  """Returns the `usual` seconds of an update of each side, in the forms that it tried."""
  by_side = {run["side"]: run["tries"] for run in runs if run["tries"]}
  return [
    {"side": side} | {", ".join(form): seconds for form, seconds in tried}
    for side, tried in by_side.items()
  ]


def model_path(args: Any) -> pathlib.Path:
  """Returns the model that a benchmark's arguments or their config file name."""
  return args.model or pathlib.Path(command_line.read(str(args.config)).init.checkpoint)


def check_files(*paths: pathlib.Path) -> None:
  """Raises FileNotFoundError if a path is missing, before anything is measured."""
  for path in paths:
    if not path.exists():
      raise FileNotFoundError(f"{path}: no such file; --source, --model and --config say where")


def measure_all(args: Args, settings: dict, files: dict[str, pathlib.Path]) -> list[dict]:
  """Returns the runs of this project, then those of the peer."""
  packed = {"row_length": args.row_length or settings["max_length"], "devices": args.devices}
  code = [runner.ROOT / "prm_jax" / name for name in CODE]
  code += [HERE / name for name in ("runner.py", "training.py")]
  sides = [Side(OURS, train_trees, packed, distributed.versions(), code)]
  if args.peer == "trl":
    python = args.peer_python or environment_of_peer(runner.ROOT / ".venv-trl")
    versions = subprocess.check_output([python, "-P", str(TRL)], text=True)
    sides.append(Side(PEER, functools.partial(runner.peer, python, TRL), {}, versions, [TRL]))
  return [run for side in sides for run in side.runs(args, settings, files)]


@dataclasses.dataclass(frozen=True)
class Side:
  """A side of the comparison."""

  name: str
  function: Callable[[dict], dict]  # from the settings to the figures
  settings: dict  # of this side only
  packages: Any  # its figures are measured again if these change, or this code
  code: list[pathlib.Path]

  def runs(self, args: Args, settings: dict, files: dict[str, pathlib.Path]) -> list[dict]:
    """Returns a run for each seed, in the form with the smallest `usual` seconds of an update.

    A form is a dtype and an allocator.  jemalloc is tried where it is installed, in the dtype that
    is faster with glibc.
    """
    cores = processes.usable_cores()[-args.threads :]
    allocators = {"glibc": processes.LARGE_PAGES}
    if "LD_PRELOAD" in (found := processes.allocator()):
      allocators["jemalloc"] = found

    def measured(name: str, form: tuple[str, str], **more: Any) -> dict:
      dtype, allocator = form
      environment = ENVIRONMENT | allocators[allocator] | {"OMP_NUM_THREADS": str(args.threads)}
      asked = settings | self.settings | more | {"dtype": dtype}
      given = asked | {key: str(path) for key, path in files.items()}
      name, known = f"{self.name.replace(' ', '_')}_{name}", [asked, environment, self.packages]
      known.append(runner.machine()["processor"])
      call = functools.partial(runner.apart, self.function, given, cores=cores, **environment)
      return runner.kept(args.work, name, known, [*self.code, *files.values()], call)

    updates = TRIED if settings["max_updates"] < 0 else settings["max_updates"]
    few = {"seed": args.seeds[0], "max_updates": updates, "evaluate": False}
    tries = {}  # seconds of an update, by form
    for allocator in allocators if len(args.dtypes) + len(allocators) > 2 else ():
      dtypes = (min(tries, key=tries.get)[0],) if tries else args.dtypes
      for dtype in dtypes:
        run = measured(f"try_{dtype}_{allocator}", (dtype, allocator), **few)
        tries[dtype, allocator] = usual(run)
    form = min(tries, key=tries.get, default=(args.dtypes[0], "glibc"))
    about = {"side": self.name, "form": form, "tries": [*tries.items()]}
    return [
      about | {"seed": seed} | measured(f"seed{seed}", form, seed=seed) for seed in args.seeds
    ]


def usual(run: dict) -> float:
  """Returns the median seconds of a run's updates, without the first if there are more."""
  return float(np.median(run["update_seconds"][1:] or run["update_seconds"]))


def environment_of_peer(directory: pathlib.Path) -> str:
  """Returns the Python of the peer's virtual environment, which it creates if it is missing."""
  python, stamp = str(directory / "bin/python"), directory / "packages_of_the_benchmark"
  if not stamp.exists() or stamp.read_text() != " ".join(PACKAGES):
    runner.say(f"making {directory} and installing {' '.join(PACKAGES)}")
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    stamp.write_text(" ".join(PACKAGES))
  return python


def solutions(files: list[pathlib.Path], recipe: str) -> list[StepTree]:
  """Returns the labelled solutions of PRM800K files."""
  records = itertools.chain.from_iterable(map(prm800k.read_records, files))
  return recipes.convert_all(records, recipes.RECIPES[recipe])[0]


def paths(tree: StepTree) -> list[list[int]]:
  """Returns the steps from the problem to each leaf."""
  path_to: list[list[int]] = []
  for i, parent in enumerate(tree.parents):
    path_to.append([*(path_to[parent] if parent >= 0 else []), i])
  return sorted(path for i, path in enumerate(path_to) if i not in tree.parents)


def peer_rows(files: list[pathlib.Path], recipe: str) -> list[dict]:
  """Returns PRM800K files as TRL's rows: one for each path from the problem to a leaf.

  Steps that the recipe labels neutral count as right.  Paths with an unlabelled step are left out,
  because TRL labels every step.
  """
  return [
    {
      "prompt": tree.problem,
      "completions": [tree.steps[i] for i in steps],
      "labels": [tree.labels[i] != -1 for i in steps],
    }
    for tree in solutions(files, recipe)
    for steps in paths(tree)
    if None not in [tree.labels[i] for i in steps]
  ]


def choose(
  rows: list[dict], count: int, split: str, tokenizer: tokenizers.Tokenizer, settings: dict
) -> tuple[list[dict], int]:
  """Returns random rows that are not too long, and the number of longer rows passed over.

  Training rows come in whole problems, because solutions of a training set share their problem.
  Long rows are left out, because the two sides would cut them at different places.
  """
  rows, kept, long = random.Random(0).sample(rows, len(rows)), [], 0
  if split == "train":
    place = {prompt: i for i, prompt in enumerate(dict.fromkeys(row["prompt"] for row in rows))}
    rows.sort(key=lambda row: place[row["prompt"]])
  for row in rows:
    if len(kept) == count:
      break
    texts = [row["prompt"], *row["completions"]]
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    tokens += len(texts) * len(tokenizer.encode(settings["separator"]))
    fits = tokens + (tokenizer.bos_id is not None) <= settings["max_length"]
    kept += [row] if fits else []
    long += not fits
  if not kept:
    raise ValueError(f"no labelled path within {settings['max_length']} tokens")
  return kept, long


def experiment(settings: dict) -> config_lib.Experiment:
  """Returns the config file's experiment with the comparison's optimiser, rows and model."""
  c = command_line.read(settings["config"])
  fix = lambda section, *names: dataclasses.replace(section, **{x: settings[x] for x in names})
  optim = fix(c.optim, "learning_rate", "weight_decay", "b1", "b2", "clip_norm", "warmup_steps")
  data = fix(c.data, "separator", "row_length")
  rows = max(c.train.batch_rows, settings["devices"])
  return dataclasses.replace(
    c,
    model=fix(c.model, "dtype"),
    data=dataclasses.replace(data, tokenizer=settings["model"]),
    init=dataclasses.replace(c.init, checkpoint=settings["model"]),
    optim=dataclasses.replace(optim, final_fraction=0.0),
    train=dataclasses.replace(fix(c.train, "seed"), batch_rows=rows),
  )


def train_trees(settings: dict) -> dict:
  """Trains this project's side for an epoch; returns seconds, counts, losses and test scores.

  An update covers more of the peer's rows than the peer's does, and its learning rate is larger by
  the same factor (arXiv:1706.02677).  Neither side writes metrics or checkpoints between updates.
  "steps" are labelled steps of the peer's rows, in proportion if only part of an epoch is trained.
  """
  jax.config.update("jax_num_cpu_devices", settings["devices"])
  c, tokenizer, vocab_size = initialization.find(experiment(settings), None)
  contract = token_tree.step_contract(tokenizer, c.data.separator, "process", "rows of the peer")
  encode = lambda tree: token_tree.encode(tree, tokenizer, contract)
  train, test = (chains(settings[key]) for key in ("train", "test"))
  trees, test = merged((each.problem, encode(each)) for each in train), list(map(encode, test))
  rows, batch_rows = packing.PackedRows(trees, c.data.row_length), c.train.batch_rows
  epoch, updates = -(-len(rows) // batch_rows), settings["max_updates"]
  updates = epoch if updates < 0 else updates
  rate = c.optim.learning_rate * len(train) / epoch / settings["batch"]
  c = dataclasses.replace(
    c,
    optim=dataclasses.replace(c.optim, learning_rate=rate),
    train=dataclasses.replace(c.train, steps=updates),
  )
  mesh = sharding_lib.make_mesh(c.mesh)
  programs = step_lib.make(c, vocab_size, len(contract.classes), mesh)
  on_mesh = lambda batch: jax.device_put(batch, sharding_lib.batch_sharding(mesh))
  order = packing.shuffled(rows, c.train.seed)
  batch_of = lambda i: packing.stack([order[i * batch_rows + j] for j in range(batch_rows)])
  labels_read, losses = 0, []
  with jax.set_mesh(mesh):
    params = initialization.public_params(c, contract, tokenizer, programs.abstract.params)
    state = jax.block_until_ready(programs.begin(params))
    judge = lambda params: evaluate(params, test, programs, mesh, c.data.row_length)
    before = judge(state.params) if settings["evaluate"] else None
    start = time.perf_counter()
    train_step = programs.train_step.lower(state, on_mesh(batch_of(0))).compile()
    compiled = time.perf_counter() - start
    cpu, times = time.process_time(), [time.perf_counter()]
    for i in range(updates):
      batch = batch_of(i)
      labels_read += int(batch.read_targets.sum())
      state, metrics = train_step(state, on_mesh(batch))
      losses.append(float(metrics["loss"]))  # waits for the update
      times.append(time.perf_counter())
    cpu = time.process_time() - cpu
    after = judge(state.params) if settings["evaluate"] else None
  repeats = sum(len(chain.labels) for chain in train) / sum(len(x.read_targets) for x in trees)
  slots = updates * batch_rows * c.data.row_length
  return {
    "versions": distributed.versions(),
    "slots": slots,
    "tokens": round(slots * rows.fill),
    "targets": labels_read,
    "steps": round(labels_read * repeats),
    "compile_seconds": compiled,
    "train_seconds": times[-1] - times[0],
    "update_seconds": np.diff(times).tolist(),
    "train_cpu_seconds": cpu,
    "updates": updates,
    "learning_rate": rate,
    "losses": losses,
    "before": before,
    "after": after,
  }


def chains(path: str) -> list[StepTree]:
  """Returns the peer's rows, each as a solution whose labels are 1 (right) and -1 (wrong)."""
  solutions = []
  for number, _, row in json_lines.read(path):
    steps, labels = tuple(row["completions"]), tuple(1 if x else -1 for x in row["labels"])
    parents = tuple(range(-1, len(steps) - 1))
    solutions.append(StepTree(row["prompt"], steps, parents, labels, source=f"{path}:{number}"))
  return solutions


def merged(rows: Iterable[tuple[str, token_tree.TokenTree]]) -> list[token_tree.TokenTree]:
  """Merges the trees of each problem, from pairs (problem, tree), into one tree."""
  return [prefix_tree.merge(group)[0] for group in runner.grouped(rows)]


def evaluate(params, rows: list[token_tree.TokenTree], programs, mesh, row_length: int) -> dict:
  """Returns P(not -1) at each labelled separator, by row, and the labels, 0 or 1."""
  forward = lambda batch: programs.read(params, batch)
  read = batching.read(rows, [""] * len(rows), forward, mesh, row_length, merge=False)
  return {
    "scores": [np.exp(np.float64(log_probs[:, 0, 1:])).sum(-1).tolist() for log_probs in read],
    "labels": [row.read_targets[:, 1:].sum(-1).astype(int).tolist() for row in rows],
  }


def auroc(run: dict, when: str, rows: Iterable[int]) -> float:
  """Returns a run's step AUROC on test rows, "before" or "after" training; rows may repeat."""
  scores, labels = (
    np.concatenate([run[when][key][i] for i in rows]) for key in ("scores", "labels")
  )
  value = step_metrics.auroc(scores, labels == 1)
  return float("nan") if value is None else value


def auroc_difference(
  ours: list[dict], peers: list[dict], problems: list[str]
) -> tuple[float, float, float]:
  """Returns the mean over seeds of this side's AUROC minus the peer's, and its 95 % interval.

  The interval holds the middle 95 % of resamples of the test problems, each with all its rows.  It
  leaves out the variance between seeds.  Raises ValueError if the sides scored different test
  labels.
  """
  labels = [run["after"]["labels"] for run in ours + peers]
  if any(each != labels[0] or len(each) != len(problems) for each in labels):
    raise ValueError("the sides scored other test labels; figures are not comparable")

  def difference(rows) -> float:
    means = [np.mean([auroc(run, "after", rows) for run in side]) for side in (ours, peers)]
    return float(means[0] - means[1])

  groups = [np.flatnonzero(np.array(problems) == each) for each in dict.fromkeys(problems)]
  draws = np.random.default_rng(0).integers(len(groups), size=(RESAMPLES, len(groups)))
  resampled = [difference(np.concatenate([groups[g] for g in draw])) for draw in draws]
  return difference(range(len(problems))), *np.nanpercentile(resampled, [2.5, 97.5])


def targets(asked: float, runs: list[dict], problems: list[str]) -> list[dict]:
  """Returns targets for the ratios to the peer; none without a peer."""
  ours, peers = ([run for run in runs if run["side"] == side] for side in (OURS, PEER))
  if not peers:
    return []
  rate = lambda side, key: sum(run["steps"] for run in side) / sum(run[key] for run in side)
  rows = [
    runner.target(f"{name}, {OURS} / {PEER}", ">=", asked, rate(ours, key) / rate(peers, key))
    for name, key in (
      ("labelled steps a second", "train_seconds"),
      ("labelled steps a second of processor time", "train_cpu_seconds"),
    )
  ]
  mean, low, high = auroc_difference(ours, peers, problems)
  note = f", 95 % [{low:.3f}, {high:.3f}]"  # not in the name, by which runs are compared
  note += ", within noise: not distinguishable" if low <= 0 <= high else ""
  return [*rows, runner.target(f"step AUROC, {OURS} - {PEER}", ">=", 0, mean, note)]


def row(run: dict) -> dict:
  """Returns a row of the table: "labelled steps" count the peer's rows, "labels read" its own."""
  seconds, tested = run["train_seconds"], range(len(run["after"]["labels"]))
  return {
    "run": f"{run['side']}, seed {run['seed']}",
    "dtype and allocator": ", ".join(run["form"]),
    "updates": run["updates"],
    "labelled steps": run["steps"],
    "labels read": run.get("targets", run["steps"]),
    "tokens": run["tokens"],
    "padding": f"{1 - run['tokens'] / run['slots']:.1%}",
    "training s": seconds,
    "median s/update": usual(run),
    "compilation s": run.get("compile_seconds"),
    "CPU s": run["train_cpu_seconds"],
    "labelled steps/s": run["steps"] / seconds,
    "load average": run["load_at_end"],
    "AUROC before": auroc(run, "before", tested),
    "after": auroc(run, "after", tested),
    "mean loss": float(np.mean(run["losses"])),
  }
