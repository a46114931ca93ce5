"""Arithmetic problems with solutions of a simulated solver that makes systematic mistakes.

A problem applies two to four operations to a digit and keeps only the last digit.  A step names
the operation, the value before it and the value after it:

    A*4                A*4 7->8
    B+3                B+3 8->1
    C-2                C-2 1->9
    from 7             # Answer 9

The likely mistakes of a problem are drawn once: a misread clause (the misreading is often the
likelier reading, so that the commonest answer is wrong), a slip in a result, a copy of an older
value.  Whether a mistake happens is drawn for each solution.  A step is right if it carries on from
the value before it, applies the operation as written and computes correctly, so labels are exact.
Because only the last digit is kept, some wrong chains end in the right answer.

In labelled records most steps have further completions, as in PRM800K: less careful tries at the
same step, each with its rating.

`HARD` is a setting for experiments: longer chains and, beside the likely mistakes, rare ones of
several kinds.  Few samples have a rare mistake, but the best of many samples often does.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from prm_jax import config as config_lib
from prm_jax.datasets import prm800k
from prm_jax.runtime import storage

CANDIDATES = "candidates.jsonl"
LETTERS = "ABCDEFGH"  # name the clauses
CONFUSED = {"+": "-", "-": "+", "*": "+", "~": "-", "<": "&", "&": "<"}  # operation: its misreading
OPERATOR = 0.75  # share of misreadings that misread the operation; the others misread the operand
SLIP = 0.12  # chance that a clause can have a slip in its result
COPY = 0.15  # chance that an older value can be copied at a clause
MISREAD_RATE = (0.4, 0.9)  # rate of a likely misreading: uniform in this range
LAPSE_RATE = (0.15, 0.6)  # the same for slips and copies
RESTATE = 0.25  # chance that a solution has a neutral step that only repeats the value
CARELESS = 0.3  # rate of each mistake when a step is tried again
TRIES = 4  # tries at another completion, for each completion that the step has already
STRAYS = ("result", "value", "operand", "operation")  # what a rare mistake gets wrong


@dataclasses.dataclass(frozen=True)
class Setting:
  """A variant of the domain; the quick start uses the default."""

  lengths: tuple[int, ...] = (2, 3, 3, 4, 4)  # clauses of a problem, by level; at most 8
  misread: tuple[float, ...] = (0.35, 0.35, 0.4, 0.45, 0.5)  # chance that a clause can be misread
  operations: tuple[str, ...] = ("*", "+", "-")  # "~", "<", "&" too: see `apply`
  operands: tuple[int, ...] = (1, 2, 3, 4)  # 5 would undo errors: v + 5 = v - 5, 10 divides 2 * 5
  rarity: float = 1.0  # the rates of misreadings, slips and copies are raised to this power
  stray: float = 0.0  # chance of a rare mistake at each clause
  modulus: int = 10  # the answer is the last value modulo this; chance often hits a small one
  # "lines": as above.  "words": "from 7 A*4 B+3 mod 3" and "7 A*4 -> 8".  A tokenizer with whole
  # words makes one token of a clause, which a small model learns to check with fewer labels.
  # "start last": "A*4 B+3 mod 3 from 7".
  layout: Literal["lines", "words", "start last"] = "lines"


HARD = Setting(
  operations=("*", "+", "-", "~"),
  lengths=(4, 5, 5, 6, 6),
  misread=(0.4,) * 5,
  rarity=4.0,
  stray=0.05,
  modulus=3,
  layout="words",
)


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
  setting: Setting = Setting()

  @property
  def text(self) -> str:
    clauses = [f"{name}{c.operation}{c.operand}" for name, c in zip(LETTERS, self.clauses)]
    start, layout = f"from {self.start}", self.setting.layout
    if layout == "lines":
      return "\n".join([*clauses, start])
    clauses.append(f"mod {self.setting.modulus}")
    return " ".join([start, *clauses] if layout == "words" else [*clauses, start])

  @property
  def answer(self) -> int:
    value = self.start
    for clause in self.clauses:
      value = apply(clause.operation, value, clause.operand)
    return value % self.setting.modulus


@dataclasses.dataclass(frozen=True)
class Solution:
  steps: tuple[str, ...]
  ratings: tuple[int, ...]  # of every step, also past the first error
  states: tuple[tuple[int, int, int] | None, ...]  # clause, value and older value before the step
  answer: int


def apply(operation: str, value: int, operand: int) -> int:
  """Returns the last digit of v OPERATION o, where "~" is |v - o|, "<" is o - v, "&" is 2 v + o."""
  results = {
    "*": value * operand,
    "+": value + operand,
    "-": value - operand,
    "~": abs(value - operand),
    "<": operand - value,
    "&": 2 * value + operand,
  }
  return results[operation] % 10


def make_problem(rng: np.random.Generator, level: int, setting: Setting = Setting()) -> Problem:
  """Draws a problem of a level (1 to 5) with its likely mistakes, from the rates above."""
  clauses = []
  for i in range(setting.lengths[level - 1]):
    operation = str(rng.choice(setting.operations))
    operand = int(rng.choice(setting.operands))
    if rng.random() < OPERATOR:
      misread = (CONFUSED[operation], operand)
    else:
      misread = (operation, int(rng.choice([o for o in setting.operands if o != operand])))
    clauses.append(
      Clause(
        operation=operation,
        operand=operand,
        misread=misread,
        misread_rate=rng.uniform(*MISREAD_RATE) ** setting.rarity
        * (rng.random() < setting.misread[level - 1]),
        slip=int(rng.choice([-1, 1])),
        slip_rate=rng.uniform(*LAPSE_RATE) ** setting.rarity * (rng.random() < SLIP),
        copy_rate=rng.uniform(*LAPSE_RATE) ** setting.rarity * (i > 0 and rng.random() < COPY),
      )
    )
  return Problem(int(rng.integers(1, 10)), tuple(clauses), level, setting)


Reading = tuple[str, int, int, int]  # operation, operand and value that a step reads; its slip


def likely_mistakes(clause: Clause, value: int, older: int, chance: np.ndarray) -> Reading:
  """Reads a clause after `value`, with the likely mistakes that happen.

  Args:
    older: the value before `value`, which may be copied in its place.
    chance: three numbers in [0, 1) to compare with the clause's rates of a misreading, a copy and a
      slip.
  """
  misread = chance[0] < clause.misread_rate
  operation, operand = clause.misread if misread else (clause.operation, clause.operand)
  read = older if chance[1] < clause.copy_rate else value
  return operation, operand, read, clause.slip if chance[2] < clause.slip_rate else 0


def rare_mistake(
  clause: Clause, value: int, older: int, setting: Setting, rng: np.random.Generator
) -> Reading:
  """Reads a clause after `value` with one of `STRAYS`; `older` is the value before `value`."""
  operation, operand, read, slip = clause.operation, clause.operand, value, 0
  stray = rng.choice(STRAYS)
  if stray == "result":
    slip = int(rng.choice([-3, -2, -1, 1, 2, 3]))
  elif stray == "value":
    read = older if older != value else (value + int(rng.integers(1, 10))) % 10
  elif stray == "operand":
    operand = int(rng.choice([o for o in setting.operands if o != operand]))
  else:
    operation = str(rng.choice([o for o in setting.operations if o != operation]))
  return operation, operand, read, slip


def write_step(
  i: int, clause: Clause, value: int, reading: Reading, layout: str
) -> tuple[str, int, int]:
  """Writes the step of clause i after `value` as it was read: its text, rating and result."""
  operation, operand, read, slip = reading
  result = (apply(operation, read, operand) + slip) % 10
  right = reading == (clause.operation, clause.operand, value, 0)
  return step_text(i, operation, operand, read, result, layout), 1 if right else -1, result


def step_text(i: int, operation: str, operand: int, value: int, result: int, layout: str) -> str:
  name = f"{LETTERS[i]}{operation}{operand}"
  return f"{name} {value}->{result}" if layout == "lines" else f"{value} {name} -> {result}"


def solve(problem: Problem, rng: np.random.Generator) -> Solution:
  """Samples a solution, with the exact rating of each step."""
  parts, layout = [], problem.setting.layout  # text, rating and state of each step
  value, older = problem.start, problem.start
  chance = rng.random((len(problem.clauses), 3))
  restated = rng.integers(len(problem.clauses)) if rng.random() < RESTATE else None
  for i, clause in enumerate(problem.clauses):
    if problem.setting.stray and rng.random() < problem.setting.stray:
      reading = rare_mistake(clause, value, older, problem.setting, rng)
    else:
      reading = likely_mistakes(clause, value, older, chance[i])
    text, rating, result = write_step(i, clause, value, reading, layout)
    parts.append((text, rating, (i, value, older)))
    older, value = value, result
    if i == restated:
      parts.append((f"now {value}", 0, None))
  answer = value % problem.setting.modulus
  parts.append((f"# Answer\n\n{answer}", 1, None))
  return Solution(*zip(*parts), answer)


def rate(problem: Problem, steps: Sequence[str]) -> tuple[int, ...]:
  """Returns the exact ratings of any steps, up to and including the first error.

  A value may be restated once, which is neutral.  A clause that is left out is an error, and so is
  an answer before the last clause, or anything after it.
  """
  value, i, may_restate, ratings = problem.start, 0, False, []
  for step in steps:
    left = i < len(problem.clauses)
    answer, rating = f"# Answer\n\n{value % problem.setting.modulus}", -1
    if left:
      operation, operand = problem.clauses[i].operation, problem.clauses[i].operand
      result = apply(operation, value, operand)
      right = step_text(i, operation, operand, value, result, problem.setting.layout)
    if left and step == right:
      value, i, may_restate, rating = result, i + 1, True, 1
    elif may_restate and step == f"now {value}":
      may_restate, rating = False, 0
    elif i == len(problem.clauses) and step == answer:
      i, may_restate, rating = i + 1, False, 1
    ratings.append(rating)
    if rating < 0:
      break
  return tuple(ratings)


def try_again(
  problem: Problem, state: tuple[int, int, int], taken: list[str], rng: np.random.Generator
) -> tuple[str, int] | None:
  """Draws another completion of a step, with its rating; None if every try is in `taken`.

  Args:
    taken: the step's completions so far, the solution's own first.  The second one may have the
      problem's misreading of the clause; further ones misread it at random, or few would differ.
  """
  i, value, older = state
  clause, setting = problem.clauses[i], problem.setting
  misread = clause.misread
  if len(taken) > 1:
    misread = (str(rng.choice(setting.operations)), int(rng.choice(setting.operands)))
  rates = {"misread_rate": CARELESS, "slip_rate": CARELESS, "copy_rate": CARELESS if i else 0}
  careless = dataclasses.replace(clause, misread=misread, **rates)
  for chance in rng.random((TRIES * len(taken), 3)):
    reading = likely_mistakes(careless, value, older, chance)
    text, rating, _ = write_step(i, clause, value, reading, setting.layout)
    if text not in taken:
      return text, rating
  return None


def make_row(
  problem: Problem, solution: Solution, rng: np.random.Generator, alternatives: int = 1
) -> dict:
  """Returns the solution as JSON of PRM800K's phase 2, labelled through the first error.

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


