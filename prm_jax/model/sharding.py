"""The device mesh, and the sharding of activations and batches over it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from prm_jax import config as config_lib
from prm_jax.types import Batch

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # mesh axes over which the rows of a batch are sharded
HEADS = "tensor"  # mesh axis over which attention heads are sharded
Axis = str | tuple[str, ...] | None  # mesh axes over which a dimension is sharded; None: replicated


def make_mesh(c: config_lib.Mesh, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Returns a mesh of all devices (or the given ones), with Auto axes.

  Neighbours along an axis are neighbours on the torus of a TPU slice.  Several slices, which only
  the data-centre network connects, lie along the axis `data`.

  Raises:
    ValueError: the axes do not use all devices, or `data` is not a multiple of the slice count.
  """
  devices = jax.devices() if devices is None else devices
  sizes = axis_sizes(c, len(devices))
  on_tpu = devices[0].platform == "tpu"
  slices = len({getattr(device, "slice_index", 0) for device in devices}) if on_tpu else 1
  if sizes[0] % slices:
    raise ValueError(f"mesh.data={sizes[0]}: expected a multiple of the {slices} slices")
  # The physical axes of a slice may have to be split: 256 x 4 on one of 8 x 8 x 16.
  split = {"allow_split_physical_axes": True}
  if slices == 1:
    grid = mesh_utils.create_device_mesh(sizes, devices, **split)
  else:
    inside = (sizes[0] // slices, *sizes[1:])
    grid = mesh_utils.create_hybrid_device_mesh(inside, (slices, 1, 1), devices, **split)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def axis_sizes(c: config_lib.Mesh, count: int) -> tuple[int, ...]:
  """Returns the size of each of AXES; raises ValueError unless `count` devices fill them."""
  sizes = [getattr(c, axis) for axis in AXES]
  if sizes.count(-1) > 1:
    raise ValueError(f"mesh {sizes}: only one axis can be -1")
  known = math.prod(size for size in sizes if size != -1)
  if -1 in sizes and known and count % known == 0:
    sizes[sizes.index(-1)] = count // known
  if math.prod(sizes) != count:
    raise ValueError(
      f"mesh {dict(zip(AXES, sizes))}: the sizes must multiply to {count}, the number of devices; "
      "one may be -1, if the others divide that number"
    )
  return tuple(sizes)


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of an array that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of a batch: by rows, over `data` and `fsdp`."""
  return NamedSharding(mesh, PartitionSpec(ROWS))


def global_batch(read: Callable[[int], dict[str, np.ndarray]], count: int, mesh: Mesh) -> Batch:
  """Places a batch of `count` rows on the mesh; each host reads only the rows of its own devices.

  Args:
    read: maps a row's number in the batch to the row's fields; a field may be None.
  """
  sharding, row = batch_sharding(mesh), functools.cache(read)
  (rows, *_), *_ = sharding.addressable_devices_indices_map((count,)).values()
  first = row(rows.indices(count)[0])

  def place(name: str) -> jax.Array | None:
    if first[name] is None:
      return None

    def shard(index: tuple[slice, ...]) -> np.ndarray:
      return np.stack([row(i)[name] for i in range(*index[0].indices(count))])

    return jax.make_array_from_callback((count, *first[name].shape), sharding, shard)

  return Batch(**{field.name: place(field.name) for field in dataclasses.fields(Batch)})


def shardings(abstract: Any) -> Any:
  """Returns the sharding of each array of an abstract tree."""
  return jax.tree.map(lambda x: x.sharding, abstract)


def divides(axis: Axis, size: int, mesh: Mesh | AbstractMesh) -> bool:
  """Returns whether the mesh axis splits a dimension of `size` into equal parts."""
  names = (axis,) if isinstance(axis, str) else axis or ()
  return size % math.prod(mesh.shape.get(name, 1) for name in names) == 0


def fitting(
  axes: Sequence[Axis], shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> tuple[Axis, ...]:
  """Returns the mesh axes of the dimensions, with None for each that its axes do not divide."""
  return tuple(axis if divides(axis, size, mesh) else None for axis, size in zip(axes, shape))


def constrain(x: jax.Array, *axes: Axis) -> jax.Array:
  """Shards the dimensions of `x` over these axes of the current mesh, if there is a mesh."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))
