"""The axes of the device mesh, and the sharding of activations inside the model."""

import math

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # axes that split the rows of a batch
HEADS = "tensor"  # axis that splits attention heads
Axis = str | tuple[str, ...] | None  # mesh axis, or several, of one dimension; None: not split


def divides(axis: Axis, size: int, mesh: Mesh | AbstractMesh) -> bool:
  """Whether the mesh axis splits a dimension of `size` into equal parts."""
  names = (axis,) if isinstance(axis, str) else axis or ()
  return size % math.prod(mesh.shape.get(name, 1) for name in names) == 0


def constrain(x: jax.Array, *axes: Axis) -> jax.Array:
  """`x` with its dimensions sharded over these axes of the current mesh; without a mesh, `x`."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))
