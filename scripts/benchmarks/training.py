"""Fine-tuning a process reward model on a CPU, beside TRL's PRMTrainer on the same rows.

Each run is a process of its own, alone on the same cores, and leaves its figures in a file: an
interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import random
import subprocess
import sys
import time

import numpy as np

from prm_jax import json_lines
from prm_jax.datasets import prm800k
from prm_jax.input_pipeline import conversion
from prm_jax.training import metrics
from prm_jax.types import StepTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).parent
PARTS = ()
PACKAGES = ("trl==1.9.2", "torch==2.13.0", "transformers", "datasets")
SPLITS = ("train", "test")
SCRIPTS = {"ours": HERE / "packed_training.py", "trl": HERE / "trl_peer.py"}
RESAMPLES = 2000
QUICK = {"train": 8, "test": 4}  # the shortest rows
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
  "limit": 0,
}


def run(args) -> dict:
  """Measures both sides.  `args` are those of scripts/benchmark.py."""
  for path in (args.model, args.config, *(args.source / f"phase2_{s}.jsonl" for s in SPLITS)):
    if not path.is_file():
      raise FileNotFoundError(f"{path}: no such file; --source, --model and --config say where")
  settings = SETTINGS | {"threads": args.threads, "config": str(args.config.resolve())}
  settings |= {"model": str(args.model.resolve())}
  sizes = {"train": args.rows, "test": args.test_rows}
  if args.quick:
    sizes, settings = QUICK, settings | {"max_updates": 1, "max_length": 256}
  args.work.mkdir(parents=True, exist_ok=True)
  problems = {}
  for split, count in sizes.items():
    rows, left_out = peer_rows(args.source / f"phase2_{split}.jsonl")
    random.Random(0).shuffle(rows)
    if args.quick:
      rows.sort(key=lambda row: len(str(row)))
    path = args.work / f"{split}_{count}{'_quick' * args.quick}.jsonl"
    with json_lines.written(path) as file:
      file.writelines(json.dumps(row) + "\n" for row in rows[:count])
    settings[split] = str(path.resolve())
    problems[split] = [row["prompt"] for row in rows[:count]]
    say(f"{path}: {len(problems[split])} of {len(rows)} rows; {left_out} have unlabelled steps")
  result = {"settings": settings, "rows": {k: len(v) for k, v in problems.items()}}
  own = {"task": "train", "code": source_hash(args.config)}
  result["ours"] = [
    part(args, "ours", settings | own | {"seed": seed}, sys.executable) for seed in args.seeds
  ]
  result["peers"] = []
  if args.peer == "trl":
    python = args.peer_python or environment(ROOT / ".venv-trl")
    exported = export(args, settings | own)
    given = {"tokenizer": f"{exported}/tokenizer.json", "pad_id": 0, "model": str(exported)}
    result["peers"] = [
      part(args, "trl", settings | given | {"seed": seed}, str(python)) for seed in args.peer_seeds
    ]
  result["auroc"] = aurocs(result["ours"], result["peers"], problems["test"])
  result["targets"] = targets(result)
  return result


def peer_rows(path: pathlib.Path) -> tuple[list[dict], int]:
  """A PRM800K file as TRL takes it: one row for each path from the problem to a leaf.

  Conversion is the paper's; neutral counts as right.  TRL has no unlabelled steps, so a path that
  has one is left out.

  Returns:
    rows {"prompt", "completions", "labels"}, and how many paths were left out.
  """
  solutions, _ = conversion.convert_all(prm800k.read_records(path), conversion.RECIPES["paper"])
  rows, left_out = [], 0
  for tree in solutions:
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
  parts = ("config.py", "types.py", "input_pipeline", "model", "training")
  files = [SCRIPTS["ours"], *(f for part in parts for f in files_of(ROOT / "prm_jax" / part))]
  for file in files:
    digest.update(file.read_bytes())
  return digest.hexdigest()


def files_of(path: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def part(args, name: str, settings: dict, python: str) -> dict:
  """The figures of one run, from its file or from a process that writes it."""
  content = json.dumps(settings, sort_keys=True)
  rows = b"".join(pathlib.Path(settings[split]).read_bytes() for split in SPLITS)
  key = hashlib.sha256(content.encode() + rows).hexdigest()[:12]
  output = args.work / f"{name}_seed{settings['seed']}_{key}.json"
  if not output.exists():
    say(f"{name}, seed {settings['seed']}, load average {os.getloadavg()[0]:.1f}:", end=" ")
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
    say(f"{name}, seed {settings['seed']}: as measured before, {output}")
  return json.loads(output.read_text())


def export(args, settings: dict) -> pathlib.Path:
  """The model and its tokenizer as a transformers directory: same numbers, same ids."""
  output = args.work / f"exported_{settings['code'][:12]}"
  if not output.exists():
    given = args.work / "export.settings"
    given.write_text(
      json.dumps(settings | {"task": "export", "seed": 0, "output": str(output.resolve())})
    )
    child(sys.executable, SCRIPTS["ours"], given, given.with_suffix(".log"), settings["threads"])
    given.unlink()
  return output.resolve()


def child(python: str, script: pathlib.Path, given, log: pathlib.Path, threads: int) -> None:
  """Runs a side to its end, on as many cores as it has threads."""
  dropped = ("JAX_COMPILATION_CACHE_DIR", "PYTHONPATH")  # compilation is part of the figures
  environment = {k: v for k, v in os.environ.items() if k not in dropped} | {
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": str(threads),
  }
  if script == SCRIPTS["ours"]:
    environment["PYTHONPATH"] = str(ROOT)
  pin = None
  if hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))[-threads:]
    pin = lambda: os.sched_setaffinity(0, cores)
  with log.open("w") as out:
    done = subprocess.run(
      [python, str(script), str(given)], env=environment, stdout=out, stderr=out, preexec_fn=pin
    )
  if done.returncode:
    raise RuntimeError(f"{script.name} ended with {done.returncode}; {log}:\n{tail(log)}")


def tail(log: pathlib.Path) -> str:
  return log.read_text(errors="replace")[-2000:]


def environment(directory: pathlib.Path) -> pathlib.Path:
  """The Python of the peer's virtual environment, made if it is not there (some gigabytes)."""
  python, stamp = directory / "bin/python", directory / "made_by_prm_jax"
  wanted = " ".join(PACKAGES)
  if stamp.exists() and stamp.read_text() == wanted:
    return python
  if directory.exists() and not stamp.exists():
    raise ValueError(f"{directory} is there and was not made by this script: move it away first")
  say(f"making {directory} and installing {wanted}")
  commands = (
    [sys.executable, "-m", "venv", "--clear", str(directory)],
    [str(python), "-m", "pip", "install", "--quiet", *PACKAGES],
  )
  for command in commands:
    done = subprocess.run(command, capture_output=True, text=True)
    if directory.exists():
      stamp.write_text("unfinished")
    if done.returncode:
      raise RuntimeError(f"{' '.join(command)}:\n{(done.stdout + done.stderr)[-2000:]}")
  stamp.write_text(wanted)
  return python


