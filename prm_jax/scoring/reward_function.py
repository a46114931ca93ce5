"""A reward model as the reward function of an RL trainer: prompts and completions to numbers."""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from prm_jax.input_pipeline.token_tree import TokenTree
from prm_jax.runtime.json_lines import show
from prm_jax.scoring import rewards
from prm_jax.scoring.rater import Rater

Chat = Sequence[dict[str, Any]]  # messages, each with "role" and "content"


class StepRewards(NamedTuple):
  """The steps of a completion; both are empty if it has none or cannot be read."""

  rewards: list[float]
  ends: list[int]  # place in the completion's text just past each step's last printed character


@dataclasses.dataclass(frozen=True, eq=False)
class RewardFunction:
  """`function(prompts, completions, **columns) -> list[float]`, one reward for each completion.

  TRL calls its `reward_funcs` so (`GRPOTrainer._calculate_rewards`, trl 1.16.0), and tunix its
  `reward_fns` (`SequenceRewardManager`, tunix/rl/reward_manager.py, 0.1.7); both log the rewards
  under the function's `__name__`.  A completion is split into steps at the separator.  Its
  reward is the sum of its step rewards.  An empty completion, or one that the model cannot be asked
  about, gets the reward of a single step whose P(right) is 0: 0, or -1 in the form "minimum".  In
  the form "implicit" it gets 0, the log-ratio of no tokens.

  Raises:
    ValueError: an unknown form, a temperature that is not positive, no separator, or not a process
      model.
  """

  rater: Rater
  form: str = "product"  # of `rewards.FORMS`
  temperature: float = rewards.TEMPERATURE  # of the form "minimum"
  separator: str = ""  # between steps; "": that of the model's contract
  problem: str = ""  # dataset column that holds the problem; "": the prompt's text is the problem

  def __post_init__(self):
    contract = self.rater.contract
    if self.form not in rewards.FORMS:
      raise ValueError(f"form={self.form!r}: expected one of {', '.join(rewards.FORMS)}")
    if not rewards.LEAST_TEMPERATURE <= self.temperature < math.inf:
      raise ValueError(
        f"temperature={self.temperature}: expected a number of at least {rewards.LEAST_TEMPERATURE}"
      )
    if contract.objective != "process":
      raise ValueError(f"a model with the objective {contract.objective!r} rates no steps")
    if not self.separator:
      object.__setattr__(self, "separator", contract.separator)
    if not self.separator:
      raise ValueError("separator is empty, and so is that of the model's contract")

  @property
  def __name__(self) -> str:
    return f"prm_{self.form}"

  def __call__(self, prompts: Sequence, completions: Sequence, **columns: Any) -> list[float]:
    """The reward of each completion; arguments as `step_rewards`."""
    return self.sums(self.step_rewards(prompts, completions, **columns))

  def sums(self, found: Sequence[StepRewards]) -> list[float]:
    """The reward of each completion of these step rewards."""
    worst = 0.0 if self.form == "implicit" else float(self._rewards([np.zeros(1)])[0, 0])
    return [float(sum(each.rewards)) if each.rewards else worst for each in found]

  def step_rewards(
    self, prompts: Sequence[str | Chat], completions: Sequence[str | Chat], **columns: Any
  ) -> list[StepRewards]:
    """The rewards of each completion's steps, and where the steps end in its text.

    Args:
      prompts: texts or chats; of a chat, the last turn of the user is the problem.
      completions: texts or chats; of a chat, the turns of the assistant, joined.
      columns: of the dataset, a value for each completion; others that a trainer passes.

    Raises:
      ValueError: as many prompts as completions are needed, and a problem in each; or there is no
        column of the problem.
    """
    if self.problem and columns.get(self.problem) is None:
      raise ValueError(
        f"problem={self.problem!r}: the trainer gives no such column; there are "
        f"{', '.join(columns) or 'none'}"
      )
    solutions, places = self.solutions(columns.get(self.problem, prompts), completions)
    return self.placed(self._probabilities(solutions), places)

  def solutions(
    self, problems: Sequence[str | Chat], completions: Sequence[str | Chat]
  ) -> tuple[list[tuple[str, list[str]]], list[list[int]]]:
    """Problem and steps of each completion, and where the steps end in its text."""
    if len(problems) != len(completions):
      raise ValueError(f"{len(problems)} prompts for {len(completions)} completions")
    solutions, places = [], []
    for problem, completion in zip(problems, completions):
      found = split(_text(completion, "assistant") or "", self.separator)
      solutions.append((_problem(problem), [step for step, _ in found]))
      places.append([end for _, end in found])
    return solutions, places

  def placed(
    self, probabilities: Sequence[np.ndarray | None], places: Sequence[list[int]]
  ) -> list[StepRewards]:
    """Step rewards of class probabilities `[steps, C]`; None for what cannot be rated."""
    classes = self.rater.contract.right_classes
    right = [np.zeros(0) if p is None else p[:, classes].sum(-1) for p in probabilities]
    return [
      StepRewards(row[: len(p)].tolist(), ends[: len(p)])
      for row, p, ends in zip(self._rewards(right), right, places)
    ]

  def _probabilities(
    self, solutions: Sequence[tuple[str, Sequence[str]]]
  ) -> list[np.ndarray | None]:
    """Class probabilities of each solution, or None."""
    trees: dict[int, TokenTree] = {}
    out: list[np.ndarray | None] = [None] * len(solutions)
    for i, (problem, steps) in enumerate(solutions):
      with contextlib.suppress(ValueError):
        if steps:
          trees[i] = self.rater.encode(problem, steps)
    found = self.rater.read([*trees.values()], [solutions[i][0] for i in trees])
    for i, each in zip(trees, found, strict=True):
      out[i] = each.mean(1)
    return out

  def _rewards(self, probabilities: Sequence[np.ndarray]) -> np.ndarray:
    """Step rewards `[B, S]`, padded to powers of two, so that few shapes are compiled."""
    sizes = (len(probabilities), max(map(len, probabilities), default=0))
    shape = tuple(2 ** max(size - 1, 0).bit_length() for size in sizes)
    padded, valid = np.zeros(shape, np.float32), np.zeros(shape, bool)
    for i, each in enumerate(probabilities):
      padded[i, : len(each)], valid[i, : len(each)] = each, True
    found = rewards.step_rewards(
      jnp.asarray(padded), jnp.asarray(valid), self.form, temperature=self.temperature
    )
    return np.asarray(found)


def split(text: str, separator: str) -> list[tuple[str, int]]:
  """The steps of a text that are not blank, each with the index just past its last character."""
  out, start = [], 0
  for piece in text.split(separator):
    if piece.strip():
      out.append((piece, start + len(piece.rstrip())))
    start += len(piece) + len(separator)
  return out


def _problem(prompt: Any) -> str:
  """The problem of a prompt."""
  text = _text(prompt, "user", last=True)
  if not isinstance(text, str) or not text:
    raise ValueError(f"prompt {show(prompt)}: expected a text, or messages with a user's turn")
  return text


def _text(value: Any, role: str, last: bool = False) -> str | None:
  """A text, or what the turns of a role say in a chat; None if it is neither."""
  if isinstance(value, str):
    return str(value)  # of NumPy's too
  try:
    turns = [_content(message["content"]) for message in value if message["role"] == role]
    return turns[-1] if last else "".join(turns)
  except (TypeError, KeyError, IndexError):
    return None


def _content(content: str | Sequence[dict[str, Any]]) -> str:
  """The text of a message, or of its parts that are text."""
  if isinstance(content, str):
    return content
  return "".join(part["text"] for part in content if part["type"] == "text")
