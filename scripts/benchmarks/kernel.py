"""Memory that attention takes on a TPU beside JAX's splash attention, by the TPU compiler.

No TPU is needed, and no time is measured.  Each compilation is a process of its own and leaves its
figures in a file: an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from importlib import metadata, util

from benchmarks import public_shapes, training
from benchmarks.training_report import table

from prm_jax.runtime import json_lines

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = pathlib.Path(__file__).parent / "attention_compile.py"
STEP = ("config.py", "types.py", "model", "training")  # code that the figures of a step depend on
ALONE = {  # and those of attention alone, by form
  "kernel": ("model/block_mask.py", "model/tree_kernel.py"),
  "dense": ("model/block_mask.py", "model/attention.py"),
  # its blocks are as long
  "splash_fused": ("model/tree_kernel.py",),
  "splash_split": ("model/tree_kernel.py",),
}
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax")
DROPPED = ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS", "LIBTPU_INIT_ARGS")  # of the environment
PARTS = ("alone", "step")
FORMS = {
  "kernel": "this project",
  "splash_fused": "splash, one backward kernel",
  "splash_split": "splash, two",
  "dense": "dense",
}
SPLASH = ("splash_fused", "splash_split")
HEADS = {64: (32, 8), 128: (16, 8), 256: (8, 4)}  # by head size; queries and keys
SLICES = {"alone": {"v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2"}}
SLICES["step"] = {"v5e": "4x4", "v5p": "2x2x4", "v6e": "4x4"}
GEMMA = {"window": 1024, "softcap": 50.0}  # as Gemma 2 has them, which splash is not given
STEP_CHIPS = 16
# which a step is compiled for; a scan over layers compiles one
MODEL = public_shapes.SHAPES["Llama-3.2-1B"]


def run(args) -> dict:
  """Compiles everything, or reads what was.  `args` are those of scripts/benchmark.py.

  Raises:
    RuntimeError: the TPU compiler is not installed, or a compilation failed.
  """
  if util.find_spec("libtpu") is None:
    raise RuntimeError("the TPU compiler is not installed: pip install libtpu")
  checkpoint = args.work / "model"
  checkpoint.mkdir(parents=True, exist_ok=True)
  (checkpoint / "config.json").write_text(json.dumps(MODEL))
  asked = [each for part in PARTS if part not in args.skip for each in cases(part, args.quick)]
  done = [compiled(args.work, each, checkpoint) for each in asked]
  result = {
    "ours": [each for each in done if each["form"] == "kernel"],
    "peers": [each for each in done if each["form"] != "kernel"],
    "versions": versions(),
  }
  result["targets"] = targets(done)
  return result


def cases(part: str, quick: bool) -> list[dict]:
  """What is compiled; quick: the smallest of it."""
  out = []
  forms = {"alone": tuple(FORMS), "step": ("kernel", *SPLASH)}[part]
  for generation, shape in SLICES[part].items():
    for tokens in (4096, 8192):
      for head_size in HEADS if part == "alone" else (MODEL["head_dim"],):
        heads, kv_heads = HEADS[head_size]
        sizes = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_size": head_size}
        about = {"what": part, "topology": f"{generation}:{shape}", "sizes": sizes}
        out += [about | {"form": form} for form in forms]
      if part == "alone":  # after the others of the last head size
        about["sizes"] = sizes | GEMMA
        out += [about | {"form": form} for form in ("kernel", "dense")]
  return out[: len(forms)] if quick else out


def compiled(work: pathlib.Path, case: dict, checkpoint: pathlib.Path) -> dict:
  """The figures of one compilation, from its file or from a process that writes it."""
  sizes = case["sizes"]
  parts = (case["what"], case["topology"], sizes["tokens"], sizes["head_size"], case["form"])
  name = "_".join(map(str, (*parts, *(["windowed"] if "window" in sizes else []))))
  output = work / f"{name.replace(':', '_')}_{digest(case)[:12]}.json"
  if not output.exists():
    training.say(f"{name}:", end=" ")
    start = time.perf_counter()
    given, log, new = (output.with_suffix(end) for end in (".settings", ".log", ".new"))
    about = {"checkpoint": str(checkpoint.resolve()), "output": str(new.resolve())}
    given.write_text(json.dumps(case | about | {"chips": STEP_CHIPS}))
    environment = {k: v for k, v in os.environ.items() if k not in DROPPED}
    with log.open("w") as out:
      ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(given)],
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=out,
        stderr=out,
      ).returncode
    if ended:  # a compiler that aborts is no exception
      raise RuntimeError(f"{SCRIPT.name} ended with {ended}; {log}:\n{training.tail(log)}")
    figures = case | json.loads(new.read_text())
    figures |= {"process_seconds": time.perf_counter() - start, "date": time.strftime("%Y-%m-%d")}
    with json_lines.written(output) as file:
      file.write(json.dumps(figures) + "\n")
    for file in (given, log, new):
      file.unlink()
    training.say(f"{size(figures, 'temporaries') / 2**20:.1f} MiB -> {output}")
  return json.loads(output.read_text())


def digest(case: dict) -> str:
  """Of what the figures depend on."""
  found = hashlib.sha256(json.dumps([case, versions(), MODEL], sort_keys=True).encode())
  for name in STEP if case["what"] == "step" else ALONE.get(case["form"], ()):
    for file in training.files_of(ROOT / "prm_jax" / name):
      found.update(file.read_bytes())
  found.update(SCRIPT.read_bytes())
  return found.hexdigest()


def versions() -> dict[str, str]:
  return {name: metadata.version(name) for name in PACKAGES}


def grouped(done: list[dict], part: str) -> dict[tuple, dict[str, dict]]:
  """Figures by form, for each slice and size."""
  out = {}
  for each in done:
    if each["what"] == part:
      sizes = each["sizes"]
      key = each["topology"], sizes["tokens"], sizes["head_size"], "window" in sizes
      out.setdefault(key, {})[each["form"]] = each
  return out


def size(figures: dict, which: str) -> float:
  """Bytes of temporaries, allocated or JAX's temp_size; of what does not fit, more than any."""
  return math.inf if figures[which] is None else figures[which]


