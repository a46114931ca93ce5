"""Error bars over problems: would another set of problems like these say the same?"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

BATCH = 256  # resamples drawn at once


@functools.partial(jax.jit, static_argnames=("resamples", "level"))
def bootstrap(
  per_problem, key, resamples: int = 10_000, *, level: float = 0.95
) -> tuple[jax.Array, jax.Array]:
  """Percentile bootstrap interval of the mean over problems.

  Problems are resampled with replacement, whole: all columns share a resample.  The interval
  holds the noise of the generated candidates too, since each problem has its own.  It is
  pointwise: each column's own interval, not a band that holds for all at once.

  Args:
    per_problem: `[P, K]` expected correctness, as `best_of_n` returns it.
    key: a `jax.random` key.  The same key gives the same resamples.
    resamples: how many.
    level: the coverage.

  Returns:
    low `[K]` and high `[K]`.
  """
  per_problem = jnp.asarray(per_problem)
  if per_problem.ndim != 2 or not len(per_problem):
    raise ValueError(f"per_problem {per_problem.shape}: expected [P, K] with P at least 1")
  if resamples < 1 or not 0 < level < 1:
    raise ValueError(f"resamples={resamples}, level={level}: expected 1 or more, and 0 to 1")
  problems, columns = per_problem.shape
  rows = jnp.arange(BATCH)[:, None]

  def resampled_means(key):
    """`[BATCH, K]` means of that many resamples, as counts of each problem times its value."""
    # The remainder favours some problems by 2^-32 P; randint would double the time to compile.
    drawn = jax.random.bits(key, (BATCH, problems), jnp.uint32) % problems
    times = jnp.zeros((BATCH, problems), per_problem.dtype).at[rows, drawn].add(1)
    return jnp.dot(times, per_problem, precision="highest") / problems

  keys = jax.random.split(key, -(-resamples // BATCH))
  means = jax.lax.map(resampled_means, keys).reshape(-1, columns)[:resamples]
  tail = (1 - level) / 2
  low, high = jnp.quantile(means, jnp.array([tail, 1 - tail], means.dtype), axis=0)
  return low, high


def paired_bootstrap(
  a, b, key, resamples: int = 10_000, *, level: float = 0.95
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The mean difference of two methods on the same problems, with its bootstrap interval.

  Each resample takes the same problems for both, so what makes a problem hard for both cancels:
  the interval is far narrower than the two curves' own intervals suggest.

  Args:
    a: `[P, K]` expected correctness by one method.
    b: `[P, K]` by the other.
    key: a `jax.random` key.
    resamples: how many.
    level: the coverage.

  Returns:
    difference `[K]` of the means, a - b; its low `[K]` and high `[K]`.
  """
  a, b = jnp.asarray(a), jnp.asarray(b)
  if a.shape != b.shape:
    raise ValueError(f"a {a.shape}, b {b.shape}: expected equal shapes")
  low, high = bootstrap(a - b, key, resamples, level=level)
  return (a - b).mean(axis=0), low, high
