"""Time and memory of loading public weights, each time in a process of its own.

A model at hand goes onto one device; a directory of sharded safetensors with the widths of
Qwen2.5-Math-7B, which is written first and holds ones, onto eight simulated devices.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks.training_report import table

ROOT = pathlib.Path(__file__).resolve().parents[2]
VOCABULARY = 152_064
WIDTHS = {  # Qwen2.5-Math-7B's config.json
  "width": 3584,
  "heads": 28,
  "kv_heads": 4,
  "head_size": 128,
  "mlp_width": 18_944,
  "attention_bias": True,
  "tied_embeddings": False,
  "param_dtype": "bfloat16",
}
TINY = {"width": 64, "heads": 4, "kv_heads": 2, "head_size": 16, "mlp_width": 128}  # for --quick
SHARD = 5 * 10**9  # bytes of a file, as the hub's


def run(args) -> dict:
  """Measures both.  `args` are those of scripts/benchmark.py."""
  if not args.model.exists():
    raise FileNotFoundError(f"{args.model}: no such file; --model says where")
  result = {"model": args.model.name, "layers": args.layers, "loads": []}
  result["loads"].append(child({"path": str(args.model.resolve()), "devices": 1}))
  widths = (WIDTHS | TINY if args.quick else WIDTHS) | {"layers": args.layers}
  with tempfile.TemporaryDirectory() as directory:
    given = {"widths": widths, "path": directory, "devices": 8}
    child(given | {"write": True})
    result["loads"].append(child(given))
  result["targets"] = targets(result["loads"])
  return result


def targets(loads: list[dict]) -> list[tuple[str, str, str, bool]]:
  small, large = loads
  bound = large["shards"] + large["largest"]
  return [
    ("seconds of the model", "< 10", f"{small['seconds']:.1f}", small["seconds"] < 10),
    (
      "highest memory of its process, GB",
      "< 1.5",
      f"{small['peak'] / 1e9:.2f}",
      small["peak"] < 1.5e9,
    ),
    (
      "growth of the large one's process, GB",
      f"<= {bound / 1e9:.2f}: shards and largest tensor",
      f"{large['growth'] / 1e9:.2f}",
      large["growth"] <= bound,
    ),
  ]


def child(settings: dict) -> dict:
  environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  print(f"loading.py: {settings}", file=sys.stderr, flush=True)
  done = subprocess.run(
    [sys.executable, "-c", CHILD, json.dumps(settings)],
    env=environment,
    capture_output=True,
    text=True,
  )
  if done.returncode:
    raise RuntimeError(f"loading ended with {done.returncode}:\n{done.stderr[-2000:]}")
  return json.loads(done.stdout.splitlines()[-1])


CHILD = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
from benchmarks import loading
loading.measure(sys.argv[1])
"""


def measure(settings: str) -> None:
  """The child's part: prints seconds and bytes as JSON, or writes the directory."""
  import jax
  import numpy as np

  given = json.loads(settings)
  jax.config.update("jax_num_cpu_devices", given["devices"])

  from prm_jax import config as config_lib
  from prm_jax.model import sharding as sharding_lib
  from prm_jax.pretrained import safetensors_files, weights
  from prm_jax.training import initialization

  mesh = sharding_lib.make_mesh(config_lib.Mesh())
  if "widths" in given:
    model, vocabulary = config_lib.Model(**given["widths"]), VOCABULARY
  else:
    c = config_lib.Experiment(init=config_lib.Init(checkpoint=given["path"]))
    c, _, vocabulary = initialization.find(c, None)
    model = c.model
  abstract = sharding_lib.abstract_params(model, vocabulary, 3, mesh)
  if given.get("write"):
    trunk = {name: leaf for name, leaf in abstract.items() if not name.startswith("head")}
    ones = jax.tree.map(lambda leaf: np.broadcast_to(np.ones((), leaf.dtype), leaf.shape), trunk)
    safetensors_files.write_directory(given["path"], weights.unload(ones, model), SHARD)
    print("{}")
    return
  before, began = memory("VmRSS"), time.perf_counter()
  params = jax.block_until_ready(weights.load(given["path"], abstract, model))
  seconds = time.perf_counter() - began
  leaves = jax.tree.leaves(params)
  stacked = {name: leaf.nbytes // model.layers for name, leaf in params["blocks"].items()}
  rest = [leaf.nbytes for name, leaf in params.items() if name != "blocks"]
  figures = {
    "seconds": seconds,
    "peak": memory("VmHWM"),
    "growth": memory("VmHWM") - before,
    "shards": sum(leaf.nbytes for leaf in leaves),
    "largest": max(*stacked.values(), *rest),
    "parameters": sum(leaf.size for leaf in leaves),
  }
  print(json.dumps(figures))


def memory(key: str) -> int:
  """Bytes of this process: VmRSS now, VmHWM at most.  Linux only."""
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def tables(figures: dict) -> str:
  """The figures as Markdown."""
  words = {True: "yes", False: "**no**"}
  rows = [(*row, "" if figures["quick"] else words[met]) for *row, met in figures["targets"]]
  parts = [table(("target", "asked", "measured", "met"), rows)]
  names = (figures["model"], f"{figures['layers']} layers of Qwen2.5-Math-7B's widths, bfloat16")
  rows = [
    (
      name,
      devices,
      f"{load['parameters'] / 1e6:,.0f}",
      f"{load['seconds']:.1f}",
      *(f"{load[key] / 1e9:.2f}" for key in ("peak", "growth", "shards", "largest")),
    )
    for name, devices, load in zip(names, (1, 8), figures["loads"])
  ]
  head = ("model", "devices", "million parameters", "seconds", "highest GB", "growth GB")
  parts.append(table((*head, "shards GB", "largest tensor GB"), rows))
  return "\n\n".join(parts)