def targets(done: list[dict]) -> list[dict]:
  """The kernel's temporaries over the least of splash attention's at the same size: the worst."""
  rows, words = [], {"alone": "attention alone", "step": "whole train step"}
  for part in PARTS:
    several = [forms for forms in grouped(done, part).values() if "splash_split" in forms]
    for which, what in (("temporaries", "allocated"), ("temp_size", "by temp_size")):
      ratios = [
        size(forms["kernel"], which) / min(size(forms[name], which) for name in SPLASH)
        for forms in several
      ]
      if ratios:
        what = f"temporaries {what} / the leaner splash's, {words[part]}, largest of {len(ratios)}"
        met = max(ratios) < 1
        rows.append({"what": what, "target": "< 1", "measured": max(ratios), "met": met})
  return rows


def tables(figures: dict) -> str:
  """The figures as Markdown."""
  done = figures["ours"] + figures["peers"]
  rows = [
    (r["what"], r["target"], f"{r['measured']:.3f}", "yes" if r["met"] else "**no**")
    for r in figures["targets"]
  ]
  parts = [table(("target", "asked", "found", "met"), rows)]
  for part, title in (
    ("alone", "Attention alone, forward and backward: MiB a chip"),
    ("step", "A whole train step: MiB a chip"),
  ):
    rows = []
    names = tuple(FORMS) if part == "alone" else ("kernel", *SPLASH)
    for (topology, tokens, head_size, windowed), forms in grouped(done, part).items():
      heads = forms["kernel"]["sizes"]
      about = f"{heads['heads']}/{heads['kv_heads']} of {head_size}"
      if windowed:
        about += f", window {heads['window']:,}, soft cap {heads['softcap']:.0f}"
      cells = []
      for name in names:
        cell = ""
        if form := forms.get(name):
          cell = "does not fit"
          if form["temporaries"] is not None:
            cell = f"{form['temporaries'] / 2**20:.1f} ({form['temp_size'] / 2**20:.1f})"
        cells.append(cell)
      rows.append((topology, f"{tokens:,}", about, *cells))
    if rows:
      head = (
        "slice",
        "tokens of a row",
        "heads",
        *(f"{FORMS[name]}: allocated (temp_size)" for name in names),
      )
      parts += [f"### {title}", table(head, rows)]
  installed = ", ".join(" ".join(each) for each in figures["versions"].items())
  return "\n\n".join([*parts, f"{installed}."])
