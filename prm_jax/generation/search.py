"""Search: solutions of all problems grow step by step, and a reward model says which go on.

A problem has `n` lanes, each a solution under way.  The language model writes a step in each lane,
the reward model scores the new steps, and a rule (`selection`) says which lanes go on, and how
often.  All problems under way are one batch: a problem is scored when its lanes have a step each,
while the others write on.  Both models store a prefix once for all lanes that share it.

Each lane has a stream of random numbers.  A lane that goes on keeps its stream, and a copy gets the
next unused one, so that the solutions of a problem do not depend on the other problems.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from prm_jax import config as config_lib
from prm_jax.generation import cached_decoder, selection
from prm_jax.generation import prompts as prompts_lib
from prm_jax.generation import sampling as sampling_lib
from prm_jax.generation.cached_decoder import Slots
from prm_jax.generation.cached_scorer import CachedScorer, Solution, grow, keep, power_of_two
from prm_jax.generation.engines import End, Limits, Prompt
from prm_jax.generation.places import Places
from prm_jax.generation.sampler import PROMPT_MULTIPLE, Sampler, uniform
from prm_jax.generation.sampling import Sampling

REDUCTIONS = {  # P(right) of the steps so far to the score of a solution under way
  "last": lambda p: p[-1],
  "min": np.min,
  "mean": np.mean,
  "product": np.prod,
}


@dataclasses.dataclass(frozen=True)
class Settings(config_lib.Checked):
  """How to search."""

  rule: Literal["best_of_n", "beam", "dvts", "lookahead", "particles"] = "beam"
  n: config_lib.Count = 16  # lanes of a problem
  expansions: config_lib.Count = 4  # of each solution that goes on, in beam, dvts and lookahead
  reduction: Literal["last", "min", "mean", "product"] = "last"
  lookahead: config_lib.Count = 1  # steps, likeliest tokens, of rule "lookahead"
  max_steps: config_lib.Count = 40
  max_step_tokens: Annotated[int, msgspec.Meta(ge=2)] = 256

  def __post_init__(self):
    if self.rule in ("beam", "dvts", "lookahead") and self.n % self.expansions:
      raise ValueError(f"n={self.n} lanes are no multiple of expansions={self.expansions}")

  @property
  def steps_ahead(self) -> int:
    return self.lookahead if self.rule == "lookahead" else 0


@dataclasses.dataclass(frozen=True)
class Lane:
  """A solution, under way or ended."""

  stream: int  # of random numbers
  tree: int  # of rule "dvts"
  tokens: tuple[int, ...] = ()  # after the prompt
  text: str = ""
  steps: tuple[str, ...] = ()
  probabilities: tuple[np.ndarray, ...] = ()  # of classes, `[K, C]` for each step
  log_prob: float = 0.0  # of all tokens
  end: End | None = None  # None: it goes on
  score: float = 0.0  # by which the rule chose


@dataclasses.dataclass
class _Step:
  """The step that a lane writes."""

  parts: list[list[int]]  # its tokens, and those of each step that is looked ahead
  log_prob: float = 0.0
  end: End | None = None  # of the solution
  over: bool = False

  @property
  def count(self) -> int:
    return sum(map(len, self.parts))


@dataclasses.dataclass
class _Problem:
  """A problem under way, in a context of both models."""

  number: int
  problem: str
  seed: int
  prompt: list[int]
  places: Places
  lanes: list[Lane]
  writing: list[_Step]
  begun: int  # the decoding step at which these steps begin
  streams: int  # that are in use
  found: list[Lane] = dataclasses.field(default_factory=list)  # what has ended
  rounds: int = 0
  spent: collections.Counter = dataclasses.field(default_factory=collections.Counter)

  @property
  def ready(self) -> bool:
    return all(step.over for step in self.writing)


@dataclasses.dataclass(frozen=True)
class Found:
  """What a search has found for a prompt.

  `spent` counts tokens: `generated` and `scored` by the search, and what the same solutions take
  when each is scored from its start after every step (`scored_from_start`) and its prefix is read
  by the language model again (`read_from_start`).
  """

  prompt: int  # its number among those given
  lanes: list[Lane]  # at most n: finished ones, best first; then such as were cut off
  spent: dict[str, int]


@dataclasses.dataclass
class Search:
  """A language model and the reward model that guides it."""

  sampler: Sampler
  scorer: CachedScorer
  s: Settings
  sampling: Sampling
  limits: Limits
  form: prompts_lib.Form = "plain"
  steps: prompts_lib.Steps = "lines"

  def run(self, prompts: Sequence[Prompt]) -> Iterator[Found]:
    """Searches for solutions of all prompts; each is given as soon as it is done.

    Raises:
      ValueError: a prompt has no tokens or unknown ones, or the reward model cannot read a step.
    """
    G, n, T = len(self.scorer.places), self.s.n, self._ring
    encoded = [self.sampler.encode(prompt) for prompt in prompts]
    longest = max(map(len, encoded), default=1)
    C = self._prompt_size = -(-longest // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    waiting = collections.deque(range(len(prompts)))
    problems: list[_Problem | None] = [None] * G
    with jax.set_mesh(self.sampler.mesh):
      self._cache = self.sampler.empty(G * n, G, C, T)
      self._seen = np.zeros((G * n, C), bool)
      last = jnp.zeros(G * n, jnp.int32)
      fresh = np.ones(G * n, bool)
      for index in itertools.count():
        for g in [g for g in range(G) if problems[g] is None and waiting]:
          i = waiting.popleft()
          problems[g] = self._begin(g, i, prompts[i], encoded[i], index)
          fresh[g * n : (g + 1) * n] = True
        if not any(problems):
          return
        state = self._state(problems)
        last, log_probs, self._cache = self._decode(
          self.sampler.weights,
          self._cache,
          index % T,
          state,
          self._seen,
          last,
          fresh,
          sampling=self.sampling,
        )
        fresh[:] = False
        self._write(problems, np.asarray(last), np.asarray(log_probs))
        ready = [g for g, each in enumerate(problems) if each and each.ready]
        under_way = sum(each is not None for each in problems)
        # Scored together while others write; at the latest before the ring goes round.
        late = any(index + 1 - problems[g].begun >= T for g in ready)
        if len(ready) >= max(under_way // 4, 1) or late:
          for g in self._select({g: problems[g] for g in ready}, index + 1):
            yield self._found(problems[g])
            problems[g] = None
          for g in ready:
            fresh[g * n : (g + 1) * n] = True

  @property
  def _ring(self) -> int:
    return self.s.max_step_tokens * (1 + self.s.steps_ahead)

  def _begin(self, g: int, i: int, prompt: Prompt, tokens: list[int], index: int) -> _Problem:
    places = Places()
    places.add(tokens[:-1])
    n, s = self.s.n, self.s
    lanes = [Lane(k, k // s.expansions) for k in range(n)]
    found = _Problem(
      i, prompt.problem, prompt.seed, tokens, places, lanes, [_Step([[]]) for _ in lanes], index, n
    )
    padded = np.zeros(self._prompt_size, np.int32)
    padded[: len(tokens) - 1] = tokens[:-1]
    self._cache = self.sampler.prefill(self.sampler.weights, self._cache, g, padded)
    self.scorer.places[g] = Places()
    self._see(g, found)
    return found

  def _see(self, g: int, problem: _Problem) -> None:
    """What the lanes of a problem see of its context."""
    seen = np.zeros((self.s.n, self._seen.shape[1]), bool)
    for k, lane in enumerate(problem.lanes):
      seen[k, problem.places.find([*problem.prompt, *lane.tokens][:-1])] = True
    self._seen[g * self.s.n : (g + 1) * self.s.n] = seen

  def _state(self, problems: Sequence[_Problem | None]) -> dict[str, np.ndarray]:
    """The lanes for `_decode`; one that waits or is idle reads token 0."""
    rows = np.zeros((len(problems), self.s.n, 7), np.int32)
    for g, problem in enumerate(problems):
      for k, (lane, step) in enumerate(zip(problem.lanes, problem.writing)) if problem else ():
        if not step.over:
          first, count = [*problem.prompt[-1:], *lane.tokens][-1], step.count
          place = len(lane.tokens) + count
          position, likeliest = len(problem.prompt) - 1 + place, len(step.parts) > 1
          rows[g, k] = first, position, count, problem.seed, lane.stream, place, likeliest
    names = ("tokens", "positions", "own_length", "seed", "stream", "place", "likeliest")
    return dict(zip(names, rows.reshape(-1, 7).T))

  def _write(
    self, problems: Sequence[_Problem | None], chosen: np.ndarray, log_probs: np.ndarray
  ) -> None:
    """Adds the chosen tokens to the steps under way, and ends those that are over."""
    for g, problem in enumerate(problems):
      for k, step in enumerate(problem.writing) if problem else ():
        if not step.over:
          b = g * self.s.n + k
          step.parts[-1].append(int(chosen[b]))
          problem.spent["generated"] += 1
          if len(step.parts) == 1:
            step.log_prob += float(log_probs[b])
          self._end(problem.lanes[k], step)

  def _end(self, lane: Lane, step: _Step) -> None:
    """Notes whether the last token has ended the step, and the solution."""
    part, ahead = step.parts[-1], len(step.parts) > 1
    ended = part[-1] in self.sampler.end_tokens
    total = len(lane.tokens) + len(part)
    full = len(part) == self.s.max_step_tokens
    full |= not ahead and total == self.limits.max_new_tokens
    if not (ended or full or self._ends_step(part)):
      return
    if not ahead:
      step.end = "stop" if ended else "length" if full else None
    step.over = ended or full or len(step.parts) > self.s.steps_ahead
    if not step.over:
      step.parts.append([])

  def _ends_step(self, part: Sequence[int]) -> bool:
    """Whether the last token is that of a line break after which a new step begins."""
    if not self._breaks(part[-1]):
      return False
    text = self.sampler.tokenizer.decode(part).lstrip()
    return ("\n" if self.steps == "lines" else "\n\n") in text

  @functools.cached_property
  def _breaks(self):
    """Whether a token has a line break."""
    return functools.cache(lambda token: "\n" in self.sampler.tokenizer.decode([token]))

  def _grown(self, lane: Lane, step: _Step) -> Lane:
    """The lane with its step, which has no probabilities yet."""
    tokens, end = (*lane.tokens, *step.parts[0]), step.end
    text = self.sampler.tokenizer.decode(tokens[: -1 if end == "stop" else None])
    if stops := [text.index(stop) + len(stop) for stop in self.limits.stop if stop in text]:
      text, end = text[: min(stops)], "stop"
    new = prompts_lib.solution(text, self.form)[len(lane.text) :].strip()
    steps = (*lane.steps, new) if new else lane.steps
    if not steps and end == "stop":
      end = "length"  # nothing was written: there is no solution to choose
    log_prob = lane.log_prob + step.log_prob
    return dataclasses.replace(
      lane, tokens=tokens, text=text, steps=steps, log_prob=log_prob, end=end
    )

  def _ahead(self, lane: Lane, step: _Step) -> tuple[str, ...]:
    """The steps of a lane and those that were looked ahead."""
    parts = [[t for t in part if t not in self.sampler.end_tokens] for part in step.parts[1:]]
    texts = [self.sampler.tokenizer.decode(part).strip() for part in parts]
    return (*lane.steps, *filter(None, texts))

  def _select(self, ready: dict[int, _Problem], index: int) -> list[int]:
    """Scores the new steps of these problems and begins the next; the contexts that are done."""
    grown: dict[int, list[Lane]] = {}
    ahead: dict[int, list[tuple[str, ...]]] = {}
    for g, p in ready.items():
      pairs = [*zip(p.lanes, p.writing)]
      grown[g] = [self._grown(*pair) if pair[0].end is None else pair[0] for pair in pairs]
      ahead[g] = [self._ahead(lane, step) for lane, step in zip(grown[g], p.writing)]
    self._score(ready, grown, ahead)
    done, moved, kept = [], {}, {}
    for g, p in ready.items():
      parents = self._parents(p, grown[g])
      if not parents:
        done.append(g)
        continue
      kept[g] = [(p.problem, grown[g][k].steps) for k in parents if grown[g][k].steps]
      moved |= self._moved(g, p, grown[g], parents)
      p.lanes = self._next(p, grown[g], parents)
      p.writing = [_Step([[]], over=lane.end is not None) for lane in p.lanes]
      p.begun = index
    self.scorer.keep(kept)
    self._keep(moved)
    for g in kept:
      self._see(g, ready[g])
    return done

  def _score(
    self,
    ready: dict[int, _Problem],
    grown: dict[int, list[Lane]],
    ahead: dict[int, list[tuple[str, ...]]],
  ) -> None:
    """Adds the probabilities of new steps to the lanes, and the score that the rule sees."""
    asked: dict[int, dict[Solution, None]] = {}
    for g, p in ready.items():
      for old, new, further, step in zip(p.lanes, grown[g], ahead[g], p.writing):
        if old.end is not None or new.end == "length":
          continue
        p.spent["read_from_start"] += len(p.prompt) + len(old.tokens) + step.count
        for steps in dict.fromkeys((new.steps, further)):
          if len(steps) > len(old.steps):
            asked.setdefault(g, {})[p.problem, steps] = None
            p.spent["scored_from_start"] += self.scorer.length(p.problem, steps)
    before = {g: self.scorer.encoded[g] for g in ready}
    found = self.scorer.probabilities({g: [*several] for g, several in asked.items()})
    known = {(g, *each): p for g in found for each, p in zip(asked[g], found[g])}
    for g, p in ready.items():
      p.spent["scored"] += self.scorer.encoded[g] - before[g]
      for k, (new, further) in enumerate(zip(grown[g], ahead[g])):
        if p.lanes[k].end is not None or new.end == "length":
          continue
        probabilities = new.probabilities
        if len(new.steps) > len(probabilities):
          probabilities = (*probabilities, known[g, p.problem, new.steps])
        seen = [*probabilities, *([known[g, p.problem, further]] if further != new.steps else [])]
        right = np.array([each[:, self.scorer.right_classes].sum(-1).mean() for each in seen])
        score = float(REDUCTIONS[self.s.reduction](right))
        grown[g][k] = dataclasses.replace(new, probabilities=probabilities, score=score)

  def _parents(self, p: _Problem, lanes: list[Lane]) -> list[int]:
    """Indices of the lanes that go on; what has ended for good is found."""
    p.rounds += 1
    alive = [k for k, lane in enumerate(lanes) if lane.end != "length"]
    p.found += [lane for lane in lanes if lane.end == "length"]
    scored = selection.Scored(
      np.array([lanes[k].score for k in alive]),
      np.array([lanes[k].end is not None for k in alive], bool),
      np.array([lanes[k].tree for k in alive], int),
    )
    rng = np.random.default_rng([p.seed, p.rounds])
    rule = selection.RULES[self.s.rule]
    parents = [*rule(scored, self.s.n, self.s.expansions, rng)] if alive else []
    drawn = self.s.rule == "particles"  # finished ones take part in the next draw
    if not (drawn and parents):
      p.found += [lanes[k] for k in alive if lanes[k].end]
    finished = sum(lane.end == "stop" for lane in p.found)
    if p.rounds == self.s.max_steps or (finished >= self.s.n and not drawn):
      going = [lanes[alive[i]] for i in dict.fromkeys(parents)]
      p.found += [lane if lane.end else dataclasses.replace(lane, end="length") for lane in going]
      parents = []
    return [alive[i] for i in parents]

  def _next(self, p: _Problem, lanes: list[Lane], parents: Sequence[int]) -> list[Lane]:
    """The next lanes: the first copy keeps the parent's stream."""
    out, used = [], set()
    for k in parents:
      lane = lanes[k]
      if k in used:
        lane, p.streams = dataclasses.replace(lane, stream=p.streams), p.streams + 1
      used.add(k)
      out.append(lane)
    return out

  def _moved(
    self, g: int, p: _Problem, lanes: list[Lane], parents: Sequence[int]
  ) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Which tokens of the ring are kept at which places of the context."""
    going = [k for k in dict.fromkeys(parents) if lanes[k].end is None]
    paths = {k: [*p.prompt, *lanes[k].tokens][:-1] for k in going}
    p.places.keep(paths.values())
    moved = {}
    for k, path in paths.items():
      places = p.places.add(path)
      first = len(p.prompt) - 1 + len(p.lanes[k].tokens)  # the token that the step began with
      for position in range(first, len(path)):
        ring = (p.begun + position - first) % self._ring
        moved[g, places[position]] = (g * self.s.n + k, ring, position)
    return moved

  def _keep(self, moved: dict[tuple[int, int], tuple[int, int, int]]) -> None:
    if moved:
      largest = max(place for _, place in moved) + 1
      if (missing := power_of_two(largest, 64) - self._seen.shape[1]) > 0:
        self._seen = np.pad(self._seen, [(0, 0), (0, missing)])
        self._cache = grow(self._cache, self._seen.shape[1])
      self._cache = keep(self._cache, moved)

  def _found(self, p: _Problem) -> Found:
    finished = [lane for lane in p.found if lane.end == "stop"]
    finished.sort(key=lambda lane: -lane.score)
    rest = [lane for lane in p.found if lane.end != "stop"]
    return Found(p.number, [*finished, *rest][: self.s.n], dict(p.spent))

  @functools.cached_property
  def _decode(self):
    c = self.sampler.config

    @functools.partial(jax.jit, donate_argnums=1, static_argnames="sampling")
    def decode(weights, cache, index, state, seen, last, fresh, *, sampling: Sampling):
      numbers = jax.vmap(uniform)(state["seed"], state["stream"], state["place"])
      tokens = jnp.where(fresh, state["tokens"], last)
      slots = Slots(tokens, state["positions"], None, seen, state["own_length"])
      logits, cache = cached_decoder.step(weights, cache, index, slots, c=c)
      tokens, log_probs = sampling_lib.choose(logits, numbers, sampling)
      if self.s.steps_ahead:
        tokens = jnp.where(state["likeliest"] > 0, logits.argmax(-1), tokens).astype(jnp.int32)
      return tokens, log_probs, cache

    return decode
