"""Published readouts against torch: the authors' procedures on models that transformers makes."""

import contextlib
import dataclasses

import numpy as np
import published_models as models
import pytest

from prm_jax.scoring.readouts import PUBLISHED
from prm_jax.scoring.scorer import Scorer

pytestmark = pytest.mark.reference
with contextlib.suppress(ModuleNotFoundError):  # the mark skips the tests then
  import safetensors.torch
  import torch
  import transformers

SIZES = {
  "hidden_size": 32,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "intermediate_size": 48,
  "max_position_embeddings": 512,
  "rope_theta": 10_000.0,
  "initializer_range": 0.3,  # so that positions and models differ
  "pad_token_id": 0,
}
LLAMA_ROPE = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 32,
}
PROBLEMS = {
  "How many eggs does Janet sell?": (
    "Step 1: Janet has 16 eggs.",
    "Step 2: She eats 3 , so 16 - 3 = 13.",
    "The answer is: 13",
  ),
  "Solve $\\frac{x}{2} + 3 = 5$.\n": (
    "  $x = 4$ \t",
    " ",
    "\u00e9 e\u0301 \u4eae ok",
    "-",
    "+ 1\r",
  ),
  "1 + 1": ("2.",),
}
LETTERS = str.maketrans("", "", "\u4eae\u00e9\u0301\t\r")  # that the SentencePiece-like one lacks


def torch_model(directory, name):
  """Writes a random model with the readout's head; gives a function of ids, all in torch."""
  torch.manual_seed(7)
  family, kind, _ = models.FAMILY[name]
  vocab_size = models.tokenizer_json(kind).get_vocab_size() + 5
  tied = name == "skywork-o1-prm"
  sizes = SIZES | {"vocab_size": vocab_size, "tie_word_embeddings": tied}
  if family == "mistral":
    config = transformers.MistralConfig(**sizes, sliding_window=24)
    model = transformers.MistralForCausalLM(config)
  elif family == "llama":
    parameters = LLAMA_ROPE | {"rope_theta": sizes.pop("rope_theta")}
    config = transformers.LlamaConfig(**sizes, rope_parameters=parameters)
    model = transformers.LlamaForCausalLM(config)
  elif name == "trl":
    config = transformers.Qwen2Config(**sizes, num_labels=2)
    model = transformers.Qwen2ForTokenClassification(config)
  else:
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
  for parameter in model.parameters():  # biases begin at zero
    if parameter.ndim == 1:
      torch.nn.init.normal_(parameter, 1.0 if parameter.abs().sum() else 0.0, 0.3)
  model.eval().save_pretrained(directory)
  models.write_tokenizer(directory, kind)
  head = None
  if name == "qwen2.5-math-prm":
    linear = torch.nn.Linear
    head = torch.nn.Sequential(linear(32, 32), torch.nn.ReLU(), linear(32, 2))
    add(directory, {f"score.{k}": v for k, v in head.state_dict().items()})
  elif name == "skywork-o1-prm":
    head = torch.nn.Linear(32, 1)
    add(directory, {f"v_head.summary.{k}": v for k, v in head.state_dict().items()})

  @torch.no_grad()
  def forward(ids):
    out = model(torch.tensor([ids]), output_hidden_states=True)
    logits = out.logits if head is None else head(out.hidden_states[-1])
    return logits[0].double().numpy()

  return forward


def add(directory, tensors):
  path = directory / "model.safetensors"
  found = safetensors.torch.load_file(path) | tensors
  safetensors.torch.save_file(found, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", PUBLISHED)
def test_scores_equal_the_authors_on_torch(tmp_path, name):
  """Published weights, tokenizer and template, read by transformers: the same step scores."""
  forward = torch_model(tmp_path, name)
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)

  def encode(text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]

  def chat(messages):
    return tokenizer.apply_chat_template(messages, tokenize=False)

  solutions = list(PROBLEMS.items())
  if name == "math-shepherd":
    solutions = [(p, tuple(s.translate(LETTERS) for s in steps)) for p, steps in solutions]
  scorer = dataclasses.replace(Scorer.load_published(tmp_path, name), row_length=256)
  given = scorer.probabilities(solutions)
  worst = 0.0
  for (problem, steps), probabilities in zip(solutions, given):
    expected = models.AUTHORS[name](encode, chat, forward, problem, steps)
    assert len(expected) == len(steps) == len(probabilities)
    worst = max(worst, np.abs(probabilities[:, 1] - expected).max())
  print(f"{name}: largest difference {worst:.2g}")
  assert worst < 2e-5  # float32 on both sides; 4e-6 at most was seen
  every = np.concatenate(given)[:, 1]
  assert np.ptp(every) > 0.01
