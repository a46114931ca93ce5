"""Fine-tuning a process reward model on the CPU, beside TRL's PRMTrainer on the same rows.

Both sides train one epoch of the peer's rows: one row for each path from a problem to a last
labelled step, so that alternatives repeat the steps before them, labels and all.  This project
makes one tree of the rows of a problem, in which a repeated label is trained once.  Speed is
labelled steps of the peer's rows a second.

Targets: 2 times the peer's speed, 10 times on phase 1 (many alternatives), and a step AUROC that is
not below the peer's.  Takes 25 minutes; finished runs are kept in --work, so that an interrupted
benchmark goes on where it was.
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
from collections.abc import Iterable
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
from prm_jax.runtime import command_line, json_lines, storage
from prm_jax.scoring import batching
from prm_jax.training import initialization
from prm_jax.training import step as step_lib
from prm_jax.types import StepTree

HERE = pathlib.Path(__file__).parent
TRL = HERE / "trl_peer.py"
CONFIG = runner.ROOT / "configs/prm800k_smollm2_135m.py"
CODE = ("config.py", "types.py", "input_pipeline", "model", "training", "scoring")  # of this side
PACKAGES = ("trl==1.9.2", "torch==2.13.0", "transformers", "datasets")
# Of each phase: files, recipe, most tokens of a row of the peer, times the peer's speed asked for.
PHASES = {
  "phase2": (["phase2_train.jsonl"], "paper", 1024, 2.0),
  "phase1": (["phase1_train.jsonl", "phase1_test.jsonl"], "trl", 2048, 10.0),
}
TEST = "phase2_test.jsonl"  # rows for the AUROC, by the paper's recipe
# Of both sides: without large pages a tenth of an update goes into fresh memory.
ENVIRONMENT = {
  "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
  "JAX_PLATFORMS": "cpu",
  "JAX_ENABLE_COMPILATION_CACHE": "false",
  "PYTHONPATH": "",
}
SETTINGS = {  # of both sides; the optimiser's are those of transformers' Trainer
  "batch": 4,  # rows of the peer; this project's batches are packed rows, as the config says
  "learning_rate": 2e-5,
  "warmup_steps": 0,
  "weight_decay": 0.0,
  "b1": 0.9,
  "b2": 0.999,
  "clip_norm": 1.0,
  "separator": "\n",
  "max_updates": -1,  # one epoch
  "pad_id": 0,
}
RESAMPLES = 2000
OURS, PEER = "this project", "TRL"


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  peer: Literal["trl", "none"] = "trl"  # in a virtual environment of its own (.venv-trl, some GB)
  rows_of: Literal["phase2", "phase1"] = "phase2"  # the phase of PRM800K
  row_length: int | None = None  # tokens of packed rows; by default the longest of the peer's
  source: pathlib.Path = runner.ROOT / "data/prm800k_upstream"  # folder of PRM800K's files
  config: pathlib.Path = CONFIG  # this project's settings where the comparison does not fix them
  model: pathlib.Path | None = None  # hub directory that both start from; by default the config's
  rows: int = 240  # training rows, of whole problems at random
  test_rows: int = 60  # test rows, for the AUROC of their steps
  seeds: tuple[int, ...] = (0,)  # of both sides: order of the rows and first head
  threads: int = 2  # cores of either side
  devices: int = 2  # CPU devices of this project, at least a row of an update for each
  peer_python: str = ""  # the Python of an environment that has the peer already
  work: pathlib.Path = runner.ROOT / "runs/benchmark_training"  # rows and figures of runs

  @property
  def section(self) -> str:
    return "" if self.rows_of == "phase2" else f"_{self.rows_of}"


def run(args: Args) -> dict:
  """Measures both sides and compares them."""
  train, recipe, length, _ = PHASES[args.rows_of]
  if args.threads > len(runner.usable_cores()):
    raise ValueError(f"--threads {args.threads}: only {len(runner.usable_cores())} cores are here")
  check_files(args.config, model := model_path(args), *(args.source / x for x in (*train, TEST)))
  settings = SETTINGS | {"max_length": 256 if args.quick else length, "threads": args.threads}
  settings |= {"max_updates": 1} if args.quick else {}
  files, notes = {"model": model, "config": args.config}, []
  tokenizer, problems = tokenizers.load(str(model)), []
  for split, names, by, count in (
    ("train", train, recipe, args.rows),
    ("test", [TEST], "paper", args.test_rows),
  ):
    found = peer_rows([args.source / name for name in names], by)
    kept, long = choose(found, 8 if args.quick else count, split, tokenizer, settings)
    files[split] = args.work / f"{args.rows_of}_{split}_{len(kept)}.jsonl"
    with storage.written(files[split]) as file:
      file.writelines(json.dumps(row) + "\n" for row in kept)
    notes.append(f"{len(kept)} {split} rows, {long} longer than {settings['max_length']} tokens")
    problems = [row["prompt"] for row in kept]  # of the test rows at the end
  runs = measure_all(args, settings, files)
  notes.append(f"Model {model.name}; settings {args.config.name}")
  for side in {each["side"]: each for each in runs}.values():
    notes.append(f"{side['side']}: {runner.listed(side['versions'])}")
  return {
    "settings": settings,
    "runs": runs,
    "targets": targets(PHASES[args.rows_of][-1], runs, problems),
    "tables": {"Runs": [row(each) for each in runs]},
    "notes": "; ".join(notes) + ".",
  }


def model_path(args: Any) -> pathlib.Path:
  """The model that a benchmark's arguments name, or their config."""
  return args.model or pathlib.Path(command_line.read(str(args.config)).init.checkpoint)


