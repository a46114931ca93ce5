"""Vocabularies in GGUF files: the ids of the tokenizer.json that a family publishes."""

import json
import pathlib
import struct

import pytest
import sentencepiece
import tokenizers as library
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from prm_jax.input_pipeline import gguf_vocabulary, tokenizers

gguf = pytest.importorskip("gguf", reason="the `gguf` extra is not installed; it writes the files")

TEXTS = json.loads(
  (pathlib.Path(__file__).parent / "data" / "smollm2_ids.json").read_text(encoding="utf-8")
)
TEXTS = [*TEXTS, "x''s 12345678 $+=<>^~| a.b(c)  9\r\n\r\n 10", "DON'T don't \uff21\uff22 ½Ⅷ"]
CORPUS = [
  *TEXTS,
  "They'll say $x+y=123456$ isn't (a) 2,000 <= 3^4 ~ HelloWorld fooBAR\n\n 77  88",
] * 3
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
# As in the tokenizer.json of SmolLM2, GPT-2, Qwen2.5-Math-7B, Llama-3.1-8B and Mistral-Nemo.
LLAMA3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NEMO = (
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
  r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
  r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def published(pre):
  """The family's tokenizer, tiny, put together by the library's own classes."""
  made = library.Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
  patterns = {
    "qwen2": LLAMA3.replace("{1,3}", ""),
    "llama-bpe": LLAMA3,
    "tekken": NEMO,
  }
  if pre in patterns:
    split = pre_tokenizers.Split(library.Regex(patterns[pre]), behavior="isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, last])
  else:
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  if pre == "smollm":
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, made.pre_tokenizer])
  if pre == "qwen2":
    made.normalizer = normalizers.NFC()
  made.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(
    vocab_size=500,
    special_tokens=["<|end|>", "<|begin|>"],
    initial_alphabet=alphabet,
    show_progress=False,
  )
  made.train_from_iterator(CORPUS, trainer)
  made.add_tokens([library.AddedToken("<think>", normalized=False, special=False)])
  return made


def written(path, made, pre, **changes):
  """What llama.cpp's converter stores of a tokenizer, by the `gguf` package."""
  settings = json.loads(made.to_str())
  names = {i: name for name, i in made.get_vocab().items()}
  tokens = [names[i] for i in range(len(names))] + ["[PAD502]"]
  types = [CONTROL, CONTROL, *[NORMAL] * (len(names) - 3), USER_DEFINED, UNUSED]
  fields = {
    "model": "gpt2",
    "pre": pre,
    "tokens": tokens,
    "token_type": types,
    "merges": [" ".join(pair) for pair in settings["model"]["merges"]],
    "bos_token_id": 1,
    "eos_token_id": 0,
  } | changes
  writer = gguf.GGUFWriter(path, "llama")
  writer.add_uint8("general.small", 3)
  writer.add_array("general.tags", ["a", "b"])
  for name, value in fields.items():
    key = f"tokenizer.ggml.{name}"
    if isinstance(value, str):
      writer.add_string(key, value)
    elif isinstance(value, bool):
      writer.add_bool(key, value)
    elif isinstance(value, int):
      writer.add_uint32(key, value)
    elif value is not None:
      writer.add_array(key, value)
  writer.add_string("tokenizer.chat_template", "{{ messages }}")
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  return path


@pytest.fixture(scope="module")
def smollm():
  return published("smollm")


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe", "tekken"])
def test_ids_are_those_of_the_published_tokenizer(tmp_path, pre):
  """Each pre-tokenizer splits as the family's own tokenizer.json does, also after saving."""
  made = published(pre)
  tokenizer = tokenizers.load(written(tmp_path / "m.gguf", made, pre))
  made.encode_special_tokens = True
  for text in CORPUS[: len(TEXTS) + 1]:
    assert tokenizer.encode(text) == made.encode(text).ids, text
  assert tokenizer.encode("<think>") == [made.token_to_id("<think>")]
  assert tokenizer.encode("<|end|>", special=True) == [0]
  assert tokenizer.vocab_size == made.get_vocab_size() + 1  # the unused token counts
  assert tokenizer.bos_id == (1 if pre in ("llama-bpe", "tekken") else None)
  assert tokenizer.eos_id == 0
  tokenizer.save(tmp_path / "saved")
  again = tokenizers.load(tmp_path / "saved")
  assert (again.hash, again.bos_id, again.eos_id) == (tokenizer.hash, tokenizer.bos_id, 0)
  assert all(again.encode(text) == tokenizer.encode(text) for text in TEXTS)
  config = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_bytes())
  assert config["chat_template"] == "{{ messages }}"


