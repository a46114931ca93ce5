"""The compiled functions of a run, and the abstract training state that they work on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from prm_jax import config as config_lib
from prm_jax.model import sharding as sharding_lib
from prm_jax.training import step as step_lib
from prm_jax.training.trainable import EVERYTHING, Trainable

# For the TPU compiler.  A windowed einsum gathers a matrix slice by slice and adds each product to
# the whole output: on v5p in slices of 112 columns, with nine times the cycles of one product.
TPU_OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


@dataclasses.dataclass(frozen=True)
class Programs:
  """The compiled functions of a run."""

  abstract: step_lib.TrainState  # the training state, as `abstract_state` describes it
  init: Callable  # PRNG key -> state with random parameters
  begin: Callable  # parameters (donated) -> state at step 0
  train_step: Callable  # state (donated), batch -> state, metrics
  read: Callable  # parameters, batch -> `step.read_log_probs`; of a language model, `step.text_nll`
  gather: Callable  # an array of the batch -> the same on every host


def make(c: config_lib.Experiment, vocab_size: int, num_classes: int, mesh: Mesh) -> Programs:
  """The functions of a run, sharded over `mesh`; `c` as resolved (`initialization.resolve`).

  Raises:
    ValueError: the rows of a batch do not divide over passes and devices.
  """
  devices = mesh.shape["data"] * mesh.shape["fsdp"]
  if c.train.batch_rows % (c.train.microbatches * devices):
    raise ValueError(
      f"train.batch_rows={c.train.batch_rows} must be a multiple of train.microbatches="
      f"{c.train.microbatches} times the {devices} devices over which rows are split"
    )
  shape = (vocab_size, num_classes)
  optimizer = step_lib.make_optimizer(c.optim, c.train.steps)
  graphdef, trainable = step_lib.graph(c.model, *shape), Trainable.of(c)
  params = sharding_lib.abstract_params(c.model, *shape, mesh)
  abstract = abstract_state(params, optimizer, mesh, trainable)
  shardings, everywhere = sharding_lib.shardings(abstract), sharding_lib.replicated(mesh)
  begin = functools.partial(step_lib.begin, optimizer=optimizer, trainable=trainable)

  def init(key: jax.Array) -> step_lib.TrainState:
    sizes = {"vocab_size": vocab_size, "num_classes": num_classes}
    return begin(step_lib.init_params(key, config=c.model, **sizes))

  train_step = functools.partial(
    step_lib.train_step,
    graphdef=graphdef,
    optimizer=optimizer,
    config=c.loss,
    microbatches=c.train.microbatches,
    trainable=trainable,
  )
  text = c.loss.objective == "language_model"
  read = functools.partial(
    step_lib.text_nll if text else step_lib.read_log_probs, graphdef=graphdef
  )
  options = TPU_OPTIONS if mesh.devices.flat[0].platform == "tpu" else None
  return Programs(
    abstract=abstract,
    init=jax.jit(init, out_shardings=shardings),
    begin=jax.jit(begin, donate_argnums=0, out_shardings=shardings),
    # The new state has the shardings of the old one, so the step is compiled once.
    train_step=jax.jit(
      train_step,
      donate_argnums=0,
      out_shardings=(shardings, everywhere),
      compiler_options=options,
    ),
    read=jax.jit(read, out_shardings=everywhere, compiler_options=options),
    gather=jax.jit(lambda x: x, out_shardings=everywhere),
  )


def abstract_state(
  params: Any,
  optimizer: optax.GradientTransformation,
  mesh: Mesh | AbstractMesh,
  trainable: Trainable = EVERYTHING,
) -> step_lib.TrainState:
  """Shape, dtype and sharding of every array of the training state, as `ShapeDtypeStruct`s.

  Initialisation, restoring and ahead-of-time compilation use this one description.  Optimiser
  moments are sharded like their parameters; step counts are replicated.

  Args:
    params: the parameters, as `sharding.abstract_params` describes them.
  """
  everywhere = sharding_lib.replicated(mesh)
  trained = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding),
    trainable.select(params),
  )
  opt_state = jax.eval_shape(optimizer.init, trained)
  shardings = optax.tree_map_params(
    optimizer,
    lambda _, param: param.sharding,
    opt_state,
    trained,
    transform_non_params=lambda _: everywhere,
  )
  opt_state = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), opt_state, shardings
  )
  opt_state = (trained, opt_state) if trainable.has_master(params) else opt_state
  step = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
  return step_lib.TrainState(step, params, opt_state)
