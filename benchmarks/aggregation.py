"""The aggregator beside a Python loop and numpy, on the same generated candidates.

Each method runs in a process of its own on one core, so that its memory is its own too.  Targets,
at 500 problems x 1,860 candidates and 14 values of N: `best_of_n` at least 50,000 times cheaper
than the Python loop of OpenAI's evaluation and at most twice numpy's leanest sort; every N at most
1.5 times as expensive as 14; `exact_majority` under 5 s.  Takes 6 minutes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

from benchmarks import runner

N = (1, 2, 5, 10, 25, 50, 100, 200, 400, 600, 800, 1000, 1400, 1860)
SIZES = ((500, 1860), (500, 100_000), (100, 1_000_000))
QUICK_N, QUICK_SIZES = (1, 4, 32, 300), ((20, 300), (10, 1200))
TRIALS = 400  # random trials of OpenAI's evaluation
ANSWERS = 45  # distinct answers to a problem
PERMUTATIONS, RESAMPLES = 64, 10_000
ONE_THREAD = {
  "JAX_COMPILATION_CACHE_DIR": None,  # compilation is part of the first call
  "JAX_PLATFORMS": "cpu",
  "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
  **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
Call = Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
  """A size of the problem, and the folder of its arrays and results."""

  directory: str
  problems: int
  candidates: int
  n: tuple[int, ...]

  def load(self, *names: str, mode: str | None = None) -> list[np.ndarray]:
    return [np.load(f"{self.directory}/{name}.npy", mmap_mode=mode) for name in names]

  def save(self, **arrays: np.ndarray) -> None:
    for name, array in arrays.items():
      np.save(f"{self.directory}/{name}.npy", array)


def run(args: runner.Common) -> dict:
  """Measures every method at every size."""
  ns, sizes = (QUICK_N, QUICK_SIZES) if args.quick else (N, SIZES)
  found = []
  for place, (problems, candidates) in enumerate(sizes):
    names = ["data", *BEST_OF_N, *OTHERS] if place == 0 else ["data", *BEST_OF_N]
    if place == len(sizes) - 1:
      names.remove("best_of_n_jit")  # for time
    with tempfile.TemporaryDirectory() as directory:
      case, figures = Case(directory, problems, candidates, ns), {}
      for group in [names] if args.quick else [[name] for name in names]:
        runner.say(f"{problems} x {candidates}: {' '.join(group)}")
        cores = runner.usable_cores()[-1:]
        figures |= runner.apart(measure, case, group, cores=cores, **ONE_THREAD)
      compare(figures, case)
    found.append((case, figures))
  tables = {}
  for case, figures in found:
    title = f"{case.problems} x {case.candidates:,}, {len(ns)} values of N in 1..{ns[-1]}"
    tables[title] = [{"method": name} | figures[name] for name in BEST_OF_N if name in figures]
  case, figures = found[0]
  title = f"Votes, errors, steps: {case.problems} x {case.candidates:,}"
  tables[title] = [{"method": name} | figures[name] for name in OTHERS]
  return {"targets": targets(found), "tables": tables}


def measure(case: Case, names: list[str]) -> dict[str, dict]:
  """The figures of some methods at one size, in the process that calls this."""
  figures = {}
  for name in names:
    method = ({"data": data} | BEST_OF_N | OTHERS)[name](case)
    figures[name] = timed(case, name, method) if callable(method) else method
  return figures


def timed(case: Case, name: str, call: Call, most_seconds: float = 6, most: int = 11) -> dict:
  """The best seconds of several repetitions, and those of the first call; keeps the result."""
  before = peak_gb()
  cpu, wall, result = [], [], None
  while len(cpu) < 2 or (len(cpu) <= most and sum(wall[1:]) < most_seconds):
    del result  # or two results would be held at once
    start = time.perf_counter(), time.process_time()
    result = call()
    wall.append(time.perf_counter() - start[0])
    cpu.append(time.process_time() - start[1])
  peak = peak_gb()
  case.save(**{name: result})
  figures = {"CPU s": min(cpu[1:]), "s": min(wall[1:]), "first call s": wall[0]}
  return figures | {"peak GB": peak, "GB before the call": before}


def peak_gb() -> float:
  """Highest resident memory of this process."""
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def data(case: Case) -> dict:
  """Writes candidates, one in ten missing, and their float64 curves, ties shared.

  Scores are like a verifier's probabilities.  Answer 0 is right; the wrong ones are as unequally
  popular as words are (Zipf).
  """
  import ml_dtypes

  rng = np.random.default_rng(case.candidates)
  scores = np.empty((case.problems, case.candidates), np.float32)
  correct, valid = np.empty(scores.shape, bool), np.empty(scores.shape, bool)
  for p in range(case.problems):
    correct[p] = rng.random(case.candidates, np.float32) < rng.beta(1.2, 1.5)
    logits = 1.5 * (rng.standard_normal(case.candidates, np.float32) + correct[p])
    scores[p] = 1 / (1 + np.exp(-logits))
    valid[p] = rng.random(case.candidates, np.float32) < 0.9
  case.save(scores=scores, correct=correct, valid=valid)
  if case.candidates < 10_000:
    popularity = 1 / np.arange(1, ANSWERS)
    wrong = np.random.default_rng(0).choice(
      ANSWERS - 1, correct.shape, p=popularity / popularity.sum()
    )
    case.save(answers=np.where(correct, 0, 1 + wrong))
  weights, right = depth_weights(case), correct & valid
  for name, dtype in (("exact", np.float32), ("exact_bfloat16", ml_dtypes.bfloat16)):
    curves = np.empty((case.problems, len(case.n)))
    for p in range(case.problems):
      score = np.where(valid[p], scores[p].astype(dtype).astype(np.float32), -1)
      order = np.argsort(-score)
      changes = np.flatnonzero(np.diff(score[order], prepend=np.inf))
      members = np.diff(changes, append=order.size)
      share = np.add.reduceat(right[p, order].astype(float), changes) / members
      curves[p] = weights @ np.repeat(share, members)
    case.save(**{name: curves})
  return {}


def depth_weights(case: Case) -> np.ndarray:
  """float64 `[K, M]`: the chance that the candidate at a depth is the best of N drawn."""
  n, m, d = np.array(case.n)[:, None], case.candidates, np.arange(case.candidates - 1)
  factors = np.concatenate([n / m, np.maximum(m - d - n, 0) / (m - 1 - d)], axis=1)
  return np.cumprod(factors, axis=1)


def loop(case: Case) -> dict:
  """As OpenAI's prm800k/eval/eval.py: each N shuffles anew and takes the first N candidates."""
  problems = max(1, min(case.problems, 100_000 // case.candidates))
  arrays = (x[:problems].tolist() for x in case.load("scores", "correct", "valid"))
  pools = [
    [{"score": s, "correct": c, "valid": v} for s, c, v in zip(*pool)] for pool in zip(*arrays)
  ]
  shuffle = random.Random(0).shuffle
  curves = np.zeros((problems, len(case.n)))
  start = time.perf_counter(), time.process_time()
  for k, n in enumerate(case.n):
    for p, samples in enumerate(pools):
      shuffle(samples)
      drawn = [sample for sample in samples[:n] if sample["valid"]]
      if drawn:
        curves[p, k] = max(drawn, key=lambda sample: sample["score"])["correct"]
  return extrapolated(case, "loop", curves, 1, start)


def numpy_trials(case: Case) -> dict:
  """One random order for all problems, no longer than the largest N."""
  keys = np.ascontiguousarray(packed(*case.load("scores", "correct", "valid")).T)
  rng = np.random.default_rng(0)
  ends, column = np.unique(case.n, return_inverse=True)
  starts = np.concatenate([[0], ends[:-1]])
  trials = min(TRIALS, max(4, 400_000_000 // keys.size))
  right = np.zeros((len(ends), case.problems))
  start = time.perf_counter(), time.process_time()
  for _ in range(trials):
    best = np.maximum.reduceat(keys[rng.permutation(case.candidates)[: ends[-1]]], starts)
    right += np.maximum.accumulate(best) & 1
  return extrapolated(case, "numpy_trials", right[column].T / trials, trials, start)


def extrapolated(case: Case, name: str, curves: np.ndarray, trials: int, start: tuple) -> dict:
  """Figures of 400 trials of all problems, in proportion to those that were run.

  "error" is the standard error of 400 trials; "off" the largest distance of the mean curve from
  the exact one, in standard errors of the trials that were run.
  """
  wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
  (exact,) = case.load("exact")
  variance = (exact * (1 - exact)).mean(axis=0) / case.problems
  expected = exact[: len(curves)]
  noise = np.sqrt((expected * (1 - expected)).mean(axis=0) / len(curves) / trials)
  off = np.abs(curves.mean(axis=0) - expected.mean(axis=0)) / np.maximum(noise, 1e-9)
  factor = TRIALS / trials * case.problems / len(curves)
  return {
    "CPU s": cpu * factor,
    "s": wall * factor,
    "peak GB": peak_gb(),
    "run": f"{trials} x {len(curves)}",
    "error": f"SE {np.sqrt(variance.max() / TRIALS):.1e}",
    "off": float(off.max()),
  }


def packed(scores, correct, valid) -> np.ndarray:
  """int32 that sort as scores of 0..1 do, with the label in the last bit; 0 where missing."""
  return np.where(valid, (scores.view(np.int32) + 1 << 1) | correct, 0)


def numpy_exact(case: Case, argsort: bool) -> Call:
  """The formula of `best_of_n` at its leanest; its weights are prepared and not timed."""
  scores, correct, valid = case.load("scores", "correct", "valid")
  weights = depth_weights(case)[:, ::-1].T.astype(np.float32)

  def call():
    if argsort:
      order = np.argsort(np.where(valid, scores, -1), axis=1)
      right = np.take_along_axis(correct & valid, order, axis=1)
    else:
      right = packed(scores, correct, valid)
      right.sort(axis=1)
      right &= 1
    return right.astype(np.float32) @ weights

  return call


def best_of_n(case: Case, dtype: str = "float32", jit: bool = False, every: bool = False) -> Call:
  import jax
  import jax.numpy as jnp

  from prm_jax import aggregation as agg

  scores, correct, valid = case.load("scores", "correct", "valid")
  scores = scores.astype(jnp.dtype(dtype))
  function = functools.partial(agg.best_of_n, n=None if every else case.n)
  function = jax.jit(function) if jit else function
  return lambda: np.asarray(function(scores, correct, valid))


def majority(case: Case) -> Call:
  from prm_jax import aggregation as agg

  arrays = case.load("answers", "correct", "valid")
  return lambda: agg.exact_majority(*arrays, n=case.n)


def vote(case: Case, weighted: bool) -> Call:
  import jax

  from prm_jax import aggregation as agg

  arrays = case.load("answers", "correct", "valid")
  options = {"key": jax.random.key(0), "permutations": PERMUTATIONS, "num_answers": ANSWERS}
  if weighted:
    options["weights"], options["control"] = case.load("scores", "exact_majority")
  return lambda: np.asarray(agg.majority_vote(*arrays, n=case.n, **options))


def jackknife(case: Case) -> Call:
  from prm_jax import aggregation as agg

  arrays = case.load("scores", "correct", "valid")
  return lambda: np.asarray(agg.generation_error(*arrays, n=case.n))


def band(case: Case) -> Call:
  import jax

  from prm_jax import aggregation as agg

  (curves,) = case.load("best_of_n_all")
  key = jax.random.key(0)
  return lambda: np.asarray(agg.simultaneous_band(curves, key, resamples=RESAMPLES)[0])


def steps_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
  """log P(right) of the 3 to 21 steps of each solution, end to end, and their solutions."""
  rng, solutions = np.random.default_rng(0), case.problems * case.candidates
  ids = np.repeat(np.arange(solutions), rng.integers(3, 22, solutions))
  return np.log(rng.beta(5, 1, ids.size)).astype(np.float32), ids


def reduce_steps(case: Case) -> Call:
  from prm_jax import aggregation as agg

  steps, ids = steps_of(case)
  return lambda: np.asarray(agg.reduce_steps(steps, ids, int(ids[-1]) + 1, agg.REDUCTIONS))


def numpy_steps(case: Case) -> Call:
  """product, min, mean, last and soft-min; every solution has steps, and they are in order."""
  steps, ids = steps_of(case)

  def call():
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    count = np.diff(starts, append=ids.size)
    probability, weakest = np.exp(steps), np.minimum.reduceat(steps, starts)
    weight = np.exp((np.repeat(np.exp(weakest), count) - probability) / np.float32(0.1))
    soft = np.add.reduceat(probability * weight, starts) / np.add.reduceat(weight, starts)
    mean = np.log(np.add.reduceat(probability, starts) / count)
    product = np.add.reduceat(steps, starts)
    return np.stack([product, weakest, mean, steps[starts + count - 1], np.log(soft)])

  return call


def import_time(case: Case) -> dict:
  code = (
    "import time; start = time.perf_counter(); import prm_jax.aggregation; "
    "print(time.perf_counter() - start, time.process_time())"
  )
  command = [sys.executable, "-c", code]
  runs = [
    [float(x) for x in subprocess.check_output(command, cwd=runner.ROOT).split()] for _ in range(2)
  ]
  return {"CPU s": min(cpu for _, cpu in runs), "s": min(wall for wall, _ in runs)}


# Each makes a call to be timed, or times itself.
BEST_OF_N = {
  "loop": loop,
  "numpy_trials": numpy_trials,
  "numpy_argsort": functools.partial(numpy_exact, argsort=True),
  "numpy_sort": functools.partial(numpy_exact, argsort=False),
  "best_of_n": best_of_n,
  "best_of_n_bfloat16": functools.partial(best_of_n, dtype="bfloat16"),
  "best_of_n_jit": functools.partial(best_of_n, jit=True),
  "best_of_n_all": functools.partial(best_of_n, every=True),
}
OTHERS = {
  "exact_majority": majority,
  f"majority_vote, {PERMUTATIONS} orders": functools.partial(vote, weighted=False),
  "the same with weights and control": functools.partial(vote, weighted=True),
  "generation_error": jackknife,
  f"simultaneous_band, every N, {RESAMPLES} resamples": band,
  "reduce_steps, five reductions": reduce_steps,
  "numpy reduceat, the same five": numpy_steps,
  "import prm_jax.aggregation": import_time,
}


def compare(figures: dict, case: Case) -> None:
  """Adds ratios, and the largest error of any problem, to the figures of `BEST_OF_N`."""
  (exact, rounded), library = case.load("exact", "exact_bfloat16"), figures["best_of_n"]["CPU s"]
  for name in BEST_OF_N.keys() & figures.keys():
    about = figures[name]
    about["CPU ns a candidate"] = about["CPU s"] / case.candidates / case.problems * 1e9
    about["CPU / best_of_n"] = about["CPU s"] / library
    if "error" not in about:
      (curves,) = case.load(name, mode="r")
      if curves.shape[1] == case.candidates:
        curves = curves[:, np.array(case.n) - 1]
      expected = rounded if name == "best_of_n_bfloat16" else exact
      about["error"] = float(np.abs(curves - expected).max())


def targets(found: list[tuple[Case, dict]]) -> list[dict]:
  (case, first), (last_case, last) = found[0], found[-1]
  cpu = {name: figures["CPU s"] for name, figures in first.items() if figures}
  growth = last["best_of_n"]["CPU s"] / last_case.problems / (cpu["best_of_n"] / case.problems)
  exponent = math.log(growth) / math.log(last_case.candidates / case.candidates)
  errors = [
    figures[name]["error"] for _, figures in found for name in figures if "best_of_n" in name
  ]
  at, largest = (f"{x.problems} x {x.candidates:,}" for x in (case, last_case))
  ratio = lambda a, b: cpu[a] / cpu[b]
  few, own, exact = len(case.n), first["best_of_n"], first["exact_majority"]
  peak = f"peak GB of best_of_n, {few} N, {largest}, inputs included"
  imported = first["import prm_jax.aggregation"]["s"]
  rows = (
    (f"Python loop / best_of_n, {at}, CPU", ">=", 5e4, ratio("loop", "best_of_n")),
    (f"best_of_n / numpy packed sort, {at}, CPU", "<=", 2, ratio("best_of_n", "numpy_sort")),
    (f"every N / {few} N, {at}, CPU", "<=", 1.5, ratio("best_of_n_all", "best_of_n")),
    (f"exponent of CPU time in M, {at} to {largest}", "<=", 1.1, exponent),
    (peak, "<", 2.5, last["best_of_n"]["peak GB"]),
    ("largest error of one problem, all sizes", "<", 1e-6, max(errors)),
    (f"exact_majority, {at}, CPU s", "<", 5, exact["CPU s"]),
    ("first call of best_of_n, s", "<", 3, own["first call s"]),
    ("first call of exact_majority, s", "<", 10, exact["first call s"]),
    ("import prm_jax.aggregation, s", "<", 1.5, imported),
  )
  return [runner.target(*row) for row in rows]
