"""The training state and the pure functions over it: an update, and two kinds of evaluation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from prm_jax import config as config_lib
from prm_jax.model.decoder import StepScorer
from prm_jax.training import loss as loss_lib
from prm_jax.training.trainable import EVERYTHING, HEAD, Params, Trainable, merge
from prm_jax.types import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  step: jax.Array  # int32 []: updates made
  params: Any  # nested dict of arrays
  opt_state: Any  # optax's; where there is a float32 master copy, the pair (copy, optax's)


def learning_rate(c: config_lib.Optim, steps: int) -> optax.Schedule:
  """Linear warm-up to the peak, then a cosine to a fraction of it; update i uses schedule(i)."""
  return optax.warmup_cosine_decay_schedule(
    init_value=c.learning_rate / max(c.warmup_steps, 1),  # an update at 0 would do nothing
    peak_value=c.learning_rate,
    warmup_steps=c.warmup_steps,
    decay_steps=max(steps, c.warmup_steps + 1),
    end_value=c.learning_rate * c.final_fraction,
  )


def make_optimizer(c: config_lib.Optim, steps: int) -> optax.GradientTransformation:
  """AdamW with the schedule `learning_rate`, after clipping by the global norm.

  `embedding_scale` and `head_scale` multiply the updates of these groups, weight decay included.
  """
  adamw = optax.adamw(
    learning_rate(c, steps), b1=c.b1, b2=c.b2, weight_decay=c.weight_decay, mask=decayed
  )
  groups = {"embedding": c.embedding_scale}
  groups |= dict.fromkeys((*HEAD, "language_model"), c.head_scale)

  def scale(path, update):
    return update * groups.get(path[0].key, 1.0)

  scaled = optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(scale, updates))
  one_rate = c.embedding_scale == c.head_scale == 1
  return optax.chain(optax.clip_by_global_norm(c.clip_norm), adamw, *([] if one_rate else [scaled]))


def decayed(params: Any) -> Any:
  """Whether each parameter has weight decay: matrices do, norm scales and biases do not."""

  def matrix(path, _):
    return not path[-1].key.endswith(("norm", "bias"))

  return jax.tree_util.tree_map_with_path(matrix, params)


def init_params(
  key: jax.Array, *, config: config_lib.Model, vocab_size: int, num_classes: int
) -> dict[str, Any]:
  """Random parameters, with a step head of zeros."""
  model = StepScorer(config, vocab_size, num_classes, nnx.Rngs(params=key))
  return nnx.to_pure_dict(nnx.state(model))


def begin(
  params: Any, *, optimizer: optax.GradientTransformation, trainable: Trainable = EVERYTHING
) -> TrainState:
  """The training state at step 0 with these parameters."""
  trained = jax.tree.map(lambda x: x.astype(jnp.float32), trainable.select(params))
  opt_state = optimizer.init(trained)
  opt_state = (trained, opt_state) if trainable.has_master(params) else opt_state
  return TrainState(jnp.zeros((), jnp.int32), params, opt_state)


def train_step(
  state: TrainState,
  batch: Batch,
  *,
  graphdef: nnx.GraphDef,
  optimizer: optax.GradientTransformation,
  config: config_lib.Loss,
  microbatches: int,
  trainable: Trainable = EVERYTHING,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """One update from one batch, in `microbatches` passes of equal size.

  Returns:
    The next state, and mean losses (nats per target), accuracy and gradient norm.
  """
  # Targets of the whole batch: accumulated gradients are those of a single pass.
  weights = loss_lib.weights(batch)

  def loss_fn(trained: Params, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    model = nnx.merge(graphdef, merge(state.params, trained))
    sums = loss_lib.sums(model, batch, config)
    return loss_lib.total(sums, weights, config), sums

  has_master = trainable.has_master(state.params)
  if has_master:
    trained, opt_state = state.opt_state
  else:
    trained, opt_state = trainable.select(state.params), state.opt_state

  gradient = jax.grad(loss_fn, has_aux=True)
  grads, sums = accumulated(functools.partial(gradient, trained), batch, microbatches)
  updates, opt_state = optimizer.update(grads, opt_state, trained)
  trained = optax.apply_updates(trained, updates)

  params = merge(state.params, trained)
  opt_state = (trained, opt_state) if has_master else opt_state
  return TrainState(state.step + 1, params, opt_state), _metrics(sums, weights, grads)


def accumulated(function: Callable[[Batch], Any], batch: Batch, microbatches: int) -> Any:
  """The sum of `function`, a tree of arrays, over parts of a batch with rows of every device."""
  if microbatches == 1:
    return function(batch)
  parts = jax.tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), batch)
  shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], parts))

  def add(total, part):
    return jax.tree.map(jnp.add, total, function(part)), None

  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.lax.scan(add, zeros, parts)[0]


def _metrics(sums: dict, weights: dict, grads: Any) -> dict[str, jax.Array]:
  metrics = {"gradient_norm": optax.global_norm(grads)}
  if "language_model" in sums:
    metrics["loss"] = sums["language_model"] / jnp.maximum(weights["language_model"], 1)
  if "step" in sums:
    if "loss" in metrics:
      metrics["language_model_loss"] = metrics["loss"]
    targets = jnp.maximum(weights["step"], 1)
    metrics |= {"loss": sums["step"] / targets, "accuracy": sums["correct"] / targets}
  return metrics


def read_log_probs(params: Any, batch: Batch, *, graphdef: nnx.GraphDef) -> jax.Array:
  """Class log-probabilities, float32 `[B, R, C]`, at the batch's read positions."""
  model: StepScorer = nnx.merge(graphdef, params)
  hidden = model.hidden(batch.tokens, batch.positions, batch.subtree_end)
  return jax.nn.log_softmax(model.class_logits(hidden, batch.read_positions))


def text_nll(params: Any, batch: Batch, *, graphdef: nnx.GraphDef) -> tuple[jax.Array, jax.Array]:
  """Summed next-token loss in nats, float32 `[]`, and its number of tokens, int32 `[]`."""
  model = nnx.merge(graphdef, params)
  sums = loss_lib.sums(model, batch, config_lib.Loss(objective="language_model"))
  return sums["language_model"], loss_lib.weights(batch)["language_model"]


@functools.cache
def graph(config: config_lib.Model, vocab_size: int, num_classes: int) -> nnx.GraphDef:
  """The model's structure without its parameters."""
  model = nnx.eval_shape(lambda: StepScorer(config, vocab_size, num_classes, nnx.Rngs(0)))
  return nnx.split(model)[0]
