"""Public model families: `config.json` of the hub to our configuration, and back.

A family is a row of `FAMILIES`: what its decoder always has, and what transformers takes for a key
that a file leaves out.  What the decoder cannot do is refused by name, never ignored.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from prm_jax import config as config_lib
from prm_jax.pretrained import config_json, gguf_files
from prm_jax.pretrained.config_json import File
from prm_jax.runtime.json_lines import show

# What a run chooses and no file says.
CHOICES = ("embedding_std", "dtype", "param_dtype", "remat", "unroll_layers", "attention")
CHOICES += ("saved", "gradient_dtype", "lora_rank", "lora_alpha", "lora_targets")


@dataclasses.dataclass(frozen=True)
class Preset:
  """A public model's architecture."""

  config: config_lib.Model
  vocab_size: int  # rows of its embedding
  family: str  # of FAMILIES
  tokens: dict[str, int | list[int]]  # ids of bos, eos and pad, as far as the file has them


@dataclasses.dataclass(frozen=True)
class Family:
  fixed: dict[str, Any]  # fields of config.Model that every model of the family has
  numbers: dict[str, str]  # keys of config.json besides NUMBERS, and their fields
  defaults: dict[str, Any]  # for keys that a file leaves out; as transformers has them
  slides: str = "never"  # which layers have a window: see `_window`


# A key that neither a file nor these have is an error.  Theta of rotary positions is not here: a
# file must say it, but for Gemma 3's, written as differences from a default, and Llama 2's, which
# are older than the key.
COMMON = {
  "hidden_act": "silu",
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": False,
  "max_position_embeddings": 0,
  "num_key_value_heads": None,
  "head_dim": None,
}
QWEN = COMMON | {"num_key_value_heads": 32, "max_window_layers": 28, "sliding_window": 4096}
GEMMA = COMMON | {
  "hidden_act": "gelu_pytorch_tanh",
  "tie_word_embeddings": True,
  "num_attention_heads": 8,
  "num_key_value_heads": 4,
  "head_dim": 256,
  "query_pre_attn_scalar": 256,
  "sliding_window": 4096,
}
GEMMA2 = GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA3 = GEMMA | {
  "vocab_size": 262_208,
  "max_position_embeddings": 131_072,
  "final_logit_softcapping": None,
  "sliding_window_pattern": 6,
  "rope_theta": 1_000_000.0,
  "rope_local_base_freq": 10_000.0,
}
NUMBERS = {
  "hidden_size": "width",
  "num_hidden_layers": "layers",
  "num_attention_heads": "heads",
  "num_key_value_heads": "kv_heads",
  "head_dim": "head_size",
  "intermediate_size": "mlp_width",
  "rms_norm_eps": "norm_epsilon",
  "max_position_embeddings": "context_length",
}
# Null, or not there: as many as heads; hidden_size / heads; no cap.
NULLABLE = (
  "num_key_value_heads",
  "head_dim",
  "attn_logit_softcapping",
  "final_logit_softcapping",
)
SANDWICH = {"norm_offset": True, "post_norms": True, "scale_embeddings": True}
SCALAR = {"query_pre_attn_scalar": "attention_scalar", "final_logit_softcapping": "logit_softcap"}
FAMILIES = {
  "llama": Family({}, {}, COMMON | {"rope_theta": 10_000.0}),
  "mistral": Family(
    {}, {}, COMMON | {"num_key_value_heads": 8, "sliding_window": 4096}, "every layer"
  ),
  "qwen2": Family({"attention_bias": True}, {}, QWEN, "the last layers"),
  "qwen3": Family({"query_key_norm": True}, {}, QWEN | {"head_dim": 128}, "the last layers"),
  "gemma2": Family(
    SANDWICH, SCALAR | {"attn_logit_softcapping": "attention_softcap"}, GEMMA2, "alternating"
  ),
  "gemma3": Family(SANDWICH | {"query_key_norm": True}, SCALAR, GEMMA3, "all but every n-th"),
}
MODEL_TYPES = {name: name for name in FAMILIES} | {"gemma3_text": "gemma3"}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Keys that change the arithmetic in a way this decoder does not have, and their harmless values.
NO = (None, False)
HARMLESS = {
  "quantization_config": (None,),
  "compression_config": (None,),
  "attention_bias": NO,
  "mlp_bias": NO,
  "alibi": NO,
  "use_mrope": NO,
  "is_encoder_decoder": NO,
  "add_cross_attention": NO,
  "use_bidirectional_attention": NO,
  "is_causal": (None, True),
  "partial_rotary_factor": (None, 1),
  "rotary_pct": (None, 1),
  "num_experts": (None, 0),
  "num_local_experts": (None, 0),
  "n_routed_experts": (None, 0),
  "attn_logit_softcapping": (None,),  # but for Gemma 2
  "sliding_window": (None,),  # but for those that slide
}
ROPE_KEYS = {
  "linear": {"factor": "rope_factor"},
  "llama3": {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_factor",
    "high_freq_factor": "rope_high_factor",
    "original_max_position_embeddings": "rope_original_length",
  },
}
LAYERS = {"sliding_attention": "s", "full_attention": "f"}


