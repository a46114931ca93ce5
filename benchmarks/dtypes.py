"""Measures float32 beside bfloat16 on the CPU: a layer's products, a train step, a score step.

A model of a public model's shape with random weights scores and trains on rows of one chain of
tokens, on --devices CPU devices.  bfloat16 is the dtype of activations and products;
parameters, moments and accumulated gradients stay float32.  Each dtype runs in its own process.
The last table splits the time of a score step into products (from float32 weights), attention and
the rest.  Products and attention are timed alone and multiplied by their numbers in a step.

Targets: bfloat16 trains 1.4 times as fast as float32 and scores 1.6 times as fast, on processors
with fast bfloat16 products.  Takes 5 minutes.
"""

import dataclasses
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import runner
from prm_jax import config as config_lib
from prm_jax.input_pipeline import packing, token_tree
from prm_jax.model import attention
from prm_jax.model import products as products_lib
from prm_jax.model import sharding as sharding_lib
from prm_jax.model.block_mask import TreeMask
from prm_jax.training import initialization
from prm_jax.training import step as step_lib
from prm_jax.types import Batch

DTYPES = ("float32", "bfloat16")
STEP = 64  # tokens of a step; the head reads at the last one


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  model: pathlib.Path = pathlib.Path("models/smollm2-135m")  # gives the shape
  tokens: int = 1024  # tokens of a row
  rows: int = 16  # rows of a score step, as in score.py; a train step has one per device
  devices: int = 2  # CPU devices, over which the rows are sharded
  repeats: int = 3  # repeats of each measurement; the fastest counts


def run(args: Args) -> dict:
  model = initialization.architecture(str(args.model))
  if args.quick:
    model = dataclasses.replace(model, width=32, layers=1, heads=2, kv_heads=1, head_size=16)
    args = dataclasses.replace(args, tokens=256, repeats=1)
  measured = {dtype: runner.apart(measure, model, dtype, args) for dtype in DTYPES}
  both = lambda key: [measured[dtype][key] for dtype in DTYPES]
  columns = lambda unit, *values: {f"{d}, {unit}": x for d, x in zip(DTYPES, values)}
  products = []
  tokens, counts = args.rows * args.tokens, {}
  for name, (width_in, width_out, counts[name]) in matrices(model).items():
    a, b = (2e-9 * tokens * width_in * width_out / s[name] for s in both("products"))
    row = {"product": name, "size": f"{tokens} x {width_in} x {width_out}"}
    products.append(row | columns("GFLOP/s", a, b) | {"ratio": b / a})
  speeds = []
  for step, rows in (("train", args.devices), ("score", args.rows)):
    a, b = (rows * args.tokens / s for s in both(step))
    speeds.append({"step": step} | columns("tokens/s", a, b) | {"ratio": b / a})
  parts = []
  for dtype in DTYPES:
    seconds = measured[dtype]
    alone = sum(count * seconds["products"][name] for name, count in counts.items())
    multiplied = model.layers * alone
    attended = model.layers * seconds["attention"]
    rest = seconds["score"] - multiplied - attended
    row = {"score step in": dtype, "s": seconds["score"], "products alone": multiplied}
    parts.append(row | {"attention alone": attended, "the rest": rest})
  return {
    "targets": [
      runner.target("training, bfloat16 / float32", ">=", 1.4, speeds[0]["ratio"]),
      runner.target("scoring, bfloat16 / float32", ">=", 1.6, speeds[1]["ratio"]),
    ],
    "tables": {
      "Products of a layer": products,
      f"Steps of {args.model.name}'s shape": speeds,
      "Where the time goes, s": parts,
    },
  }


def matrices(model: config_lib.Model) -> dict[str, tuple[int, int, int]]:
  """Returns input and output width of a layer's matrices, and their number in the layer."""
  queries, keys = model.heads * model.head_size, model.kv_heads * model.head_size
  return {
    "query": (model.width, queries, 1),
    "key, value": (model.width, keys, 2),
    "attention output": (queries, model.width, 1),
    "gate, up": (model.width, model.mlp_width, 2),
    "down": (model.mlp_width, model.width, 1),
  }


def measure(model: config_lib.Model, dtype: str, args: Args) -> dict:
  """Returns the seconds of a layer's products and attention, a train step and a score step."""
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", args.devices)
  c = config_lib.Experiment(model=dataclasses.replace(model, dtype=dtype, unroll_layers=True))
  mesh, seconds = sharding_lib.make_mesh(config_lib.Mesh()), {"products": {}}
  by_rows = sharding_lib.batch_sharding(mesh)
  random = lambda *shape: jax.random.normal(jax.random.key(0), shape)
  rows = lambda *shape: jax.device_put(random(*shape).astype(dtype), by_rows)
  with jax.set_mesh(mesh):
    multiply = jax.jit(lambda x, w: products_lib.weight_product(x, w, "float32"))
    for name, (width_in, width_out, _) in matrices(model).items():
      x, w = rows(args.rows * args.tokens, width_in), random(width_in, width_out)
      seconds["products"][name] = fastest(lambda x=x, w=w: multiply(x, w), args.repeats)
    q = rows(args.rows, args.tokens, model.heads, model.head_size)
    kv = rows(args.rows, args.tokens, model.kv_heads, model.head_size)
    mask = TreeMask(jnp.full((args.rows, args.tokens), args.tokens, jnp.int32))
    attend = jax.jit(lambda q, k, v: attention.attention(q, k, v, mask))
    seconds["attention"] = fastest(lambda: attend(q, kv, kv), args.repeats)
    programs = step_lib.make(c, model.vocab_size, 3, mesh)
    state = [programs.init(jax.random.key(0))]
    sizes = args.devices, args.rows
    few, several = (batch(n, args.tokens, model.vocab_size, mesh) for n in sizes)

    def update():
      state[0], metrics = programs.train_step(state[0], few)
      return metrics["loss"]

    seconds["train"] = fastest(update, args.repeats)
    read = lambda: programs.read(state[0].params, several)
    seconds["score"] = fastest(read, args.repeats)
  return seconds


def batch(rows: int, tokens: int, vocab_size: int, mesh: jax.sharding.Mesh) -> Batch:
  """Returns a batch of rows that hold one random solution each, labelled right."""
  rng, reads, trees = np.random.default_rng(0), range(STEP - 1, tokens, STEP), []
  for _ in range(rows):
    tree = token_tree.chain(rng.integers(vocab_size, size=tokens), reads)
    trees.append(dataclasses.replace(tree, read_targets=[(0, 0, 1)] * len(reads)))
  packed = packing.PackedRows(trees, tokens)
  return jax.device_put(packing.stack([*packed]), sharding_lib.batch_sharding(mesh))


def fastest(function: Callable, repeats: int) -> float:
  """Returns the seconds of the fastest call, after one that compiles."""
  (seconds,) = runner.by_turns({"": function}, repeats).values()
  return min(seconds)
