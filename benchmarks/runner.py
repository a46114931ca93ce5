"""What the benchmarks share: processes of their own, results kept by content, and tables.

A benchmark is a module with a dataclass `Args`, which extends `Common`, and a function
`run(args)` that returns

  {"targets": [target(...), ...], "tables": {title: rows}, "notes": text, ...raw figures}

where each row of a table is a dict from column name to value.
"""

import dataclasses
import hashlib
import json
import math
import multiprocessing
import operator
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from concurrent import futures
from importlib import metadata
from typing import Any
from unittest import mock

from prm_jax.runtime import storage

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOISE = 1.1  # a ratio that two runs on one machine may differ by
SIGNS = {"<": operator.lt, "<=": operator.le, ">=": operator.ge, "=": operator.eq}


@dataclasses.dataclass(frozen=True)
class Common:
  json: pathlib.Path | None = None  # file for every figure
  docs: pathlib.Path | None = None  # page; replaced is <!-- NAME: begin --> to <!-- NAME: end -->
  against: pathlib.Path | None = None  # figures of an earlier run, to be compared
  quick: bool = False  # sizes so small that the figures mean nothing, to see that it works

  @property
  def section(self) -> str:
    """What follows the benchmark's name in the marks of the page, where it has several tables."""
    return ""


def apart(function: Callable, *args: Any, cores: list[int] | None = None, **environment: str):
  """`function(*args)` in a new process, so that time and memory are the function's alone.

  Args:
    cores: processor cores it may use, where the system can say so; None: all.
    **environment: environment variables to set.

  Raises:
    RuntimeError: the process died; its last messages are on standard error.
  """
  spawn = multiprocessing.get_context("spawn")
  pin = getattr(os, "sched_setaffinity", None) if cores else None
  with (
    mock.patch.dict(os.environ, environment),
    futures.ProcessPoolExecutor(1, spawn, pin, (0, cores) if pin else ()) as process,
  ):
    return process.submit(function, *args).result()


def peer(python: str, script: pathlib.Path, settings: dict) -> dict:
  """The figures of a peer, whose script runs in its own Python and knows nothing of prm_jax."""
  with tempfile.TemporaryDirectory() as directory:
    given, output = pathlib.Path(directory, "settings"), pathlib.Path(directory, "figures")
    given.write_text(json.dumps(settings | {"output": str(output)}))
    subprocess.run([python, "-P", str(script), str(given)], check=True)
    return json.loads(output.read_text())


def usable_cores() -> list[int]:
  every = range(os.cpu_count() or 1)
  return sorted(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else every)


def kept(
  work: pathlib.Path,
  name: str,
  settings: Any,
  files: list[pathlib.Path],
  measure: Callable[[], dict],
) -> dict:
  """The figures of `measure()`, measured once for the same settings and contents of files.

  Args:
    work: folder of the results; each is a file whose name ends in a hash of what it depends on.
    files: files and folders, of code and of data.

  Returns:
    The figures, with "date", "process_seconds" and "load_at_end", the load average.
  """
  digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
  for path in files:
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
      if file.is_file() and file.suffix != ".pyc":
        digest.update(file.read_bytes())
  path = work / f"{name}_{digest.hexdigest()[:12]}.json"
  if not path.exists():
    say(f"{name} -> {path}")
    start = time.perf_counter()
    figures = measure() | {"date": time.strftime("%Y-%m-%d"), "load_at_end": os.getloadavg()[0]}
    with storage.written(path) as file:
      file.write(json.dumps(figures | {"process_seconds": time.perf_counter() - start}))
  return json.loads(path.read_text())


def versions(*packages: str) -> dict[str, str]:
  """Installed versions of packages, and Python's."""
  return {name: metadata.version(name) for name in packages} | {"python": platform.python_version()}


def say(text: str) -> None:
  """Progress, on standard error."""
  print(text, file=sys.stderr, flush=True)


def target(what: str, sign: str, bound: float, measured: float, note: str = "") -> dict:
  """A target that the project sets itself, the figure held against it, and whether it is met."""
  met = bool(SIGNS[sign](measured, bound))
  asked = f"{sign} {bound:g}"
  return {"target": what, "asked": asked, "measured": measured, "met": met, "note": note}


def regressions(figures: dict, before: dict) -> list[dict]:
  """A row for each target of both runs: how the figure changed, and whether that is for the worse.

  A ratio within `NOISE` of 1 is called the same: it says nothing on a shared machine.
  """
  old = {each["target"]: each for each in before["targets"]}
  rows = []
  for now in figures["targets"]:
    if not (then := old.get(now["target"])):
      continue
    ratio = now["measured"] / then["measured"] if then["measured"] else math.nan
    gain = ratio if now["asked"].startswith(">") else 1 / ratio if ratio else math.inf
    verdict = "worse" if gain < 1 / NOISE else "better" if gain > NOISE else "same"
    row = {"target": now["target"], "before": then["measured"], "now": now["measured"]}
    rows.append(row | {"now / before": ratio, "": verdict})
  return rows


def document(figures: dict) -> str:
  """The heading, the targets, the tables and the notes of a benchmark, as Markdown."""
  about, runs = figures["machine"], figures.get("runs", [])
  seconds, days = figures["seconds"], {about["date"]}
  if runs:  # they may be of other days
    seconds = sum(run["process_seconds"] for run in runs)
    days = {run["date"] for run in runs}
  parts = [
    f"`{figures['command']}`, {seconds / 60:.0f} minutes, {' and '.join(sorted(days))}; "
    f"{about['processor']}, {about['cores']} cores, {about['system']}; load average "
    f"{about['load_at_start']:.1f} at the start; {listed(about['versions'])}."
  ]
  if figures["quick"]:
    parts.append("**Small sizes (--quick): these figures mean nothing.**")
  rows = [
    {name: each[name] for name in ("target", "asked", "measured")}
    | {"met": ("yes" if each["met"] else "**no**") + each["note"]}
    for each in figures["targets"]
  ]
  parts += [table(rows)] if rows else []
  for title, rows in figures["tables"].items():
    parts += [f"### {title}", table(rows)]
  parts += [figures["notes"]] if "notes" in figures else []
  wrap = lambda text: textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)
  return "\n\n".join(part if part.startswith("|") else wrap(part) for part in parts)


def listed(versions: dict[str, str]) -> str:
  return ", ".join(f"{name} {version}" for name, version in versions.items())


def table(rows: list[dict]) -> str:
  """Rows as a Markdown table, a column for each key."""
  head = list(dict.fromkeys(name for row in rows for name in row))
  lines = [head, ["---"] * len(head)]
  lines += [[cell(row.get(name)) for name in head] for row in rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
  """Floats with three digits, None as nothing, all else as it is."""
  if isinstance(value, int) and not isinstance(value, bool):
    return f"{value:,}"
  if isinstance(value, float):
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
  return "" if value is None else str(value)


def machine() -> dict:
  """The machine and the packages that the figures depend on."""
  cpus = pathlib.Path("/proc/cpuinfo")
  model = re.search(r"model name\s*: (.*)", cpus.read_text() if cpus.exists() else "")
  return {
    "processor": model[1] if model else platform.processor(),
    "cores": os.cpu_count(),
    "system": platform.system(),
    "date": time.strftime("%Y-%m-%d"),
    "load_at_start": os.getloadavg()[0],
    "versions": versions("jax", "jaxlib", "numpy"),
  }
