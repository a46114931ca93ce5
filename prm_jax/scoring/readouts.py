"""Readouts: how a model is asked for the probabilities of steps.

A readout lays problem and steps out as tokens, says at which of them the model is read, and turns
the hidden states there into class probabilities.  `trained` is that of this project's models,
`PUBLISHED` those of public ones; to add one, write its layout and, if need be, its head, here.

The ids of a published layout equal those of the authors' own procedure for the same problem and
steps.  Read positions follow from how the ids were joined; they are never searched for.  So a
special token spelled out in a problem or a step is plain letters, and a tag inside a step adds no
read (the authors' procedures take either for the end of a step).  Nothing follows the last read.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from prm_jax.input_pipeline import token_tree
from prm_jax.input_pipeline.token_tree import TokenTree, chain
from prm_jax.input_pipeline.tokenizers import Tokenizer, token_name
from prm_jax.model import attention as attention_lib
from prm_jax.types import StepContract

CLASSES = ("-1", "1")  # of published models: wrong and right
ANSWERS = "answers"  # [2, D]: the language-model head's rows of the two answers
QWEN_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
QWEN_TAG = "<extra_0>"
SHEPHERD_TAG = "ки"
LLAMA_DATE = "26 Jul 2024"  # of Llama 3.1's template, where the caller gives none
READ = None  # among pieces: the token before it is read
Head = Mapping[str, jax.Array]  # float32, by public names


@dataclasses.dataclass(frozen=True)
class Readout:
  """How a model is asked about a solution.

  `encode(problem, steps)` gives its tokens, with a read for each step (of an outcome model, one at
  the end); it raises ValueError for a solution that the model cannot be asked about.
  """

  encode: Callable[[str, Sequence[str]], TokenTree]
  # Class log-probabilities `[B, R, C]` from the head's tensors, the hidden states at the reads
  # `[B, R, D]`, both float32, and the soft-cap of logits.  None: the model's own step head.
  head: Callable[[Head, jax.Array, float], jax.Array] | None = None
  tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)  # the head's: see shape_of
  answers: tuple[int, int] | None = None  # tokens of "wrong" and "right", where they are predicted
  separator: str = ""  # between steps, where a file has a solution in one text
  read: str = ""  # where the probability stands, in words for the contract
  prompt: str = ""  # in words, for the contract
  tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)  # tags and answers


def shape_of(letters: str, width: int) -> tuple[int, ...]:
  """The shape that `Readout.tensors` states: D is the model's width, a digit itself."""
  return tuple(width if letter == "D" else int(letter) for letter in letters)


def trained(tokenizer: Tokenizer, contract: StepContract) -> Readout:
  """The readout of a model that this project trained: by its contract, with its own head."""
  return Readout(
    functools.partial(token_tree.encode_candidate, tokenizer=tokenizer, contract=contract),
    tensors={"score.weight": f"{len(contract.classes)}D"},
  )


def qwen_math_prm(tokenizer: Tokenizer, settings: Mapping[str, Any], separator: str) -> Readout:
  """Qwen2.5-Math-PRM (model card): a chat turn in which `<extra_0>` follows each step."""
  start, end, tag = (_special(tokenizer, t) for t in ("<|im_start|>", "<|im_end|>", QWEN_TAG))

  def encode(problem: str, steps: Sequence[str]) -> TokenTree:
    pieces = [start, f"system\n{QWEN_SYSTEM}", end, "\n", start, f"user\n{problem}", end, "\n"]
    pieces += [start, "assistant\n"]
    for step in steps:
      pieces += [step, tag, READ]
    return _joined(pieces, tokenizer)

  return Readout(
    encode,
    two_layers,
    tensors={
      "score.0.weight": "DD",
      "score.0.bias": "D",
      "score.2.weight": "2D",
      "score.2.bias": "2",
    },
    separator=separator or "\n\n",
    read=f"at {QWEN_TAG}",
    prompt=f"<|im_start|> turns: system {QWEN_SYSTEM!r}, user problem, assistant steps",
    tokens={QWEN_TAG: tag},
  )


