"""The generated data: the same for everyone, with exact ratings."""

import dataclasses
import hashlib
import json
import re

import numpy as np
import pytest

from prm_jax.datasets import arithmetic
from prm_jax.experiments.plan import DOMAINS

SMALL = arithmetic.Generator(train_problems=30, test_problems=6)
# Of the rows that the figures of configs/arithmetic.py were measured on.
DEFAULT = {"train": "d6e18fe141847b7c", "test": "1adf3cc7d437ee20"}


def test_the_default_data_do_not_change():
  """Published figures and stored runs belong to these rows."""
  for split, rows in SMALL.rows().items():
    content = "".join(json.dumps(row) + "\n" for row in rows)
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == DEFAULT[split]


def test_alternatives_differ_and_are_rated_exactly():
  """Nearly every step that computes has as many as asked for, each text once."""
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
  """A step is right if it goes on from the last value, with its clause as written."""
  rng, wrong = np.random.default_rng(0), 0
  for problem in arithmetic.distinct_problems(0, 100, setting):
    clauses = dict(re.findall(r"\b([A-H])([*+~<&-]\d)", problem.text))
    assert len(clauses) == len(problem.clauses)
    solution = arithmetic.solve(problem, rng)
    value, todo = int(re.search(r"from (\d)", problem.text)[1]), sorted(clauses)
    for text, rating in zip(solution.steps, solution.ratings):
      if found := re.fullmatch(r"(\d) ([A-H])([*+~<&-]\d) -> (\d)", text):
        exact = arithmetic.apply(clauses[found[2]][0], value, int(clauses[found[2]][1]))
        right = (int(found[1]), found[2], found[3]) == (value, todo.pop(0), clauses[found[2]])
        assert rating == (1 if right and int(found[4]) == exact else -1)
        wrong += rating < 0
        value = int(found[4])
      elif rating == 0:
        assert text == f"now {value}"
      else:
        assert text == f"# Answer\n\n{value % setting.modulus}" and rating == 1
    if min(solution.ratings) >= 0:
      assert solution.answer == problem.answer
  assert wrong


@pytest.mark.parametrize("name", [*DOMAINS, "quick start"])
def test_ratings_of_anybodys_steps_are_the_solvers(name):
  """Up to the first error; other orders, omissions and additions are errors."""
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
