"""Step labels without people: rollouts of a language model after the steps of solutions.

The problems under way ask for rollouts together, in rounds.  Solutions of a problem share those
after equal steps, and the sampler's context of their tokens.  `rollout_labels` says which are
needed and what they tell.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from prm_jax.evaluation.answers import extraction, grading
from prm_jax.generation import prompts as prompts_lib
from prm_jax.generation.engines import Engine, Limits, Prompt, derived_seed
from prm_jax.generation.sampling import Sampling
from prm_jax.runtime import json_lines, progress
from prm_jax.runtime.journal import Journal
from prm_jax.supervision import rollout_labels
from prm_jax.supervision.rollout_labels import Count, Problem, Settings, Solution, Steps, wanted

ROUND = 4  # rollouts of a step at a time, where fewer than all may be enough


class Line(msgspec.Struct):
  """The keys of a line that are read."""

  problem: json_lines.Text
  ground_truth_answer: json_lines.Text
  steps: list[json_lines.Text] = []
  text: str = ""
  is_correct: bool | None = None
  answer: str | None = None
  finished: bool | None = None


def read(
  path: pathlib.Path, steps: prompts_lib.Steps, grader: grading.Grader, balanced: int = 0
) -> list[Problem]:
  """The problems of a file of candidate solutions, in the order of their first lines.

  Solutions without `is_correct` are graded here.

  Args:
    steps: how a line's `text` is split where it has no `steps`.
    balanced: as of `balance`; 0: all solutions.

  Raises:
    BadLine: a line has no problem, no steps or no ground_truth_answer; or the lines of a problem
      differ in that.
    ValueError: no problem has both a right and a wrong solution that ended, and `balanced` asks.
  """
  problems: dict[str, Problem] = {}
  for where, record in json_lines.records(path):
    line = json_lines.convert(record, Line, where)
    parts = tuple(line.steps or prompts_lib.split(line.text, steps))
    if not parts:
      raise json_lines.BadLine(f"{where}: no steps, and no text to split into steps")
    of = problems.setdefault(line.problem, Problem(line.problem, line.ground_truth_answer, []))
    if of.answer != line.ground_truth_answer:
      raise json_lines.BadLine(
        f"{where}: ground_truth_answer is {json_lines.show(line.ground_truth_answer)}, on an "
        f"earlier line of this problem {json_lines.show(of.answer)}"
      )
    ended = line.finished is not False
    answer = line.answer or (extraction.final_answer("\n".join(parts)) if ended else None)
    known = line.is_correct if ended else False
    found = Solution(record | {"answer": answer}, parts, ended, known)
    of.solutions.append(found)
  _grade(problems.values(), grader)
  if not balanced:
    return [*problems.values()]
  chosen = [
    dataclasses.replace(p, solutions=balance(p.solutions, balanced)) for p in problems.values()
  ]
  if not any(p.solutions for p in chosen):
    raise ValueError(f"{path}: no problem has both a right and a wrong solution that ended")
  return [p for p in chosen if p.solutions]


def balance(solutions: Sequence[Solution], most: int) -> list[Solution]:
  """As many right as wrong solutions that ended and differ: the first ones, at most `most` each."""
  found: dict[bool, dict[Steps, Solution]] = {True: {}, False: {}}
  for each in solutions:
    if each.ended:
      found[bool(each.right)].setdefault(each.steps, each)
  count = min(most, *map(len, found.values()))
  return [each for of in found.values() for each in [*of.values()][:count]]


def _grade(problems: Iterable[Problem], grader: grading.Grader) -> None:
  """Sets whether answers are right, of the solutions of which this is unknown."""
  todo = [(p, i) for p in problems for i, each in enumerate(p.solutions) if each.right is None]
  pairs = [(p.solutions[i].record["answer"] or "", p.answer) for p, i in todo]
  for (p, i), verdict in zip(todo, grader.verdicts(pairs)):
    p.solutions[i] = dataclasses.replace(p.solutions[i], right=verdict == grading.EQUAL)


@dataclasses.dataclass(frozen=True)
class Annotator:
  """A language model that labels steps by going on from them."""

  engine: Engine
  make: Callable[[str, int], Prompt]  # of a problem and a seed
  sampling: Sampling
  limits: Limits
  separator: str  # between steps
  grader: grading.Grader
  s: Settings
  seed: int
  about: dict[str, Any]  # for the provenance
  at_once: int = 512  # rollouts of a round, at least; a problem is kept when a round has ended

  def run(self, problems: Sequence[Problem], own: Sequence[int], journal: Journal) -> None:
    """Labels the problems of these indices that are not in the journal yet; shows progress."""
    waiting = collections.deque(i for i in own if i not in journal.done)
    asked: dict[int, list[Steps]] = {}  # by problem under way
    with progress.Progress(
      desc="rollouts",
      total=len(own),
      initial=len(own) - len(waiting),
      unit="problems",
      smoothing=0,  # problems come by rounds
    ) as bar:
      made = collections.Counter()
      while waiting or asked:
        while waiting and self.per_round * sum(map(len, asked.values())) < self.at_once:
          i = waiting.popleft()
          asked[i] = wanted(problems[i], self.s)
        by_size = collections.defaultdict(list)  # the last round of a step may be a smaller one
        for p, steps in [(problems[i], steps) for i in asked for steps in asked[i]]:
          by_size[self._next(p, steps)].append((p, steps))
        for size, several in by_size.items():
          self._round(several, size, made, bar)
        for i in [*asked]:
          asked[i] = wanted(problems[i], self.s)
          if not asked[i]:
            del asked[i]
            p = problems[i]
            journal.add(i, [line(p, each, self.s, self.about) for each in p.solutions])
            bar.update()

  @property
  def per_round(self) -> int:
    """Rollouts of a step at a time, at most: few, where fewer than all may be enough."""
    few = self.s.labels == "hard" or self.s.width
    return min(ROUND, self.s.rollouts) if few else self.s.rollouts

  def _next(self, problem: Problem, steps: Steps) -> int:
    """Rollouts of a step that are made in this round."""
    made = problem.counts.get(steps, Count()).n
    return min(self.per_round, self.s.rollouts - made)

  def _round(
    self, asked: Sequence[tuple[Problem, Steps]], size: int, made: collections.Counter, bar
  ) -> None:
    """Makes `size` rollouts after each of these steps, and adds them to their problems' counts."""
    prompts, found = [self._prompt(problem, steps) for problem, steps in asked], []
    for each in self.engine.generate(prompts, size, self.sampling, self.limits):
      found.append(each)
      made.update(rollouts=1, tokens=each.token_count)
      rate = made["tokens"] / max(bar.format_dict["elapsed"], 1e-9)
      bar.set_postfix_str(f"{made['rollouts']:,} rollouts, {rate:.0f} tokens/s", refresh=False)
      bar.update(0)
    answers = [
      extraction.final_answer(self.separator.join([*asked[each.prompt][1], each.text]))
      if each.end == "stop"
      else None
      for each in found
    ]
    graded = [i for i, answer in enumerate(answers) if answer]
    pairs = [(answers[i], asked[found[i].prompt][0].answer) for i in graded]
    verdicts = dict(zip(graded, self.grader.verdicts(pairs)))
    for i, each in enumerate(found):
      problem, steps = asked[each.prompt]
      count = problem.counts.setdefault(steps, Count())
      count.n, count.k = count.n + 1, count.k + (verdicts.get(i) == grading.EQUAL)
      problem.tokens += each.token_count

  def _prompt(self, problem: Problem, steps: Steps) -> Prompt:
    """The prompt that goes on from some steps; its seed is of the problem, steps and round."""
    made = problem.counts.get(steps, Count()).n
    seed = derived_seed(self.seed, repr((problem.text, steps, made)))
    begun = tuple(f"{step}{self.separator}" for step in steps)
    return dataclasses.replace(self.make(problem.text, seed), begun=begun)


