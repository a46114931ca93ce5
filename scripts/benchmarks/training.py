"""Fine-tuning a process reward model on a CPU, beside TRL's PRMTrainer on the same rows.

Both sides train one epoch of the peer's rows: a row for each path from a problem to a last step, in
which alternatives repeat the steps before them, labels and all.  This project does so in one or
both of two layouts: "packed", each of those rows by itself, and "trees", in which the rows of a
problem are one tree and every distinct label is trained once.  The work that is done is the same
however often a label is encoded for it, so labelled steps a second are those of the peer's rows.

Each run is a process of its own, alone on the same cores, and leaves its figures in a file: an
interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import platform
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata

from benchmarks import training_report

from prm_jax.datasets import prm800k
from prm_jax.datasets.prm800k import recipes
from prm_jax.input_pipeline import tokenizers
from prm_jax.runtime import json_lines
from prm_jax.types import StepTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).parent
PACKAGES = ("trl==1.9.2", "torch==2.13.0", "transformers", "datasets")
OWN_PACKAGES = ("jax", "jaxlib", "flax", "optax")
# Run by the peer's Python: fails where the trainer is missing, else prints what is installed.
PEER_VERSIONS = """
import importlib.metadata, json, platform
import trl.experimental.prm
names = ("trl", "torch", "transformers", "accelerate", "datasets")
versions = {name: importlib.metadata.version(name) for name in names}
print(json.dumps(versions | {"python": platform.python_version()}))
"""
SPLITS = ("train", "test")
# Of each phase: the files of the splits, the recipe that makes labels of them, and what differs
# from SETTINGS.  Phase 1 is here for its alternatives; it is small, so that both its files are
# trained on and nothing is evaluated.
PHASES = {
  "phase2": {
    "train": ("phase2_train.jsonl",),
    "test": ("phase2_test.jsonl",),
    "recipe": "paper",
    "settings": {},
  },
  "phase1": {
    "train": ("phase1_train.jsonl", "phase1_test.jsonl"),
    "test": (),
    "recipe": "trl",
    "settings": {"max_length": 2048},
  },
}
PATHS = ("model", "tokenizer", "config", *SPLITS)
SCRIPTS = {"ours": HERE / "packed_training.py", "trl": HERE / "trl_peer.py"}
QUICK = {"train": 8, "test": 4}  # the shortest rows
tables = training_report.tables
# Of both sides' processes: memory in large pages, where Linux gives them to those who ask.  Small
# ones cost a tenth of a step whose temporaries are gigabytes and new in each.
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Of both sides.  Optimiser settings are those of transformers' Trainer, so PRMTrainer's.
SETTINGS = {
  "batch": 4,  # rows of the peer; this project's batches are packed rows, as the config says
  "learning_rate": 2e-5,
  "warmup_updates": 0,
  "weight_decay": 0.0,
  "b1": 0.9,
  "b2": 0.999,
  "clip_norm": 1.0,
  "max_length": 1024,
  "separator": "\n",
  "max_updates": -1,  # one epoch
}


def run(args) -> dict:
  """Measures both sides.  `args` are those of scripts/benchmark.py."""
  if args.threads > len(usable_cores()):
    raise ValueError(f"--threads {args.threads}: only {len(usable_cores())} cores may be used here")
  phase = PHASES[args.rows_of]
  files = [args.source / name for split in SPLITS for name in phase[split]]
  for path in (args.model, args.config, *files):
    if not path.is_file():
      raise FileNotFoundError(f"{path}: no such file; --source, --model and --config say where")
  settings = SETTINGS | phase["settings"] | {"threads": args.threads, "environment": ENVIRONMENT}
  settings["model"] = str(args.model.resolve())
  settings["model_sha256"] = sha256(args.model)
  if args.quick:
    settings |= {"max_updates": 1, "max_length": 256}
  args.work.mkdir(parents=True, exist_ok=True)
  rows, left_out = {}, {}
  for split in SPLITS:
    rows[split], left_out[split], settings[split] = write_rows(args, split, settings)
  versions = {name: metadata.version(name) for name in OWN_PACKAGES}
  row_length = args.row_length or settings["max_length"]
  if row_length < settings["max_length"]:
    raise ValueError(f"--row_length {row_length}: rows may have {settings['max_length']} tokens")
  own = {
    "task": "train",
    "row_length": row_length,
    "devices": args.devices,
    "config": str(args.config.resolve()),
    "code": source_hash(args.config),
    "script": sha256(SCRIPTS["ours"]),
    "versions": versions | {"python": platform.python_version()},
  }
  python = peer = None
  if args.peer == "trl":  # before the long runs: what is wrong with it shows at once
    python = str(args.peer_python or environment(ROOT / ".venv-trl"))
    peer = {"packages": PACKAGES, "versions": peer_versions(python), "pad_id": 0}
    exported = export(args, settings)
    peer |= {"tokenizer": f"{exported}/tokenizer.json", "model": str(exported)}
    peer["script"] = sha256(SCRIPTS["trl"])
  result = {
    "rows_of": args.rows_of,
    "settings": settings | {name: own[name] for name in ("config", "row_length", "devices")},
    "rows": {split: len(kept) for split, kept in rows.items()},
    "left_out": {split: about for split, about in left_out.items() if phase[split]},
    "ours": [
      part(args, "ours", settings | own | {"layout": layout, "seed": seed}, sys.executable)
      for seed in args.seeds
      for layout in args.layouts
    ],
    "peers": [],
  }
  if peer:
    result["peers"] = [
      part(args, "trl", settings | peer | {"seed": s}, python) for s in args.peer_seeds
    ]
  problems = [row["prompt"] for row in rows["test"]]
  result["auroc"] = training_report.aurocs(result, problems) if problems else None
  result["targets"] = training_report.targets(result)
  return result


def write_rows(args, split: str, settings: dict) -> tuple[list[dict], dict, str]:
  """A split's rows, chosen at random (quick: the shortest), in a file for both sides.

  Training rows are those of whole problems, as a training set has them: what the solutions of a
  problem share is there to be shared.  Of a split that the phase does not have, the file is empty.

  Returns:
    the rows; how many were left out, and why; the file.

  Raises:
    ValueError: none is left.
  """
  phase = PHASES[args.rows_of]
  files = [args.source / name for name in phase[split]]
  rows, unlabelled = peer_rows(files, phase["recipe"])
  random.Random(0).shuffle(rows)
  if split == "train":
    place = {prompt: i for i, prompt in enumerate(dict.fromkeys(row["prompt"] for row in rows))}
    rows.sort(key=lambda row: place[row["prompt"]])
  count = {"train": args.rows, "test": args.test_rows}[split]
  if args.quick:
    rows.sort(key=lambda row: len(str(row)))
    count = min(count, QUICK[split])
  tokenizer, limit = tokenizers.load(args.model), settings["max_length"]
  kept, long = choose(rows, count, limit, lambda row: length(row, tokenizer, settings["separator"]))
  if files and not kept:
    raise ValueError(f"{files[0]}: no path of labelled steps within {limit} tokens")
  path = args.work / f"{args.rows_of}_{split}_{count}{'_quick' * args.quick}.jsonl"
  with json_lines.written(path) as file:
    file.writelines(json.dumps(row) + "\n" for row in kept)
  if files:
    say(
      f"{path}: {len(kept)} of {len(rows)} rows; left out: {unlabelled} with unlabelled steps, "
      f"and, before there were enough, {long} of more than {limit} tokens"
    )
  return kept, {"unlabelled": unlabelled, "long": long}, str(path.resolve())


def choose(rows: list[dict], count: int, limit: int, measure) -> tuple[list[dict], int]:
  """The first rows of at most `limit` tokens, and how many longer ones stood before the last.

  The sides cut a long row at different places: this project after a step, TRL anywhere.
  """
  kept, long = [], 0
  for row in rows:
    if len(kept) == count:
      break
    if measure(row) <= limit:
      kept.append(row)
    else:
      long += 1
  return kept, long


def length(row: dict, tokenizer, separator: str) -> int:
  """Tokens of a row as this project lays it out; TRL has no separator after the problem."""
  texts = [row["prompt"], *row["completions"]]
  tokens = sum(len(tokenizer.encode(text)) for text in texts)
  return tokens + len(texts) * len(tokenizer.encode(separator)) + (tokenizer.bos_id is not None)


def peer_rows(files: list[pathlib.Path], recipe: str) -> tuple[list[dict], int]:
  """PRM800K files as TRL takes them: one row for each path from the problem to a leaf.

  What the recipe keeps as neutral counts as right.  TRL has no unlabelled steps, so a path that has
  one is left out.

  Returns:
    rows {"prompt", "completions", "labels"}, and how many paths were left out.
  """
  rows, left_out = [], 0
  for tree in solutions(files, recipe):
    for steps in paths(tree):
      labels = [tree.labels[i] for i in steps]
      if None in labels:
        left_out += 1
        continue
      rows.append(
        {
          "prompt": tree.problem,
          "completions": [tree.steps[i] for i in steps],
          "labels": [label != -1 for label in labels],
        }
      )
  return rows, left_out


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


def source_hash(config: pathlib.Path) -> str:
  """Of what is measured: figures of other code are not taken for this one's."""
  digest = hashlib.sha256(config.read_bytes())
  for name in ("config.py", "types.py", "input_pipeline", "model", "training"):
    for file in files_of(ROOT / "prm_jax" / name):
      digest.update(file.read_bytes())
  return digest.hexdigest()


