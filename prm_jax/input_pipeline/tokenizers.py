"""Tokenizers.  `Tokenizer` is all the rest of the package knows of one."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import sentencepiece

from prm_jax.input_pipeline import gguf_vocabulary, tokenizer_json
from prm_jax.runtime import json_lines, storage

_META = "\u2581"  # how SentencePiece writes a space; in a text it is escaped to its UTF-8 bytes
PAD = 0  # id of padding; the attention rule hides it, so no tokenizer needs a pad token
MODEL = "tokenizer.model"


class Tokenizer(Protocol):
  """Text to ids and back.

  `encode` adds nothing, and reads special tokens that are spelled out in a text as its letters
  unless `special=True`.  Of the project's own and of byte-level tokenizers, `encode(a) + encode(b)`
  decodes to `a + b`; public SentencePiece models may put a space between.
  """

  vocab_size: int  # the highest id + 1; a model may have more rows
  bos_id: int | None  # starts every sequence; None: the family has none
  eos_id: int | None
  hash: str  # sha256 of the file, and of what beside it begins a text; part of the step contract

  def encode(self, text: str, special: bool = False) -> list[int]: ...

  def decode(self, ids: Sequence[int]) -> str: ...

  def token_id(self, name: str) -> int | None:
    """The id of the token that the vocabulary calls `name`, special or not; None: there is none."""

  def save(self, directory: str | storage.Path) -> None:
    """Writes the tokenizer to a directory; `load` of it gives the same ids and hash."""


def find(directory: str | storage.Path) -> storage.Path:
  """The tokenizer's file in a directory: tokenizer.json, else tokenizer.model, else the one .gguf.

  Raises:
    FileNotFoundError: there is none.
    ValueError: there are several GGUF files.
  """
  directory = storage.path(directory)
  for name in (tokenizer_json.FILE, MODEL):
    if (directory / name).is_file():
      return directory / name
  files = sorted(directory.glob("*.gguf"))
  if len(files) > 1:
    names = ", ".join(path.name for path in files)
    raise ValueError(f"{directory}: several GGUF files ({names}); name the one that is meant")
  if not files:
    raise FileNotFoundError(
      f"{directory}: no {tokenizer_json.FILE}, {MODEL} or .gguf here; of another format, "
      "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers makes the first"
    )
  return files[0]


def load(path: str | storage.Path) -> Tokenizer:
  """The tokenizer in a tokenizer.json, a tokenizer.model, a .gguf, or a directory with one of them.

  Raises:
    ValueError: the file is of another kind, or broken.
    OSError: there is none, or it cannot be read.
  """
  path = storage.path(path)
  if path.is_dir():
    path = find(path)
  with _present(path).open("rb") as file:
    start = file.read(4)
  if path.suffix == ".gguf" or start == b"GGUF":
    files = gguf_vocabulary.read(path)
    if MODEL in files:
      return SentencePiece(path, files)
    return tokenizer_json.TokenizerJson(files.pop(tokenizer_json.FILE), files, str(path))
  if path.suffix == ".json" or start.lstrip()[:1] == b"{":
    return tokenizer_json.load(path)
  return SentencePiece(path)


class SentencePiece:
  """A SentencePiece model: the project's own or a public one.

  One of `train_sentencepiece` neither adds nor drops anything: decode(encode(x)) == x.  A public
  one gives the ids that sentencepiece gives for the text on its own, with the space that most put
  first.  With `special`, the text is cut at control symbols such as `</s>`, and each part is
  encoded on its own.
  """

  def __init__(self, path: str | storage.Path, files: dict[str, bytes] | None = None):
    """`files`: what a GGUF file at `path` holds, by name."""
    path = _present(storage.path(path))
    given = tokenizer_json.companions(path) if files is None else files
    self._companions = {name: data for name, data in given.items() if name != MODEL}
    self._data = tokenizer_json.read_bytes(path) if files is None else files[MODEL]
    self._model = sentencepiece.SentencePieceProcessor()
    try:
      self._model.LoadFromSerializedProto(self._data)
    except RuntimeError as error:
      raise ValueError(f"{path}: not a SentencePiece model ({error})") from error
    self.path = path
    self.vocab_size = self._model.vocab_size()
    self.hash = hashlib.sha256(self._data).hexdigest()
    config = self._companions.get(tokenizer_json.CONFIG, b"{}")
    config = tokenizer_json.parse(config, f"{path}: {tokenizer_json.CONFIG} beside it")
    if files is None:
      self._refuse_additions(config)
    bos, eos = self._model.bos_id(), self._model.eos_id()
    self.bos_id = bos if bos >= 0 and config.get("add_bos_token") is not False else None
    if self.bos_id is None and bos >= 0:
      # the file alone would begin a text otherwise: without the one beside it, it is another
      self.hash = hashlib.sha256(self._data + b"add_bos_token=false").hexdigest()
    name = tokenizer_json.token_name(config, "eos_token")
    end = None if name is None else self.token_id(name)
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
    number = self._model.PieceToId(name)  # of a name that it has not: the unknown token's
    return number if self._model.IdToPiece(number) == name else None

  def save(self, directory: str | storage.Path) -> None:
    """Writes `tokenizer.model`, and the files that stood beside it.

    Raises:
      ValueError: the directory holds a tokenizer.json, which `load` would take instead.
    """
    directory = storage.path(directory)
    if (directory / tokenizer_json.FILE).exists():
      raise ValueError(f"{directory}: has a {tokenizer_json.FILE}: two tokenizers in one directory")
    for name, data in {**self._companions, MODEL: self._data}.items():
      with json_lines.written(directory / name, "wb") as file:
        file.write(data)

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

  def _refuse_additions(self, config) -> None:
    """Tokens beyond the file would be letters here and tokens in the reference."""
    file = self.path.parent / "added_tokens.json"
    if file.is_file():
      added = list(tokenizer_json.parse(tokenizer_json.read_bytes(file), str(file)))
    else:
      added = [name for _, name, _ in tokenizer_json.added_tokens(config, str(self.path))]
    unknown = [name for name in added if self.token_id(name) is None]
    if unknown:
      raise ValueError(
        f"{self.path}: tokens added beside it are not in it ({json_lines.show(unknown)}); save it "
        "as tokenizer.json: AutoTokenizer.from_pretrained(...).save_pretrained(...), transformers"
      )


def _present(path: storage.Path) -> storage.Path:
  if not path.is_file():
    raise FileNotFoundError(
      f"{path}: no tokenizer here; before training, scripts/train_tokenizer.py makes one from "
      "prepared data (--config.data.tokenizer=FILE); beside a checkpoint, put back the one it "
      "was trained with"
    )
  return path


def train_sentencepiece(
  texts: Iterable[str], path: str | storage.Path, vocab_size: int
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
