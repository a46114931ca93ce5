"""The embedded default: generated arithmetic problems, and a solver that errs like a person.

A problem applies two to five operations to a digit, keeping only the last digit:

    A times 8          A 3*8=4
    B add 7            B 4+7=1
    C less 2           C 1-2=9
    from 3             # Answer 9

Each problem tempts its solver in its own ways, drawn once per problem: a clause it tends to misread
(a misconception, often the likelier reading, so that the commonest answer is wrong), a product it
tends to get wrong (a slip), a step before which it tends to look up an older value (a wrong copy).
Whether a temptation wins is drawn anew for each solution.  A step is right when it carries on from
the value before it, applies the clause as written and computes correctly, so labels are exact.
Because only the last digit is kept, some wrong chains end in the right answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

OPERATIONS = {"times": "*", "add": "+", "less": "-"}
OPERANDS = (2, 3, 4, 5, 6, 7, 8, 9)
LEVELS = (1, 2, 3, 4, 5)
LENGTH = {1: 2, 2: 3, 3: 3, 4: 4, 5: 4}  # clauses of a problem, by level
MISREAD = {1: 0.2, 2: 0.26, 3: 0.34, 4: 0.42, 5: 0.5}  # chance that a clause invites a misreading
OPERATOR = 0.7  # share of misreadings that take the wrong operator; the rest, a wrong operand
SLIP = 0.15  # chance that a clause invites a slip in its result
COPY = 0.15  # chance that a clause invites copying an older value
MISREAD_RATE = (0.3, 0.95)  # how often the solver gives in, uniform per temptation
LAPSE_RATE = (0.1, 0.5)  # the same for slips and copies
RESTATE = 0.08  # chance of a neutral step that only repeats the value
CONFUSED = {"add": "times", "less": "add", "times": "add"}  # misread operators


@dataclasses.dataclass(frozen=True)
class Clause:
  """One operation, and what tempts the solver there.  A rate of 0: nothing does."""

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
    lines = [f"{letter(i)} {c.operation} {c.operand}" for i, c in enumerate(self.clauses)]
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
  answer: int


def letter(i: int) -> str:
  return "ABCDEFGH"[i]


def apply(operation: str, value: int, operand: int) -> int:
  result = {"times": value * operand, "add": value + operand, "less": value - operand}[operation]
  return result % 10


def make_problem(rng: np.random.Generator, level: int) -> Problem:
  clauses = []
  for i in range(LENGTH[level]):
    operation = str(rng.choice(list(OPERATIONS)))
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
        slip=int(rng.choice([-2, -1, 1, 2])),
        slip_rate=rng.uniform(*LAPSE_RATE) * (rng.random() < SLIP),
        copy_rate=rng.uniform(*LAPSE_RATE) * (i > 0 and rng.random() < COPY),
      )
    )
  return Problem(start=int(rng.integers(1, 10)), clauses=tuple(clauses), level=level)


def solve(problem: Problem, rng: np.random.Generator) -> Solution:
  """One sampled solution, with the exact rating of each step."""
  steps, ratings = [], []
  value, older = problem.start, problem.start
  chance = rng.random((len(problem.clauses), 4))
  for i, clause in enumerate(problem.clauses):
    operation, operand = clause.operation, clause.operand
    if chance[i, 0] < clause.misread_rate:
      operation, operand = clause.misread
    read = older if chance[i, 1] < clause.copy_rate else value
    result = apply(operation, read, operand)
    if chance[i, 2] < clause.slip_rate:
      result = (result + clause.slip) % 10
    right = (operation, operand, read) == (clause.operation, clause.operand, value) and (
      result == apply(operation, read, operand)
    )
    steps.append(f"{letter(i)} {read}{OPERATIONS[operation]}{operand}={result}")
    ratings.append(1 if right else -1)
    older, value = value, result
    if chance[i, 3] < RESTATE:
      steps.append(f"now {value}")
      ratings.append(0)
  steps.append(f"# Answer\n\n{value}")
  ratings.append(1)
  return Solution(tuple(steps), tuple(ratings), value)


def make_row(problem: Problem, solution: Solution, problem_index: int) -> dict:
  """The solution as a row of PRM800K's phase 2: labelled up to and including the first error."""
  wrong = [i for i, rating in enumerate(solution.ratings) if rating == -1]
  labelled = solution.ratings[: wrong[0] + 1] if wrong else solution.ratings
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
      "steps": [
        {
          "completions": [{"text": text, "rating": rating, "flagged": False}],
          "human_completion": None,
          "chosen_completion": None if rating == -1 else 0,
        }
        for text, rating in zip(solution.steps, labelled)
      ],
      "total_time": 0,
      "finish_reason": "found_error" if wrong else "solution",
    },
  }


def problems(seed: int, stream: int, count: int) -> Iterator[Problem]:
  """`count` distinct problems; levels in turn.  Streams of one seed are independent."""
  rng = np.random.default_rng([seed, stream])
  seen = set()
  while len(seen) < count:
    problem = make_problem(rng, LEVELS[len(seen) % len(LEVELS)])
    if problem.text not in seen:
      seen.add(problem.text)
      yield problem
