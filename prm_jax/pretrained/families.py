"""Public model families: the hub's `config.json` as our configuration, and back.

A family is a struct of the keys of its config.json, with the defaults of transformers.  A feature
that the decoder does not have is an error that names the key; it is never ignored.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from prm_jax import config as config_lib
from prm_jax.pretrained.rope import ROPE_KEYS, Count, Positive, Rope, RopeByLayer, Theta
from prm_jax.runtime.json_lines import show

MAX_BYTES = 10 * 2**20  # of a config.json; real ones have a few thousand
# Fields that a run chooses and no config.json has.
CHOICES = ("embedding_std", "dtype", "param_dtype", "remat", "unroll_layers", "attention")
CHOICES += ("saved", "gradient_dtype", "lora_rank", "lora_alpha", "lora_targets")

# Sizes are bounded far above any model's, so that no table of a false size is ever allocated.
Layers = Annotated[int, Meta(ge=1, le=1000)]
Heads = Annotated[int, Meta(ge=1, le=2**14)]
Size = Annotated[int, Meta(ge=1, le=2**22)]
Vocabulary = Annotated[int, Meta(ge=1, le=10_000_000)]
Whole = Annotated[int, Meta(ge=0, lt=2**31)]
LayerType = Literal["sliding_attention", "full_attention"]
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
Activation = Literal[tuple(ACTIVATIONS)]


@dataclasses.dataclass(frozen=True)
class Preset:
  """A public model's architecture."""

  config: config_lib.Model
  vocab_size: int  # rows of its embedding
  family: str  # of FAMILIES


