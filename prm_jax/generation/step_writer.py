"""The language model of a search: it writes a step in each lane of each problem, all in one batch.

A problem has some lanes and a context of the cache, which stores the lanes' common tokens once.
The tokens of a step are in its lane's ring until the step ends, and are copied to the context if
the lane continues.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from prm_jax import config as config_lib
from prm_jax.generation import cache as cache_lib
from prm_jax.generation import prompts as prompts_lib
from prm_jax.generation.cached_decoder import Slots
from prm_jax.generation.engines import End, Limits
from prm_jax.generation.places import Places, size
from prm_jax.generation.sampler import LEAST_PLACES, Sampler, refuse_nan
from prm_jax.generation.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Lane:
  """A solution, unfinished or ended."""

  stream: int  # of random numbers
  tree: int  # subtree of rule "dvts"
  tokens: tuple[int, ...] = ()  # after the prompt
  text: str = ""
  steps: tuple[str, ...] = ()
  probabilities: tuple[np.ndarray, ...] = ()  # of classes, `[K, C]` for each step
  right: tuple[float, ...] = ()  # P(right) of each step, the mean over heads
  log_prob: float = 0.0  # of all tokens
  end: End | None = None  # None: unfinished
  score: float = 0.0  # the score that the rule uses


@dataclasses.dataclass(frozen=True)
class Settings(config_lib.Checked):
  """The settings that determine a problem's solutions, besides the models and a search's rule."""

  n: config_lib.Count = 16  # samples, or lanes of a search
  sampling: Sampling = Sampling()
  limits: Limits = Limits()
  seed: config_lib.Whole = 0  # from which those of prompts are derived
  form: prompts_lib.Form = "plain"
  steps: prompts_lib.Steps = "lines"


@dataclasses.dataclass
class _Step:
  """The step that a lane writes, and the steps ahead of it."""

  # Tokens of the finished parts: the step itself, then each step ahead.
  parts: list[list[int]] = dataclasses.field(default_factory=list)
  log_prob: float = 0.0
  end: End | None = None  # of the solution


@dataclasses.dataclass
class _Context:
  """A problem that occupies a context."""

  prompt: list[int]
  seed: int
  places: Places
  lanes: Sequence[Lane]
  steps: list[_Step]
  begun: int  # the decoding step at which these steps began
  spent: collections.Counter  # tokens, as in `search.Found`


class StepWriter:
  """A language model that writes the steps of `contexts` problems with `n` lanes each."""

  def __init__(
    self,
    sampler: Sampler,
    contexts: int,
    prompt: int,
    s: Settings,
    max_step_tokens: int,
    steps_ahead: int = 0,
  ):
    """Makes a writer that has no problems yet.

    Args:
      prompt: limit of a prompt's tokens.
      steps_ahead: further steps of likeliest tokens, only for the score.
    """
    self.sampler, self.s, self._lanes = sampler, s, s.n
    self.max_step_tokens, self.steps_ahead = max_step_tokens, steps_ahead
    self._prompt = -(-prompt // LEAST_PLACES) * LEAST_PLACES
    self._ring = max_step_tokens * (1 + steps_ahead)
    self._contexts: dict[int, _Context] = {}
    self._index = 0  # decoding steps so far
    # Steps end at line breaks; solutions also at stop strings.
    self._may_end = sampler.ends_by(["\n", *(stop[-1] for stop in s.limits.stop)])
    rows = contexts * s.n
    with jax.set_mesh(sampler.mesh):
      self._cache = cache_lib.empty(sampler.config, rows, contexts, self._prompt, self._ring)
    self._seen = np.zeros((rows, self._prompt), bool)
    self._last = jnp.zeros(rows, jnp.int32)
    self._writing = np.zeros(rows, bool)  # whether each lane writes
    # Each lane's first token to read, the index in the lane of the first to write, seed and stream.
    self._first, self._place, self._seed, self._stream = np.zeros((4, rows), np.int32)
    # Of the step so far: its tokens, their log-probability, count, and count in finished parts.
    self._tokens, self._log_prob = np.zeros((rows, self._ring), np.int32), np.zeros(rows)
    self._count, self._over = np.zeros((2, rows), np.int32)

  def begin(self, g: int, prompt: list[int], seed: int, lanes: Sequence[Lane]) -> None:
    """Puts a problem into a context; its lanes begin their first steps."""
    places = Places()
    places.add((*prompt[:-1],))
    with jax.set_mesh(self.sampler.mesh):
      self._cache = self.sampler.read(self._cache, g, prompt, self._prompt)
    spent = collections.Counter(read=len(prompt) - 1)
    self._contexts[g] = _Context(prompt, seed, places, [], [], 0, spent)
    self._begin_steps(g, lanes)

  def end(self, g: int) -> collections.Counter:
    """Frees a context and returns the tokens that the model spent on it."""
    return self._contexts.pop(g).spent

  def write(self) -> list[int]:
    """Decodes a token for each unfinished step; returns the contexts to score now, if any."""
    with jax.set_mesh(self.sampler.mesh):
      self._last, log_probs, self._cache = self.sampler.decode(
        self.sampler.weights,
        self._cache,
        self._index % self._ring,
        self._state(),
        self._last,
        sampling=self.s.sampling,
      )
    self._index += 1
    now = np.flatnonzero(self._writing)
    tokens, log_probs = np.asarray(self._last)[now], np.asarray(log_probs)[now]
    refuse_nan(log_probs)
    self._tokens[now, self._count[now]] = tokens
    self._log_prob[now] += np.where(self._over[now], 0, log_probs)
    self._count[now] += 1
    may_end = np.fromiter(map(self._may_end, tokens.tolist()), bool, len(now))
    full = self._full(now)
    for i in np.flatnonzero(may_end | full).tolist():
      self._end(int(now[i]), bool(full[i]))
    writing = self._writing.reshape(-1, self._lanes).any(1)
    ready = [g for g in self._contexts if not writing[g]]
    # Contexts are scored together while others write, at the latest before a ring wraps around.
    late = any(self._index - self._contexts[g].begun >= self._ring for g in ready)
    enough = len(ready) >= max(len(self._contexts) // 4, 1)
    return ready if enough or late else []

  def written(self, g: int) -> list[tuple[Lane, tuple[str, ...]]]:
    """Returns each lane of a context with its new step, and the lane's steps with those ahead.

    New steps have no probabilities yet.  Lanes that had ended before are unchanged.
    """
    context, out = self._contexts[g], []
    for lane, step in zip(context.lanes, context.steps):
      lane = self._grown(lane, step) if lane.end is None else lane
      out.append((lane, self._ahead(lane, step)))
    return out

  def go_on(self, continued: dict[int, tuple[Sequence[Lane], Sequence[int]]]) -> None:
    """Begins the next steps.

    Args:
      continued: by context, the next lanes and the index of each one's parent among the present
        lanes.
    """
    moved: list[np.ndarray] = []
    for g, (lanes, parents) in continued.items():
      moved += self._moved(g, {k: lane for k, lane in zip(parents, lanes) if lane.end is None})
    largest = max((context.places.size for context in self._contexts.values()), default=0)
    with jax.set_mesh(self.sampler.mesh):
      if largest > (C := self._seen.shape[1]):
        self._seen = np.pad(self._seen, [(0, 0), (0, size(largest, 64) - C)])
        self._cache = cache_lib.grown(self._cache, self._seen.shape[1])
      self._cache = cache_lib.keep(self._cache, moved)
    for g, (lanes, _) in continued.items():
      self._begin_steps(g, lanes)

  def _begin_steps(self, g: int, lanes: Sequence[Lane]) -> None:
    """Begins a step in each lane of a context."""
    context, rows = self._contexts[g], slice(g * self._lanes, (g + 1) * self._lanes)
    context.lanes, context.steps, context.begun = lanes, [_Step() for _ in lanes], self._index
    self._seen = self._seen.copy()  # the program may still read the old array
    self._seen[rows] = False
    for b, lane in enumerate(lanes, rows.start):
      path = (*context.prompt, *lane.tokens)
      self._seen[b, context.places.find(path[:-1])] = True
      self._first[b], self._place[b] = path[-1], len(lane.tokens)
      self._writing[b], self._stream[b] = lane.end is None, lane.stream
    self._seed[rows] = context.seed
    self._count[rows] = self._over[rows] = self._log_prob[rows] = 0

  def _moved(self, g: int, lanes: dict[int, Lane]) -> list[np.ndarray]:
    """Returns the `cache.moves` of the tokens that the next lanes need, from rings to the context.

    The tokens get places in the context; places that no next lane needs become free.

    Args:
      lanes: unfinished next lanes, by the index of their parent.
    """
    context, moved = self._contexts[g], []
    paths = {k: (*context.prompt, *lane.tokens)[:-1] for k, lane in lanes.items()}
    context.places.keep(paths.values())
    for k, path in paths.items():
      # Position of the token that the step read first.
      first = len(context.prompt) - 1 + len(context.lanes[k].tokens)
      places = context.places.add(path)[first:]
      ring = (context.begun + np.arange(len(places))) % self._ring
      moved.append(cache_lib.moves(g, places, g * self._lanes + k, ring, first))
    return moved

  def _state(self) -> Slots:
    """Returns the input of `Sampler.decode`; a lane that waits or is idle reads token 0."""
    fields = (self._first, self._count, self._seed, self._stream, self._place + self._count)
    first, count, seed, stream, place = (np.where(self._writing, x, 0) for x in fields)
    ahead = self._writing & (self._over > 0) if self.steps_ahead else None
    return Slots(first, self._seen, count, None, seed, stream, place, ahead)

  def _full(self, rows: np.ndarray) -> np.ndarray:
    """Returns whether the last parts of these lanes, or their solutions, are at their limits."""
    part, ahead = self._count[rows] - self._over[rows], self._over[rows] > 0
    solution = self._place[rows] + part == self.s.limits.max_new_tokens
    return (part == self.max_step_tokens) | (solution & ~ahead)

  def _end(self, b: int, full: bool) -> None:
    """Ends a lane's part, step and solution, each if the last token ends it."""
    g, k = divmod(b, self._lanes)
    context = self._contexts[g]
    lane, step, count = context.lanes[k], context.steps[k], int(self._count[b])
    part, ahead = self._tokens[b, self._over[b] : count].tolist(), bool(step.parts)
    ended, complete = part[-1] in self.sampler.end_tokens, self._ends_step(part)
    if self.s.limits.stop:
      ended |= self._text((*lane.tokens, *self._tokens[b, :count].tolist()))[1]
    if not (ended or full or complete):
      return
    last = not ahead and self._place[b] + count == self.s.limits.max_new_tokens
    cut = full and (last or not complete)
    if not ahead:
      step.end = "stop" if ended else "length" if cut else None
      step.log_prob = float(self._log_prob[b])
    step.parts.append(part)
    self._over[b] = count
    if ended or cut or len(step.parts) > self.steps_ahead:
      self._writing[b] = False
      prefix = len(context.prompt) + len(lane.tokens)
      context.spent.update(generated=count, read=count)
      context.spent["read_from_start"] += prefix + count - 1  # the last token is not read

  def _ends_step(self, part: Sequence[int]) -> bool:
    """Returns whether a part has a whole step and the separator after it."""
    return prompts_lib.ends_step(self.sampler.tokenizer.decode(part), self.s.steps)

  def _grown(self, lane: Lane, step: _Step) -> Lane:
    """Returns the lane with its new step."""
    tokens, end = (*lane.tokens, *step.parts[0]), step.end
    text, stopped = self._text(tokens)
    end = "stop" if stopped else end
    text = text if end else text.rstrip("\ufffd")  # a letter begun belongs to the next step
    # One step, as `prompts.split` writes it, even if a token has letters after a line break.
    new = "\n".join(prompts_lib.split(text[len(lane.text) :], self.s.steps))
    steps = (*lane.steps, new) if new else lane.steps
    if not steps and end:  # an empty solution is never chosen
      steps, end = (" ",), "length"
    log_prob = lane.log_prob + step.log_prob
    return dataclasses.replace(
      lane, tokens=tokens, text=text, steps=steps, log_prob=log_prob, end=end
    )

  def _ahead(self, lane: Lane, step: _Step) -> tuple[str, ...]:
    """Returns the steps of a lane and those ahead, up to a stop string."""
    if lane.end:
      return lane.steps
    text, _ = self._text((*lane.tokens, *itertools.chain(*step.parts[1:])))
    ahead = text[len(lane.text) :].rstrip("\ufffd")  # as `_grown`
    return (*lane.steps, *prompts_lib.split(ahead, self.s.steps))

  def _text(self, tokens: Sequence[int]) -> tuple[str, bool]:
    """Returns the text of a solution, and whether a stop string ends it."""
    end = -1 if tokens[-1] in self.sampler.end_tokens else None
    text = self.sampler.tokenizer.decode(tokens[:end])
    stop_end = self.s.limits.stop_end(text)
    return prompts_lib.solution(text[:stop_end], self.s.form), stop_end is not None
