"""Measures the aggregator beside a Python loop and numpy, on the same generated candidates.

Each method runs in its own process on one core, so that its memory is measured alone.  Targets, at
500 problems x 1,860 candidates and 14 values of N: `best_of_n` takes at most a 50,000th of the CPU
time of OpenAI's Python loop and at most twice that of numpy's leanest sort; every N takes at most
1.5 times as long as 14; `majority_vote` takes under 5 s.  Takes 3 minutes.
"""

import pathlib
import random
import tempfile
import time
from collections.abc import Callable

import numpy as np

from benchmarks import runner
from prm_jax.runtime import processes

N = (1, 2, 5, 10, 25, 50, 100, 200, 400, 600, 800, 1000, 1400, 1860)
SIZES = ((500, 1860), (100, 1_000_000))
QUICK_N, QUICK_SIZES = (1, 4, 32, 300), ((20, 300), (10, 1200))
TRIALS = 400  # random trials of OpenAI's evaluation
ANSWERS = 45  # distinct answers to a problem
ONE_THREAD = {
  "JAX_ENABLE_COMPILATION_CACHE": "false",  # compilation is part of the first call
  "JAX_PLATFORMS": "cpu",
  "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
  **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
METHODS = ("Python loop", "numpy sort", "best_of_n", "best_of_n, every N", "majority_vote")


def run(args: runner.Common) -> dict:
  """Measures every method at every size, except the exact vote: only at the first size."""
  ns, measured, tables = QUICK_N if args.quick else N, [], {}
  for problems, candidates in QUICK_SIZES if args.quick else SIZES:
    with tempfile.TemporaryDirectory() as directory:
      runner.apart(generate, directory, problems, candidates, ns)
      figures = {}
      for name in METHODS[: -1 if measured else None]:
        runner.say(f"{problems} x {candidates}: {name}")
        cores = processes.usable_cores()[-1:]
        figures[name] = runner.apart(measure, name, directory, ns, cores=cores, **ONE_THREAD)
    measured.append(figures)
    title = f"{problems} x {candidates:,}, {len(ns)} values of N in 1..{ns[-1]}"
    tables[title] = [{"method": name} | row for name, row in figures.items()]
  return {"targets": targets(*measured, len(ns)), "tables": tables}


def generate(directory: str, problems: int, candidates: int, ns: tuple[int, ...]) -> None:
  """Writes candidates, one in ten of them missing, and their exact float64 curves, ties shared.

  Scores are like a verifier's probabilities.  Answer 0 is right; the popularity of wrong answers
  follows Zipf's law.
  """
  rng, shape = np.random.default_rng(candidates), (problems, candidates)
  scores, correct, valid = (np.empty(shape, dtype) for dtype in (np.float32, bool, bool))
  exact, weights = np.empty((problems, len(ns))), depth_weights(candidates, ns)
  for p in range(problems):
    correct[p] = rng.random(candidates, np.float32) < rng.beta(1.2, 1.5)
    logits = 1.5 * (rng.standard_normal(candidates, np.float32) + correct[p])
    scores[p] = 1 / (1 + np.exp(-logits))
    valid[p] = rng.random(candidates, np.float32) < 0.9
    score = np.where(valid[p], scores[p], -1)
    order = np.argsort(-score)
    changes = np.flatnonzero(np.diff(score[order], prepend=np.inf))
    members = np.diff(changes, append=order.size)
    share = np.add.reduceat((correct & valid)[p, order].astype(float), changes) / members
    exact[p] = weights @ np.repeat(share, members)
  arrays = {"scores": scores, "correct": correct, "valid": valid, "exact": exact}
  if candidates < 10_000:
    popularity = 1 / np.arange(1, ANSWERS)
    wrong = 1 + rng.choice(ANSWERS - 1, shape, p=popularity / popularity.sum())
    arrays["answers"] = np.where(correct, 0, wrong)
  for name, array in arrays.items():
    np.save(f"{directory}/{name}.npy", array)


def depth_weights(candidates: int, ns: tuple[int, ...]) -> np.ndarray:
  """Returns float64 `[K, M]`: the probability that the candidate at a depth is the best of N."""
  n, m, d = np.array(ns)[:, None], candidates, np.arange(candidates - 1)
  factors = np.concatenate([n / m, np.maximum(m - d - n, 0) / (m - 1 - d)], axis=1)
  return np.cumprod(factors, axis=1)


def measure(name: str, directory: str, ns: tuple[int, ...]) -> dict:
  """Returns a row of the table: seconds of the fastest of several calls and of the first call.

  "error" is the largest difference of any problem's curve from the exact one in float64.
  """
  load = lambda *names: [np.load(pathlib.Path(directory, f"{x}.npy")) for x in names]
  arrays = load("scores", "correct", "valid")
  if name == "Python loop":
    return loop(arrays, ns)
  call = numpy_sort(arrays, ns) if name == "numpy sort" else library(name, arrays, ns, load)
  cpu, wall, result = [], [], None
  while len(cpu) < 2 or (len(cpu) <= 11 and sum(wall[1:]) < 6):
    del result  # or the peak would hold two results
    start = time.perf_counter(), time.process_time()
    result = call()
    wall.append(time.perf_counter() - start[0])
    cpu.append(time.process_time() - start[1])
  row = {"CPU s": min(cpu[1:]), "s": min(wall[1:]), "first call s": wall[0]}
  row["peak GB"] = runner.peak_gb()
  if name == "majority_vote":
    return row
  curves = result[:, np.array(ns) - 1] if "every" in name else result
  return row | {"error": float(np.abs(curves - load("exact")[0]).max())}


def loop(arrays: list[np.ndarray], ns: tuple[int, ...]) -> dict:
  """Measures a trial of OpenAI's prm800k/eval/eval.py, extrapolated to 400 trials of all problems.

  Each N shuffles again and takes the first N candidates.
  """
  problems = max(1, min(len(arrays[0]), 100_000 // arrays[0].shape[1]))
  keys = ("score", "correct", "valid")
  pools = [
    [dict(zip(keys, each)) for each in zip(*pool)]
    for pool in zip(*(array[:problems].tolist() for array in arrays))
  ]
  shuffle, right = random.Random(0).shuffle, 0
  start = time.perf_counter(), time.process_time()
  for n in ns:
    for samples in pools:
      shuffle(samples)
      drawn = [sample for sample in samples[:n] if sample["valid"]]
      right += bool(drawn) and max(drawn, key=lambda sample: sample["score"])["correct"]
  wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
  factor = TRIALS * len(arrays[0]) / problems
  return {"CPU s": cpu * factor, "s": wall * factor, "run": f"1 trial of {problems} problems"}


def numpy_sort(arrays: list[np.ndarray], ns: tuple[int, ...]) -> Callable[[], np.ndarray]:
  """Returns a function with `best_of_n`'s formula in numpy: weights not timed, ties not shared."""
  scores, correct, valid = arrays
  weights = depth_weights(scores.shape[1], ns)[:, ::-1].T.astype(np.float32)

  def call():
    # int32 in the order of the scores in 0..1, with the label in the last bit; 0 if missing
    packed = np.where(valid, (scores.view(np.int32) + 1 << 1) | correct, 0)
    packed.sort(axis=1)
    return (packed & 1).astype(np.float32) @ weights

  return call


def library(name: str, arrays, ns, load) -> Callable[[], np.ndarray]:
  from prm_jax import aggregation as agg

  if name == "majority_vote":
    answers = load("answers")
    return lambda: agg.majority_vote(*answers, *arrays[1:], n=ns)[0]
  return lambda: np.asarray(agg.best_of_n(*arrays, n=None if "every" in name else ns))


def targets(first: dict, last: dict, few: int) -> list[dict]:
  """Returns the targets, from the figures of both sizes and the number of values of N."""
  cpu = {name: row["CPU s"] for name, row in first.items()}
  small, exact, large = first["best_of_n"], first["majority_vote"], last["best_of_n"]
  errors = [row["error"] for figures in (first, last) for x, row in figures.items() if "best" in x]
  rows = (
    ("Python loop / best_of_n, CPU", ">=", 5e4, cpu["Python loop"] / cpu["best_of_n"]),
    ("best_of_n / numpy packed sort, CPU", "<=", 2, cpu["best_of_n"] / cpu["numpy sort"]),
    (f"every N / {few} N, CPU", "<=", 1.5, cpu["best_of_n, every N"] / cpu["best_of_n"]),
    ("peak GB of best_of_n, larger size, inputs included", "<", 2.5, large["peak GB"]),
    ("largest error of one problem, both sizes", "<", 1e-6, max(errors)),
    ("majority_vote, CPU s", "<", 5, exact["CPU s"]),
    ("first call of best_of_n, s", "<", 3, small["first call s"]),
    ("first call of majority_vote, s", "<", 10, exact["first call s"]),
  )
  return [runner.target(*row) for row in rows]