def distinct_problems(seed: int, count: int, setting: Setting = Setting()) -> Iterator[Problem]:
  """Yields `count` distinct problems of levels 1 to 5 in turn; ValueError if it finds fewer."""
  rng = np.random.default_rng(seed)
  seen = set()
  for i in range(count):
    level = i % 5 + 1
    tries = (make_problem(rng, level, setting) for _ in range(10_000))
    problem = next((each for each in tries if each.text not in seen), None)
    if problem is None:
      raise ValueError(
        f"found only {i} distinct problems, and no further one of level {level}; ask for fewer"
      )
    seen.add(problem.text)
    yield problem


class Builder(prm800k.RecordsBuilder):
  """Writes arithmetic problems with labelled solutions, as records of PRM800K's format."""

  name = "arithmetic"


@dataclasses.dataclass(frozen=True)
class Generator(config_lib.Checked):
  """The data of one seed; no problem is in both splits.

  Seeds are independent: about one test problem in six, mostly of level 1, is also among another
  seed's problems, with other likely mistakes.  Tune on seeds from 100 up, report on others.
  """

  seed: config_lib.Whole = 0  # for problems, mistakes and solutions
  train_problems: config_lib.Count = 4000
  solutions: config_lib.Count = 2  # labelled solutions of each problem
  alternatives: config_lib.Whole = 1  # further completions of a step, if as many are found
  test_problems: config_lib.Whole = 200  # the dataset needs at least one
  candidates: config_lib.Whole = 1024  # solutions sampled for each test problem, to rerank

  def problems(self) -> dict[str, list[Problem]]:
    stream = distinct_problems(self.seed, self.test_problems + self.train_problems)
    test = list(itertools.islice(stream, self.test_problems))
    return {"train": list(stream), "test": test}

  def rows(self) -> dict[str, Iterator[dict[str, Any]]]:
    """Generates labelled solutions of each split, as JSON objects of PRM800K's format."""
    return {split: self._rows(split, problems) for split, problems in self.problems().items()}

  def _rows(self, split: str, problems: list[Problem]) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng([self.seed, *split.encode()])
    for problem in problems:
      for _ in range(self.solutions):
        yield make_row(problem, solve(problem, rng), rng, self.alternatives)

  def write_candidates(self, directory: str | pathlib.Path) -> None:
    """Writes candidate solutions of the test problems, as input for scripts/score.py."""
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
