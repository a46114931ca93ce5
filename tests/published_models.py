"""Tiny directories of published reward models, and plain versions of their authors' procedures.

A procedure gets `encode` (from text to ids, with special tokens parsed, as the authors do), `chat`
(the chat template) and `forward` (from ids to the head's outputs at each), so that it runs on torch
and on the project's own decoder.
"""

import dataclasses
import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import jinja2
import numpy as np
import tiny
import tokenizers as hf
from flax import nnx

from prm_jax import config as config_lib
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import families, safetensors_files, weights
from prm_jax.scoring.readouts import PUBLISHED
from prm_jax.training import step as step_lib

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
DATE = "\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
TEXTS = [
  "Step 1: 3 + 4 = 7. ки\nStep 2: So 7 - 2 = 5. ки\nThe answer is: 5 ки",
  "system\nuser\nassistant\nthe problem is to add 12 and 30 .\n\nso we have 42 .\n\n",
  "Janet has 16 eggs, eats 3 and sells the others.\n\nHow many? 16 - 3 = 13 .\n",
  "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n + - + - ки ки ки",
] * 20
SPECIALS = {
  "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<extra_0>"],
  "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
  "mistral": ["<s>", "<unk>", "</s>"],
}
BYTE_WORDS = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {  # the words of each family's tokenizer, by regular expression
  "qwen2": BYTE_WORDS.replace("{1,3}", ""),
  "llama": BYTE_WORDS,
  "mistral": "\u2581?[^\u2581\n]+|\n",
}
# The families' chat templates, without their parts for tools.
TEMPLATES = {
  "qwen2": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] "
  "+ '<|im_end|>' + '\n' }}{% endfor %}",
  "llama": '{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}'
  "{{- bos_token }}{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}"
  "{{- 'Cutting Knowledge Date: December 2023\n' }}"
  "{{- 'Today Date: ' + date_string + '\n\n' }}{{- '<|eot_id|>' }}"
  "{%- for m in messages %}{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
  "+ m['content'] | trim + '<|eot_id|>' }}{%- endfor %}",
  "mistral": "",
}
LENGTH = 384  # most tokens of a text in the tests
MODEL = dataclasses.replace(tiny.MODEL, context_length=512, tied_embeddings=False)
BIAS = {"attention_bias": True}
LLAMA_ROPE = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_length": 32}
MODELS = {  # of each readout: family, fields of the model, and outputs of the head's layers
  "qwen2.5-math-prm": ("qwen2", BIAS, {"score.0": 16, "score.2": 2}),
  "math-shepherd": ("mistral", {"window": 24}, {}),
  "rlhflow": ("llama", LLAMA_ROPE, {}),
  "skywork-o1-prm": ("qwen2", BIAS | {"tied_embeddings": True}, {"v_head.summary": 1}),
  "trl": ("qwen2", BIAS, {"score": 2}),
  "trl-joined": ("qwen2", BIAS, {"score": 2}),
}


