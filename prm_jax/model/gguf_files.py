"""GGUF files: configuration and tensors of a public model, de-quantised one at a time.

The header is read here, with every count checked against the file's size, so that a hostile file is
an error at once; the `gguf` package (extra `gguf`) knows the thirty block layouts.  Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import pathlib
import struct
from typing import Any

import numpy as np

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
MAX_COUNT = 2**16  # of metadata keys and of tensors
MAX_NAME = 2**12  # bytes of a key or a tensor's name
MAX_STRINGS = 2**22  # in one array: four million tokens
MAX_DIMENSIONS = 8
STRING, ARRAY = 8, 9
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))
PLAIN = {0: "float32", 1: "float16", 30: "bfloat16"}  # tensor types that are no blocks


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor of the file, not read yet."""

  path: pathlib.Path
  shape: tuple[int, ...]  # slowest axis first, as numpy counts
  dtype: str  # "float32" whatever the blocks are: what `read` gives
  kind: int  # GGML's number of the block layout
  offset: int  # in the file
  nbytes: int

  def read(self) -> np.ndarray:
    """The values, `shape`; de-quantised to float32 where they are blocks."""
    data = np.asarray(np.memmap(self.path, np.uint8, "r", self.offset, self.nbytes))
    if self.kind in PLAIN:
      return data.view(self.dtype).reshape(self.shape)
    gguf = _package()
    kind = gguf.GGMLQuantizationType(self.kind)
    rows = math.prod(self.shape[:-1])
    while rows % 2 == 0 and self.nbytes // rows < 2**15:
      rows //= 2  # the package works on 16 rows at a time, and blocks do not know about rows
    try:
      return gguf.quants.dequantize(data.reshape(rows, -1), kind).reshape(self.shape)
    except NotImplementedError as error:
      raise ValueError(f"{self.path}: tensors of type {kind.name} cannot be read") from error


@dataclasses.dataclass(frozen=True)
class Header:
  """Metadata and tensors of a file.  An array of strings is its length only."""

  metadata: dict[str, Any]
  tensors: dict[str, Tensor]


class _Cursor:
  """A place in the header.  Nothing is read or allocated beyond the end of the file."""

  def __init__(self, path: pathlib.Path, data: mmap.mmap):
    self.path, self.data, self.at = path, data, 0

  def skip(self, count: int) -> int:
    """Where the next `count` bytes begin; they are passed."""
    if count > len(self.data) - self.at:
      raise ValueError(
        f"{self.path}: the header wants {count:,} bytes at {self.at:,}, and the file has "
        f"{len(self.data):,}: cut off in copying, or no GGUF file"
      )
    self.at += count
    return self.at - count

  def number(self, code: str) -> Any:
    layout = struct.Struct("<" + code)
    return layout.unpack_from(self.data, self.skip(layout.size))[0]

  def count(self, what: str, limit: int) -> int:
    value = self.number("Q")
    if value > limit:
      raise ValueError(
        f"{self.path}: the header claims {value:,} {what}; at most {limit:,} are read"
      )
    return value

  def text(self, limit: int | None = None) -> str:
    size = self.count("bytes of text", limit or len(self.data))
    start = self.skip(size)
    try:
      return self.data[start : start + size].decode()
    except UnicodeDecodeError as error:
      raise ValueError(f"{self.path}: a name or text at byte {start:,} is not UTF-8") from error

  def value(self) -> Any:
    kind = self.number("I")
    if kind == STRING:
      return self.text()
    if kind == ARRAY:
      return self._array()
    if kind not in SCALARS:
      raise ValueError(f"{self.path}: metadata of unknown type {kind}")
    return self.number(SCALARS[kind])

  def _array(self) -> Any:
    kind = self.number("I")
    if kind == STRING:
      count = self.count("texts in an array", MAX_STRINGS)
      for _ in range(count):
        self.skip(self.number("Q"))
      return count
    if kind not in SCALARS:
      raise ValueError(f"{self.path}: an array of type {kind} in the metadata cannot be read")
    layout = np.dtype("<" + SCALARS[kind])  # struct and numpy name these alike
    count = self.number("Q")
    start = self.skip(count * layout.itemsize)
    return np.frombuffer(self.data, layout, count, start).copy()


