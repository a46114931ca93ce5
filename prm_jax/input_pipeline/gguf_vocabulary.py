"""Vocabularies in GGUF files (llama.cpp), as the files their models were published with.

Only the metadata are read, and not by the `gguf` package, which makes an array of every string and
needs seconds for a vocabulary.
"""

from __future__ import annotations

import collections
import json
import pathlib
import struct
from typing import Any

import numpy as np

from prm_jax import gguf_metadata
from prm_jax.runtime.json_lines import show

# Of tokenizer.ggml.token_type; 1 is an ordinary token, 5 an unused one.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_TYPES = set(range(1, 7))
_LLAMA3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
  r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
  r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGITS = {"type": "Digits", "individual_digits": True}
# tokenizer.ggml.pre -> (what stands before the byte level; None: its own GPT-2 pattern).  As in the
# published tokenizer.json of these families; "default" is llama.cpp's (src/llama-vocab.cpp).
_SPLITS: dict[str, list[str | dict[str, Any]] | None] = {
  "gpt-2": None,
  "gpt2": None,
  "smollm": [_DIGITS, _GPT2],
  "starcoder": [_DIGITS, _GPT2],
  "qwen2": [_QWEN2],
  "deepseek-r1-qwen": [_QWEN2],
  "llama-bpe": [_LLAMA3],
  "llama3": [_LLAMA3],
  "llama-v3": [_LLAMA3],
  "tekken": [_TEKKEN],
  "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
}
# Of these, a word that is a token needs no merges.
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "tekken"}
_ADD_BOS = _WHOLE_WORDS  # where the file does not say
_NFC = {"qwen2", "deepseek-r1-qwen"}


def read(path: pathlib.Path) -> dict[str, bytes]:
  """An equivalent `tokenizer.json` or `tokenizer.model`, and `tokenizer_config.json`, by name.

  The same file always gives the same bytes.

  Raises:
    ValueError: not a whole GGUF file, or a vocabulary that is neither byte-level BPE with a
      pre-tokenizer known here ("gpt2") nor SentencePiece BPE ("llama").
    OSError: it cannot be read.
  """
  fields = metadata(path, "tokenizer.")
  kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
  if kind not in ("gpt2", "llama"):
    raise ValueError(
      f"{path}: tokenizer.ggml.model={show(kind)}: byte-level BPE ('gpt2') and SentencePiece BPE "
      "('llama') are read from GGUF; give the model's tokenizer.json or tokenizer.model instead"
    )
  if kind == "gpt2" and not (isinstance(pre, str) and pre in _SPLITS):
    raise ValueError(
      f"{path}: tokenizer.ggml.pre={show(pre)}: known are {', '.join(_SPLITS)}; give the model's "
      "tokenizer.json instead"
    )
  tokens, types = _vocabulary(fields, path)
  config = _config(fields, tokens, kind == "llama" or pre in _ADD_BOS, path)
  if kind == "llama":
    vocabulary = {"tokenizer.model": _sentencepiece(fields, tokens, types, config, path)}
  else:
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # of transformers; any tokenizer.json
    merges = _merges(fields, path)
    vocabulary = {"tokenizer.json": _dump(_byte_level_bpe(pre, tokens, types, merges, config))}
  return vocabulary | {"tokenizer_config.json": _dump(config, indent=2)}


def metadata(path: pathlib.Path, prefix: str) -> dict[str, Any]:
  """The values of a GGUF file whose keys begin with `prefix`, arrays as lists.

  Raises:
    ValueError: another format or byte order, or a file that ends too soon.
    OSError: it cannot be read.
  """
  return {
    key: value.tolist() if isinstance(value, np.ndarray) else value
    for key, value in gguf_metadata.read(path, texts=prefix).metadata.items()
    if key.startswith(prefix)
  }


def _vocabulary(fields: dict[str, Any], path: pathlib.Path) -> tuple[list[str], list[int]]:
  tokens = _texts(fields, "tokenizer.ggml.tokens", path)
  types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
  fits = isinstance(types, list) and len(types) == len(tokens)
  if not fits or not all(type(kind) is int and kind in _TYPES for kind in types):
    raise ValueError(f"{path}: tokenizer.ggml.token_type is not a list of {len(tokens)} kinds, 1-6")
  if len(set(tokens)) < len(tokens):
    twice = collections.Counter(tokens).most_common(1)[0][0]
    raise ValueError(f"{path}: tokenizer.ggml.tokens has {show(twice)} twice")
  return tokens, types


def _merges(fields: dict[str, Any], path: pathlib.Path) -> list[list[str]]:
  merges = [text.split(" ") for text in _texts(fields, "tokenizer.ggml.merges", path)]
  for pair in merges:
    if len(pair) != 2:
      raise ValueError(f"{path}: tokenizer.ggml.merges has {show(pair)}, not a pair")
  return merges


def _texts(fields: dict[str, Any], key: str, path: pathlib.Path) -> list[str]:
  values = fields.get(key)
  if not isinstance(values, list) or not values or not all(type(v) is str for v in values):
    raise ValueError(f"{path}: {key} is not a list of texts")
  return values


def _flag(fields: dict[str, Any], name: str, default: bool, path: pathlib.Path) -> bool:
  value = fields.get(f"tokenizer.ggml.{name}", default)
  if not isinstance(value, bool):
    raise ValueError(f"{path}: tokenizer.ggml.{name}={show(value)}: expected true or false")
  return value


