"""Every speed figure of the project, beside a peer's from the same run.

  python scripts/benchmark.py NAME --json=figures.json
  python scripts/benchmark.py NAME --help             what it measures, and its options

  aggregation  best-of-N, votes and step reductions, beside a Python loop and numpy   6 minutes
  reranking    scripts/rerank.py on 930,000 lines: under 60 s                          5 minutes
  tree         training and scoring with prefix trees, beside the same flattened      15 minutes
  training     fine-tuning on the CPU, beside TRL's PRMTrainer                        30 minutes
  kernel       memory of the TPU attention kernel, beside splash attention            40 minutes
  scaling      simulated devices and hosts; train steps compiled for TPU slices       50 minutes
  loading      time and memory of loading public weights                               1 minute

Prints tables.  --docs puts them into docs/benchmark_tables.md; docs/benchmarks.md explains them.
"""

import dataclasses
import importlib
import json
import os
import pathlib
import sys
import time

import tyro

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import runner  # noqa: E402

NAMES = ("aggregation", "reranking", "tree", "training", "kernel", "scaling", "loading")
UNSAID = ("json", "docs", "docs_file", "peer_python", "work")  # left out of the command as printed


def main() -> None:
  name, arguments = (*sys.argv[1:2], "--help")[0], sys.argv[2:]
  if name not in NAMES:
    print(__doc__)
    raise SystemExit(0 if name in ("-h", "--help") else f"benchmark.py: there is no {name}")
  module = importlib.import_module(f"benchmarks.{name}")
  args = tyro.cli(
    getattr(module, "Args", runner.Common),
    prog=f"benchmark.py {name}",
    args=arguments,
    description=module.__doc__,
    use_underscores=True,
    config=(tyro.conf.FlagCreatePairsOff,),
  )
  try:
    run(name, module, args)
  except (ValueError, OSError, RuntimeError) as error:
    raise SystemExit(f"benchmark.py: {error}") from error


def run(name: str, module, args: runner.Common) -> None:
  """Measures, prints the tables, and writes what --json and --docs ask for."""
  section = name + (f"_{args.rows_of}" if getattr(args, "rows_of", "phase2") != "phase2" else "")
  if args.docs:
    runner.between_markers(args.docs_file, section)  # fails here rather than at the end
  figures = {"machine": runner.machine(), "command": command(name, args), "quick": args.quick}
  start = time.perf_counter()
  figures |= module.run(args)
  figures["seconds"] = time.perf_counter() - start
  figures["machine"]["load_at_end"] = os.getloadavg()[0]
  text = runner.document(figures)
  print(text)
  if args.json:
    args.json.write_text(json.dumps(figures, indent=1) + "\n")
  if args.docs:
    before, after = runner.between_markers(args.docs_file, section)
    args.docs_file.write_text(f"{before}\n\n{text}\n\n{after}")


def command(name: str, args: runner.Common) -> str:
  """The command as it was given, with the names of files and folders only."""
  out = [f"python scripts/benchmark.py {name}"]
  for field in dataclasses.fields(args):
    value = getattr(args, field.name)
    if value == field.default or field.name in UNSAID:
      continue
    value = value.resolve().name if isinstance(value, pathlib.Path) else value
    values = value if isinstance(value, tuple) else (value,)
    out += [f"--{field.name}", *(() if value is True else map(str, values))]
  return " ".join(out)


if __name__ == "__main__":
  main()
