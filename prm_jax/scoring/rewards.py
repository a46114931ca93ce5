"""Rewards of steps and tokens for reinforcement learning, from P(right) of the steps.

Pure functions of fixed shapes: a solution has S places for steps, filled from the front and marked
by `valid`, and L places for tokens.  All leading axes are batch axes, so the functions run under
`jax.jit` and `jax.vmap`, and a batch keeps its sharding.  Values in padding change no result and no
gradient.
"""

import functools

import jax
import jax.numpy as jnp

FORMS = ("product", "minimum", "raw", "implicit")
TEMPERATURE = 0.1  # default of "minimum", as in PURE
NEAR = 2.0**-23  # distance of P(right) from 0 and 1 at which its log-odds are finite in float32
BETA = 0.05  # of implicit rewards: `beta_train` of PRIME


@functools.partial(jax.jit, static_argnames="form")
def step_rewards(
  probabilities: jax.Array,
  valid: jax.Array,
  form: str = "product",
  *,
  temperature: float | jax.Array = TEMPERATURE,
) -> jax.Array:
  """Returns the reward of each step `[..., S]`, float32, zero where there is no step.

  Args:
    probabilities: P(right) of each step, `[..., S]`.
    valid: whether there is a step, bool `[..., S]`.
    form: "product": the change that the step makes to the product of probabilities, prod(i <= t)
      p_i - prod(i < t) p_i, where the product before the first step counts as 0.  The rewards of a
      solution add up to its product score, so the first is P(right), and all others are negative
      or zero.
      "minimum": r_t weighted by softmax(-r / temperature) over the solution's steps, with r =
      2 P(right) - 1.  The rewards of a solution add up to its smallest r as the temperature goes to
      0.  PURE (Cheng et al. 2025, arXiv 2504.15275); r and its temperature as in
      `turn_process_reward_logits_to_reward`, openrlhf/utils/utils.py of CJReinforce/PURE.
      "raw": P(right).  The sum grows with the number of steps.
      "implicit": the log-odds of P(right).  With the implicit readout, they are beta times the
      log-ratio of the step's tokens (`implicit_step_rewards`), cut at ±15.9.
    temperature: of "minimum", at least `reductions.LEAST_TEMPERATURE`.

  Raises:
    ValueError: an unknown form, or shapes that differ.
  """
  if form not in FORMS:
    raise ValueError(f"form={form!r}: expected one of {', '.join(FORMS)}")
  if probabilities.shape != valid.shape:
    raise ValueError(f"probabilities {probabilities.shape}, valid {valid.shape}: expected the same")
  p = jnp.asarray(probabilities, jnp.float32)
  if form == "raw":
    return jnp.where(valid, p, 0)
  if form == "implicit":
    p = jnp.clip(jnp.where(valid, p, 0.5), NEAR, 1 - NEAR)
    return jnp.where(valid, jnp.log(p) - jnp.log1p(-p), 0)
  if form == "minimum":
    r = 2 * jnp.where(valid, p, 0) - 1
    return jnp.where(valid, r * jax.nn.softmax(-r / temperature, where=valid), 0)
  # Not in log space: a product of probabilities loses no digits, and log(0) has no gradient.
  # Products are not subtracted either: the earlier one times (p - 1) keeps its digits.
  p = jnp.where(valid, p, 1)
  before = jnp.cumprod(p[..., :-1], axis=-1)
  rewards = jnp.concatenate([p[..., :1], before * (p[..., 1:] - 1)], axis=-1)
  return jnp.where(valid, rewards, 0)


