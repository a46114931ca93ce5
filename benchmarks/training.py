"""Fine-tuning a process reward model on the CPU, beside TRL's PRMTrainer on the same rows.

Both sides train one epoch of the peer's rows: one row for each path from a problem to a last
labelled step, so that alternatives repeat the steps before them, labels and all.  This project does
so in two layouts: "packed", each of those rows by itself, and "trees", the rows of a problem as one
tree, in which a repeated label is trained once.  Speed is labelled steps of the peer's rows a
second, whatever the layout.

Targets: 1.3 times the peer's speed packed, 2 times as trees, 10 times as trees on phase 1 (many
alternatives), and a step AUROC that is not below the peer's.  Takes 30 minutes; finished runs are
kept in --work, so that an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from benchmarks import packed_training, runner
from prm_jax import config as config_lib
from prm_jax import step_metrics
from prm_jax.datasets import prm800k
from prm_jax.datasets.prm800k import recipes
from prm_jax.input_pipeline import tokenizers
from prm_jax.runtime import json_lines
from prm_jax.types import StepTree

HERE = pathlib.Path(__file__).parent
CONFIG = runner.ROOT / "configs/prm800k_smollm2_135m.py"
CODE = ("config.py", "types.py", "input_pipeline", "model", "training")  # of this project's side
PACKAGES = ("trl==1.9.2", "torch==2.13.0", "transformers", "datasets")
# Run by the peer's Python: fails where the trainer is missing, else prints what is installed.
PEER_VERSIONS = """
import importlib.metadata, json, platform
import trl.experimental.prm
names = ("trl", "torch", "transformers", "accelerate", "datasets")
versions = {name: importlib.metadata.version(name) for name in names}
print(json.dumps(versions | {"python": platform.python_version()}))
"""
# Files and recipe of each phase.  Phase 1 is small: all of it is trained on, nothing evaluated.
PHASES = {
  "phase2": (["phase2_train.jsonl"], ["phase2_test.jsonl"], "paper"),
  "phase1": (["phase1_train.jsonl", "phase1_test.jsonl"], [], "trl"),
}
MAX_LENGTH = {"phase2": 1024, "phase1": 2048}  # tokens of a row of the peer
# Of both sides: without large pages a tenth of an update goes into fresh memory.
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "JAX_PLATFORMS": "cpu"}
SETTINGS = {  # of both sides; the optimiser's are those of transformers' Trainer
  "batch": 4,  # rows of the peer; this project's batches are packed rows, as the config says
  "learning_rate": 2e-5,
  "warmup_updates": 0,
  "weight_decay": 0.0,
  "b1": 0.9,
  "b2": 0.999,
  "clip_norm": 1.0,
  "separator": "\n",
  "max_updates": -1,  # one epoch
}
RESAMPLES = 2000
PEER = "TRL"
# Times the peer's labelled steps a second that are asked for.
FASTER = {("phase2", "packed"): 1.3, ("phase2", "trees"): 2.0, ("phase1", "trees"): 10.0}


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  peer: Literal["trl", "none"] = "trl"
  """The peer, in a virtual environment of its own (.venv-trl, some GB); none: this project only."""
  rows_of: Literal["phase2", "phase1"] = "phase2"
  """The phase of PRM800K."""
  layouts: tuple[Literal["packed", "trees"], ...] = ("packed", "trees")
  """Of this project: the peer's rows each by itself, or those of a problem as one tree."""
  row_length: int | None = None
  """Tokens of this project's packed rows; by default the most that a row of the peer may have."""
  source: pathlib.Path = runner.ROOT / "data/prm800k_upstream"
  """Folder of PRM800K's files."""
  config: pathlib.Path = CONFIG
  """This project's settings where the comparison does not fix them."""
  model: pathlib.Path | None = None
  """Hub directory that both start from (scripts/fetch_model.py); by default the config's."""
  rows: int = 240
  """Training rows, of whole problems at random."""
  test_rows: int = 60
  """Test rows, for the AUROC of their steps."""
  seeds: tuple[int, ...] = (0, 1, 2)
  """Of this project's runs: order of the rows and first head."""
  peer_seeds: tuple[int, ...] = (0,)
  """Of the peer's runs."""
  threads: int = 2
  """Cores of either side."""
  devices: int = 1
  """CPU devices that this project splits the rows of an update over, at least a row for each."""
  peer_python: str = ""
  """The Python of an environment that has the peer already."""
  work: pathlib.Path = runner.ROOT / "runs/benchmark_training"
  """Rows, and figures of finished runs."""


