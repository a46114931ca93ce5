"""From the probabilities of steps to one score per solution, in log space."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from prm_jax.types import RATINGS

REDUCTIONS = ("product", "min", "mean", "last")


@functools.partial(jax.jit, static_argnames="neutral")
def step_log_scores(class_probs, neutral: str = "positive") -> jax.Array:
  """log P(the step is right), from the probabilities of its ratings.

  Args:
    class_probs: `[..., 3]` probabilities of the ratings -1, 0, 1, in that order.
    neutral: "positive": a step scores P(1) + P(0), the paper's default; "negative": P(1).
      (*Let's Verify Step by Step*, appendix F.2, compares the two.)

  Returns:
    `[...]` log scores; -inf for a score of zero.
  """
  class_probs = jnp.asarray(class_probs)
  if class_probs.shape[-1:] != (len(RATINGS),):
    raise ValueError(f"class_probs {class_probs.shape}: expected [..., 3], for ratings {RATINGS}")
  if neutral not in ("positive", "negative"):
    raise ValueError(f'neutral={neutral!r}: expected "positive" or "negative"')
  _, zero, one = jnp.moveaxis(class_probs, -1, 0)
  return jnp.log(one + zero if neutral == "positive" else one)


@functools.partial(jax.jit, static_argnames=("num_solutions", "how"))
def reduce_steps(log_probs, solution_ids, num_solutions: int, how: str = "product") -> jax.Array:
  """One log score per solution, from the log scores of its steps.

  Args:
    log_probs: `[T]` log scores of the steps of all solutions, one after the other.
    solution_ids: `[T]` the solution of each step, 0..S-1; a solution's steps stand in their own
      order, but solutions may interleave.  Steps with any other id are padding, and ignored.
    num_solutions: S.
    how: "product": the probability that every step is right (the paper's score, section 2.6);
      "min": the weakest step; "mean": the arithmetic mean of the step probabilities;
      "last": the last step.

  Returns:
    `[S]` log scores, in the dtype of `log_probs` (float64 needs `jax.enable_x64`).  A solution
    without steps has no score: NaN.
  """
  log_probs = jnp.asarray(log_probs)
  solution_ids = jnp.asarray(solution_ids)
  if log_probs.ndim != 1 or log_probs.shape != solution_ids.shape:
    raise ValueError(
      f"log_probs {log_probs.shape}, solution_ids {solution_ids.shape}: expected [T] and [T]"
    )
  if how not in REDUCTIONS:
    raise ValueError(f"how={how!r}: expected one of {REDUCTIONS}")
  if not jnp.issubdtype(log_probs.dtype, jnp.floating):
    raise ValueError(f"log_probs of dtype {log_probs.dtype}: expected floats")

  segment = {"segment_ids": solution_ids, "num_segments": num_solutions}
  count = jax.ops.segment_sum(jnp.ones_like(solution_ids), **segment)
  if how == "product":
    score = jax.ops.segment_sum(log_probs, **segment)
  elif how == "min":
    score = jax.ops.segment_min(log_probs, **segment)
  elif how == "mean":  # log(sum(exp)) about the largest step, which may itself be log(0)
    top = jax.ops.segment_max(log_probs, **segment)
    top = jnp.where(jnp.isfinite(top), top, 0)
    total = jax.ops.segment_sum(jnp.exp(log_probs - top[solution_ids]), **segment)
    score = top + jnp.log(total / count)
  else:
    last = jax.ops.segment_max(jnp.arange(log_probs.size), **segment)
    score = log_probs.at[last].get(mode="fill", fill_value=jnp.nan)
  return jnp.where(count > 0, score, jnp.nan)