def _config(
  fields: dict[str, Any], tokens: list[str], add_bos: bool, path: pathlib.Path
) -> dict[str, Any]:
  """What `tokenizer_config.json` says; `add_bos`: where the file does not."""
  add_bos = _flag(fields, "add_bos_token", add_bos, path)
  config: dict[str, Any] = {"add_bos_token": add_bos}
  for name, short in {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}.items():
    number = fields.get(f"tokenizer.ggml.{name}_token_id")
    if number is not None:
      if type(number) is not int or not 0 <= number < len(tokens):
        raise ValueError(
          f"{path}: tokenizer.ggml.{name}_token_id={show(number)} of {len(tokens)} tokens"
        )
      config[f"{short}_token"] = tokens[number]
  if add_bos and "bos_token" not in config:
    raise ValueError(f"{path}: tokenizer.ggml.add_bos_token without tokenizer.ggml.bos_token_id")
  if isinstance(fields.get("tokenizer.chat_template"), str):
    config["chat_template"] = fields["tokenizer.chat_template"]
  return config


def _byte_level_bpe(
  pre: str, tokens: list[str], types: list[int], merges: list[list[str]], config: dict[str, Any]
) -> dict[str, Any]:
  """The content of a `tokenizer.json`."""
  vocabulary = {token: i for i, token in enumerate(tokens)}
  added = [
    {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False}
    | {"normalized": False, "special": type_ != _USER_DEFINED}
    for i, type_ in enumerate(types)
    if type_ in (_UNKNOWN, _CONTROL, _USER_DEFINED)
  ]
  return {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": added,
    "normalizer": {"type": "NFC"} if pre in _NFC else None,
    "pre_tokenizer": _pre_tokenizer(_SPLITS[pre]),
    "post_processor": (
      _template(config["bos_token"], vocabulary) if config["add_bos_token"] else None
    ),
    "decoder": _byte_level(use_regex=True),
    "model": {
      "type": "BPE",
      "dropout": None,
      "unk_token": None,
      "continuing_subword_prefix": None,
      "end_of_word_suffix": None,
      "fuse_unk": False,
      "byte_fallback": False,
      "ignore_merges": pre in _WHOLE_WORDS,
      "vocab": vocabulary,
      "merges": merges,
    },
  }


def _dump(value: Any, **options: Any) -> bytes:
  return json.dumps(value, ensure_ascii=False, **options).encode()


def _byte_level(use_regex: bool) -> dict[str, Any]:
  space = {"add_prefix_space": False, "trim_offsets": True}
  return {"type": "ByteLevel", **space, "use_regex": use_regex}


def _pre_tokenizer(splits: list[str | dict[str, Any]] | None) -> dict[str, Any]:
  if splits is None:
    return _byte_level(use_regex=True)
  isolated = {"behavior": "Isolated", "invert": False}
  steps = [
    {"type": "Split", "pattern": {"Regex": each}, **isolated} if isinstance(each, str) else each
    for each in splits
  ]
  return {"type": "Sequence", "pretokenizers": [*steps, _byte_level(use_regex=False)]}


def _template(bos: str, vocabulary: dict[str, int]) -> dict[str, Any]:
  """A post-processor that puts `bos` before each text."""
  first = {"SpecialToken": {"id": bos, "type_id": 0}}
  a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
  token = {"id": bos, "ids": [vocabulary[bos]], "tokens": [bos]}
  return {
    "type": "TemplateProcessing",
    "single": [first, a],
    "pair": [first, a, first, b],
    "special_tokens": {bos: token},
  }


def _sentencepiece(
  fields: dict[str, Any],
  tokens: list[str],
  types: list[int],
  config: dict[str, Any],
  path: pathlib.Path,
) -> bytes:
  """A SentencePiece model: its types of pieces have the numbers that GGUF gives them.

  GGUF keeps no normalization: Llama, Mistral and Gemma have none.  Field numbers:
  github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto.
  """
  scores = fields.get("tokenizer.ggml.scores")
  fits = isinstance(scores, list) and len(scores) == len(tokens)
  if not fits or not all(type(score) is float and abs(score) < 1e38 for score in scores):
    raise ValueError(f"{path}: tokenizer.ggml.scores is not a list of {len(tokens)} numbers")
  pieces = []
  for token, score, type_ in zip(tokens, scores, types):
    if type_ == _USER_DEFINED:  # the converter wrote their spaces out
      token = token.replace(" ", "\u2581")
    pieces.append(_field(1, _field(1, token) + _field(2, score) + _field(3, type_)))
  bpe, byte_fallback = _field(3, 2), _field(35, int(_BYTE in types))
  numbers = {"unk": 45, "bos": 46, "eos": 47, "pad": 48}
  if _UNKNOWN in types:
    config = {"unk_token": tokens[types.index(_UNKNOWN)]} | config
  names = [_field(i, config.get(f"{name}_token", "")) for name, i in numbers.items()]
  prefix = _field(3, int(_flag(fields, "add_space_prefix", True, path)))
  merged = _field(4, int(_flag(fields, "remove_extra_whitespaces", False, path)))
  trainer = bpe + _field(4, len(tokens)) + byte_fallback + b"".join(names)
  normalizer = _field(1, "identity") + prefix + merged + _field(5, 1)
  return b"".join(pieces) + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, value: int | float | str | bytes) -> bytes:
  """A field of a protocol buffer."""
  if isinstance(value, float):
    return _varint(number << 3 | 5) + struct.pack("<f", value)
  if isinstance(value, int):
    return _varint(number << 3) + _varint(value)
  data = value.encode() if isinstance(value, str) else value
  return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
  data = bytearray()
  while value > 127:
    data.append(value & 127 | 128)
    value >>= 7
  return bytes([*data, value])
