"""GGUF files: tiny models written by the format's own package, real SmolLM2, files that lie."""

import json
import os
import pathlib
import struct
import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prm_jax import config as config_lib
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import families, gguf_files, weights

gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")

V, D, L, N, K, H, F = 64, 32, 2, 4, 2, 8, 64
METADATA = {
  "block_count": L,
  "context_length": 128,
  "embedding_length": D,
  "feed_forward_length": F,
  "attention.head_count": N,
  "attention.head_count_kv": K,
  "attention.key_length": H,
}
LAYER = {  # name in the GGUF file, public name, shape
  "attn_norm.weight": ("input_layernorm.weight", (D,)),
  "attn_q.weight": ("self_attn.q_proj.weight", (N * H, D)),
  "attn_k.weight": ("self_attn.k_proj.weight", (K * H, D)),
  "attn_v.weight": ("self_attn.v_proj.weight", (K * H, D)),
  "attn_output.weight": ("self_attn.o_proj.weight", (D, N * H)),
  "ffn_norm.weight": ("post_attention_layernorm.weight", (D,)),
  "ffn_gate.weight": ("mlp.gate_proj.weight", (F, D)),
  "ffn_up.weight": ("mlp.up_proj.weight", (F, D)),
  "ffn_down.weight": ("mlp.down_proj.weight", (D, F)),
}
QWEN2 = {f"attn_{x}.bias": (f"self_attn.{x}_proj.bias", (n,)) for x, n in zip("qkv", (32, 16, 16))}
QWEN3 = {f"attn_{x}_norm.weight": (f"self_attn.{x}_norm.weight", (H,)) for x in "qk"}
GEMMA = {
  "ffn_norm.weight": ("pre_feedforward_layernorm.weight", (D,)),
  "post_attention_norm.weight": ("post_attention_layernorm.weight", (D,)),
  "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", (D,)),
}
LAYERS = {
  "llama": LAYER,
  "qwen2": LAYER | QWEN2,
  "qwen3": LAYER | QWEN3,
  "gemma2": LAYER | GEMMA,
  "gemma3": LAYER | QWEN3 | GEMMA,
}
KEYS = {  # beside METADATA
  "gemma2": {
    "attention.sliding_window": 16,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
  },
  "gemma3": {"attention.sliding_window": 16},
}


