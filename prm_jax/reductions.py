"""The reductions of step scores to one score for a solution: their names and their formulas.

JAX is imported where it is used: command lines offer the names without waiting for it.
"""

from typing import Any, Literal

Reduction = Literal["product", "min", "mean", "last", "soft_min"]


def log_scores(log_probs, solution_ids, num_solutions: int, temperature) -> dict[str, Any]:
  """Returns each reduction, `[S]` log scores; arguments as in `aggregation.reduce_steps`.

  NaN for a solution without steps.
  """
  import jax
  import jax.numpy as jnp

  def over_solution(reduce, values):
    return reduce(values, solution_ids, num_solutions)

  def total(values):
    return over_solution(jax.ops.segment_sum, values)

  count = total(jnp.ones_like(solution_ids))
  least = over_solution(jax.ops.segment_min, log_probs)
  # log-sum-exp: probabilities relative to the largest, since all may be tiny or zero.
  top = over_solution(jax.ops.segment_max, log_probs)
  top = jnp.where(jnp.isfinite(top), top, 0)
  share = jnp.exp(log_probs - top[solution_ids])
  # The weights of soft_min are relative to the weakest step's, which is then 1.
  weight = jnp.exp((jnp.exp(least)[solution_ids] - jnp.exp(log_probs)) / temperature)
  last = over_solution(jax.ops.segment_max, jnp.arange(log_probs.size))
  scores = {  # the compiler leaves out what nobody asks for
    "product": total(log_probs),
    "min": least,
    "mean": top + jnp.log(total(share) / count),
    "last": log_probs.at[last].get(mode="clip"),
    "soft_min": top + jnp.log(total(share * weight) / total(weight)),
  }
  return {name: jnp.where(count > 0, values, jnp.nan) for name, values in scores.items()}
