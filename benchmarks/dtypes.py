"""float32 beside bfloat16 on the CPU: the products of a layer, a train step and a score step.

A public model's shape with random weights reads and trains on rows of one chain of tokens.  In
bfloat16, activations and products are; parameters, moments and gradients' sums stay float32.  Each
dtype runs in a process of its own.  The last table says where the time of a score step goes: its
products and its attention, each timed alone and times the number of layers, and the rest.

Target: 1.4 times as fast in training and 1.6 times in scoring, where the processor multiplies
bfloat16 faster.  Takes 5 minutes.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import runner
from prm_jax import config as config_lib
from prm_jax.model import attention
from prm_jax.model import sharding as sharding_lib
from prm_jax.model.block_mask import TreeMask
from prm_jax.training import initialization
from prm_jax.training import step as step_lib
from prm_jax.types import Batch

DTYPES = ("float32", "bfloat16")
STEP = 64  # tokens of a step, behind each of which the head reads


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  model: pathlib.Path = pathlib.Path("models/smollm2-135m")  # whose shape is used
  tokens: int = 1024  # of a row
  rows: int = 4  # of a score step; an update has one
  repeats: int = 5  # of each; the fastest counts


def run(args: Args) -> dict:
  model = initialization.architecture(str(args.model))
  if args.quick:
    model = dataclasses.replace(model, width=32, layers=1, heads=2, kv_heads=1, head_size=16)
    args = dataclasses.replace(args, tokens=256, repeats=1)
  found = {dtype: runner.apart(measure, model, dtype, args) for dtype in DTYPES}
  of = lambda key: [found[dtype][key] for dtype in DTYPES]
  columns = lambda a, b: dict(zip(DTYPES, (a, b)))
  products = []
  for name, (width_in, width_out) in matrices(model).items():
    a, b = (2e-9 * args.tokens * width_in * width_out / s[name] for s in of("products"))
    row = {"product": name, "size": f"{args.tokens} x {width_in} x {width_out}"}
    products.append(row | {f"{d}, GFLOP/s": x for d, x in columns(a, b).items()} | {"ratio": b / a})
  speeds = []
  for what, tokens in (("train", args.tokens), ("score", args.rows * args.tokens)):
    a, b = (tokens / s for s in of(what))
    row = {"step": what} | {f"{d}, tokens/s": x for d, x in columns(a, b).items()}
    speeds.append(row | {"ratio": b / a})
  parts = []
  for dtype in DTYPES:
    each = found[dtype]
    multiplied = args.rows * model.layers * sum(each["products"].values())
    attended = model.layers * each["attention"]
    rest = each["score"] - multiplied - attended
    row = {"score step in": dtype, "s": each["score"], "products alone": multiplied}
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


def matrices(model: config_lib.Model) -> dict[str, tuple[int, int]]:
  """Input and output widths of a layer's matrices."""
  queries, keys = model.heads * model.head_size, model.kv_heads * model.head_size
  inner = model.mlp_width
  return {
    "query": (model.width, queries),
    "key and value": (model.width, 2 * keys),
    "attention output": (queries, model.width),
    "gate and up": (model.width, 2 * inner),
    "down": (inner, model.width),
  }


def measure(model: config_lib.Model, dtype: str, args: Args) -> dict:
  """Seconds of the products of a layer, of its attention, of a train step and of a score step."""
  jax.config.update("jax_platforms", "cpu")
  of = lambda *shape: jax.random.normal(jax.random.key(0), shape, dtype)
  multiply, products = jax.jit(jnp.matmul), {}
  for name, (width_in, width_out) in matrices(model).items():
    x, w = of(args.tokens, width_in), of(width_in, width_out)
    products[name] = fastest(lambda x=x, w=w: multiply(x, w), args.repeats)
  q = of(args.rows, args.tokens, model.heads, model.head_size)
  kv = of(args.rows, args.tokens, model.kv_heads, model.head_size)
  mask = TreeMask(jnp.full((args.rows, args.tokens), args.tokens, jnp.int32))
  attend = jax.jit(lambda q, k, v: attention.attention(q, k, v, mask))
  found = {"products": products, "attention": fastest(lambda: attend(q, kv, kv), args.repeats)}
  c = config_lib.Experiment(model=dataclasses.replace(model, dtype=dtype, unroll_layers=True))
  mesh = sharding_lib.make_mesh(config_lib.Mesh(), jax.devices()[:1])
  with jax.set_mesh(mesh):
    programs = step_lib.make(c, model.vocab_size, 3, mesh)
    state = [programs.init(jax.random.key(0))]
    one, several = (batch(rows, args.tokens, model.vocab_size, mesh) for rows in (1, args.rows))

    def update():
      state[0], metrics = programs.train_step(state[0], one)
      return metrics["loss"]

    found["train"] = fastest(update, args.repeats)
    read = lambda: programs.read(state[0].params, several)
    found["score"] = fastest(read, args.repeats)
  return found


def batch(rows: int, tokens: int, vocab_size: int, mesh: jax.sharding.Mesh) -> Batch:
  """Rows of one random solution each, labelled right."""
  positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), (rows, tokens))
  reads = np.broadcast_to(np.arange(STEP - 1, tokens, STEP, dtype=np.int32), (rows, tokens // STEP))
  made = Batch(
    tokens=np.random.default_rng(0).integers(vocab_size, size=(rows, tokens), dtype=np.int32),
    positions=positions,
    subtree_end=np.full((rows, tokens), tokens, np.int32),
    previous=positions - 1,
    read_positions=reads,
    read_targets=np.eye(3, dtype=np.float32)[np.full(reads.shape, 2)],
    read_solutions=np.broadcast_to(np.arange(rows, dtype=np.int32)[:, None], reads.shape),
  )
  return jax.device_put(made, sharding_lib.batch_sharding(mesh))


def fastest(function: Callable, repeats: int) -> float:
  """Seconds of the fastest call, after one that compiles."""
  jax.block_until_ready(function())
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(function())
    seconds.append(time.perf_counter() - start)
  return min(seconds)