def math_shepherd(tokenizer: Tokenizer, settings: Mapping[str, Any], separator: str) -> Readout:
  """Math-Shepherd (model card): `problem step ки NEWLINE step ки ...`, encoded as one text."""
  answers = tokenizer.encode("+ -")
  if len(answers) != 2 or tokenizer.decode(answers).strip() != "+ -":
    raise ValueError(f"'+ -' must be two tokens; it encodes to {answers}")
  tag = _one(tokenizer, SHEPHERD_TAG)

  def encode(problem: str, steps: Sequence[str]) -> TokenTree:
    for i, step in enumerate(steps):
      if step.rstrip().endswith(SHEPHERD_TAG):
        raise ValueError(
          f"step {i} ends with the tag {SHEPHERD_TAG!r}, which the layout puts there itself; give "
          "steps without it"
        )
    parts = [f"{problem} ", *(f"{step} {SHEPHERD_TAG}\n" for step in steps)]
    text = "".join(parts).removesuffix("\n")
    ids = tokenizer.encode(text)
    reads = [i for i, token in enumerate(ids) if token == tag]
    if len(reads) != len(steps) or SHEPHERD_TAG in problem + "".join(steps):
      # The text has a tag of its own, or a tag has merged: find the end of each part separately.
      ends = itertools.accumulate(len(part) for part in parts)
      reads = [_end(text[:end].rstrip("\n"), ids, tag, tokenizer) for end in list(ends)[1:]]
    first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return _chain(first + ids, [len(first) + i for i in reads])

  return Readout(
    encode,
    answer_tokens,
    separator=separator or "\n",
    read=f"at the tag {SHEPHERD_TAG!r}",
    prompt=f"'problem step {SHEPHERD_TAG}\\nstep {SHEPHERD_TAG}', encoded as one text",
    tokens={SHEPHERD_TAG: tag, "+": answers[0], "-": answers[1]},
    answers=(answers[1], answers[0]),
  )


def rlhflow(tokenizer: Tokenizer, settings: Mapping[str, Any], separator: str) -> Readout:
  """RLHFlow (math-rm/prm_evaluate.py): a Llama 3 chat, each step a turn that `+` answers.

  The authors run each prefix of the chat by itself, with all earlier answers `+`; one forward over
  the whole chat gives the same.
  """
  names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
  begin, start, end, over = (_special(tokenizer, name) for name in names)
  plus, minus = _one(tokenizer, "+"), _one(tokenizer, "-")
  gap = tokenizer.encode("\n\n")
  for text, answer in (("+", plus), ("-", minus)):
    if not gap or tokenizer.encode(f"\n\n{text}") != [*gap, answer]:
      raise ValueError(f"{text!r} after a line break is no token of its own, unlike in Llama 3")
  system, assumed = _llama_system(settings.get("chat_template"))

  def encode(problem: str, steps: Sequence[str]) -> TokenTree:
    pieces = [begin] + ([start, "system", end, system, over] if system else [])
    for i, step in enumerate(steps):
      turn = f"{problem} {step.strip()}" if i == 0 else step
      pieces += [start, "user", end, f"\n\n{turn.strip()}", over]
      pieces += [start, "assistant", end, *gap, READ, plus, over]
    return _joined(pieces, tokenizer)

  return Readout(
    encode,
    answer_tokens,
    separator=separator or "\n\n",
    read="at the token before the answer",
    prompt=f"Llama 3 turns: system {system!r}{assumed}, user problem and step, assistant +, "
    "user step, ...",
    tokens={"+": plus, "-": minus},
    answers=(minus, plus),
  )


def skywork(tokenizer: Tokenizer, settings: Mapping[str, Any], separator: str) -> Readout:
  """Skywork-o1-PRM (model_utils/io_utils.py): lines encoded apart, read at the end of each step.

  The authors take each line for a step; a step of several lines is read at its last line here.
  """
  name = token_name(settings, "bos_token")
  if name is None:
    raise ValueError("no bos_token in tokenizer_config.json; the authors put it first")
  first, newline = _special(tokenizer, name), tokenizer.encode("\n")[-1]

  def encode(problem: str, steps: Sequence[str]) -> TokenTree:
    ids, reads = [first, *tokenizer.encode(f"{problem}\n")], []
    for step in steps:
      for line in step.split("\n"):
        ids += [*tokenizer.encode(line), newline]
      reads.append(len(ids) - 1)
    return _chain(ids, reads)

  return Readout(
    encode,
    value,
    tensors={"v_head.summary.weight": "1D", "v_head.summary.bias": "1"},
    separator=separator or "\n",
    read="at the line break after a step",
    prompt=f"{name}, problem and a line break; then each line encoded apart, and a line break",
    tokens={name: first, "\n": newline},
  )


def trl(tokenizer: Tokenizer, settings: Mapping[str, Any], separator: str) -> Readout:
  """TRL's PRMTrainer.tokenize_row: prompt, then each step and the separator, all encoded apart.

  A `bos_token` comes first even if the tokenizer adds none by itself (SmolLM2's).
  """
  separator = separator or "\n"
  ends = tokenizer.encode(separator)
  if not ends:
    raise ValueError(f"--separator={separator!r} has no token")
  first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  if "bos_token" in settings:
    name = token_name(settings, "bos_token")
    first = [] if name is None else [_special(tokenizer, name)]

  def encode(problem: str, steps: Sequence[str]) -> TokenTree:
    ids, reads = first + tokenizer.encode(problem), []
    for step in steps:
      ids += tokenizer.encode(step) + ends
      reads.append(len(ids) - 1)
    return _chain(ids, reads)

  return Readout(
    encode,
    classes,
    tensors={"score.weight": "2D", "score.bias": "2"},
    separator=separator,
    read="at the separator's last token",
    prompt=f"tokens {first}, prompt, then each step and {separator!r}, all encoded apart",
    tokens={separator: ends[-1]},
  )


