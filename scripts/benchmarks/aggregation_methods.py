"""What scripts/benchmarks/aggregation.py measures: each method, and the data they share.

  python scripts/benchmarks/aggregation_methods.py CASES

runs cases given as JSON, `[[method, directory, problems, candidates, n], ...]`, and prints the
figures of each on a line.  aggregation.py starts it, pinned to one core, once for each case.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np

TRIALS = 400  # of OpenAI's evaluation
ANSWERS = 45  # distinct answers of a problem
PERMUTATIONS = 64  # of the votes by Monte-Carlo
RESAMPLES = 10_000
MAX_RSS = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss


class Case(NamedTuple):
  method: str
  directory: str  # of the data of this size
  problems: int
  candidates: int
  n: tuple[int, ...]

  def load(self, *names: str) -> list[np.ndarray]:
    return [np.load(f"{self.directory}/{name}.npy") for name in names]

  def save(self, **arrays: np.ndarray) -> None:
    for name, array in arrays.items():
      np.save(f"{self.directory}/{name}.npy", array)


def timed(call, most_seconds: float = 6, most: int = 11) -> tuple[object, dict]:
  """The call's result, and its seconds the first time and after, in CPU and on the clock."""
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  cpu, wall, result = [], [], None
  while len(cpu) < 2 or (len(cpu) <= most and sum(wall[1:]) < most_seconds):
    del result  # or two would be held at once
    start = time.perf_counter(), time.process_time()
    result = call()
    wall.append(time.perf_counter() - start[0])
    cpu.append(time.process_time() - start[1])
  return result, {
    "cpu_seconds": min(cpu[1:]),
    "cpu_seconds_median": float(np.median(cpu[1:])),
    "wall_seconds": min(wall[1:]),
    "wall_seconds_median": float(np.median(wall[1:])),
    "repetitions": len(cpu) - 1,
    "first_cpu_seconds": cpu[0],
    "first_wall_seconds": wall[0],
    "gb_before": before * MAX_RSS / 1e9,
    "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAX_RSS / 1e9,
  }


def data(case: Case) -> dict:
  """Scores like a verifier's probabilities, higher for right candidates; one in ten missing."""
  rng = np.random.default_rng(case.candidates)
  scores = np.empty((case.problems, case.candidates), np.float32)
  correct = np.empty(scores.shape, bool)
  valid = np.empty(scores.shape, bool)
  for p in range(case.problems):
    correct[p] = rng.random(case.candidates, np.float32) < rng.beta(1.2, 1.5)
    logits = 1.5 * (rng.standard_normal(case.candidates, np.float32) + correct[p])
    scores[p] = 1 / (1 + np.exp(-logits))
    valid[p] = rng.random(case.candidates, np.float32) < 0.9
  case.save(scores=scores, correct=correct, valid=valid)
  return {}


def answers(case: Case) -> dict:
  """Answer 0 is right; the wrong ones are as unequally popular as words are (Zipf)."""
  (correct,) = case.load("correct")
  popularity = 1 / np.arange(1, ANSWERS)
  wrong = np.random.default_rng(0).choice(
    ANSWERS - 1, correct.shape, p=popularity / popularity.sum()
  )
  case.save(answers=np.where(correct, 0, 1 + wrong))
  return {}


def exact(case: Case) -> dict:
  """What all others should give, in float64, ties shared; also for scores as bfloat16."""
  import ml_dtypes

  scores, correct, valid = case.load("scores", "correct", "valid")
  weights = depth_weights(case)
  right = correct & valid
  for dtype in (np.float32, ml_dtypes.bfloat16):
    curves = np.empty((case.problems, len(case.n)))
    for p in range(case.problems):
      score = np.where(valid[p], scores[p].astype(dtype).astype(np.float32), -1)
      order = np.argsort(-score)
      changes = np.flatnonzero(np.diff(score[order], prepend=np.inf))
      members = np.diff(changes, append=order.size)
      share = np.add.reduceat(right[p, order].astype(float), changes) / members
      curves[p] = weights @ np.repeat(share, members)
    case.save(**{"exact" if dtype is np.float32 else "exact_bfloat16": curves})
  return {}


def depth_weights(case: Case) -> np.ndarray:
  """float64 `[K, M]`: chance that the candidate at a depth is the best of N drawn."""
  n, m, d = np.array(case.n)[:, None], case.candidates, np.arange(case.candidates - 1)
  factors = np.concatenate([n / m, np.maximum(m - d - n, 0) / (m - 1 - d)], axis=1)
  return np.cumprod(factors, axis=1)


