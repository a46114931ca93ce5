"""The interface of engines, which generate completions of prompts."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

from prm_jax import config as config_lib
from prm_jax.generation.sampling import Sampling
from prm_jax.input_pipeline.tokenizers import Tokenizer
from prm_jax.runtime import json_lines

End = Literal["stop", "length"]  # by an end token or a stop string, or by max_new_tokens


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A text that a model completes."""

  before: str  # may spell out special tokens, as a chat template does
  problem: str  # plain text, even where it spells out a special token
  after: str
  seed: int  # sample k of equal prompts with equal seeds is the same text
  # First steps of the solution, each with its separator: plain text, encoded one by one.
  begun: tuple[str, ...] = ()

  @property
  def text(self) -> str:
    return self.before + self.problem + self.after + "".join(self.begun)


@dataclasses.dataclass(frozen=True)
class Limits(config_lib.Checked):
  """The limits of a completion."""

  max_new_tokens: config_lib.Count = 512
  stop: tuple[json_lines.Text, ...] = ()  # texts that end a completion; they stay in it

  def stop_end(self, text: str) -> int | None:
    """Returns the end of the first stop string in the text, or None if it has none."""
    ends = [text.index(stop) + len(stop) for stop in self.stop if stop in text]
    return min(ends, default=None)


@dataclasses.dataclass(frozen=True)
class Completion:
  prompt: int  # index of the prompt
  sample: int  # its number among the prompt's samples
  text: str  # without the end token
  end: End
  tokens: tuple[int, ...] | None = None  # with the end token; None: the engine reports none
  # Of each token, by the model's own distribution, before temperature and truncation.
  log_probs: tuple[float, ...] | None = None
  token_count: int = 0


def derived_seed(seed: int, number: int | str) -> int:
  """Returns a 31-bit seed, as servers accept, for a problem's samples or for one sample."""
  digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
  return int.from_bytes(digest[:4], "big") >> 1


class PromptError(ValueError):
  """Some prompts cannot be completed; `refused` maps their indices to the reasons."""

  def __init__(self, refused: dict[int, str]):
    super().__init__(next(iter(refused.values())))
    self.refused = refused


@contextlib.contextmanager
def naming(name: Callable[[int], str]) -> Iterator[None]:
  """Begins the message of a PromptError with the name of its first prompt."""
  try:
    yield
  except PromptError as error:
    first, *others = error.refused
    more = f" ({len(others)} more were refused)" if others else ""
    raise ValueError(f"{name(first)}: {error}{more}") from error


class Engine(Protocol):
  tokenizer: Tokenizer | None

  def facts(self) -> dict[str, Any]:
    """Returns the facts, apart from settings and prompts, that determine the samples, as JSON."""
    ...

  def generate(
    self, prompts: Sequence[Prompt], n: int, sampling: Sampling, limits: Limits
  ) -> Iterator[Completion]:
    """Yields `n` completions of each prompt, each as soon as it ends.

    Raises:
      PromptError: some prompts cannot be completed; a server has completed the others first.
    """
    ...
