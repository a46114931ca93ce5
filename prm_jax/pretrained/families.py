"""Converts the `config.json` of public model families to our configuration, and back.

A feature that the decoder does not have is never ignored: it raises an error that names the key.
"""

import dataclasses
import pathlib
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from prm_jax import config as config_lib
from prm_jax.config import Count, Positive, Whole
from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import show

# Fields of config.Model that a run chooses and no config.json has.
CHOICES = ("embedding_std", "dtype", "param_dtype", "remat", "unroll_layers", "attention")
CHOICES += ("saved", "gradient_dtype", "lora_rank", "lora_alpha", "lora_targets")

# The bounds are far above any model, so that a wrong size is never allocated.
Layers = Annotated[int, Meta(ge=1, le=1000)]
Size = Annotated[int, Meta(ge=1, le=10_000_000)]
RopeType = Literal["default", "linear", "llama3"]
LayerType = Literal["sliding_attention", "full_attention"]
LAYER_TYPES = {"s": "sliding_attention", "f": "full_attention"}
ACTIVATIONS = {"swish": "silu", "silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_PUBLIC_ACTIVATIONS = {ours: public for public, ours in ACTIVATIONS.items()}
# Keys of config.json, and the fields of config.Model with the same values.
NUMBERS = {
  "hidden_size": "width",
  "num_hidden_layers": "layers",
  "num_attention_heads": "heads",
  "num_key_value_heads": "kv_heads",
  "head_dim": "head_size",
  "intermediate_size": "mlp_width",
  "rms_norm_eps": "norm_epsilon",
  "max_position_embeddings": "context_length",
  "query_pre_attn_scalar": "attention_scalar",
  "attn_logit_softcapping": "attention_softcap",
  "final_logit_softcapping": "logit_softcap",
}
# The same for each kind of RoPE scaling.
ROPE_KEYS = {
  "default": {},
  "linear": {"factor": "rope_factor"},
  "llama3": {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_factor",
    "high_freq_factor": "rope_high_factor",
    "original_max_position_embeddings": "rope_original_length",
  },
}


class Rope(msgspec.Struct, forbid_unknown_fields=True):
  """Rotary positions: `rope_parameters` of transformers 5, or `rope_scaling` of version 4."""

  rope_type: RopeType | None = None
  type: RopeType | None = None  # the key's older name
  rope_theta: config_lib.Theta | None = None
  partial_rotary_factor: Annotated[float, Meta(ge=1, le=1)] | None = None
  factor: Positive | None = None
  low_freq_factor: Positive | None = None
  high_freq_factor: Positive | None = None
  original_max_position_embeddings: Count | None = None

  def theta(self, key: str, outside: float | None, default: float | None) -> float:
    """Returns theta, from here or from `key` outside, where older files have it."""
    if self.rope_theta and outside and self.rope_theta != outside:
      raise ValueError(f"{key}={outside}, but rope_theta is {self.rope_theta} in rope_parameters")
    if theta := self.rope_theta or outside or default:
      return theta
    raise ValueError(f"{key} is missing; add it (transformers would use 10000.0)")

  def scaling(self) -> dict[str, Any]:
    """Returns our fields of the scaling."""
    kind = self.rope_type or self.type or "default"
    keys = ROPE_KEYS[kind]
    given = [key for key in ROPE_KEYS["llama3"] if getattr(self, key) is not None]
    if given != [*keys]:
      raise ValueError(f"rope_type={kind!r} has the keys {given}; supported are {[*keys]}")
    fields = {field: getattr(self, key) for key, field in keys.items()}
    return fields | {"rope_scaling": kind} if keys else {}


class Common(msgspec.Struct, kw_only=True):
  """The keys that every family has."""

  vocab_size: Size
  hidden_size: Size
  intermediate_size: Size
  num_hidden_layers: Layers
  num_attention_heads: Size
  num_key_value_heads: Size | None = None  # null: num_attention_heads
  head_dim: Size | None = None  # null: hidden_size / num_attention_heads
  hidden_act: Literal[tuple(ACTIVATIONS)] = "silu"
  rms_norm_eps: Positive = 1e-6
  tie_word_embeddings: bool = False
  max_position_embeddings: Whole = 0
  rope_theta: config_lib.Theta | None = None
  rope_scaling: Rope | None = None
  rope_parameters: Rope | None = None


@dataclasses.dataclass(frozen=True)
class Family:
  """A model family: its keys beyond `Common`, the defaults of transformers, and fixed fields."""

  # Keys that not every family has, and defaults for keys that a file leaves out.
  defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
  fixed: dict[str, Any] = dataclasses.field(default_factory=dict)  # of config.Model
  theta: float | None = None  # the default; None: a file must have it
  local_theta: float | None = None  # of sliding layers; None: they have no theta of their own
  fixed_layers: bool = False  # transformers ignores layer_types

  @property
  def keys(self) -> set[str]:
    return {*Common.__struct_fields__, *self.defaults}


class Keys(Common, kw_only=True):
  """All keys that our configuration is made from."""

  sliding_window: Count | None = None
  layer_types: list[LayerType] | None = None
  # Without layer_types, a layer has the window unless it is one of the first max_window_layers, or
  # the last of each sliding_window_pattern layers.
  use_sliding_window: bool = True
  max_window_layers: Whole = 0
  sliding_window_pattern: Count = 2**31 - 1
  query_pre_attn_scalar: Count = 256
  attn_logit_softcapping: Positive | None = None
  final_logit_softcapping: Positive | None = None
  rope_local_base_freq: config_lib.Theta | None = None
  # rope_parameters of Gemma 3 in transformers 5
  rope_by_layer: Annotated[dict[LayerType, Rope], Meta(min_length=2)] | None = None

  def config(self, family: Family) -> config_lib.Model:
    """Returns our configuration; raises ValueError for a feature that the decoder does not have."""
    width, heads = self.hidden_size, self.num_attention_heads
    if self.head_dim is None and width % heads:
      raise ValueError(f"hidden_size={width}: no head_dim, nor a multiple of {heads} heads")
    fields = {"kv_heads": heads, "head_size": width // heads, **family.fixed}
    for key in NUMBERS.keys() & family.keys:
      if (value := getattr(self, key)) is not None:
        fields[NUMBERS[key]] = value
    fields["activation"] = ACTIVATIONS[self.hidden_act]
    fields["tied_embeddings"] = self.tie_word_embeddings
    fields["vocab_size"] = self.vocab_size
    return config_lib.Model(**fields, **self.window(family), **self.rope(family))

  def window(self, family: Family) -> dict[str, Any]:
    """Returns our fields of the window and of the layers that have it."""
    window = self.sliding_window if self.use_sliding_window else None
    first, period, layers = self.max_window_layers, self.sliding_window_pattern, self.layer_types
    letters = "".join(kind[0] for kind in layers or ())
    if layers is None:
      any_slides = window or "sliding_window_pattern" in family.keys  # Gemma's is never null
      slides = lambda i: any_slides and i >= first and (i + 1) % period
      letters = "".join("s" if slides(i) else "f" for i in range(self.num_hidden_layers))
    fixed = window and family.fixed_layers and "f" in letters
    if fixed or len(letters) != self.num_hidden_layers or ("s" in letters and not window):
      raise ValueError(f"layer_types={show(layers)}: not supported with sliding_window={window}")
    if "s" not in letters:
      return {}
    count = len(letters)
    period = next(n for n in range(1, count + 1) if letters[n:] == letters[: count - n])
    return {"window": window, "window_pattern": letters[:period]}

  def rope(self, family: Family) -> dict[str, Any]:
    """Returns our fields of the rotary positions."""
    if (self.rope_parameters or self.rope_by_layer) and self.rope_scaling:
      raise ValueError("rope_scaling: there is rope_parameters too; only one may be set")
    rope, local = self.rope_parameters or self.rope_scaling or Rope(), Rope()
    if self.rope_by_layer:
      local, rope = (self.rope_by_layer[kind] for kind in LAYER_TYPES.values())
    if local.scaling():
      raise ValueError("rope_parameters: scaling of sliding layers is not supported")
    fields = rope.scaling()
    fields["rope_theta"] = rope.theta("rope_theta", self.rope_theta, family.theta)
    if family.local_theta and self.window(family):
      outside = self.rope_local_base_freq
      fields["local_rope_theta"] = local.theta("rope_local_base_freq", outside, family.local_theta)
    return fields


_WINDOW = {"sliding_window": 4096, "layer_types": None}
_QWEN = {"num_key_value_heads": 32, "use_sliding_window": False, "max_window_layers": 28, **_WINDOW}
_GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, **_WINDOW}
_GEMMA |= {"tie_word_embeddings": True, "query_pre_attn_scalar": 256}
_GEMMA2 = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3 = {"vocab_size": 262_208, "max_position_embeddings": 131_072}
_GEMMA3 |= {"final_logit_softcapping": None, "rope_local_base_freq": None, "rope_by_layer": None}
_GEMMA_FIELDS = {"norm_offset": True, "post_norms": True, "scale_embeddings": True}
FAMILIES = {
  "llama": Family(theta=10_000.0),  # Llama 2 is older than the key
  "mistral": Family(_WINDOW | {"num_key_value_heads": 8}, fixed_layers=True),
  # attention_bias is not read: queries, keys and values always have one.
  "qwen2": Family(_QWEN | {"attention_bias": None}, {"attention_bias": True}),
  "qwen3": Family(_QWEN | {"head_dim": 128}, {"query_key_norm": True}),
  "gemma2": Family(_GEMMA | _GEMMA2 | {"sliding_window_pattern": 2}, _GEMMA_FIELDS),
  "gemma3": Family(
    _GEMMA | _GEMMA3 | {"sliding_window_pattern": 6},
    _GEMMA_FIELDS | {"query_key_norm": True},
    theta=1_000_000.0,
    local_theta=10_000.0,
  ),
}
MODEL_TYPES = {name: name for name in FAMILIES} | {"gemma3_text": "gemma3"}
# Keys of features that the decoder does not have, unless the family has the key.
ABSENT = ("quantization_config", "compression_config", "attention_bias", "mlp_bias", "alibi")
ABSENT += ("use_mrope", "is_encoder_decoder", "add_cross_attention", "use_bidirectional_attention")
ABSENT += ("num_experts", "num_local_experts", "n_routed_experts", "attn_logit_softcapping")
ABSENT += ("sliding_window",)
ONLY = {"is_causal": True, "partial_rotary_factor": 1, "rotary_pct": 1}  # keys with one valid value


def read(path: str | pathlib.Path) -> config_lib.Model:
  """Reads the architecture from the config.json of a model's directory.

  Raises:
    ValueError: a feature is not supported, or a value is missing or invalid; the message names it.
    OSError: there is no such directory or file.
  """
  file = pathlib.Path(path) / "config.json"
  if not file.parent.is_dir():
    raise FileNotFoundError(f"{path}: no such folder; scripts/fetch_model.py downloads some models")
  if not file.is_file() and (file.parent / "checkpoints").is_dir():
    hint = "this is a work directory of train.py, which --checkpoint or Scorer.load reads"
    raise FileNotFoundError(f"{path}: no config.json; {hint}")
  return parse(json_lines.document(file), file)


def parse(values: dict[str, Any], path: str | pathlib.Path) -> config_lib.Model:
  """Returns the architecture of a parsed config.json, as `read`; messages begin with `path`."""
  try:
    values = dict(values)
    model_type = values.get("model_type")
    name = MODEL_TYPES.get(str(model_type))
    if name is None:
      known = ", ".join(MODEL_TYPES)
      raise ValueError(f"model_type={show(model_type)}: not supported; expected one of {known}")
    if model_type == "gemma3":  # has a vision half; two keys belong to the whole model
      text = values.get("text_config")
      if not isinstance(text, dict) or text.get("model_type", "gemma3_text") != "gemma3_text":
        raise ValueError(f"text_config={show(text)}: expected an object of gemma3_text")
      whole = ("quantization_config", "tie_word_embeddings")
      values = text | {key: values[key] for key in whole if values.get(key) is not None}
    family = FAMILIES[name]
    refused = [k for k in ABSENT if k not in family.defaults and values.get(k) not in (None, 0)]
    refused += [key for key, only in ONLY.items() if values.get(key) not in (None, only)]
    if refused:
      shown = show(values[refused[0]])
      raise ValueError(f"{refused[0]}={shown}: not supported (in the family {name})")
    if name.startswith("gemma"):  # older files also have a hidden_act that nothing reads
      values["hidden_act"] = values.get("hidden_activation") or "gelu_pytorch_tanh"
    if name == "gemma3":
      values["rope_by_layer"] = values.pop("rope_parameters", None)
    values = family.defaults | {key: values[key] for key in family.keys & values.keys()}
    keys = msgspec.convert(values, Keys)
    return keys.config(family)
  except msgspec.ValidationError as error:
    key = re.search(r"`\$\.(\w+)", str(error))
    found = f", found {key[1]}={show(values[key[1]])}" if key else ""
    raise ValueError(f"{path}: {str(error)[:500]}{found}") from error
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def write(config: config_lib.Model, vocab_size: int, family: str) -> dict[str, Any]:
  """Returns the config.json of an export, in keys that transformers 4 and 5 both read.

  Raises:
    ValueError: the family's config.json cannot express a field; the message names it.
  """
  c, kind = config, FAMILIES[family]
  gemma = family.startswith("gemma")
  values = {
    "model_type": "gemma3_text" if family == "gemma3" else family,
    "vocab_size": vocab_size,
    "hidden_activation" if gemma else "hidden_act": _PUBLIC_ACTIVATIONS[c.activation],
    "tie_word_embeddings": c.tied_embeddings,
    "rope_theta": c.rope_theta,
    "rope_scaling": None,
  }
  values |= {key: getattr(c, field) or None for key, field in NUMBERS.items() if key in kind.keys}
  if gemma and not c.attention_scalar:
    values["query_pre_attn_scalar"] = c.head_size
  if not c.context_length:
    del values["max_position_embeddings"]
  if keys := ROPE_KEYS.get(c.rope_scaling):
    scaling = {key: getattr(c, field) for key, field in keys.items()}
    values["rope_scaling"] = {"rope_type": c.rope_scaling} | scaling
  if c.local_rope_theta:
    values["rope_local_base_freq"] = c.local_rope_theta
  if c.window or "sliding_window" in kind.keys:
    values["sliding_window"] = c.window or None
  if "use_sliding_window" in kind.keys:
    values["use_sliding_window"] = bool(c.window)
  if "layer_types" in kind.keys and not (kind.fixed_layers and c.window_pattern == "s"):
    pattern = c.window_pattern if c.window else "f"
    values["layer_types"] = [LAYER_TYPES[pattern[i % len(pattern)]] for i in range(c.layers)]
  back = parse(values, f"as {family}")
  theirs = dataclasses.asdict(back)
  for name, ours in dataclasses.asdict(c).items():
    unknown = name in ("attention_scalar", "context_length") and not ours
    chosen = name in (*CHOICES, "vocab_size") or unknown
    if not chosen and ours != theirs[name]:
      raise ValueError(f"model.{name}={ours!r}: the family {family} has {theirs[name]!r}")
  return values
