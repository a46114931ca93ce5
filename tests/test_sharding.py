"""How state and work are split over devices: tables that show in review, and what is exchanged.

`python tests/test_sharding.py` writes the tables anew.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from conftest import ROOT
from jax.sharding import NamedSharding, PartitionSpec

from prm_jax import config as config_lib
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib
from prm_jax.tpu import compilation, hlo
from prm_jax.training import programs as programs_lib
from prm_jax.training import state as state_lib

GOLDEN = ROOT / "tests/golden"
SLICES = {  # of the production configs, as their docstrings say
  "prm800k_gemma3_4b": "v5p:2x4x4",
  "prm800k_qwen2.5_math_1.5b": "v5e:4x4",
  "prm800k_qwen2.5_math_7b": "v5p:2x4x4",
  "prm800k_qwen2.5_32b": "v5p:4x4x4",
  "prm800k_qwen2.5_math_72b": "v5p:4x4x8",
}
# Sizes of their own, so that nothing else in the suite compiles (and caches) the same program.
MODEL = dataclasses.replace(
  tiny.MODEL,
  width=32,
  layers=3,
  heads=4,
  kv_heads=4,
  head_size=8,
  mlp_width=48,
  remat="full",
  saved=("attention", "query", "key", "value", "output", "gate", "up"),
)


def table(name, models):
  """The sharding table of a production config, whose config.json goes to `models`."""
  from benchmarks import slices

  path = ROOT / f"configs/{name}.py"
  c = config_lib.read(str(path))
  assert f"--topology={SLICES[name]}" in path.read_text()
  checkpoint = slices.write_config(models, pathlib.Path(c.init.checkpoint).name)
  c = dataclasses.replace(c, init=dataclasses.replace(c.init, checkpoint=checkpoint))
  _, state = compilation.described(compilation.Job(c, SLICES[name]))
  mesh = " x ".join(f"{axis} {size}" for axis, size in state.step.sharding.mesh.shape.items())
  return f"{name} on {SLICES[name]}: {mesh}\n\n{state_lib.table(state)}"


@pytest.mark.parametrize("name", SLICES)
def test_shardings_are_those_of_the_table(name, tmp_path):
  """Of every array of the training state; a change of a split shows in review."""
  expected = (GOLDEN / f"{name}.txt").read_text()
  assert table(name, tmp_path) == expected, (
    f"tests/golden/{name}.txt says otherwise; if the change is meant: python tests/test_sharding.py"
  )


def test_every_config_for_a_slice_has_a_table():
  """A config that names a slice is a production config."""
  named = {p.stem for p in (ROOT / "configs").glob("*.py") if "--topology=" in p.read_text()}
  assert named == set(SLICES) == {p.stem for p in GOLDEN.glob("*.txt")}


def program(sizes, vocab_size=64):
  """The text of a train step of three layers, compiled for eight devices."""
  mesh = sharding_lib.make_mesh(config_lib.Mesh(*sizes))
  c = config_lib.Experiment(
    model=dataclasses.replace(MODEL, dtype="bfloat16", attention="dense"),
    train=config_lib.Train(batch_rows=8),
  )
  programs = programs_lib.make(c, vocab_size, 3, mesh)
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_lib.batch_sharding(mesh)),
    tiny.batch(8, 64),
  )
  with jax.set_mesh(mesh):
    return programs.train_step.lower(programs.abstract, batch).compile().as_text()


# Of one layer, forward and backward.  Seven matrices are gathered.  With heads and feed-forward
# split, each half of the layer ends in a sum of activations, and backward begins with one; XLA
# puts gradients that the same devices add up into one reduction.
PINNED = {
  (1, 8, 1): ({"all-gather": 7}, {"all-gather": 7, "all-reduce": 1}),
  (1, 4, 2): (
    {"all-gather": 7, "all-reduce": 2},
    {"all-gather": 7, "all-reduce": 3},
  ),
  (2, 2, 2): (
    {"all-gather": 7, "all-reduce": 2},
    {"all-gather": 7, "all-reduce": 5},
  ),
}


@pytest.mark.parametrize("sizes", PINNED, ids=str)
def test_collectives_of_a_layer_are_pinned(sizes, capfd):
  """No more exchanges than were counted, and no copy of an array that XLA could not split."""
  found = hlo.read(program(sizes))
  assert compilation.REMATERIALISED not in capfd.readouterr().err
  assert tuple(found.loops.values())[:2] == (3, 3) and not found.unknown_loops
  assert tuple(map(found.in_loop, found.loops))[:2] == PINNED[sizes]


@pytest.mark.parametrize("sizes", PINNED, ids=str)
def test_no_device_holds_the_embedding_whole(sizes):
  """Nor its gradient: each looks up some of the columns, in a table of all rows."""
  vocab_size, pieces = 1016, sizes[1] * sizes[2]
  text = program(sizes, vocab_size)
  assert f"[{vocab_size},{MODEL.width // pieces}]" in text
  assert f"[{vocab_size},{MODEL.width}]" not in text


@pytest.mark.parametrize(
  ("width", "spec"), [(3584, ("fsdp", "tensor")), (4096, (None, ("tensor", "fsdp")))]
)
def test_an_embedding_is_split_by_rows_where_columns_are_too_few(width, spec):
  """Over 1,024 chips 3,584 columns are; unsplit it would be 2 GiB a chip, three times."""
  mesh = sharding_lib.abstract_mesh(config_lib.Mesh(1, 256, 4), 1024)
  c = dataclasses.replace(MODEL, width=width)
  params = sharding_lib.abstract_params(c, 152_064, 3, mesh)
  assert params["embedding"].sharding.spec == PartitionSpec(*spec)


@pytest.mark.parametrize("width", [32, 30])
def test_what_is_looked_up_does_not_depend_on_the_mesh(width):
  """Nor does its gradient, where 4 devices split the columns and where they cannot."""
  c, rng = dataclasses.replace(MODEL, width=width), np.random.default_rng(0)
  values, weights = rng.normal(size=(24, width)), rng.normal(size=(8, 5, width))
  tokens = rng.integers(0, 24, (8, 5))

  def product(table):
    x = decoder.look_up(table, jnp.asarray(tokens), c)
    return (x * weights).sum(), x

  gradient = np.zeros_like(values)
  np.add.at(gradient, tokens, weights)
  with jax.set_mesh(sharding_lib.make_mesh(config_lib.Mesh(2, 2, 2))):
    found, x = jax.jit(jax.grad(product, has_aux=True))(values.astype(np.float32))
  np.testing.assert_allclose(x, values[tokens], rtol=1e-6)
  np.testing.assert_allclose(found, gradient, rtol=1e-5, atol=1e-6)


def test_a_copy_that_nobody_asked_for_is_heard(capfd):
  """What the test above listens for is what XLA says."""
  mesh = sharding_lib.make_mesh(config_lib.Mesh(1, 4, 2))
  before = NamedSharding(mesh, PartitionSpec("tensor", None, "fsdp"))
  after = NamedSharding(mesh, PartitionSpec(None, ("fsdp", "tensor")))
  x = jax.ShapeDtypeStruct((16, 16, 16), jnp.float32, sharding=before)
  jax.jit(lambda x: x + 1, out_shardings=after).lower(x).compile()
  assert compilation.REMATERIALISED in capfd.readouterr().err


@pytest.mark.parametrize("wide", [True, False])
def test_gradients_are_added_up_in_the_dtype_that_was_chosen(wide):
  """They leave the products of backward in it (on a CPU, XLA itself always adds in float32)."""
  x, weight = jnp.ones((8, 4), jnp.bfloat16), jnp.ones((4, 6))
  c = dataclasses.replace(MODEL, gradient_dtype="float32" if wide else "activations")

  def both(weight, table):
    y = decoder.product("SD,DF->SF", x, weight, wide)
    looked_up = decoder.look_up(
      table, jnp.zeros((1, 2), int), dataclasses.replace(c, dtype="bfloat16")
    )
    return y.astype(jnp.float32).sum() + looked_up.astype(jnp.float32).sum()

  text = str(jax.make_jaxpr(jax.grad(both, (0, 1)))(weight, jnp.ones((5, 4))))
  dtype = "f32" if wide else "bf16"
  assert f"{dtype}[4,6] = dot_general" in text and f"{dtype}[5,4] = scatter-add" in text


def test_an_axis_that_is_no_whole_number_of_slices_is_refused():
  """Copies of the model keep to their slices: the network between them is slow."""
  device = lambda i: type("Device", (), {"platform": "tpu", "slice_index": i % 2})()
  with pytest.raises(ValueError, match=r"mesh.data=1: expected a multiple of the 2 slices"):
    sharding_lib.make_mesh(config_lib.Mesh(), [device(i) for i in range(8)])


def test_bytes_of_a_device_are_those_of_its_shards():
  """Counted by hand: two dimensions of which the mesh splits one or both."""
  mesh = sharding_lib.abstract_mesh(config_lib.Mesh(1, 4, 2), 8)
  describe = lambda shape, *spec: jax.ShapeDtypeStruct(
    shape, np.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
  )
  tree = [describe((8, 6), "fsdp"), describe((8, 6), "fsdp", "tensor"), describe((3,))]
  assert sharding_lib.bytes_of_a_device(tree) == 4 * (2 * 6 + 2 * 3 + 3)


if __name__ == "__main__":
  import tempfile

  GOLDEN.mkdir(exist_ok=True)
  for each in SLICES:
    (GOLDEN / f"{each}.txt").write_text(table(each, pathlib.Path(tempfile.mkdtemp())))
