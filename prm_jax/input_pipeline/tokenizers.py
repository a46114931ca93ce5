"""Tokenizers: one interface, and its two kinds, tokenizer.json and SentencePiece."""

import abc
import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import sentencepiece
import tokenizers

from prm_jax.runtime import json_lines, storage

_META = "\u2581"  # SentencePiece's space; a text's own U+2581 is escaped to its UTF-8 bytes
PAD = 0  # id of padding; the attention mask hides it, so no tokenizer needs a pad token
MODEL = "tokenizer.model"
JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"  # names the special tokens
SPECIAL = "special_tokens_map.json"  # also names them, in older directories
TEMPLATE = "chat_template.jinja"
COMPANIONS = (CONFIG, SPECIAL, TEMPLATE)  # files kept beside the tokenizer
MOST_TEXTS = 500_000  # to train a tokenizer on; if there are more, every second, third, ... is used
CONVERT = "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers"
# Names of the end-of-sequence token, for a file without companions.
_ENDS = {"</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>"}


class Added(msgspec.Struct):
  """A token in `added_tokens_decoder` of tokenizer_config.json; UNSET: the library's default."""

  content: str
  special: bool = False
  single_word: bool = False
  lstrip: bool = False
  rstrip: bool = False
  normalized: bool | msgspec.UnsetType = msgspec.UNSET


def token_name(config: Mapping[str, Any], key: str) -> str | None:
  """Returns the text of a token that tokenizer_config.json gives as a string or an object."""
  value = config.get(key)
  value = value.get("content") if isinstance(value, dict) else value
  return value if isinstance(value, str) else None


def chat_template(config: Mapping[str, Any]) -> str | None:
  """Returns the chat template of tokenizer_config.json; of several, the one named "default".

  Raises:
    ValueError: it is neither a text nor a list of named texts.
  """
  template = config.get("chat_template")
  if isinstance(template, list):
    named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
    template = named.get("default")
  if template is not None and not isinstance(template, str):
    shown = json_lines.show(template)
    raise ValueError(f"chat_template in {CONFIG} is {shown}; expected a text, or texts by name")
  return template


class Tokenizer(abc.ABC):
  """Base of tokenizers: text to ids and back.

  `encode` adds no token.  A special token spelled out in a text is encoded as its letters unless
  `special=True`.  For the project's own and byte-level tokenizers, `encode(a) + encode(b)` decodes
  to `a + b`; public SentencePiece models may put a space between.
  """

  vocab_size: int  # the highest id + 1; a model may have more rows
  text_size: int  # the same without special tokens other than BOS and EOS
  bos_id: int | None  # starts every sequence; None: no such token
  eos_id: int | None
  kind: str  # the file's name
  settings: dict[str, Any]  # from tokenizer_config.json and the files beside it
  hash: str  # SHA-256 of the file (and of add_bos_token=false, for SentencePiece); in contracts

  def __init__(self, path: str | storage.Path):
    self._path = path = storage.path(path)
    if not path.parent.is_dir():
      raise FileNotFoundError(
        f"{path.parent}: no such folder; scripts/fetch_model.py downloads public models, and "
        "scripts/train_tokenizer.py makes a tokenizer"
      )
    if not path.is_file():
      raise FileNotFoundError(
        f"{path}: no tokenizer here; before training, scripts/train_tokenizer.py makes one "
        "(--config.data.tokenizer=FILE); beside a checkpoint, put back the one it was trained with"
      )
    self._data = json_lines.contents(path)
    beside = {name: path.parent / name for name in COMPANIONS}
    self._companions = {
      name: json_lines.contents(file) for name, file in beside.items() if file.is_file()
    }
    self.settings: dict[str, Any] = {}
    for name in (SPECIAL, CONFIG):
      data = self._companions.get(name, b"{}")
      self.settings |= json_lines.parse(data, f"{path}: {name} beside it")
    if template := self._companions.get(TEMPLATE):
      self.settings["chat_template"] = template.decode(errors="replace")
    added = self.settings.get("added_tokens_decoder") or {}
    try:  # tokens that may not be in the file itself
      self._added = msgspec.convert(added, dict[int, Added], strict=False)
    except msgspec.ValidationError as error:
      raise ValueError(f"{path}: {CONFIG} beside it: added_tokens_decoder: {error}") from error

  @abc.abstractmethod
  def encode(self, text: str, special: bool = False) -> list[int]:
    """Returns the ids of a text; `special` encodes special tokens spelled out in it as tokens."""

  @abc.abstractmethod
  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids, special tokens spelled out."""

  @abc.abstractmethod
  def token_id(self, name: str) -> int | None:
    """Returns the id of a token of the vocabulary, special or not; None if it has none."""

  def save(self, directory: str | storage.Path) -> None:
    """Writes the tokenizer's files; `load` of the directory gives the same ids and hash.

    Raises:
      ValueError: the directory has a tokenizer.json, which `load` would prefer.
    """
    directory = storage.path(directory)
    if self.kind == MODEL and (directory / JSON).exists():
      raise ValueError(f"{directory}: has a {JSON}: two tokenizers in one directory; move it away")
    with storage.written_together() as output:
      for name, data in self.files().items():
        output(directory / name, "wb").write(data)
    for name in {*COMPANIONS} - {*self.files()}:  # of another tokenizer
      (directory / name).unlink(missing_ok=True)

  def files(self) -> dict[str, bytes]:
    """Returns the contents of the tokenizer's files by name."""
    return self._companions | {self.kind: self._data}