def implicit_step_rewards(
  log_probs: jax.Array,
  reference_log_probs: jax.Array,
  ends: jax.Array,
  valid: jax.Array,
  beta: float | jax.Array = BETA,
) -> jax.Array:
  """Returns beta * (log pi - log pi_ref), summed over the tokens of each step, `[..., S]`.

  A step has the tokens after the end of the step before it, up to its own end.  Before the sum,
  this is the reward per token of PRIME (Cui et al. 2025, arXiv 2502.01456; `dp_prime.py` of
  PRIME-RL/PRIME, which multiplies by no beta); by step, it is the reward of Yuan et al. 2024 (arXiv
  2412.01981, "Free process rewards without process labels").

  Args:
    log_probs: log-probability of each token of the solution, `[..., L]`.
    reference_log_probs: the same, by the reference model.
    ends: place of each step's last token, int `[..., S]`, ascending.
    valid: whether there is a step, bool `[..., S]`.
  """
  ratio = beta * (log_probs - reference_log_probs)
  before = jnp.concatenate([jnp.full_like(ends[..., :1], -1), ends[..., :-1]], axis=-1)
  place = jnp.arange(ratio.shape[-1])
  inside = (place > before[..., None]) & (place <= ends[..., None]) & valid[..., None]
  return jnp.where(inside, ratio[..., None, :], 0).sum(-1)


def at_tokens(rewards: jax.Array, ends: jax.Array, valid: jax.Array, length: int) -> jax.Array:
  """Returns the rewards of steps at the steps' last tokens, `[..., L]`; zeros at other tokens.

  Args:
    rewards: `[..., S]`.
    ends: place of each step's last token, int `[..., S]`.
    valid: whether there is a step, bool `[..., S]`.
    length: L.  The reward of a step that ends beyond it, in a truncated completion, is dropped.
  """
  here = (jnp.arange(length) == ends[..., None]) & valid[..., None]
  return jnp.where(here, rewards[..., None], 0).sum(-2)


def returns_to_go(rewards: jax.Array, discount: float | jax.Array = 1.0) -> jax.Array:
  """Returns for token t the sum over u >= t of discount^(u - t) times reward u, `[..., L]`.

  It has no mask: rewards in padding must be zero, as `at_tokens` leaves them.
  """
  rewards = jnp.asarray(rewards, jnp.result_type(rewards, float))  # integers truncate the discount

  def combine(later, earlier):
    return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

  pairs, last = (jnp.full_like(rewards, discount), rewards), rewards.ndim - 1
  return jax.lax.associative_scan(combine, pairs, reverse=True, axis=last)[1]


def token_advantages(
  rewards: jax.Array, mask: jax.Array, discount: float | jax.Array = 1.0
) -> jax.Array:
  """Returns the advantages `[..., G, L]` of the tokens of G completions; zeros in padding.

  The baseline b of a completion is the mean reward per token of the G - 1 other completions of its
  prompt: the sum of their rewards over the sum of their lengths.  It is subtracted at every token,
  and the advantage of a token is the return-to-go of the difference.  PURE's baseline is the same b
  times the number of tokens of a step, subtracted at the step's end (`process_experiences` in
  openrlhf/trainer/ppo_utils/experience_maker.py): at the first token of a step, without discount,
  the two agree.  A mean per step would depend on how a text is cut into steps, which a policy
  learns to change (PURE's README, "baseline choice in RLOO", and CJReinforce/PURE#2).

  Args:
    rewards: of the tokens, `[..., G, L]`, as `at_tokens` places them.
    mask: whether there is a token, bool `[..., G, L]`.

  Raises:
    ValueError: G is 1, so there is no other completion.
  """
  if rewards.shape != mask.shape or rewards.ndim < 2 or rewards.shape[-2] < 2:
    raise ValueError(f"rewards {rewards.shape}, mask {mask.shape}: expected [..., G >= 2, L]")
  rewards = jnp.where(mask, rewards, 0)
  total = rewards.sum(-1, keepdims=True)
  tokens = mask.sum(-1, keepdims=True)
  other_tokens = tokens.sum(-2, keepdims=True) - tokens
  baseline = (total.sum(-2, keepdims=True) - total) / jnp.maximum(other_tokens, 1)
  return jnp.where(mask, returns_to_go(jnp.where(mask, rewards - baseline, 0), discount), 0)
