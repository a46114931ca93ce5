"""Vocabularies in GGUF files (llama.cpp), as the `tokenizer.json` their models were published with.

Only the metadata are read, by this file itself: the `gguf` package makes an array of every string
and needs seconds for a vocabulary.  Layout: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import collections
import json
import mmap
import pathlib
import struct
from typing import Any

from prm_jax import json_lines

_SCALARS = {
  0: "B",
  1: "b",
  2: "H",
  3: "h",
  4: "I",
  5: "i",
  6: "f",
  7: "?",
  10: "Q",
  11: "q",
  12: "d",
}
_STRING, _ARRAY = 8, 9
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # of tokenizer.ggml.token_type; 1 is an ordinary token
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
_WHOLE_WORDS = {
  "llama-bpe",
  "llama3",
  "llama-v3",
  "tekken",
}  # a word of the vocabulary needs no merges
_ADD_BOS = _WHOLE_WORDS  # where the file does not say
_NFC = {"qwen2", "deepseek-r1-qwen"}


def read(path: pathlib.Path) -> tuple[bytes, bytes]:
  """The bytes of an equivalent `tokenizer.json` and `tokenizer_config.json`; always the same bytes.

  Raises:
    ValueError: not a whole GGUF file, or a kind of vocabulary that is not byte-level BPE with a
      pre-tokenizer known here.
    OSError: it cannot be read.
  """
  fields = metadata(path, "tokenizer.")
  kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
  if kind != "gpt2":
    raise ValueError(
      f"{path}: tokenizer.ggml.model={kind!r}: only byte-level BPE ('gpt2') is read from GGUF; "
      "give the model's tokenizer.json or tokenizer.model instead"
    )
  if pre not in _SPLITS:
    raise ValueError(
      f"{path}: tokenizer.ggml.pre={pre!r}: known are {', '.join(_SPLITS)}; give the model's "
      "tokenizer.json instead"
    )
  tokens, types = _vocabulary(fields, path)
  add_bos = fields.get("tokenizer.ggml.add_bos_token", pre in _ADD_BOS)
  if not isinstance(add_bos, bool):
    raise ValueError(f"{path}: tokenizer.ggml.add_bos_token={add_bos!r}: expected true or false")
  config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": add_bos}
  names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
  for name, short in names.items():
    number = fields.get(f"tokenizer.ggml.{name}_token_id")
    if number is not None:
      if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ValueError(f"{path}: tokenizer.ggml.{name}_token_id={number} of {len(tokens)} tokens")
      config[f"{short}_token"] = tokens[number]
  if add_bos and "bos_token" not in config:
    raise ValueError(f"{path}: tokenizer.ggml.add_bos_token without tokenizer.ggml.bos_token_id")
  if isinstance(fields.get("tokenizer.chat_template"), str):
    config["chat_template"] = fields["tokenizer.chat_template"]
  vocabulary = {token: i for i, token in enumerate(tokens)}
  added = [
    {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False}
    | {"normalized": False, "special": type_ != _USER_DEFINED}
    for i, type_ in enumerate(types)
    if type_ in (_UNKNOWN, _CONTROL, _USER_DEFINED)
  ]
  whole = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": added,
    "normalizer": {"type": "NFC"} if pre in _NFC else None,
    "pre_tokenizer": _pre_tokenizer(_SPLITS[pre]),
    "post_processor": _template(config["bos_token"], vocabulary) if add_bos else None,
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
      "merges": _merges(fields, path),
    },
  }
  dump = lambda value, **options: json.dumps(value, ensure_ascii=False, **options).encode()
  return dump(whole), dump(config, indent=2)


def metadata(path: pathlib.Path, prefix: str) -> dict[str, Any]:
  """The values of a GGUF file whose keys begin with `prefix`; nothing of the tensors is read.

  Raises:
    ValueError: another format or byte order, or a file that ends too soon.
    OSError: it cannot be read.
  """
  with path.open("rb") as file:
    if file.read(4) != b"GGUF":
      raise ValueError(f"{path}: not a GGUF file")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
      try:
        return _Metadata(data).read(prefix)
      except (struct.error, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: broken or truncated GGUF metadata ({error})") from error


class _Metadata:
  """A position in a mapped file."""

  def __init__(self, data: mmap.mmap):
    self._data, self._at = data, 4

  def read(self, prefix: str) -> dict[str, Any]:
    version, _, count = self._scalars("IQQ")
    if version not in (2, 3):  # a file of the other byte order has version 2**24 * 3
      raise ValueError(f"version {version}: 2 and 3 are supported, little-endian")
    fields = {}
    for _ in range(count):
      key = self._string()
      (kind,) = self._scalars("I")
      value = self._value(kind)
      if key.startswith(prefix):
        fields[key] = value
    return fields

  def _scalars(self, layout: str) -> tuple[Any, ...]:
    values = struct.unpack_from("<" + layout, self._data, self._at)
    self._at += struct.calcsize("<" + layout)
    return values

  def _string(self) -> str:
    (size,) = self._scalars("Q")
    if size > len(self._data) - self._at:
      raise ValueError(f"a text of {size} bytes at byte {self._at}")
    self._at += size
    return self._data[self._at - size : self._at].decode()

  def _value(self, kind: int) -> Any:
    if kind == _STRING:
      return self._string()
    if kind != _ARRAY:
      if kind not in _SCALARS:
        raise ValueError(f"a value of kind {kind} at byte {self._at}")
      return self._scalars(_SCALARS[kind])[0]
    kind, size = self._scalars("IQ")
    if size > len(self._data) - self._at:  # every value has at least a byte
      raise ValueError(f"a list of {size} values at byte {self._at}")
    if kind in _SCALARS:
      return list(self._scalars(f"{size}{_SCALARS[kind]}"))
    return [self._value(kind) for _ in range(size)]


def _vocabulary(fields: dict[str, Any], path: pathlib.Path) -> tuple[list[str], list[int]]:
  tokens = _texts(fields, "tokenizer.ggml.tokens", path)
  types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
  if not isinstance(types, list) or len(types) != len(tokens):
    raise ValueError(f"{path}: tokenizer.ggml.token_type is not a list of {len(tokens)} numbers")
  if len(set(tokens)) < len(tokens):
    twice = collections.Counter(tokens).most_common(1)[0][0]
    raise ValueError(f"{path}: tokenizer.ggml.tokens has {json_lines.show(twice)} twice")
  return tokens, types


def _merges(fields: dict[str, Any], path: pathlib.Path) -> list[list[str]]:
  merges = [text.split(" ") for text in _texts(fields, "tokenizer.ggml.merges", path)]
  for pair in merges:
    if len(pair) != 2:
      raise ValueError(f"{path}: tokenizer.ggml.merges has {json_lines.show(pair)}, not a pair")
  return merges


def _texts(fields: dict[str, Any], key: str, path: pathlib.Path) -> list[str]:
  values = fields.get(key)
  if not isinstance(values, list) or not values or not all(type(v) is str for v in values):
    raise ValueError(f"{path}: {key} is not a list of texts")
  return values


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
