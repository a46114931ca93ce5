"""The generated arithmetic data: reproducible rows with exact ratings."""

import dataclasses
import hashlib
import json
import re

import numpy as np
import pytest

from prm_jax.datasets import arithmetic
from prm_jax.experiments.plan import DOMAINS

SMALL = arithmetic.Generator(train_problems=30, test_problems=6)
# SHA-256 of the rows on which the figures of configs/arithmetic.py were measured.
DEFAULT = {"train": "d6e18fe141847b7c", "test": "1adf3cc7d437ee20"}


def test_default_rows_do_not_change():
  """The default settings generate the rows that published figures were measured on."""
  for split, rows in SMALL.rows().items():
    content = "".join(json.dumps(row) + "\n" for row in rows)
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == DEFAULT[split]


def test_a_size_of_0_is_an_error():
  """A generator without solutions is an error that names the option."""
  with pytest.raises(ValueError, match=r"generator\.solutions=0: Expected"):
    dataclasses.replace(SMALL, solutions=0)


def test_alternatives_differ_and_are_rated_exactly():
  """Nearly every computed step has the requested number of distinct, rightly rated alternatives."""
  generator = dataclasses.replace(SMALL, alternatives=5)
  counts = []
  for row in generator.rows()["train"]:
    clauses = dict(re.findall(r"^([A-H])(.\d)$", row["question"]["problem"], re.M))
    value = int(row["question"]["problem"].split()[-1])
    for step in row["label"]["steps"]:
      texts = [completion["text"] for completion in step["completions"]]
      assert len(set(texts)) == len(texts)
      if "->" not in texts[0]:
        continue
      counts.append(len(texts) - 1)
      for text, completion in zip(texts, step["completions"]):
        name, operation, operand, *_ = text.replace(" ", "")
        exact = arithmetic.apply(operation, value, int(operand))
        right = text == f"{name}{clauses[name]} {value}->{exact}"
        assert completion["rating"] == (1 if right else -1)
      value = int(texts[0][-1])
  assert max(counts) == 5 and sum(counts) > 4.5 * len(counts)


@pytest.mark.parametrize("setting", [arithmetic.HARD, *DOMAINS.values()], ids=lambda s: s.layout)
def test_settings_for_experiments_are_rated_exactly(setting):
  """A step is right exactly if it applies the next clause as written to the last value."""
  rng, wrong = np.random.default_rng(0), 0
  for problem in arithmetic.distinct_problems(0, 100, setting):
    clauses = dict(re.findall(r"\b([A-H])([*+~<&-]\d)", problem.text))
    assert len(clauses) == len(problem.clauses)
    solution = arithmetic.solve(problem, rng)
    value, todo = int(re.search(r"from (\d)", problem.text)[1]), sorted(clauses)
    for text, rating in zip(solution.steps, solution.ratings):
      if match := re.fullmatch(r"(\d) ([A-H])([*+~<&-]\d) -> (\d)", text):
        before, name, clause, after = match.groups()
        exact = arithmetic.apply(clauses[name][0], value, int(clauses[name][1]))
        right = (int(before), name, clause) == (value, todo.pop(0), clauses[name])
        assert rating == (1 if right and int(after) == exact else -1)
        wrong += rating < 0
        value = int(after)
      elif rating == 0:
        assert text == f"now {value}"
      else:
        assert text == f"# Answer\n\n{value % setting.modulus}" and rating == 1
    if min(solution.ratings) >= 0:
      assert solution.answer == problem.answer
  assert wrong


@pytest.mark.parametrize("name", [*DOMAINS, "quick start"])
def test_rating_given_steps_agrees_with_the_solver(name):
  """`rate` gives the solver's ratings up to the first error; omitted or added steps are errors."""
  rng, setting = np.random.default_rng(0), DOMAINS.get(name, arithmetic.Setting())
  for problem in arithmetic.distinct_problems(0, 60, setting):
    solution = arithmetic.solve(problem, rng)
    first = solution.ratings.index(-1) + 1 if -1 in solution.ratings else len(solution.ratings)
    assert arithmetic.rate(problem, solution.steps) == solution.ratings[:first]
    if -1 not in solution.ratings:
      steps, count = list(solution.steps), len(solution.steps)
      assert arithmetic.rate(problem, [*steps, steps[-1]])[count:] == (-1,)
      clause = next(i for i, state in enumerate(solution.states) if state)
      assert arithmetic.rate(problem, steps[:clause] + steps[clause + 1 :])[-1] == -1
      restated = f"now {problem.answer}"
      if problem.setting.modulus == 10 and restated not in steps:
        more = [*steps[:-1], restated, steps[-1]]
        assert arithmetic.rate(problem, more)[-2:] == (0, 1)
        assert arithmetic.rate(problem, [*steps[:-1], restated, restated])[-2:] == (0, -1)
