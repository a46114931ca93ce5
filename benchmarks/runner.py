"""Helpers of all benchmarks: separate processes, figures stored by content, and tables.

A benchmark is a module with a dataclass `Args`, which extends `Common`, and a function
`run(args)`, which returns

  {"targets": [target(...), ...], "tables": {title: rows}, "notes": text, ...raw figures}

where each row of a table is a dict from column name to value.
"""

import collections
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
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from importlib import metadata
from typing import Any
from unittest import mock

import msgspec

from prm_jax.runtime import json_lines, processes, storage

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOISE = 1.1  # ratio by which two runs on one machine may differ
SIGNS = {"<": operator.lt, "<=": operator.le, ">=": operator.ge, "=": operator.eq}


@dataclasses.dataclass(frozen=True)
class Common:
  json: pathlib.Path | None = None  # file for every figure
  docs: pathlib.Path | None = None  # page, written from <!-- NAME: begin --> to <!-- NAME: end -->
  against: pathlib.Path | None = None  # figures of an earlier run, to compare with
  quick: bool = False  # a test run, on sizes so small that the figures mean nothing

  @property
  def section(self) -> str:
    """The suffix of the benchmark's name in the page's marks, if it has several sections."""
    return ""


def apart(function: Callable, *args: Any, cores: list[int] | None = None, **environment: str):
  """Returns `function(*args)`, called in a new process so that time and memory are its alone.

  Args:
    cores: processor cores to use, where the system can restrict them; None: all.
    **environment: environment variables to set.

  Raises:
    RuntimeError: the process died; its last messages are on standard error.
  """
  spawn = multiprocessing.get_context("spawn")
  with (
    mock.patch.dict(os.environ, environment),
    futures.ProcessPoolExecutor(1, spawn, _begin, (cores,)) as process,
  ):
    return process.submit(function, *args).result()


def _begin(cores: list[int] | None) -> None:
  """Restricts a new process to these cores, if the system can; on Linux it ends with its parent."""
  processes.end_with_parent()
  if cores and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, cores)


def peer(python: str, script: pathlib.Path, settings: dict) -> dict:
  """Runs a peer's script in its own Python, without prm_jax, and returns its figures."""
  with tempfile.TemporaryDirectory() as directory:
    path, output = pathlib.Path(directory, "settings"), pathlib.Path(directory, "figures")
    path.write_text(json.dumps(settings | {"output": str(output)}))
    subprocess.run([python, "-P", str(script), str(path)], check=True)
    return json.loads(output.read_text())


def peak_gb(processes: int = resource.RUSAGE_SELF) -> float:
  """Returns the peak memory of this process, or of its largest child, in GB."""
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(processes).ru_maxrss * unit / 1e9


def kept(
  work: pathlib.Path,
  name: str,
  settings: Any,
  files: list[pathlib.Path],
  measure: Callable[[], dict],
) -> dict:
  """Returns the figures of `measure()`, called once for equal settings and contents of files.

  Args:
    work: folder in which figures are stored, in files named by a hash of settings and contents.
    files: files and folders of code and data on which the figures depend.

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


def by_turns(
  forms: dict[str, Callable[[], Any]], repeats: int, untimed: int = 1
) -> dict[str, list[float]]:
  """Returns the seconds of `repeats` calls of each form, after `untimed` calls, which compile.

  The forms take turns in alternating order, so that a machine that slows down slows all of them.
  """
  import jax  # not at the top: other benchmarks measure memory, which it takes

  seconds = {name: [] for name in forms}
  for turn in range(untimed + repeats):
    for name in list(forms)[:: -1 if turn % 2 else 1]:
      start = time.perf_counter()
      jax.block_until_ready(forms[name]())
      seconds[name].append(time.perf_counter() - start)
  return {name: times[untimed:] for name, times in seconds.items()}


def grouped(pairs: Iterable[tuple[str, Any]]) -> list[list]:
  """Groups the values of (key, value) pairs by key."""
  groups = collections.defaultdict(list)
  for key, value in pairs:
    groups[key].append(value)
  return list(groups.values())


def say(text: str) -> None:
  """Prints progress to standard error."""
  print(text, file=sys.stderr, flush=True)


def target(name: str, sign: str, bound: float, measured: float, note: str = "") -> dict:
  """Returns a target, the measured figure, and whether the figure meets the target."""
  met = bool(SIGNS[sign](measured, bound))
  asked = f"{sign} {bound:g}"
  return {"target": name, "asked": asked, "measured": measured, "met": met, "note": note}


class Machine(msgspec.Struct):
  processor: str
  date: str
  versions: dict[str, str]


class Target(msgspec.Struct):
  target: str
  measured: float


class Earlier(msgspec.Struct):
  """The keys of an earlier run's figures that a comparison reads."""

  machine: Machine
  targets: list[Target]


