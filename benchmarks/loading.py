"""Measures time and memory of loading public weights, each load in its own process (Linux).

A real model is loaded onto one device.  Generated safetensors files with the widths of
Qwen2.5-Math-7B are loaded onto eight simulated devices.  Targets: the real model takes under 10 s
and 1.5 GB; the large one grows its process by no more than its shards and the largest parameter.
Takes 1 minute.
"""

import dataclasses
import functools
import pathlib
import tempfile
import time

import jax
import numpy as np

from benchmarks import runner
from prm_jax import config as config_lib
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import safetensors_files, weights
from prm_jax.training import initialization

VOCABULARY = 152_064
WIDTHS = {  # Qwen2.5-Math-7B's config.json
  "width": 3584,
  "heads": 28,
  "kv_heads": 4,
  "head_size": 128,
  "mlp_width": 18_944,
  "attention_bias": True,
  "tied_embeddings": False,
  "layers": 4,  # 2.0 GB, and 0.47 GB for each layer
  "param_dtype": "bfloat16",
}
TINY = {"width": 64, "heads": 4, "kv_heads": 2, "head_size": 16, "mlp_width": 128, "layers": 1}


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  model: pathlib.Path = pathlib.Path("models/smollm2-135m")  # a public model


def run(args: Args) -> dict:
  """Loads both models."""
  apart = functools.partial(runner.apart, JAX_PLATFORMS="cpu")
  widths = WIDTHS | TINY if args.quick else WIDTHS
  small = {"model": args.model.name} | apart(load, str(args.model.resolve()), 1)
  with tempfile.TemporaryDirectory() as directory:
    apart(write, directory, widths)
    large = {"model": f"{widths['layers']} layers of Qwen2.5-Math-7B's widths, bfloat16"}
    large |= apart(load, directory, 8, widths)
  bound, growth = large["shards GB"] + large["largest parameter GB"], large["growth GB"]
  return {
    "targets": [
      runner.target("seconds of the model", "<", 10, small["seconds"]),
      runner.target("highest memory of its process, GB", "<", 1.5, small["highest GB"]),
      runner.target("growth of the large one's process, GB", "<=", bound, growth),
    ],
    "tables": {"Loads": [small, large]},
  }


def write(directory: str, widths: dict) -> None:
  """Writes a folder of safetensors full of ones."""
  model, mesh = config_lib.Model(**widths), sharding_lib.make_mesh(config_lib.Mesh())
  params = decoder.abstract_params(model, VOCABULARY, 3, mesh)
  trunk = {name: leaf for name, leaf in params.items() if not name.startswith("head")}
  trunk = jax.tree.map(lambda leaf: np.broadcast_to(np.ones((), leaf.dtype), leaf.shape), trunk)
  safetensors_files.write_directory(directory, weights.unload(trunk, model))


def load(path: str, devices: int, widths: dict | None = None) -> dict:
  """Returns a row of the table: seconds and memory to load a model onto simulated devices."""
  jax.config.update("jax_num_cpu_devices", devices)
  generated = widths and config_lib.Model(**widths, vocab_size=VOCABULARY)
  model = generated or initialization.architecture(path)
  mesh = sharding_lib.make_mesh(config_lib.Mesh())
  abstract = decoder.abstract_params(model, model.vocab_size, 3, mesh)
  before, start = memory("VmRSS"), time.perf_counter()
  params = jax.block_until_ready(weights.load(path, abstract, model))
  seconds, leaves = time.perf_counter() - start, jax.tree.leaves(params)
  return {
    "devices": devices,
    "million parameters": sum(leaf.size for leaf in leaves) / 1e6,
    "seconds": seconds,
    "highest GB": memory("VmHWM") / 1e9,
    "growth GB": (memory("VmHWM") - before) / 1e9,
    "shards GB": sum(leaf.nbytes for leaf in leaves) / 1e9,
    "largest parameter GB": max(leaf.nbytes for leaf in leaves) / 1e9,
  }


def memory(key: str) -> int:
  """Returns bytes of this process: VmRSS is the present size, VmHWM the peak."""
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024
