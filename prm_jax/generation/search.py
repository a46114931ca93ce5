"""Search guided by a reward model: solutions of all problems grow step by step.

A problem has `n` lanes, each an unfinished solution.  The language model writes a step in each lane
(`step_writer`), the reward model scores the new steps (`cached_scorer`), and a rule (`RULES`)
chooses the lanes that continue and their number of copies.  The problems that have a context form
one batch: a problem is scored when each of its lanes has a new step, while other problems continue
writing.  Both models encode and store a prefix once for all lanes that share it.

Each lane has a stream of random numbers.  A lane that continues keeps its stream, and a copy gets
the next unused one, so that the solutions of a problem do not depend on the other problems.

The rules, with their sources and differences from them:

* `beam`: the best `n / expansions` unfinished solutions, each `expansions` times (Snell et al.
  2024, arXiv 2408.03314; search-and-learn's beam_search.py).
* `dvts`: `n / expansions` independent subtrees, each of which continues its best solution (Beeching
  et al. 2024; diverse_verifier_tree_search.py).  Finished siblings are not lost.
* `particles`: all lanes drawn anew in proportion to r / (1 - r) for the score r of a lane; finished
  lanes take part and stay as they are (Puri et al. 2025, arXiv 2502.01618).
* `best_of_n`: every unfinished solution.

`lookahead` (Snell et al. 2024) is `beam` with scores read after a rollout of likeliest tokens.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from prm_jax import aggregation as agg
from prm_jax import config as config_lib
from prm_jax import reductions
from prm_jax.generation import step_writer
from prm_jax.generation.cached_scorer import CachedScorer, Solution
from prm_jax.generation.engines import Prompt, PromptError
from prm_jax.generation.places import power_of_two
from prm_jax.generation.sampler import Sampler
from prm_jax.generation.step_writer import Lane, StepWriter


@dataclasses.dataclass(frozen=True)
class Settings(step_writer.Settings):
  """The settings of a search."""

  rule: Literal["best_of_n", "beam", "dvts", "lookahead", "particles"] = "beam"
  expansions: config_lib.Count = 4  # copies of a chosen solution, in beam, dvts and lookahead
  reduction: reductions.Reduction = "product"
  lookahead: config_lib.Count = 1  # steps of likeliest tokens in rule "lookahead"
  max_steps: config_lib.Count = 40
  max_step_tokens: config_lib.Count = 256  # longer steps are cut off

  @property
  def steps_ahead(self) -> int:
    return self.lookahead if self.rule == "lookahead" else 0

  def _rules(self):
    expands = self.rule in ("beam", "dvts", "lookahead")
    wrong = expands and self.n % self.expansions != 0
    yield wrong, "n expansions", f"n a multiple of expansions for {self.rule}"


# Takes the lanes of a problem, without those that were cut off, and returns the parents of the next
# lanes; a lane that is returned more than once is copied.
Rule = Callable[[Sequence[Lane], Settings, np.random.Generator], Sequence[int]]


def _best_of_n(lanes: Sequence[Lane], s: Settings, rng: np.random.Generator) -> list[int]:
  return [i for i, lane in enumerate(lanes) if not lane.end]


def _beam(lanes: Sequence[Lane], s: Settings, rng: np.random.Generator) -> list[int]:
  unfinished = _best_of_n(lanes, s, rng)
  best = sorted(unfinished, key=lambda i: -lanes[i].score)[: s.n // s.expansions]
  # If there are fewer, they take turns, so that no lane is idle (as in search-and-learn).
  return sorted(itertools.islice(itertools.cycle(best), s.n))


def _dvts(lanes: Sequence[Lane], s: Settings, rng: np.random.Generator) -> list[int]:
  best: dict[int, int] = {}  # of each subtree
  for i in sorted(range(len(lanes)), key=lambda i: -lanes[i].score):
    best.setdefault(lanes[i].tree, i)
  return [i for _, i in sorted(best.items()) if not lanes[i].end for _ in range(s.expansions)]


def _particles(lanes: Sequence[Lane], s: Settings, rng: np.random.Generator) -> list[int]:
  if all(lane.end for lane in lanes):
    return []
  scores = np.array([lane.score for lane in lanes])
  odds = scores / np.maximum(1 - scores, 1e-9)
  weights = odds / odds.sum() if odds.sum() > 0 else np.full(len(odds), 1 / len(odds))
  return sorted(rng.choice(len(odds), s.n, p=weights).tolist())


RULES: dict[str, Rule] = {
  "best_of_n": _best_of_n,
  "beam": _beam,
  "dvts": _dvts,
  "lookahead": _beam,
  "particles": _particles,
}


@dataclasses.dataclass
class _Problem:
  """A problem that occupies a context."""

  number: int
  problem: str
  seed: int
  streams: int  # used so far
  ended: list[Lane] = dataclasses.field(default_factory=list)
  rounds: int = 0
  spent: collections.Counter = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass(frozen=True)
class Found:
  """The solutions that a search found for a prompt.

  `spent` counts tokens: `generated` and `read` by the language model, and `scored` by the reward
  model.  `read_from_start` and `scored_from_start` count the tokens that the two would read without
  a cache, encoding the whole prefix again for each step.
  """

  prompt: int  # index of the prompt
  lanes: list[Lane]  # at most n: finished solutions, best first, then those that were cut off
  spent: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Search:
  """A language model and the reward model that guides it."""

  sampler: Sampler
  scorer: CachedScorer
  s: Settings

  def facts(self) -> dict[str, Any]:
    """Returns the facts, apart from settings and prompts, that determine the solutions, as JSON."""
    return self.sampler.facts() | {"prm": self.scorer.scorer.identity()}

  def run(self, prompts: Sequence[Prompt]) -> Iterator[Found]:
    """Searches for solutions of all prompts; yields each result as soon as it is complete.

    Raises:
      PromptError: as `Sampler.encode`, or a problem is too long for the reward model.
      ValueError: the reward model gives NaN.
    """
    encoded = self.sampler.encode(prompts)
    longest = max(map(len, encoded), default=1)
    self.sampler.check_length(longest + self.s.limits.max_new_tokens)
    waiting = collections.deque(range(len(prompts)))
    problems: dict[int, _Problem] = {}
    contexts, s = len(self.scorer.places), self.s
    writer = StepWriter(self.sampler, contexts, longest, s, s.max_step_tokens, s.steps_ahead)
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
    done, continued, kept = [], {}, {}
    for g, p in ready.items():
      parents = self._parents(p, lanes[g])
      if parents:
        kept[g] = [(p.problem, lanes[g][k].steps) for k in parents if lanes[g][k].steps]
        continued[g] = (self._next(p, lanes[g], parents), parents)
      else:
        done.append(g)
        p.spent += writer.end(g)
    self.scorer.keep(kept)
    writer.go_on(continued)
    return done

  def _scored(
    self, ready: dict[int, _Problem], written: dict[int, list[tuple[Lane, tuple[str, ...]]]]
  ) -> dict[int, list[Lane]]:
    """Returns the lanes with the probabilities of new steps and the score that the rule sees."""
    asked: dict[int, dict[Solution, None]] = {g: {} for g in ready}
    for g, p in ready.items():
      written[g] = [self._readable(p, *each) for each in written[g]]
      for lane, ahead in written[g]:
        for steps in dict.fromkeys((lane.steps, ahead)):
          if len(steps) > len(lane.probabilities):
            asked[g][p.problem, steps] = None
            try:
              p.spent["scored_from_start"] += self.scorer.length(p.problem, steps)
            except ValueError as error:  # not even a blank first step is readable
              raise PromptError({p.number: str(error)}) from error
    before = {g: self.scorer.encoded[g] for g in ready}
    scores = self.scorer.probabilities({g: [*several] for g, several in asked.items()})
    lanes = {}
    for g, p in ready.items():
      p.spent["scored"] += self.scorer.encoded[g] - before[g]
      by_steps = {steps: probabilities for (_, steps), probabilities in zip(asked[g], scores[g])}
      pairs = [self._with_probabilities(lane, ahead, by_steps) for lane, ahead in written[g]]
      reduced = solution_scores([right for _, right in pairs], self.s.reduction)
      lanes[g] = [dataclasses.replace(lane, score=x) for (lane, _), x in zip(pairs, reduced)]
    return lanes

  def _readable(
    self, p: _Problem, lane: Lane, ahead: tuple[str, ...]
  ) -> tuple[Lane, tuple[str, ...]]:
    """Cuts a lane off before its new step if the reward model cannot encode the new tokens."""
    try:
      for steps in {lane.steps, ahead}:
        if len(steps) > len(lane.probabilities):
          self.scorer.length(p.problem, steps)
    except ValueError:
      steps = lane.steps[: len(lane.probabilities)] or (" ",)
      return dataclasses.replace(lane, steps=steps, end="length"), steps
    return lane, ahead

  def _with_probabilities(
    self, lane: Lane, ahead: tuple[str, ...], by_steps: dict[tuple[str, ...], np.ndarray]
  ) -> tuple[Lane, tuple[float, ...]]:
    """Returns a lane with its new step's probabilities, and P(right) of the steps that count."""
    contract = self.scorer.scorer.contract
    right_of = lambda steps: float(contract.right(by_steps[steps]).mean())
    probabilities, right = lane.probabilities, lane.right
    if lane.steps in by_steps:
      probabilities = (*probabilities, by_steps[lane.steps])
      right = (*right, right_of(lane.steps))
    seen = (*right, right_of(ahead)) if ahead != lane.steps else right
    return dataclasses.replace(lane, probabilities=probabilities, right=right), seen

  def _parents(self, p: _Problem, lanes: Sequence[Lane]) -> list[int]:
    """Returns the indices of the lanes that continue; moves lanes that have ended to `p.ended`.

    If no lane continues, the unfinished lanes are cut off and moved too.
    """
    p.rounds += 1
    alive = [k for k, lane in enumerate(lanes) if lane.end != "length"]
    p.ended += [lane for lane in lanes if lane.end == "length"]
    drawn = self.s.rule == "particles"  # finished lanes take part in the next draw
    if not drawn:
      self._finish(p, [lanes[k] for k in alive if lanes[k].end])
    rng = np.random.default_rng([p.seed, p.rounds])
    last = p.rounds == self.s.max_steps
    if self.s.rule in ("beam", "lookahead"):
      last |= sum(lane.end == "stop" for lane in p.ended) >= self.s.n
    parents = [] if last else RULES[self.s.rule]([lanes[k] for k in alive], self.s, rng)
    if parents:
      return [alive[i] for i in parents]
    rest = [lanes[k] for k in alive if drawn or not lanes[k].end]
    p.ended += [lane if lane.end else dataclasses.replace(lane, end="length") for lane in rest]
    return []

  def _finish(self, p: _Problem, lanes: Sequence[Lane]) -> None:
    """Moves finished lanes to `p.ended`; drops equal copies, except for rule `best_of_n`."""
    known = {lane.tokens for lane in p.ended}
    for lane in lanes:
      if self.s.rule == "best_of_n" or lane.tokens not in known:
        p.ended.append(lane)
        known.add(lane.tokens)

  def _next(self, p: _Problem, lanes: Sequence[Lane], parents: Sequence[int]) -> list[Lane]:
    """Returns the next lanes; a parent's first copy keeps its stream."""
    out, used = [], set()
    for k in parents:
      lane = lanes[k]
      if k in used:
        lane, p.streams = dataclasses.replace(lane, stream=p.streams), p.streams + 1
      used.add(k)
      out.append(lane)
    return out

  def _found(self, p: _Problem) -> Found:
    order = lambda lane: -lane.score if lane.end == "stop" else np.inf
    return Found(p.number, sorted(p.ended, key=order)[: self.s.n], dict(p.spent))


def solution_scores(right: Sequence[Sequence[float]], how: reductions.Reduction) -> list[float]:
  """Returns the score of each solution from P(right) of its steps so far; 0 without steps."""
  counts = [len(steps) for steps in right]
  # Powers of two, so that few sizes are compiled; padding has the id -1, of no solution.
  S, T = power_of_two(len(counts)), power_of_two(sum(counts))
  steps, ids = np.ones(T, np.float32), np.full(T, -1)
  steps[: sum(counts)] = [*itertools.chain(*right)]
  ids[: sum(counts)] = np.repeat(np.arange(len(counts)), counts)
  with np.errstate(divide="ignore"):
    logs = np.asarray(agg.reduce_steps(np.log(steps), ids, S, how), np.float64)[: len(counts)]
  # float64, as the product of many steps underflows float32.
  return np.where(np.array(counts) > 0, np.exp(logs), 0.0).tolist()
