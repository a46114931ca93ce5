"""Sharding of state and work over devices: golden tables, and the collectives of a step.

`python tests/test_sharding.py` writes the tables anew.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from conftest import ROOT
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from prm_jax import config as config_lib
from prm_jax.model import decoder, embedding
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import command_line
from prm_jax.tpu import compilation, hlo
from prm_jax.training import step as step_lib

GOLDEN = ROOT / "tests/golden"
TOPOLOGIES = {  # TPU slices by production config, each of which names its slice in its docstring
  path.stem: topology[1]
  for path in sorted((ROOT / "configs").glob("*.py"))
  if (topology := re.search(r"--topology=(\S+)", path.read_text()))
}
# No other test compiles, and caches, programs of these sizes.
MODEL = dataclasses.replace(
  tiny.MODEL,
  width=32,
  layers=3,
  heads=4,
  kv_heads=4,
  head_size=8,
  mlp_width=48,
  remat="full",
  saved=("attention", "attention_inputs", "residual", "gate", "up"),
)


def table(name):
  """The sharding table of a production config."""
  c = command_line.read(str(ROOT / f"configs/{name}.py"))
  chips = math.prod(compilation.Job(c, TOPOLOGIES[name]).shape())
  state = tiny.described(*compilation.resolved(c), chips)
  mesh = " x ".join(f"{axis} {size}" for axis, size in state.step.sharding.mesh.shape.items())
  return f"{name} on {TOPOLOGIES[name]}: {mesh}\n\n{state_table(state)}"


def bytes_of_a_device(state):
  """Bytes that one device holds of all arrays of a tree with shardings."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state)
  )


def state_table(state):
  """A line for each array of an abstract state: name, shape, dtype, mesh axes, bytes per device."""
  rows = [("array", "shape", "dtype", "axes", "bytes of a device")]
  for path, x in jax.tree_util.tree_leaves_with_path(state):
    spec = (*x.sharding.spec, *[None] * (len(x.shape) - len(x.sharding.spec)))
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    axes = ", ".join("-" if not a else a if isinstance(a, str) else " + ".join(a) for a in spec)
    size = f"{bytes_of_a_device(x):,}"
    rows.append((name, str(list(x.shape)), x.dtype.name, f"[{axes}]", size))
  rows.append(("all", "", "", "", f"{bytes_of_a_device(state):,}"))
  widths = [max(len(row[i]) for row in rows) for i in range(5)]
  lines = [
    "  ".join([*(cell.ljust(w) for cell, w in zip(row[:4], widths)), row[4].rjust(widths[4])])
    for row in rows
  ]
  return "\n".join(lines) + "\n"


def test_rows_that_do_not_divide_are_refused_with_a_remedy():
  """Rows that do not divide over devices and passes are refused, with a number that does."""
  mesh = sharding_lib.make_mesh(config_lib.Mesh())
  for rows, passes, unit, more in ((4, 1, 8, 8), (8, 3, 24, 24)):
    train = config_lib.Train(batch_rows=rows, microbatches=passes)
    c = config_lib.Experiment(train=train, model=MODEL)
    message = (
      rf"multiple of {unit}: rows .* over 8 devices .* set --config.train.batch_rows={more},"
    )
    with pytest.raises(ValueError, match=message):
      step_lib.make(c, 10, 3, mesh)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_shardings_equal_the_golden_tables(name):
  """The sharding of every array of a production config's training state is that of its table."""
  assert set(TOPOLOGIES) == {path.stem for path in GOLDEN.glob("*.txt")}
  expected = (GOLDEN / f"{name}.txt").read_text()
  assert table(name) == expected, (
    f"tests/golden/{name}.txt differs; if the change is intended: python tests/test_sharding.py"
  )


def program(sizes, vocab_size):
  """The text of a train step of three layers, compiled for eight devices."""
  mesh = sharding_lib.make_mesh(config_lib.Mesh(*sizes))
  c = config_lib.Experiment(
    model=dataclasses.replace(MODEL, dtype="bfloat16", attention="dense"),
    train=config_lib.Train(batch_rows=8),
  )
  programs = step_lib.make(c, vocab_size, 3, mesh)
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_lib.batch_sharding(mesh)),
    tiny.batch(8, 64),
  )
  with jax.set_mesh(mesh):
    return programs.train_step.lower(programs.abstract, batch).compile().as_text()


