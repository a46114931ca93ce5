"""Search: solutions of all problems grow step by step, and a reward model says which go on.

A problem has `n` lanes, each a solution under way.  The language model writes a step in each lane
(`step_writer`), the reward model reads the new steps (`cached_scorer`), and a rule (`selection`)
says which lanes go on, and how often.  All problems under way are one batch: a problem is read when
its lanes have a step each, while the others write on.  Both models encode and store a prefix once
for all lanes that share it.

Each lane has a stream of random numbers.  A lane that goes on keeps its stream, and a copy gets the
next unused one, so that the solutions of a problem do not depend on the other problems.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from prm_jax import config as config_lib
from prm_jax import reductions
from prm_jax.generation import selection, step_writer
from prm_jax.generation.cached_scorer import CachedScorer, Solution
from prm_jax.generation.engines import Prompt
from prm_jax.generation.sampler import Sampler
from prm_jax.generation.step_writer import Lane, StepWriter

REDUCTIONS = {  # P(right) of the steps so far to the score of a solution under way
  "last": lambda p: p[-1],
  "min": np.min,
  "mean": np.mean,
  "product": np.prod,
  "soft_min": lambda p: np.average(p, weights=np.exp(-p / 0.1)),
}


@dataclasses.dataclass(frozen=True)
class Settings(config_lib.Checked):
  """How to search."""

  rule: Literal["best_of_n", "beam", "dvts", "lookahead", "particles"] = "beam"
  n: config_lib.Count = 16  # lanes of a problem
  expansions: config_lib.Count = 4  # of each solution that goes on, in beam, dvts and lookahead
  reduction: reductions.Reduction = "product"
  lookahead: config_lib.Count = 1  # steps, likeliest tokens, of rule "lookahead"
  max_steps: config_lib.Count = 40

  @property
  def steps_ahead(self) -> int:
    return self.lookahead if self.rule == "lookahead" else 0

  def _rules(self):
    copies = self.rule in ("beam", "dvts", "lookahead")
    wrong = copies and self.n % self.expansions
    yield bool(wrong), "n expansions", "n a multiple of expansions, of this rule"


@dataclasses.dataclass
class _Problem:
  """A problem under way."""

  number: int
  problem: str
  seed: int
  streams: int  # that are in use
  found: list[Lane] = dataclasses.field(default_factory=list)  # what has ended
  rounds: int = 0
  spent: collections.Counter = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass(frozen=True)
class Found:
  """What a search has found for a prompt.

  `spent` counts tokens: those `generated`, those `read` by the language model and those `scored`,
  read by the reward model; and what both would read for the same steps without a cache, if each
  step began with reading its prefix again (`read_from_start`, `scored_from_start`).
  """

  prompt: int  # its number among those given
  lanes: list[Lane]  # at most n: finished ones, best first; then such as were cut off
  spent: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Search:
  """A language model and the reward model that guides it."""

  sampler: Sampler
  scorer: CachedScorer
  s: Settings
  writing: step_writer.Settings

  def facts(self) -> dict[str, Any]:
    """What decides the solutions, beside prompts and seeds, as JSON."""
    own = {"search": dataclasses.asdict(self.s), "writing": dataclasses.asdict(self.writing)}
    return self.sampler.facts() | own | {"prm": self.scorer.facts()}

  def run(self, prompts: Sequence[Prompt]) -> Iterator[Found]:
    """Searches for solutions of all prompts; each is given as soon as it is done.

    Raises:
      ValueError: a prompt has no tokens or unknown ones, or the reward model cannot read a step.
    """
    encoded = [self.sampler.encode(prompt) for prompt in prompts]
    waiting = collections.deque(range(len(prompts)))
    problems: dict[int, _Problem] = {}
    contexts = len(self.scorer.places)
    longest = max(map(len, encoded), default=1)
    writer = StepWriter(self.sampler, contexts, self.s.n, longest, self.writing)
    while waiting or problems:
      for g in range(contexts):
        if g not in problems and waiting:
          i = waiting.popleft()
          problems[g] = _Problem(i, prompts[i].problem, prompts[i].seed, self.s.n)
          lanes = [Lane(k, k // self.s.expansions) for k in range(self.s.n)]
          writer.begin(g, encoded[i], prompts[i].seed, lanes)
          self.scorer.begin(g)
      ready = {g: problems[g] for g in writer.write()}
      for g in self._select(writer, ready) if ready else ():
        yield self._found(problems.pop(g))

  def _select(self, writer: StepWriter, ready: dict[int, _Problem]) -> list[int]:
    """Scores the new steps of these problems and starts the next; returns the contexts done."""
    lanes = self._scored(ready, {g: writer.written(g) for g in ready})
    done, going, kept = [], {}, {}
    for g, p in ready.items():
      parents = self._parents(p, lanes[g])
      if parents:
        kept[g] = [(p.problem, lanes[g][k].steps) for k in parents if lanes[g][k].steps]
        going[g] = (self._next(p, lanes[g], parents), parents)
      else:
        done.append(g)
        p.spent += writer.end(g)
    self.scorer.keep(kept)
    writer.go_on(going)
    return done

  def _scored(
    self, ready: dict[int, _Problem], written: dict[int, list[tuple[Lane, tuple[str, ...]]]]
  ) -> dict[int, list[Lane]]:
    """The lanes with the probabilities of new steps, and the score that the rule sees."""
    asked: dict[int, dict[Solution, None]] = {g: {} for g in ready}
    for g, p in ready.items():
      written[g] = [self._readable(p, *each) for each in written[g]]
      for lane, ahead in written[g]:
        for steps in dict.fromkeys((lane.steps, ahead)):
          if len(steps) > len(lane.probabilities):
            asked[g][p.problem, steps] = None
            p.spent["scored_from_start"] += self.scorer.length(p.problem, steps)
    before = {g: self.scorer.encoded[g] for g in ready}
    found = self.scorer.probabilities({g: [*several] for g, several in asked.items()})
    out = {}
    for g, p in ready.items():
      p.spent["scored"] += self.scorer.encoded[g] - before[g]
      of = {steps: probabilities for (_, steps), probabilities in zip(asked[g], found[g])}
      out[g] = [self._with(lane, ahead, of) for lane, ahead in written[g]]
    return out

  def _readable(
    self, p: _Problem, lane: Lane, ahead: tuple[str, ...]
  ) -> tuple[Lane, tuple[str, ...]]:
    """The lane, cut off before its new step if the reward model cannot encode the new tokens."""
    try:
      for steps in {lane.steps, ahead}:
        if len(steps) > len(lane.probabilities):
          self.scorer.length(p.problem, steps)
    except ValueError:
      steps = lane.steps[: len(lane.probabilities)] or (" ",)
      return dataclasses.replace(lane, steps=steps, end="length"), steps
    return lane, ahead

  def _with(
    self, lane: Lane, ahead: tuple[str, ...], of: dict[tuple[str, ...], np.ndarray]
  ) -> Lane:
    """A lane with its new step's probabilities and its score."""
    classes = self.scorer.scorer.contract.right_classes
    right_of = lambda each: float(each[:, classes].sum(-1).mean())
    probabilities, right = lane.probabilities, lane.right
    if lane.steps in of:
      probabilities = (*probabilities, of[lane.steps])
      right = (*right, right_of(of[lane.steps]))
    seen = (*right, right_of(of[ahead])) if ahead != lane.steps else right
    score = float(REDUCTIONS[self.s.reduction](np.array(seen))) if seen else 0.0
    return dataclasses.replace(lane, probabilities=probabilities, right=right, score=score)

  def _parents(self, p: _Problem, lanes: Sequence[Lane]) -> list[int]:
    """Indices of the lanes that go on; what has ended for good is found."""
    p.rounds += 1
    alive = [k for k, lane in enumerate(lanes) if lane.end != "length"]
    p.found += [lane for lane in lanes if lane.end == "length"]
    drawn = self.s.rule == "particles"  # finished ones take part in the next draw
    if not drawn:
      self._finish(p, [lanes[k] for k in alive if lanes[k].end])
    scored = selection.Scored(
      np.array([lanes[k].score for k in alive]),
      np.array([lanes[k].end is not None for k in alive], bool),
      np.array([lanes[k].tree for k in alive], int),
    )
    rng = np.random.default_rng([p.seed, p.rounds])
    rule = selection.RULES[self.s.rule]
    last = p.rounds == self.s.max_steps
    if self.s.rule in ("beam", "lookahead"):
      last |= sum(lane.end == "stop" for lane in p.found) >= self.s.n
    if alive and not last and (parents := rule(scored, self.s.n, self.s.expansions, rng)):
      return [alive[i] for i in parents]
    rest = [lanes[k] for k in alive if drawn or not lanes[k].end]
    p.found += [lane if lane.end else dataclasses.replace(lane, end="length") for lane in rest]
    return []

  def _finish(self, p: _Problem, lanes: Sequence[Lane]) -> None:
    """Puts finished solutions aside: copies of one that have ended alike are one."""
    known = {lane.tokens for lane in p.found}
    for lane in lanes:
      if self.s.rule == "best_of_n" or lane.tokens not in known:
        p.found.append(lane)
        known.add(lane.tokens)

  def _next(self, p: _Problem, lanes: Sequence[Lane], parents: Sequence[int]) -> list[Lane]:
    """The next lanes: the first copy keeps the parent's stream."""
    out, used = [], set()
    for k in parents:
      lane = lanes[k]
      if k in used:
        lane, p.streams = dataclasses.replace(lane, stream=p.streams), p.streams + 1
      used.add(k)
      out.append(lane)
    return out

  def _found(self, p: _Problem) -> Found:
    finished = [lane for lane in p.found if lane.end == "stop"]
    finished.sort(key=lambda lane: -lane.score)
    rest = [lane for lane in p.found if lane.end != "stop"]
    return Found(p.number, [*finished, *rest][: self.s.n], dict(p.spent))