def loop(case: Case) -> dict:
  """As OpenAI's prm800k/eval/eval.py does it: each N shuffles anew and takes the first ones."""
  problems = max(1, min(case.problems, 100_000 // case.candidates))
  scores, correct, valid = (x[:problems].tolist() for x in case.load("scores", "correct", "valid"))
  pools = [
    [{"score": s, "correct": c, "valid": v} for s, c, v in zip(*pool)]
    for pool in zip(scores, correct, valid)
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
  return estimated(case, curves, 1, problems, start)


def numpy_trials(case: Case) -> dict:
  """One random order for all problems, whose candidates are in random order already; the best of
  each stretch between two N, then of all stretches up to one."""
  scores, correct, valid = case.load("scores", "correct", "valid")
  keys = np.ascontiguousarray(packed(scores, correct, valid).T)
  rng = np.random.default_rng(0)
  ends, column = np.unique(case.n, return_inverse=True)
  starts = np.concatenate([[0], ends[:-1]])
  trials = min(TRIALS, max(4, 400_000_000 // keys.size))
  right = np.zeros((len(ends), case.problems))
  start = time.perf_counter(), time.process_time()
  for _ in range(trials):
    best = np.maximum.reduceat(keys[rng.permutation(case.candidates)[: ends[-1]]], starts)
    right += np.maximum.accumulate(best) & 1
  return estimated(case, right[column].T / trials, trials, case.problems, start)


def estimated(case: Case, curves, trials: int, problems: int, start) -> dict:
  """Figures of random trials: to 400 trials of all problems in proportion."""
  wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
  case.save(**{case.method: curves})
  factor = TRIALS / trials * case.problems / problems
  return {
    "cpu_seconds": cpu * factor,
    "wall_seconds": wall * factor,
    "measured_cpu_seconds": cpu,
    "measured_trials": trials,
    "measured_problems": problems,
    "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAX_RSS / 1e9,
  }


def packed(scores, correct, valid) -> np.ndarray:
  """int32 that sort as scores of 0..1 do, the label in the last bit; 0 where missing."""
  return np.where(valid, (scores.view(np.int32) + 1 << 1) | correct, 0)


def numpy_sort(case: Case) -> dict:
  arrays = case.load("scores", "correct", "valid")
  weights = depth_weights(case)[:, ::-1].T.astype(np.float32)

  def call():
    keys = packed(*arrays)
    keys.sort(axis=1)
    return (keys & 1).astype(np.float32) @ weights

  return kept(case, *timed(call))


def numpy_argsort(case: Case) -> dict:
  scores, correct, valid = case.load("scores", "correct", "valid")
  weights = depth_weights(case)[:, ::-1].T.astype(np.float32)

  def call():
    order = np.argsort(np.where(valid, scores, -1), axis=1)
    return np.take_along_axis(correct & valid, order, axis=1).astype(np.float32) @ weights

  return kept(case, *timed(call))


def library(case: Case) -> dict:
  from prm_jax import aggregation as agg

  arrays = case.load("scores", "correct", "valid")
  return kept(case, *timed(lambda: np.asarray(agg.best_of_n(*arrays, n=case.n))))


def library_bfloat16(case: Case) -> dict:
  import ml_dtypes

  from prm_jax import aggregation as agg

  scores, correct, valid = case.load("scores", "correct", "valid")
  scores = scores.astype(ml_dtypes.bfloat16)
  return kept(case, *timed(lambda: np.asarray(agg.best_of_n(scores, correct, valid, n=case.n))))


def library_all_n(case: Case) -> dict:
  from prm_jax import aggregation as agg

  arrays = case.load("scores", "correct", "valid")
  curves, figures = timed(lambda: np.asarray(agg.best_of_n(*arrays)))
  if case.candidates <= 10_000:
    case.save(all_n=curves)
  return kept(case, curves[:, np.array(case.n) - 1], figures)


def library_jit(case: Case) -> dict:
  import jax

  from prm_jax import aggregation as agg

  arrays = case.load("scores", "correct", "valid")
  traced = jax.jit(lambda *arrays: agg.best_of_n(*arrays, n=case.n))
  return kept(case, *timed(lambda: np.asarray(traced(*arrays))))


def kept(case: Case, curves, figures: dict) -> dict:
  case.save(**{case.method: curves})
  return figures


def majority(case: Case) -> dict:
  from prm_jax import aggregation as agg

  arrays = case.load("answers", "correct", "valid")
  curves, figures = timed(lambda: agg.exact_majority(*arrays, n=case.n))
  case.save(majority=curves)
  return figures | {"curve": curves.mean(axis=0).tolist()}


def majority_trials(case: Case) -> dict:
  return vote(case, *case.load("answers", "correct", "valid"))


def weighted(case: Case) -> dict:
  arrays = case.load("answers", "correct", "valid")
  weights, control = case.load("scores", "majority")
  return vote(case, *arrays, weights=weights, control=control)


def vote(case: Case, *arrays, **options) -> dict:
  import jax

  from prm_jax import aggregation as agg

  options |= {"key": jax.random.key(0), "permutations": PERMUTATIONS, "num_answers": ANSWERS}
  (mean, error), figures = timed(
    lambda: jax.block_until_ready(agg.majority_vote(*arrays, n=case.n, **options))
  )
  error = np.sqrt((np.asarray(error, np.float64) ** 2).sum(axis=0)) / case.problems
  curve = np.asarray(mean).mean(axis=0)
  return figures | {"curve": curve.tolist(), "standard_error": error.tolist()}


def jackknife(case: Case) -> dict:
  from prm_jax import aggregation as agg

  arrays = case.load("scores", "correct", "valid")
  return timed(lambda: np.asarray(agg.generation_error(*arrays, n=case.n)))[1]


def band(case: Case) -> dict:
  import jax

  from prm_jax import aggregation as agg

  (curves,) = case.load("all_n")
  (_, _, critical), figures = timed(
    lambda: jax.block_until_ready(
      agg.simultaneous_band(curves, jax.random.key(0), resamples=RESAMPLES)
    )
  )
  return figures | {"critical": float(critical)}


def steps_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
  """log P(right) of 3 to 21 steps of each solution, end to end, and whose steps they are."""
  rng = np.random.default_rng(0)
  solutions = case.problems * case.candidates
  ids = np.repeat(np.arange(solutions), rng.integers(3, 22, solutions))
  return np.log(rng.beta(5, 1, ids.size)).astype(np.float32), ids


def reduce_steps(case: Case) -> dict:
  from prm_jax import aggregation as agg

  steps, ids = steps_of(case)
  scores, figures = timed(
    lambda: np.asarray(agg.reduce_steps(steps, ids, int(ids[-1]) + 1, agg.REDUCTIONS))
  )
  case.save(reduce_steps=scores)
  return figures | {"samples": ids.size}


def numpy_steps(case: Case) -> dict:
  """product, min, mean, last and soft-min; all solutions have steps, in order."""
  steps, ids = steps_of(case)

  def call():
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    count = np.diff(starts, append=ids.size)
    probability = np.exp(steps)
    weakest = np.minimum.reduceat(steps, starts)
    weight = np.exp((np.repeat(np.exp(weakest), count) - probability) / np.float32(0.1))
    soft = np.add.reduceat(probability * weight, starts) / np.add.reduceat(weight, starts)
    mean = np.log(np.add.reduceat(probability, starts) / count)
    product = np.add.reduceat(steps, starts)
    return np.stack([product, weakest, mean, steps[starts + count - 1], np.log(soft)])

  scores, figures = timed(call)
  (library,) = case.load("reduce_steps")
  return figures | {"samples": ids.size, "difference": float(np.abs(scores - library).max())}


def import_time(case: Case) -> dict:
  code = (
    "import time; start = time.perf_counter(); import prm_jax.aggregation; "
    "print(time.perf_counter() - start, time.process_time())"
  )
  runs = [
    [float(x) for x in subprocess.check_output([sys.executable, "-c", code]).split()]
    for _ in range(2)
  ]
  return {"wall_seconds": min(r[0] for r in runs), "cpu_seconds": min(r[1] for r in runs)}


METHODS = {
  function.__name__: function
  for function in (
    data, answers, exact, loop, numpy_trials, numpy_sort, numpy_argsort, library, library_bfloat16,
    library_all_n, library_jit, majority, majority_trials, weighted, jackknife, band, reduce_steps,
    numpy_steps,
  )
} | {"import": import_time}  # fmt: skip


def main() -> None:
  for method, directory, problems, candidates, n in json.loads(sys.argv[1]):
    start = time.perf_counter()
    figures = METHODS[method](Case(method, directory, problems, candidates, tuple(n)))
    print(json.dumps({"took": time.perf_counter() - start, **figures}), flush=True)


if __name__ == "__main__":
  main()