def earlier(path: pathlib.Path) -> dict[str, Any]:
  """Returns the figures of an earlier run; raises BadLine if the file has none."""
  figures = json_lines.document(path)
  json_lines.convert(figures, Earlier, str(path))
  return figures


def regressions(figures: dict, before: dict) -> list[dict]:
  """Returns a table row for each target of both runs: both figures, and better, worse or same.

  A gain within a factor `NOISE` of 1 counts as the same, as it means nothing on a shared machine.
  """
  earlier = {old["target"]: old["measured"] for old in before["targets"]}
  rows = []
  for new in figures["targets"]:
    name, now = new["target"], new["measured"]
    if name not in earlier:
      continue
    ratio = now / earlier[name] if earlier[name] else None
    gain = _gain(new["asked"], earlier[name], now)
    if "within noise" in new.get("note", ""):  # the difference is not significant
      gain = 1
    verdict = "worse" if gain < 1 / NOISE else "better" if gain > NOISE else "same"
    row = {"target": name, "before": earlier[name], "now": now}
    rows.append(row | {"now / before": ratio, "": verdict})
  return rows


def _gain(asked: str, before: float, now: float) -> float:
  """Returns how many times as good a figure is now; inf or 0 where a ratio tells nothing.

  Args:
    asked: sign and bound of the target; with "=", nearer to the bound is better.
  """
  sign, bound = asked.split()
  if sign == "=":
    before, now = -abs(before - float(bound)), -abs(now - float(bound))
  elif sign.startswith("<"):
    before, now = -before, -now
  # From here on, higher is better.
  if before * now <= 0:
    return 1 if before == now else math.inf if now > before else 0
  return now / before if now > 0 else before / now


def document(figures: dict) -> str:
  """Returns the heading, the targets, the tables and the notes of a benchmark, as Markdown."""
  about, seconds = figures["machine"], figures["seconds"]
  days = {about["date"]}
  if runs := figures.get("runs", []):  # stored, perhaps on other days
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
  return "\n\n".join(part if part.startswith(("|", "#")) else wrap(part) for part in parts)


def listed(versions: dict[str, str]) -> str:
  return ", ".join(f"{name} {version}" for name, version in versions.items())


def table(rows: list[dict]) -> str:
  """Returns rows as a Markdown table with a column for each key."""
  head = list(dict.fromkeys(name for row in rows for name in row))
  lines = [head, ["---"] * len(head)]
  lines += [[cell(row.get(name)) for name in head] for row in rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
  """Returns a value as text: floats with three digits, None as nothing."""
  if isinstance(value, int) and not isinstance(value, bool):
    return f"{value:,}"
  if isinstance(value, float):
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
  return "" if value is None else str(value)


def machine() -> dict:
  """Returns the machine and the package versions on which the figures depend."""
  cpus = pathlib.Path("/proc/cpuinfo")
  versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
  model = re.search(r"model name\s*: (.*)", cpus.read_text() if cpus.exists() else "")
  return {
    "processor": model[1] if model else platform.processor(),
    "cores": os.cpu_count(),
    "system": platform.system(),
    "date": time.strftime("%Y-%m-%d"),
    "load_at_start": os.getloadavg()[0],
    "versions": versions | {"python": platform.python_version()},
  }
