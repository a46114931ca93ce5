"""`tokenizer.json` of public models, run by the library that writes it (`tokenizers`)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import tokenizers
from etils import epath

from prm_jax.runtime import json_lines, storage
from prm_jax.runtime.json_lines import parse as parse

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"  # names the special tokens
SPECIAL = "special_tokens_map.json"  # names them too, in older directories
COMPANIONS = (CONFIG, SPECIAL, "chat_template.jinja")  # kept beside the tokenizer
MAX_BYTES = 256 * 2**20  # the largest known, of Gemma 3, is 33 MB
MAX_IDS = 10_000_000  # the largest vocabularies have a quarter of a million
# Names of the last token, for a file without companions.
_ENDS = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>")


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=MAX_IDS)]


class AddedToken(msgspec.Struct, omit_defaults=True):
  content: str
  single_word: bool = False
  lstrip: bool = False
  rstrip: bool = False
  normalized: bool | None = None  # null: the library's default
  special: bool = False


class Config(msgspec.Struct):
  """The keys of `tokenizer_config.json` and `special_tokens_map.json` that are read."""

  eos_token: str | AddedToken | None = None
  add_bos_token: bool | None = None
  added_tokens_decoder: dict[TokenId, AddedToken] | None = None

  @property
  def eos(self) -> str | None:
    return self.eos_token.content if isinstance(self.eos_token, AddedToken) else self.eos_token


def read_config(companions: Mapping[str, bytes], where: str, name: str = CONFIG) -> Config:
  """One of the companions; ValueError if a key has a wrong type."""
  try:
    return msgspec.json.decode(companions.get(name, b"{}"), type=Config)
  except (msgspec.DecodeError, RecursionError) as error:
    raise ValueError(f"{where}: {name} beside it: {error}") from error


class TokenizerJson:
  """A `tokenizer.json` whose ids are the library's own, for any text.

  `encode` adds no token, and neither truncates nor pads, whatever the file says.  Added tokens that
  are not special (runs of spaces, `<think>`) are ordinary vocabulary with and without `special`, as
  in the library.  A file with a normalizer (Qwen: NFC) decodes to the normalized text.
  """

  def __init__(self, data: bytes, companions: Mapping[str, bytes] | None = None, where: str = FILE):
    """
    Args:
      data: the bytes of a `tokenizer.json`.
      companions: files of COMPANIONS that stand beside it, by name.
      where: the file's name in errors.

    Raises:
      ValueError: not a tokenizer, or one that puts several tokens before a text.
    """
    self._where = where
    self._companions = dict(companions or {})
    config = read_config(self._companions, where)
    self._plain = _build(data, where)
    self._data = _with_added_tokens(self._plain, data, config, where)
    self._plain.encode_special_tokens = True  # a special token in a text is encoded as its letters
    self.hash = hashlib.sha256(self._data).hexdigest()
    highest = max(self._plain.get_vocab(with_added_tokens=True).values(), default=-1)
    if not 0 <= highest < MAX_IDS:
      raise ValueError(f"{where}: the highest id is {highest:,}; expected 0 to {MAX_IDS - 1:,}")
    self.vocab_size = highest + 1
    before, after = self._around()
    if len(before) > 1:
      raise ValueError(f"{where}: puts {len(before)} tokens before a text; one is supported")
    self.bos_id = before[0] if before else None
    self.eos_id = self._last(config.eos or read_config(self._companions, where, SPECIAL).eos, after)

  def __reduce__(self):  # the library forgets encode_special_tokens when it is copied
    return type(self), (self._data, self._companions, self._where)

  def encode(self, text: str, special: bool = False) -> list[int]:
    return (self._special if special else self._plain).encode(text, add_special_tokens=False).ids

  def decode(self, ids: Sequence[int]) -> str:
    return self._plain.decode([int(i) for i in ids], skip_special_tokens=False)

  def token_id(self, name: str) -> int | None:
    return self._plain.token_to_id(name)

  def save(self, directory: str | storage.Path) -> None:
    """Writes `tokenizer.json` and its companions, the tokenizer itself last."""
    write(directory, {**self._companions, FILE: self._data})

  @functools.cached_property
  def _special(self) -> tokenizers.Tokenizer:
    """A second instance: a flag set for each call would be shared between threads."""
    return _build(self._data, self._where)

  def _around(self) -> tuple[list[int], list[int]]:
    """The tokens that the file's post-processor puts before and after a text.

    It alone decides, as in transformers 5: `add_bos_token` counts for a `tokenizer.model` only.
    """
    try:
      whole = self._plain.encode("a", add_special_tokens=True)
    except (KeyboardInterrupt, SystemExit):
      raise
    except BaseException as error:  # of the library: Exception itself, or the class of its panics
      raise ValueError(f"{self._where}: cannot encode the letter 'a' ({error})") from error
    own = [i for i, masked in enumerate(whole.special_tokens_mask) if not masked]
    if not own:
      raise ValueError(f"{self._where}: the letter 'a' has no token in it")
    return whole.ids[: own[0]], whole.ids[own[-1] + 1 :]

  def _last(self, name: str | None, after: list[int]) -> int | None:
    """The id of the token that ends a text: by its name, by the post-processor, or by habit."""
    if name is None and after:
      return after[-1]
    if name is None:
      added = {token.content for token in self._plain.get_added_tokens_decoder().values()}
      names = [each for each in _ENDS if each in added]
      name = names[0] if len(names) == 1 else None
    return None if name is None else self._plain.token_to_id(name)


def load(path: storage.Path) -> TokenizerJson:
  """The tokenizer in a `tokenizer.json`, with its companions.

  Raises:
    ValueError: not a tokenizer.json.
    OSError: it cannot be read.
  """
  return TokenizerJson(read_bytes(path), companions(path), str(path))


def companions(path: storage.Path) -> dict[str, bytes]:
  """The files of COMPANIONS beside a tokenizer, by name."""
  beside = {name: path.parent / name for name in COMPANIONS}
  return {name: read_bytes(file) for name, file in beside.items() if file.is_file()}


def read_bytes(path: storage.Path) -> bytes:
  """A whole file; ValueError above MAX_BYTES."""
  size = epath.Path(path).stat().length
  if size > MAX_BYTES:
    raise ValueError(f"{path}: {size} bytes; no tokenizer has more than {MAX_BYTES}")
  return path.read_bytes()


def write(directory: str | storage.Path, files: Mapping[str, bytes]) -> None:
  """Writes files by name, each whole or not at all."""
  for name, data in files.items():
    with json_lines.written(storage.path(directory) / name, "wb") as file:
      file.write(data)


def token_name(config: Mapping[str, Any], key: str) -> str | None:
  """The text of a token that `tokenizer_config.json` writes as a string or as an object."""
  value = config.get(key)
  if isinstance(value, dict):
    value = value.get("content")
  return value if isinstance(value, str) else None


def _build(data: bytes, where: str) -> tokenizers.Tokenizer:
  try:
    tokenizer = tokenizers.Tokenizer.from_str(data.decode())
  except Exception as error:  # the library raises this class itself
    shown = json_lines.show(str(error))
    raise ValueError(f"{where}: not a whole tokenizer.json ({shown})") from error
  tokenizer.no_truncation()
  tokenizer.no_padding()
  if getattr(tokenizer.model, "dropout", None) is not None:
    tokenizer.model.dropout = None  # random merges are for training; here ids must repeat
  return tokenizer


def _with_added_tokens(
  tokenizer: tokenizers.Tokenizer, data: bytes, config: Config, where: str
) -> bytes:
  """Adds the tokens that only `tokenizer_config.json` has, as transformers does; the new file."""
  added = sorted((config.added_tokens_decoder or {}).items())
  missing = [each for each in added if tokenizer.token_to_id(each[1].content) is None]
  for number, spec in missing:
    token = tokenizers.AddedToken(**msgspec.to_builtins(spec))  # without defaults
    (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    if (given := tokenizer.token_to_id(spec.content)) != number:
      raise ValueError(
        f"{where}: {CONFIG} beside it gives {spec.content!r} the id {number}, which would be "
        f"{given}: the two files do not belong together"
      )
  return tokenizer.to_str().encode() if missing else data
