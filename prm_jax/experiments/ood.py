"""Out of distribution: domains that training never saw (paper section 5, Table 1)."""

import itertools
from typing import Any

import numpy as np

from prm_jax.aggregation.intervals import interval
from prm_jax.datasets import arithmetic
from prm_jax.experiments import models, tasks
from prm_jax.experiments.figures import Curve, Panel
from prm_jax.experiments.plan import Plan
from prm_jax.experiments.results import Results, Table, mean, means, number, percent
from prm_jax.experiments.study import Make, Study
from prm_jax.runtime import command_line

TITLE = "Out of distribution"
QUESTION = (
  "Do the models still pick well on problems of another kind? Process and outcome models of the "
  "largest training sets, on domains that neither training nor labelling ever saw."
)
PAPER = (
  "Table 1 is shown below. Its rows add up to 234 problems; the paper's text says 224. The "
  "problems were newer than the models' training data."
)
TABLE_1 = (  # domain, ORM, PRM, majority, problems
  ("AP Calculus", 68.9, 86.7, 80.0, 45),
  ("AP Chemistry", 68.9, 80.0, 71.7, 60),
  ("AP Physics", 77.8, 86.7, 82.2, 45),
  ("AMC10/12", 49.1, 53.2, 32.8, 84),
  ("Aggregate", 63.8, 72.9, 61.3, 234),
)
METHODS = {"orm": "ORM", "prm": "PRM", "majority": "Majority"}
FAMILIAR, AGGREGATE = "in distribution", "Aggregate"


def runs(plan: Plan) -> dict[str, Make]:
  return {"domains": _models}


def _models(study: Study, name: str) -> dict[str, Any]:
  """Trains both models of one seed and judges them on every domain."""
  tests = domains(study)  # reads files before anything is trained
  chosen = study.uniform(study.plan.samples[-1])
  scorers = {
    "prm": study.train("prm", "process", study.trees(chosen, "process"), "ood"),
    "orm": study.train("orm", "outcome", study.trees(chosen, "outcome_answer"), "ood"),
  }
  found: dict[str, dict[str, Any]] = {}
  for domain, task in tests.items():
    found[domain] = models.problems_of(task)
    for arm, scorer in scorers.items():
      judged = models.judged(scorer, task)
      found[domain] |= {arm: judged["accuracy"], f"{arm}_auroc": judged.get("auroc")}
  return {"domains": found}


def domains(study: Study) -> dict[str, tasks.Task]:
  """Returns the task of each domain, the familiar one first.

  Domains are files, or variants of the embedded domain.
  """
  plan = study.plan
  if plan.files.pool:
    named = command_line.named_files("--domains", plan.files.domains)
    if taken := named.keys() & {FAMILIAR, AGGREGATE}:
      raise ValueError(f"--domains {taken.pop()}: this name is a row of the table; choose another")
    tests = {name: tasks.Task((), tuple(study.read(path))) for name, path in named.items()}
    pool = {each.text for each in study.task.pool}
    for name, task in tests.items():
      if seen := sum(each.text in pool for each in task.test):
        raise ValueError(f"--domains {name}: {seen} of its problems are in the training pool")
    return {FAMILIAR: study.task} | tests
  rng = np.random.default_rng([study.seed, *b"domains"])
  known = {each.text for each in (*study.task.pool, *study.task.test)}
  by_domain = {}
  for name, setting in {FAMILIAR: plan.setting, **plan.domains}.items():
    stream = arithmetic.distinct_problems(study.seed + 5000, 10**6, setting)
    fresh = (each for each in stream if each.text not in known)
    problems = itertools.islice(fresh, plan.embedded.test_problems)
    test = tuple(tasks.sampled(each, plan.domain_samples, rng) for each in problems)
    by_domain[name] = tasks.Task((), test)
  return by_domain


def compared(results: Results) -> dict[str, dict[str, Any]]:
  """Returns Table 1 with intervals over seeds and problems, at every N of a domain.

  The aggregate takes the largest N of each domain.
  """
  by_seed = [run["domains"] for run in results.of("domains")]
  names = [*by_seed[0]]
  table, curves, crossed = {}, {}, {}
  for name in names:
    found = [domains[name] for domains in by_seed]
    crossed[name] = len({each["test_hash"] for each in found}) == 1  # the same for all seeds
    curves[name] = {key: np.array([each[key] for each in found]) for key in METHODS}
    table[name] = _compared(curves[name], crossed[name])
    table[name] |= {"n": found[0]["n"], "problems": curves[name]["prm"].shape[1]}
    table[name]["prm_auroc"] = [x["prm_auroc"] for x in found if x["prm_auroc"] is not None]
  unfamiliar = names[1:]
  if unfamiliar:  # each problem counts once, as in Table 1
    last = {
      key: np.concatenate([curves[name][key][:, :, -1:] for name in unfamiliar], axis=1)
      for key in METHODS
    }
    table[AGGREGATE] = _compared(last, all(crossed[name] for name in unfamiliar))
    table[AGGREGATE]["n"] = sorted({table[name]["n"][-1] for name in unfamiliar})
    table[AGGREGATE]["problems"] = sum(table[name]["problems"] for name in unfamiliar)
  return table


def _compared(curves: dict[str, np.ndarray], crossed: bool) -> dict[str, Any]:
  """Returns intervals of each method, and of PRM minus ORM."""
  curves = curves | {"prm - orm": curves["prm"] - curves["orm"]}
  return {key: interval(means(curve, crossed)) for key, curve in curves.items()}


def panels(results: Results) -> list[Panel]:
  """Returns a panel of best-of-N for each domain."""
  out = []
  for name, found in compared(results).items():
    if name != AGGREGATE:
      curves = [Curve.over_n(label, found["n"], found[key]) for key, label in METHODS.items()]
      out.append(Panel(curves, f"N, {name}", "% problems solved (best-of-N)"))
  return out


def tables(results: Results) -> list[Table]:
  """Returns the experiment's Table 1 and the paper's."""
  rows = []
  for name, found in compared(results).items():
    row = [name, *map(percent, (found[key] for key in METHODS))]
    row += [percent(found["prm - orm"], sign=True), number(mean(found.get("prm_auroc", ())))]
    row.append(", ".join(map(str, found["n"] if name == AGGREGATE else found["n"][-1:])))
    rows.append([*row, str(found["problems"])])
  header = ["domain", *METHODS.values(), "PRM minus ORM", "AUROC of steps", "N", "problems"]
  theirs = [[name, *map(str, values)] for name, *values in TABLE_1]
  return [
    Table("Best-of-N, % of problems, with 95 % intervals", header, rows),
    Table("The paper's Table 1: best-of-100, %", ["domain", *METHODS.values(), "problems"], theirs),
  ]
