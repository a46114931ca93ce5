"""The speed of prm_jax.aggregation beside plain Python and numpy, on the same generated data.

Each method runs in a process of its own, pinned to one core, so that its memory is its own too.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from benchmarks import aggregation_methods as methods
from benchmarks import reranking

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARTS = ("rerank",)
N = (1, 2, 5, 10, 25, 50, 100, 200, 400, 600, 800, 1000, 1400, 1860)
SIZES = ((500, 1860), (500, 100_000), (100, 1_000_000))
QUICK_N = (1, 4, 32, 300)
QUICK_SIZES = ((20, 300), (10, 1200))
BEST_OF_N = {
  "loop": "Python loop",
  "numpy_trials": "numpy trials, one order for all problems",
  "numpy_argsort": "numpy exact, no ties: argsort",
  "numpy_sort": "numpy exact, no ties: packed sort",
  "library": "`best_of_n`",
  "library_bfloat16": "`best_of_n`, bfloat16 scores",
  "library_jit": "`best_of_n` under `jax.jit`",
  "library_all_n": "`best_of_n`, every N = 1..M",
}
OTHERS = {
  "majority": "`exact_majority`",
  "majority_trials": f"`majority_vote`, {methods.PERMUTATIONS} orders",
  "weighted": f"`majority_vote` with weights and control, {methods.PERMUTATIONS} orders",
  "jackknife": "`generation_error`",
  "band": f"`simultaneous_band`, every N, {methods.RESAMPLES} resamples",
  "reduce_steps": "`reduce_steps`, five reductions in one pass",
  "numpy_steps": "numpy `reduceat`, the same five",
  "import": "`import prm_jax.aggregation`, with the interpreter",
}
RANDOM = ("loop", "numpy_trials")
LEFT_OUT = ("library_jit",)  # at the largest size, for time


def run(quick: bool, skip: tuple[str, ...]) -> dict:
  """Measures everything: figures by size and method, and the targets they are held against."""
  ns = QUICK_N if quick else N
  sizes = []
  with tempfile.TemporaryDirectory() as directory:
    for place, (problems, candidates) in enumerate(QUICK_SIZES if quick else SIZES):
      path = pathlib.Path(directory, str(candidates))
      path.mkdir()
      names = ["data", "exact", *BEST_OF_N]
      if place == 0:
        names[1:1] = ["answers"]
        names += OTHERS
      if place == len(SIZES) - 1 or (quick and place):
        names = [name for name in names if name not in LEFT_OUT]
      cases = [(name, str(path), problems, candidates, ns) for name in names]
      figures = dict(zip(names, measure(cases, together=quick)))
      compare(figures, path)
      for file in path.iterdir():
        file.unlink()
      sizes.append(
        {"problems": problems, "candidates": candidates, "n": list(ns), "methods": figures}
      )
  result = {"sizes": sizes}
  if "rerank" not in skip:
    say("rerank.py, after writing its input:", end=" ")
    result["rerank"] = reranking.run(20, 50) if quick else reranking.run()
    say(f"{result['rerank']['seconds']:.1f} s")
  result["targets"] = targets(result)
  return result


def measure(cases: list[tuple], together: bool) -> list[dict]:
  """Figures of each case, from a process of its own or, for a quick look, one for all."""
  environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
  }
  pin = None
  if hasattr(os, "sched_setaffinity"):
    core = max(os.sched_getaffinity(0))
    pin = lambda: os.sched_setaffinity(0, {core})
  figures = []
  for group in [cases] if together else [[case] for case in cases]:
    child = subprocess.Popen(
      [sys.executable, methods.__file__, json.dumps(group)],
      stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=pin,
    )  # fmt: skip
    with child:
      for name, _, problems, candidates, _ in group:
        say(f"{problems} x {candidates}, {name}:", end=" ")
        line = child.stdout.readline()
        if not line:
          raise RuntimeError(f"{name} failed at {problems} x {candidates}; its error stands above")
        figures.append(json.loads(line))
        say(f"{figures[-1]['took']:.1f} s")
  return figures


def compare(figures: dict, path: pathlib.Path) -> None:
  """Adds how far each method's curves are from the float64 ones, and ns a candidate."""
  truth = np.load(path / "exact.npy")
  rounded = np.load(path / "exact_bfloat16.npy")
  for name in BEST_OF_N.keys() & figures.keys():
    curves, about = np.load(path / f"{name}.npy").astype(np.float64), figures[name]
    expected = (rounded if name == "library_bfloat16" else truth)[: len(curves)]
    about["curve"] = curves.mean(axis=0).tolist()
    about["expected"] = expected.mean(axis=0).tolist()
    if name in RANDOM:
      variance = (expected * (1 - expected)).mean(axis=0) / len(curves)
      about["standard_error"] = np.sqrt(variance / about["measured_trials"]).tolist()
      variance = (truth * (1 - truth)).mean(axis=0) / len(truth)
      about["standard_error_of_all"] = float(np.sqrt(variance / methods.TRIALS).max())
    else:
      about["largest_error"] = float(np.abs(curves - expected).max())
    about["ns_per_candidate"] = about["cpu_seconds"] / int(path.name) / len(truth) * 1e9