def test_default_splits_as_llama_cpp_does(tmp_path, smollm):
  """`default` takes punctuation off first, and three digits at a time; bytes are never lost."""
  tokenizer = tokenizers.load(written(tmp_path / "m.gguf", smollm, "default"))
  steps = json.loads(tokenizer._data)["pre_tokenizer"]
  made = library.Tokenizer.from_str(tokenizer._data.decode())
  assert [s["type"] for s in steps["pretokenizers"]] == ["Split"] * 4 + ["ByteLevel"]
  words = [word for word, _ in made.pre_tokenizer.pre_tokenize_str("x=12345 (ab)")]
  assert words == ["x", "=", "123", "45", "Ġ", "(", "ab", ")"]
  assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in TEXTS)


def sentencepiece_gguf(directory, **options):
  """A tiny SentencePiece model, and what llama.cpp's converter stores of it."""
  stored = directory / "reference.model"
  with stored.open("wb") as file:
    sentencepiece.SentencePieceTrainer.Train(
      sentence_iterator=iter(CORPUS),
      model_writer=file,
      vocab_size=420,
      hard_vocab_limit=False,
      model_type="bpe",
      byte_fallback=True,
      normalization_rule_name="identity",
      remove_extra_whitespaces=False,
      user_defined_symbols=["\n\n", "\u2581\u2581\u2581", "<turn>"],
      minloglevel=2,
      **options,
    )
  model = sentencepiece.SentencePieceProcessor(str(stored))
  tokens = [model.IdToPiece(i) for i in range(len(model))]
  tests = {3: model.IsControl, 2: model.IsUnknown, 6: model.IsByte, 5: model.IsUnused}
  types = [next((t for t, test in tests.items() if test(i)), 1) for i in range(len(model))]
  for name in ("\n\n", "\u2581\u2581\u2581", "<turn>"):
    types[tokens.index(name)] = USER_DEFINED
  tokens[tokens.index("\u2581\u2581\u2581")] = "   "
  changes = {
    "tokens": tokens,
    "token_type": types,
    "scores": [model.GetScore(i) for i in range(len(model))],
    "bos_token_id": model.bos_id(),
    "eos_token_id": model.eos_id(),
    "unknown_token_id": model.unk_id(),
    "merges": None,
  }
  return model, changes


@pytest.mark.parametrize("gemma", [False, True])
def test_sentencepiece_vocabularies(tmp_path, smollm, gemma):
  """Of a "llama" kind (Llama 2, Mistral, Gemma) the ids are those of the SentencePiece model."""
  numbers = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "add_dummy_prefix": False}
  reference, changes = sentencepiece_gguf(tmp_path, **(numbers if gemma else {}))
  changes |= {"model": "llama", "add_space_prefix": not gemma}
  tokenizer = tokenizers.load(written(tmp_path / "m.gguf", smollm, "default", **changes))
  for text in [*TEXTS, "a    b", "   c<turn>d\n\n\ne"]:
    assert tokenizer.encode(text) == reference.EncodeAsIds(text), text
    assert tokenizer.decode(tokenizer.encode(text)) == reference.DecodeIds(tokenizer.encode(text))
  assert (tokenizer.bos_id, tokenizer.eos_id) == (reference.bos_id(), reference.eos_id())
  tokenizer.save(tmp_path / "saved")
  again = tokenizers.load(tmp_path / "saved")
  assert (again.hash, again.bos_id, again.eos_id) == (
    tokenizer.hash,
    tokenizer.bos_id,
    tokenizer.eos_id,
  )
  assert again.encode(TEXTS[-1]) == tokenizer.encode(TEXTS[-1])


@pytest.mark.parametrize("name", ["add_space_prefix", "remove_extra_whitespaces"])
@pytest.mark.parametrize("value", [3, [1], "yes"])
def test_flags_of_a_sentencepiece_vocabulary_are_flags(tmp_path, smollm, name, value):
  """A number or a list where true or false belongs is an error that names file, key and value."""
  _, changes = sentencepiece_gguf(tmp_path)
  changes |= {"model": "llama", name: value}
  path = written(tmp_path / "m.gguf", smollm, "default", **changes)
  with pytest.raises(ValueError) as error:
    tokenizers.load(path)
  assert str(error.value) == f"{path}: tokenizer.ggml.{name}={value!r}: expected true or false"