def check_files(*paths: pathlib.Path) -> None:
  """FileNotFoundError, before anything is measured."""
  for path in paths:
    if not path.exists():
      raise FileNotFoundError(f"{path}: no such file; --source, --model and --config say where")


def measure_all(args: Args, settings: dict, files: dict[str, pathlib.Path]) -> list[dict]:
  """The runs of this project, then those of the peer."""
  cores = runner.usable_cores()[-args.threads :]
  environment = ENVIRONMENT | {"OMP_NUM_THREADS": str(args.threads)}
  versions = runner.versions("jax", "jaxlib", "flax", "optax")
  own = {"row_length": args.row_length or settings["max_length"], "devices": args.devices}
  code = [*(runner.ROOT / "prm_jax" / name for name in CODE), HERE / "training.py"]
  sides = [(OURS, train_trees, own, versions, code)]
  if args.peer == "trl":
    python = args.peer_python or environment_of_peer(runner.ROOT / ".venv-trl")
    sides.append((PEER, functools.partial(runner.peer, python, TRL), {}, PACKAGES, [TRL]))
  runs = []
  for (side, function, own, packages, code), seed in itertools.product(sides, args.seeds):
    asked = settings | own | {"seed": seed}
    given = asked | {name: str(path) for name, path in files.items()}
    call = functools.partial(runner.apart, function, given, cores=cores, **environment)
    name, known = f"{side.replace(' ', '_')}_seed{seed}", [asked, environment, packages]
    found = runner.kept(args.work, name, known, [*code, *files.values()], call)
    runs.append({"side": side, "seed": seed, "versions": versions} | found)
  return runs


def environment_of_peer(directory: pathlib.Path) -> str:
  """The Python of the peer's virtual environment, which is made if it is not there."""
  python, stamp = str(directory / "bin/python"), directory / "packages_of_the_benchmark"
  if not stamp.exists() or stamp.read_text() != " ".join(PACKAGES):
    runner.say(f"making {directory} and installing {' '.join(PACKAGES)}")
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    stamp.write_text(" ".join(PACKAGES))
  return python


def solutions(files: list[pathlib.Path], recipe: str) -> list[StepTree]:
  """The labelled solutions of PRM800K files."""
  records = itertools.chain.from_iterable(map(prm800k.read_records, files))
  return recipes.convert_all(records, recipes.RECIPES[recipe])[0]


def paths(tree: StepTree) -> list[list[int]]:
  """The steps from the problem to each leaf."""
  to: list[list[int]] = []
  for i, parent in enumerate(tree.parents):
    to.append([*(to[parent] if parent >= 0 else []), i])
  return sorted(path for i, path in enumerate(to) if i not in tree.parents)


