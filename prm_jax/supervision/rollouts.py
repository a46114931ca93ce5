"""Step labels without people: rollouts of a language model after the steps of solutions.

The problems under way ask for rollouts together, in rounds.  Solutions of a problem share rollouts
after equal steps, and their tokens share a context of the sampler.  `rollout_labels` decides which
rollouts are needed and which labels follow.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from prm_jax.evaluation.answers import extraction, grading
from prm_jax.generation import prompts as prompts_lib
from prm_jax.generation.engines import Engine, Limits, Prompt, PromptError, derived_seed, naming
from prm_jax.generation.sampling import Sampling
from prm_jax.runtime import json_lines, progress
from prm_jax.runtime.journal import Journal
from prm_jax.supervision import rollout_labels
from prm_jax.supervision.rollout_labels import Count, Problem, Settings, Solution, Steps, wanted

REFUSED = 8  # a run stops if all problems under way are refused, so many in a row: a wrong key
ROUND = 4  # rollouts of a step in a round, where fewer than all may be enough


class Line(msgspec.Struct):
  """The keys read from each line."""

  problem: json_lines.Text
  ground_truth_answer: json_lines.NotBlank
  steps: list[json_lines.Text] = []
  text: str = ""
  is_correct: bool | None = None
  answer: str | None = None
  finished: bool | None = None


def read(
  path: pathlib.Path, steps: prompts_lib.Steps, grader: grading.Grader, balanced: int = 0
) -> list[Problem]:
  """Reads the problems of a file of candidate solutions, in the order of their first lines.

  Solutions without `is_correct` are graded here.

  Args:
    steps: how a line's `text` is split where it has no `steps`.
    balanced: `most` of `balance`; 0: all solutions.

  Raises:
    BadLine: a line has no problem, no steps or no ground_truth_answer; or the lines of a problem
      have different answers.
    ValueError: `balanced` is set, and no problem has both a right and a wrong solution that ended.
  """
  problems: dict[str, Problem] = {}
  for where, record in json_lines.records(path):
    line = json_lines.convert(record, Line, where)
    parts = tuple(line.steps or prompts_lib.split(line.text, steps))
    if not parts:
      raise json_lines.BadLine(f"{where}: no steps, and no text to split into steps")
    problem = problems.setdefault(line.problem, Problem(line.problem, line.ground_truth_answer, []))
    if problem.answer != line.ground_truth_answer:
      raise json_lines.BadLine(
        f"{where}: ground_truth_answer is {json_lines.show(line.ground_truth_answer)}, on an "
        f"earlier line of this problem {json_lines.show(problem.answer)}"
      )
    ended = line.finished is not False
    answer = line.answer or (extraction.final_answer("\n".join(parts)) if ended else None)
    right = line.is_correct if ended else False
    problem.solutions.append(Solution(record | {"answer": answer}, parts, ended, right))
  _grade(problems.values(), grader)
  if not balanced:
    return [*problems.values()]
  for problem in problems.values():
    problem.solutions = balance(problem.solutions, balanced)
  chosen = [problem for problem in problems.values() if problem.solutions]
  if not chosen:
    raise ValueError(f"{path}: no problem has both a right and a wrong solution that ended")
  return chosen


def balance(solutions: Sequence[Solution], most: int) -> list[Solution]:
  """Takes the first distinct solutions that ended: as many right as wrong, at most `most` each."""
  distinct: dict[bool, dict[Steps, Solution]] = {True: {}, False: {}}
  for solution in solutions:
    if solution.ended:
      distinct[bool(solution.right)].setdefault(solution.steps, solution)
  right, wrong = ([*group.values()] for group in distinct.values())
  count = min(most, len(right), len(wrong))
  return right[:count] + wrong[:count]


def _grade(problems: Iterable[Problem], grader: grading.Grader) -> None:
  """Grades the solutions that are not known to be right or wrong."""
  unknown = [(p, i) for p in problems for i, each in enumerate(p.solutions) if each.right is None]
  pairs = [(p.solutions[i].record["answer"] or "", p.answer) for p, i in unknown]
  for (p, i), verdict in zip(unknown, grader.verdicts(pairs)):
    p.solutions[i] = dataclasses.replace(p.solutions[i], right=verdict == grading.EQUAL)


@dataclasses.dataclass(frozen=True)
class Annotator:
  """Labels steps by a language model's rollouts after them."""

  engine: Engine
  make: Callable[[str, int], Prompt]  # (problem, seed) -> prompt
  sampling: Sampling
  limits: Limits
  separator: str  # between steps
  grader: grading.Grader
  s: Settings
  seed: int
  about: dict[str, Any]  # for the provenance
  at_once: int = 512  # least rollouts of a round; the journal is written after each round
  form: prompts_lib.Form = "plain"  # of the prompts

  def run(self, problems: Sequence[Problem], left: Sequence[int], journal: Journal) -> None:
    """Labels the problems at the indices `left` and adds them to the journal; shows progress.

    Raises:
      ValueError: the engine refuses a prompt of a problem; the others have been labelled, unless it
        refuses all problems under way, `REFUSED` or more in a row.
      OSError: as the engine.
    """
    waiting, done = collections.deque(left), len(journal.done)
    refused: dict[int, str] = {}  # reasons by problem
    excused = 0  # problems refused before the latest rollout; the others are in a row
    under_way: dict[int, list[Steps]] = {}  # by problem, the prefixes that need rollouts
    made: collections.Counter[str] = collections.Counter()
    total = done + len(left)
    bar = progress.Progress(desc="rollouts", total=total, initial=done, unit="problems")
    with bar, naming(lambda i: f"problem {i + 1}, {json_lines.show(problems[i].text)}"):
      while waiting or under_way:
        # Prompts beside refused ones may not have had their turn: first they are asked alone.
        most = 0 if under_way and len(refused) > excused else self.at_once
        while waiting and self.per_round * sum(map(len, under_way.values())) < most:
          i = waiting.popleft()
          under_way[i] = wanted(problems[i], self.s)
        by_size = collections.defaultdict(list)  # the last round of a step may be smaller
        for i, prefixes in under_way.items():
          for steps in prefixes:
            made_before = problems[i].counts.get(steps, Count()).n
            size = min(self.per_round, self.s.rollouts - made_before)
            by_size[size].append((i, steps))
        before_round = made["rollouts"]
        for size, asked in by_size.items():
          try:
            self._round([(problems[i], steps) for i, steps in asked], size, made, bar)
          except PromptError as error:
            refused |= {asked[i][0]: why for i, why in error.refused.items()}
        if made["rollouts"] > before_round:
          excused = len(refused)
        for i in [*under_way]:
          problem = problems[i]
          under_way[i] = wanted(problem, self.s)
          if i in refused:
            del under_way[i]
          elif not under_way[i]:
            del under_way[i]
            journal.add(i, [line(problem, each, self.s, self.about) for each in problem.solutions])
            bar.update()
        if not under_way and len(refused) - excused >= REFUSED:
          break
      if refused:
        raise PromptError(refused)

  @property
  def per_round(self) -> int:
    """Limit of a step's rollouts in a round: few, if fewer than all may be enough."""
    few = self.s.labels == "hard" or self.s.width
    return min(ROUND, self.s.rollouts) if few else self.s.rollouts

  def _round(
    self, asked: Sequence[tuple[Problem, Steps]], size: int, made: collections.Counter, bar
  ) -> None:
    """Makes `size` rollouts after each of these prefixes, and adds them to the problems' counts.

    Raises:
      PromptError: the engine refuses a prefix; the rollouts after the others have been added.
    """
    prompts, completions = [self._prompt(problem, steps) for problem, steps in asked], []
    refused = None
    try:
      for completion in self.engine.generate(prompts, size, self.sampling, self.limits):
        completions.append(completion)
        made.update(rollouts=1, tokens=completion.token_count)
        rate = made["tokens"] / max(bar.format_dict["elapsed"], 1e-9)
        bar.set_postfix_str(f"{made['rollouts']:,} rollouts, {rate:.0f} tokens/s", refresh=False)
        bar.update(0)
    except PromptError as error:
      refused = error
    pairs = {}  # given and true answers, of the completions that have a final answer
    for i, completion in enumerate(completions):
      problem, steps = asked[completion.prompt]
      whole = self.separator.join([*steps, completion.text])
      # A next problem may begin with the separator after the steps, which no stop string sees.
      text = prompts_lib.solution(whole, self.form)
      ended = completion.end == "stop" or text != whole
      if ended and (answer := extraction.final_answer(text)):
        pairs[i] = (answer, problem.answer)
    verdicts = dict(zip(pairs, self.grader.verdicts([*pairs.values()])))
    for i, completion in enumerate(completions):
      problem, steps = asked[completion.prompt]
      count = problem.counts.setdefault(steps, Count())
      count.n += 1
      count.k += verdicts.get(i) == grading.EQUAL
      problem.tokens += completion.token_count
    if refused:
      raise refused

  def _prompt(self, problem: Problem, steps: Steps) -> Prompt:
    """Returns the prompt of a rollout after some steps, seeded by problem, steps and round."""
    made = problem.counts.get(steps, Count()).n
    seed = derived_seed(self.seed, repr((problem.text, steps, made)))
    begun = tuple(f"{step}{self.separator}" for step in steps)
    return dataclasses.replace(self.make(problem.text, seed), begun=begun)


def line(problem: Problem, solution: Solution, s: Settings, about: dict[str, Any]) -> dict:
  """Returns the output line of a solution, in the form of `datasets.stepwise`, with its provenance.

  `rollouts` has [k, n] of each step that has rollouts.  `spent` is the cost of the whole problem.
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
  """Returns counts of the labels and their cost as lines of text, for the screen."""
  spent = {each["problem"]: each["provenance"]["spent"] for each in lines}
  rollouts, tokens = (sum(x[key] for x in spent.values()) for key in ("rollouts", "tokens"))
  steps = sum(len(each["steps"]) for each in lines)
  sources = collections.Counter(
    source for each in lines for source in each["provenance"]["sources"] if source
  )
  labelled = [each for each in lines if any(each["provenance"]["sources"])]
  by = ", ".join(f"{count:,} by {source}" for source, count in sources.most_common())
  out = [f"{len(lines):,} solutions of {len(spent):,} problems, {steps:,} steps; labels: {by}"]
  if left := len(lines) - len(labelled):
    out.append(f"{left:,} solutions without labels: the model is not sure of their problems")
  out.append(f"{rollouts:,} rollouts, {tokens:,} tokens")
  return out
