"""Arithmetic problems, with solutions of a simulated solver that makes systematic mistakes.

A problem applies two to four operations to a digit and keeps only the last digit.  A step names
the operation, the value before it and the value after it:

    A*4                A*4 7->8
    B+3                B+3 8->1
    C-2                C-2 1->9
    from 7             # Answer 9

The likely mistakes of a problem are drawn once: a clause that is misread (often with the likelier
reading, so that the commonest answer is wrong), a slip in a result, an older value that is copied.
Whether a mistake happens is drawn for each solution.  A step is right if it carries on from the
value before it, applies the operation as written and computes correctly, so labels are exact.
Because only the last digit is kept, some wrong chains end in the right answer.

In labelled records most steps have further completions, as in PRM800K: less careful tries at the
same step, each with its rating.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from prm_jax.datasets import prm800k
from prm_jax.runtime import storage

CANDIDATES = "candidates.jsonl"
LETTERS = "ABCD"  # name the clauses
OPERATIONS = ("*", "+", "-")
OPERANDS = (1, 2, 3, 4)  # 5 would undo too many errors: v + 5 = v - 5, and 10 divides 2 * 5
CONFUSED = {"+": "-", "-": "+", "*": "+"}  # what an operation is misread as
LEVELS = (1, 2, 3, 4, 5)
LENGTH = {1: 2, 2: 3, 3: 3, 4: 4, 5: 4}  # clauses of a problem, by level
MISREAD = {1: 0.35, 2: 0.35, 3: 0.4, 4: 0.45, 5: 0.5}  # chance that a clause can be misread
OPERATOR = 0.75  # share of misreadings of the operation; the rest misread the operand
SLIP = 0.12  # chance that a clause can have a slip in its result
COPY = 0.15  # chance that an older value can be copied at a clause
MISREAD_RATE = (0.4, 0.9)  # how often it is then misread: uniform in this range
LAPSE_RATE = (0.15, 0.6)  # the same for slips and copies
RESTATE = 0.25  # chance that a solution has a neutral step that only repeats the value
CARELESS = 0.3  # rate of each mistake when a step is tried again
TRIES = 4  # at another completion, times the completions the step has


@dataclasses.dataclass(frozen=True)
class Clause:
  """One operation and its likely mistakes; at a rate of 0 a mistake never happens."""

  operation: str
  operand: int
  misread: tuple[str, int]  # the wrong reading
  misread_rate: float
  slip: int  # added to the result, modulo 10
  slip_rate: float
  copy_rate: float


@dataclasses.dataclass(frozen=True)
class Problem:
  start: int
  clauses: tuple[Clause, ...]
  level: int

  @property
  def text(self) -> str:
    lines = [f"{name}{c.operation}{c.operand}" for name, c in zip(LETTERS, self.clauses)]
    return "\n".join([*lines, f"from {self.start}"])

  @property
  def answer(self) -> int:
    value = self.start
    for clause in self.clauses:
      value = apply(clause.operation, value, clause.operand)
    return value


@dataclasses.dataclass(frozen=True)
class Solution:
  steps: tuple[str, ...]
  ratings: tuple[int, ...]  # of every step, also past the first error
  states: tuple[tuple[int, int, int] | None, ...]  # clause, value and older value before the step
  answer: int


def apply(operation: str, value: int, operand: int) -> int:
  result = {"*": value * operand, "+": value + operand, "-": value - operand}[operation]
  return result % 10


def make_problem(rng: np.random.Generator, level: int) -> Problem:
  """A problem of a level (1 to 5) with its likely mistakes, drawn from the rates above."""
  clauses = []
  for i in range(LENGTH[level]):
    operation = str(rng.choice(OPERATIONS))
    operand = int(rng.choice(OPERANDS))
    if rng.random() < OPERATOR:
      misread = (CONFUSED[operation], operand)
    else:
      misread = (operation, int(rng.choice([o for o in OPERANDS if o != operand])))
    clauses.append(
      Clause(
        operation=operation,
        operand=operand,
        misread=misread,
        misread_rate=rng.uniform(*MISREAD_RATE) * (rng.random() < MISREAD[level]),
        slip=int(rng.choice([-1, 1])),
        slip_rate=rng.uniform(*LAPSE_RATE) * (rng.random() < SLIP),
        copy_rate=rng.uniform(*LAPSE_RATE) * (i > 0 and rng.random() < COPY),
      )
    )
  return Problem(start=int(rng.integers(1, 10)), clauses=tuple(clauses), level=level)


def write_step(
  i: int, clause: Clause, value: int, older: int, chance: np.ndarray
) -> tuple[str, int, int]:
  """One try at clause i after `value`: the text, its rating and the result.

  Args:
    older: the value before `value`, which may be copied in its place.
    chance: three numbers in [0, 1): misread, copied or slipped if below the clause's rate.
  """
  right = (clause.operation, clause.operand)
  operation, operand = clause.misread if chance[0] < clause.misread_rate else right
  read = older if chance[1] < clause.copy_rate else value
  slip = clause.slip if chance[2] < clause.slip_rate else 0
  result = (apply(operation, read, operand) + slip) % 10
  right = (operation, operand, read, slip) == (*right, value, 0)
  return f"{LETTERS[i]}{operation}{operand} {read}->{result}", 1 if right else -1, result


def solve(problem: Problem, rng: np.random.Generator) -> Solution:
  """One sampled solution, with the exact rating of each step."""
  parts = []  # text, rating and state of each step
  value, older = problem.start, problem.start
  chance = rng.random((len(problem.clauses), 3))
  restated = rng.integers(len(problem.clauses)) if rng.random() < RESTATE else None
  for i, clause in enumerate(problem.clauses):
    text, rating, result = write_step(i, clause, value, older, chance[i])
    parts.append((text, rating, (i, value, older)))
    older, value = value, result
    if i == restated:
      parts.append((f"now {value}", 0, None))
  parts.append((f"# Answer\n\n{value}", 1, None))
  return Solution(*zip(*parts), value)


def try_again(
  problem: Problem, state: tuple[int, int, int], taken: list[str], rng: np.random.Generator
) -> tuple[str, int] | None:
  """Another completion of a step and its rating; None if no other was found.

  Args:
    taken: the step's completions so far, the solution's own first.  The second one may misread the
      clause as the problem has it; further ones misread it at random, or few would differ.
  """
  i, value, older = state
  clause = problem.clauses[i]
  misread = clause.misread
  if len(taken) > 1:
    misread = (str(rng.choice(OPERATIONS)), int(rng.choice(OPERANDS)))
  rates = {"misread_rate": CARELESS, "slip_rate": CARELESS, "copy_rate": CARELESS if i else 0}
  careless = dataclasses.replace(clause, misread=misread, **rates)
  for chance in rng.random((TRIES * len(taken), 3)):
    text, rating, _ = write_step(i, careless, value, older, chance)
    if text not in taken:
      return text, rating
  return None


def make_row(
  problem: Problem, solution: Solution, rng: np.random.Generator, alternatives: int = 1
) -> dict:
  """The solution as JSON of PRM800K's phase 2: labelled up to and including the first error.

  Each step is tried again for `alternatives` further completions.
  """
  wrong = [i for i, rating in enumerate(solution.ratings) if rating == -1]
  labelled = wrong[0] + 1 if wrong else len(solution.steps)

  def step(i: int) -> dict:
    completions = [(solution.steps[i], solution.ratings[i])]
    for _ in range(alternatives if solution.states[i] else 0):
      if other := try_again(problem, solution.states[i], [text for text, _ in completions], rng):
        completions.append(other)
    return {
      "completions": [{"text": t, "rating": r, "flagged": False} for t, r in completions],
      "human_completion": None,
      "chosen_completion": None if solution.ratings[i] == -1 else 0,
    }

  return {
    "labeler": "arithmetic",
    "timestamp": "1970-01-01T00:00:00",
    "generation": 0,
    "is_quality_control_question": False,
    "is_initial_screening_question": False,
    "question": {
      "problem": problem.text,
      "ground_truth_solution": None,
      "ground_truth_answer": str(problem.answer),
      "pre_generated_steps": list(solution.steps),
      "pre_generated_answer": str(solution.answer),
      "pre_generated_verifier_score": None,
    },
    "label": {
      "steps": [step(i) for i in range(labelled)],
      "total_time": 0,
      "finish_reason": "found_error" if wrong else "solution",
    },
  }


def distinct_problems(seed: int, count: int) -> Iterator[Problem]:
  """`count` distinct problems of levels 1 to 5 in turn; a ValueError where there are fewer."""
  rng = np.random.default_rng(seed)
  seen = set()
  for i in range(count):
    level = LEVELS[i % len(LEVELS)]
    tries = (make_problem(rng, level) for _ in range(10_000))
    problem = next((each for each in tries if each.text not in seen), None)
    if problem is None:
      raise ValueError(f"{i} problems are all there are: level {level} has no more")
    seen.add(problem.text)
    yield problem


class Builder(prm800k.RecordsBuilder):
  """TFDS builder of arithmetic problems with labelled solutions, as records of PRM800K's format."""

  name = "arithmetic"


