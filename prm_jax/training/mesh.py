"""Devices as a mesh, and the sharding of every array of the training state.

The state is described once, abstractly: shape, dtype and sharding (`abstract_state`).
Initialisation, restoring and ahead-of-time compilation all start from that one tree.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from prm_jax import config as config_lib
from prm_jax.model.decoder import ROWS, StepScorer
from prm_jax.training.parameters import EVERYTHING, Choice
from prm_jax.training.step import TrainState

AXES = ("data", "fsdp", "tensor")


def make_mesh(c: config_lib.Mesh, devices: list[jax.Device] | None = None) -> Mesh:
  """A mesh of all devices (or the given ones), with Auto axes."""
  count = len(devices or jax.devices())
  sizes = [getattr(c, axis) for axis in AXES]
  if sizes.count(-1) > 1:
    raise ValueError(f"mesh {sizes}: only one axis can be -1")
  known = int(np.prod([size for size in sizes if size != -1]))
  if -1 in sizes and known and count % known == 0:
    sizes[sizes.index(-1)] = count // known
  if int(np.prod(sizes)) != count:
    raise ValueError(f"mesh {dict(zip(AXES, sizes))} does not use the {count} devices there are")
  return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec(ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def abstract_params(c: config_lib.Model, vocab_size: int, num_classes: int, mesh: Mesh) -> Any:
  """The parameters as `ShapeDtypeStruct`s, each split over the axes it was declared with.

  Stacked layers have a leading axis more than declared; it is not split.  A dimension that the
  mesh axis does not divide is not split either (small models on many devices).
  """

  def describe(param: nnx.Variable) -> jax.ShapeDtypeStruct:
    axes = param.get_metadata()["axes"]
    shape, dtype = param.get_value().shape, param.get_value().dtype
    axes = (None,) * (len(shape) - len(axes)) + axes
    fits = [a if a and size % mesh.shape[a] == 0 else None for a, size in zip(axes, shape)]
    sharding = NamedSharding(mesh, PartitionSpec(*fits))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  model = nnx.eval_shape(lambda: StepScorer(c, vocab_size, num_classes, nnx.Rngs(0)))
  return nnx.to_pure_dict(
    jax.tree.map(describe, nnx.state(model), is_leaf=lambda x: isinstance(x, nnx.Variable))
  )


def abstract_state(
  params: Any,
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
  choice: Choice = EVERYTHING,
) -> TrainState:
  """The training state as `ShapeDtypeStruct`s with shardings.

  Optimiser moments are split like their parameter, the rest is replicated.
  """
  everywhere = NamedSharding(mesh, PartitionSpec())
  trained = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), choice.cut(params)
  )
  opt_state = jax.eval_shape(optimizer.init, trained)
  shardings_of = optax.tree_map_params(
    optimizer,
    lambda _, param: param.sharding,
    opt_state,
    trained,
    transform_non_params=lambda _: everywhere,
  )
  opt_state = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), opt_state, shardings_of
  )
  opt_state = (trained, opt_state) if choice.has_master(params) else opt_state
  step = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
  return TrainState(step, params, opt_state)


def shardings(abstract: Any) -> Any:
  return jax.tree.map(lambda x: x.sharding, abstract)
