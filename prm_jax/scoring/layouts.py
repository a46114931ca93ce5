"""How published process reward models want problem and steps written, and where they are read.

Each layout is a function of the model's tokenizer that gives a `Layout`.  Ids equal what the
authors' own procedure gives for the same problem and steps; the positions are known from how the
ids were put together, never looked for among them.  So a special token spelled out in a problem or
a step is plain letters here, and text that holds a tag adds no read (the authors' procedures take
either for the end of a step).  Nothing follows the last read: a decoder would not see it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prm_jax.input_pipeline.token_tree import TokenTree, chain
from prm_jax.input_pipeline.tokenizer_json import token_name
from prm_jax.input_pipeline.tokenizers import Tokenizer

QWEN_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
QWEN_TAG = "<extra_0>"
SHEPHERD_TAG = "ки"
LLAMA_DATE = "26 Jul 2024"  # of Llama 3.1's template, where the caller gives none
READ = None  # among pieces: the token before it is read


@dataclasses.dataclass(frozen=True)
class Layout:
  """One model's way of writing a solution.

  `encode(problem, steps)` gives the tokens, with one read for each step.  It raises ValueError for
  a solution that the model cannot be asked about.
  """

  encode: Callable[[str, Sequence[str]], TokenTree]
  separator: str  # between steps, where a file has a solution in one text
  read: str  # where the probability stands
  prompt: str  # in words, for the contract
  tokens: Mapping[str, int]  # those that matter: tags, answers
  answers: tuple[int, int] | None = None  # tokens of "wrong" and "right", where they are predicted


def qwen_math_prm(tokenizer: Tokenizer, settings: Mapping[str, Any], separator: str) -> Layout:
  """Qwen2.5-Math-PRM (model card): a chat turn in which `<extra_0>` follows each step."""
  start, end, tag = (_special(tokenizer, t) for t in ("<|im_start|>", "<|im_end|>", QWEN_TAG))

  def encode(problem: str, steps: Sequence[str]) -> TokenTree:
    pieces = [start, f"system\n{QWEN_SYSTEM}", end, "\n", start, f"user\n{problem}", end, "\n"]
    pieces += [start, "assistant\n"]
    for step in steps:
      pieces += [step, tag, READ]
    return _put_together(pieces, tokenizer)

  return Layout(
    encode=encode,
    separator=separator or "\n\n",
    read=f"at {QWEN_TAG}",
    prompt=f"<|im_start|> turns: system {QWEN_SYSTEM!r}, user problem, assistant steps",
    tokens={QWEN_TAG: tag},
  )


def math_shepherd(tokenizer: Tokenizer, settings: Mapping[str, Any], separator: str) -> Layout:
  """Math-Shepherd (model card): `problem step ки NEWLINE step ки ...`, encoded as one text."""
  answers = tokenizer.encode("+ -")
  if len(answers) != 2 or tokenizer.decode(answers).strip() != "+ -":
    raise ValueError(f"'+ -' is no two tokens of the tokenizer's: it encodes to {answers}")
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
      # A tag of the text's own, or one that has merged with its surroundings: from the beginning.
      ends = itertools.accumulate(len(part) for part in parts)
      reads = [_end(text[:end].rstrip("\n"), ids, tag, tokenizer) for end in list(ends)[1:]]
    first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return _chain(first + ids, [len(first) + i for i in reads])

  return Layout(
    encode=encode,
    separator=separator or "\n",
    read=f"at the tag {SHEPHERD_TAG!r}",
    prompt=f"'problem step {SHEPHERD_TAG}\\nstep {SHEPHERD_TAG}', encoded as one text",
    tokens={SHEPHERD_TAG: tag, "+": answers[0], "-": answers[1]},
    answers=(answers[1], answers[0]),
  )


def rlhflow(tokenizer: Tokenizer, settings: Mapping[str, Any], separator: str) -> Layout:
  """RLHFlow (math-rm/prm_evaluate.py): a Llama 3 chat, each step a turn that `+` answers.

  The authors evaluate each prefix of the chat on its own, with the earlier answers all `+`, which
  is one forward over the whole chat.
  """
  names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
  begin, start, end, over = (_special(tokenizer, name) for name in names)
  plus, minus = _one(tokenizer, "+"), _one(tokenizer, "-")
  gap = tokenizer.encode("\n\n")
  for text, answer in (("+", plus), ("-", minus)):
    if not gap or tokenizer.encode(f"\n\n{text}") != [*gap, answer]:
      raise ValueError(f"{text!r} after a line break is no token of its own, as in Llama 3")
  system, assumed = _llama_system(settings.get("chat_template"))

  def encode(problem: str, steps: Sequence[str]) -> TokenTree:
    pieces = [begin] + ([start, "system", end, system, over] if system else [])
    for i, step in enumerate(steps):
      turn = f"{problem} {step.strip()}" if i == 0 else step
      pieces += [start, "user", end, f"\n\n{turn.strip()}", over]
      pieces += [start, "assistant", end, *gap, READ, plus, over]
    return _put_together(pieces, tokenizer)

  return Layout(
    encode=encode,
    separator=separator or "\n\n",
    read="at the token before the answer",
    prompt=f"Llama 3 turns: system {system!r}{assumed}, user problem and step, assistant +, "
    "user step, ...",
    tokens={"+": plus, "-": minus},
    answers=(minus, plus),
  )


def skywork(tokenizer: Tokenizer, settings: Mapping[str, Any], separator: str) -> Layout:
  """Skywork-o1-PRM (model_utils/io_utils.py): a line each, encoded apart; read at their ends.

  A step of several lines is read at the end of its last.
  """
  name = token_name(settings, "bos_token")
  if name is None:
    raise ValueError("no bos_token in tokenizer_config.json, and the authors put it first")
  first, newline = _special(tokenizer, name), tokenizer.encode("\n")[-1]

  def encode(problem: str, steps: Sequence[str]) -> TokenTree:
    ids, reads = [first, *tokenizer.encode(f"{problem}\n")], []
    for step in steps:
      for line in step.split("\n"):
        ids += [*tokenizer.encode(line), newline]
      reads.append(len(ids) - 1)
    return _chain(ids, reads)

  return Layout(
    encode=encode,
    separator=separator or "\n",
    read="at the line break after a step",
    prompt=f"{name}, problem and a line break; then each line encoded apart, and a line break",
    tokens={name: first, "\n": newline},
  )


def trl(tokenizer: Tokenizer, settings: Mapping[str, Any], separator: str) -> Layout:
  """TRL's PRMTrainer.tokenize_row: prompt, then each step and the separator, all encoded apart.

  A `bos_token` comes first even of a tokenizer that puts none before a text by itself (SmolLM2's).
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

  return Layout(
    encode=encode,
    separator=separator,
    read="at the separator's last token",
    prompt=f"tokens {first}, prompt, then each step and {separator!r}, all encoded apart",
    tokens={separator: ends[-1]},
  )


def _special(tokenizer: Tokenizer, name: str) -> int:
  """The id of a special token."""
  number = tokenizer.token_id(name)
  if number is None:
    raise ValueError(f"the tokenizer has no token {name!r}")
  return number


def _one(tokenizer: Tokenizer, text: str) -> int:
  """The id of a word that must be one token."""
  ids = tokenizer.encode(text)
  if len(ids) != 1 or tokenizer.decode(ids).strip() != text:  # may be the unknown token
    raise ValueError(f"{text!r} is no token of the tokenizer's: it encodes to {ids}")
  return ids[0]


def _end(text: str, ids: list[int], tag: int, tokenizer: Tokenizer) -> int:
  """Where in `ids` the tag stands that ends `text`, with which the encoded text begins."""
  prefix = tokenizer.encode(text)
  if prefix[-1:] != [tag] or ids[: len(prefix)] != prefix:
    raise ValueError(f"the tag {SHEPHERD_TAG!r} merges with the text around it: {text[-20:]!r}")
  return len(prefix) - 1


def _llama_system(template: Any) -> tuple[str, str]:
  """What Llama 3's chat template puts into the system turn by itself ("": there is none).

  And what of it is assumed, in words for the contract.  The template is code, and is not run: Llama
  3.1's is known by the words it begins with.
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


def _put_together(pieces: Iterable[int | str | None], tokenizer: Tokenizer) -> TokenTree:
  """Ids and reads of tokens, texts and READs; neighbouring texts are encoded as one."""
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
