"""Makes prompts from problems: with a chat template, worked examples, or as the problem alone."""

import datetime
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jinja2.ext
import jinja2.sandbox
import msgspec

from prm_jax.generation.engines import Prompt
from prm_jax.input_pipeline.tokenizers import Tokenizer, chat_template, token_name
from prm_jax.runtime import json_lines
from prm_jax.scoring import candidates
from prm_jax.scoring.candidates import ANSWER

Form = Literal["chat", "few_shot", "plain"]
Steps = Literal["lines", "paragraphs"]
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
PROBLEM, SOLUTION = "Problem:\n", "Solution:\n"  # headings of worked examples
NEXT = f"\n\n{PROBLEM}"  # ends a solution after worked examples
SEPARATORS = {"lines": "\n", "paragraphs": "\n\n"}  # between steps
PLACE = "\ue000"  # stands for the problem in a rendered template
# The date given to templates that ask for today's, as prompts must not depend on the day.  It is
# the default of Llama's templates.
TODAY = datetime.date(2024, 7, 26)


class Generation(jinja2.ext.Extension):
  """Renders the contents of `{% generation %}`, which marks replies to train on in transformers."""

  tags = frozenset({"generation"})

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Example(msgspec.Struct):
  """A worked example: a record of a file for `few_shot`."""

  problem: json_lines.Text
  steps: list[json_lines.Text]


def maker(
  form: Form,
  tokenizer: Tokenizer | None,
  system: str = SYSTEM,
  examples: Sequence[Example] = (),
  steps: Steps = "lines",
) -> Callable[[str, int], Prompt]:
  """Returns the function that makes a prompt from a problem and a seed.

  Args:
    form: "chat": the tokenizer's template, with `system` before the problem.  "few_shot": worked
      examples, and the problem after them.  "plain": the problem and a newline, as models that
      `train.py` trains on prompts and completions expect.
    examples: for "few_shot"; their steps are separated as `steps` says.

  Raises:
    ValueError: the tokenizer has no chat template, or one that fails.
  """
  before, after, trims = "", "\n", False
  if form == "chat":
    before, after, trims = _chat(tokenizer, system)
  elif form == "few_shot":
    solved = [
      f"{PROBLEM}{example.problem}\n\n{SOLUTION}"
      + SEPARATORS[steps].join(map(str.strip, example.steps))
      for example in examples
    ]
    before, after = "\n\n".join([*solved, PROBLEM]), f"\n\n{SOLUTION}"
  return lambda problem, seed: Prompt(before, problem.strip() if trims else problem, after, seed)


def _chat(tokenizer: Tokenizer | None, system: str) -> tuple[str, str, bool]:
  """Returns a chat template's text before and after the problem, and whether it trims the problem.

  The template comes with a model, so it runs in jinja2's sandbox, as in transformers.
  """
  settings = tokenizer.settings if tokenizer else {}
  if (template := chat_template(settings)) is None:
    raise ValueError(
      "the tokenizer has no chat template (a server's tokenizer is read from --model): give "
      "--prompt=few_shot with --examples=FILE, or --prompt=plain"
    )
  begun = [{"role": "system", "content": system}] if system else []
  names = {f"{key}_token": token_name(settings, f"{key}_token") or "" for key in ("bos", "eos")}

  def refuse(message: Any) -> None:
    raise jinja2.TemplateError(str(message))

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
  )
  environment.globals["raise_exception"] = refuse
  # Templates compare these with None, which an undefined name is not.
  names |= dict.fromkeys(("tools", "documents"))

  def render(problem: str) -> str:
    messages = [*begun, {"role": "user", "content": problem}]
    parsed = environment.from_string(template)
    return parsed.render(messages=messages, add_generation_prompt=True, **names)

  try:
    try:
      render(PLACE)
    except jinja2.UndefinedError:  # without this function, most templates use a date of their own
      environment.globals["strftime_now"] = TODAY.strftime
    text, spaced = render(PLACE), render(f" {PLACE} ")
  except Exception as error:  # a template may fail in any way
    hint = "; --system= leaves the system prompt out" if system else ""
    shown = json_lines.show(str(error), 200)
    raise ValueError(f"the chat template fails: {shown}{hint}") from error
  if text.count(PLACE) != 1:
    raise ValueError(
      f"the chat template shows the problem {text.count(PLACE)} times, expected once"
    )
  before, _, after = text.partition(PLACE)
  return before, after, spaced == text


def encode(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
  """Returns the tokens of a prompt; adds the BOS token unless the text begins with it."""
  plain = tokenizer.encode(prompt.problem)
  if tokenizer.encode(prompt.problem, special=True) == plain:
    whole = prompt.before + prompt.problem + prompt.after
    ids = tokenizer.encode(whole, special=True)
  else:
    ids = tokenizer.encode(prompt.before, special=True) + plain
    ids += tokenizer.encode(prompt.after, special=True)
  ids += [token for step in prompt.begun for token in tokenizer.encode(step)]
  if tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
    ids = [tokenizer.bos_id, *ids]
  return ids


def split(text: str, steps: Steps) -> list[str]:
  """Splits a solution into steps: its lines (paper section 2.3), or its paragraphs."""
  return [step.strip() for step in candidates.split(text, SEPARATORS[steps])[0]]


def ends_step(text: str, steps: Steps) -> bool:
  """Returns whether the text has a whole step and the separator after it."""
  text = text.lstrip()
  if text.partition(SEPARATORS[steps])[0].strip() == ANSWER:
    text = text.removeprefix(ANSWER).lstrip()  # heading and answer are one step, as in `split`
  return SEPARATORS[steps] in text


def solution(text: str, form: Form) -> str:
  """Returns the solution in a completion, without a next problem after it."""
  return text.partition(NEXT)[0] if form == "few_shot" else text