def auroc(side: dict, when: str, rows: np.ndarray) -> float:
  """Step AUROC over some of the test rows, which may be drawn several times."""
  scores = np.concatenate([side[when]["scores"][i] for i in rows])
  labels = np.concatenate([side[when]["labels"][i] for i in rows])
  value = metrics.auroc(scores, labels == 1)
  return float("nan") if value is None else value


def aurocs(ours: list[dict], peers: list[dict], problems: list[str]) -> dict:
  """AUROC before and after by run; of the means over seeds, and their difference, 95 % intervals.

  Intervals are percentiles over resampled test problems, each with all its rows, the same ones for
  both sides: they do not say how much seeds vary; `by_seed` does.
  """
  for side in ours + peers:
    if len(side["after"]["labels"]) != len(problems):
      raise ValueError(f"{len(side['after']['labels'])} test rows scored, not {len(problems)}")
    if side["after"]["labels"] != ours[0]["after"]["labels"]:
      raise ValueError("the two sides scored other test labels; figures are not comparable")
  groups = [[i for i, p in enumerate(problems) if p == each] for each in dict.fromkeys(problems)]
  everything = np.arange(len(problems))
  rng = np.random.default_rng(0)
  draws = [
    np.concatenate([groups[g] for g in rng.integers(len(groups), size=len(groups))])
    for _ in range(RESAMPLES)
  ]
  out, means = {"problems": len(groups)}, {}
  for name, sides in (("ours", ours), ("peers", peers)):
    if not sides:
      continue
    by_seed = {w: [auroc(s, w, everything) for s in sides] for w in ("before", "after")}
    means[name] = np.array([[auroc(s, "after", rows) for s in sides] for rows in draws]).mean(1)
    low, high = np.nanpercentile(means[name], [2.5, 97.5])
    mean = float(np.mean(by_seed["after"]))
    out[name] = {"by_seed": by_seed, "after": mean, "low": low, "high": high}
  if len(means) == 2:
    low, high = np.nanpercentile(means["ours"] - means["peers"], [2.5, 97.5])
    difference = out["ours"]["after"] - out["peers"]["after"]
    out["difference"] = {"mean": difference, "low": low, "high": high}
  return out