# Collectives of one layer, forward and backward.  Seven matrices are gathered.  If heads and
# feed-forward are split, each half of the layer ends in an all-reduce of activations, and its
# backward pass begins with one.  XLA combines reductions of gradients over the same devices.
PINNED = {
  (1, 8, 1): ({"all-gather": 7}, {"all-gather": 7, "all-reduce": 1}),
  (1, 4, 2): ({"all-gather": 7, "all-reduce": 2}, {"all-gather": 7, "all-reduce": 3}),
  (2, 2, 2): ({"all-gather": 7, "all-reduce": 2}, {"all-gather": 7, "all-reduce": 5}),
}


@pytest.mark.parametrize(
  "sizes", [(1, 8, 1), pytest.param((1, 4, 2), marks=pytest.mark.slow), (2, 2, 2)], ids=str
)
def test_a_layer_has_no_more_collectives_than_counted(sizes, capfd):
  """A sharded layer has the counted collectives, and XLA rematerialises no whole array.

  No device holds the whole embedding or its gradient: each reads its own columns.
  """
  vocab_size, pieces = 1016, sizes[1] * sizes[2]
  text = program(sizes, vocab_size)
  read = hlo.read(text)
  assert compilation.REMATERIALISED not in capfd.readouterr().err
  layers = [name for name, times in read.loops.items() if times == MODEL.layers]
  assert tuple(map(read.in_loop, layers)) == PINNED[sizes] and not read.unknown_loops
  assert f"[{vocab_size},{MODEL.width // pieces}]" in text
  assert f"[{vocab_size},{MODEL.width}]" not in text


@pytest.mark.parametrize(
  ("width", "spec"), [(3584, ("fsdp", "tensor")), (4096, (None, ("tensor", "fsdp")))]
)
def test_an_embedding_with_too_few_columns_is_split_by_rows(width, spec):
  """An embedding whose columns do not divide over the chips is split by rows instead.

  1,024 chips do not divide 3,584 columns; unsplit, the table would take 2 GiB of each chip.
  """
  mesh = tiny.abstract_mesh(config_lib.Mesh(1, 256, 4), 1024)
  c = dataclasses.replace(MODEL, width=width)
  params = decoder.abstract_params(c, 152_064, 3, mesh)
  assert params["embedding"].sharding.spec == PartitionSpec(*spec)


@pytest.mark.parametrize("width", [32, 30])
def test_a_sharded_embedding_equals_a_whole_one(width):
  """A sharded embedding has the values and gradient of a whole one, split by columns or rows."""
  c, rng = dataclasses.replace(MODEL, width=width), np.random.default_rng(0)
  values, weights = rng.normal(size=(24, width)), rng.normal(size=(8, 5, width))
  tokens = rng.integers(0, 24, (8, 5))

  def weighted(table):
    x = embedding.embed(table, jnp.asarray(tokens), c)
    return (x * weights).sum(), x

  gradient = np.zeros_like(values)
  np.add.at(gradient, tokens, weights)
  with jax.set_mesh(sharding_lib.make_mesh(config_lib.Mesh(2, 2, 2))):
    sharded, x = jax.jit(jax.grad(weighted, has_aux=True))(values.astype(np.float32))
  np.testing.assert_allclose(x, values[tokens], rtol=1e-6)
  np.testing.assert_allclose(sharded, gradient, rtol=1e-5, atol=1e-6)


def test_xla_reports_rematerialised_arrays(capfd):
  """XLA prints `compilation.REMATERIALISED` when it rematerialises a whole array."""
  mesh = sharding_lib.make_mesh(config_lib.Mesh(1, 4, 2))
  before = NamedSharding(mesh, PartitionSpec("tensor", None, "fsdp"))
  after = NamedSharding(mesh, PartitionSpec(None, ("fsdp", "tensor")))
  x = jax.ShapeDtypeStruct((16, 16, 16), jnp.float32, sharding=before)
  jax.jit(lambda x: x + 1, out_shardings=after).lower(x).compile()
  assert compilation.REMATERIALISED in capfd.readouterr().err


