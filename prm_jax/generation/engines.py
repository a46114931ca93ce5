"""The interface of text generators: prompts to completions."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

from prm_jax import config as config_lib
from prm_jax.generation.sampling import Sampling
from prm_jax.input_pipeline.tokenizers import Tokenizer
from prm_jax.runtime import json_lines

End = Literal["stop", "length"]  # an end token or a stop string; or max_new_tokens came first


@dataclasses.dataclass(frozen=True)
class Prompt:
  """What a model is to go on from."""

  before: str  # may spell out special tokens, as a chat template does
  problem: str  # plain text: the name of a special token in it is letters
  after: str
  seed: int  # of its samples; sample k of equal prompts with equal seeds is the same text
  # Steps that the completion goes on from, each with its separator: plain text, encoded one by one.
  begun: tuple[str, ...] = ()

  @property
  def text(self) -> str:
    return self.before + self.problem + self.after + "".join(self.begun)


@dataclasses.dataclass(frozen=True)
class Limits(config_lib.Checked):
  """When a completion ends."""

  max_new_tokens: config_lib.Count = 512
  # Texts after which it ends; they stay in it.
  stop: tuple[json_lines.Text, ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
  prompt: int  # its number among those given
  sample: int  # its number among those of the prompt
  text: str  # without the end token
  end: End
  tokens: tuple[int, ...] | None = None  # with the end token; None: the engine does not say
  # Of each token, by the model's own distribution, before temperature and truncation.
  log_probs: tuple[float, ...] | None = None
  token_count: int = 0


def derived_seed(seed: int, number: int | str) -> int:
  """The seed of one of many: of a problem's samples, or of one sample.  Servers take 31 bits."""
  digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
  return int.from_bytes(digest[:4], "big") >> 1


class Engine(Protocol):
  tokenizer: Tokenizer | None

  def facts(self) -> dict[str, Any]:
    """What decides its samples, beside settings and prompts, as JSON."""
    ...

  def generate(
    self, prompts: Sequence[Prompt], n: int, sampling: Sampling, limits: Limits
  ) -> Iterator[Completion]:
    """`n` completions of each prompt, as they end."""
    ...