def read(path: str | pathlib.Path) -> Preset:
  """The architecture of a model: its directory's config.json, or the metadata of a .gguf file.

  Raises:
    ValueError: a feature is not supported, or a value is missing or makes no sense; names it.
    OSError: there is no such directory or file.
  """
  path = pathlib.Path(path)
  if path.suffix == ".gguf":
    return preset(gguf_files.read_config(path), path)
  file = path / "config.json"
  return preset(config_json.load(file), file)


def preset(values: Any, path: str | pathlib.Path) -> Preset:
  """`read` of a config.json already parsed; `path` is for messages."""
  if not isinstance(values, dict):
    raise ValueError(f"{path}: expected an object, found {show(values)}")
  outer = File(path, values)
  model_type = outer.get("model_type")
  if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
    raise outer.error("model_type", f"not supported; there are {', '.join(MODEL_TYPES)}")
  if model_type == "gemma3":  # with pictures: what is said of the whole counts
    text = outer.section("text_config")
    if text is None:
      raise ValueError(f"{path}: text_config is missing")
    if text.values.get("model_type", "gemma3_text") != "gemma3_text":
      raise text.error("model_type", "expected gemma3_text")
    own = ("quantization_config", "tie_word_embeddings", *_token_keys())
    values = text.values | {key: values[key] for key in own if values.get(key) is not None}
  name = MODEL_TYPES[model_type]
  family = FAMILIES[name]
  file = File(path, values, family.defaults)
  _refuse(file, name)
  fields = family.fixed | {
    "activation": _activation(file, name),
    "tied_embeddings": file.flag("tie_word_embeddings"),
  }
  for key, field in (NUMBERS | family.numbers).items():
    if file.values.get(key, file.defaults.get(key, 0)) is None and key in NULLABLE:
      continue
    kind, least = (float, 1e-12) if key.endswith(("eps", "softcapping")) else (int, 1)
    fields[field] = file.number(key, kind, 0 if key == "max_position_embeddings" else least)
  _head_sizes(file, fields)
  fields |= _window(file, family, fields["layers"]) | _rope(file, name)
  if not fields.get("window"):
    fields.pop("local_rope_theta", None)
  try:
    config = config_lib.Model(**fields)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error
  return Preset(config, file.number("vocab_size", least=1), name, _tokens(file))


def _refuse(file: File, name: str) -> None:
  """ValueError for a feature that the decoder does not have."""
  family = FAMILIES[name]
  implied = {"attention_bias"} if family.fixed.get("attention_bias") else set()
  for key, harmless in HARMLESS.items():
    known = key in implied or key in family.numbers or key in family.defaults
    if not known and file.values.get(key) not in harmless:
      raise file.error(key, f"not supported (in the family {name})")


