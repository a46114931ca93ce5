"""Measures every speed figure of the project, where possible beside a peer in the same run.

  python scripts/benchmark.py NAME --json=figures.json
  python scripts/benchmark.py NAME --help             its measurements and options

  aggregation  best-of-N and the exact vote, beside a Python loop and numpy             3 minutes
  reranking    scripts/rerank.py on 930,000 lines: under 60 s                           5 minutes
  tree         training and scoring with prefix trees, beside flattened ones           12 minutes
  training     fine-tuning on the CPU, beside TRL's PRMTrainer                   12 to 45 minutes
  kernel       memory of the TPU attention kernel, beside splash attention              7 minutes
  scaling      simulated devices and hosts; train steps compiled for TPU slices        31 minutes
  generation   sampling from a language model, beside transformers' generate           47 minutes
  search       PRM-guided search over all problems at once, with caches                 8 minutes
  serving      scores over HTTP, beside score.py                                        2 minutes
  dtypes       float32 beside bfloat16 on the CPU, with a profile of a layer            5 minutes
  loading      time and memory of loading public weights                                1 minute
  quickstart   scripts/quickstart.sh: seconds, memory and accuracy                      5 minutes
  all          every figure of the docs, on your machine                                4 hours

Prints tables; --docs=PAGE writes them into a page too.  --against=OLD.json compares the figures
with those of an earlier --json.  docs/benchmarks.md explains the figures.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import dataclasses
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO

import tyro

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import runner
from prm_jax.runtime import json_lines, storage

PAGE = runner.ROOT / "docs/benchmark_tables.md"
# The sections of the page, and the flags that measure them.
EVERY = {
  "quickstart": (),
  "aggregation": (),
  "reranking": (),
  "tree": (),
  "training": (),
  "training_phase1": ("--rows_of=phase1", "--devices=1"),
  "dtypes": (),
  "loading": (),
  "generation_smollm2-135m": ("--model=models/smollm2-135m",),
  "generation_qwen2.5-coder-0.5b": ("--model=models/qwen2.5-coder-0.5b",),
  "search": (),
  "serving": (),
  "kernel": (),
  "scaling": (),
}
NAMES = list(dict.fromkeys(section.split("_")[0] for section in EVERY))


@dataclasses.dataclass(frozen=True)
class Every:
  """Runs every benchmark and writes a page like docs/benchmark_tables.md with the figures."""

  output_dir: pathlib.Path = pathlib.Path("runs/benchmarks")
  source: pathlib.Path | None = None  # folder of PRM800K's files, for training rows and problems
  only: tuple[str, ...] = ()  # sections of the page to measure; by default all
  against: pathlib.Path | None = None  # output_dir of an earlier run, to compare with
  quick: bool = False  # a test run, on sizes so small that the figures mean nothing


def main() -> None:
  name, arguments = (*sys.argv[1:2], "--help")[0], sys.argv[2:]
  if name not in (*NAMES, "all"):
    print(__doc__)
    raise SystemExit(0 if name in ("-h", "--help") else f"benchmark.py: there is no {name}")
  module = importlib.import_module(f"benchmarks.{name}") if name != "all" else None
  args = tyro.cli(
    getattr(module, "Args", runner.Common) if module else Every,
    prog=f"benchmark.py {name}",
    args=arguments,
    description=(module or Every).__doc__,
    use_underscores=True,
    config=(tyro.conf.FlagCreatePairsOff,),
  )
  if not module:
    return every(args)
  with storage.written_together() as output:
    run(name, module, args, output)


def every(args: Every) -> None:
  """Runs the benchmarks one after another; skips those that have figures of these or full sizes."""
  if unknown := {*args.only} - EVERY.keys():
    raise ValueError(f"--only {min(unknown)}: the sections are {', '.join(EVERY)}")
  args.output_dir.mkdir(parents=True, exist_ok=True)
  page, failed = args.output_dir / "benchmarks.md", []
  if not page.exists():
    text = re.sub(r"<!-- authors -->.*?<!-- end -->\n*", "", PAGE.read_text(), flags=re.DOTALL)
    text = re.sub(r"(: begin -->).*?(<!-- )", r"\1\n\nNot run.\n\n\2", text, flags=re.DOTALL)
    with storage.written(page) as file:
      file.write(text)
  for section in args.only or EVERY:
    name, file = section.split("_")[0], args.output_dir / f"{section}.json"
    command = [name, *EVERY[section], f"--json={file}", f"--docs={page}"]
    if args.source and name in ("tree", "training", "generation"):
      command.append(f"--source={args.source}")
    command += [f"--against={args.against / file.name}"] if args.against else []
    quick = args.quick and name != "quickstart"  # it has one size
    command += ["--quick"] if quick else []
    figures = json_lines.document_or_empty(file)
    if figures.get("quick") in (False, quick):
      old = args.against and args.against / file.name
      before = runner.earlier(old) if old and old.is_file() else None
      text = with_section(page, section, text_of(figures, before))
      with storage.written(page) as out:
        out.write(text)
      continue
    runner.say(f"benchmark.py {' '.join(command)}")
    if subprocess.run([sys.executable, __file__, *command]).returncode:
      failed.append(section)
  print(f"-> {page}")
  if failed:
    raise RuntimeError(f"not measured, for the reasons above: {', '.join(failed)}")


def run(name: str, module, args: runner.Common, output: Callable[..., IO]) -> None:
  """Measures, prints the tables, and writes the files of --json and --docs."""
  before = runner.earlier(args.against) if args.against else None
  file = output(args.json) if args.json else None  # a bad path fails before the measurement
  section = name + args.section
  if args.docs:
    with_section(args.docs, section, "")
  arguments = re.sub(r"[^\s=]*/", "", " ".join(sys.argv[1:]))  # files without their folders
  figures = {"machine": runner.machine(), "quick": args.quick}
  figures["command"] = f"python scripts/benchmark.py {arguments}"
  start = time.perf_counter()
  figures |= module.run(args)
  figures["seconds"] = time.perf_counter() - start
  figures["machine"]["load_at_end"] = os.getloadavg()[0]
  text = text_of(figures, before)
  print(text)
  if args.json:
    file.write(json.dumps(figures, indent=1) + "\n")
  if args.docs:
    output(args.docs).write(with_section(args.docs, section, text))


def text_of(figures: dict, before: dict | None) -> str:
  """Returns the figures as Markdown, compared with those of an earlier run if given."""
  tables = figures["tables"]
  if before:
    about = before["machine"]
    title = f"Against {about['date']}, {about['processor']}; {runner.listed(about['versions'])}"
    tables = tables | {title: runner.regressions(figures, before)}
  return runner.document(figures | {"tables": tables})


def with_section(page: pathlib.Path, section: str, text: str) -> str:
  """Returns a page with the text in a section; ValueError if the page has no such section."""
  lines = re.compile(rf"(<!-- {section}: begin -->).*(<!-- {section}: end -->)", re.DOTALL)
  if not lines.search(whole := page.read_text()):
    raise ValueError(f"{page}: no line <!-- {section}: begin --> with its end")
  return lines.sub(lambda match: f"{match[1]}\n\n{text}\n\n{match[2]}", whole)


if __name__ == "__main__":
  exits.run(main)
