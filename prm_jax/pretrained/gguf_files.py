"""GGUF files: configuration and tensors of a public model, de-quantised one at a time.

The header is read by `prm_jax.gguf_metadata`; the `gguf` package (extra `gguf`) knows the thirty
block layouts.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

import numpy as np

from prm_jax import gguf_metadata
from prm_jax.runtime.json_lines import show

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
REALS = ("epsilon", "base", "factor", "linear", "softcapping")  # ends of keys; others are whole
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


def read_header(path: str | pathlib.Path) -> Header:
  """Reads metadata and the list of tensors; no tensor itself.

  Raises:
    ValueError: not a GGUF file of version 2 or 3 (little-endian), cut off, or claiming more than
      there is in the file; names the file and the number.
    OSError: the file cannot be read.
  """
  path = pathlib.Path(path)
  header, tensors = gguf_metadata.read(path), {}
  for name, each in header.tensors.items():
    nbytes = _nbytes(f"{path}: tensor {name}", each.shape, each.kind)
    if each.offset + nbytes > header.size:
      raise ValueError(
        f"{path}: tensor {name} {list(each.shape)} ends at byte {each.offset + nbytes:,}, and the "
        f"file has {header.size:,}: cut off in copying; fetch it again"
      )
    dtype = PLAIN.get(each.kind, "float32")
    tensors[name] = Tensor(path, each.shape, dtype, each.kind, each.offset, nbytes)
  return Header(header.metadata, tensors)


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
  if not isinstance(family, str) or family not in ARCHITECTURES:
    raise ValueError(
      f"{path}: general.architecture={show(family)} is not supported; there are "
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
    kinds = (int, float) if key.endswith(REALS) else (int,)
    if key == "rope.scaling.type":
      kinds = (str,)
    if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
      raise ValueError(f"{path}: {family}.{key}={show(value)}: of a wrong type")
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
      if type(value) is not int:
        raise ValueError(f"{path}: tokenizer.ggml.{token}_token_id={show(value)}: of a wrong type")
      config[f"{token[:3]}_token_id"] = value
  if get("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
    raise ValueError(f"{path}: {family}.rope.dimension_count: rotary parts are not supported")
  for key in metadata:
    if "expert_count" in key and np.any(metadata[key]):
      raise ValueError(
        f"{path}: {key}={show(metadata[key])}: mixtures of experts are not supported"
      )
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
  factor = get("rope.scaling.factor", None)
  factor = get("rope.scale_linear", 0.0) if factor is None else factor  # the key's older name
  kind = get("rope.scaling.type", None) or "linear"  # as llama.cpp reads a file that has no type
  if kind == "linear" and factor in (0, 1):
    kind = "none"
  if "rope_freqs.weight" in header.tensors:
    if kind != "none":
      raise ValueError(f"{path}: rope_freqs.weight, and {kind} RoPE scaling too: not supported")
    # The file has only the resulting factors, one for each frequency: found again by trial.
    tensor = header.tensors["rope_freqs.weight"]
    if tensor.shape != (config["head_dim"] // 2,) or config["head_dim"] % 2:
      raise ValueError(
        f"{path}: rope_freqs.weight {list(tensor.shape)}: expected half of "
        f"attention.key_length={config['head_dim']}"
      )
    factors = tensor.read()
    for factor in (8.0, 32.0, 16.0, 4.0, 2.0):  # Llama 3.1, 3.2, others
      if np.allclose(factors, llama3_factors(config, factor), rtol=1e-4):
        return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    raise ValueError(f"{path}: rope_freqs.weight: factors of no known RoPE scaling")
  if kind == "none":
    return None
  scaling = {"rope_type": kind, "factor": _short(factor)}
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
