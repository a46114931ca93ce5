"""The training state, the pure functions over it, and the compiled programs of a run."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from prm_jax import config as config_lib
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import compiler_options
from prm_jax.training import loss as loss_lib
from prm_jax.training.trainable import Params, group, merge, select
from prm_jax.types import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  step: jax.Array  # int32 []: updates made
  params: Any  # nested dict of arrays
  opt_state: Any  # the pair (float32 master copy of the trained parameters or {}, optax's)


def learning_rate(c: config_lib.Optim, steps: int) -> optax.Schedule:
  """Returns linear warm-up, then a cosine to a fraction of the peak; update i uses schedule(i)."""
  return optax.warmup_cosine_decay_schedule(
    init_value=c.learning_rate / max(c.warmup_steps, 1),  # an update at 0 would do nothing
    peak_value=c.learning_rate,
    warmup_steps=c.warmup_steps,
    decay_steps=max(steps, c.warmup_steps + 1),
    end_value=c.learning_rate * c.final_fraction,
  )


def make_optimizer(c: config_lib.Optim, steps: int) -> optax.GradientTransformation:
  """Returns AdamW with the schedule `learning_rate`, after clipping by the global norm.

  Weight decay applies to matrices, not to norm scales and biases.  `embedding_scale` and
  `head_scale` multiply the updates of these groups, weight decay included.
  """
  scales = {"head": c.head_scale, "language_model": c.head_scale, "embedding": c.embedding_scale}
  scale = lambda path, update: update * scales.get(group(path[0].key), 1.0)
  scaled = optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(scale, updates))
  matrix = lambda path, _: not path[-1].key.endswith(("norm", "bias"))
  decay = {"weight_decay": c.weight_decay}
  decay["mask"] = functools.partial(jax.tree_util.tree_map_with_path, matrix)
  adamw = optax.adamw(learning_rate(c, steps), b1=c.b1, b2=c.b2, **decay)
  return optax.chain(optax.clip_by_global_norm(c.clip_norm), adamw, scaled)


def initial_head(c: config_lib.Experiment) -> str:
  """Returns how the class head starts: `init.head`, with "auto" resolved by the number of heads."""
  return {"auto": "random" if c.loss.heads > 1 else "zeros"}.get(c.init.head, c.init.head)


def init_params(
  key: jax.Array,
  *,
  config: config_lib.Model,
  vocab_size: int,
  num_classes: int,
  heads: int = 1,
  head_std: float = 0.0,
) -> dict[str, Any]:
  """Returns random parameters, as `decoder` declares them.

  Args:
    head_std: standard deviation of the class head's weights; 0: zeros.
  """
  model = decoder.StepScorer(config, vocab_size, num_classes, nnx.Rngs(params=key), heads)
  params = nnx.to_pure_dict(nnx.state(model))
  if head_std:
    params["head"] = head_std * jax.random.normal(key, params["head"].shape)
  return params


def begin(
  params: Any,
  *,
  optimizer: optax.GradientTransformation,
  loss: config_lib.Loss,
  optim: config_lib.Optim,
) -> TrainState:
  """Returns the training state at step 0 with these parameters."""
  selected = select(params, loss, optim)
  trained = jax.tree.map(lambda x: x.astype(jnp.float32), selected)
  stored_rounded = any(x.dtype != jnp.float32 for x in jax.tree.leaves(selected))
  master = trained if stored_rounded else {}
  return TrainState(jnp.zeros((), jnp.int32), params, (master, optimizer.init(trained)))


def train_step(
  state: TrainState,
  batch: Batch,
  *,
  graphdef: nnx.GraphDef,
  optimizer: optax.GradientTransformation,
  loss: config_lib.Loss,
  optim: config_lib.Optim,
  steps: int,
  microbatches: int,
  seed: int,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Makes one optimizer update from a batch, with gradients accumulated over `microbatches`.

  Args:
    steps: of the whole run, for the learning rate.
    seed: of the bootstrap weights of an ensemble's heads.

  Returns:
    The next state; and mean losses (nats per target), accuracy, gradient norm and learning rate.
  """
  # Normalised by the whole batch, so that accumulated gradients equal those of a single pass.
  weights = loss_lib.weights(batch, loss)

  def loss_fn(trained: Params, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    model = nnx.merge(graphdef, merge(state.params, trained))
    sums = loss_lib.sums(model, batch, loss, seed)
    return loss_lib.total(sums, weights, loss), sums

  master, opt_state = state.opt_state
  trained = master or select(state.params, loss, optim)
  gradient = jax.grad(loss_fn, has_aux=True)
  grads, sums = accumulated(functools.partial(gradient, trained), batch, microbatches)
  updates, opt_state = optimizer.update(grads, opt_state, trained)
  trained = optax.apply_updates(trained, updates)
  opt_state = (trained if master else {}, opt_state)
  metrics = loss_lib.means(sums, weights) | {"gradient_norm": optax.global_norm(grads)}
  metrics["learning_rate"] = learning_rate(optim, steps)(state.step)
  return TrainState(state.step + 1, merge(state.params, trained), opt_state), metrics


def accumulated(function: Callable[[Batch], Any], batch: Batch, microbatches: int) -> Any:
  """Returns the sum of `function`'s pytrees over the microbatches of a batch.

  A microbatch takes every `microbatches`-th row, so it has rows of every device.
  """
  if microbatches == 1:
    return function(batch)
  size = len(batch.tokens) // microbatches
  parts = jax.tree.map(lambda x: x.reshape(size, microbatches, *x.shape[1:]).swapaxes(0, 1), batch)
  total = jax.eval_shape(function, jax.tree.map(lambda x: x[0], parts))

  def add(total, part):
    return jax.tree.map(jnp.add, total, function(part)), None

  return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, total), parts)[0]