class Family(msgspec.Struct, kw_only=True):
  """The keys of every family.  Theta has no default here: a file must have it."""

  vocab_size: Vocabulary
  hidden_size: Size
  intermediate_size: Size
  num_hidden_layers: Layers
  num_attention_heads: Heads
  num_key_value_heads: Heads | None = None  # null: num_attention_heads
  head_dim: Size | None = None  # null: hidden_size / num_attention_heads
  hidden_act: Activation = "silu"
  rms_norm_eps: Positive = 1e-6
  tie_word_embeddings: bool = False
  max_position_embeddings: Whole = 0
  rope_theta: Theta | None = None
  rope_scaling: Rope | None = None
  rope_parameters: Rope | None = None

  FIXED: ClassVar[dict[str, Any]] = {}  # fields of config.Model that every model of the family has
  DEFAULT_THETA: ClassVar[float | None] = None
  # Keys and the fields of config.Model that have the same values.
  NUMBERS: ClassVar[dict[str, str]] = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_size",
    "intermediate_size": "mlp_width",
    "rms_norm_eps": "norm_epsilon",
    "max_position_embeddings": "context_length",
  }

  def config(self) -> config_lib.Model:
    """Our configuration; ValueError for what the decoder does not have."""
    width, heads = self.hidden_size, self.num_attention_heads
    if self.head_dim is None and width % heads:
      raise ValueError(
        f"hidden_size={width}: no multiple of num_attention_heads={heads}, and no head_dim"
      )
    fields = {"kv_heads": heads, "head_size": width // heads, **self.FIXED}
    for key, field in self.NUMBERS.items():
      if (value := getattr(self, key)) is not None:
        fields[field] = value
    fields["activation"] = ACTIVATIONS[self.hidden_act]
    fields["tied_embeddings"] = self.tie_word_embeddings
    fields |= self.window() | self.rope()
    if not fields.get("window"):
      fields.pop("local_rope_theta", None)
    return config_lib.Model(**fields)

  def window(self) -> dict[str, Any]:
    """Our fields of the window and of the layers that have it."""
    return {}

  def rope(self) -> dict[str, Any]:
    """Our fields of the rotary positions."""
    if self.rope_parameters and self.rope_scaling:
      raise ValueError("rope_scaling: there is rope_parameters too; only one may be set")
    rope = self.rope_parameters or self.rope_scaling or Rope()
    theta = rope.theta("rope_theta", self.rope_theta, self.DEFAULT_THETA)
    return {"rope_theta": theta} | rope.scaling()


class Llama(Family, kw_only=True):
  DEFAULT_THETA = 10_000.0  # Llama 2 is older than the key


class Sliding(Family, kw_only=True):
  """A family in which some layers attend to a window only."""

  sliding_window: Count | None = 4096
  listed: list[LayerType] | None = msgspec.field(name="layer_types", default=None)

  def slides(self, layer: int) -> bool:
    """Whether a layer has the window, where layer_types does not say it."""
    raise NotImplementedError

  def layer_types(self) -> str:
    """A letter for each layer: s (sliding) or f (full attention)."""
    if self.listed is None:
      return "".join("fs"[self.slides(i)] for i in range(self.num_hidden_layers))
    if len(self.listed) != self.num_hidden_layers:
      raise ValueError(f"layer_types={show(self.listed)}: expected {self.num_hidden_layers}")
    return "".join(kind[0] for kind in self.listed)

  def window(self) -> dict[str, Any]:
    letters = self.layer_types()
    if "s" not in letters:
      return {}
    if self.sliding_window is None:
      raise ValueError("sliding_window=None: there are sliding layers, but no window")
    count = len(letters)
    period = next(n for n in range(1, count + 1) if letters[n:] == letters[: count - n])
    return {"window": self.sliding_window, "window_pattern": letters[:period]}


class Mistral(Sliding, kw_only=True):
  num_key_value_heads: Heads | None = 8

  def slides(self, layer: int) -> bool:
    return self.sliding_window is not None

  def layer_types(self) -> str:
    letters = Sliding.layer_types(self)
    if self.sliding_window and "f" in letters:
      raise ValueError("layer_types=...: not supported: transformers ignores it in this family")
    return letters


class Qwen(Sliding, kw_only=True):
  num_key_value_heads: Heads | None = 32
  use_sliding_window: bool = False
  max_window_layers: Whole = 28

  def __post_init__(self):
    if not self.use_sliding_window:
      self.sliding_window = None

  def slides(self, layer: int) -> bool:
    return self.sliding_window is not None and layer >= self.max_window_layers


class Qwen2(Qwen, kw_only=True):
  attention_bias: bool | None = None  # not read: queries, keys and values always have one

  FIXED = {"attention_bias": True}


class Qwen3(Qwen, kw_only=True):
  head_dim: Size | None = 128

  FIXED = {"query_key_norm": True}


class Gemma2(Sliding, kw_only=True):
  num_attention_heads: Heads = 8
  num_key_value_heads: Heads | None = 4
  head_dim: Size | None = 256
  # Their key is hidden_activation; older files also have a hidden_act that nothing reads.
  hidden_act: Activation | None = msgspec.field(name="hidden_activation", default=None)
  tie_word_embeddings: bool = True
  query_pre_attn_scalar: Count = 256
  attn_logit_softcapping: Positive | None = 50.0
  final_logit_softcapping: Positive | None = 30.0

  FIXED = {"norm_offset": True, "post_norms": True, "scale_embeddings": True}
  NUMBERS = Family.NUMBERS | {
    "query_pre_attn_scalar": "attention_scalar",
    "attn_logit_softcapping": "attention_softcap",
    "final_logit_softcapping": "logit_softcap",
  }

  def __post_init__(self):
    self.hidden_act = self.hidden_act or "gelu_pytorch_tanh"

  def slides(self, layer: int) -> bool:
    return layer % 2 == 0


class Gemma3(Gemma2, kw_only=True):
  vocab_size: Vocabulary = 262_208
  max_position_embeddings: Whole = 131_072
  attn_logit_softcapping: None = None
  final_logit_softcapping: Positive | None = None
  sliding_window_pattern: Count = 6
  rope_local_base_freq: Theta | None = None
  rope_parameters: RopeByLayer | None = None

  FIXED = Gemma2.FIXED | {"query_key_norm": True}
  NUMBERS = {key: field for key, field in Gemma2.NUMBERS.items() if key[:4] != "attn"}

  def slides(self, layer: int) -> bool:
    return (layer + 1) % self.sliding_window_pattern != 0

  def rope(self) -> dict[str, Any]:
    if self.rope_parameters is None:
      full, local = self.rope_scaling or Rope(), Rope()
    else:
      full, local = self.rope_parameters.full_attention, self.rope_parameters.sliding_attention
    if local.scaling():
      raise ValueError("rope_parameters: scaling of sliding layers is not supported")
    return full.scaling() | {
      "rope_theta": full.theta("rope_theta", self.rope_theta, 1_000_000.0),
      "local_rope_theta": local.theta("rope_local_base_freq", self.rope_local_base_freq, 10_000.0),
    }


FAMILIES: dict[str, type[Family]] = {
  "llama": Llama,
  "mistral": Mistral,
  "qwen2": Qwen2,
  "qwen3": Qwen3,
  "gemma2": Gemma2,
  "gemma3": Gemma3,
}
MODEL_TYPES = {name: name for name in FAMILIES} | {"gemma3_text": "gemma3"}
# Keys of features that the decoder does not have, unless the family has a field of this name.
ABSENT = (
  "quantization_config",
  "compression_config",
  "attention_bias",
  "mlp_bias",
  "alibi",
  "use_mrope",
  "is_encoder_decoder",
  "add_cross_attention",
  "use_bidirectional_attention",
  "num_experts",
  "num_local_experts",
  "n_routed_experts",
  "attn_logit_softcapping",
  "sliding_window",
)
ONLY = {"is_causal": True, "partial_rotary_factor": 1, "rotary_pct": 1}  # keys with one valid value


def read(path: str | pathlib.Path) -> Preset:
  """The architecture in the config.json of a model's directory.

  Raises:
    ValueError: a feature is not supported, or a value is missing or makes no sense; names it.
    OSError: there is no such directory or file.
  """
  file = pathlib.Path(path) / "config.json"
  if not file.is_file():
    raise FileNotFoundError(f"{file}: no such file; expected a model's directory")
  if file.stat().st_size > MAX_BYTES:
    raise ValueError(f"{file}: {file.stat().st_size:,} bytes; no config.json is so large")
  try:
    values = msgspec.json.decode(file.read_bytes())
  except (msgspec.DecodeError, RecursionError) as error:
    raise ValueError(f"{file}: not JSON: {error}") from error
  return preset(values, file)


def preset(values: Any, path: str | pathlib.Path) -> Preset:
  """`read` of a config.json already parsed; `path` is for messages."""
  if not isinstance(values, dict):
    raise ValueError(f"{path}: expected an object, found {show(values)}")
  model_type = values.get("model_type")
  if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
    raise ValueError(
      f"{path}: model_type={show(model_type)}: not supported; there are {', '.join(MODEL_TYPES)}"
    )
  if model_type == "gemma3":  # with a vision half: two keys are those of the whole model
    text = values.get("text_config")
    if not isinstance(text, dict) or text.get("model_type", "gemma3_text") != "gemma3_text":
      raise ValueError(f"{path}: text_config={show(text)}: expected an object of gemma3_text")
    whole = ("quantization_config", "tie_word_embeddings")
    values = text | {key: values[key] for key in whole if values.get(key) is not None}
  name = MODEL_TYPES[model_type]
  family = FAMILIES[name]
  own = family.__struct_encode_fields__
  refused = [key for key in ABSENT if key not in own and values.get(key) not in (None, False, 0)]
  refused += [key for key, only in ONLY.items() if values.get(key) not in (None, only)]
  if refused:
    shown = show(values[refused[0]])
    raise ValueError(f"{path}: {refused[0]}={shown}: not supported (in the family {name})")
  try:
    keys = msgspec.convert(values, family)
    return Preset(keys.config(), keys.vocab_size, name)
  except msgspec.ValidationError as error:
    key = re.search(r"`\$\.(\w+)", str(error))
    found = f", found {key[1]}={show(values[key[1]])}" if key else ""
    raise ValueError(f"{path}: {error}{found}") from error
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def write(config: config_lib.Model, vocab_size: int, family: str) -> dict[str, Any]:
  """The config.json of an export, in the keys that transformers 4 and 5 both read.

  Raises:
    ValueError: the family's config.json cannot express a field of the configuration; names it.
  """
  if family not in FAMILIES:
    raise ValueError(f"family={family!r}: expected one of {', '.join(FAMILIES)}")
  kind, c = FAMILIES[family], config
  gemma = issubclass(kind, Gemma2)
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
  values |= {key: getattr(c, field) or None for key, field in kind.NUMBERS.items()}
  if gemma and not c.attention_scalar:
    values["query_pre_attn_scalar"] = c.head_size
  if not c.context_length:
    del values["max_position_embeddings"]
  if keys := ROPE_KEYS.get(c.rope_scaling):
    values["rope_scaling"] = {"rope_type": c.rope_scaling} | {
      key: getattr(c, field) for key, field in keys.items()
    }
  if c.local_rope_theta:
    values["rope_local_base_freq"] = c.local_rope_theta
  values |= _written_window(c, kind)
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


def _written_window(c: config_lib.Model, kind: type[Family]) -> dict[str, Any]:
  if not issubclass(kind, Sliding):
    return {"sliding_window": c.window} if c.window else {}
  values: dict[str, Any] = {"sliding_window": c.window or None}
  if issubclass(kind, Qwen):
    values["use_sliding_window"] = bool(c.window)
  if kind is not Mistral or c.window_pattern != "s":
    pattern = c.window_pattern if c.window else "f"
    names = {"s": "sliding_attention", "f": "full_attention"}
    values["layer_types"] = [names[pattern[i % len(pattern)]] for i in range(c.layers)]
  return values
