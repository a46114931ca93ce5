"""A reward model as the reward function of an RL trainer."""

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from prm_jax.input_pipeline.token_tree import TokenTree
from prm_jax.reductions import LEAST_TEMPERATURE
from prm_jax.runtime.json_lines import show
from prm_jax.scoring import candidates, rewards
from prm_jax.scoring.rater import UNDEFINED, Rater, undefined

Chat = Sequence[dict[str, Any]]  # messages, each with "role" and "content"


class StepRewards(NamedTuple):
  """The rewards of a completion's steps; empty if it has no steps or cannot be scored."""

  rewards: list[float]
  ends: list[int]  # index in the completion's text just past each step's last printed character


@dataclasses.dataclass(frozen=True, eq=False)
class RewardFunction:
  """`function(prompts, completions, **columns) -> list[float]`, one reward for each completion.

  TRL calls its `reward_funcs` like this (`GRPOTrainer._calculate_rewards`, trl 1.16.0), and tunix
  its `reward_fns` (`SequenceRewardManager`, tunix/rl/reward_manager.py, 0.1.7); both log the
  rewards under the function's `__name__`.  A completion is split into steps at the separator, and
  its reward is the sum of its step rewards.  A completion that is empty or cannot be scored gets
  the reward of a single step whose P(right) is 0: 0, or -1 in the form "minimum".  In the form
  "implicit" it gets 0, the log-ratio of no tokens.

  Raises:
    ValueError: an unknown form, a temperature below `LEAST_TEMPERATURE` or not finite, no
      separator, or not a process model.
  """

  rater: Rater
  form: str = "product"  # of `rewards.FORMS`
  temperature: float = rewards.TEMPERATURE  # of the form "minimum"
  separator: str = ""  # between steps; "": the separator of the model's contract
  problem: str = ""  # dataset column that holds the problem; "": the prompt's text is the problem

  def __post_init__(self):
    contract = self.rater.contract
    if self.form not in rewards.FORMS:
      raise ValueError(f"form={self.form!r}: expected one of {', '.join(rewards.FORMS)}")
    if not LEAST_TEMPERATURE <= self.temperature < math.inf:
      raise ValueError(
        f"temperature={self.temperature}: expected a number of at least {LEAST_TEMPERATURE}"
      )
    if contract.objective != "process":
      raise ValueError(f"a model with the objective {contract.objective!r} rates no steps")
    if not self.separator:
      object.__setattr__(self, "separator", contract.separator)
    if not self.separator:
      raise ValueError("separator is empty, and the model's contract has none")

  @property
  def __name__(self) -> str:
    return f"prm_{self.form}"

  def __call__(self, prompts: Sequence, completions: Sequence, **columns: Any) -> list[float]:
    """Returns the reward of each completion; arguments as `step_rewards`."""
    return self.sums(self.step_rewards(prompts, completions, **columns))

  def sums(self, completions: Sequence[StepRewards]) -> list[float]:
    """Returns the sum of each completion's step rewards."""
    empty = -1.0 if self.form == "minimum" else 0.0
    return [float(sum(each.rewards)) if each.rewards else empty for each in completions]

  def step_rewards(
    self, prompts: Sequence[str | Chat], completions: Sequence[str | Chat], **columns: Any
  ) -> list[StepRewards]:
    """Returns the rewards of each completion's steps, and where the steps end in its text.

    Args:
      prompts: texts or chats; the problem is the text, or the chat's last user turn.
      completions: texts or chats; the assistant turns of a chat are joined.
      columns: dataset columns with a value for each completion, and other arguments of a trainer.

    Raises:
      ValueError: the numbers of prompts and completions differ, a prompt has no problem, the
        column `problem` is missing, or the model gives NaN.
    """
    if self.problem and columns.get(self.problem) is None:
      raise ValueError(
        f"problem={self.problem!r}: the trainer passes no such column; its columns: "
        f"{', '.join(columns) or 'none'}"
      )
    solutions, places = self.solutions(columns.get(self.problem, prompts), completions)
    trees: dict[int, TokenTree] = {}
    refused: list[ValueError] = []
    for i, (problem, steps) in enumerate(solutions):
      try:
        trees[i] = self.rater.encode(problem, steps)
      except ValueError as error:  # without steps, too long, ...
        refused.append(error)
    if refused and not trees:
      warnings.warn(f"no completion has a score: {refused[0]}", stacklevel=2)
    read = self.rater.read([*trees.values()], [solutions[i][0] for i in trees])
    if undefined(read):
      raise ValueError(UNDEFINED)
    return self.placed(dict(zip(trees, read)), places)

  def solutions(
    self, problems: Sequence[str | Chat], completions: Sequence[str | Chat]
  ) -> tuple[list[tuple[str, list[str]]], list[list[int]]]:
    """Returns problem and steps of each completion, and where the steps end in its text."""
    if len(problems) != len(completions):
      raise ValueError(f"{len(problems)} prompts for {len(completions)} completions")
    solutions, places = [], []
    for problem, completion in zip(problems, completions):
      steps, ends = candidates.split(_text(completion, "assistant") or "", self.separator)
      solutions.append((_problem(problem), steps))
      places.append(ends)
    return solutions, places

  def placed(
    self, probabilities: Mapping[int, np.ndarray], places: Sequence[list[int]]
  ) -> list[StepRewards]:
    """Returns the step rewards of each completion.

    Args:
      probabilities: by index, for completions that could be scored, `[steps, K, C]` by head.
      places: where the steps of each completion end.
    """
    sizes = (len(places), max(map(len, probabilities.values()), default=0))
    # Padded to powers of two, so that few shapes are compiled.
    shape = tuple(2 ** max(size - 1, 0).bit_length() for size in sizes)
    right, valid = np.zeros(shape, np.float32), np.zeros(shape, bool)
    for i, by_head in probabilities.items():
      steps = slice(len(by_head))
      right[i, steps] = self.rater.contract.right(by_head.mean(1))
      valid[i, steps] = True
    found = rewards.step_rewards(right, valid, self.form, temperature=self.temperature)
    scored = zip(np.asarray(found), valid.sum(1), places)
    return [StepRewards(row[:count].tolist(), ends[:count]) for row, count, ends in scored]


def _problem(prompt: Any) -> str:
  text = _text(prompt, "user", last=True)
  if not text:
    raise ValueError(f"prompt {show(prompt)}: expected a text, or messages with a user's turn")
  return text


def _text(value: Any, role: str, last: bool = False) -> str | None:
  """Returns a text, or a chat's turns of `role`, joined or only the last; None if it is neither."""
  if isinstance(value, str):
    return str(value)  # NumPy's strings too
  try:
    turns = [_content(message.get("content")) for message in value if message["role"] == role]
    return turns[-1] if last else "".join(turns)
  except (AttributeError, TypeError, KeyError, IndexError):
    return None


def _content(content: str | Sequence[dict[str, Any]] | None) -> str:
  """Returns a message's text, joined from its text parts; "" if it only calls a tool."""
  if isinstance(content, str):
    return content
  return "".join(part["text"] for part in content or () if part["type"] == "text")