class TokenizerJson(Tokenizer):
  """A `tokenizer.json`, with the ids of the tokenizers library for any text.

  `encode` adds no token, and neither truncates nor pads, whatever the file says.  Added tokens that
  are not special (runs of spaces, `<think>`) are ordinary vocabulary with and without `special`, as
  in the library.  A file with a normalizer (Qwen: NFC) decodes to the normalized text.

  Raises:
    ValueError: the file is not a tokenizer, or puts several tokens before a text.
  """

  kind = JSON

  def __init__(self, path: str | storage.Path):
    super().__init__(path)
    self._lock = threading.Lock()
    try:
      self._model = model = _run(tokenizers.Tokenizer.from_str, self._data.decode())
      model.no_truncation()
      model.no_padding()
      if getattr(model.model, "dropout", None) is not None:
        model.model.dropout = None  # random merges are for training; here ids must repeat
      framed = _run(model.encode, "a")  # with the tokens that the post-processor adds
    except Exception as error:  # the library raises this class itself
      shown = json_lines.show(str(error))
      raise ValueError(f"{path}: not a valid tokenizer.json ({shown})") from error
    self._add_missing()
    self.hash = hashlib.sha256(self._data).hexdigest()
    ids = {*model.get_vocab(with_added_tokens=True).values()}
    added = model.get_added_tokens_decoder()
    self.vocab_size = max(ids, default=-1) + 1
    # The file's post-processor decides about bos and eos, as in transformers 5; `add_bos_token`
    # counts for a `tokenizer.model` only.
    mask = framed.special_tokens_mask
    if 0 not in mask or mask.index(0) > 1:
      shown = f"encodes 'a' as {framed.tokens}"
      raise ValueError(f"{path}: {shown}; expected at most one token before it")
    self.bos_id = framed.ids[0] if mask[0] else None
    self.eos_id = framed.ids[-1] if mask[-1] else None
    eos = token_name(self.settings, "eos_token")
    usual = _ENDS & {token.content for token in added.values()}
    if eos is None and self.eos_id is None and len(usual) == 1:
      (eos,) = usual
    if eos is not None:
      self.eos_id = model.token_to_id(eos)
    special = {id for id, token in added.items() if token.special} - {self.bos_id, self.eos_id}
    self.text_size = max(ids - special, default=-1) + 1

  def _add_missing(self) -> None:
    """Adds the tokens that only tokenizer_config.json has."""
    before = self._model.get_vocab_size(with_added_tokens=True)
    for number, spec in sorted(self._added.items()):
      if self.token_id(spec.content) is not None:
        continue
      token = tokenizers.AddedToken(**msgspec.to_builtins(spec))
      (self._model.add_special_tokens if token.special else self._model.add_tokens)([token])
      if (given := self.token_id(token.content)) != number:
        raise ValueError(
          f"{self._path}: {CONFIG} beside it gives {json_lines.show(token.content)} the id {number}"
          f", which would be {given}: the two files do not belong together"
        )
    if self._model.get_vocab_size(with_added_tokens=True) > before:
      self._data = self._model.to_str().encode()

  def encode(self, text: str, special: bool = False) -> list[int]:
    with self._lock:  # no thread may change the setting while another one encodes
      self._model.encode_special_tokens = not special  # as letters
      try:
        return _run(self._model.encode, text, add_special_tokens=False).ids
      except Exception as error:  # the library raises this class itself
        raise ValueError(f"{self._path}: cannot encode {json_lines.show(text)}: {error}") from None

  def decode(self, ids: Sequence[int]) -> str:
    return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

  def token_id(self, name: str) -> int | None:
    return self._model.token_to_id(name)


