"""Tiny directories of published reward models, and their authors' procedures, written plainly.

A procedure gets a tokenizer (text to ids, special tokens parsed, as the authors' do), a chat
template and a forward from ids to what the head says at each of them, so that the same words are
checked on torch, where it is there, and on the project's own decoder.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers as hf
from flax import nnx

from prm_jax import config as config_lib
from prm_jax.pretrained import families, safetensors_files, weights
from prm_jax.training import step as step_lib

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
DATE = "\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
TEXTS = [
  "Step 1: 3 + 4 = 7. ки\nStep 2: So 7 - 2 = 5. ки\nThe answer is: 5 ки",
  "system\nuser\nassistant\nthe problem is to add 12 and 30 .\n\nso we have 42 .\n\n",
  "Janet has 16 eggs, eats 3 and sells the others.\n\nHow many? 16 - 3 = 13 .\n",
  "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n + - + - ки ки ки",
] * 20
QWEN_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<extra_0>"]
LLAMA_SPECIALS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
# What is left of the two templates where there are no tools.
QWEN_TEMPLATE = (
  "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' "
  "+ '\\n' }}{% endfor %}"
)
LLAMA_TEMPLATE = (
  '{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}'
  "{{- bos_token }}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}"
  "{{- 'Cutting Knowledge Date: December 2023\\n' }}"
  "{{- 'Today Date: ' + date_string + '\\n\\n' }}{{- '<|eot_id|>' }}"
  "{%- for m in messages %}{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' "
  "+ m['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
)
LENGTH = 384  # tokens, at most, of a text in the tests
MODEL = config_lib.Model(
  width=16,
  layers=2,
  heads=4,
  kv_heads=2,
  head_size=4,
  mlp_width=24,
  embedding_std=1.0,
  context_length=512,
  tied_embeddings=False,
)
FAMILY = {  # of each readout: family, tokenizer, fields of the model
  "qwen2.5-math-prm": ("qwen2", "qwen", {"attention_bias": True}),
  "math-shepherd": ("mistral", "mistral", {"window": 24}),
  "rlhflow": (
    "llama",
    "llama",
    {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_length": 32},
  ),
  "skywork-o1-prm": ("qwen2", "qwen", {"attention_bias": True, "tied_embeddings": True}),
  "trl": ("qwen2", "qwen", {"attention_bias": True}),
}
HEADS = {  # tensors by name, and their shapes
  "qwen2.5-math-prm": {
    "score.0.weight": (16, 16),
    "score.0.bias": (16,),
    "score.2.weight": (2, 16),
    "score.2.bias": (2,),
  },
  "math-shepherd": {},
  "rlhflow": {},
  "skywork-o1-prm": {"v_head.summary.weight": (1, 16), "v_head.summary.bias": (1,)},
  "trl": {"score.weight": (2, 16), "score.bias": (2,)},
}


def tokenizer_json(kind: str) -> hf.Tokenizer:
  """A trained tokenizer of a family: qwen and llama on bytes, mistral on SentencePiece's forms."""
  if kind == "mistral":
    tokenizer = hf.Tokenizer(hf.models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = hf.normalizers.Sequence(
      [hf.normalizers.Prepend("\u2581"), hf.normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = hf.decoders.Sequence(
      [hf.decoders.Replace("\u2581", " "), hf.decoders.Fuse(), hf.decoders.Strip(" ", 1, 0)]
    )
    words = hf.Regex("\u2581?[^\u2581\n]+|\n")
    # Training needs words; the finished tokenizer, as the family's, merges whole texts.
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Split(
      hf.Regex("\u2581?[^\u2581\n]+|\n"), "isolated"
    )
    trainer = hf.trainers.BpeTrainer(
      vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.pre_tokenizer = None
    return _with_first(tokenizer, "<s>")
  specials = QWEN_SPECIALS if kind == "qwen" else LLAMA_SPECIALS
  tokenizer = hf.Tokenizer(hf.models.BPE())
  digits = r"\p{N}" if kind == "qwen" else r"\p{N}{1,3}"
  words = rf" ?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
  if kind == "qwen":
    tokenizer.normalizer = hf.normalizers.NFC()
  tokenizer.pre_tokenizer = hf.pre_tokenizers.Sequence(
    [
      hf.pre_tokenizers.Split(hf.Regex(words), "isolated"),
      hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  tokenizer.decoder = hf.decoders.ByteLevel()
  trainer = hf.trainers.BpeTrainer(
    vocab_size=400,
    special_tokens=specials,
    initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(TEXTS, trainer)
  return tokenizer if kind == "qwen" else _with_first(tokenizer, specials[0])


def _with_first(tokenizer: hf.Tokenizer, name: str) -> hf.Tokenizer:
  tokenizer.post_processor = hf.processors.TemplateProcessing(
    single=f"{name} $A", special_tokens=[(name, tokenizer.token_to_id(name))]
  )
  return tokenizer


def write_tokenizer(directory: pathlib.Path, kind: str) -> None:
  settings = {
    "qwen": {"bos_token": "<|endoftext|>", "chat_template": QWEN_TEMPLATE, "add_bos_token": False},
    "llama": {"bos_token": "<|begin_of_text|>", "chat_template": LLAMA_TEMPLATE},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
  }[kind]
  tokenizer_json(kind).save(str(directory / "tokenizer.json"))
  (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@dataclasses.dataclass(frozen=True)
class Own:
  """A directory made without torch, and its parameters."""

  directory: pathlib.Path
  config: config_lib.Model
  vocab_size: int
  params: dict
  head: dict[str, np.ndarray]

  def forward(self, ids: list[int]) -> np.ndarray:
    """What the head says at each token `[T, outputs]`: one unpacked text, the head in numpy."""
    tokens = np.zeros(LENGTH, np.int32)  # of one length, to compile once; a decoder sees no later
    tokens[: len(ids)] = ids
    hidden = np.asarray(self._hidden(self.params, tokens[None]))[0, : len(ids)]
    if len(self.head) == 4:
      first, b0, second, b2 = self.head.values()
      return np.maximum(hidden @ first.T + b0, 0) @ second.T + b2
    if self.head:
      weight, bias = self.head.values()
      return hidden @ weight.T + bias
    return hidden @ np.asarray(self.params["language_model"])

  @functools.cached_property
  def _hidden(self):
    graphdef = step_lib.graph(self.config, self.vocab_size, 2)

    def hidden(params, tokens):
      index = jnp.arange(LENGTH)[None]
      return nnx.merge(graphdef, params).hidden(tokens, index, jnp.full_like(index, LENGTH))

    return jax.jit(hidden)


def write(directory: pathlib.Path, name: str) -> Own:
  """A directory of the readout's model family with random weights."""
  family, kind, fields = FAMILY[name]
  config = dataclasses.replace(MODEL, **fields)
  write_tokenizer(directory, kind)
  vocab_size = tokenizer_json(kind).get_vocab_size() + 3  # rows that no token has, as in real ones
  init = functools.partial(
    step_lib.init_params, config=config, vocab_size=vocab_size, num_classes=2
  )
  rng = np.random.default_rng(4)

  def random(path, leaf):  # in numpy: compiling a random generator takes longer than the tests
    kind = path[-1].key.rpartition("_")[2]
    size, mean = {"norm": (0.3, 1), "bias": (0.3, 0), "embedding": (1, 0)}.get(kind, (0.25, 0))
    return (mean + size * rng.normal(size=leaf.shape)).astype(np.float32)

  shapes = jax.eval_shape(init, jax.random.key(0))
  params = jax.tree_util.tree_map_with_path(random, shapes)
  head = {k: rng.normal(size=s).astype(np.float32) for k, s in HEADS[name].items()}
  tensors = dict(weights.unload(params, config)) | head
  tensors = {k: v for k, v in tensors.items() if not k.startswith("score.") or k in head}
  safetensors_files.write_directory(directory, tensors.items())
  values = families.write(config, vocab_size, family)
  (directory / "config.json").write_text(json.dumps(values))
  return Own(directory, config, vocab_size, params, head)


def softmax(x):
  x = np.exp(np.asarray(x, np.float64) - np.max(x, -1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


def qwen_math_prm(encode, chat, forward, problem, steps):
  """Model card: mask the probabilities at <extra_0>, take the second class."""
  text = "<extra_0>".join(steps) + "<extra_0>"
  roles = ("system", SYSTEM), ("user", problem), ("assistant", text)
  ids = encode(chat([{"role": role, "content": content} for role, content in roles]))
  mask = np.array(ids) == encode("<extra_0>")[0]
  return softmax(forward(ids))[mask][:, 1]


def math_shepherd(encode, chat, forward, problem, steps):
  """Model card: logits of + and - at the tag."""
  start = [encode("<s>")[-1]]
  output = "\n".join(f"{step} ки" for step in steps)
  ids = start + encode(f"{problem} {output}")
  good, bad = encode("+ -")
  scores = softmax(forward(ids)[:, [good, bad]])[:, 0]
  return scores[np.array(ids) == encode("ки")[-1]]


def rlhflow(encode, chat, forward, problem, steps):
  """prm_evaluate.py: a growing chat, one forward a step, read at the third token from the end."""
  candidates, conversation, scores = [encode("+")[-1], encode("-")[-1]], [], []
  for k, step in enumerate(step.strip() for step in steps):
    conversation.append({"role": "user", "content": step if k else problem + " " + step})
    conversation.append({"role": "assistant", "content": "+"})
    scores.append(softmax(forward(encode(chat(conversation)))[-3, candidates])[0])
  return np.array(scores)


def skywork(encode, chat, forward, problem, steps):
  """io_utils.py: lines encoded apart, flags at their ends, sigmoid of the value there."""
  ids = encode("<|endoftext|>" + problem + "\n")
  flags, newline = [0] * len(ids), encode("\n")[-1]
  for step in "\n".join(steps).split("\n"):
    step_ids = (encode(step) if step != "" else []) + [newline]
    ids, flags = ids + step_ids, flags + [0] * (len(step_ids) - 1) + [1]
  value = np.asarray(forward(ids), np.float64)[:, 0]
  return (1 / (1 + np.exp(-value)))[np.array(flags) == 1]


def trl(encode, chat, forward, problem, steps):
  """PRMTrainer.tokenize_row with separator "\\n"; the class at each label's token."""
  separator, ids = encode("\n"), encode("<|endoftext|>") + encode(problem)
  labels = [-100] * len(ids)
  for step in steps:
    ids += encode(step) + separator
    labels += [-100] * (len(encode(step)) + len(separator) - 1) + [1]
  return softmax(forward(ids))[np.array(labels) != -100][:, 1]


AUTHORS = {
  "qwen2.5-math-prm": qwen_math_prm,
  "math-shepherd": math_shepherd,
  "rlhflow": rlhflow,
  "skywork-o1-prm": skywork,
  "trl": trl,
}


def plain_chat(name):
  """The chat template of a readout's family in Python, where transformers is not there."""

  def qwen(messages):
    turns = (f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return "".join(turns)

  def llama(messages):
    system = [{"role": "system", "content": None}]
    text = "<|begin_of_text|>"
    for m in system + messages:
      content = DATE if m["content"] is None else "\n\n" + m["content"].strip()
      text += f"<|start_header_id|>{m['role']}<|end_header_id|>{content}<|eot_id|>"
    return text

  return llama if name == "rlhflow" else qwen
