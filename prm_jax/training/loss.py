"""The training loss, as sums that add over microbatches, hosts and evaluation batches."""

import itertools
import math

import jax
import jax.numpy as jnp
import optax

from prm_jax import config as config_lib
from prm_jax.model.decoder import StepScorer
from prm_jax.types import Batch

LOGITS = 256  # tokens per row whose vocabulary logits are in memory at the same time
METRICS = {"step": "loss", "correct": "accuracy", "language_model": "language_model_loss"}
# Cumulative distribution of Poisson(1) at 0, 1, ... 7.  Draws above 8, one in a million, become 8.
POISSON = tuple(itertools.accumulate(math.exp(-1) / math.factorial(k) for k in range(8)))


def weights(batch: Batch, config: config_lib.Loss) -> dict[str, jax.Array]:
  """Returns the normaliser of each of `sums`, float32 `[]`: the total weight of its targets."""
  return {
    "step": class_weights(batch, config).sum(),
    "correct": is_target(batch).sum().astype(jnp.float32),
    "language_model": (batch.previous >= 0).sum().astype(jnp.float32),
  }


def is_target(batch: Batch) -> jax.Array:
  """Returns whether each read is a target and not padding, bool `[B, R]`."""
  return batch.read_targets.sum(-1) > 0


def class_weights(batch: Batch, config: config_lib.Loss) -> jax.Array:
  """Returns the targets `[B, R, C]` times `loss.class_weights`."""
  return batch.read_targets * jnp.asarray(config.class_weights or 1, jnp.float32)


def bootstrap_weights(batch: Batch, config: config_lib.Loss, seed: int) -> jax.Array:
  """Returns the bootstrap weight of each read for each head, float32 `[B, R, K]`.

  All reads of a solution share its Poisson(1) draw, a pure function of seed, solution and head.
  A single head has weights of 1.
  """
  if config.heads == 1:
    return jnp.ones((*batch.read_solutions.shape, 1), jnp.float32)
  key = jax.random.key(seed)
  uniform = lambda solution: jax.random.uniform(jax.random.fold_in(key, solution), config.heads)
  draws = jax.vmap(jax.vmap(uniform))(batch.read_solutions)
  return (draws[..., None] > jnp.asarray(POISSON)).sum(-1).astype(jnp.float32)


def sums(
  model: StepScorer, batch: Batch, config: config_lib.Loss, seed: int = 0
) -> dict[str, jax.Array]:
  """Returns the summed losses of a batch in nats, and "correct", a count; all float32 `[]`.

  step: cross-entropy of the classes at each read position (paper section 2.6 and F.1: maximise the
    log-likelihood of the rating after each labelled step; appendix E for the outcome model).  For
    a soft label it is the soft cross-entropy; for k right rollouts of n, the binomial negative log-
    likelihood without its constant, in nats per rollout.  An ensemble averages over its heads, each
    with its bootstrap weights, whose mean is 1: early losses of two seeds may differ by a third.
  correct: the number of targets whose likeliest class is the label.
  language_model: next-token cross-entropy over solution tokens, if it has a weight or is the
    objective (then without the other two).  The first token of a branch is predicted from the last
    token of the branch's prefix.
  """
  hidden = model.hidden(batch.tokens, batch.positions, batch.subtree_end)
  out = {}
  if config.objective != "language_model":
    log_probs = model.class_log_probs(hidden, batch.read_positions)  # [B, R, K, C]
    head_weights = bootstrap_weights(batch, config, seed) / config.heads
    out["step"] = -jnp.einsum(
      "BRC,BRK,BRKC->", class_weights(batch, config), head_weights, log_probs, precision="highest"
    )
    # If classes have equal weights, the last one is the label, as in `step_metrics`.
    label = log_probs.shape[-1] - 1 - batch.read_targets[..., ::-1].argmax(-1)
    right = jnp.exp(log_probs).mean(-2).argmax(-1) == label
    out["correct"] = jnp.sum(right, where=is_target(batch)).astype(jnp.float32)
  if config.objective == "language_model" or config.language_model_weight:
    before = jnp.take_along_axis(hidden, jnp.maximum(batch.previous, 0)[..., None], axis=1)
    nll = token_nll(model, before, batch.tokens)
    out["language_model"] = jnp.sum(nll, where=batch.previous >= 0)
  return out


def token_nll(model: StepScorer, before: jax.Array, tokens: jax.Array) -> jax.Array:
  """Returns the cross-entropy of tokens `[B, n]` in nats, float32 `[B, n]`.

  The logits of a long row, `[B, n, V]`, would be the largest array in memory.  They are computed
  for `LOGITS` tokens at a time, and again in the backward pass.

  Args:
    before: hidden states `[B, n, D]` that the tokens are predicted from.
  """

  def chunk_nll(part):
    before, tokens = part
    return optax.softmax_cross_entropy_with_integer_labels(model.next_token_logits(before), tokens)

  B, n = tokens.shape
  if n <= LOGITS:
    return chunk_nll((before, tokens))

  def split(x):  # [B, n, ...] -> [chunks, B, LOGITS, ...]
    x = jnp.pad(x, [(0, 0), (0, -n % LOGITS)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(B, -1, LOGITS, *x.shape[2:]).swapaxes(0, 1)

  out = jax.lax.map(jax.checkpoint(chunk_nll), jax.tree.map(split, (before, tokens)))
  return out.swapaxes(0, 1).reshape(B, -1)[:, :n]


def means(sums: dict[str, jax.Array], weights: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns losses in nats per target, and accuracy, by the name of their metric, float32 `[]`."""
  mean = lambda name: sums[name] / jnp.where(weights[name] > 0, weights[name], 1)
  out = {metric: mean(name) for name, metric in METRICS.items() if name in sums}
  return out if "loss" in out else {"loss": out["language_model_loss"]}


def total(
  sums: dict[str, jax.Array], weights: dict[str, jax.Array], config: config_lib.Loss
) -> jax.Array:
  """Returns mean step loss plus weighted mean language-model loss, or the latter alone."""
  out = means(sums, weights)
  if "language_model_loss" not in out:
    return out["loss"]
  return out["loss"] + config.language_model_weight * out["language_model_loss"]
