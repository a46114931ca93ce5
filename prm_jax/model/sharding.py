"""The device mesh, and the sharding of parameters and batches over it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from prm_jax import config as config_lib
from prm_jax.model.decoder import StepScorer
from prm_jax.model.mesh_axes import AXES, ROWS, divides
from prm_jax.types import Batch


def make_mesh(c: config_lib.Mesh, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh of all devices (or the given ones), with Auto axes.

  Neighbours along an axis are neighbours on the torus of a TPU slice.  Several slices, which only
  the data-centre network joins, lie along the axis `data`.

  Raises:
    ValueError: the axes do not use all devices, or `data` is no multiple of the slices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = _axis_sizes(c, len(devices))
  on_tpu = devices[0].platform == "tpu"
  slices = len({getattr(device, "slice_index", 0) for device in devices}) if on_tpu else 1
  if sizes[0] % slices:
    raise ValueError(f"mesh.data={c.data}: expected a multiple of the {slices} slices")
  # The physical axes of a slice may have to be split: 256 x 4 on one of 8 x 8 x 16.
  split = {"allow_split_physical_axes": True}
  if slices == 1:
    grid = mesh_utils.create_device_mesh(sizes, devices, **split)
  else:
    inside = (sizes[0] // slices, *sizes[1:])
    grid = mesh_utils.create_hybrid_device_mesh(inside, (slices, 1, 1), devices, **split)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def abstract_mesh(c: config_lib.Mesh, count: int) -> AbstractMesh:
  """The mesh that `count` devices would make, without the devices."""
  return AbstractMesh(_axis_sizes(c, count), AXES, axis_types=(AxisType.Auto,) * 3)


def _axis_sizes(c: config_lib.Mesh, count: int) -> tuple[int, ...]:
  """Devices along each of AXES, `count` in all; ValueError if the config does not give as many."""
  sizes = [getattr(c, axis) for axis in AXES]
  if sizes.count(-1) > 1:
    raise ValueError(f"mesh {sizes}: only one axis can be -1")
  known = math.prod(size for size in sizes if size != -1)
  if -1 in sizes and known and count % known == 0:
    sizes[sizes.index(-1)] = count // known
  if math.prod(sizes) != count:
    raise ValueError(f"mesh {dict(zip(AXES, sizes))} does not use the {count} devices there are")
  return tuple(sizes)


def replicated(mesh: Mesh) -> NamedSharding:
  """The sharding of an array that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """The sharding of a batch: by rows, over `data` and `fsdp`."""
  return NamedSharding(mesh, PartitionSpec(ROWS))


def global_batch(read: Callable[[int], dict[str, np.ndarray]], count: int, mesh: Mesh) -> Batch:
  """A batch of `count` rows over the mesh; each host reads the rows of its own devices only.

  Args:
    read: the fields of a row, by its number in the batch.
  """
  sharding, row = batch_sharding(mesh), functools.cache(read)
  (own, *_), *_ = sharding.addressable_devices_indices_map((count,)).values()
  first = row(own.indices(count)[0])

  def place(name: str) -> jax.Array:
    def shard(index: tuple[slice, ...]) -> np.ndarray:
      return np.stack([row(i)[name] for i in range(*index[0].indices(count))])

    return jax.make_array_from_callback((count, *first[name].shape), sharding, shard)

  return Batch(**{field.name: place(field.name) for field in dataclasses.fields(Batch)})


def abstract_params(
  c: config_lib.Model, vocab_size: int, num_classes: int, mesh: Mesh | AbstractMesh
) -> Any:
  """The parameters as a nested dict of `ShapeDtypeStruct`s with shardings.

  A parameter is split over the mesh axes that it was declared with (`decoder.weight`); the leading
  axis of stacked layers is not split.  Axes that do not divide a dimension do not split it, unless
  the parameter declares other axes for that case.
  """

  def describe(param: nnx.Variable) -> jax.ShapeDtypeStruct:
    shape, dtype, declared = param.get_value().shape, param.get_value().dtype, param.get_metadata()
    fits = lambda axes: [divides(axis, size, mesh) for axis, size in zip(axes, shape[-len(axes) :])]
    axes, otherwise = declared["axes"], declared.get("otherwise")
    if otherwise and not all(fits(axes)):
      axes = otherwise
    spec = [axis if fit else None for axis, fit in zip(axes, fits(axes))]
    spec = [None] * (len(shape) - len(axes)) + spec
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

  model = nnx.eval_shape(lambda: StepScorer(c, vocab_size, num_classes, nnx.Rngs(0)))
  return nnx.to_pure_dict(
    jax.tree.map(describe, nnx.state(model), is_leaf=lambda x: isinstance(x, nnx.Variable))
  )


def shardings(abstract: Any) -> Any:
  """The sharding of each array of a described tree."""
  return jax.tree.map(lambda x: x.sharding, abstract)