def peer_rows(files: list[pathlib.Path], recipe: str) -> list[dict]:
  """PRM800K files as TRL takes them: one row for each path from the problem to a leaf.

  What the recipe keeps as neutral counts as right.  Paths with a step without a label, which TRL
  does not have, are left out.
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
  """Random rows that are not too long, and the number of longer ones passed over.

  Training rows are those of whole problems, as in a training set, where solutions share the
  problem.  Both sides would cut a long row, at different places.
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
  """The config file's experiment with the optimiser, the rows and the model of the comparison."""
  c = command_line.read(settings["config"])
  of = lambda section, *names: dataclasses.replace(section, **{x: settings[x] for x in names})
  optim = of(c.optim, "learning_rate", "weight_decay", "b1", "b2", "clip_norm", "warmup_steps")
  data = of(c.data, "separator", "row_length")
  rows = max(c.train.batch_rows, settings["devices"])
  return dataclasses.replace(
    c,
    data=dataclasses.replace(data, tokenizer=settings["model"]),
    init=dataclasses.replace(c.init, checkpoint=settings["model"]),
    optim=dataclasses.replace(optim, final_fraction=0.0),
    train=dataclasses.replace(of(c.train, "seed"), batch_rows=rows),
  )


def train_trees(settings: dict) -> dict:
  """Trains this project's side for an epoch: seconds, counts, losses, scores of the test rows.

  What a run does between updates (metrics, checkpoints) is left out, as it is of the peer.
  "steps" are the labelled steps of the peer's rows, in proportion for a part of an epoch.
  """
  jax.config.update("jax_num_cpu_devices", settings["devices"])
  c, tokenizer, vocab_size = initialization.find(experiment(settings), None)
  contract = token_tree.step_contract(tokenizer, c.data.separator, "process", "rows of the peer")
  encode = lambda tree: token_tree.encode(tree, tokenizer, contract)
  given, test = (chains(settings[key]) for key in ("train", "test"))
  trees, test = merged(given, encode), list(map(encode, test))
  rows, batch_rows = packing.PackedRows(trees, c.data.row_length), c.train.batch_rows
  updates = settings["max_updates"]
  updates = -(-len(rows) // batch_rows) if updates < 0 else updates
  c = dataclasses.replace(c, train=dataclasses.replace(c.train, steps=updates))
  mesh = sharding_lib.make_mesh(c.mesh)
  programs = step_lib.make(c, vocab_size, len(contract.classes), mesh)
  on_mesh = lambda batch: jax.device_put(batch, sharding_lib.batch_sharding(mesh))
  order = packing.shuffled(rows, c.train.seed)
  batch_of = lambda i: packing.stack([order[i * batch_rows + j] for j in range(batch_rows)])
  read, losses = 0, []
  with jax.set_mesh(mesh):
    params = initialization.public_params(c, contract, tokenizer, programs.abstract.params)
    state = jax.block_until_ready(programs.begin(params))
    before = evaluate(state.params, test, programs, mesh, c.data.row_length)
    start = time.perf_counter()
    train_step = programs.train_step.lower(state, on_mesh(batch_of(0))).compile()
    compiled = time.perf_counter() - start
    start, cpu = time.perf_counter(), time.process_time()
    for i in range(updates):
      batch = batch_of(i)
      read += int(batch.read_targets.sum())
      state, metrics = train_step(state, on_mesh(batch))
      losses.append(float(metrics["loss"]))  # waits for the update
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    after = evaluate(state.params, test, programs, mesh, c.data.row_length)
  labels = sum(len(chain.labels) for chain in given) / sum(len(x.read_targets) for x in trees)
  slots = updates * batch_rows * c.data.row_length
  return {
    "slots": slots,
    "tokens": round(slots * rows.fill),
    "targets": read,
    "steps": round(read * labels),
    "compile_seconds": compiled,
    "train_seconds": seconds,
    "train_cpu_seconds": cpu,
    "updates": updates,
    "losses": losses,
    "before": before,
    "after": after,
  }


def chains(path: str) -> list[StepTree]:
  """The peer's rows, each as a solution; right is class 1 and wrong is class -1."""
  found = []
  for number, _, row in json_lines.read(path):
    steps, labels = tuple(row["completions"]), tuple(1 if x else -1 for x in row["labels"])
    parents = tuple(range(-1, len(steps) - 1))
    found.append(StepTree(row["prompt"], steps, parents, labels, source=f"{path}:{number}"))
  return found


def merged(rows: list[StepTree], encode) -> list[token_tree.TokenTree]:
  """The rows of each problem as one tree."""
  by_problem: dict[str, list[token_tree.TokenTree]] = {}
  for row in rows:
    by_problem.setdefault(row.problem, []).append(encode(row))
  return [prefix_tree.merge(group)[0] for group in by_problem.values()]


def evaluate(params, rows: list[token_tree.TokenTree], programs, mesh, row_length: int) -> dict:
  """P(not -1) at each labelled separator, by row; and the labels, 0 or 1."""
  forward = lambda batch: programs.read(params, batch)
  found = batching.read(rows, [""] * len(rows), forward, mesh, row_length, merge=False)
  return {
    "scores": [probabilities[:, 0, 1:].sum(-1).tolist() for probabilities in found],
    "labels": [row.read_targets[:, 1:].sum(-1).astype(int).tolist() for row in rows],
  }


def auroc(run: dict, when: str, rows: Iterable[int]) -> float:
  """Step AUROC of test rows of a run, "before" or "after" training; rows may repeat."""
  scores, labels = (
    np.concatenate([run[when][key][i] for i in rows]) for key in ("scores", "labels")
  )
  value = step_metrics.auroc(scores, labels == 1)
  return float("nan") if value is None else value


def auroc_difference(
  ours: list[dict], peers: list[dict], problems: list[str]
) -> tuple[float, float, float]:
  """Mean over seeds of this side's AUROC minus the peer's, and its 95 % interval.

  The interval is of percentiles over resampled test problems, each with all its rows.  It does not
  say how much seeds vary.  ValueError: the sides scored other test labels.
  """
  labels = [run["after"]["labels"] for run in ours + peers]
  if any(each != labels[0] or len(each) != len(problems) for each in labels):
    raise ValueError("the sides scored other test labels; figures are not comparable")

  def difference(rows) -> float:
    means = [np.mean([auroc(run, "after", rows) for run in side]) for side in (ours, peers)]
    return float(means[0] - means[1])

  groups = [np.flatnonzero(np.array(problems) == each) for each in dict.fromkeys(problems)]
  draws = np.random.default_rng(0).integers(len(groups), size=(RESAMPLES, len(groups)))
  found = [difference(np.concatenate([groups[g] for g in draw])) for draw in draws]
  return difference(range(len(problems))), *np.nanpercentile(found, [2.5, 97.5])


def targets(asked: float, runs: list[dict], problems: list[str]) -> list[dict]:
  """Ratios to the peer; nothing without one."""
  ours, peers = ([run for run in runs if run["side"] == side] for side in (OURS, PEER))
  if not peers:
    return []
  rate = lambda side, key: sum(run["steps"] for run in side) / sum(run[key] for run in side)
  rows = [
    runner.target(f"{what}, {OURS} / {PEER}", ">=", asked, rate(ours, key) / rate(peers, key))
    for what, key in (
      ("labelled steps a second", "train_seconds"),
      ("labelled steps a second of processor time", "train_cpu_seconds"),
    )
  ]
  mean, low, high = auroc_difference(ours, peers, problems)
  note = ", within noise: not distinguishable" if low <= 0 <= high else ""
  what = f"step AUROC, {OURS} - {PEER} (95 % [{low:.3f}, {high:.3f}])"
  return [*rows, runner.target(what, ">=", 0, mean, note)]


def row(run: dict) -> dict:
  """A run; "labelled steps" are those of the peer's rows, "labels read" those of its own."""
  seconds, tested = run["train_seconds"], range(len(run["after"]["labels"]))
  return {
    "run": f"{run['side']}, seed {run['seed']}",
    "updates": run["updates"],
    "labelled steps": run["steps"],
    "labels read": run.get("targets", run["steps"]),
    "tokens": run["tokens"],
    "padding": f"{1 - run['tokens'] / run['slots']:.1%}",
    "training s": seconds,
    "compilation s": run.get("compile_seconds"),
    "CPU s": run["train_cpu_seconds"],
    "labelled steps/s": run["steps"] / seconds,
    "load average": run["load_at_end"],
    "AUROC before": auroc(run, "before", tested),
    "after": auroc(run, "after", tested),
    "mean loss": float(np.mean(run["losses"])),
  }
