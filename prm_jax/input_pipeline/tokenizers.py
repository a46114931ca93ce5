"""Tokenizers: the protocol that the rest of the package uses, and SentencePiece models."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import sentencepiece

from prm_jax.input_pipeline import tokenizer_json
from prm_jax.runtime import json_lines, storage

_META = "\u2581"  # how SentencePiece writes a space; in a text it is escaped to its UTF-8 bytes
PAD = 0  # id of padding; the attention mask hides it, so no tokenizer needs a pad token
MODEL = "tokenizer.model"


class Tokenizer(Protocol):
  """Text to ids and back.

  `encode` adds no token.  A special token spelled out in a text is encoded as its letters unless
  `special=True`.  For the project's own and byte-level tokenizers, `encode(a) + encode(b)` decodes
  to `a + b`; public SentencePiece models may put a space between.
  """

  vocab_size: int  # the highest id + 1; a model may have more rows
  bos_id: int | None  # starts every sequence; None: the family has none
  eos_id: int | None
  hash: str  # sha256 of the file and of the setting of its first token; in the step contract

  def encode(self, text: str, special: bool = False) -> list[int]: ...

  def decode(self, ids: Sequence[int]) -> str: ...

  def token_id(self, name: str) -> int | None:
    """The id of a token of the vocabulary, special or not; None if there is none."""

  def save(self, directory: str | storage.Path) -> None:
    """Writes the tokenizer to a directory; `load` of it gives the same ids and hash."""


def find(directory: str | storage.Path) -> storage.Path:
  """The tokenizer's file in a directory: tokenizer.json, else tokenizer.model.

  Raises:
    FileNotFoundError: there is neither.
  """
  directory = storage.path(directory)
  for name in (tokenizer_json.FILE, MODEL):
    if (directory / name).is_file():
      return directory / name
  raise FileNotFoundError(
    f"{directory}: no {tokenizer_json.FILE} or {MODEL} here; from another format, "
    "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers makes the first"
  )


def load(path: str | storage.Path) -> Tokenizer:
  """The tokenizer in a tokenizer.json, a tokenizer.model, or a directory with one of them.

  Raises:
    ValueError: the file is of another kind, or broken.
    OSError: there is none, or it cannot be read.
  """
  path = storage.path(path)
  if path.is_dir():
    path = find(path)
  with _present(path).open("rb") as file:
    json = path.suffix == ".json" or file.read(4).lstrip()[:1] == b"{"
  return tokenizer_json.load(path) if json else SentencePiece(path)


def _present(path: storage.Path) -> storage.Path:
  if not path.is_file():
    raise FileNotFoundError(
      f"{path}: no tokenizer here; before training, scripts/train_tokenizer.py makes one from "
      "prepared data (--config.data.tokenizer=FILE); beside a checkpoint, put back the one it "
      "was trained with"
    )
  return path


class SentencePiece:
  """A SentencePiece model: the project's own or a public one.

  A model of `train_sentencepiece` loses nothing: decode(encode(x)) == x.  A public one gives the
  ids of the sentencepiece library, including the space that most put first.  With `special`, the
  text is cut at control symbols such as `</s>`, and each part is encoded on its own.
  """

  def __init__(self, path: str | storage.Path):
    self.path = _present(storage.path(path))
    self._companions = tokenizer_json.companions(self.path)
    self._data = tokenizer_json.read_bytes(self.path)
    self._model = sentencepiece.SentencePieceProcessor()
    try:
      self._model.LoadFromSerializedProto(self._data)
    except RuntimeError as error:
      raise ValueError(f"{path}: not a SentencePiece model ({error})") from error
    self.vocab_size = self._model.vocab_size()
    self.hash = hashlib.sha256(self._data).hexdigest()
    config = tokenizer_json.read_config(self._companions, str(path))
    self._refuse_additions(config)
    bos, eos = self._model.bos_id(), self._model.eos_id()
    self.bos_id = bos if bos >= 0 and config.add_bos_token is not False else None
    if self.bos_id is None and bos >= 0:
      # Without its companion the file would put bos first: it is another tokenizer.
      self.hash = hashlib.sha256(self._data + b"add_bos_token=false").hexdigest()
    end = None if config.eos is None else self.token_id(config.eos)
    self.eos_id = end if end is not None else eos if eos >= 0 else None
    self._meta_ids = [self._model.PieceToId(f"<0x{byte:02X}>") for byte in _META.encode()]
    self._own = self._is_own()

  def encode(self, text: str, special: bool = False) -> list[int]:
    if special:
      ids = []
      for i, part in enumerate(self._controls.split(text)):  # every second part is a control symbol
        ids += [self._model.PieceToId(part)] if i % 2 else self.encode(part)
      return ids
    if not self._own:
      return self._model.EncodeAsIds(text)
    ids = []
    for i, part in enumerate(text.split(_META)):
      ids += self._meta_ids * (i > 0) + self._model.EncodeAsIds(part)
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    return self._model.DecodeIds([int(i) for i in ids])

  def token_id(self, name: str) -> int | None:
    number = self._model.PieceToId(name)  # the unknown token's for a name that it does not have
    return number if self._model.IdToPiece(number) == name else None

  def save(self, directory: str | storage.Path) -> None:
    """Writes `tokenizer.model` and its companions.

    Raises:
      ValueError: the directory has a tokenizer.json, which `load` would take instead.
    """
    if (storage.path(directory) / tokenizer_json.FILE).exists():
      raise ValueError(f"{directory}: has a {tokenizer_json.FILE}: two tokenizers in one directory")
    tokenizer_json.write(directory, {**self._companions, MODEL: self._data})

  @functools.cached_property
  def _controls(self) -> re.Pattern[str]:
    model = self._model
    names = [model.IdToPiece(i) for i in range(self.vocab_size) if model.IsControl(i)]
    longest_first = sorted(map(re.escape, filter(None, names)), key=len, reverse=True)
    return re.compile(f"({'|'.join(longest_first) or '(?!)'})")

  def _is_own(self) -> bool:
    """Whether `train_sentencepiece` made it: those lose nothing, so U+2581 needs its bytes."""
    m = self._model
    numbers = (m.unk_id(), m.bos_id(), m.eos_id(), m.pad_id())
    prefixed = m.EncodeAsPieces("a")[:1] != ["a"]
    kept = m.DecodeIds(m.EncodeAsIds("  a \n b ")) == "  a \n b "
    return numbers == (0, 1, 2, -1) and not prefixed and kept and all(map(m.IsByte, self._meta_ids))

  def _refuse_additions(self, config: tokenizer_json.Config) -> None:
    """ValueError for tokens beyond the model, which the model would read as letters."""
    file = self.path.parent / "added_tokens.json"
    if file.is_file():
      added = list(json_lines.parse(tokenizer_json.read_bytes(file), str(file)))
    else:
      added = [token.content for token in (config.added_tokens_decoder or {}).values()]
    if unknown := [name for name in added if self.token_id(name) is None]:
      raise ValueError(
        f"{self.path}: tokens added beside it are not in it ({json_lines.show(unknown)}); save it "
        "as tokenizer.json: AutoTokenizer.from_pretrained(...).save_pretrained(...), transformers"
      )


def train_sentencepiece(
  texts: Iterable[str], path: str | storage.Path, vocab_size: int
) -> SentencePiece:
  """Trains a byte-pair model on `texts` and writes it to `path`.

  With byte fallback, so that nothing is unknown; each digit and newline is a piece of its own;
  white space is kept as it is.  `vocab_size` is an upper bound (a small corpus has fewer pieces) of
  at least 300: 256 bytes, the special symbols and some letters.

  Raises:
    ValueError: `vocab_size` is too small, or there are no texts.
    OSError: `path` cannot be written.
    RuntimeError: the trainer failed.
  """
  if vocab_size < 300:
    raise ValueError(f"vocab_size={vocab_size}: at least 300 (256 of them are bytes)")
  with json_lines.written(path, "wb") as out:
    texts = list(texts)  # here, so that an error in reading them is not wrapped by the trainer
    if not texts:
      raise ValueError(f"{path}: no texts to train a tokenizer on")
    sentencepiece.SentencePieceTrainer.Train(
      sentence_iterator=iter(texts),
      model_writer=out,
      vocab_size=vocab_size,
      hard_vocab_limit=False,
      model_type="bpe",
      byte_fallback=True,
      split_digits=True,
      normalization_rule_name="identity",
      remove_extra_whitespaces=False,
      add_dummy_prefix=False,
      user_defined_symbols=["\n"],
      character_coverage=1.0,
      max_sentence_length=1 << 20,
      input_sentence_size=500_000,  # sampled beyond this many texts
      shuffle_input_sentence=True,
      num_threads=1,  # the result depends on the number of threads
      minloglevel=2,
      unk_id=0,
      bos_id=1,
      eos_id=2,
    )
  return SentencePiece(path)
