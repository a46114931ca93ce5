"""Measures sampling from a language model beside transformers' `generate` on the same prompts.

Both sides get the same token ids: --prompts problems in the model's chat template.  They generate
--samples of each, at --temperature, up to --max_new_tokens or the model's end token.  On a few
prompts, the benchmark first tries the peer's batch sizes and dtypes; the fastest generates
everything.  The peer's prompts are sorted by length and padded at the left, and its attention is
torch's sdpa.

Targets: 1.5 times the peer's tokens a second, and 60 % of the rate of matrix products alone.  This
share is the time of a step's products, each measured alone in its best layout, over the time of a
step in which all slots are in use.  Takes 13 to 47 minutes.
"""

import collections
import dataclasses
import functools
import itertools
import pathlib
import shutil
import time
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import dtypes, runner
from prm_jax.generation import prompts
from prm_jax.generation.engines import Limits
from prm_jax.generation.sampler import Sampler
from prm_jax.generation.sampling import Sampling
from prm_jax.runtime import json_lines, processes

TRANSFORMERS = pathlib.Path(__file__).parent / "generation_peer.py"
TRIAL_PROMPTS, TRIAL_TOKENS = 8, 64  # to compare the peer's settings
OURS, PEER = "this project", "transformers"


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  model: pathlib.Path = pathlib.Path("models/smollm2-135m")  # a public language model
  problems: pathlib.Path | None = None  # JSON lines with `problem`; by default sums
  source: pathlib.Path | None = None  # folder of PRM800K's files, for MATH's test problems
  prompts: int = 64
  samples: int = 8  # samples of each prompt
  max_new_tokens: int = 256
  temperature: float = 0.8
  batch: int = 64  # slots of this project's sampler
  dtype: Literal["float32", "bfloat16"] = "bfloat16"  # dtype of this project
  peer_batches: tuple[int, ...] = (8, 32, 64)  # batch sizes to try for the peer, in samples
  peer_dtypes: tuple[str, ...] = ("float32", "bfloat16")
  peer_python: str = str(runner.ROOT / ".venv-reference/bin/python")  # "": no peer
  threads: int = 2  # cores of each side

  @property
  def section(self) -> str:
    return f"_{self.model.name}"


def run(args: Args) -> dict:
  """Measures both sides."""
  if args.quick:
    sizes = {"prompts": 2, "samples": 2, "max_new_tokens": 4, "batch": 4, "peer_batches": (2,)}
    args = dataclasses.replace(args, **sizes)
  if bad := [
    size for size in args.peer_batches if max(size, args.samples) % min(size, args.samples)
  ]:
    raise ValueError(
      f"--peer_batches: neither of {bad[0]} and --samples={args.samples} divides the other"
    )
  if args.peer_python and not shutil.which(args.peer_python):
    raise FileNotFoundError(f"{args.peer_python}: no such Python; --peer_python= measures no peer")
  path, texts = problems(args)
  cores = processes.usable_cores()[-args.threads :]
  ours = runner.apart(own_side, args, texts, cores=cores, JAX_PLATFORMS="cpu")
  row = {"side": OURS, "dtype": args.dtype, "batch": args.batch}
  rows = [row | count(ours)]
  tables = {"All prompts": rows, "A step with all slots in use": ours["step"]}
  share = ours["step"][-1]["ms"] / ours["step"][0]["ms"]
  targets = [runner.target("share of the rate of products", ">=", 0.6, share)]
  figures = {"ours": ours, "targets": targets, "tables": tables, "texts": len(texts)}
  figures["notes"] = f"Model {args.model.name}; problems: {path or 'sums'}."
  if args.peer_python:
    trial, whole, versions = peer_side(args, cores, ours["ids"], ours["end_tokens"])
    rows.append({"side": PEER} | {k: whole[k] for k in row if k in whole} | count(whole))
    tables["The peer's settings, on a few prompts"] = [
      {k: run[k] for k in ("dtype", "batch")} | count(run) for run in trial
    ]
    ratio = rows[0]["tokens/s"] / rows[1]["tokens/s"]
    targets.insert(0, runner.target("times the peer's tokens a second", ">=", 1.5, ratio))
    figures |= {"peer": whole, "trial": trial}
    figures["notes"] += f" Peer: {runner.listed(versions)}."
  return figures


def count(run: dict) -> dict:
  tokens, seconds = run["tokens"], run["seconds"]
  return {"tokens": tokens, "seconds": seconds, "tokens/s": tokens / seconds}


