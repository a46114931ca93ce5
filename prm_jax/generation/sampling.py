"""Chooses the next token by temperature, top-k, top-p and min-p, from one uniform number."""

import dataclasses
import functools
from typing import Annotated

import jax
import jax.numpy as jnp
import msgspec

from prm_jax import config as config_lib

LIKELIEST = 1024  # candidates that are sorted; the whole vocabulary only if these do not suffice
BLOCK = 128  # tokens of the vocabulary whose probabilities are summed first
AT_ONCE = 2**21  # logits that a CPU processes at once
TINY = 2.0**-126  # the least normal number of float32; XLA treats smaller ones as 0


@dataclasses.dataclass(frozen=True)
class Sampling(config_lib.Checked):
  """Sampling settings, applied in this order, as in transformers."""

  temperature: config_lib.NonNegative = 1.0  # 0: the likeliest token
  top_k: config_lib.Whole = 0  # 0: all
  top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
  min_p: config_lib.Share = 0.0  # share of the likeliest token's probability


def choose(logits: jax.Array, uniform: jax.Array, s: Sampling) -> tuple[jax.Array, jax.Array]:
  """Returns a token for each row, int32 `[B]`, and its log-probability, float32 `[B]`.

  The log-probability is the model's own, before temperature and truncation.

  Args:
    logits: float32 `[B, V]`.
    uniform: float32 `[B]` in [0, 1), the only randomness; the distribution is inverted there.
  """
  choice, (B, V) = functools.partial(_choose, s=s), logits.shape
  rows = 1 << max(AT_ONCE // V, 1).bit_length() - 1
  if rows >= B or B % rows or jax.sharding.get_abstract_mesh().size > 1:
    return choice(logits, uniform)

  def few_at_a_time(*given: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Processes a few rows at a time, so that temporaries stay in the CPU's cache."""
    chosen = jax.lax.map(lambda x: choice(*x), [x.reshape(-1, rows, *x.shape[1:]) for x in given])
    return jax.tree.map(jnp.ravel, chosen)

  return jax.lax.platform_dependent(logits, uniform, cpu=few_at_a_time, default=choice)


def _choose(logits: jax.Array, uniform: jax.Array, s: Sampling) -> tuple[jax.Array, jax.Array]:
  """Implements `choose` for all rows at once."""
  if s.temperature < TINY:
    tokens = likeliest(logits)
  else:
    # At most 0: a small temperature gives -inf, and never NaN.
    scaled = (logits - logits.max(-1, keepdims=True)) / s.temperature
    every = s.top_k == 0 and s.top_p == 1 and s.min_p == 0
    tokens = _of_all(scaled, uniform) if every else _of_likeliest(scaled, uniform, s)
  chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
  return tokens.astype(jnp.int32), chosen - jax.nn.logsumexp(logits, axis=-1)


def likeliest(logits: jax.Array) -> jax.Array:
  """Returns the argmax in two passes, ten times as fast as `jnp.argmax` on XLA's CPU backend."""
  highest, V = logits.max(-1, keepdims=True), logits.shape[1]
  return jnp.where(logits == highest, jnp.arange(V), V - 1).min(-1)


def _of_all(logits: jax.Array, uniform: jax.Array) -> jax.Array:
  """Inverts the distribution in two levels: first the block of the vocabulary, then the token.

  Args:
    logits: float32 `[B, V]`, the highest of each row 0.
  """
  V = logits.shape[1]
  p = jnp.pad(jnp.exp(logits), [(0, 0), (0, -V % BLOCK)]).reshape(len(logits), -1, BLOCK)
  ends = jnp.cumsum(p.sum(-1), axis=-1)
  target = uniform * ends[:, -1]
  block = _first_above(ends, target)
  begin = jnp.where(block > 0, jnp.take_along_axis(ends, block[:, None] - 1, 1)[:, 0], 0)
  inside = jnp.take_along_axis(p, block[:, None, None], axis=1)[:, 0]
  return block * BLOCK + _first_above(jnp.cumsum(inside, axis=-1), target - begin)


def _first_above(ends: jax.Array, target: jax.Array) -> jax.Array:
  """Returns the index of the first running sum above the target, or of the last that grows."""
  last = (ends < ends[:, -1:]).sum(-1)
  return jnp.minimum((ends <= target[:, None]).sum(-1), last)


def _of_likeliest(logits: jax.Array, uniform: jax.Array, s: Sampling) -> jax.Array:
  V, total = logits.shape[1], jax.nn.logsumexp(logits, axis=-1, keepdims=True)

  def among(k: int) -> tuple[jax.Array, jax.Array]:
    """Returns a token of the k likeliest, and whether they include all that the settings allow."""
    values, ids = jax.lax.top_k(logits, k)
    p = jnp.exp(values - (jax.nn.logsumexp(values, -1, keepdims=True) if s.top_k else total))
    before = jnp.cumsum(p, axis=-1) - p
    kept = (before < s.top_p) & (p >= s.min_p * p[:, :1])
    ends = jnp.cumsum(jnp.where(kept, p, 0), axis=-1)
    chosen = _first_above(ends, uniform * ends[:, -1])
    whole = jnp.all((before[:, -1] + p[:, -1] >= s.top_p) | (p[:, -1] < s.min_p * p[:, 0]))
    return jnp.take_along_axis(ids, chosen[:, None], axis=1)[:, 0], whole

  tokens, whole = among(min(s.top_k or LIKELIEST, V))
  if s.top_k or V <= LIKELIEST:
    return tokens
  return jax.lax.cond(whole, lambda: tokens, lambda: among(V)[0])
