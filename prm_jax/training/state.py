"""The training state, described once: shape, dtype and sharding of every array.

Initialisation, restoring and ahead-of-time compilation all start from that one tree.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from prm_jax.model import sharding as sharding_lib
from prm_jax.training.step import TrainState
from prm_jax.training.trainable import EVERYTHING, Choice


def abstract_state(
  params: Any,
  optimizer: optax.GradientTransformation,
  mesh: Mesh | AbstractMesh,
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


def table(state: TrainState) -> str:
  """Every array of a state as a line: name, shape, dtype, mesh axes by dimension, bytes a device.

  Args:
    state: as `abstract_state` describes it.
  """
  rows = [("array", "shape", "dtype", "axes", "bytes of a device")]
  for path, x in jax.tree_util.tree_leaves_with_path(state):
    spec = (*x.sharding.spec, *[None] * (len(x.shape) - len(x.sharding.spec)))
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    axes = ", ".join("-" if not a else a if isinstance(a, str) else " + ".join(a) for a in spec)
    rows.append(
      (
        name,
        str(list(x.shape)),
        x.dtype.name,
        f"[{axes}]",
        f"{sharding_lib.bytes_of_a_device(x):,}",
      )
    )
  rows.append(("all", "", "", "", f"{sharding_lib.bytes_of_a_device(state):,}"))
  widths = [max(len(row[i]) for row in rows) for i in range(5)]
  lines = [
    "  ".join([*(cell.ljust(w) for cell, w in zip(row[:4], widths)), row[4].rjust(widths[4])])
    for row in rows
  ]
  return "\n".join(lines) + "\n"