def _activation(file: File, name: str) -> str:
  key = "hidden_act"
  if name.startswith("gemma"):  # whose older files have a hidden_act that nobody reads
    key = "hidden_activation"
    file = File(file.path, {key: file.values.get(key) or file.defaults["hidden_act"]})
  value = file.get(key)
  if not isinstance(value, str) or value not in ACTIVATIONS:
    raise file.error(key, f"not supported; there are {', '.join(ACTIVATIONS)}")
  return ACTIVATIONS[value]


def _head_sizes(file: File, fields: dict[str, Any]) -> None:
  """Fills in what follows from the number of heads."""
  heads, width = fields["heads"], fields["width"]
  fields.setdefault("kv_heads", heads)
  if "head_size" not in fields:
    if width % heads:
      raise file.error(
        "hidden_size", f"no multiple of num_attention_heads={heads}, and no head_dim"
      )
    fields["head_size"] = width // heads


def _window(file: File, family: Family, layers: int) -> dict[str, Any]:
  """The window and the layers that have it."""
  if family.slides == "never":
    return {}
  size = file.get("sliding_window")
  if size is not None:
    size = file.number("sliding_window", least=1)
  last = family.slides == "the last layers"
  if last and not ("use_sliding_window" in file.values and file.flag("use_sliding_window")):
    size = None
  types = file.values.get("layer_types")
  if types is not None:
    fine = isinstance(types, list) and len(types) == layers
    if not fine or not all(isinstance(t, str) and t in LAYERS for t in types):
      raise file.error("layer_types", f"expected {layers} of {', '.join(LAYERS)}")
    slides = [t == "sliding_attention" for t in types]
    if family.slides == "every layer" and size and not all(slides):
      raise file.error("layer_types", "not supported: transformers ignores it in this family")
  elif last:
    first = file.number("max_window_layers") if size else layers
    slides = [i >= first for i in range(layers)]
  elif family.slides == "alternating":
    slides = [i % 2 == 0 for i in range(layers)]
  elif family.slides == "all but every n-th":
    n = file.number("sliding_window_pattern", least=1)
    slides = [(i + 1) % n != 0 for i in range(layers)]
  else:
    slides = [size is not None] * layers
  if not any(slides):
    return {}
  if size is None:
    raise file.error("sliding_window", "there are sliding layers, but no window")
  letters = "".join("s" if s else "f" for s in slides)
  period = next(n for n in range(1, layers + 1) if letters[n:] == letters[: layers - n])
  return {"window": size, "window_pattern": letters[:period]}


def _rope(file: File, name: str) -> dict[str, Any]:
  """Theta and its scaling; transformers 5 has them in `rope_parameters`, 4 in two other keys."""
  new, old = file.section("rope_parameters"), file.section("rope_scaling")
  if new and old:
    raise file.error("rope_scaling", "and there is rope_parameters too; one of them says it")
  full, local = new or old, None
  if new and LAYERS.keys() & new.values.keys():
    if name != "gemma3":
      raise file.error("rope_parameters", f"by kind of layer: not supported in the family {name}")
    full, local = new.section("full_attention"), new.section("sliding_attention")
  elif new and name == "gemma3":
    raise file.error("rope_parameters", "expected full_attention and sliding_attention in it")
  fields = {"rope_theta": _theta(file, full, "rope_theta")} | _scaling(file, full)
  if name == "gemma3":
    fields["local_rope_theta"] = _theta(file, local, "rope_local_base_freq")
    if _scaling(file, local):
      raise local.error("rope_type", "scaling of sliding layers is not supported")
  return fields


def _theta(file: File, section: File | None, key: str) -> float:
  if section and section.values.get("rope_theta") is not None:
    theta = section.number("rope_theta", float, least=1)
    if file.values.get(key, theta) not in (None, theta):
      raise file.error(key, f"but rope_theta is {theta} in {section.path}")
    return theta
  if key not in file.values and key not in file.defaults:
    raise ValueError(
      f"{file.path}: {key} is missing; write it there (transformers would take 10000.0)"
    )
  return file.number(key, float, least=1)