def line(problem: Problem, solution: Solution, s: Settings, about: dict[str, Any]) -> dict:
  """The output line of a solution, in the form of `datasets.stepwise`, with its provenance.

  `rollouts` has [k, n] of each step that has rollouts.  `spent` is that of the whole problem.
  """
  labels, sources = rollout_labels.label(problem, solution, s)
  lengths = range(1, len(solution.steps) + 1)
  counts = [problem.counts.get(solution.steps[:length]) for length in lengths]
  root = problem.counts.get(())
  spent = {"rollouts": sum(x.n for x in problem.counts.values()), "tokens": problem.tokens}
  provenance = {"method": "rollouts", **about, "sources": sources, "spent": spent}
  provenance["problem"] = [root.k, root.n] if root else None
  return solution.record | {
    "problem": problem.text,
    "steps": solution.steps,
    "labels": labels,
    "is_correct": bool(solution.right),
    "rollouts": [[x.k, x.n] if x else None for x in counts],
    "provenance": provenance,
  }


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
  """What was labelled, and what it has cost, for the screen."""
  spent = {each["problem"]: each["provenance"]["spent"] for each in lines}
  rollouts, tokens = (sum(x[key] for x in spent.values()) for key in ("rollouts", "tokens"))
  steps = sum(len(each["steps"]) for each in lines)
  sources = collections.Counter(
    source for each in lines for source in each["provenance"]["sources"] if source
  )
  labelled = [each for each in lines if any(each["provenance"]["sources"])]
  where = ", ".join(f"{count:,} by {source}" for source, count in sources.most_common())
  out = [f"{len(lines):,} solutions of {len(spent):,} problems, {steps:,} steps; labels: {where}"]
  if left := len(lines) - len(labelled):
    out.append(f"{left:,} solutions without labels: the model is not sure of their problems")
  out.append(f"{rollouts:,} rollouts, {tokens:,} tokens")
  return out
