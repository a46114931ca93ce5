"""Measures the quick start: seconds of each stage, memory of its largest process, and accuracy.

--history keeps a line for each run, to compare versions of the project.
"""

import collections
import csv
import dataclasses
import itertools
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time

import prm_jax
from benchmarks import runner
from prm_jax.runtime import storage


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  seed: int = 0
  history: pathlib.Path | None = None  # CSV file to which a line is added


def run(args: Args) -> dict:
  if args.quick:
    raise ValueError("the quick start has no quick form: omit --quick")
  with tempfile.TemporaryDirectory() as directory:
    stages = measure(args.seed, pathlib.Path(directory))
    report = json.loads(pathlib.Path(directory, "report/report.json").read_text())
  seconds = stages[-1]["at s"]
  peak = runner.peak_gb(resource.RUSAGE_CHILDREN)
  last = {name: 100 * report["curves"][name]["accuracy"][-1] for name in ("prm_product", "orm")}
  about = runner.machine()
  commit = ["git", "describe", "--always", "--dirty"]
  commit = subprocess.run(commit, capture_output=True, text=True, cwd=runner.ROOT).stdout.strip()
  line = {
    "version": prm_jax.__version__,
    "commit": commit,
    "date": about["date"],
    "processor": f"{about['processor']}, {about['cores']} cores",
    "python": about["versions"]["python"],
    "jax": about["versions"]["jax"],
    "seconds": round(seconds, 2),
    "peak GB": round(peak, 2),
    "PRM at N = 1024, %": round(last["prm_product"], 2),
    "ORM at N = 1024, %": round(last["orm"], 2),
  }
  return {
    "targets": [
      runner.target("quick start, s", "<", 600, seconds),
      runner.target("memory of its largest process, GB", "<", 2, peak),
    ],
    "tables": {
      "Stages": [
        {"stage": a["stage"], "s": b["at s"] - a["at s"]} for a, b in itertools.pairwise(stages)
      ],
      "Versions": recorded(args.history, line),
    },
  }


def measure(seed: int, directory: pathlib.Path) -> list[dict]:
  """Returns the stages that quickstart.sh announces, with the seconds at which each begins."""
  command = ["bash", runner.ROOT / "scripts/quickstart.sh", str(seed), directory]
  environment = os.environ | {"python": sys.executable}
  start, stages, last = time.perf_counter(), [], collections.deque(maxlen=20)
  pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
  with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
    for text in process.stderr:
      last.append(text)
      if stage := re.match(r"\[ *\d+ s\] (.*)", text):
        stages.append({"stage": stage[1], "at s": time.perf_counter() - start})
        runner.say(text.rstrip())
  if process.returncode:
    raise RuntimeError(f"quickstart.sh ended with {process.returncode}:\n{''.join(last)}")
  return stages


def recorded(history: pathlib.Path | None, line: dict) -> list[dict]:
  """Adds a line to the history, and returns all lines."""
  lines = []
  if history and history.exists():
    with history.open(newline="") as file:
      lines = list(csv.DictReader(file))
  lines.append(line)
  if history:
    with storage.written(history) as file:
      writer = csv.DictWriter(file, dict.fromkeys(name for each in lines for name in each))
      writer.writeheader()
      writer.writerows(lines)
  return lines
