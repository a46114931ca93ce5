"""Tokenizers.  `Tokenizer` is all the rest of the package knows of one."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import sentencepiece

from prm_jax import json_lines

_META = "\u2581"  # how SentencePiece writes a space; in a text it is escaped to its UTF-8 bytes
PAD = 0  # id of padding; the attention rule hides it, so no tokenizer needs a pad token


class Tokenizer(Protocol):
  """Text to ids and back.  `encode(a) + encode(b)` decodes to `a + b`."""

  vocab_size: int
  bos_id: int | None  # starts every sequence; None: the family has none
  hash: str  # sha256 of the file; part of the step contract

  def encode(self, text: str) -> list[int]: ...

  def decode(self, ids: Sequence[int]) -> str: ...


class SentencePiece:
  """A SentencePiece model that neither adds nor drops anything: decode(encode(x)) == x."""

  def __init__(self, path: str | pathlib.Path):
    path = pathlib.Path(path)
    if not path.is_file():
      raise FileNotFoundError(
        f"{path}: no tokenizer here; before training, scripts/train_tokenizer.py makes one from "
        "prepared data (--config.data.tokenizer=FILE); beside a checkpoint, put back the one it "
        "was trained with"
      )
    data = path.read_bytes()
    self._model = sentencepiece.SentencePieceProcessor()
    try:
      self._model.LoadFromSerializedProto(data)
    except RuntimeError as error:
      raise ValueError(f"{path}: not a SentencePiece model ({error})") from error
    self.path = path
    self.vocab_size = self._model.vocab_size()
    self.bos_id = self._model.bos_id() if self._model.bos_id() >= 0 else None
    self.hash = hashlib.sha256(data).hexdigest()
    self._meta_ids = [self._model.PieceToId(f"<0x{byte:02X}>") for byte in _META.encode()]

  def encode(self, text: str) -> list[int]:
    ids = []
    for i, part in enumerate(text.split(_META)):
      ids += self._meta_ids * (i > 0) + self._model.EncodeAsIds(part)
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    return self._model.DecodeIds([int(i) for i in ids])


def train_sentencepiece(
  texts: Iterable[str], path: str | pathlib.Path, vocab_size: int
) -> SentencePiece:
  """Trains a byte-pair model on `texts` and writes it to `path`.

  Byte fallback, so that nothing is unknown; digits apart, so that numbers are read digit by digit;
  newlines are symbols; white space is kept as it is.  `vocab_size` is an upper bound (a small
  corpus has fewer pieces) of at least 300: 256 bytes, the special symbols and some letters.

  Raises:
    ValueError: `vocab_size` is too small, or there are no texts.
    OSError: `path` cannot be written.
    RuntimeError: of the trainer.
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
