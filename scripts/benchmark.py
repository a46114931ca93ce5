"""Every speed figure of the project, beside a peer's from the same run.

  python scripts/benchmark.py NAME --json=figures.json
  python scripts/benchmark.py NAME --help             what it measures, and its options

  aggregation  best-of-N and the exact vote, beside a Python loop and numpy             3 minutes
  reranking    scripts/rerank.py on 930,000 lines: under 60 s                           5 minutes
  tree         training and scoring with prefix trees, beside the same flattened       12 minutes
  training     fine-tuning on the CPU, beside TRL's PRMTrainer                         25 minutes
  kernel       memory of the TPU attention kernel, beside splash attention             20 minutes
  scaling      simulated devices and hosts; train steps compiled for TPU slices        50 minutes
  generation   sampling from a language model, beside transformers' generate           30 minutes
  search       PRM-guided search over all problems at once, with caches                 8 minutes
  serving      scores over HTTP, beside score.py                                        2 minutes
  loading      time and memory of loading public weights                                1 minute

Prints tables; --docs=PAGE puts them into a page too.  docs/benchmarks.md explains them.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before what takes time to import

import importlib
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable
from typing import IO

import tyro

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import runner
from prm_jax.runtime import storage

NAMES = ("aggregation", "reranking", "tree", "training", "kernel", "scaling", "generation")
NAMES += ("search", "serving", "loading")


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
  with storage.written_together() as output:
    run(name, module, args, output)


def run(name: str, module, args: runner.Common, output: Callable[..., IO]) -> None:
  """Measures, prints the tables, and writes what --json and --docs ask for."""
  file = output(args.json) if args.json else None  # fails here rather than at the end
  section = name + args.section
  lines = re.compile(rf"(<!-- {section}: begin -->).*(<!-- {section}: end -->)", re.DOTALL)
  if args.docs and not lines.search(args.docs.read_text()):
    raise ValueError(f"{args.docs}: no line <!-- {section}: begin --> with its end")
  given = re.sub(r"[^\s=]*/", "", " ".join(sys.argv[1:]))  # files without their folders
  figures = {"machine": runner.machine(), "quick": args.quick}
  figures["command"] = f"python scripts/benchmark.py {given}"
  start = time.perf_counter()
  figures |= module.run(args)
  figures["seconds"] = time.perf_counter() - start
  figures["machine"]["load_at_end"] = os.getloadavg()[0]
  text = runner.document(figures)
  print(text)
  if args.json:
    file.write(json.dumps(figures, indent=1) + "\n")
  if args.docs:
    page = lines.sub(lambda match: f"{match[1]}\n\n{text}\n\n{match[2]}", args.docs.read_text())
    output(args.docs).write(page)


if __name__ == "__main__":
  exits.run(main)