def sha256(path: pathlib.Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def files_of(path: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def part(args, name: str, settings: dict, python: str) -> dict:
  """The figures of one run, from its file or from a process that writes it."""
  said = {k: v for k, v in settings.items() if k not in PATHS}  # by their content instead
  content = json.dumps(said, sort_keys=True)
  rows = b"".join(pathlib.Path(settings[split]).read_bytes() for split in SPLITS)
  key = hashlib.sha256(content.encode() + rows).hexdigest()[:12]
  label = "_".join(filter(None, [name, settings.get("layout"), f"seed{settings['seed']}"]))
  output = args.work / f"{label}_{key}.json"
  if not output.exists():
    say(f"{label}, load average {os.getloadavg()[0]:.1f}:", end=" ")
    start = time.perf_counter()
    given, unfinished = output.with_suffix(".settings"), output.with_suffix(".new")
    given.write_text(json.dumps(settings | {"output": str(unfinished.resolve())}))
    child(python, SCRIPTS[name], given, output.with_suffix(".log"), settings["threads"])
    figures = json.loads(unfinished.read_text())
    figures |= {"seed": settings["seed"], "process_seconds": time.perf_counter() - start}
    figures |= {"load_at_end": os.getloadavg()[0], "date": time.strftime("%Y-%m-%d")}
    with json_lines.written(output) as file:
      file.write(json.dumps(figures) + "\n")
    for file in (given, unfinished):
      file.unlink()
    say(f"{figures['process_seconds']:.0f} s -> {output}")
  else:
    say(f"{label}: as measured before, {output}")
  return json.loads(output.read_text())


def export(args, settings: dict) -> pathlib.Path:
  """The model and its tokenizer as a transformers directory: same numbers, same ids."""
  output = args.work / f"exported_{settings['model_sha256'][:12]}"
  if not output.exists():  # it takes its name when it is whole
    given = args.work / "export.settings"
    asked = {"task": "export", "model": settings["model"], "output": str(output.resolve())}
    given.write_text(json.dumps(asked))
    child(sys.executable, SCRIPTS["ours"], given, given.with_suffix(".log"), settings["threads"])
    given.unlink()
  return output.resolve()


def child(python: str, script: pathlib.Path, given, log: pathlib.Path, threads: int) -> None:
  """Runs a side to its end, on as many cores as it has threads."""
  dropped = ("JAX_COMPILATION_CACHE_DIR", "PYTHONPATH")  # compilation is part of the figures
  environment = {k: v for k, v in os.environ.items() if k not in dropped}
  environment |= ENVIRONMENT | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(threads)}
  if script == SCRIPTS["ours"]:
    environment["PYTHONPATH"] = str(ROOT)
  command = [python, str(script), str(given)]
  with log.open("w") as out, pinned(usable_cores()[-threads:]):
    done = subprocess.run(command, env=environment, stdout=out, stderr=out)
  if done.returncode:
    raise RuntimeError(f"{script.name} ended with {done.returncode}; {log}:\n{tail(log)}")


def tail(log: pathlib.Path) -> str:
  return log.read_text(errors="replace")[-2000:]


@contextlib.contextmanager
def pinned(cores: list[int]) -> Iterator[None]:
  """This thread, and so the processes it starts, on these cores only, where the system can."""
  if not hasattr(os, "sched_setaffinity"):
    yield
    return
  before = os.sched_getaffinity(0)
  os.sched_setaffinity(0, cores)
  try:
    yield
  finally:
    os.sched_setaffinity(0, before)


def usable_cores() -> list[int]:
  if hasattr(os, "sched_getaffinity"):
    return sorted(os.sched_getaffinity(0))
  return list(range(os.cpu_count() or 1))


def environment(directory: pathlib.Path) -> pathlib.Path:
  """The Python of the peer's virtual environment, made if it is not there (some gigabytes)."""
  python, stamp = directory / "bin/python", directory / "made_by_prm_jax"
  wanted = " ".join(PACKAGES)
  if stamp.exists() and stamp.read_text() == wanted:
    return python
  if directory.exists() and not stamp.exists():
    raise ValueError(f"{directory} is there and was not made by this script: move it away first")
  say(f"making {directory} and installing {wanted}")
  directory.mkdir(parents=True, exist_ok=True)
  stamp.write_text("unfinished")  # first, so that an interrupted one is known for ours
  for old in set(directory.iterdir()) - {stamp}:
    shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
  commands = (
    [sys.executable, "-m", "venv", str(directory)],
    [str(python), "-m", "pip", "install", "--quiet", *PACKAGES],
  )
  for command in commands:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
      raise RuntimeError(f"{' '.join(command)}:\n{(done.stdout + done.stderr)[-2000:]}")
  stamp.write_text(wanted)
  return python


def peer_versions(python: str) -> dict[str, str]:
  """What the peer's environment holds.

  Raises:
    RuntimeError: not PRMTrainer.
    OSError: there is no such Python.
  """
  command = [python, "-E", "-c", PEER_VERSIONS]  # without PYTHONPATH, as it will run
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode:
    raise RuntimeError(f"{python} has no PRMTrainer of TRL:\n{done.stderr[-2000:]}")
  return json.loads(done.stdout.splitlines()[-1])


def say(text: str, end: str = "\n") -> None:
  print(text, end=end, file=sys.stderr, flush=True)