def two_layers(head: Head, hidden: jax.Array, softcap: float) -> jax.Array:
  """Linear, ReLU, linear, softmax (Qwen's modeling_qwen2_rm.py)."""
  middle = jax.nn.relu(_linear(hidden, head["score.0.weight"], head["score.0.bias"]))
  return jax.nn.log_softmax(_linear(middle, head["score.2.weight"], head["score.2.bias"]))


def answer_tokens(head: Head, hidden: jax.Array, softcap: float) -> jax.Array:
  """Softmax over the language-model logits of the two answers alone."""
  logits = attention_lib.soft_cap(_linear(hidden, head[ANSWERS]), softcap)
  return jax.nn.log_softmax(logits)


def value(head: Head, hidden: jax.Array, softcap: float) -> jax.Array:
  """Sigmoid of one value, as two classes."""
  logit = _linear(hidden, head["v_head.summary.weight"], head["v_head.summary.bias"])
  return jax.nn.log_sigmoid(jnp.concatenate([-logit, logit], axis=-1))


def classes(head: Head, hidden: jax.Array, softcap: float) -> jax.Array:
  """A token classifier: class 0 is wrong, class 1 right."""
  return jax.nn.log_softmax(_linear(hidden, head["score.weight"], head["score.bias"]))


def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array | float = 0.0) -> jax.Array:
  """torch's Linear, in full float32 on TPUs too, where that is not the default."""
  return jnp.einsum("BRD,CD->BRC", x, weight, precision=jax.lax.Precision.HIGHEST) + bias


# By name: (tokenizer, settings of tokenizer_config.json, separator or "") -> readout.
PUBLISHED = {
  "qwen2.5-math-prm": qwen_math_prm,
  "math-shepherd": math_shepherd,
  "rlhflow": rlhflow,
  "skywork-o1-prm": skywork,
  "trl": trl,
}


def _special(tokenizer: Tokenizer, name: str) -> int:
  """The id of a special token, by its name."""
  number = tokenizer.token_id(name)
  if number is None:
    raise ValueError(f"the tokenizer has no token {name!r}")
  return number


def _one(tokenizer: Tokenizer, text: str) -> int:
  """The id of a text that must be one token."""
  ids = tokenizer.encode(text)
  if len(ids) != 1 or tokenizer.decode(ids).strip() != text:  # may be the unknown token
    raise ValueError(f"{text!r} must be one token; it encodes to {ids}")
  return ids[0]


def _end(text: str, ids: list[int], tag: int, tokenizer: Tokenizer) -> int:
  """The index in `ids` of the tag that ends `text`, a prefix of the encoded text."""
  prefix = tokenizer.encode(text)
  if prefix[-1:] != [tag] or ids[: len(prefix)] != prefix:
    raise ValueError(f"the tag {SHEPHERD_TAG!r} merges with the text around it: {text[-20:]!r}")
  return len(prefix) - 1


def _llama_system(template: Any) -> tuple[str, str]:
  """The system turn that Llama 3's chat template adds ("": none), and what of it is assumed.

  The template is code and is not run: Llama 3.1's is recognised by the words it begins with.
  """
  if isinstance(template, list):  # several, by name
    template = next((t.get("template") for t in template if t.get("name") == "default"), None)
  if template is not None and "Cutting Knowledge Date" not in template:
    if "<|start_header_id|>" not in template:
      raise ValueError("the chat template in tokenizer_config.json is not Llama 3's")
    return "", ""
  date = re.search(r"date_string = ['\"]([\w ]+)['\"]", template or "")
  today = date[1] if date else LLAMA_DATE
  assumed = "" if date else " (the date is assumed: the chat template gives none)"
  if template is None:
    assumed = " (assumed, as Llama 3.1's: there is no chat template)"
  return f"\n\nCutting Knowledge Date: December 2023\nToday Date: {today}\n\n", assumed


def _joined(pieces: Iterable[int | str | None], tokenizer: Tokenizer) -> TokenTree:
  """Joins tokens, texts and READs; neighbouring texts are encoded as one."""
  ids, reads = [], []
  for kind, group in itertools.groupby(pieces, type):
    if kind is str:
      ids += tokenizer.encode("".join(group))
    elif kind is int:
      ids += group
    else:
      reads.append(len(ids) - 1)
  return _chain(ids, reads)


def _chain(ids: Sequence[int], reads: Sequence[int]) -> TokenTree:
  """A solution up to its last read."""
  return chain(ids[: reads[-1] + 1], reads)