def run(args: Args) -> dict:
  """Measures both sides and compares them."""
  if min(args.rows, args.test_rows, args.threads, args.devices) < 1:
    raise ValueError("--rows, --test_rows, --threads and --devices: at least 1")
  if args.threads > len(runner.usable_cores()):
    raise ValueError(f"--threads {args.threads}: only {len(runner.usable_cores())} cores are here")
  train, test, recipe = PHASES[args.rows_of]
  check_files(args.config, *(args.source / name for name in train + test))
  check_files(model := model_path(args))
  settings = SETTINGS | {"max_length": MAX_LENGTH[args.rows_of], "threads": args.threads}
  if args.quick:
    settings |= {"max_updates": 1, "max_length": 256}
  tokenizer, files, notes = tokenizers.load(str(model)), {"model": model, "config": args.config}, []
  for split, names, count in (("train", train, args.rows), ("test", test, args.test_rows)):
    found, left_out = peer_rows([args.source / name for name in names], recipe)
    kept, long = choose(found, count, split, tokenizer, settings, args.quick)
    if names and not kept:
      raise ValueError(f"{names[0]}: no labelled path within {settings['max_length']} tokens")
    files[split] = args.work / f"{args.rows_of}_{split}_{count}{'_quick' * args.quick}.jsonl"
    with json_lines.written(files[split]) as file:
      file.writelines(json.dumps(row) + "\n" for row in kept)
    if names:
      notes.append(
        f"{len(kept)} {split} rows; left out: {left_out} with unlabelled steps, {long} of more "
        f"than {settings['max_length']} tokens"
      )
  problems = [row["prompt"] for row in kept]  # of the test rows
  sides = measure(args, settings, {name: str(path) for name, path in files.items()})
  notes.append(f"Model {model.name}; settings {args.config.name}")
  for name, (first, *_) in sides.items():
    installed = ", ".join(" ".join(each) for each in first["versions"].items())
    notes.append(f"{name}: {installed}")
  return {
    "settings": settings,
    "runs": [each for runs in sides.values() for each in runs],
    "targets": targets(args.rows_of, sides, problems),
    "tables": {"Runs": [row(name, each) for name, runs in sides.items() for each in runs]},
    "notes": "; ".join(notes) + ".",
  }


def model_path(args: Any) -> pathlib.Path:
  """The model that a benchmark's arguments name, or their config."""
  return args.model or pathlib.Path(config_lib.read(str(args.config)).init.checkpoint)


def check_files(*paths: pathlib.Path) -> None:
  """FileNotFoundError, before anything is measured."""
  for path in paths:
    if not path.exists():
      raise FileNotFoundError(f"{path}: no such file; --source, --model and --config say where")


def measure(args: Args, settings: dict, files: dict[str, str]) -> dict[str, list[dict]]:
  """The runs of each side, by name: the peer's, and one of this project for each layout."""
  row_length = args.row_length or settings["max_length"]
  if row_length < settings["max_length"]:
    raise ValueError(f"--row_length {row_length}: rows may have {settings['max_length']} tokens")
  cores = runner.usable_cores()[-args.threads :]
  environment = ENVIRONMENT | {"OMP_NUM_THREADS": str(args.threads)}
  environment |= {"JAX_COMPILATION_CACHE_DIR": None, "PYTHONPATH": None}
  data = [pathlib.Path(files[name]) for name in ("model", "train", "test")]
  if args.peer == "trl":  # first of all, so that what is wrong with it shows at once
    python = args.peer_python or environment_of_peer(runner.ROOT / ".venv-trl")
    peer_versions = versions_of_peer(python)
  sides: dict[str, list[dict]] = {PEER: []} if args.peer == "trl" else {}
  own = settings | {"row_length": row_length, "devices": args.devices}
  versions = runner.versions("jax", "jaxlib", "flax", "optax")
  code = [runner.ROOT / "prm_jax" / name for name in CODE]
  code += [HERE / "packed_training.py", args.config]
  for seed, layout in itertools.product(args.seeds, args.layouts):
    asked = own | {"layout": layout, "seed": seed}
    call = functools.partial(
      runner.apart, packed_training.measure, asked | files, cores=cores, **environment
    )
    name = f"ours_{layout}_seed{seed}"
    found = runner.kept(args.work, name, [asked, environment, versions], [*code, *data], call)
    sides.setdefault(f"this project, {layout}", []).append(
      found | {"seed": seed, "versions": versions}
    )
  for seed in args.peer_seeds if args.peer == "trl" else ():
    asked = settings | {"seed": seed, "pad_id": 0}
    call = functools.partial(
      runner.apart, run_peer, python, asked | files, cores=cores, **environment
    )
    known, code = [asked, environment, peer_versions], [HERE / "trl_peer.py"]
    found = runner.kept(args.work, f"trl_seed{seed}", known, [*code, *data], call)
    sides[PEER].append(found | {"seed": seed, "versions": peer_versions})
  return sides


