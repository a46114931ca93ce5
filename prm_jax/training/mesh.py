"""Devices as a mesh, and the sharding of every array of the training state.

The state is described once, abstractly: shape, dtype and sharding (`abstract_state`).
Initialisation, restoring and ahead-of-time compilation all start from that one tree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from prm_jax import config as config_lib
from prm_jax.model.decoder import ROWS, Axis, StepScorer
from prm_jax.training.parameters import EVERYTHING, Choice
from prm_jax.training.step import TrainState
from prm_jax.types import Batch

AXES = ("data", "fsdp", "tensor")


def make_mesh(c: config_lib.Mesh, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh of all devices (or the given ones), with Auto axes.

  Neighbours along an axis are neighbours on the torus of a TPU slice.  Of several slices, which
  only the data-centre network joins, each is one or more entries of the axis `data`.

  Raises:
    ValueError: the axes do not use all devices, or `data` would not keep slices apart.
  """
  devices = jax.devices() if devices is None else devices
  sizes = axis_sizes(c, len(devices))
  slices = 1
  if devices[0].platform == "tpu":
    slices = len({getattr(device, "slice_index", 0) for device in devices})
  if slices == 1:
    # axes of a slice may have to be split: 256 x 4 on one of 8 x 8 x 16
    grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
  elif sizes[0] % slices:
    raise ValueError(f"mesh.data={c.data}: expected a multiple of the {slices} slices")
  else:
    inside = (sizes[0] // slices, *sizes[1:])
    grid = mesh_utils.create_hybrid_device_mesh(
      inside, (slices, 1, 1), devices, allow_split_physical_axes=True
    )
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def abstract_mesh(c: config_lib.Mesh, count: int) -> AbstractMesh:
  """The mesh that so many devices would make; without them."""
  return AbstractMesh(axis_sizes(c, count), AXES, axis_types=(AxisType.Auto,) * 3)


def axis_sizes(c: config_lib.Mesh, count: int) -> tuple[int, ...]:
  """Devices along each of AXES, `count` in all."""
  sizes = [getattr(c, axis) for axis in AXES]
  if sizes.count(-1) > 1:
    raise ValueError(f"mesh {sizes}: only one axis can be -1")
  known = int(np.prod([size for size in sizes if size != -1]))
  if -1 in sizes and known and count % known == 0:
    sizes[sizes.index(-1)] = count // known
  if int(np.prod(sizes)) != count:
    raise ValueError(f"mesh {dict(zip(AXES, sizes))} does not use the {count} devices there are")
  return tuple(sizes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec(ROWS))


def global_batch(read: Callable[[int], dict[str, np.ndarray]], count: int, mesh: Mesh) -> Batch:
  """A batch over the mesh, of which each host reads only the rows that its own devices hold.

  Args:
    read: the fields of a row of the batch, by its number below `count`.
  """
  sharding = batch_sharding(mesh)
  spans = sharding.addressable_devices_indices_map((count,)).values()
  own = {i for (span,) in spans for i in range(*span.indices(count))}
  rows = {i: read(i) for i in sorted(own)}

  def place(name: str) -> jax.Array:
    shape = (count, *next(iter(rows.values()))[name].shape)

    def shard(index: tuple[slice, ...]) -> np.ndarray:
      return np.stack([rows[i][name] for i in range(*index[0].indices(count))])

    return jax.make_array_from_callback(shape, sharding, shard)

  return Batch(**{field.name: place(field.name) for field in dataclasses.fields(Batch)})


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def abstract_params(
  c: config_lib.Model, vocab_size: int, num_classes: int, mesh: Mesh | AbstractMesh
) -> Any:
  """The parameters as `ShapeDtypeStruct`s, each split over the axes it was declared with.

  Stacked layers have a leading axis more than declared; it is not split.  Where the mesh axes do
  not divide a parameter, it is split as declared for that case.  A dimension that even these do not
  divide is not split (small models on many devices).
  """

  def pieces(axis: Axis) -> int:
    return math.prod(mesh.shape[name] for name in ([axis] if isinstance(axis, str) else axis or ()))

  def describe(param: nnx.Variable) -> jax.ShapeDtypeStruct:
    shape, dtype = param.get_value().shape, param.get_value().dtype
    axes, otherwise = (
      axes and (None,) * (len(shape) - len(axes)) + axes
      for axes in map(param.get_metadata().get, ("axes", "otherwise"))
    )
    if otherwise and any(size % pieces(axis) for axis, size in zip(axes, shape)):
      axes = otherwise
    fits = [axis if size % pieces(axis) == 0 else None for axis, size in zip(axes, shape)]
    sharding = NamedSharding(mesh, PartitionSpec(*fits))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  model = nnx.eval_shape(lambda: StepScorer(c, vocab_size, num_classes, nnx.Rngs(0)))
  return nnx.to_pure_dict(
    jax.tree.map(describe, nnx.state(model), is_leaf=lambda x: isinstance(x, nnx.Variable))
  )


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


def shardings(abstract: Any) -> Any:
  return jax.tree.map(lambda x: x.sharding, abstract)


def bytes_of_a_device(state: Any) -> int:
  """Of all arrays of a tree, described with their shardings."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state)
  )


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
    rows.append((name, str(list(x.shape)), x.dtype.name, f"[{axes}]", f"{bytes_of_a_device(x):,}"))
  rows.append(("all", "", "", "", f"{bytes_of_a_device(state):,}"))
  widths = [max(len(row[i]) for row in rows) for i in range(5)]
  lines = [
    "  ".join([*(cell.ljust(w) for cell, w in zip(row[:4], widths)), row[4].rjust(widths[4])])
    for row in rows
  ]
  return "\n".join(lines) + "\n"