def read_header(path: str | pathlib.Path) -> Header:
  """Reads metadata and the list of tensors; no tensor itself.

  Raises:
    ValueError: not a GGUF file of version 2 or 3 (little-endian), cut off, or claiming more than
      there is in the file; names the file and the number.
    OSError: the file cannot be read.
  """
  path = pathlib.Path(path)
  with path.open("rb") as file:
    if file.read(4) != b"GGUF":
      raise ValueError(f"{path}: not a GGUF file (it does not begin with GGUF)")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
      return _header(_Cursor(path, data))


def _header(cursor: _Cursor) -> Header:
  path = cursor.path
  cursor.skip(4)
  version = cursor.number("I")
  if version not in (2, 3):
    raise ValueError(f"{path}: GGUF version {version}; 2 and 3 (little-endian) are read")
  tensor_count = cursor.count("tensors", MAX_COUNT)
  metadata, listed = {}, {}
  for _ in range(cursor.count("metadata keys", MAX_COUNT)):
    key = cursor.text(MAX_NAME)
    metadata[key] = cursor.value()
  for _ in range(tensor_count):
    name = cursor.text(MAX_NAME)
    if name in listed:
      raise ValueError(f"{path}: tensor {name} is there twice")
    dimensions = cursor.number("I")
    if dimensions > MAX_DIMENSIONS:
      raise ValueError(f"{path}: tensor {name} has {dimensions:,} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    listed[name] = shape, cursor.number("I"), cursor.number("Q")
  alignment = metadata.get("general.alignment", 32)
  if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
    raise ValueError(f"{path}: general.alignment={alignment!r}: expected a power of two")
  start = -(-cursor.at // alignment) * alignment
  tensors = {}
  for name, (shape, kind, offset) in listed.items():
    nbytes = _nbytes(f"{path}: tensor {name}", shape, kind)
    if start + offset + nbytes > len(cursor.data):
      raise ValueError(
        f"{path}: tensor {name} {list(shape)} ends at byte {start + offset + nbytes:,}, and the "
        f"file has {len(cursor.data):,}: cut off in copying; fetch it again"
      )
    tensors[name] = Tensor(path, shape, PLAIN.get(kind, "float32"), kind, start + offset, nbytes)
  return Header(metadata, tensors)


def _nbytes(where: str, shape: tuple[int, ...], kind: int) -> int:
  if kind in PLAIN:
    block, size = 1, 4 if kind == 0 else 2
  else:
    gguf = _package()
    try:
      block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
      raise ValueError(f"{where}: unknown block layout {kind}") from None
  if not shape or 0 in shape or shape[-1] % block:
    raise ValueError(f"{where} {list(shape)}: its rows cannot be blocks of {block}")
  return math.prod(shape) // block * size


def _package() -> Any:
  try:
    import gguf
  except ImportError as error:
    raise ImportError(
      "quantised GGUF files need the gguf package: pip install 'prm_jax[gguf]'"
    ) from error
  return gguf


def _short(value: float) -> float:
  """A float32 of the file as the decimal it was written from: 1e-05, not 9.999999747e-06."""
  return float(str(np.float32(value)))


def read_config(path: str | pathlib.Path) -> dict[str, Any]:
  """The file's metadata under the keys of a `config.json` of the hub.

  Raises:
    ValueError: an architecture or a feature that is not supported, or a key is missing; names it.
  """
  return config_of(path, read_header(path))


def config_of(path: str | pathlib.Path, header: Header) -> dict[str, Any]:
  """`read_config` of a header already read; `path` is for messages."""
  metadata = header.metadata
  family = metadata.get("general.architecture")
  if family not in ARCHITECTURES:
    raise ValueError(
      f"{path}: general.architecture={family!r} is not supported; there are "
      f"{', '.join(ARCHITECTURES)}"
    )

  def get(key: str, *default: Any) -> Any:
    value = metadata.get(f"{family}.{key}", *default)
    if value is None and not default:
      raise ValueError(f"{path}: {family}.{key} is missing from the metadata")
    if isinstance(value, np.ndarray):
      if len(set(value.tolist())) != 1:
        raise ValueError(f"{path}: {family}.{key} differs by layer, which is not supported")
      value = value[0].item()
    wanted = (str,) if key == "rope.scaling.type" else (int, float, type(None))
    if not isinstance(value, wanted) or isinstance(value, bool):
      raise ValueError(f"{path}: {family}.{key}={value!r}: of a wrong type")
    return value

  if "token_embd.weight" not in header.tensors:
    raise ValueError(f"{path}: there is no tensor token_embd.weight: no language model")
  heads, width = get("attention.head_count"), get("embedding_length")
  if heads < 1 or width < 1:
    raise ValueError(f"{path}: attention.head_count={heads}, embedding_length={width}")
  config = {
    "model_type": family if family != "gemma3" else "gemma3_text",
    "vocab_size": header.tensors["token_embd.weight"].shape[0],
    "hidden_size": width,
    "num_hidden_layers": get("block_count"),
    "num_attention_heads": heads,
    "num_key_value_heads": get("attention.head_count_kv", heads),
    "head_dim": get("attention.key_length", width // heads),
    "intermediate_size": get("feed_forward_length"),
    "max_position_embeddings": get("context_length"),
    "rms_norm_eps": _short(get("attention.layer_norm_rms_epsilon")),
    "rope_theta": _short(get("rope.freq_base", 10_000.0)),
    "tie_word_embeddings": "output.weight" not in header.tensors,
    "hidden_act": "silu",
  }
  if family in ("llama", "qwen3"):  # Qwen2 has biases always
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
  for token in ("bos", "eos", "padding"):
    if (value := metadata.get(f"tokenizer.ggml.{token}_token_id")) is not None:
      config[f"{token[:3]}_token_id"] = value
  if get("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
    raise ValueError(f"{path}: {family}.rope.dimension_count: rotary parts are not supported")
  for key in metadata:
    if "expert_count" in key and metadata[key]:
      raise ValueError(f"{path}: {key}={metadata[key]}: mixtures of experts are not supported")
  config["rope_scaling"] = _rope_scaling(path, header, config, get)
  if family.startswith("gemma"):
    config |= _gemma(family, config, get)
  elif window := get("attention.sliding_window", None):
    config |= {"sliding_window": window, "use_sliding_window": True}
    if family == "llama":  # llama.cpp has no name of its own for Mistral
      config["model_type"] = "mistral"
  return config


def _rope_scaling(path, header: Header, config: dict[str, Any], get) -> dict[str, Any] | None:
  """Scaling of rotary frequencies, from the keys or from Llama 3's tensor of factors."""
  kind = get("rope.scaling.type", "none")
  if "rope_freqs.weight" in header.tensors:
    # The file has only the resulting factors, one for each frequency: found again by trial.
    factors = header.tensors["rope_freqs.weight"].read()
    for factor in (8.0, 32.0, 16.0, 4.0, 2.0):  # Llama 3.1, 3.2, others
      if np.allclose(factors, llama3_factors(config, factor), rtol=1e-4):
        return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    raise ValueError(f"{path}: rope_freqs.weight: factors of no known RoPE scaling")
  if kind == "none":
    return None
  scaling = {"rope_type": kind, "factor": _short(get("rope.scaling.factor", 1.0))}
  if kind != "linear":  # reading config.json's rules decides what to do with it
    scaling["original_max_position_embeddings"] = get(
      "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
  return scaling


LLAMA3 = {
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
}


def llama3_factors(config: dict[str, Any], factor: float) -> np.ndarray:
  """What Llama 3.1 divides each rotary frequency by, float32 `[head_dim / 2]`."""
  size, low, high = config["head_dim"], LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
  waves = 2 * np.pi * config["rope_theta"] ** (np.arange(0, size, 2) / size)
  turns = LLAMA3["original_max_position_embeddings"] / waves
  smooth = np.clip((turns - low) / (high - low), 0, 1)
  return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _gemma(family: str, config: dict[str, Any], get) -> dict[str, Any]:
  """What llama.cpp (src/llama-model.cpp) knows of Gemma without finding it in the file."""
  largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[family]  # the 27B
  per_head = config["hidden_size"] // config["num_attention_heads"]
  out = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": per_head if largest else config["head_dim"],
    "sliding_window": get("attention.sliding_window"),
  }
  del config["hidden_act"]
  if family == "gemma2":
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
      out[name] = _short(get(name))
  else:
    out |= {"rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6}
  return out
