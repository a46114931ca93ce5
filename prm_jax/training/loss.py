"""The training loss, as sums: they add up over microbatches, hosts and evaluation batches."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from prm_jax import config as config_lib
from prm_jax.model.decoder import StepScorer
from prm_jax.types import Batch


def weights(batch: Batch) -> dict[str, jax.Array]:
  """Number of targets of each kind: what the sums of `sums` are divided by."""
  return {
    "step": (batch.read_targets >= 0).sum(),
    "language_model": (batch.previous >= 0).sum(),
  }


def sums(
  model: StepScorer,
  batch: Batch,
  config: config_lib.Loss,
  last: Mapping[str, jax.Array] | None = None,
) -> dict[str, jax.Array]:
  """Summed losses of a batch, in nats, and the number of right classifications.

  step: cross-entropy of the class at each read position (paper section 2.6 and F.1: maximise the
    log-likelihood of the rating after each labelled step; appendix E for the outcome model).
  language_model: next-token cross-entropy over solution tokens, only if it has a weight.  The
    token before the first of a branch is the last of the prefix it hangs off.

  Args:
    last: weights of the last layers, where only they are trained: see `StepScorer.hidden`.
  """
  hidden = model.hidden(batch.tokens, batch.positions, batch.subtree_end, last)
  logits = model.read(hidden, batch.read_positions)
  labelled = batch.read_targets >= 0
  targets = jnp.maximum(batch.read_targets, 0)
  nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
  out = {
    "step": jnp.sum(nll, where=labelled),
    "correct": jnp.sum(logits.argmax(-1) == targets, where=labelled).astype(jnp.float32),
  }
  if config.language_model_weight:
    has_previous = batch.previous >= 0
    before = jnp.take_along_axis(hidden, jnp.maximum(batch.previous, 0)[..., None], axis=1)
    nll = optax.softmax_cross_entropy_with_integer_labels(
      model.next_token_logits(before), batch.tokens
    )
    out["language_model"] = jnp.sum(nll, where=has_previous)
  return out


def total(
  sums: dict[str, jax.Array], weights: dict[str, jax.Array], config: config_lib.Loss
) -> jax.Array:
  """The objective: mean step loss, plus the weighted mean language-model loss."""
  loss = sums["step"] / jnp.maximum(weights["step"], 1)
  if config.language_model_weight:
    mean = sums["language_model"] / jnp.maximum(weights["language_model"], 1)
    loss += config.language_model_weight * mean
  return loss