def problems(args: Args) -> tuple[pathlib.Path | None, list[str]]:
  """Returns the file and its first problems; without a file, None and sums."""
  from prm_jax.datasets import math_splits

  path = args.problems or (args.source and math_splits.find_test(args.source))
  if path is None:
    return None, [f"What is {17 * i + 3} + {91 * i + 7} - {5 * i}?" for i in range(args.prompts)]
  lines = itertools.islice(json_lines.records(path), args.prompts)
  return path, [record["problem"] for _, record in lines]


def own_side(args: Args, texts: list[str]) -> dict:
  """Returns this project's tokens and seconds, the token ids of the prompts, and a step's time."""
  engine = Sampler.load(args.model, args.dtype, args.batch)
  make = prompts.maker("chat", engine.tokenizer)
  asked = [make(text, i) for i, text in enumerate(texts)]
  limits, sampling = Limits(args.max_new_tokens), Sampling(args.temperature)
  ids = engine.encode(asked)
  generate = lambda engine: engine.generate(asked, args.samples, sampling, limits)
  # Compiles everything at the same shapes: each sample ends with its first token.
  brief = dataclasses.replace(engine, end_tokens=frozenset(range(engine.tokenizer.vocab_size)))
  collections.deque(generate(brief), maxlen=0)
  steps = clocked(engine)
  before, start = products(engine, args.batch), time.perf_counter()
  tokens = sum(len(sample.tokens) for sample in generate(engine))
  seconds = time.perf_counter() - start
  after = products(engine, args.batch)  # the machine may have been busy the first time
  best = {name: min(ms, after[name]) for name, ms in before.items()}
  full = [b - a for (a, whole), (b, _) in itertools.pairwise(steps) if whole]
  rows = [{"what": "a step", "ms": 1e3 * float(np.median(full or [seconds]))}]
  rows += [{"what": name, "ms": ms} for name, ms in best.items()]
  rows.append({"what": "all products", "ms": sum(best.values())})
  return {
    "tokens": tokens,
    "seconds": seconds,
    "steps": len(steps),
    "step": rows,
    "ids": ids,
    "end_tokens": sorted(engine.end_tokens),
  }


def clocked(engine: Sampler) -> list[tuple[float, bool]]:
  """Returns a list that gets each step's start time and whether all slots are in use."""
  times, decode = [], engine.decode

  def clock(weights, cache, index, slots, *rest, **options):
    used = np.count_nonzero(slots.members < engine.batch)
    times.append((time.perf_counter(), used == engine.batch))
    return decode(weights, cache, index, slots, *rest, **options)

  vars(engine)["decode"] = clock
  return times


def products(engine: Sampler, B: int) -> dict[str, float]:
  """Returns a step's milliseconds in each kind of product, timed in its best dtype and layout."""
  layers, embedding = engine.weights["layers"], engine.weights["embedding"]
  kinds = ("query", "key", "value", "output", "gate", "up", "down")
  times = {name: len(layers) * product(B, *layers[0][name].shape) for name in kinds}
  return times | {"logits": product(B, *embedding.shape)}


def product(B: int, O: int, I: int) -> float:
  """Returns milliseconds of `[B, I]` times `[I, O]` in the fastest dtype and layout."""
  seconds = []
  layouts = {"BI,OI->BO": (O, I), "BI,IO->BO": (I, O)}
  for dtype, (equation, shape) in itertools.product(("float32", "bfloat16"), layouts.items()):
    x, matrix = jnp.ones((B, I), dtype), jnp.ones(shape, dtype)
    run = jax.jit(functools.partial(jnp.einsum, equation, preferred_element_type=jnp.float32))
    seconds.append(dtypes.fastest(functools.partial(run, x, matrix), 11))
  return 1e3 * min(seconds)


def peer_side(
  args: Args, cores: list[int], ids: list[list[int]], ends: list[int]
) -> tuple[list, dict, dict]:
  """Returns the peer's trial runs, its full run with the fastest settings, and versions."""
  settings = {
    "model": str(args.model.resolve()),
    "prompts": ids,
    "samples": args.samples,
    "temperature": args.temperature,
    "end_tokens": ends,
    "threads": args.threads,
  }
  few = {
    "prompts": min(TRIAL_PROMPTS, args.prompts),
    "max_new_tokens": min(TRIAL_TOKENS, args.max_new_tokens),
  }
  cases = itertools.product(args.peer_dtypes, args.peer_batches)
  trial = [{"dtype": dtype, "batch": batch} | few for dtype, batch in cases]
  side = functools.partial(runner.apart, runner.peer, args.peer_python, TRANSFORMERS, cores=cores)
  tried = side(settings | {"runs": trial})
  best = max(tried["runs"], key=lambda run: run["tokens"] / run["seconds"])
  whole = best | {"prompts": args.prompts, "max_new_tokens": args.max_new_tokens}
  (whole,) = side(settings | {"runs": [whole]})["runs"]
  return tried["runs"], whole, tried["versions"]
