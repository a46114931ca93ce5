"""The project's own engine: a batch of slots, each refilled as soon as its completion ends.

The decoding step and the prefill are compiled once for each size.  The random number of a token
follows from its prompt's seed, its sample's number and its place in the sample.  So a text depends
on the batch, the slot and the mesh only through the rounding of the logits, which in float32
decides about one token in a million.
"""

import collections
import dataclasses
import functools
import itertools
import pathlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from prm_jax import config as config_lib
from prm_jax.generation import cache as cache_lib
from prm_jax.generation import cached_decoder
from prm_jax.generation import prompts as prompts_lib
from prm_jax.generation import sampling as sampling_lib
from prm_jax.generation.cache import Cache
from prm_jax.generation.cached_decoder import Slots, Weights
from prm_jax.generation.engines import Completion, Limits, Prompt, PromptError
from prm_jax.generation.places import power_of_two, size
from prm_jax.generation.sampling import Sampling
from prm_jax.input_pipeline.tokenizers import Tokenizer
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import compiler_options, json_lines
from prm_jax.scoring.language_model import LanguageModel
from prm_jax.training import checkpoint as checkpoint_lib

MAX_PROMPT = 2**17  # tokens, the longest context of public models: bounds the cost of a line
LEAST_PLACES = 64  # of a context; a search's contexts begin as a multiple
RING = 256  # initial places of a ring; a step reads all of them, so rings grow only when needed