def read_log_probs(params: Any, batch: Batch, *, graphdef: nnx.GraphDef) -> jax.Array:
  """Returns class log-probabilities by head, float32 `[B, R, K, C]`, at the read positions."""
  model: decoder.StepScorer = nnx.merge(graphdef, params)
  hidden = model.hidden(batch.tokens, batch.positions, batch.subtree_end)
  return model.class_log_probs(hidden, batch.read_positions)


def text_nll(params: Any, batch: Batch, *, graphdef: nnx.GraphDef) -> tuple[jax.Array, jax.Array]:
  """Returns the summed next-token loss in nats and its number of tokens, float32 `[]`."""
  model = nnx.merge(graphdef, params)
  config = config_lib.Loss(objective="language_model")
  sums, weights = loss_lib.sums(model, batch, config), loss_lib.weights(batch, config)
  return sums["language_model"], weights["language_model"]


@functools.cache
def graph(
  config: config_lib.Model, vocab_size: int, num_classes: int, heads: int = 1
) -> nnx.GraphDef:
  """Returns the model's structure without its parameters."""
  sizes = (vocab_size, num_classes)
  model = nnx.eval_shape(lambda: decoder.StepScorer(config, *sizes, nnx.Rngs(0), heads))
  return nnx.split(model)[0]


@dataclasses.dataclass(frozen=True)
class Programs:
  """The compiled functions of a run."""

  abstract: TrainState  # the training state, as `abstract_state` describes it
  init: Callable  # PRNG key -> state with random parameters
  begin: Callable  # parameters (donated) -> state at step 0
  train_step: Callable  # state (donated), batch -> state, metrics
  read: Callable  # parameters, batch -> `step.read_log_probs`; of a language model, `step.text_nll`