class SentencePiece(Tokenizer):
  """A SentencePiece model: the project's own or a public one.

  A model of `train_sentencepiece` is lossless: decode(encode(x)) == x.  A public one gives the ids
  of the sentencepiece library, including the space that most put first.  With `special`, the text
  is cut at control symbols such as `</s>`, and each part is encoded on its own.
  """

  kind = MODEL

  def __init__(self, path: str | storage.Path):
    super().__init__(path)
    self._model = model = sentencepiece.SentencePieceProcessor()
    try:
      model.LoadFromSerializedProto(self._data)
      for number in range(model.vocab_size()):
        model.IdToPiece(number)
    except (RuntimeError, UnicodeDecodeError) as error:
      raise ValueError(f"{path}: not a SentencePiece model ({error})") from error
    self._refuse_additions()
    self.vocab_size = self.text_size = model.vocab_size()
    bos, eos = (number if number >= 0 else None for number in (model.bos_id(), model.eos_id()))
    self.bos_id = None if self.settings.get("add_bos_token") is False else bos
    # Without its companion file the tokenizer would put bos first, so the hash must differ.
    setting = b"add_bos_token=false" if self.bos_id != bos else b""
    self.hash = hashlib.sha256(self._data + setting).hexdigest()
    end = self.token_id(token_name(self.settings, "eos_token") or "")
    self.eos_id = eos if end is None else end
    self._meta_ids = [model.PieceToId(f"<0x{byte:02X}>") for byte in _META.encode()]
    self._own = self._is_own()
    names = [model.IdToPiece(i) for i in range(self.vocab_size) if model.IsControl(i)]
    longest_first = sorted(map(re.escape, filter(None, names)), key=len, reverse=True)
    self._controls = re.compile(f"({'|'.join(longest_first) or '(?!)'})")

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
    number = self._model.PieceToId(name)  # the unknown token's id for a name outside the vocabulary
    return number if self._model.IdToPiece(number) == name else None

  def _is_own(self) -> bool:
    """Returns whether `train_sentencepiece` made the model; U+2581 then needs its bytes."""
    m = self._model
    usual_ids = (m.unk_id(), m.bos_id(), m.eos_id(), m.pad_id()) == (0, 1, 2, -1)
    prefixed = m.EncodeAsPieces("a")[:1] != ["a"]
    keeps_spaces = m.DecodeIds(m.EncodeAsIds("  a \n b ")) == "  a \n b "
    return usual_ids and not prefixed and keeps_spaces and all(map(m.IsByte, self._meta_ids))

  def _refuse_additions(self) -> None:
    """Raises ValueError for added tokens outside the model, which would encode them as letters."""
    names = [token.content for token in self._added.values()]
    if (file := self._path.parent / "added_tokens.json").is_file():
      names = json_lines.document(file)
    if unknown := [name for name in names if self.token_id(name) is None]:
      raise ValueError(
        f"{self._path}: tokens added beside it are not in it ({json_lines.show(unknown)}); save it "
        f"as {JSON}: {CONVERT}"
      )


def _run(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
  """Calls the tokenizers library; its Rust panics, which are no Exceptions, become RuntimeError."""
  try:
    return function(*args, **options)
  except BaseException as error:
    if type(error).__name__ == "PanicException":
      raise RuntimeError(f"the tokenizers library gave up: {json_lines.show(str(error))}") from None
    raise


def find(directory: str | storage.Path) -> storage.Path:
  """Returns a directory's tokenizer.json, or tokenizer.model, or raises FileNotFoundError."""
  for name in (JSON, MODEL):
    if (path := storage.path(directory) / name).is_file():
      return path
  raise FileNotFoundError(f"{directory}: no {JSON} or {MODEL} here; {CONVERT} makes the first")


def load(path: str | storage.Path) -> Tokenizer:
  """Loads the tokenizer of a tokenizer.json, a tokenizer.model, or a directory with one of them.

  Raises:
    ValueError: the file is of another kind, or broken.
    OSError: the file is missing, or cannot be read.
  """
  path = storage.path(path)
  path = find(path) if path.is_dir() else path
  return TokenizerJson(path) if path.suffix == ".json" else SentencePiece(path)


def train_sentencepiece(
  texts: Iterable[str], path: str | storage.Path, vocab_size: int, whole_words: bool = False
) -> SentencePiece:
  """Trains a byte-pair model on `texts` and writes it to `path`.

  The model falls back to bytes, so no text is unknown, and keeps white space.  Each newline is a
  piece of its own.  So is each digit, unless `whole_words` lets letters, digits and signs make
  pieces together.

  Args:
    vocab_size: upper bound, at least 300; a small corpus has fewer pieces.

  Raises:
    ValueError: `vocab_size` is too small, or `texts` is empty.
    OSError: `path` cannot be written.
  """
  if vocab_size < 300:
    raise ValueError(f"vocab_size={vocab_size}: at least 300 (256 of them are bytes)")
  with storage.written(path, "wb") as out:
    texts = list(texts)  # read here, because the trainer would wrap an error in reading them
    if not texts:
      raise ValueError(f"{path}: no texts to train a tokenizer on")
    # The trainer's own sample of the texts would differ between processes.
    texts = texts[:: -(-len(texts) // MOST_TEXTS)]
    sentencepiece.SentencePieceTrainer.Train(
      sentence_iterator=iter(texts),
      model_writer=out,
      vocab_size=vocab_size,
      hard_vocab_limit=False,
      model_type="bpe",
      byte_fallback=True,
      split_digits=not whole_words,
      split_by_unicode_script=not whole_words,
      normalization_rule_name="identity",
      remove_extra_whitespaces=False,
      add_dummy_prefix=False,
      user_defined_symbols=["\n"],
      character_coverage=1.0,
      max_sentence_length=1 << 20,
      input_sentence_size=MOST_TEXTS,  # stored in the file, whose hash is part of contracts
      shuffle_input_sentence=True,
      num_threads=1,  # the result depends on the number of threads
      minloglevel=2,
      unk_id=0,
      bos_id=1,
      eos_id=2,
    )
  return SentencePiece(path)
