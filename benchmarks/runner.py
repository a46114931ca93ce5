"""What the benchmarks share: processes of their own, results kept by content, and tables.

A benchmark is a module with a dataclass `Args`, which extends `Common`, and a function
`run(args)` that returns

  {"targets": [target(...), ...], "tables": {title: rows}, "notes": text, ...raw figures}

where each row of a table is a dict from column name to value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import operator
import os
import pathlib
import platform
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from importlib import metadata
from typing import Any

from prm_jax.runtime import json_lines

ROOT = pathlib.Path(__file__).resolve().parents[1]
SIGNS = {"<": operator.lt, "<=": operator.le, ">=": operator.ge, "=": operator.eq}


@dataclasses.dataclass(frozen=True)
class Common:
  json: pathlib.Path | None = None
  """File for every figure."""
  docs: bool = False
  """Replace this benchmark's tables in --docs_file."""
  docs_file: pathlib.Path = ROOT / "docs/benchmark_tables.md"
  """Markdown with a line <!-- NAME: begin --> and a line <!-- NAME: end -->."""
  quick: bool = False
  """Sizes so small that the figures mean nothing, to see that the benchmark works."""


def apart(
  function: Callable, *args: Any, cores: list[int] | None = None, **environment: str | None
):
  """`function(*args)` in a new process, so that time and memory are the function's alone.

  Args:
    cores: processor cores it may use; None: all.
    **environment: environment variables to set, or with None to remove.

  Raises:
    RuntimeError: the process died; its last messages are on standard error.
  """
  spawn = multiprocessing.get_context("spawn")
  with _environment(environment), _pinned(cores), futures.ProcessPoolExecutor(1, spawn) as process:
    return process.submit(function, *args).result()


@contextlib.contextmanager
def _environment(changes: dict[str, str | None]) -> Iterator[None]:
  before = dict(os.environ)
  for name, value in changes.items():
    os.environ.pop(name, None)
    if value is not None:
      os.environ[name] = value
  try:
    yield
  finally:
    os.environ.clear()
    os.environ.update(before)


@contextlib.contextmanager
def _pinned(cores: list[int] | None) -> Iterator[None]:
  """This thread, and so the processes it starts, on some cores only, where the system can."""
  if cores is None or not hasattr(os, "sched_setaffinity"):
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
    settings: whatever else the figures depend on, as JSON.
    files: files and folders, of code and of data.

  Returns:
    The figures, with "date", "process_seconds" and "load_at_end", the load average.
  """
  digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
  for path in files:
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
      if file.is_file() and file.suffix != ".pyc":
        with file.open("rb") as content:
          digest.update(hashlib.file_digest(content, "sha256").digest())
  path = work / f"{name}_{digest.hexdigest()[:12]}.json"
  if path.exists():
    say(f"{name}: measured before, {path}")
    return json.loads(path.read_text())
  say(f"{name}, load average {os.getloadavg()[0]:.1f}:", end=" ")
  start = time.perf_counter()
  figures = measure()
  figures |= {"date": time.strftime("%Y-%m-%d"), "process_seconds": time.perf_counter() - start}
  figures |= {"load_at_end": os.getloadavg()[0]}
  with json_lines.written(path) as file:
    file.write(json.dumps(figures) + "\n")
  say(f"{figures['process_seconds']:.0f} s -> {path}")
  return json.loads(path.read_text())


def versions(*packages: str) -> dict[str, str]:
  """Installed versions of packages, and Python's."""
  return {name: metadata.version(name) for name in packages} | {"python": platform.python_version()}


def say(text: str, end: str = "\n") -> None:
  """Progress, on standard error."""
  print(text, end=end, file=sys.stderr, flush=True)


def target(what: str, sign: str, bound: float, measured: float, note: str = "") -> dict:
  """A target that the project sets itself, the figure held against it, and whether it is met."""
  met = bool(SIGNS[sign](measured, bound))
  return {"what": what, "target": f"{sign} {bound:g}", "measured": measured, "met": met} | (
    {"note": note} if note else {}
  )


def document(figures: dict) -> str:
  """The heading, the targets, the tables and the notes of a benchmark, as Markdown."""
  wrap = functools.partial(textwrap.fill, width=100, break_long_words=False, break_on_hyphens=False)
  parts = [wrap(_heading(figures))]
  if figures["quick"]:
    parts.append("**Small sizes (--quick): these figures mean nothing.**")
  verdict = {True: "yes", False: "**no**"}
  if figures["targets"]:
    rows = []
    for each in figures["targets"]:
      met = "" if figures["quick"] else verdict[each["met"]] + each.get("note", "")
      rows.append({"target": each["what"], "asked": each["target"], "measured": each["measured"]})
      rows[-1]["met"] = met
    parts.append(table(rows))
  for title, rows in figures["tables"].items():
    parts += [f"### {title}", table(rows)]
  return "\n\n".join([*parts, *([wrap(figures["notes"])] if "notes" in figures else [])])


def table(rows: list[dict]) -> str:
  """Rows as a Markdown table, a column for each key."""
  head = list(dict.fromkeys(name for row in rows for name in row))
  lines = [head, ["---"] * len(head)]
  lines += [[number(row.get(name, "")) for name in head] for row in rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: Any) -> str:
  """A cell: floats with three digits, None as nothing, all else as it is."""
  if value is None:
    return ""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return str(value)
  if isinstance(value, int) or abs(value) >= 100:
    return f"{value:,.0f}"
  return f"{value:.1e}" if value and abs(value) < 1e-3 else f"{value:.3g}"


def _heading(figures: dict) -> str:
  """Command, minutes, dates and machine; of runs that are kept in files, their own."""
  about, runs = figures["machine"], figures.get("runs", [])
  seconds, days = figures["seconds"], [about["date"]]
  load = f"load average {about['load_at_start']:.1f} at the start; "
  if runs:
    seconds = sum(run["process_seconds"] for run in runs)
    days, load = sorted({run["date"] for run in runs}), ""
  installed = ", ".join(" ".join(each) for each in about["versions"].items())
  return (
    f"`{figures['command']}`, {seconds / 60:.0f} minutes, {' and '.join(days)}; "
    f"{about['processor']}, {about['cores']} cores, {about['system']}; {load}{installed}."
  )


def machine() -> dict:
  """The machine and the packages that the figures depend on."""
  processor, cpus = platform.processor(), pathlib.Path("/proc/cpuinfo")
  if cpus.exists():
    lines = [line.split(":", 1) for line in cpus.read_text().splitlines() if ":" in line]
    about = {key.strip(): value.strip() for key, value in lines}
    extensions = [x for x in ("avx2", "avx512f") if x in about.get("flags", "").split()]
    processor = " ".join([about.get("model name", processor), *extensions])
  return {
    "processor": processor,
    "cores": os.cpu_count(),
    "system": platform.system(),
    "date": time.strftime("%Y-%m-%d"),
    "load_at_start": os.getloadavg()[0],
    "versions": versions("jax", "jaxlib", "numpy"),
  }


def between_markers(path: pathlib.Path, name: str) -> tuple[str, str]:
  """A page's text up to the marker `begin` of a section, and from its marker `end`."""
  text = path.read_text()
  begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
  if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
    raise ValueError(f"{path}: expected one line {begin} and, after it, one line {end}")
  return text[: text.index(begin) + len(begin)], text[text.index(end) :]
