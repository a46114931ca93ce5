"""config.json of public models as far as their shapes: compiling for them takes no weights."""

from __future__ import annotations

import json
import pathlib

_LLAMA = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "hidden_act": "silu",
  "rms_norm_eps": 1e-5,
  "rope_theta": 500000.0,
  "max_position_embeddings": 131072,
  "tie_word_embeddings": True,
  "attention_bias": False,
  "mlp_bias": False,
}
_QWEN = {
  "architectures": ["Qwen2ForCausalLM"],
  "model_type": "qwen2",
  "hidden_act": "silu",
  "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0,
  "max_position_embeddings": 4096,
  "use_sliding_window": False,
  "tie_word_embeddings": False,
}


def _sizes(width: int, layers: int, heads: int, kv_heads: int, mlp: int, vocabulary: int) -> dict:
  return {
    "hidden_size": width,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "intermediate_size": mlp,
    "vocab_size": vocabulary,
  }


SHAPES = {
  "Llama-3.2-1B": _LLAMA | _sizes(2048, 16, 32, 8, 8192, 128256) | {"head_dim": 64},
  "Qwen2.5-Math-1.5B": _QWEN
  | _sizes(1536, 28, 12, 2, 8960, 151936)
  | {"tie_word_embeddings": True},
  "Qwen2.5-Math-7B": _QWEN | _sizes(3584, 28, 28, 4, 18944, 152064),
  "Qwen2.5-32B": _QWEN
  | _sizes(5120, 64, 40, 8, 27648, 152064)
  | {"rope_theta": 1000000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
  "Qwen2.5-Math-72B": _QWEN | _sizes(8192, 80, 64, 8, 29568, 152064) | {"rms_norm_eps": 1e-5},
  "gemma-3-4b-pt": {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
      "model_type": "gemma3_text",
      "hidden_size": 2560,
      "num_hidden_layers": 34,
      "intermediate_size": 10240,
      "sliding_window": 1024,
      "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
      "vocab_size": 262208,
    },
  },
}


def write(directory: pathlib.Path, name: str) -> str:
  """A directory in which config.json says the shape of a model; its path."""
  path = directory / name
  path.mkdir(parents=True, exist_ok=True)
  (path / "config.json").write_text(json.dumps(SHAPES[name]))
  return str(path.resolve())
