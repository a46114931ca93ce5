"""The speed figures of the project, each beside a peer's from the same run.

  python scripts/benchmark.py aggregation --json=figures.json
  python scripts/benchmark.py training --peer=trl --source=DIR --model=FILE
  python scripts/benchmark.py tree --source=DIR --model=FILE
  python scripts/benchmark.py kernel
  python scripts/benchmark.py scaling

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
UNSAID = ("json", "docs", "docs_file", "peer_python", "work")


@dataclasses.dataclass(frozen=True)
class Common:
  """Options of every benchmark."""

  json: pathlib.Path | None = None
  """A file for all figures."""
  docs: bool = False
  """Replace this benchmark's tables in --docs_file."""
  docs_file: pathlib.Path = ROOT / "docs/benchmarks.md"
  """Markdown with a line <!-- NAME: begin --> and a line <!-- NAME: end -->."""
  quick: bool = False
  """Small sizes: to see that it works. Its figures say nothing."""

  @property
  def section(self) -> str:
    """The name in the markers of the documentation."""
    return type(self).__name__.lower()


@dataclasses.dataclass(frozen=True)
class Aggregation(Common):
  """The aggregator beside plain Python and numpy."""

  skip: tuple[str, ...] = ()
  """Parts to leave out: rerank, which generates a file of 2 GB."""

  def run(self, module) -> dict:
    unknown = set(self.skip) - set(module.PARTS)
    if unknown:
      raise ValueError(f"--skip {' '.join(sorted(unknown))}: expected among {module.PARTS}")
    return module.run(self.quick, self.skip)


@dataclasses.dataclass(frozen=True)
class Training(Common):
  """Fine-tuning a PRM on the CPU beside TRL's PRMTrainer: same weights, rows, optimiser, cores."""

  peer: Literal["trl", "none"] = "trl"
  """The peer, in a virtual environment of its own (.venv-trl, some GB); none: this project only."""
  rows_of: Literal["phase2", "phase1"] = "phase2"
  """The phase of PRM800K; phase 1, of many alternatives, is small: nothing is held out to test."""
  layouts: tuple[Literal["packed", "trees"], ...] = ("packed", "trees")
  """Of this project: the peer's rows each by itself, or those of a problem as one tree."""
  row_length: int | None = None
  """Tokens of this project's packed rows; by default those of the longest row that is allowed."""
  source: pathlib.Path = ROOT / "data/prm800k_upstream"
  """Directory of PRM800K's files, of the phase."""
  model: pathlib.Path = ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
  """What both start from (scripts/fetch_smollm2.py)."""
  config: pathlib.Path = ROOT / "configs/prm800k_smollm2_135m.py"
  """This project's settings that the comparison does not fix: rows per update, layers unrolled."""
  rows: int = 240
  """Training rows: paths from a problem to a leaf of its labelled steps, of problems at random."""
  test_rows: int = 60
  """Test rows, of which the steps' AUROC is computed."""
  seeds: tuple[int, ...] = (0, 1, 2)
  """Of this project's runs: order of the rows and first head."""
  peer_seeds: tuple[int, ...] = (0,)
  """Of the peer's runs: order of the rows and first head."""
  threads: int = 2
  """Cores of either side."""
  devices: int = 1
  """CPU devices that this project's rows of an update are split over, at least one row for each."""
  peer_python: str = ""
  """The Python of an environment that has the peer already."""
  work: pathlib.Path = ROOT / "runs/benchmark_training"
  """Figures of finished runs; what is there is not measured again."""

  @property
  def section(self) -> str:
    return "training" if self.rows_of == "phase2" else f"training_{self.rows_of}"

  def run(self, module) -> dict:
    if min(self.rows, self.test_rows, self.threads, self.devices) < 1:
      raise ValueError("--rows, --test_rows, --threads and --devices: at least 1")
    for name in ("layouts", "seeds", "peer_seeds"):
      given = getattr(self, name)
      if not given or len(set(given)) < len(given):
        raise ValueError(f"--{name}: at least one, each once")
    return module.run(self)


@dataclasses.dataclass(frozen=True)
class Tree(Common):
  """Prefix trees beside flattened sequences in this code, on the CPU: training and scoring."""

  source: pathlib.Path = ROOT / "data/prm800k_upstream"
  """Directory of phase1_train.jsonl, phase1_test.jsonl and phase2_train.jsonl of PRM800K."""
  model: pathlib.Path = ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
  """Whose shape and tokenizer are used (scripts/fetch_smollm2.py); its weights are not."""
  config: pathlib.Path = ROOT / "configs/prm800k_smollm2_135m.py"
  """This project's settings."""
  layers: int = 2
  """Of the model's layers, how many."""
  rows: int = 240
  """Paths from a problem to a last step, of whole problems at random, of each phase."""

  def run(self, module) -> dict:
    if min(self.layers, self.rows) < 1:
      raise ValueError("--layers and --rows: at least 1")
    return module.run(self)