def targets(result: dict) -> list[dict]:
  """What the project asks of itself, and what was measured."""
  sizes = result["sizes"]
  first, last = sizes[0]["methods"], sizes[-1]["methods"]
  cpu = {name: figures.get("cpu_seconds") for name, figures in first.items()}
  exponent = math.log(
    last["library"]["cpu_seconds"] / sizes[-1]["problems"]
    / (cpu["library"] / sizes[0]["problems"])
  ) / math.log(sizes[-1]["candidates"] / sizes[0]["candidates"])  # fmt: skip
  exact = [n for n in BEST_OF_N if n.startswith("library")]
  error = max(s["methods"][n]["largest_error"] for s in sizes for n in exact if n in s["methods"])
  at, largest = (f"{s['problems']} x {s['candidates']:,}" for s in (sizes[0], sizes[-1]))
  few = len(sizes[0]["n"])
  rows = [
    (f"Python loop / `best_of_n`, {at}, CPU", ">=", 5e4, cpu["loop"] / cpu["library"]),
    (f"`best_of_n` / numpy packed sort, {at}, CPU", "<=", 2, cpu["library"] / cpu["numpy_sort"]),
    (f"every N / {few} N, {at}, CPU", "<=", 1.5, cpu["library_all_n"] / cpu["library"]),
    (f"exponent of CPU time in M, {at} to {largest}", "<=", 1.1, exponent),
    (
      f"peak GB of `best_of_n`, {few} N, {largest}, inputs included",
      "<",
      2.5,
      last["library"]["peak_gb"],
    ),
    ("largest error of one problem, all sizes", "<", 1e-6, error),
    (f"`exact_majority`, {at}, CPU s", "<", 5, cpu["majority"]),
    ("first call of `best_of_n`, s", "<", 3, first["library"]["first_wall_seconds"]),
    ("first call of `exact_majority`, s", "<", 10, first["majority"]["first_wall_seconds"]),
    ("`import prm_jax.aggregation`, s", "<", 1.5, first["import"]["wall_seconds"]),
  ]
  if "rerank" in result:
    rerank = result["rerank"]
    name = f"`rerank.py`, {rerank['lines']:,} lines"
    rows.append((f"{name}, s", "<", 60, rerank["seconds"]))
    rows.append((f"{name}, peak GB", "<", 3, rerank["peak_gb"]))
    shape = f"{rerank['problems']} x {rerank['candidates']:,} x {reranking.MEAN_STEPS}"
    rows.append((f"reload of a {shape} bundle, s", "<", 1, rerank["bundle_seconds"]))
  compare = {"<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b}
  return [
    {"what": what, "target": f"{sign} {bound:g}", "measured": value, "met": met}
    for what, sign, bound, value in rows
    for met in [bool(compare[sign](value, bound))]
  ]


def tables(result: dict) -> str:
  """The figures as Markdown."""
  parts = [
    table(
      ("target", "asked", "measured", "met"),
      [
        (r["what"], r["target"], number(r["measured"]), verdict(r, result["quick"]))
        for r in result["targets"]
      ],
    )
  ]
  for size in result["sizes"]:
    which = f"{len(size['n'])} values of N in 1..{size['n'][-1]}"
    parts.append(f"### {size['problems']} x {size['candidates']:,}, {which}")
    parts.append(best_of_n_table(size))
  size = result["sizes"][0]
  parts.append(f"### Votes, errors, steps: {size['problems']} x {size['candidates']:,}")
  parts.append(others_table(size))
  if "rerank" in result:
    r = result["rerank"]
    parts.append(
      f"`rerank.py --write_bundle` on {r['lines']:,} lines ({r['bytes'] / 1e9:.2f} GB), all cores: "
      f"{r['seconds']:.1f} s, {r['cpu_seconds']:.1f} s of CPU, peak {r['peak_gb']:.2f} GB.  Its "
      f"bundle ({r['bundle_gb']:.2f} GB) is read again in {r['bundle_seconds']:.2f} s, without "
      "imports."
    )
  return "\n\n".join(parts)


def verdict(row: dict, quick: bool) -> str:
  """The targets are for the full sizes."""
  if quick:
    return ""
  return "yes" if row["met"] else "**no**"


def best_of_n_table(size: dict) -> str:
  own = size["methods"]["library"]
  rows = []
  for name, label in BEST_OF_N.items():
    figures = size["methods"].get(name)
    if figures is None:
      rows.append((label, *["left out"] * 7))
      continue
    if name in RANDOM:
      trials, problems = figures["measured_trials"], figures["measured_problems"]
      if trials * problems < methods.TRIALS * size["problems"]:
        label += f" (extrapolated from {trials} {plural('trial', trials)} of {problems} "
        label += f"{plural('problem', problems)})"
      off = f"SE {figures['standard_error_of_all']:.1e}"
    else:
      off = f"{figures['largest_error']:.1e}"
    rows.append(
      (
        label,
        *(number(figures.get(key)) for key in ("cpu_seconds", "wall_seconds")),
        number(figures.get("first_wall_seconds")),
        number(figures["ns_per_candidate"]),
        number(figures["cpu_seconds"] / own["cpu_seconds"]),
        memory(figures),
        off,
      )
    )
  head = ("method", "CPU s", "s", "first call s", "CPU ns a candidate", "CPU / `best_of_n`")
  return table((*head, "peak GB (before the call)", "error"), rows)


def others_table(size: dict) -> str:
  rows = []
  for name, label in OTHERS.items():
    figures = size["methods"][name]
    note = ""
    if "samples" in figures:
      note = f"{figures['cpu_seconds'] / figures['samples'] * 1e9:.1f} ns a step"
      note += f", {figures['samples'] / 1e6:.3g}M steps"
    elif "standard_error" in figures:
      note = f"SE of the mean at most {max(figures['standard_error']):.1e}"
    elif "critical" in figures:
      note = f"critical value {figures['critical']:.2f}"
    keys = ("cpu_seconds", "wall_seconds", "first_wall_seconds")
    rows.append((label, *(number(figures.get(key)) for key in keys), memory(figures), note))
  return table(("what", "CPU s", "s", "first call s", "peak GB (before the call)", ""), rows)


def memory(figures: dict) -> str:
  if "peak_gb" not in figures:
    return ""
  before = f" ({figures['gb_before']:.2f})" if "gb_before" in figures else ""
  return f"{figures['peak_gb']:.2f}{before}"


def number(value: float | None) -> str:
  """Three digits, without exponents where they can be avoided."""
  if value is None:
    return ""
  if value and abs(value) < 1e-4:
    return f"{value:.1e}"
  return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def plural(word: str, count: int) -> str:
  return word if count == 1 else word + "s"


def table(head: tuple, rows: list[tuple]) -> str:
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def say(text: str, end: str = "\n") -> None:
  print(text, end=end, file=sys.stderr, flush=True)
