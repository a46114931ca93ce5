"""Reduces the probabilities of steps to one score per solution, in log space."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from prm_jax.aggregation import candidates
from prm_jax.reductions import LEAST_TEMPERATURE, REDUCTIONS
from prm_jax.types import RATINGS, RIGHT_RATINGS


@functools.partial(jax.jit, static_argnames="neutral")
def step_log_scores(class_values, neutral: str = "positive") -> jax.Array:
  """Returns log P(the step is right), from the probabilities of its ratings.

  Args:
    class_values: `[..., 3]` probabilities of the ratings -1, 0, 1, in that order, which are divided
      by their sum.
    neutral: how a neutral step counts.  "positive": P(right) = P(1) + P(0), the default of *Let's
      Verify Step by Step*, whose appendix F.2 compares the two.  "negative": P(right) = P(1).

  Returns:
    `[...]` log scores; -inf for a probability of zero.

  Raises:
    ValueError: the last axis does not have 3 classes, or `neutral` is unknown.
  """
  class_values = jnp.asarray(class_values)
  if not jnp.issubdtype(class_values.dtype, jnp.floating):
    class_values = class_values.astype(float)
  if class_values.shape[-1:] != (len(RATINGS),):
    raise ValueError(f"class_values {class_values.shape}: expected [..., 3], for {RATINGS}")
  if neutral not in RIGHT_RATINGS:
    raise ValueError(f'neutral={neutral!r}: expected "positive" or "negative"')
  wrong, zero, one = jnp.moveaxis(class_values, -1, 0)
  wrong, right = (wrong, zero + one) if neutral == "positive" else (wrong + zero, one)
  # For a nearly certain step, `right` is rounded to about 1, but `wrong` keeps its digits.
  certain = -jnp.log1p(wrong / jnp.where(right > wrong, right, 1))
  uncertain = jnp.where(right == 0, -jnp.inf, jnp.log(right) - jnp.log(right + wrong))
  return jnp.where(right > wrong, certain, uncertain)


def reduce_steps(
  log_probs,
  solution_ids,
  num_solutions: int,
  how: str | Sequence[str] = "product",
  *,
  temperature: float = 0.1,
) -> jax.Array:
  """Returns one log score per solution, from the log scores of its steps.

  Args:
    log_probs: `[T]` log scores of the steps of all solutions, laid end to end.
    solution_ids: `[T]` the solution of each step, 0..S-1.  The steps of a solution are in order;
      solutions may interleave.  A step with any other id is padding.
    num_solutions: S.
    how: "product": the probability that every step is right (the paper's score, section 2.6);
      "min": the weakest step; "mean": the arithmetic mean of the step probabilities;
      "last": the last step; "soft_min": the mean weighted by exp(-probability / temperature),
      after PURE (arXiv 2504.15275).  Several names share one pass over the steps.
    temperature: of "soft_min", at least `LEAST_TEMPERATURE`.  Towards 0 "soft_min" becomes "min",
      towards infinity "mean".

  Returns:
    `[S]` log scores, or `[H, S]` for H names; float32, or float64 if `log_probs` is (under
    `jax.enable_x64`).  NaN for a solution without steps.

  Raises:
    ValueError: shapes or dtypes are wrong, a name is unknown, or a number is too small.
  """
  log_probs = jnp.asarray(log_probs)
  solution_ids = jnp.asarray(candidates.wide(solution_ids))
  if log_probs.ndim != 1 or log_probs.shape != solution_ids.shape:
    raise ValueError(
      f"log_probs {log_probs.shape}, solution_ids {solution_ids.shape}: expected [T] and [T]"
    )
  names = (how,) if isinstance(how, str) else tuple(how)
  if not names or not set(names) <= set(REDUCTIONS):
    raise ValueError(f"how={how!r}: expected one or more of {REDUCTIONS}")
  if not jnp.issubdtype(log_probs.dtype, jnp.floating):
    raise ValueError(f"log_probs of dtype {log_probs.dtype}: expected floats")
  if not jnp.issubdtype(solution_ids.dtype, jnp.integer):
    raise ValueError(f"solution_ids of dtype {solution_ids.dtype}: expected integers")
  if not temperature >= LEAST_TEMPERATURE:
    raise ValueError(f"temperature={temperature}: expected at least {LEAST_TEMPERATURE}")
  if num_solutions < 1:
    raise ValueError(f"num_solutions={num_solutions}: expected at least 1")
  if not log_probs.size:  # one padding step, so that gathers have something to index
    log_probs, solution_ids = jnp.zeros(1, log_probs.dtype), jnp.full(1, -1)
  # In 16 bits, a sum of many steps would lose most of them.
  log_probs = log_probs.astype(jnp.promote_types(log_probs.dtype, jnp.float32))
  result = _reduce(log_probs, solution_ids, num_solutions, names, temperature)
  return result[0] if isinstance(how, str) else result


@functools.partial(jax.jit, static_argnames=("num_solutions", "names"))
def _reduce(log_probs, solution_ids, num_solutions: int, names: tuple[str, ...], temperature):
  """Returns the reductions `[H, S]`."""

  def over_solution(reduce, values):
    return reduce(values, solution_ids, num_solutions)

  def total(values):
    return over_solution(jax.ops.segment_sum, values)

  count = total(jnp.ones_like(log_probs))
  least = over_solution(jax.ops.segment_min, log_probs)
  # log-sum-exp: probabilities relative to the largest, since all may be tiny or zero.
  top = over_solution(jax.ops.segment_max, log_probs)
  top = jnp.where(jnp.isfinite(top), top, 0)
  relative = log_probs - top[solution_ids]
  # The weights of soft_min are relative to the weakest step's, which is then 1.
  weight = jnp.exp((jnp.exp(least)[solution_ids] - jnp.exp(log_probs)) / temperature)
  # A mean near the largest probability keeps its digits as the distance from it, a smaller one
  # as the mean itself.
  below = total(jnp.expm1(relative) * weight) / total(weight)
  soft_min = jnp.log(total(jnp.exp(relative) * weight) / total(weight))
  last = over_solution(jax.ops.segment_max, jnp.arange(log_probs.size))
  scores = {  # the compiler drops those that `names` does not have
    "product": total(log_probs),
    "min": least,
    "mean": top + jnp.log1p(total(jnp.expm1(relative)) / count),
    "last": log_probs.at[last].get(mode="clip"),
    "soft_min": top + jnp.where(below > -0.5, jnp.log1p(below), soft_min),
  }
  return jnp.where(count > 0, jnp.stack([scores[name] for name in names]), jnp.nan)
