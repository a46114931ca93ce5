"""Public weights in and out: names, layouts, shardings, dtypes, and broken files."""

import json
import struct
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import python
from hypothesis import given, settings
from hypothesis import strategies as st

from prm_jax import config as config_lib
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import safetensors_files, weights

VOCABULARY, CLASSES = 40, 3
SHAPE = {"width": 16, "layers": 3, "heads": 4, "kv_heads": 2, "head_size": 4, "mlp_width": 24}
FAMILIES = {  # with every parameter that a family has
  "llama": config_lib.Model(**SHAPE),
  "untied": config_lib.Model(**SHAPE, tied_embeddings=False),
  "qwen2": config_lib.Model(**SHAPE, attention_bias=True),
  "gemma3": config_lib.Model(**SHAPE, norm_offset=True, post_norms=True, query_key_norm=True),
}
LLAMA = FAMILIES["llama"]


def abstract(config, dtype="float32", **mesh):
  """Returns the shapes, dtypes and shardings of a model's parameters on a mesh."""
  tree = decoder.abstract_params(
    config, VOCABULARY, CLASSES, sharding_lib.make_mesh(config_lib.Mesh(**mesh))
  )
  describe = lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
  return jax.tree.map(describe, tree)


def public(config, dtype=np.float32, vocabulary=VOCABULARY):
  """Returns random tensors by public name; the names are written down apart from the package's."""
  c, D, F = config, config.width, config.mlp_width
  N, K, H = config.heads * config.head_size, config.kv_heads * config.head_size, config.head_size
  shapes = {"model.embed_tokens.weight": (vocabulary, D), "model.norm.weight": (D,)}
  if not c.tied_embeddings:
    shapes["lm_head.weight"] = (vocabulary, D)
  for i in range(c.layers):
    layer = {
      "input_layernorm.weight": (D,),
      "post_attention_layernorm.weight": (D,),
      "self_attn.q_proj.weight": (N, D),
      "self_attn.k_proj.weight": (K, D),
      "self_attn.v_proj.weight": (K, D),
      "self_attn.o_proj.weight": (D, N),
      "mlp.gate_proj.weight": (F, D),
      "mlp.up_proj.weight": (F, D),
      "mlp.down_proj.weight": (D, F),
    }
    if c.attention_bias:
      layer |= {f"self_attn.{x}_proj.bias": (s,) for x, s in zip("qkv", (N, K, K))}
    if c.query_key_norm:
      layer |= {"self_attn.q_norm.weight": (H,), "self_attn.k_norm.weight": (H,)}
    if c.post_norms:
      layer |= {f"{x}_feedforward_layernorm.weight": (D,) for x in ("pre", "post")}
    shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
  random = np.random.default_rng(0)
  return {name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def save(directory, tensors, limit=10**9):
  """Returns a directory to which it writes tensors in files of at most `limit` bytes."""
  directory.mkdir(exist_ok=True)
  safetensors_files.write_directory(directory, tensors.items(), limit)
  return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_loaded_and_unloaded_unchanged(tmp_path, family):
  """Loading and unloading gives the same tensors under the same names, and a zero step head."""
  config = FAMILIES[family]
  given = public(config)
  params = weights.load(save(tmp_path / "m", given), abstract(config, tensor=2), config)
  back = dict(weights.unload(params, config))
  zero = {"score.weight": (CLASSES, SHAPE["width"]), "score.bias": (CLASSES,)}
  assert {n: t.shape for n, t in back.items() if n in zero and not t.any()} == zero
  assert back.keys() == given.keys() | zero.keys()
  for name, tensor in given.items():
    np.testing.assert_array_equal(back[name], tensor, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_files_of_any_float_fill_parameters_of_any_float(tmp_path, dtype):
  """A float32, bfloat16 or float16 file fills float32 and bfloat16 parameters, rounded once."""
  given = public(LLAMA, jnp.dtype(dtype))
  path = save(tmp_path / "m", given)
  for wanted in ("float32", "bfloat16"):
    params = weights.load(path, abstract(LLAMA, wanted), LLAMA)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(wanted)}
    expected = given["model.embed_tokens.weight"].astype(jnp.dtype(wanted))
    np.testing.assert_array_equal(params["embedding"], expected)


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "tensor": 4}])
def test_sharded_weights_have_the_values_of_the_files(tmp_path, mesh):
  """On any mesh, parameters from several files have the declared shardings and their values."""
  path = save(tmp_path / "m", public(LLAMA), limit=3000)
  assert (path / safetensors_files.INDEX).is_file()
  tree = abstract(LLAMA, **mesh)
  params = weights.load(path, tree, LLAMA)
  assert jax.tree.all(jax.tree.map(lambda x, a: x.sharding == a.sharding, params, tree))
  for name, tensor in weights.unload(params, LLAMA):
    if not name.startswith("score"):
      np.testing.assert_array_equal(tensor, public(LLAMA)[name])