def _scaling(file: File, section: File | None) -> dict[str, Any]:
  if section is None:
    return {}
  key = "rope_type" if "rope_type" in section.values else "type"
  kind = section.values.get(key) or "default"
  if kind == "default":
    kind = "none"
  elif not isinstance(kind, str) or kind not in ROPE_KEYS:
    raise section.error(key, f"not supported; there are {', '.join(ROPE_KEYS)}")
  keys = ROPE_KEYS.get(kind, {})
  known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *keys}
  if section.values.get("partial_rotary_factor", 1) not in (None, 1):
    raise section.error("partial_rotary_factor", "not supported")
  if unknown := sorted(section.values.keys() - known):
    raise section.error(unknown[0], f"not supported with {key}={show(kind)}")
  fields: dict[str, Any] = {"rope_scaling": kind} if keys else {}
  for key, field in keys.items():
    if key == "original_max_position_embeddings":
      whole = file if key in file.values else section
      if key not in whole.values:
        whole, key = file, "max_position_embeddings"
      fields[field] = whole.number(key, least=1)
    else:
      fields[field] = section.number(key, float)
  return fields


def _token_keys() -> list[str]:
  return [f"{token}_token_id" for token in ("bos", "eos", "pad")]


def _tokens(file: File) -> dict[str, int | list[int]]:
  tokens = {}
  for key in _token_keys():
    value = file.values.get(key)
    if value is None or value == -1:
      continue
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int and 0 <= i <= config_json.MAX for i in ids):
      raise file.error(key, "expected an id, or a list of them")
    tokens[key.split("_")[0]] = value
  return tokens


def write(config: config_lib.Model, vocab_size: int, family: str) -> dict[str, Any]:
  """The config.json of an export, in the keys that transformers 4 and 5 both read.

  Raises:
    ValueError: the family has no way to say something of the configuration; names it.
  """
  if family not in FAMILIES:
    raise ValueError(f"family={family!r}: expected one of {', '.join(FAMILIES)}")
  row, c = FAMILIES[family], config
  gemma = family.startswith("gemma")
  values = {
    "model_type": "gemma3_text" if family == "gemma3" else family,
    "vocab_size": vocab_size,
    "hidden_activation" if gemma else "hidden_act": next(
      public for public, ours in ACTIVATIONS.items() if ours == c.activation
    ),
    "tie_word_embeddings": c.tied_embeddings,
    "rope_theta": c.rope_theta,
    "rope_scaling": None,
    "torch_dtype": c.param_dtype,
  }
  for key, field in (NUMBERS | row.numbers).items():
    values[key] = getattr(c, field) or None
  if not c.attention_scalar and gemma:
    values["query_pre_attn_scalar"] = c.head_size
  if not c.context_length:
    del values["max_position_embeddings"]
  if keys := ROPE_KEYS.get(c.rope_scaling):
    values["rope_scaling"] = {"rope_type": c.rope_scaling} | {
      key: getattr(c, field) for key, field in keys.items()
    }
  if c.local_rope_theta:
    values["rope_local_base_freq"] = c.local_rope_theta
  values |= _written_window(c, row)
  back = preset(values, f"as {family}").config
  for field in dataclasses.fields(c):
    ours, theirs = getattr(c, field.name), getattr(back, field.name)
    if field.name in CHOICES or (field.name == "attention_scalar" and not ours):
      continue
    if ours != theirs:
      raise ValueError(
        f"model.{field.name}={ours!r}: a model of the family {family} has {theirs!r}"
      )
  return values


def _written_window(c: config_lib.Model, row: Family) -> dict[str, Any]:
  if row.slides == "never":
    return {"sliding_window": c.window} if c.window else {}
  values: dict[str, Any] = {"sliding_window": c.window or None}
  if row.slides == "the last layers":
    values["use_sliding_window"] = bool(c.window)
  if row.slides != "every layer" or c.window_pattern != "s":
    names = {letter: name for name, letter in LAYERS.items()}
    pattern = c.window_pattern if c.window else "f"
    values["layer_types"] = [names[pattern[i % len(pattern)]] for i in range(c.layers)]
  return values
