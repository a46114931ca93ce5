"""The compiled functions of a run, sharded over a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax

from prm_jax import config as config_lib
from prm_jax.model import sharding as sharding_lib
from prm_jax.training import state as state_lib
from prm_jax.training import step as step_lib
from prm_jax.training import trainable

# Of the TPU compiler.  Its windowed products gather a matrix slice by slice and add to the whole
# output for each: on v5p, slices of 112 columns, nine times the cycles of one product.
TPU_OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


@dataclasses.dataclass(frozen=True)
class Programs:
  """The compiled functions of a run, and the state they work on, described abstractly."""

  abstract: step_lib.TrainState
  init: Callable  # key -> state
  begin: Callable  # params -> state at step 0; the params are gone
  train_step: Callable  # state, batch -> state, metrics; the old state is gone
  read: Callable  # params, batch -> class log-probabilities; of text, its loss and tokens
  gather: Callable  # an array of the batch, on every host


def make(
  c: config_lib.Experiment, vocab_size: int, num_classes: int, mesh: jax.sharding.Mesh
) -> Programs:
  """The functions of a run, sharded over `mesh`; `c` as resolved (`start.resolve`).

  Raises:
    ValueError: the rows of a batch cannot be dealt out to passes and devices.
  """
  devices = mesh.shape["data"] * mesh.shape["fsdp"]
  if c.train.batch_rows % (c.train.microbatches * devices):
    raise ValueError(
      f"train.batch_rows={c.train.batch_rows} must be a multiple of train.microbatches="
      f"{c.train.microbatches} times the {devices} devices over which rows are split"
    )
  shape = (vocab_size, num_classes)
  optimizer = step_lib.make_optimizer(c.optim, c.train.steps)
  graphdef, choice = step_lib.graph(c.model, *shape), trainable.Choice.of(c)
  abstract = state_lib.abstract_state(
    sharding_lib.abstract_params(c.model, *shape, mesh), optimizer, mesh, choice
  )
  shardings, everywhere = sharding_lib.shardings(abstract), sharding_lib.replicated(mesh)
  init = functools.partial(
    step_lib.init,
    config=c.model,
    vocab_size=vocab_size,
    num_classes=num_classes,
    optimizer=optimizer,
    choice=choice,
  )
  train_step = functools.partial(
    step_lib.train_step,
    graphdef=graphdef,
    optimizer=optimizer,
    config=c.loss,
    microbatches=c.train.microbatches,
    choice=choice,
  )
  text = c.loss.objective == "language_model"
  read = step_lib.text_nll if text else step_lib.read_log_probs
  read = functools.partial(read, graphdef=graphdef)
  options = TPU_OPTIONS if mesh.devices.flat[0].platform == "tpu" else None
  return Programs(
    abstract=abstract,
    init=jax.jit(init, out_shardings=shardings),
    begin=jax.jit(
      functools.partial(step_lib.begin, optimizer=optimizer, choice=choice),
      donate_argnums=0,
      out_shardings=shardings,
    ),
    # with out_shardings the step's outputs are laid out like its inputs: it compiles once
    train_step=jax.jit(
      train_step,
      donate_argnums=0,
      out_shardings=(shardings, everywhere),
      compiler_options=options,
    ),
    read=jax.jit(read, out_shardings=everywhere, compiler_options=options),
    gather=jax.jit(lambda x: x, out_shardings=everywhere),
  )
