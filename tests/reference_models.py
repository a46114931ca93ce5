"""Small models of every public family, and their logits by transformers.

Both sides make the same weights from a name and a seed, so no weights are stored.  Run by hand to
write tests/data/family_logits.json again (needs torch and transformers, the extra `reference`):

  PYTHONPATH=. python tests/reference_models.py
"""

import copy
import functools
import json
import pathlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from prm_jax import config as config_lib
from prm_jax.pretrained import families, weights
from prm_jax.runtime import storage
from prm_jax.training import step as step_lib

GOLDEN = pathlib.Path(__file__).parent / "data" / "family_logits.json"
VOCABULARY = 64
TOKENS = np.random.RandomState(0).randint(0, VOCABULARY, 24)  # several windows long
POSITIONS = (0, 3, 9, 23)  # stored

BASE = {
  "vocab_size": VOCABULARY,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 128,
  "rope_theta": 100.0,  # low, so that every frequency turns within these few tokens
}
LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 64,  # of four waves one is kept, two blended, one stretched
}
GEMMA = BASE | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 5}
GEMMA2 = GEMMA | {
  "model_type": "gemma2",
  "attn_logit_softcapping": 2.0,
  "final_logit_softcapping": 4.0,
}
GEMMA3 = GEMMA | {
  "model_type": "gemma3_text",
  "num_hidden_layers": 4,
  "rope_local_base_freq": 20.0,
  "sliding_window_pattern": 3,
  "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
QWEN2 = BASE | {"model_type": "qwen2", "rms_norm_eps": 1e-5}
QWEN3 = BASE | {"model_type": "qwen3", "head_dim": 16}
SLIDES = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
CASES = {
  "llama2": BASE | {"model_type": "llama", "num_key_value_heads": 4},
  "llama3": BASE | {"model_type": "llama", "rope_scaling": LLAMA3},
  "llama_linear": BASE
  | {"model_type": "llama", "head_dim": 12, "rope_scaling": {"type": "linear", "factor": 4.0}},
  "smollm2": BASE
  | {
    "model_type": "llama",
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
  },
  "mistral": BASE | {"model_type": "mistral", "sliding_window": None},
  "mistral_window": BASE | {"model_type": "mistral", "head_dim": 16, "sliding_window": 5},
  "qwen2": QWEN2 | {"tie_word_embeddings": True},
  "qwen2_window": QWEN2 | SLIDES,
  "qwen3": QWEN3,
  "qwen3_window": QWEN3 | SLIDES | {"tie_word_embeddings": True},
  "gemma2": GEMMA2,
  "gemma2_untied": GEMMA2 | {"tie_word_embeddings": False, "final_logit_softcapping": None},
  "gemma3": GEMMA3,
  "gemma3_soft_cap": GEMMA3 | {"final_logit_softcapping": 4.0, "rope_scaling": None},
}


def config(case: str) -> config_lib.Model:
  """Returns the configuration of a case."""
  return families.parse(CASES[case], case)


def params(c: config_lib.Model) -> dict:
  """Returns random parameters; numpy promises never to change the numbers of RandomState."""
  init = functools.partial(step_lib.init_params, config=c, vocab_size=VOCABULARY, num_classes=3)
  leaves = traverse_util.flatten_dict(jax.eval_shape(init, jax.random.key(0)), sep=".")
  layouts = weights.layouts(c)
  out = {}
  for path, leaf in leaves.items():
    x = np.random.RandomState(zlib.crc32(path.encode())).standard_normal(leaf.shape)
    if "norm" in path:
      x = 0.3 * x + (not c.norm_offset)
    elif path != "embedding" and "bias" not in path:
      *_, (*_, fan_in) = layouts[path].public_shapes(leaf.shape).values()
      x *= (2 if path.endswith(("query", "key")) else 1) * fan_in**-0.5
    out[path] = jnp.asarray(x, jnp.float32)
  return traverse_util.unflatten_dict(out, sep=".")


@functools.cache
def logits(c: config_lib.Model) -> tuple[np.ndarray, np.ndarray]:
  """Returns our next-token logits `[T, V]` and class logits `[T, C]` of TOKENS."""
  graphdef = step_lib.graph(c, VOCABULARY, 3)
  at = np.arange(len(TOKENS))[None]

  @jax.jit
  def run(params):
    model = nnx.merge(graphdef, params)
    hidden = model.hidden(TOKENS[None], at, np.full_like(at, len(TOKENS)))
    return model.next_token_logits(hidden)[0], model.class_logits(hidden, at)[0]

  return tuple(map(np.asarray, run(params(c))))


def transformers_config(values: dict):
  """Returns the configuration of transformers for the values of a config.json."""
  import transformers

  values = dict(values)
  return transformers.AutoConfig.for_model(values.pop("model_type"), **values)


def transformers_logits(case: str) -> np.ndarray:
  """Returns the next-token logits of transformers, from the same parameters by public name."""
  import torch
  import transformers

  theirs = transformers.AutoModelForCausalLM.from_config(
    transformers_config(copy.deepcopy(CASES[case])), attn_implementation="eager"
  )
  ours = weights.unload(params(config(case)), config(case))
  state = {name: torch.tensor(x) for name, x in ours if not name.startswith("score.")}
  missing, unexpected = theirs.load_state_dict(state, strict=False)
  assert not unexpected and set(missing) <= {"lm_head.weight"}  # tied
  with torch.no_grad():
    return theirs.float().eval()(torch.tensor(TOKENS)[None]).logits[0].numpy()


def main():
  """Writes the file of golden logits."""
  import transformers

  cases = {}
  for case in CASES:
    theirs = transformers_logits(case)
    print(case, "largest difference", np.abs(theirs - logits(config(case))[0]).max())
    cases[case] = [[round(float(x), 6) for x in theirs[i]] for i in POSITIONS]
  golden = {"transformers": transformers.__version__, "positions": POSITIONS, "logits": cases}
  with storage.written(GOLDEN) as file:
    file.write(json.dumps(golden).replace("]], ", "]],\n") + "\n")


if __name__ == "__main__":
  main()