@dataclasses.dataclass
class _Sample:
  """An unfinished completion in a slot."""

  prompt: int
  sample: int
  chain: int
  group: int  # the context of its chain
  seed: int
  prompt_tokens: Sequence[int]
  tokens: list[int] = dataclasses.field(default_factory=list)
  log_probs: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Sampler:
  """An engine that runs a language model on this host's devices."""

  weights: Weights
  config: config_lib.Model
  tokenizer: Tokenizer
  end_tokens: frozenset[int]
  mesh: jax.sharding.Mesh
  batch: int = 64  # slots
  step: int | None = None  # of the checkpoint; None: a public model

  @classmethod
  def load(
    cls,
    directory: str | pathlib.Path,
    dtype: str = "float32",
    batch: int = 64,
    tensor: int = 1,
    step: str | int = "latest",
  ) -> Self:
    """Loads a language model as `LanguageModel.load`.

    Args:
      tensor: devices of this host that share a copy of the model.
      step: a run's checkpoint, as in `Scorer.load`.

    Raises:
      ValueError, OSError: as `LanguageModel.load`; or `tensor` does not divide the devices.
    """
    devices = jax.local_devices()
    if len(devices) % tensor:
      raise ValueError(f"--tensor={tensor} does not divide the {len(devices)} devices of this host")
    mesh = sharding_lib.make_mesh(config_lib.Mesh(data=-1, fsdp=1, tensor=tensor), devices)
    model = LanguageModel.load(directory, mesh, dtype, step)
    ends = frozenset(_end_tokens(pathlib.Path(directory)) | {model.tokenizer.eos_id} - {None})
    return cls.of(model.params, model.config, model.tokenizer, ends, mesh, batch, model.step)

  @classmethod
  def of(
    cls,
    params: Any,
    config: config_lib.Model,
    tokenizer: Tokenizer,
    end_tokens: frozenset[int],
    mesh: jax.sharding.Mesh,
    batch: int = 64,
    step: int | None = None,
  ) -> Self:
    """Makes a sampler from the parameters of a `StepScorer`.

    Drops the embedding's rows beyond the tokenizer's vocabulary, which are padding without text.
    """
    config = dataclasses.replace(config, attention="auto")
    with jax.set_mesh(mesh):
      weights = cached_decoder.prepare(params, config, tokenizer.vocab_size)
    return cls(weights, config, tokenizer, end_tokens, mesh, batch, step)

  def facts(self) -> dict[str, Any]:
    """Implements `Engine.facts`."""
    return {
      "step": self.step,
      "dtype": self.config.dtype,
      "model": dataclasses.asdict(self.config),
      "weights": checkpoint_lib.digest(self.weights),
      "tokenizer": self.tokenizer.hash,
      "end_tokens": sorted(self.end_tokens),
    }

  def generate(
    self, prompts: Sequence[Prompt], n: int, sampling: Sampling, limits: Limits
  ) -> Iterator[Completion]:
    """Implements `Engine.generate`.

    Raises:
      PromptError: as `encode`, before any completion.
    """
    if not prompts:
      return
    encoded = self.encode(prompts)
    self.check_length(max(map(len, encoded)) + limits.max_new_tokens)
    B, T = self.batch, min(limits.max_new_tokens, RING)
    chains = _chains(encoded, max(B // 4 // n, 1))
    # Samples start in order, so two contexts beyond those that fill the slots leave room for
    # stragglers.  Each size is compiled, so sizes follow the mean chain, in powers of two.
    mean = power_of_two(len(prompts) // len(chains) + 1) // 2
    G = min(-(-B // (n * mean)) + 2, power_of_two(len(chains)), B)
    E = min(n * power_of_two(max(map(len, chains))), B)
    queue = collections.deque(
      (j, i, k) for j, chain in enumerate(chains) for i in chain for k in range(n)
    )
    slots: list[_Sample | None] = [None] * B
    contexts: dict[int, int] = {}  # group of each unfinished chain
    free, left = [*range(G)], collections.Counter({j: n * len(c) for j, c in enumerate(chains)})
    last = jnp.zeros(B, jnp.int32)  # the tokens of the last step, on the device
    may_end = self.ends_by(stop[-1] for stop in limits.stop)
    # A step reads all places, so short prompts come first, and contexts grow for long ones.
    with jax.set_mesh(self.mesh):
      cache = cache_lib.empty(self.config, B, G, _places(encoded[chains[0][0]]), T)
    for index in itertools.count():
      with jax.set_mesh(self.mesh):  # not around a yield: the caller would have this mesh too
        for b in [b for b in range(B) if slots[b] is None]:
          if not queue or (queue[0][0] not in contexts and not free):
            break
          j, i, k = queue.popleft()
          if j not in contexts:
            contexts[j] = free.pop()
            first = encoded[chains[j][0]]
            cache = self.read(cache, contexts[j], first, _places(first))
          slots[b] = _Sample(i, k, j, contexts[j], prompts[i].seed, encoded[i])
        writing = [(b, sample) for b, sample in enumerate(slots) if sample]
        if not writing:
          return
        if max(len(sample.tokens) for _, sample in writing) == T:
          cache, T = cache_lib.lengthened(cache), 2 * T
        given = (self.weights, cache, index % T, slots_of(slots, G, E), last)
        last, log_probs, cache = self.decode(*given, sampling=sampling)
      tokens, log_probs = np.asarray(last), np.asarray(log_probs)
      refuse_nan(log_probs[[b for b, _ in writing]])
      for b, sample in writing:
        sample.tokens.append(int(tokens[b]))
        sample.log_probs.append(float(log_probs[b]))
        if completion := self._completion(sample, limits, may_end):
          slots[b] = None
          left[sample.chain] -= 1
          if not left[sample.chain]:
            free.append(contexts.pop(sample.chain))
          yield completion

  def check_length(self, longest: int) -> None:
    """Warns if the longest prompt and sample may exceed the model's context."""
    if 0 < self.config.context_length < longest:
      warnings.warn(
        f"a prompt and its sample may have {longest:,} tokens, more than the model's context of "
        f"{self.config.context_length:,}: later tokens may mean nothing",
        stacklevel=3,
      )

  def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Returns the tokens of each prompt.

    Raises:
      PromptError: prompts are empty or too long, or have tokens that the model lacks.
    """
    rows = self.weights["embedding"].shape[0]
    encoded = [prompts_lib.encode(prompt, self.tokenizer) for prompt in prompts]
    expected = f"expected 1 to {MAX_PROMPT:,}, each below the {rows} rows of the embedding"
    refused = {
      i: f"a prompt of {len(ids):,} tokens, {ids[:5]}...: {expected}"
      for i, ids in enumerate(encoded)
      if not 0 < len(ids) <= MAX_PROMPT or max(ids) >= rows
    }
    if refused:
      raise PromptError(refused)
    return encoded

  def _completion(
    self, sample: _Sample, limits: Limits, may_end: Callable[[int], bool]
  ) -> Completion | None:
    """Returns the completion if the sample's last token ends it.

    Args:
      may_end: from `ends_by`; the text is decoded only if its last token may end it.
    """
    full = len(sample.tokens) == limits.max_new_tokens
    if not (full or may_end(sample.tokens[-1])):
      return None
    ended = sample.tokens[-1] in self.end_tokens
    text = self.tokenizer.decode(sample.tokens[: -1 if ended else None])
    if stop_end := limits.stop_end(text):
      text, ended = text[:stop_end], True
    if not (ended or full):
      return None
    end = "stop" if ended else "length"
    tokens, log_probs = tuple(sample.tokens), tuple(sample.log_probs)
    return Completion(sample.prompt, sample.sample, text, end, tokens, log_probs, len(tokens))

  def ends_by(self, letters: Iterable[str]) -> Callable[[int], bool]:
    """Returns a filter for tokens that may end a text: end tokens, or any with one of `letters`."""
    letters = {*letters}
    # A token decoded alone may lose its spaces, and part of a character's bytes decodes to another
    # character.
    if any(x != "\n" and (x.isspace() or not x.isascii()) for x in letters):
      return lambda token: True
    decode, ends = self.tokenizer.decode, self.end_tokens
    return functools.cache(lambda token: token in ends or bool(letters & {*decode([token])}))

  def read(self, cache: Cache, group: int, prompt: Sequence[int], C: int) -> Cache:
    """Returns the cache with a prompt, without its last token, in a context of C places or more."""
    if cache.positions.shape[1] < C:
      cache = cache_lib.grown(cache, C)
    padded = np.zeros(C, np.int32)
    padded[: len(prompt) - 1] = prompt[:-1]
    return cached_decoder.prefill(self.weights, cache, group, padded, c=self.config)

  @functools.cached_property
  def decode(self):
    """The compiled program of a decoding step."""
    return decoding_step(self.config, config_lib.Tpu(), self.mesh.devices.flat[0])


def slots_of(samples: Sequence[_Sample | None], G: int, E: int) -> Slots:
  """Returns the input of a decoding step, of G contexts with at most E slots each."""
  members, count = np.full((G, E), len(samples), np.int32), [0] * G
  tokens, seen, own_length, seed, number = np.zeros((5, len(samples)), np.int32)
  for b, sample in enumerate(samples):
    if sample is None:
      continue
    members[sample.group, count[sample.group]] = b
    count[sample.group] += 1
    tokens[b], seen[b] = sample.prompt_tokens[-1], len(sample.prompt_tokens) - 1
    own_length[b], seed[b], number[b] = len(sample.tokens), sample.seed, sample.sample
  return Slots(tokens, seen, own_length, members, seed, number, place=own_length)


@functools.lru_cache(8)  # samplers of one architecture share the compiled program
def decoding_step(c: config_lib.Model, tpu: config_lib.Tpu, device: jax.Device):
  """Returns the function `decode`, below, compiled with the options for `device`."""
  options = compiler_options.of(tpu, device, "sample")

  @functools.partial(
    jax.jit, donate_argnums=1, static_argnames="sampling", compiler_options=options
  )
  def decode(
    weights: Weights,
    cache: Cache,
    index: jax.Array,
    slots: Slots,
    last: jax.Array,
    *,
    sampling: Sampling,
  ) -> tuple[jax.Array, jax.Array, Cache]:
    """Returns the next token of each slot, its log-probability, and the cache.

    Args:
      index: int32 `[]`, the place of the rings to write to.
      slots: its `tokens` are read by new slots, those whose `own_length` is 0.
      last: int32 `[B]`, the tokens of the last step, which the other slots read.
    """
    numbers = jax.vmap(uniform)(slots.seed, slots.sample, slots.place)
    tokens = jnp.where(slots.own_length == 0, slots.tokens, last)
    slots = dataclasses.replace(slots, tokens=tokens)
    logits, cache = cached_decoder.step(weights, cache, index, slots, c=c)
    tokens, log_probs = sampling_lib.choose(logits, numbers, sampling)
    if slots.likeliest is not None:
      likeliest = sampling_lib.likeliest(logits).astype(jnp.int32)
      tokens = jnp.where(slots.likeliest, likeliest, tokens)
    return tokens, log_probs, cache

  return decode


def _end_tokens(directory: pathlib.Path) -> set[int]:
  """Returns the `eos_token_id`s of generation_config.json and config.json."""
  ends: set[int] = set()
  for name in ("generation_config.json", "config.json"):
    if (directory / name).is_file():
      value = json_lines.document(directory / name).get("eos_token_id")
      ends |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
  return ends


def _chains(prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
  """Groups prompts that share a context: each prompt is a prefix of its group's first.

  Args:
    most: limit of prompts in a group, as samples of a context attend together, padded to the
      largest group.

  Returns:
    The groups, as indices of prompts, sorted by the sizes of their contexts, then by first prompt.
  """
  order, chains = sorted(range(len(prompts)), key=lambda i: prompts[i], reverse=True), []
  for i in order:  # in this order a prompt follows those of which it is a prefix
    first = prompts[chains[-1][0]] if chains else ()
    if chains and len(chains[-1]) < most and [*first[: len(prompts[i])]] == [*prompts[i]]:
      chains[-1].append(i)
    else:
      chains.append([i])
  return sorted(chains, key=lambda chain: (_places(prompts[chain[0]]), min(chain)))


def _places(prompt: Sequence[int]) -> int:
  """Returns the size of a prompt's context, one of few; a step encodes the last token."""
  return size(len(prompt) - 1, LEAST_PLACES)


def uniform(seed: jax.Array, sample: jax.Array, place: jax.Array) -> jax.Array:
  """Returns the random number of a token, in [0, 1), from its seed, its sample and its place."""
  key = jax.random.fold_in(jax.random.key(seed), sample)
  return jax.random.uniform(jax.random.fold_in(key, place))


def refuse_nan(log_probs: np.ndarray) -> None:
  """Raises ValueError if the language model gave NaN for a token."""
  if np.isnan(log_probs).any():
    raise ValueError("the language model gives NaN: damaged weights, or too large for its dtype")
