"""The speed figures of the project, each beside a peer's from the same run.

  python scripts/benchmark.py aggregation --json=figures.json

Prints tables; --docs puts them into docs/benchmarks.md, where they are explained.  Standard error
says what is being measured.
"""

import dataclasses
import importlib
import json
import os
import pathlib
import platform
import sys
import time
from importlib import metadata
from typing import Annotated, Literal

import tyro

ROOT = pathlib.Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Args:
  name: Annotated[Literal["aggregation"], tyro.conf.arg(name="NAME"), tyro.conf.Positional]
  """Which figures: a file of scripts/benchmarks/."""
  json: pathlib.Path | None = None
  """A file for all figures."""
  docs: bool = False
  """Replace this benchmark's tables in --docs_file."""
  docs_file: pathlib.Path = ROOT / "docs/benchmarks.md"
  """Markdown with a line <!-- NAME: begin --> and a line <!-- NAME: end -->."""
  quick: bool = False
  """Small sizes, all in one process: to see that it works. Its figures say nothing."""
  skip: tuple[str, ...] = ()
  """Parts to leave out; of aggregation: rerank, which generates a file of 2 GB."""


def main() -> None:
  args = tyro.cli(
    Args,
    description=__doc__,
    use_underscores=True,
    config=(tyro.conf.FlagCreatePairsOff,),
  )
  try:
    benchmark(args)
  except (ValueError, OSError, RuntimeError) as error:
    raise SystemExit(f"benchmark.py: {error}") from error


def benchmark(args: Args) -> None:
  module = importlib.import_module(f"benchmarks.{args.name}")
  unknown = set(args.skip) - set(module.PARTS)
  if unknown:
    raise ValueError(f"--skip {' '.join(sorted(unknown))}: expected among {module.PARTS}")
  if args.docs:
    between_markers(args.docs_file, args.name)  # fails here rather than at the end
  figures = {"machine": machine(), "command": command(args), "quick": args.quick}
  start = time.perf_counter()
  figures |= module.run(args.quick, args.skip)
  figures["seconds"] = time.perf_counter() - start
  figures["machine"]["load_at_end"] = os.getloadavg()[0]
  text = f"{heading(figures)}\n\n{module.tables(figures)}"
  print(text)
  if args.json:
    args.json.write_text(json.dumps(figures, indent=1) + "\n")
  if args.docs:
    before, after = between_markers(args.docs_file, args.name)
    args.docs_file.write_text(f"{before}\n\n{text}\n\n{after}")


def between_markers(path: pathlib.Path, name: str) -> tuple[str, str]:
  """A file's text up to the first marker, and from the second one, both included."""
  text = path.read_text()
  begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
  if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
    raise ValueError(f"{path}: expected one line {begin} and, after it, one line {end}")
  return text[: text.index(begin) + len(begin)], text[text.index(end) :]


def command(args: Args) -> str:
  options = (["--quick"] if args.quick else []) + (["--skip", *args.skip] if args.skip else [])
  return " ".join(["python scripts/benchmark.py", args.name, *options])


def machine() -> dict:
  """What the figures depend on."""
  processor = platform.processor()
  cpus = pathlib.Path("/proc/cpuinfo")
  if cpus.exists():
    lines = dict(line.split(":", 1) for line in cpus.read_text().splitlines() if ":" in line)
    lines = {key.strip(): value.strip() for key, value in lines.items()}
    processor = lines.get("model name", processor)
    extensions = [x for x in ("avx2", "avx512f") if x in lines.get("flags", "").split()]
    processor += f" ({', '.join(extensions)})" if extensions else ""
  return {
    "processor": processor,
    "cores": os.cpu_count(),
    "system": platform.system(),
    "date": time.strftime("%Y-%m-%d"),
    "load_at_start": os.getloadavg()[0],
    "python": platform.python_version(),
    **{name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
  }


def heading(figures: dict) -> str:
  about = figures["machine"]
  quick = "\n\n**Small sizes (--quick): these figures say nothing.**" if figures["quick"] else ""
  return (
    f"`{figures['command']}`, {figures['seconds'] / 60:.0f} minutes, {about['date']}; "
    f"{about['processor']}, {about['cores']} cores, {about['system']}; "
    f"load average {about['load_at_start']:.1f} at the start and {about['load_at_end']:.1f} at "
    f"the end; Python {about['python']}, JAX {about['jax']} (jaxlib {about['jaxlib']}), "
    f"NumPy {about['numpy']}.{quick}"
  )


if __name__ == "__main__":
  sys.exit(main())