@dataclasses.dataclass(frozen=True)
class Loading(Common):
  """Time and memory of loading public weights (Linux)."""

  model: pathlib.Path = ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
  """A model's directory or GGUF file (scripts/fetch_smollm2.py)."""
  layers: int = 4
  """Of the directory with a 7B model's widths, which is written for this: 2.0 GB + 0.47 each."""

  def run(self, module) -> dict:
    if self.layers < 1:
      raise ValueError(f"--layers {self.layers}: at least 1")
    return module.run(self)


@dataclasses.dataclass(frozen=True)
class OfParts(Common):
  skip: tuple[str, ...] = ()
  """Parts to leave out."""

  def run(self, module) -> dict:
    unknown = set(self.skip) - set(module.PARTS)
    if unknown or len(set(self.skip)) == len(module.PARTS):
      raise ValueError(f"--skip {' '.join(self.skip)}: expected one of {module.PARTS}")
    return module.run(self)


@dataclasses.dataclass(frozen=True)
class Kernel(OfParts):
  """Memory of the TPU attention kernel beside splash attention's, by the TPU compiler; no TPU.

  Parts: alone; step, of which each compilation takes minutes.
  """

  work: pathlib.Path = ROOT / "runs/benchmark_kernel"
  """Figures of finished compilations; what is there is not compiled again."""


@dataclasses.dataclass(frozen=True)
class Scaling(OfParts):
  """The same run on more simulated devices and hosts, and train steps compiled for TPU slices.

  Parts: simulated; compiled, up to 1,024 chips: memory, exchanges, estimated time.
  """

  work: pathlib.Path = ROOT / "runs/benchmark_scaling"
  """What was compiled; it is not compiled again. Each compilation takes some minutes."""


Args = (
  Annotated[Aggregation, tyro.conf.subcommand("aggregation")]
  | Annotated[Training, tyro.conf.subcommand("training")]
  | Annotated[Tree, tyro.conf.subcommand("tree")]
  | Annotated[Loading, tyro.conf.subcommand("loading")]
  | Annotated[Kernel, tyro.conf.subcommand("kernel")]
  | Annotated[Scaling, tyro.conf.subcommand("scaling")]
)


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


def benchmark(args: Common) -> None:
  name = type(args).__name__.lower()
  module = importlib.import_module(f"benchmarks.{name}")
  if args.docs:
    between_markers(args.docs_file, args.section)  # fails here rather than at the end
  figures = {"machine": machine(), "command": command(args), "quick": args.quick}
  start = time.perf_counter()
  figures |= args.run(module)
  figures["seconds"] = time.perf_counter() - start
  figures["machine"]["load_at_end"] = os.getloadavg()[0]
  text = f"{heading(figures)}\n\n{module.tables(figures)}"
  print(text)
  if args.json:
    args.json.write_text(json.dumps(figures, indent=1) + "\n")
  if args.docs:
    before, after = between_markers(args.docs_file, args.section)
    args.docs_file.write_text(f"{before}\n\n{text}\n\n{after}")


def between_markers(path: pathlib.Path, name: str) -> tuple[str, str]:
  """A file's text up to the first marker, and from the second one, both included."""
  text = path.read_text()
  begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
  if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
    raise ValueError(f"{path}: expected one line {begin} and, after it, one line {end}")
  return text[: text.index(begin) + len(begin)], text[text.index(end) :]


def command(args: Common) -> str:
  """What was asked for, files by their names only."""
  out = ["python scripts/benchmark.py", type(args).__name__.lower()]
  for field in dataclasses.fields(args):
    value = getattr(args, field.name)
    if value == field.default or field.name in UNSAID:
      continue
    value = value.resolve().name if isinstance(value, pathlib.Path) else value
    values = value if isinstance(value, tuple) else (value,)
    out += [f"--{field.name}", *(() if value is True else map(str, values))]
  return " ".join(out)


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
  """Command, minutes, days and machine: those of the runs, whenever they were.

  The load averages of runs that may have been measured before stand in their table.
  """
  about = figures["machine"]
  runs = figures.get("ours", []) + figures.get("peers", [])
  seconds, days, load = figures["seconds"], [about["date"]], ""
  if runs:
    seconds = sum(run["process_seconds"] for run in runs)
    days = sorted({run["date"] for run in runs})
  else:
    load = f"load average {about['load_at_start']:.1f} at the start and "
    load += f"{about['load_at_end']:.1f} at the end; "
  quick = "\n\n**Small sizes (--quick): these figures say nothing.**" if figures["quick"] else ""
  return (
    f"`{figures['command']}`, {seconds / 60:.0f} minutes, {' and '.join(days)}; "
    f"{about['processor']}, {about['cores']} cores, {about['system']}; {load}"
    f"Python {about['python']}, JAX {about['jax']} (jaxlib {about['jaxlib']}), "
    f"NumPy {about['numpy']}.{quick}"
  )


if __name__ == "__main__":
  sys.exit(main())