def hidden_total(c):
  """Returns a sum over a model's hidden states, a function of the two others: parameters, batch."""
  graphdef, params = nnx.split(decoder.StepScorer(c, 1016, 3, nnx.Rngs(0)))

  def total(params, batch):
    hidden = nnx.merge(graphdef, params).hidden(batch.tokens, batch.positions, batch.subtree_end)
    return jnp.sin(hidden.astype(jnp.float32)).sum()

  return total, nnx.to_pure_dict(params), tiny.batch(4, 64)


@pytest.mark.parametrize(("choice", "dtype"), [("float32", "f32"), ("activations", "bf16")])
def test_gradients_are_reduced_in_the_chosen_dtype(choice, dtype):
  """Backward products return `gradient_dtype`, in which XLA reduces gradients on a TPU."""
  c = dataclasses.replace(MODEL, dtype="bfloat16", gradient_dtype=choice)
  total, *inputs = hidden_total(c)
  feed_forward = f"{dtype}[{c.width},{c.mlp_width}] = dot_general"
  assert feed_forward in str(jax.make_jaxpr(jax.grad(total))(*inputs))


@pytest.mark.parametrize(
  ("dtype", "bits", "close"), [("float32", "u32", 1e-5), ("bfloat16", "u16", 0.1)]
)
def test_unrolled_layers_gather_each_weight_once_on_a_cpu(dtype, bits, close):
  """A product and its gradient share a gather, of the activations' dtype; gradients are right.

  They are compared with float32 gradients of one device: two bfloat16 programs round independently.
  Two tensor shards do not divide the single key head, whose weights are sharded over fsdp only.
  """
  c = dataclasses.replace(
    MODEL, kv_heads=1, remat="none", saved=(), unroll_layers=True, dtype=dtype
  )
  mesh = sharding_lib.make_mesh(config_lib.Mesh(2, 2, 2))
  total, params, batch = hidden_total(c)
  exact, *_ = hidden_total(dataclasses.replace(c, dtype="float32"))
  expected = jax.grad(exact)(params, batch)
  abstract = decoder.abstract_params(c, 1016, 3, mesh)
  with jax.set_mesh(mesh):
    placed = jax.device_put(params, sharding_lib.shardings(abstract))
    rows = jax.device_put(batch, sharding_lib.batch_sharding(mesh))
    program = jax.jit(jax.grad(total)).lower(placed, rows).compile()
    gradients = program(placed, rows)
  gathers = re.findall(r"= (\w+)\[\S* all-gather\(", program.as_text())
  assert gathers.count(bits) == 7 * c.layers
  for got, whole in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected)):
    assert np.linalg.norm(got - whole) <= close * np.linalg.norm(whole)


@pytest.mark.parametrize("choice", ["float32", "activations"])
def test_the_embedding_of_a_frequent_token_gets_its_whole_gradient(choice):
  """Thousands of occurrences are summed without the loss of bfloat16, which stops at 256."""
  c = dataclasses.replace(MODEL, dtype="bfloat16", gradient_dtype=choice)
  total = lambda table: embedding.embed(table, jnp.ones((4, 1024), int), c).astype(float).sum()
  gradient = jax.grad(total)(jnp.ones((3, 2)))
  np.testing.assert_array_equal(gradient, [[0, 0], [4096, 4096], [0, 0]])


def test_replicas_across_slices_are_refused():
  """A data axis that is no multiple of the slices is refused: a replica must not span slices."""
  device = lambda i: type("Device", (), {"platform": "tpu", "slice_index": i % 2})()
  for c in (config_lib.Mesh(), config_lib.Mesh(data=-1, fsdp=8)):
    with pytest.raises(ValueError, match=r"mesh.data=1: expected a multiple of the 2 slices"):
      sharding_lib.make_mesh(c, [device(i) for i in range(8)])


if __name__ == "__main__":
  GOLDEN.mkdir(exist_ok=True)
  for each in TOPOLOGIES:
    (GOLDEN / f"{each}.txt").write_text(table(each))