@dataclasses.dataclass(frozen=True)
class Generator:
  """The data of one seed; no problem is in both splits.

  Seeds are independent: about one test problem in six, mostly of level 1, is also among another
  seed's problems, with other likely mistakes.  Tune on seeds from 100 up, report on others.
  """

  seed: int = 0  # of problems, mistakes and solutions
  train_problems: int = 4000
  solutions: int = 2  # labelled solutions of each problem
  alternatives: int = 1  # further completions of a step, if as many are found
  test_problems: int = 200
  candidates: int = 1024  # solutions sampled for each test problem, to rerank

  def problems(self) -> dict[str, list[Problem]]:
    stream = distinct_problems(self.seed, self.test_problems + self.train_problems)
    test = list(itertools.islice(stream, self.test_problems))
    return {"train": list(stream), "test": test}

  def rows(self) -> dict[str, Iterator[dict[str, Any]]]:
    """Labelled solutions of each split, as JSON objects of PRM800K's format."""
    return {split: self._rows(split, problems) for split, problems in self.problems().items()}

  def _rows(self, split: str, problems: list[Problem]) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng([self.seed, *split.encode()])
    for problem in problems:
      for _ in range(self.solutions):
        yield make_row(problem, solve(problem, rng), rng, self.alternatives)

  def write_candidates(self, directory: str | pathlib.Path) -> None:
    """Writes candidate solutions of the test problems: input of scripts/score.py."""
    rng = np.random.default_rng([self.seed, *b"candidates"])
    with storage.written(pathlib.Path(directory) / CANDIDATES) as out:
      for i, problem in enumerate(self.problems()["test"]):
        for _ in range(self.candidates):
          solution = solve(problem, rng)
          candidate = {
            "problem": problem.text,
            "unique_id": f"test/{i}",
            "level": problem.level,
            "ground_truth_answer": str(problem.answer),
            "steps": solution.steps,
            "answer": str(solution.answer),
            "is_correct": solution.answer == problem.answer,
          }
          out.write(json.dumps(candidate) + "\n")