def public(family, tied=True):
  """Random tensors under public names."""
  random = np.random.default_rng(0)
  shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
  shapes |= {} if tied else {"lm_head.weight": (V, D)}
  for i in range(L):
    shapes |= {f"model.layers.{i}.{name}": shape for name, shape in LAYERS[family].values()}
  return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def interleaved(rows, heads):
  """As llama.cpp stores rotary rows of Llama: of each head 0, h/2, 1, h/2 + 1, ..."""
  size = rows.shape[0] // heads
  order = [size * n + i + j for n in range(heads) for i in range(size // 2) for j in (0, size // 2)]
  return rows[order]


def write(path, family, tensors, kind=None, change=None, extra=None):
  """A file of the package's own writer; `kind` quantises the matrices."""
  writer = gguf.GGUFWriter(path, family)
  for key, value in (METADATA | KEYS.get(family, {}) | (change or {})).items():
    kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[type(value)](f"{family}.{key}", value)
  writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", 1e-5)
  writer.add_float32(f"{family}.rope.freq_base", 500_000.0)
  writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(V)])
  writer.add_array("tokenizer.ggml.scores", [0.5] * V)
  writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
  names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
  for name, value in tensors.items():
    stem = name.removesuffix(".weight")
    file_name = f"{names.get(stem)}.weight"
    if name.startswith("model.layers."):
      layer, rest = name.removeprefix("model.layers.").split(".", 1)
      file_name = f"blk.{layer}." + next(k for k, v in LAYERS[family].items() if v[0] == rest)
      if family == "llama" and ("attn_q." in file_name or "attn_k." in file_name):
        value = interleaved(value, N if "attn_q." in file_name else K)
    if family.startswith("gemma") and name.endswith("norm.weight"):
      value = value + 1
    if kind is None or value.ndim == 1:
      writer.add_tensor(file_name, np.ascontiguousarray(value))
    else:
      writer.add_tensor(file_name, gguf.quants.quantize(value, kind), raw_dtype=kind)
  for name, value in (extra or {}).items():
    writer.add_tensor(name, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def load(path, preset):
  mesh = sharding_lib.make_mesh(config_lib.Mesh(tensor=2))
  abstract = sharding_lib.abstract_params(preset.config, preset.vocab_size, 3, mesh)
  return weights.load(path, abstract, preset.config)


@pytest.mark.parametrize("family", LAYERS)
def test_a_model_of_each_family_is_read_as_it_was(tmp_path, family):
  """Tensors come back under public names, rotary rows and Gemma's norms as in public files."""
  given = public(family, tied=family != "qwen3")
  path = write(tmp_path / "m.gguf", family, given)
  preset = families.read(path)
  assert (preset.family, preset.vocab_size) == (family, V)
  c = preset.config
  assert (c.width, c.layers, c.heads, c.kv_heads, c.head_size, c.mlp_width) == (D, L, N, K, H, F)
  assert (c.rope_theta, c.norm_epsilon) == (500_000.0, 1e-5)
  assert c.tied_embeddings == (family != "qwen3")
  assert preset.tokens == {"eos": 2}
  back = dict(weights.unload(load(path, preset), c))
  assert back.keys() - given.keys() == {"score.weight", "score.bias"}
  for name, value in given.items():
    # 1 + w, which Gemma's files have, is rounded
    np.testing.assert_allclose(back[name], value, atol=2e-7 if "norm" in name else 0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0", "BF16", "F16"])
def test_blocks_are_dequantised(tmp_path, kind):
  """What is read of quantised matrices is what the package de-quantises, to the bit."""
  kind = gguf.GGMLQuantizationType[kind]
  given = public("qwen2")
  found = weights.tensors(write(tmp_path / "m.gguf", "qwen2", given, kind))
  for name, value in given.items():
    if value.ndim == 2:
      value = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
    np.testing.assert_array_equal(found[name].read().astype(np.float32), value, name)


def test_scaled_rotary_positions_are_found_in_the_factors(tmp_path):
  """Llama 3.1's scaling stands in a GGUF file as its result only; the rule is found again."""
  config = {"head_dim": H, "rope_theta": 500_000.0}
  for factor in (8.0, 32.0):
    factors = {"rope_freqs.weight": gguf_files.llama3_factors(config, factor)}
    path = write(tmp_path / f"{factor}.gguf", "llama", public("llama"), extra=factors)
    c = families.read(path).config
    assert (c.rope_scaling, c.rope_factor, c.rope_original_length) == ("llama3", factor, 8192)
    weights.tensors(path)
  both = {"rope.scaling.factor": 4.0}
  with pytest.raises(ValueError, match="and linear RoPE scaling too"):
    families.read(
      write(tmp_path / "both.gguf", "llama", public("llama"), change=both, extra=factors)
    )
  odd = {"rope_freqs.weight": np.full(H // 2, 3, np.float32)}
  with pytest.raises(ValueError, match="factors of no known RoPE scaling"):
    families.read(write(tmp_path / "odd.gguf", "llama", public("llama"), extra=odd))


def test_two_names_of_one_tensor_are_refused(tmp_path):
  """A tensor under llama.cpp's name and under the public one too: both are named."""
  extra = {"model.norm.weight": np.ones(D, np.float32)}
  path = write(tmp_path / "m.gguf", "qwen2", public("qwen2"), extra=extra)
  with pytest.raises(ValueError, match=r"m\.gguf: output_norm\.weight and model\.norm\.weight are"):
    weights.tensors(path)


def test_a_head_size_that_lies_allocates_nothing(tmp_path):
  """Factors are computed for as many frequencies as the file has, not as it claims."""
  extra = {"rope_freqs.weight": np.ones(H // 2, np.float32)}
  change = {"attention.key_length": 4_000_000_000}
  path = write(tmp_path / "m.gguf", "llama", public("llama"), change=change, extra=extra)
  with pytest.raises(ValueError, match=r"rope_freqs\.weight \[4\]: .*key_length=4000000000"):
    gguf_files.read_config(path)


@pytest.mark.parametrize(
  ("change", "factor"),
  [
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
    ({"rope.scaling.factor": 4.0}, 4.0),
    ({"rope.scale_linear": 4.0}, 4.0),
    ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, 2.0),
    ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
    ({"rope.scaling.factor": 1.0}, None),
    ({"rope.scale_linear": 0.0}, None),
    ({}, None),
  ],
)
def test_linear_scaling_needs_no_type(tmp_path, change, factor):
  """A factor without a type, under either of its names, is linear scaling, as in llama.cpp."""
  path = write(tmp_path / "m.gguf", "llama", public("llama"), change=change)
  expected = factor and {"rope_type": "linear", "factor": factor}
  assert gguf_files.read_config(path)["rope_scaling"] == expected
  c = families.read(path).config
  assert (c.rope_scaling, c.rope_factor) == (("linear", factor) if factor else ("none", 1.0))


@pytest.mark.parametrize(
  ("family", "change", "message"),
  [
    ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "rope_type='yarn'"),
    ("llama", {"attention.head_count": 4.0}, "attention.head_count=4.0: of a wrong type"),
    ("llama", {"block_count": 2**31}, "num_hidden_layers=2147483648: expected 1 to 1000"),
    ("llama", {"expert_count": 8}, "mixtures of experts are not supported"),
    ("llama", {"rope.dimension_count": 4}, "rotary parts are not supported"),
    ("gemma2", {"attention.head_count": 0}, "attention.head_count=0"),
    ("llama", {"block_count": "2"}, "llama.block_count='2': of a wrong type"),
  ],
)
def test_unsupported_features_are_named(tmp_path, family, change, message):
  """A file that asks for another arithmetic is refused, not read wrongly."""
  path = write(tmp_path / "m.gguf", family, public(family), change=change)
  with pytest.raises(ValueError, match=message):
    families.read(path)


def test_other_architectures_are_named(tmp_path):
  """A family that is not supported is an error that names it and those there are."""
  writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  with pytest.raises(ValueError, match=r"'mamba' is not supported; there are llama, qwen2"):
    families.read(tmp_path / "m.gguf")
  text = number(1) + b"a"
  listed = number(20) + b"general.architecture" + number(9, "I")
  for kind, values in ((8, text * 2), (6, bytes(8))):  # of texts, of numbers
    (tmp_path / "m.gguf").write_bytes(
      header(keys=1, rest=listed + number(kind, "I") + number(2) + values)
    )
    for reader in (families.read, weights.tensors):
      with pytest.raises(ValueError, match=r"m\.gguf: general\.architecture=.* is not supported"):
        reader(tmp_path / "m.gguf")


def test_without_the_package_the_error_says_how_to_get_it(tmp_path, monkeypatch):
  """Quantised tensors need the extra; plain ones do not."""
  plain = write(tmp_path / "plain.gguf", "llama", public("llama"))
  kind = gguf.GGMLQuantizationType.Q8_0
  blocks = write(tmp_path / "blocks.gguf", "llama", public("llama"), kind)
  monkeypatch.setitem(sys.modules, "gguf", None)
  families.read(plain)
  with pytest.raises(ImportError, match=r"pip install 'prm_jax\[gguf\]'"):
    families.read(blocks)


def number(value, code="Q"):
  return struct.pack("<" + code, value)


def header(tensors=0, keys=0, rest=b"", version=3):
  return b"GGUF" + number(version, "I") + number(tensors) + number(keys) + rest


def key(kind, rest):
  return number(1) + b"k" + number(kind, "I") + rest


def tensor(shape, kind=0, offset=0):
  sizes = b"".join(map(number, shape))
  return number(1) + b"t" + number(len(shape), "I") + sizes + number(kind, "I") + number(offset)


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"", "not a GGUF file"),
    (b"GGML" + bytes(100), "not a GGUF file"),
    (b"GGUF", "cut off"),
    (header(version=1), "version 1"),
    (header(version=0x03000000), "version 50331648"),
    (header(tensors=10**12), "claims 1,000,000,000,000 tensors"),
    (header(keys=2**63), "metadata keys; at most"),
    (header(keys=3), "cut off"),
    (header(keys=1, rest=number(10**13) + b"k"), "bytes of text"),
    (header(keys=1, rest=key(8, number(10**9) + b"k")), "bytes of text"),
    (header(keys=1, rest=key(8, number(2) + b"\xff\xff")), "not UTF-8"),
    (header(keys=1, rest=key(99, b"")), "unknown type 99"),
    (header(keys=1, rest=key(9, number(8, "I") + number(10**12))), "texts in an array"),
    (header(keys=1, rest=key(9, number(8, "I") + number(10**6))), "cut off"),
    (header(keys=1, rest=key(9, number(6, "I") + number(10**15))), "cut off"),
    (header(keys=1, rest=key(9, number(9, "I") + number(1))), "an array of type 9"),
    (header(1, rest=tensor([2]) + bytes(100)), None),
    (header(2, rest=tensor([2]) * 2 + bytes(100)), "twice"),
    (header(1, rest=tensor([10**6, 10**6])), "ends at byte 4,000,000,000,"),
    (header(1, rest=tensor([2**63, 2**63])), "cut off"),
    (header(1, rest=tensor([2], offset=2**62)), "cut off"),
    (header(1, rest=tensor([1] * 9)), "9 dimensions"),
    (header(1, rest=tensor([0]) + bytes(64)), "blocks"),
    (header(1, rest=tensor([33], kind=8) + bytes(200)), "blocks of 32"),
    (header(1, rest=tensor([32], kind=777) + bytes(200)), "unknown block layout 777"),
  ],
)
def test_headers_that_lie_are_errors_at_once(tmp_path, content, message):
  """Whatever a file claims, nothing is allocated for it, and the message names the file."""
  path = tmp_path / "m.gguf"
  path.write_bytes(content)
  if message is None:
    assert gguf_files.read_header(path).tensors["t"].shape == (2,)
    return
  with pytest.raises(ValueError) as error:
    gguf_files.read_header(path)
  assert str(path) in str(error.value) and message in str(error.value)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_broken_files_are_errors_or_harmless(tmp_path_factory, data):
  """A file with bytes changed or cut is a ValueError, or gives tensors within the file."""
  path = tmp_path_factory.getbasetemp() / "broken.gguf"
  if not path.with_suffix(".whole").is_file():
    write(path.with_suffix(".whole"), "llama", public("llama"))
  whole = bytearray(path.with_suffix(".whole").read_bytes())
  for _ in range(data.draw(st.integers(1, 4))):
    whole[data.draw(st.integers(0, 4000))] = data.draw(st.integers(0, 255))
  path.write_bytes(whole[: data.draw(st.integers(0, 2 * len(whole)))])
  try:
    families.read(path)
    found = weights.tensors(path)
    assert sum(tensor.read().nbytes for tensor in found.values()) <= 4 * len(whole)
  except ValueError as error:
    assert str(path) in str(error)


@pytest.mark.reference
@pytest.mark.slow
@pytest.mark.shared_data
def test_real_smollm2_is_the_reference(shared):
  """Real weights: logits within 2e-3 and the same top token on 50 real problems as transformers."""
  import torch
  import transformers
  from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

  path = pathlib.Path(os.environ.get("PRM_JAX_SMOLLM2", ""))
  if not path.is_file():
    pytest.skip("PRM_JAX_SMOLLM2 is not the file that scripts/fetch_smollm2.py --output=DIR writes")
  named = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
  model = transformers.AutoModelForCausalLM.from_config(
    transformers.AutoConfig.from_pretrained(**named)
  )
  # from_pretrained would ask for one more package; its own reader of the file is this function
  state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
  missing = model.load_state_dict(state, strict=False)
  assert missing.missing_keys in ([], ["lm_head.weight"]) and not missing.unexpected_keys
  model.tie_weights()
  model.eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(**named)
  preset = families.read(path)
  run = next_token_logits(preset, load(path, preset))
  lines = (shared / "data/prm800k_sample/math_splits/test.jsonl").read_text().splitlines()[:50]
  same, worst = 0, 0.0
  for line in lines:
    ids = tokenizer.encode(json.loads(line)["problem"], add_special_tokens=False)
    with torch.no_grad():
      theirs = model(torch.tensor([ids])).logits[0].numpy()
    ours = run(ids)
    worst = max(worst, float(np.abs(ours - theirs).max()))
    same += int(ours[-1].argmax() == theirs[-1].argmax())
  print(f"{same} of {len(lines)} top tokens equal, logits differ by at most {worst:.2e}")
  assert same == len(lines) == 50
  assert worst < 2e-3


def next_token_logits(preset, params):
  from flax import nnx

  from prm_jax.training import step as step_lib

  graphdef = step_lib.graph(preset.config, preset.vocab_size, 3)

  @jax.jit
  def forward(params, tokens, positions, ends):
    model = nnx.merge(graphdef, params)
    return model.next_token_logits(model.hidden(tokens, positions, ends))

  def run(ids):
    length = -(-len(ids) // 64) * 64  # few shapes to compile
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(ids)] = ids
    positions = np.arange(length, dtype=np.int32)[None]
    logits = forward(params, tokens, positions, np.full_like(tokens, length))
    return np.asarray(logits)[0, : len(ids)]

  return run
