"""Measures a reward model behind HTTP beside the same model without a server, on the CPU.

The model has the shape of --model, with fewer layers, and random weights.  The client sends 2,048
solutions of 128 arithmetic problems, two per request, over 1, 64 and 1,000 connections to a server
in its own process.  `Scorer.by_head`, which score.py calls, reads all of them at once.  Compilation
is not timed.  Client and server share the processor.

Target: with 64 connections, the server scores at least half as many solutions a second as
`Scorer.by_head`.  Takes 2 minutes.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import multiprocessing.connection
import pathlib
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import aiohttp
import jax
import numpy as np

from benchmarks import runner, search
from prm_jax.scoring import service

CONNECTIONS = (1, 64, 1000)
EACH = 2  # solutions per request


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  model: pathlib.Path = pathlib.Path("models/smollm2-135m")  # gives the shape and the tokenizer
  layers: int = 4  # number of the model's first layers to use
  repeats: int = 3


def run(args: Args) -> dict:
  """Scores all solutions with and without a server."""
  bodies = requests(args)
  direct = runner.apart(without, args, JAX_PLATFORMS="cpu")
  spawn = multiprocessing.get_context("spawn")
  ours, theirs = spawn.Pipe()
  server = spawn.Process(target=serve, args=(args, theirs))
  server.start()
  theirs.close()  # so that `ours` ends when the server dies
  try:
    url = ours.recv()
    rows = [asyncio.run(ask(args, server, url, bodies, count)) for count in CONNECTIONS]
  finally:
    ours.close()
    server.join()
  for row in rows:
    row["times score.py"] = row["solutions/s"] / direct["solutions/s"]
  share = rows[CONNECTIONS.index(64)]["times score.py"]
  return {
    "targets": [runner.target("solutions/s with 64 connections, times score.py", ">=", 0.5, share)],
    "tables": {"Scores over HTTP": [direct, *rows]},
  }


def solutions(args: Args) -> list[tuple[str, tuple[str, ...]]]:
  """Returns problem and steps of the solutions, 16 of each problem."""
  return [*itertools.chain(*search.generated(8 if args.quick else 128))]


def requests(args: Args) -> list[bytes]:
  """Returns the bodies of the requests; those of a problem are adjacent, as a policy sends them."""
  lines = [{"problem": problem, "steps": steps} for problem, steps in solutions(args)]
  bodies = [lines[i : i + EACH] for i in range(0, len(lines), EACH)]
  return [json.dumps({"solutions": body}).encode() for body in bodies]


def without(args: Args) -> dict:
  """Returns the table row of `Scorer.by_head`."""
  scorer, asked = search.random_scorer(args), solutions(args)
  (seconds,) = search.medians({"": lambda: scorer.by_head(asked)}, args.repeats).values()
  return {"connections": "score.py", "solutions/s": len(asked) / seconds}


def serve(args: Args, ready: multiprocessing.connection.Connection) -> None:
  """Serves the model until the other end of `ready` closes."""
  jax.config.update("jax_platforms", "cpu")
  listener = service.listen("127.0.0.1", 0)
  served = service.Service(search.random_scorer(args), "benchmark")

  def until_closed() -> None:
    with contextlib.suppress(EOFError):
      ready.recv()
    served.stop()

  ready.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
  threading.Thread(target=until_closed, daemon=True).start()
  asyncio.run(served.serve(listener))


async def ask(
  args: Args, server: multiprocessing.Process, url: str, bodies: list[bytes], count: int
) -> dict:
  """Returns the table row of `count` connections."""
  while server.is_alive():
    try:
      urllib.request.urlopen(f"{url}/health").close()
      break
    except urllib.error.URLError:  # the server is still loading the model
      await asyncio.sleep(0.2)
  bodies, rates, times = bodies[: 64 * count], [], []  # few connections are slow
  async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=count)) as session:

    async def work(left: Iterator[bytes]) -> None:
      for body in left:
        start = time.perf_counter()
        async with session.post(f"{url}/score", data=body) as response:
          response.raise_for_status()
          await response.read()
        times.append(time.perf_counter() - start)

    for _ in range(1 + (1 if args.quick else args.repeats)):  # the first compiles
      times.clear()
      left, start = iter(bodies), time.perf_counter()
      await asyncio.gather(*(work(left) for _ in range(count)))
      rates.append(len(bodies) / (time.perf_counter() - start))
  rate = statistics.median(rates[1:])
  return {
    "connections": count,
    "solutions/s": EACH * rate,
    "requests/s": rate,
    "median ms": 1e3 * statistics.median(times),
    "99th percentile ms": 1e3 * float(np.percentile(times, 99)),
  }