def test_what_the_file_says_of_the_first_token_holds(tmp_path, smollm):
  """`add_bos_token` of the file goes before the family's habit."""
  for pre, add, expected in [("smollm", True, 1), ("llama-bpe", False, None)]:
    tokenizer = tokenizers.load(written(tmp_path / "m.gguf", smollm, pre, add_bos_token=add))
    assert tokenizer.bos_id == expected


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model": "bert"}, "tokenizer.ggml.model='bert': byte-level BPE"),
    ({"model": "llama"}, "tokenizer.ggml.scores is not a list of"),
    ({"token_type": [9, 1]}, "tokenizer.ggml.token_type is not a list of"),
    ({"token_type": [[1]] * 502}, "an array of type 9"),
    ({"token_type": [1.0] * 502}, "tokenizer.ggml.token_type is not a list of"),
    ({"model": None}, "tokenizer.ggml.model=None"),
    ({"model": ["gpt2"]}, "tokenizer.ggml.model=['gpt2']"),
    ({"pre": "new-one"}, "tokenizer.ggml.pre='new-one': known are gpt-2"),
    ({"pre": None}, "tokenizer.ggml.pre=None"),
    ({"pre": ["qwen2"]}, "tokenizer.ggml.pre=['qwen2']"),
    ({"tokens": ["a", "a"], "token_type": [1, 1]}, "tokenizer.ggml.tokens has 'a' twice"),
    ({"tokens": None}, "tokenizer.ggml.tokens is not a list of texts"),
    ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of texts"),
    ({"token_type": [1, 1]}, "tokenizer.ggml.token_type is not a list of"),
    ({"merges": None}, "tokenizer.ggml.merges is not a list of texts"),
    ({"merges": ["a b c"]}, "tokenizer.ggml.merges has"),
    ({"merges": ["a nowhere"]}, "not a whole tokenizer.json"),
    ({"eos_token_id": 9999}, "tokenizer.ggml.eos_token_id=9999 of"),
    ({"eos_token_id": True}, "tokenizer.ggml.eos_token_id=True of"),
    ({"eos_token_id": [0]}, "tokenizer.ggml.eos_token_id=[0] of"),
    ({"add_bos_token": True, "bos_token_id": None}, "without tokenizer.ggml.bos_token_id"),
    ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token='yes'"),
  ],
)
def test_other_vocabularies_are_refused(tmp_path, smollm, changes, message):
  """Another kind, an unknown pre-tokenizer or lists that do not fit: the key is named."""
  path = written(tmp_path / "m.gguf", smollm, **{"pre": "smollm"} | changes)
  with pytest.raises(ValueError) as error:
    tokenizers.load(path)
  assert str(error.value).startswith(f"{path}: ") and message in str(error.value)


def test_broken_files_are_one_error(tmp_path, smollm):
  """Cut anywhere, of the other byte order, or with sizes beyond the file: no crash, no waiting."""
  path = written(tmp_path / "m.gguf", smollm, "smollm")
  whole = path.read_bytes()
  for size in [*range(60), *range(60, len(whole) - 1, len(whole) // 40)]:
    path.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=r"m\.gguf: (not a GGUF file|the header )"):
      tokenizers.load(path)
  header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
  key = struct.pack("<Q", 1) + b"k"
  nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
  for data in [
    b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + key,  # big-endian
    b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + key,
    header + struct.pack("<Q", 2**63) + b"k",
    header + key + struct.pack("<I", 99) + bytes(64),
    header + key + struct.pack("<IIQ", 9, 4, 2**40) + bytes(64),
    header + key + struct.pack("<IQ", 8, 2) + b"\xff\xfe",
    header + key + nested,
  ]:
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"m\.gguf: "):
      gguf_vocabulary.metadata(path, "")


def test_metadata_are_what_the_gguf_package_reads(tmp_path, smollm):
  """Our reader gives every key the value that the reference reader gives."""
  path = written(tmp_path / "m.gguf", smollm, "smollm", add_bos_token=False)
  fields = gguf.GGUFReader(path).fields
  expected = {k: f.contents() for k, f in fields.items() if not k.startswith("GGUF.")}
  assert gguf_vocabulary.metadata(path, "") == expected
