"""The flags by which scripts choose a language model and its sampling."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Collection
from typing import Annotated, Literal

import msgspec

from prm_jax import config as config_lib
from prm_jax.runtime import json_lines

UNUSED = {  # flags without effect, by the flag that names the model; the first flag given counts
  "url": ("step", "batch", "dtype", "tensor"),
  "checkpoint": ("concurrency", "dtype"),
  "model": ("step", "concurrency"),
}


Stop = Annotated[config_lib.Escaped, msgspec.Meta(min_length=1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generator(config_lib.Checked):
  model: str = ""  # directory of a public or exported model
  checkpoint: str = ""  # instead of --model: work directory of a run of train.py
  step: str = "latest"  # checkpoint to load: "latest", "best" by train.best_metric, or a number
  url: str = ""  # a server with OpenAI's API, such as http://127.0.0.1:8000/v1
  served_model: str = ""  # the model's name on the server; --model then gives its tokenizer
  concurrency: config_lib.Count = 64  # simultaneous requests to the server
  max_new_tokens: config_lib.Count = 512  # limit of tokens of a sample
  temperature: config_lib.NonNegative = 1.0  # 0: always the likeliest token
  top_k: config_lib.Whole = 0  # number of likeliest tokens to sample from; 0: all
  # total probability of the likeliest tokens to sample from; 1: all
  top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
  min_p: config_lib.Share = 0.0  # least probability, as a share of the likeliest token's; 0: all
  # Texts that end a sample; they stay in it.  \n is a line break, and \\ a backslash.
  stop: tuple[Stop, ...] = ()
  seed: config_lib.Whole = 0  # seed of the samples
  # chat: the model's template; few_shot: after --examples; plain: the problem and a newline
  prompt: Literal["chat", "few_shot", "plain"] = "chat"
  system: str | None = None  # system prompt of chat; None: reason step by step, box the answer
  examples: pathlib.Path | None = None  # for few_shot: JSON lines with problem and steps
  steps: Literal["lines", "paragraphs"] = "lines"  # paragraphs: empty lines separate steps
  batch: config_lib.Count = 64  # samples decoded at once
  dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of a public or exported model
  tensor: config_lib.Count = 1  # devices that share a copy of the model

  def check_model(self, elsewhere: Collection[str] = ()) -> None:
    """Raises ValueError unless the flags name one model and each flag has an effect.

    Args:
      elsewhere: names of flags that also affect something other than this model.
    """
    if bool(self.url) != bool(self.served_model):
      raise ValueError("--url and --served_model go together")
    if self.url and self.checkpoint:
      raise ValueError("give one of --url and --checkpoint")
    if not self.url and bool(self.model) == bool(self.checkpoint):
      raise ValueError("give one of --model=DIR and --checkpoint=DIR, or --url=URL")
    if bool(self.examples) != (self.prompt == "few_shot"):
      raise ValueError("--prompt=few_shot and --examples=FILE go together")
    if self.system is not None and self.prompt != "chat":
      raise ValueError(f"--system is for --prompt=chat, not for --prompt={self.prompt}")
    kind = next(name for name in UNUSED if getattr(self, name))
    for name in UNUSED[kind]:
      if name not in elsewhere and getattr(self, name) != getattr(type(self), name):
        raise ValueError(f"--{name} has no effect with --{kind}")

  @property
  def name(self) -> str:
    """The model's name, for people."""
    return self.served_model or self.model or self.checkpoint

  def load(self, chat: bool = False):
    """Loads the engine; with `chat`, a server is asked for chat completions."""
    from prm_jax.generation.sampler import Sampler
    from prm_jax.generation.server import Server
    from prm_jax.input_pipeline import tokenizers

    if self.url:
      key = os.environ.get("OPENAI_API_KEY", "").strip()
      if not (key.isascii() and key.isprintable()):  # an error of the connection would show it
        raise ValueError("OPENAI_API_KEY holds a line break or a letter that is not ASCII")
      tokenizer = tokenizers.load(self.model) if self.model else None
      return Server(self.url, self.served_model, self.concurrency, key, tokenizer, chat)
    place = self.model or self.checkpoint
    if (pathlib.Path(place) / "config.json").is_file() != bool(self.model):
      kinds = "a directory with config.json goes with --model, a run of train.py with --checkpoint"
      raise ValueError(f"{place}: {kinds}")
    return Sampler.load(place, self.dtype, self.batch, self.tensor, self.step)

  def maker(self, tokenizer) -> Callable:
    """Returns the function that makes a prompt from a problem and a seed."""
    from prm_jax.generation import prompts

    records = json_lines.structs(self.examples, prompts.Example) if self.examples else ()
    system = prompts.SYSTEM if self.system is None else self.system
    return prompts.maker(self.prompt, tokenizer, system, [x for _, x in records], self.steps)

  @property
  def sampling(self):
    from prm_jax.generation.sampling import Sampling

    return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

  @property
  def limits(self):
    """The limits of a sample; after worked examples, the start of a next problem ends it too."""
    from prm_jax.generation import prompts
    from prm_jax.generation.engines import Limits

    stop = (*self.stop, prompts.NEXT) if self.prompt == "few_shot" else self.stop
    return Limits(self.max_new_tokens, stop)