def rate(sides: list[dict], what: str, seconds: str = "train_seconds") -> float:
  """So many per second of training, over all runs of a side."""
  return sum(s[what] for s in sides) / sum(s[seconds] for s in sides)


def with_compilation(side: dict) -> float:
  return side["train_seconds"] + side.get("compile_seconds", 0.0)


def targets(result: dict) -> list[dict]:
  """What issue and project ask of the comparison, and what was measured; nothing without a peer."""
  ours, peers = result["ours"], result["peers"]
  if not peers:
    return []
  ratio = rate(ours, "steps") / rate(peers, "steps")
  with_compile = sum(s["steps"] for s in ours) / sum(map(with_compilation, ours))
  difference = result["auroc"]["difference"]
  rows = [
    ("labelled steps a second, this project / TRL", ">= 1.3", ratio, ratio >= 1.3),
    ("the same with compilation counted", "", with_compile / rate(peers, "steps"), None),
    (
      "step AUROC on the test rows, this project - TRL "
      f"(95 % [{difference['low']:.3f}, {difference['high']:.3f}])",
      ">= 0",
      difference["mean"],
      difference["mean"] >= 0,
    ),
  ]
  return [{"what": w, "target": t, "measured": m, "met": met} for w, t, m, met in rows]


def tables(figures: dict) -> str:
  """The figures as Markdown."""
  parts = []
  if figures["targets"]:
    verdicts = {True: "yes", False: "**no**", None: ""}
    rows = [
      (
        r["what"],
        r["target"],
        f"{r['measured']:.3f}",
        verdicts[None if figures["quick"] else r["met"]],
      )
      for r in figures["targets"]
    ]
    parts.append(table(("target", "asked", "measured", "met"), rows))
  sides = [("TRL", s) for s in figures["peers"]] + [("this project", s) for s in figures["ours"]]
  parts.append(speed_table(sides))
  parts.append(auroc_table(figures["auroc"], figures["peers"], figures["ours"]))
  versions = {k: v for _, side in reversed(sides) for k, v in side["versions"].items()}
  parts.append(
    f"{figures['settings']['threads']} threads; "
    + ", ".join(f"{name} {version}" for name, version in versions.items())
    + f"; {figures['rows']['train']} training rows, {figures['rows']['test']} test rows of "
    f"{figures['auroc']['problems']} problems."
  )
  return "\n\n".join(parts)


def speed_table(sides: list[tuple[str, dict]]) -> str:
  rows = []
  for name, s in sides:
    seconds = s["train_seconds"]
    compiled = f"{s['compile_seconds']:.0f}" if "compile_seconds" in s else ""
    rows.append(
      (
        f"{name}, seed {s['seed']}",
        s["updates"],
        f"{seconds:.0f}",
        compiled,
        f"{s['train_cpu_seconds']:.0f}",
        f"{s['slots'] / seconds:.1f}",
        f"{1 - s['tokens'] / s['slots']:.1%}",
        f"{s['tokens'] / seconds:.1f}",
        f"{s['steps'] / seconds:.2f}",
        f"{s['load_at_end']:.1f}",
      )
    )
  head = ("run", "updates", "training s", "compilation s", "CPU s", "slots/s", "padding")
  return table((*head, "real tokens/s", "labelled steps/s", "load average"), rows)


def auroc_table(about: dict, peers: list[dict], ours: list[dict]) -> str:
  rows = []
  for label, name, sides in (("TRL", "peers", peers), ("this project", "ours", ours)):
    if not sides:
      continue
    for i, side in enumerate(sides):
      by_seed = about[name]["by_seed"]
      values = (f"{by_seed[when][i]:.3f}" for when in ("before", "after"))
      rows.append((f"{label}, seed {side['seed']}", *values, "", f"{np.mean(side['losses']):.3f}"))
    interval = f"[{about[name]['low']:.3f}, {about[name]['high']:.3f}]"
    rows.append((f"{label}, mean", "", f"{about[name]['after']:.3f}", interval, ""))
  head = ("run", "step AUROC before", "after", "95 % over problems", "mean training loss")
  return table(head, rows)


def table(head: tuple, rows: list[tuple]) -> str:
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def say(text: str, end: str = "\n") -> None:
  print(text, end=end, file=sys.stderr, flush=True)
