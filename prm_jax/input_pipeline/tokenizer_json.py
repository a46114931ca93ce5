"""`tokenizer.json` of public models, run by the library that writes it (`tokenizers`)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from prm_jax.runtime import json_lines, storage

FILE = "tokenizer.json"
CONFIG = (
  "tokenizer_config.json"  # says which tokens begin and end a text; kept beside the tokenizer
)
COMPANIONS = (CONFIG, "special_tokens_map.json", "chat_template.jinja")
MAX_BYTES = 256 * 2**20  # the largest known, of Gemma 3, is 33 MB
MAX_IDS = 10_000_000  # the largest vocabularies have a quarter of a million
# Names of the last token, for a file that nothing beside it explains.
_ENDS = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>")


class TokenizerJson:
  """A `tokenizer.json` whose ids are the library's own, for any text.

  `encode` adds no token, and cuts and pads nothing, whatever the file says.  Special tokens that
  are spelled out in a text are plain text unless `special=True`.  Added tokens that are not special
  (runs of spaces, `<think>`) are ordinary vocabulary, matched either way, as the reference does.  A
  file with a normalizer (Qwen: NFC) decodes to the normalized text.
  """

  def __init__(self, data: bytes, companions: Mapping[str, bytes] | None = None, where: str = FILE):
    """
    Args:
      data: the bytes of a `tokenizer.json`.
      companions: files of COMPANIONS that stand beside it, by name.
      where: names the file in errors.

    Raises:
      ValueError: not a tokenizer, or one that would put several tokens before a text.
    """
    self._where = where
    self._companions = dict(companions or {})
    config = parse(self._companions.get(CONFIG, b"{}"), f"{where}: {CONFIG} beside it")
    self._plain = _build(data, where)
    size = _size(self._plain, where)
    self._data = _with_added_tokens(self._plain, data, config, where)
    self._plain.encode_special_tokens = True  # special tokens in a text are encoded as its letters
    self.hash = hashlib.sha256(self._data).hexdigest()
    self.vocab_size = size if self._data is data else _size(self._plain, where)
    before, after = self._around()
    if len(before) > 1:
      raise ValueError(f"{where}: puts {len(before)} tokens before a text; one is supported")
    self.bos_id = before[0] if before else None
    self.eos_id = self._last(config, after)

  def __reduce__(self):  # the library forgets encode_special_tokens when it is copied
    return type(self), (self._data, self._companions, self._where)

  def encode(self, text: str, special: bool = False) -> list[int]:
    return (self._special if special else self._plain).encode(text, add_special_tokens=False).ids

  def decode(self, ids: Sequence[int]) -> str:
    return self._plain.decode([int(i) for i in ids], skip_special_tokens=False)

  def token_id(self, name: str) -> int | None:
    return self._plain.token_to_id(name)

  def save(self, directory: str | storage.Path) -> None:
    """Writes `tokenizer.json`, and the files that stood beside it, last the tokenizer itself."""
    directory = storage.path(directory)
    for name, data in {**self._companions, FILE: self._data}.items():
      with json_lines.written(directory / name, "wb") as file:
        file.write(data)

  @functools.cached_property
  def _special(self) -> tokenizers.Tokenizer:
    """A second one, because a flag that is switched for each call is shared between threads."""
    return _build(self._data, self._where)

  def _around(self) -> tuple[list[int], list[int]]:
    """What the file's post-processor puts before and after a text.

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

  def _last(self, config: Mapping[str, Any], after: list[int]) -> int | None:
    name = token_name(config, "eos_token")
    if name is None and "special_tokens_map.json" in self._companions:
      beside = f"{self._where}: special_tokens_map.json beside it"
      name = token_name(parse(self._companions["special_tokens_map.json"], beside), "eos_token")
    if name is not None:
      return self._plain.token_to_id(name)
    if after:
      return after[-1]
    added = {str(t.content) for t in self._plain.get_added_tokens_decoder().values()}
    names = [name for name in _ENDS if name in added]
    return self._plain.token_to_id(names[0]) if len(names) == 1 else None


def load(path: storage.Path) -> TokenizerJson:
  """The tokenizer in a `tokenizer.json`, with the files beside it.

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
  """A whole file of at most MAX_BYTES."""
  size = storage.size(path)
  if size > MAX_BYTES:
    raise ValueError(f"{path}: {size} bytes; no tokenizer has more than {MAX_BYTES}")
  return path.read_bytes()


def parse(data: bytes, where: str) -> dict[str, Any]:
  """A JSON object of any layout."""
  return json_lines.parse(data, where)


def token_name(config: Mapping[str, Any], key: str) -> str | None:
  """The text of a token that `tokenizer_config.json` writes as a string or as an object."""
  value = config.get(key)
  if isinstance(value, dict):
    value = value.get("content")
  return value if isinstance(value, str) else None


def added_tokens(config: Mapping[str, Any], where: str) -> list[tuple[int, str, dict[str, Any]]]:
  """(id, text, entry) of each token that `tokenizer_config.json` lists, in the order of ids.

  Raises:
    ValueError: the list is of another form, or an id is none; `where` begins the message.
  """
  given, added = config.get("added_tokens_decoder"), []
  where = f"{where}: {CONFIG} beside it: added_tokens_decoder"
  if given is None:
    return []
  if not isinstance(given, dict):
    raise ValueError(f"{where}={json_lines.show(given)}: expected an object")
  for number, spec in given.items():
    name = token_name(given, number)
    if name is None or not isinstance(spec, dict):
      raise ValueError(f"{where}[{json_lines.show(number)}] has no text")
    short = number.isascii() and number.isdecimal() and len(number) < 9
    if not short or int(number) >= MAX_IDS:
      raise ValueError(f"{where}[{json_lines.show(number)}]: expected an id below {MAX_IDS:,}")
    added.append((int(number), name, spec))
  return sorted(added, key=lambda each: each[0])


def _size(tokenizer: tokenizers.Tokenizer, where: str) -> int:
  """The highest id + 1."""
  size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
  if not 0 < size <= MAX_IDS:
    found = f"an id of {size - 1:,}" if size else "no tokens"
    raise ValueError(f"{where}: {found}; expected ids below {MAX_IDS:,}")
  return size


def _build(data: bytes, where: str) -> tokenizers.Tokenizer:
  try:
    tokenizer = tokenizers.Tokenizer.from_str(data.decode())
  except Exception as error:  # the library raises this class itself
    raise ValueError(
      f"{where}: not a whole tokenizer.json ({json_lines.show(str(error))})"
    ) from error
  tokenizer.no_truncation()
  tokenizer.no_padding()
  if getattr(tokenizer.model, "dropout", None) is not None:
    tokenizer.model.dropout = None  # random merges are for training; ids are to be the same again
  return tokenizer


def _with_added_tokens(
  tokenizer: tokenizers.Tokenizer, data: bytes, config: Mapping[str, Any], where: str
) -> bytes:
  """Adds the tokens that only `tokenizer_config.json` has, as the reference does; the new file."""
  added = added_tokens(config, where)
  missing = [each for each in added if tokenizer.token_to_id(each[1]) is None]
  if not missing:
    return data
  flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
  for number, name, spec in missing:
    token = tokenizers.AddedToken(name, **{k: bool(spec[k]) for k in flags if k in spec})
    (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    if tokenizer.token_to_id(name) != number:
      raise ValueError(
        f"{where}: {CONFIG} beside it gives {name!r} the id {number}, which would be "
        f"{tokenizer.token_to_id(name)}: the two files do not belong together"
      )
  return tokenizer.to_str().encode()
