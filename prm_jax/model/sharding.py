"""The device mesh, and the sharding of parameters and batches over it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from prm_jax import config as config_lib
from prm_jax.model.decoder import ROWS, Axis, StepScorer
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


def shardings(abstract: Any) -> Any:
  return jax.tree.map(lambda x: x.sharding, abstract)


def bytes_of_a_device(state: Any) -> int:
  """Of all arrays of a tree, described with their shardings."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state)
  )