def test_a_classifier_head_fills_the_step_head(tmp_path):
  """score.* fills the step head if its classes are as many, and is ignored otherwise."""
  given = public(LLAMA)
  head = np.arange(CLASSES * 16, dtype=np.float32).reshape(CLASSES, 16)
  fitting = given | {"score.weight": head, "score.bias": np.ones(CLASSES, np.float32)}
  params = weights.load(save(tmp_path / "a", fitting), abstract(LLAMA), LLAMA)
  np.testing.assert_array_equal(params["head"], head.T)
  np.testing.assert_array_equal(params["head_bias"], np.ones(CLASSES))
  params = weights.load(
    save(tmp_path / "b", given | {"score.weight": head}), abstract(LLAMA), LLAMA
  )
  np.testing.assert_array_equal(params["head"], head.T)
  assert not params["head_bias"].any()
  other = save(tmp_path / "c", given | {"score.weight": head[:2]})
  assert not weights.load(other, abstract(LLAMA), LLAMA)["head"].any()


def test_other_public_names_are_understood(tmp_path):
  """A trunk saved alone, the text part of a model with pictures, and a copied head all load."""
  given = public(LLAMA)
  trunk = {n.removeprefix("model."): t for n, t in given.items()}
  pictures = {f"language_model.{n}": t for n, t in given.items()}
  pictures["vision_tower.patch.weight"] = np.ones(2, np.float32)
  newer = {n.replace("model.", "model.language_model."): t for n, t in given.items()}
  newer["model.vision_tower.patch.weight"] = np.ones(2, np.float32)
  tied = given | {"lm_head.weight": given["model.embed_tokens.weight"]}
  for i, tensors in enumerate((trunk, pictures, newer, tied)):
    params = weights.load(save(tmp_path / str(i), tensors), abstract(LLAMA), LLAMA)
    np.testing.assert_array_equal(params["embedding"], given["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_two_names_of_one_tensor_are_refused(tmp_path, name):
  """A tensor under two public names is an error that has both names."""
  given = public(FAMILIES["untied"])
  given[f"language_model.{name}"] = given[name] + 1
  with pytest.raises(ValueError, match=rf"language_model\.{name} and {name} are both"):
    weights.tensors(save(tmp_path / "m", given))


def test_the_error_of_another_models_files_lists_the_tensors(tmp_path):
  """Missing, unknown, wrongly shaped and quantised tensors are one error with at most ten names."""
  wrong = public(FAMILIES["qwen2"])
  del wrong["model.layers.2.mlp.up_proj.weight"]
  wrong["model.norm.weight"] = np.ones(15, np.float32)
  wrong["model.layers.0.mlp.up_proj.weight"] = np.ones((24, 16), np.int8)
  with pytest.raises(ValueError) as error:
    weights.load(save(tmp_path / "m", wrong), abstract(LLAMA), LLAMA)
  for message in (
    "1 missing: model.layers.2.mlp.up_proj.weight;",
    "9 unknown: model.layers.0.self_attn.k_proj.bias, ",
    "model.norm.weight [15] F32, expected [16]",
    "mlp.up_proj.weight [24, 16] I8, expected",
  ):
    assert message in str(error.value)
  only = save(tmp_path / "d", {"model.norm.weight": np.ones(16, np.float32)})
  with pytest.raises(ValueError, match=r"28 missing: (\S+, ){10}\.\.\.$"):
    weights.load(only, abstract(LLAMA), LLAMA)


def test_tensors_named_by_the_caller_are_not_unknown(tmp_path):
  """A reader of another head names its tensors, which are then no error and can be read."""
  given = public(LLAMA) | {"v_head.summary.weight": np.ones((1, 16), np.float32)}
  path = save(tmp_path / "m", given)
  with pytest.raises(ValueError, match=r"1 unknown: v_head\.summary\.weight"):
    weights.load(path, abstract(LLAMA), LLAMA)
  weights.load(path, abstract(LLAMA), LLAMA, others=("v_head.*",))
  np.testing.assert_array_equal(weights.tensors(path)["v_head.summary.weight"].read(), [[1.0] * 16])


def file_of(header, data=b""):
  """Returns the bytes of a safetensors file."""
  text = json.dumps(header).encode()
  return struct.pack("<Q", len(text)) + text + data


def entry(shape, begin, end, dtype="F32"):
  """Returns a tensor's entry in the header of a safetensors file."""
  return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_broken_files_are_errors_or_tensors_within_the_file(tmp_path_factory, data):
  """A file with changed or missing bytes is an error with its path, or tensors within the file."""
  path = tmp_path_factory.getbasetemp() / "broken.safetensors"
  whole = bytearray(
    file_of({"a": entry([2, 3], 0, 24), "b": entry([4], 24, 32, "BF16")}, b"1" * 32)
  )
  for _ in range(data.draw(st.integers(1, 4))):
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
  path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
  try:
    tensors = safetensors_files.read_file(path)
  except ValueError as error:
    assert str(path) in str(error)
  else:
    assert sum(tensor.read().nbytes for tensor in tensors.values()) <= len(whole)


@pytest.mark.parametrize(
  ("index", "message"),
  [
    ({}, "weight_map"),
    ({"weight_map": {"a": "../x.safetensors"}}, "no safetensors file '../x.safetensors' beside it"),
    ({"weight_map": {"b": "one.safetensors"}}, "a of one.safetensors"),
  ],
)
def test_an_index_names_files_of_its_directory_only(tmp_path, index, message):
  """An index that names a file elsewhere, or disagrees with the files, is an error."""
  (tmp_path / "one.safetensors").write_bytes(file_of({"a": entry([1], 0, 4)}, b"0000"))
  (tmp_path / safetensors_files.INDEX).write_text(json.dumps(index))
  with pytest.raises(ValueError) as error:
    safetensors_files.read_directory(tmp_path)
  assert message in str(error.value)


def test_a_single_file_is_read_before_an_index(tmp_path):
  """A directory with both, as after another save, gives the weights that transformers reads."""
  (tmp_path / safetensors_files.SINGLE).write_bytes(file_of({"a": entry([1], 0, 4)}, b"0000"))
  (tmp_path / "shard.safetensors").write_bytes(file_of({"b": entry([1], 0, 4)}, b"0000"))
  (tmp_path / safetensors_files.INDEX).write_text('{"weight_map": {"b": "shard.safetensors"}}')
  assert [*safetensors_files.read_directory(tmp_path)] == ["a"]


def test_pickles_are_never_opened(tmp_path):
  """A directory of pickled weights is an error that tells how to convert it."""
  (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
  with pytest.raises(ValueError, match=r"pytorch_model\.bin.*none is ever opened.*save_pretrained"):
    weights.tensors(tmp_path)
  with pytest.raises(FileNotFoundError, match="not a model directory"):
    weights.tensors(tmp_path / "nowhere")


MEMORY = """
import ctypes, gc, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
from prm_jax import config as config_lib
from prm_jax.pretrained import weights
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib

def memory(key):  # VmRSS: now, VmHWM: at most
  return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) * 1024

config = config_lib.Model(width=512, layers=12, heads=8, kv_heads=8, head_size=64, mlp_width=2048)
abstract = decoder.abstract_params(config, 16384, 3, sharding_lib.make_mesh(config_lib.Mesh()))
jax.block_until_ready(weights.load(sys.argv[1], abstract, config))  # compiles, and is dropped
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the highest is counted anew
params = weights.load(sys.argv[1], abstract, config)
sizes = [x.nbytes for x in jax.tree.leaves(params)]
print(memory("VmHWM") - before, sum(sizes), max(sizes))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_loading_needs_memory_for_the_shards_and_one_parameter(tmp_path):
  """The process grows by its shards and at most the largest parameter, not by the whole file."""
  config = config_lib.Model(width=512, layers=1, heads=8, kv_heads=8, head_size=64, mlp_width=2048)
  shapes = {n: t.shape for n, t in public(config, vocabulary=16384).items()}
  for i in range(1, 12):
    shapes |= {n.replace(".0.", f".{i}."): s for n, s in shapes.items() if ".0." in n}
  dtype = np.dtype(ml_dtypes.bfloat16)
  tensors = ((name, np.ones(shape, dtype)) for name, shape in shapes.items())
  safetensors_files.write_directory(tmp_path, tensors)
  growth, shards, largest = map(int, python("-c", MEMORY, tmp_path).stdout.split())
  # 32 MB for the interpreter and the allocator; the whole file would be 117 MB more
  assert growth < shards + largest + 2**25, f"{growth / 2**20:.0f} MB for {shards / 2**20:.0f} MB"
