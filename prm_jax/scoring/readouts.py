"""How published process reward models turn a hidden state into a step's probability.

A readout is a layout, the tensors of its head by their public names, and a function from hidden
states at the read positions to log-probabilities of the classes "-1" and "1".  It sees no other
position, and of a language-model head only the two rows of its answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from prm_jax.input_pipeline.tokenizers import Tokenizer
from prm_jax.model import attention as attention_lib
from prm_jax.scoring import layouts

CLASSES = ("-1", "1")  # wrong and right, in the order of a readout's outputs
ANSWERS = "answers"  # [2, D]: the language-model head's rows of the two answers
Head = Mapping[str, jax.Array]  # float32


@dataclasses.dataclass(frozen=True)
class Readout:
  layout: Callable[[Tokenizer, Mapping[str, Any], str], layouts.Layout]
  tensors: Mapping[str, str]  # name to shape: D is the width, a digit itself
  # (head, hidden states [B, R, D] float32, soft-cap of logits) -> [B, R, 2]
  log_probs: Callable[[Head, jax.Array, float], jax.Array]


def two_layers(head: Head, hidden: jax.Array, softcap: float = 0.0) -> jax.Array:
  """Linear, ReLU, linear, softmax (Qwen's modeling_qwen2_rm.py)."""
  middle = jax.nn.relu(_linear(hidden, head["score.0.weight"], head["score.0.bias"]))
  return jax.nn.log_softmax(_linear(middle, head["score.2.weight"], head["score.2.bias"]))


def answer_tokens(head: Head, hidden: jax.Array, softcap: float = 0.0) -> jax.Array:
  """Softmax over the logits of the two answers alone."""
  logits = attention_lib.soft_cap(_linear(hidden, head[ANSWERS]), softcap)
  return jax.nn.log_softmax(logits)


def value(head: Head, hidden: jax.Array, softcap: float = 0.0) -> jax.Array:
  """The sigmoid of one number, as two classes."""
  logit = _linear(hidden, head["v_head.summary.weight"], head["v_head.summary.bias"])
  return jax.nn.log_sigmoid(jnp.concatenate([-logit, logit], axis=-1))


def classes(head: Head, hidden: jax.Array, softcap: float = 0.0) -> jax.Array:
  """A token classifier: class 0 is wrong, class 1 right."""
  return jax.nn.log_softmax(_linear(hidden, head["score.weight"], head["score.bias"]))


def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array | float = 0.0) -> jax.Array:
  """torch's Linear; in full float32 on TPUs too, where that is not the default."""
  return jnp.einsum("BRD,CD->BRC", x, weight, precision=jax.lax.Precision.HIGHEST) + bias


READOUTS = {
  "qwen2.5-math-prm": Readout(
    layouts.qwen_math_prm,
    {"score.0.weight": "DD", "score.0.bias": "D", "score.2.weight": "2D", "score.2.bias": "2"},
    two_layers,
  ),
  "math-shepherd": Readout(layouts.math_shepherd, {}, answer_tokens),
  "rlhflow": Readout(layouts.rlhflow, {}, answer_tokens),
  "skywork-o1-prm": Readout(
    layouts.skywork, {"v_head.summary.weight": "1D", "v_head.summary.bias": "1"}, value
  ),
  "trl": Readout(layouts.trl, {"score.weight": "2D", "score.bias": "2"}, classes),
}
