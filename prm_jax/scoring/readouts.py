"""Readouts: how a reward model is prompted with a solution, and where it is read.

A readout lays problem and steps out as tokens, and says at which tokens and with which head the
model is read.  `trained` makes the readout of this project's models, and `PUBLISHED` has those of
public models.  To add one, write its layout here.

A published layout gives the same token ids as its authors' procedure for the same problem and
steps.  Read positions follow from how the ids were joined; they are never searched for.  So a
special token spelled out in a problem or step is encoded as plain text, and a tag inside a step
adds no read; the authors' procedures would end a step at either.  Nothing follows the last read.

For some families a benchmark's own code prepares problem and steps differently, which changes the
results.  `benchmark` names the benchmark to follow.  ProcessBench: code/run_eval_prm_*.py of
QwenLM/ProcessBench and huggingface/ProcessBench.  PRMBench: mr_eval/models of ssmisya/PRMBench.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from prm_jax.input_pipeline import prefix_tree, token_tree
from prm_jax.input_pipeline.token_tree import TokenTree
from prm_jax.input_pipeline.tokenizers import Tokenizer, chat_template, token_name
from prm_jax.model import attention as attention_lib
from prm_jax.model.decoder import StepScorer
from prm_jax.types import StepContract

QWEN_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
QWEN_TAG = "<extra_0>"
SHEPHERD_TAG = "ки"
MAX_RETOKENISED = 2**23  # tokens times steps of a solution that is encoded once for each step
LLAMA_DATE = "26 Jul 2024"  # default date of Llama 3.1's chat template
READ = None  # marks, in a list of pieces, that the token before it is read
NUMBERS_GONE = "; without the numbers in front of steps"
Head = Sequence[tuple[jax.Array, jax.Array]]  # float32 weight [C, D] and bias [C] of each layer


@dataclasses.dataclass(frozen=True)
class Readout:
  """A layout of solutions as tokens, and the head that is read.

  `encode(problem, steps)` returns the token tree, with a read for each step (for an outcome model,
  one at the end); it raises ValueError for a solution that has no such layout.
  """

  encode: Callable[[str, Sequence[str]], TokenTree]
  layers: Sequence[str] = ()  # public names of the head's linear layers, with ReLU between them
  outputs: int = 2  # of the last layer; 2: logits of wrong and right; 1: of right
  answers: Sequence[int] = ()  # in place of layers: the tokens for "wrong" and "right"
  separator: str = ""  # between steps, for files that hold a solution as one text
  read: str = ""  # the tokens that are read, in words for the contract
  prompt: str = ""  # the layout, in words for people
  tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)  # tags and answers


def log_probs(
  model: StepScorer, head: Head, hidden: jax.Array, read_positions: jax.Array
) -> jax.Array:
  """Returns the class log-probabilities `[B, R, K, C]` of hidden states `[B, T, D]` at `[B, R]`.

  Args:
    head: of a published model; (): the model's own head.
  """
  if not head:
    return model.class_log_probs(hidden, read_positions)
  x = jnp.take_along_axis(hidden, read_positions[..., None], axis=1).astype(jnp.float32)
  for i, (weight, bias) in enumerate(head):
    x = jax.nn.relu(x) if i else x
    # Full float32 on TPUs too, where it is not the default.
    x = jnp.einsum("BRD,CD->BRC", x, weight, precision=jax.lax.Precision.HIGHEST) + bias
  if x.shape[-1] == 1:
    return jax.nn.log_sigmoid(jnp.stack([-x, x], axis=-1))
  return jax.nn.log_softmax(attention_lib.soft_cap(x, model.config.logit_softcap))[:, :, None]


def trained(tokenizer: Tokenizer, contract: StepContract) -> Readout:
  """Returns the readout of a model that this project trained, with its own head."""
  encode = functools.partial(token_tree.encode_candidate, tokenizer=tokenizer, contract=contract)
  outputs = contract.heads * len(contract.classes)
  return Readout(encode, layers=("score",), outputs=outputs, prompt="problem, steps")


def qwen_math_prm(tokenizer: Tokenizer, separator: str, benchmark: str = "") -> Readout:
  """Qwen2.5-Math-PRM (model card, modeling_qwen2_rm.py): `<extra_0>` after each step of a turn."""
  start, end, tag = (_special(tokenizer, t) for t in ("<|im_start|>", "<|im_end|>", QWEN_TAG))
  system, prepare, changes = QWEN_SYSTEM, list, ""
  if benchmark == "prm_bench":  # its code has "\boxed" in a plain string: a backspace and "oxed"
    system, prepare, changes = system.replace("\\b", "\b"), _without_numbers, NUMBERS_GONE

  def encode(problem: str, steps: Sequence[str]) -> TokenTree:
    first, *others = prepare(steps)
    pieces = [start, f"system\n{system}", end, "\n", start, f"user\n{problem}", end, "\n", start]
    for step in (f"assistant\n{first}", *others):
      pieces += [step, tag, READ]
    return _joined(pieces, tokenizer)

  return Readout(
    encode,
    layers=("score.0", "score.2"),
    separator=separator or "\n\n",
    read=f"at {QWEN_TAG}",
    prompt=f"<|im_start|> turns: system {system!r}, user problem, assistant steps" + changes,
    tokens={QWEN_TAG: tag},
  )


def math_shepherd(tokenizer: Tokenizer, separator: str, benchmark: str = "") -> Readout:
  """Math-Shepherd (model card): `problem step ки NEWLINE step ки ...`, encoded as one text."""
  tag = _one(tokenizer, SHEPHERD_TAG)
  plus, minus = tokenizer.encode("+ -")
  first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  prepare, changes = list, ""
  if benchmark == "prm_bench":
    prepare, changes = _numbered, ", steps beginning with 'Step 1:' and so on"

  def encode(problem: str, steps: Sequence[str]) -> TokenTree:
    steps = prepare(steps)
    for i, step in enumerate(steps):
      if step.rstrip().endswith(SHEPHERD_TAG):
        raise ValueError(f"step {i} ends with the tag {SHEPHERD_TAG!r}; give steps without it")
    parts = [f"{problem} ", *(f"{step} {SHEPHERD_TAG}\n" for step in steps)]
    text = "".join(parts).removesuffix("\n")
    ids = tokenizer.encode(text)
    reads = [i for i, token in enumerate(ids) if token == tag]
    if len(reads) != len(steps) or SHEPHERD_TAG in problem + "".join(steps):
      # Problem or steps have a tag, or a tag has merged: find the end of each part separately.
      _check_cost(ids, steps, f"with the tag {SHEPHERD_TAG!r} in it ")
      ends = list(itertools.accumulate(map(len, parts)))[1:]
      prefixes = [tokenizer.encode(text[:end].rstrip("\n")) for end in ends]
      if any(ids[: len(p)] != p or p[-1] != tag for p in prefixes):
        raise ValueError(f"a tag {SHEPHERD_TAG!r} merges with the text around it: {text[-80:]!r}")
      reads = [len(prefix) - 1 for prefix in prefixes]
    return token_tree.chain(first + ids, [len(first) + i for i in reads])

  return Readout(
    encode,
    separator=separator or "\n",
    read=f"at the tag {SHEPHERD_TAG!r}",
    prompt=f"'problem step {SHEPHERD_TAG}\\nstep {SHEPHERD_TAG}', encoded as one text" + changes,
    tokens={SHEPHERD_TAG: tag, "+": plus, "-": minus},
    answers=(minus, plus),
  )


def rlhflow(tokenizer: Tokenizer, separator: str, benchmark: str = "") -> Readout:
  """RLHFlow (math-rm/prm_evaluate.py): a Llama 3 chat in which `+` answers each step's turn.

  The authors run each prefix of the chat by itself, with all earlier answers `+`; one forward pass
  over the whole chat gives the same result.
  """
  names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
  begin, start, end, over = (_special(tokenizer, name) for name in names)
  plus, minus = _one(tokenizer, "+"), _one(tokenizer, "-")
  system, assumed = _llama_system(chat_template(tokenizer.settings))
  between, strip = ("\n\n", str) if benchmark == "process_bench" else (" ", str.strip)
  prepare, changes = list, ""
  if benchmark == "prm_bench":
    prepare, changes = _without_numbers, NUMBERS_GONE

  def encode(problem: str, steps: Sequence[str]) -> TokenTree:
    pieces = [begin] + ([start, "system", end, system, over] if system else [])
    for i, step in enumerate(prepare(steps)):
      turn = f"{problem}{between}{strip(step)}" if i == 0 else step
      pieces += [start, "user", end, f"\n\n{turn.strip()}", over]
      pieces += [start, "assistant", end, "\n\n", READ, plus, over]
    return _joined(pieces, tokenizer)

  return Readout(
    encode,
    separator=separator or "\n\n",
    read="at the token before the answer",
    prompt=f"Llama 3 turns: system {system!r}{assumed}, user problem, {between!r} and step, "
    "assistant +, user step, ..." + changes,
    tokens={"+": plus, "-": minus},
    answers=(minus, plus),
  )


def skywork(tokenizer: Tokenizer, separator: str, benchmark: str = "") -> Readout:
  """Skywork-o1-PRM (model_utils/io_utils.py): lines encoded separately, read at each step's end.

  The authors treat each line as a step; here a step of several lines is read at its last line.
  """
  name = token_name(tokenizer.settings, "bos_token")
  if name is None:
    raise ValueError("no bos_token in tokenizer_config.json; the authors put it first")
  first, mark = _special(tokenizer, name), "\n"
  where, how = "the line break after a step", "then each line encoded apart, and a line break"
  if tagged := benchmark == "prm_bench":  # the authors' code, another tag; multi-line steps
    mark, where = SHEPHERD_TAG, f"the tag {SHEPHERD_TAG!r}"
    how = "'Step 1: ... ', each encoded apart, and the tag" + NUMBERS_GONE
  end = tokenizer.encode(mark)[-1]

  def encode(problem: str, steps: Sequence[str]) -> TokenTree:
    pieces = [first, f"{problem}\n"]
    for step in steps:
      pieces += [piece for line in step.split("\n") for piece in (line, end)] + [READ]
    return _joined(pieces, tokenizer)

  def encode_tagged(problem: str, steps: Sequence[str]) -> TokenTree:
    pieces = [first, f"{problem}\n"]
    for i, step in enumerate(_without_numbers(steps)):
      pieces += ["\n" * (i > 0) + f"Step {i + 1}: {step.strip()} ", end, READ]
    return _joined(pieces, tokenizer)

  return Readout(
    encode_tagged if tagged else encode,
    layers=("v_head.summary",),
    outputs=1,
    separator=separator or "\n",
    read=f"at {where}",
    prompt=f"{name}, problem and a line break; {how}",
    tokens={name: first, mark: end},
  )


def trl(tokenizer: Tokenizer, separator: str, benchmark: str = "") -> Readout:
  """TRL's PRMTrainer.tokenize_row: prompt, then each step and separator, encoded separately.

  A `bos_token` comes first even if the tokenizer adds none by itself (SmolLM2's).
  """
  separator = separator or "\n"
  ends = tokenizer.encode(separator)
  if not ends:
    raise ValueError(f"--separator={separator!r} has no token")
  first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  if "bos_token" in tokenizer.settings:
    name = token_name(tokenizer.settings, "bos_token")
    first = [] if name is None else [_special(tokenizer, name)]

  def encode(problem: str, steps: Sequence[str]) -> TokenTree:
    pieces = [*first, problem]
    for step in steps:
      pieces += [step, *ends, READ]
    return _joined(pieces, tokenizer)

  return Readout(
    encode,
    layers=("score",),
    separator=separator,
    read="at the separator's last token",
    prompt=f"tokens {first}, prompt, then each step and {separator!r}, all encoded apart",
    tokens={separator: ends[-1]},
  )


def trl_joined(tokenizer: Tokenizer, separator: str, benchmark: str = "") -> Readout:
  """huggingface/ProcessBench (run_eval_prm_trl.py): each prefix joined to one text and encoded.

  The separator also follows the problem, and merges with the text around it, unlike in training.
  The results of models trained by TRL were published with this layout; a model in
  QwenLM/ProcessBench pull request 12 has a mean F1 of 56.1 with it and 60.3 with `trl`.  Prefixes
  are merged into a tree, which takes one forward pass.
  """
  separator = separator or "\n"
  first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]

  def encode(problem: str, steps: Sequence[str]) -> TokenTree:
    _check_cost(tokenizer.encode(separator.join((problem, *steps))), steps)
    texts = [separator.join((problem, *steps[: k + 1])) + separator for k in range(len(steps))]
    prefixes = [first + tokenizer.encode(text) for text in texts]
    chains = [token_tree.chain(ids, [len(ids) - 1]) for ids in prefixes]
    tree, places = prefix_tree.merge(chains, every_read=True)
    return dataclasses.replace(tree, read_positions=[place[-1] for place in places])

  return Readout(
    encode,
    layers=("score",),
    separator=separator,
    read="at the last token of each prefix",
    prompt=f"problem and steps joined with {separator!r} and encoded as one text",
  )


# Functions that make readouts from a tokenizer, a separator ("": the authors' own) and a benchmark
# ("": none).
PUBLISHED = {
  "qwen2.5-math-prm": qwen_math_prm,
  "math-shepherd": math_shepherd,
  "rlhflow": rlhflow,
  "skywork-o1-prm": skywork,
  "trl": trl,
  "trl-joined": trl_joined,
}


def _without_numbers(steps: Sequence[str]) -> list[str]:
  """Removes a "1. " or "Step 1. " in front of each step (mr_eval's `remove_step_prefix`)."""
  number = re.compile(r"^(Step\s*\d+\.\s*|\d+\.\s*)", re.IGNORECASE)
  return [number.sub("", step.strip()) for step in steps]


def _numbered(steps: Sequence[str]) -> list[str]:
  """Puts "Step 1: " before each step that does not begin with "Step" (mr_eval's Math-Shepherd)."""
  stripped = [step.strip() for step in steps]
  return [
    step if step.startswith(("Step", "step")) else f"Step {i}: {step}"
    for i, step in enumerate(stripped, 1)
  ]


def _check_cost(ids: Sequence[int], steps: Sequence[str], why: str = "") -> None:
  """Raises ValueError if a solution is too long to encode once for each step."""
  if len(ids) * len(steps) > MAX_RETOKENISED:
    raise ValueError(
      f"a solution {why}of {len(ids)} tokens and {len(steps)} steps: each prefix is encoded "
      f"separately, so tokens times steps may be {MAX_RETOKENISED:,} at most"
    )


def _special(tokenizer: Tokenizer, name: str) -> int:
  """Returns the id of a special token."""
  number = tokenizer.token_id(name)
  if number is None:
    raise ValueError(f"the tokenizer has no token {name!r}")
  return number


def _one(tokenizer: Tokenizer, text: str) -> int:
  """Returns the id of a text; ValueError if it is not one token."""
  ids = tokenizer.encode(text)
  if len(ids) != 1 or tokenizer.decode(ids).strip() != text:  # one id may be the unknown token
    raise ValueError(f"{text!r} must be one token; it encodes to {ids}")
  return ids[0]


def _llama_system(template: str | None) -> tuple[str, str]:
  """Returns the system turn that Llama 3's chat template adds ("": none), and a note on its date.

  Templates are code and are not run: Llama 3.1's is recognised by the phrase of its system turn.
  """
  if template is not None and "Cutting Knowledge Date" not in template:
    if "<|start_header_id|>" not in template:
      raise ValueError("the chat template in tokenizer_config.json is not Llama 3's")
    return "", ""
  date = re.search(r"date_string = ['\"]([\w ]+)['\"]", template or "")
  today = date[1] if date else LLAMA_DATE
  assumed = "" if date else " (the date is assumed: the chat template gives none)"
  return f"\n\nCutting Knowledge Date: December 2023\nToday Date: {today}\n\n", assumed


def _joined(pieces: Iterable[int | str | None], tokenizer: Tokenizer) -> TokenTree:
  """Joins token ids and separately encoded texts into a chain that ends at the last READ."""
  ids, reads = [], []
  for piece in pieces:
    if piece is READ:
      reads.append(len(ids) - 1)
    else:
      ids += tokenizer.encode(piece) if isinstance(piece, str) else [piece]
  return token_tree.chain(ids[: reads[-1] + 1], reads)