def make(c: config_lib.Experiment, vocab_size: int, num_classes: int, mesh: Mesh) -> Programs:
  """Returns the functions of a run, sharded over `mesh`; `c` is resolved (`initialization.find`).

  Runs of one process with equal settings and the same mesh share these functions, which are then
  traced and compiled once.

  Raises:
    ValueError: `train.batch_rows` is not a multiple of microbatches times the devices along data
      and fsdp, or `loss.class_weights` does not have one weight per class.
  """
  rows, passes = c.train.batch_rows, c.train.microbatches
  devices = mesh.size // mesh.shape["tensor"]
  if rows % (unit := passes * devices):
    raise ValueError(
      f"train.batch_rows={rows} must be a multiple of {unit}: rows are sharded over {devices} "
      f"devices (mesh axes data and fsdp) in {passes} passes (train.microbatches); set "
      f"--config.train.batch_rows={-(-rows // unit) * unit}, fewer passes, or a larger "
      "--config.mesh.tensor, which shards heads"
    )
  if c.loss.class_weights and len(c.loss.class_weights) != num_classes:
    given = f"loss.class_weights={c.loss.class_weights}"
    raise ValueError(f"{given}: expected one weight for each of the {num_classes} classes")
  numbers = {
    "steps": c.train.steps,
    "microbatches": c.train.microbatches,
    "seed": c.train.seed if c.loss.heads > 1 else 0,  # of bootstrap weights
    "head_std": c.init.head_std if initial_head(c) == "random" else 0.0,
    "vocab_size": vocab_size,
    "num_classes": num_classes,
  }
  return _programs(c.model, c.loss, c.optim, c.tpu, mesh, **numbers)


@functools.lru_cache(8)  # so the arguments must be all that the functions depend on, and no more
def _programs(
  model: config_lib.Model,
  loss: config_lib.Loss,
  optim: config_lib.Optim,
  tpu: config_lib.Tpu,
  mesh: Mesh,
  *,
  steps: int,
  microbatches: int,
  seed: int,
  head_std: float,
  vocab_size: int,
  num_classes: int,
) -> Programs:
  sizes = {"vocab_size": vocab_size, "num_classes": num_classes, "heads": loss.heads}
  rules = {"optimizer": make_optimizer(optim, steps), "loss": loss, "optim": optim}
  graphdef = graph(model, **sizes)
  params = decoder.abstract_params(model, **sizes, mesh=mesh)
  abstract = abstract_state(params, **rules)
  shardings, everywhere = sharding_lib.shardings(abstract), sharding_lib.replicated(mesh)
  start = functools.partial(begin, **rules)
  init = lambda key: start(init_params(key, config=model, head_std=head_std, **sizes))
  update = functools.partial(
    train_step, graphdef=graphdef, steps=steps, microbatches=microbatches, seed=seed, **rules
  )
  text = loss.objective == "language_model"
  read = functools.partial(text_nll if text else read_log_probs, graphdef=graphdef)
  options = functools.partial(compiler_options.of, tpu, mesh.devices.flat[0])
  return Programs(
    abstract=abstract,
    init=jax.jit(init, out_shardings=shardings),
    begin=jax.jit(start, donate_argnums=0, out_shardings=shardings),
    # The new state has the shardings of the old one, so the step is compiled once.
    train_step=jax.jit(
      update,
      donate_argnums=0,
      out_shardings=(shardings, everywhere),
      compiler_options=options("train"),
    ),
    read=jax.jit(read, out_shardings=everywhere, compiler_options=options("score")),
  )


def abstract_state(
  params: Any,
  *,
  optimizer: optax.GradientTransformation,
  loss: config_lib.Loss,
  optim: config_lib.Optim,
) -> TrainState:
  """Returns shape, dtype and sharding of the arrays of the training state, as `ShapeDtypeStruct`s.

  Optimiser moments are sharded like their parameters (see `decoder.abstract_params`); step counts
  are replicated.
  """
  start = functools.partial(begin, optimizer=optimizer, loss=loss, optim=optim)
  state, trained = jax.eval_shape(start, params), select(params, loss, optim)
  master, moments = state.opt_state
  everywhere = sharding_lib.replicated(params["embedding"].sharding.mesh)
  like = lambda x, param: x.update(sharding=param.sharding)
  whole = lambda x: x.update(sharding=everywhere)
  moments = optax.tree_map_params(optimizer, like, moments, trained, transform_non_params=whole)
  master = jax.tree.map(like, master, trained) if master else {}
  return TrainState(whole(state.step), params, (master, moments))