def run_peer(python: str, settings: dict) -> dict:
  """The peer's figures, from its own Python."""
  with tempfile.TemporaryDirectory() as directory:
    given, output = pathlib.Path(directory, "settings"), pathlib.Path(directory, "figures")
    given.write_text(json.dumps(settings | {"output": str(output)}))
    subprocess.run([python, "-P", str(HERE / "trl_peer.py"), str(given)], check=True)
    return json.loads(output.read_text())


def environment_of_peer(directory: pathlib.Path) -> str:
  """The Python of the peer's virtual environment, which is made if it is not there."""
  stamp, wanted = directory / "packages_of_the_benchmark", " ".join(PACKAGES)
  python = str(directory / "bin/python")
  if not stamp.exists() or stamp.read_text() != wanted:
    if directory.exists() and not (directory / "pyvenv.cfg").exists():
      raise ValueError(f"{directory} is no virtual environment: move it away first")
    runner.say(f"making {directory} and installing {wanted}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    stamp.write_text(wanted)
  return python


def versions_of_peer(python: str) -> dict[str, str]:
  """Packages of the peer's environment; RuntimeError: it has no PRMTrainer."""
  command = [python, "-E", "-c", PEER_VERSIONS]
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode:
    raise RuntimeError(f"{python} has no PRMTrainer of TRL:\n{done.stderr[-2000:]}")
  return json.loads(done.stdout.splitlines()[-1])


def solutions(files: list[pathlib.Path], recipe: str) -> list[StepTree]:
  """The labelled solutions of PRM800K files."""
  records = itertools.chain.from_iterable(map(prm800k.read_records, files))
  return recipes.convert_all(records, recipes.RECIPES[recipe])[0]


def paths(tree: StepTree) -> list[list[int]]:
  """The steps from the problem to each leaf."""
  found = []
  for leaf in set(range(len(tree.steps))) - set(tree.parents):
    path = [leaf]
    while tree.parents[path[0]] >= 0:
      path.insert(0, tree.parents[path[0]])
    found.append(path)
  return sorted(found)


def peer_rows(files: list[pathlib.Path], recipe: str) -> tuple[list[dict], int]:
  """PRM800K files as TRL takes them: one row for each path from the problem to a leaf.

  What the recipe keeps as neutral counts as right.

  Returns:
    Rows {"prompt", "completions", "labels"}; the number of paths left out for a step without a
    label, which TRL does not have.
  """
  rows, left_out = [], 0
  for tree in solutions(files, recipe):
    for steps in paths(tree):
      labels = [tree.labels[i] for i in steps]
      if None in labels:
        left_out += 1
        continue
      texts = [tree.steps[i] for i in steps]
      rows.append(
        {"prompt": tree.problem, "completions": texts, "labels": [x != -1 for x in labels]}
      )
  return rows, left_out


def choose(
  rows: list[dict], count: int, split: str, tokenizer, settings: dict, quick: bool
) -> tuple[list[dict], int]:
  """Random rows that are not too long, and the number of longer ones passed over.

  Training rows are those of whole problems, as in a training set, where solutions share the
  problem.  Both sides would cut a long row, at different places.  `quick` takes the shortest.
  """
  rows = random.Random(0).sample(rows, len(rows))
  if split == "train":
    place = {prompt: i for i, prompt in enumerate(dict.fromkeys(row["prompt"] for row in rows))}
    rows.sort(key=lambda row: place[row["prompt"]])
  if quick:
    rows.sort(key=lambda row: len(str(row)))
    count = min(count, 8)
  kept, long = [], 0
  for row in rows:
    if len(kept) == count:
      break
    texts = [row["prompt"], *row["completions"]]
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    tokens += len(texts) * len(tokenizer.encode(settings["separator"]))
    if tokens + (tokenizer.bos_id is not None) <= settings["max_length"]:
      kept.append(row)
    else:
      long += 1
  return kept, long


def auroc(run: dict, when: str, rows: Iterable[int]) -> float:
  """Step AUROC of a run's test rows, "before" or "after" training; rows may repeat."""
  scores, labels = ([run[when][key][i] for i in rows] for key in ("scores", "labels"))
  value = step_metrics.auroc(np.concatenate(scores), np.concatenate(labels) == 1)
  return float("nan") if value is None else value


def auroc_difference(
  ours: list[dict], peers: list[dict], problems: list[str]
) -> tuple[float, float, float]:
  """Mean over seeds of this side's AUROC minus the peer's, and its 95 % interval.

  The interval is of percentiles over resampled test problems, each with all its rows.  It does not
  say how much seeds vary; the table of runs does.

  Raises:
    ValueError: the sides scored other test labels.
  """
  labels = [run["after"]["labels"] for run in ours + peers]
  if any(each != labels[0] or len(each) != len(problems) for each in labels):
    raise ValueError("the sides scored other test labels; figures are not comparable")
  groups = [[i for i, p in enumerate(problems) if p == each] for each in dict.fromkeys(problems)]
  rng = np.random.default_rng(0)

  def difference(rows) -> float:
    means = [np.mean([auroc(run, "after", rows) for run in side]) for side in (ours, peers)]
    return float(means[0] - means[1])

  draws = rng.integers(len(groups), size=(RESAMPLES, len(groups)))
  found = [difference(np.concatenate([groups[g] for g in draw])) for draw in draws]
  return difference(range(len(problems))), *np.nanpercentile(found, [2.5, 97.5])


def targets(rows_of: str, sides: dict[str, list[dict]], problems: list[str]) -> list[dict]:
  """Ratios to the peer; nothing without one."""
  peers, rows = sides.get(PEER), []

  def rate(runs: list[dict], *seconds: str) -> float:
    spent = sum(run.get(key, 0.0) for run in runs for key in seconds)
    return sum(run["steps"] for run in runs) / spent

  for name, runs in sides.items() if peers else ():
    if name == PEER:
      continue
    asked = FASTER.get((rows_of, runs[0]["layout"]), 1.0)
    for what, *seconds in (
      (f"labelled steps a second, {name} / {PEER}", "train_seconds"),
      (f"the same with compilation, {name}", "train_seconds", "compile_seconds"),
      (f"labelled steps a second of processor time, {name}", "train_cpu_seconds"),
    ):
      rows.append(runner.target(what, ">=", asked, rate(runs, *seconds) / rate(peers, *seconds)))
    if problems:
      mean, low, high = auroc_difference(runs, peers, problems)
      note = ", within noise: not distinguishable" if low <= 0 <= high else ""
      what = f"step AUROC, {name} - {PEER} (95 % [{low:.3f}, {high:.3f}])"
      rows.append(runner.target(what, ">=", 0, mean, note))
  return rows


def row(name: str, run: dict) -> dict:
  """A run; "labelled steps" are those of the peer's rows, "labels read" those of its own."""
  seconds, tested = run["train_seconds"], range(len(run["after"]["labels"]))
  return {
    "run": f"{name}, seed {run['seed']}",
    "updates": run["updates"],
    "labelled steps": run["steps"],
    "labels read": run.get("targets", run["steps"]),
    "tokens": run["tokens"],
    "padding": f"{1 - run['tokens'] / run['slots']:.1%}",
    "training s": seconds,
    "compilation s": run.get("compile_seconds"),
    "CPU s": run["train_cpu_seconds"],
    "slots/s": run["slots"] / seconds,
    "labelled steps/s": run["steps"] / seconds,
    "load average": f"{run['load_at_end']:.1f}",
    "AUROC before": auroc(run, "before", tested) if tested else None,
    "after": auroc(run, "after", tested) if tested else None,
    "mean loss": float(np.mean(run["losses"])),
  }