@functools.cache
def tokenizer_json(family: str) -> hf.Tokenizer:
  """Returns a family's tokenizer: Qwen's and Llama's on bytes, Mistral's like SentencePiece's."""
  first, alphabet = SPECIALS[family][0], hf.pre_tokenizers.ByteLevel.alphabet()
  split = [hf.pre_tokenizers.Split(hf.Regex(WORDS[family]), "isolated")]
  if family == "mistral":
    tokenizer, alphabet = hf.Tokenizer(hf.models.BPE(unk_token="<unk>", fuse_unk=True)), []
    space = hf.normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = hf.normalizers.Sequence([hf.normalizers.Prepend("\u2581"), space])
    tokenizer.decoder = hf.decoders.Sequence(
      [hf.decoders.Replace("\u2581", " "), hf.decoders.Fuse(), hf.decoders.Strip(" ", 1, 0)]
    )
  else:
    tokenizer = hf.Tokenizer(hf.models.BPE())
    split.append(hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.decoder = hf.decoders.ByteLevel()
  if family == "qwen2":
    tokenizer.normalizer = hf.normalizers.NFC()
  tokenizer.pre_tokenizer = hf.pre_tokenizers.Sequence(split)
  trainer = hf.trainers.BpeTrainer(
    vocab_size=300 if family == "mistral" else 400,
    special_tokens=SPECIALS[family],
    initial_alphabet=alphabet,
    show_progress=False,
  )
  tokenizer.train_from_iterator(TEXTS, trainer)
  if family == "mistral":  # training needs words; the family's tokenizer merges whole texts
    tokenizer.pre_tokenizer = None
  if family != "qwen2":
    tokenizer.post_processor = hf.processors.TemplateProcessing(
      single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
    )
  return tokenizer


@dataclasses.dataclass(frozen=True)
class Published:
  """A directory of a published model with random weights, and its parameters."""

  name: str
  directory: pathlib.Path
  config: config_lib.Model
  vocab_size: int
  params: dict
  head: dict[str, np.ndarray]

  def encode(self, text: str) -> list[int]:
    """Returns ids as its authors do, with special tokens in the text parsed."""
    return tokenizer_json(MODELS[self.name][0]).encode(text, add_special_tokens=False).ids

  def chat(self, messages: list[dict[str, str]]) -> str:
    """Returns the messages in the family's chat template."""
    family = MODELS[self.name][0]
    template = jinja2.Template(TEMPLATES[family], keep_trailing_newline=True)
    return template.render(messages=messages, bos_token=SPECIALS[family][0])

  def forward(self, ids: list[int]) -> np.ndarray:
    """Returns the head's outputs `[T, outputs]` at each token of one unpacked text."""
    tokens = np.zeros(LENGTH, np.int32)  # one length: compiled once
    tokens[: len(ids)] = ids
    return self.outputs(np.asarray(self._hidden(self.params, tokens[None]))[0, : len(ids)])

  def outputs(self, hidden: np.ndarray) -> np.ndarray:
    """Returns the outputs of the head: linear layers with ReLU, or the language model's."""
    if not self.head:
      return hidden @ self.params["language_model"]
    first, b0, *rest = self.head.values()
    hidden = hidden @ first.T + b0
    return np.maximum(hidden, 0) @ rest[0].T + rest[1] if rest else hidden

  def authors(self, problem: str, steps: tuple[str, ...]) -> np.ndarray:
    """Returns the step scores of the authors' procedure."""
    return AUTHORS[self.name](self.encode, self.chat, self.forward, problem, steps)

  @functools.cached_property
  def _hidden(self):
    graphdef = step_lib.graph(self.config, self.vocab_size, 2)

    def hidden(params, tokens):
      index = jnp.arange(LENGTH)[None]
      return nnx.merge(graphdef, params).hidden(tokens, index, jnp.full_like(index, LENGTH))

    return jax.jit(hidden)


def write(directory: pathlib.Path, name: str) -> Published:
  """Writes a tiny model with the tokenizer, settings and head of a published one; returns it."""
  family, fields, layers = MODELS[name]
  config = dataclasses.replace(MODEL, **fields)
  tokenizer_json(family).save(str(directory / "tokenizer.json"))
  settings = {"bos_token": SPECIALS[family][0], "chat_template": TEMPLATES[family]}
  (directory / "tokenizer_config.json").write_text(json.dumps(settings))
  vocab_size = tokenizer_json(family).get_vocab_size() + 3  # real ones have rows without a token
  rng = np.random.default_rng(4)

  def random(path, leaf):  # in numpy: compiling a random generator takes longer than the tests
    kind = path[-1].key.rpartition("_")[2]
    size, mean = {"norm": (0.3, 1), "bias": (0.3, 0), "embedding": (1, 0)}.get(kind, (0.25, 0))
    return (mean + size * rng.normal(size=leaf.shape)).astype(np.float32)

  mesh = sharding_lib.make_mesh(config_lib.Mesh())
  shapes = decoder.abstract_params(config, vocab_size, 2, mesh)
  params = jax.tree_util.tree_map_with_path(random, shapes)
  head = {}
  for layer, outputs in layers.items():
    head[f"{layer}.weight"] = rng.normal(size=(outputs, 16)).astype(np.float32)
    head[f"{layer}.bias"] = rng.normal(size=outputs).astype(np.float32)
  trunk = {k: v for k, v in weights.unload(params, config) if not k.startswith("score.")}
  safetensors_files.write_directory(directory, (trunk | head).items())
  (directory / "config.json").write_text(json.dumps(families.write(config, vocab_size, family)))
  return Published(name, directory, config, vocab_size, params, head)


def softmax(x):
  x = np.exp(np.asarray(x, np.float64) - np.max(x, -1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


def qwen_math_prm(encode, chat, forward, problem, steps):
  """Returns step scores as the model card: the second class at each <extra_0>."""
  text = "<extra_0>".join(steps) + "<extra_0>"
  roles = ("system", SYSTEM), ("user", problem), ("assistant", text)
  ids = encode(chat([{"role": role, "content": content} for role, content in roles]))
  mask = np.array(ids) == encode("<extra_0>")[0]
  return softmax(forward(ids))[mask][:, 1]


def math_shepherd(encode, chat, forward, problem, steps):
  """Returns step scores as the model card: logits of + and - at the tag."""
  start = [encode("<s>")[-1]]
  output = "\n".join(f"{step} ки" for step in steps)
  ids = start + encode(f"{problem} {output}")
  good, bad = encode("+ -")
  scores = softmax(forward(ids)[:, [good, bad]])[:, 0]
  return scores[np.array(ids) == encode("ки")[-1]]


def rlhflow(encode, chat, forward, problem, steps):
  """Returns step scores as prm_evaluate.py: one forward pass a step, read at token -3."""
  candidates, conversation, scores = [encode("+")[-1], encode("-")[-1]], [], []
  for k, step in enumerate(step.strip() for step in steps):
    conversation.append({"role": "user", "content": step if k else problem + " " + step})
    conversation.append({"role": "assistant", "content": "+"})
    scores.append(softmax(forward(encode(chat(conversation)))[-3, candidates])[0])
  return np.array(scores)


def skywork(encode, chat, forward, problem, steps):
  """Returns step scores as io_utils.py: lines encoded separately, sigmoid of the value at ends."""
  ids = encode("<|endoftext|>" + problem + "\n")
  flags, newline = [0] * len(ids), encode("\n")[-1]
  for step in "\n".join(steps).split("\n"):
    step_ids = (encode(step) if step != "" else []) + [newline]
    ids, flags = ids + step_ids, flags + [0] * (len(step_ids) - 1) + [1]
  value = np.asarray(forward(ids), np.float64)[:, 0]
  return (1 / (1 + np.exp(-value)))[np.array(flags) == 1]


def trl(encode, chat, forward, problem, steps):
  """Returns step scores as PRMTrainer.tokenize_row: the class at each label's token."""
  separator, ids = encode("\n"), encode("<|endoftext|>") + encode(problem)
  labels = [-100] * len(ids)
  for step in steps:
    ids += encode(step) + separator
    labels += [-100] * (len(encode(step)) + len(separator) - 1) + [1]
  return softmax(forward(ids))[np.array(labels) != -100][:, 1]


def trl_joined(encode, chat, forward, problem, steps):
  """Returns step scores as run_eval_prm_trl.py: the class at the last token of each prefix."""
  texts = ["\n".join((problem, *steps[: k + 1])) + "\n" for k in range(len(steps))]
  return np.array([softmax(forward(encode(text))[-1])[1] for text in texts])


AUTHORS = dict(zip(PUBLISHED, (qwen_math_prm, math_shepherd, rlhflow, skywork, trl, trl_joined)))


def without_number(step):
  """Returns a step as remove_step_prefix of PRMBench's mr_eval does."""
  return re.sub(r"^(Step\s*\d+\.\s*|\d+\.\s*)", "", step.strip(), flags=re.IGNORECASE)


def qwen_of_prm_bench(encode, chat, forward, problem, steps):
  """Returns step scores as qwen_prm.py: no step numbers, and a backspace where "\\b" was meant."""
  chat_of = lambda messages: chat(messages).replace("\\boxed", "\x08oxed")
  steps = [without_number(step) for step in steps]
  return qwen_math_prm(encode, chat_of, forward, problem, steps)


def shepherd_of_prm_bench(encode, chat, forward, problem, steps):
  """Returns step scores as math_shepherd.py: "Step k: " before steps that lack it."""
  text = ""
  for k, step in enumerate(map(str.strip, steps)):
    named = step.startswith(("Step", "step"))
    text += f"{step} ки\n" if named else f"Step {k + 1}: {step} ки\n"
  ids = [encode("<s>")[-1], *encode(f"{problem} {text}")]
  scores = softmax(forward(ids)[:, encode("+ -")])[:, 0]
  return scores[np.array(ids) == encode("ки")[-1]]


def skywork_of_prm_bench(encode, chat, forward, problem, steps):
  """Returns step scores as skywork_prm.py with prepare_input, which splits at the tag.

  Omits the line break after the last tag, which that code reads as another step.
  """
  texts = [f"Step {k}: {without_number(step)} ки\n" for k, step in enumerate(steps, 1)]
  ids, tag = encode("<|endoftext|>" + problem + "\n"), encode("ки")[-1]
  reads = []
  for step in "".join(texts).split("ки")[:-1]:
    ids += [*encode(step), tag]
    reads.append(len(ids) - 1)
  value = np.asarray(forward(ids), np.float64)[reads, 0]
  return 1 / (1 + np.exp(-value))


def rlhflow_of_prm_bench(encode, chat, forward, problem, steps):
  """Returns step scores as llama3_1_8b_prm.py: one pass over the chat, softmax of + and -."""
  return rlhflow(encode, chat, forward, problem, [without_number(step) for step in steps])


def rlhflow_of_process_bench(encode, chat, forward, problem, steps):
  """Returns step scores as run_eval_prm_rlhflow.py: a blank line after the problem."""
  first = f"{problem}\n\n{steps[0]}"
  change = lambda m: m | {"content": first} if m["content"].startswith(problem) else m
  chat_of = lambda messages: chat([change(message) for message in messages])
  return rlhflow(encode, chat_of, forward, problem, steps)


BENCHMARK_AUTHORS = {  # the layouts of the benchmarks' own code, by readout and benchmark
  ("qwen2.5-math-prm", "prm_bench"): qwen_of_prm_bench,
  ("math-shepherd", "prm_bench"): shepherd_of_prm_bench,
  ("skywork-o1-prm", "prm_bench"): skywork_of_prm_bench,
  ("rlhflow", "prm_bench"): rlhflow_of_prm_bench,
  ("rlhflow", "process_bench"): rlhflow_of_process_bench,
}
