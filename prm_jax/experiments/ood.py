"""Out of distribution: domains that training never saw (paper section 5, Table 1)."""

from typing import Any

import numpy as np

from prm_jax.datasets import arithmetic
from prm_jax.experiments import intervals, tasks, workspace
from prm_jax.experiments.figures import Curve, Panel
from prm_jax.experiments.plan import Plan
from prm_jax.experiments.results import Results, Table, percent
from prm_jax.experiments.study import Study
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
AGGREGATE = "Aggregate"


def runs(plan: Plan) -> list[str]:
  """Names of the results of a seed."""
  return ["domains"]


def run(study: Study) -> None:
  """Trains both models of one seed and judges them on every domain."""
  found = domains(study)  # which reads files, before anything is trained

  def make() -> dict[str, Any]:
    chosen = study.uniform(study.plan.samples[-1])
    models = {
      "prm": study.train("prm", "process", study.process_trees(chosen), "experiment: ood"),
      "orm": study.train("orm", "outcome", study.outcome_trees(chosen, False), "experiment: ood"),
    }
    return {"domains": {name: judged(models, each) for name, each in found.items()}}

  study.space.result("domains", make)


def domains(study: Study) -> dict[str, tasks.Task]:
  """What is tested by domain, the familiar one first: files, or variants of the embedded domain."""
  plan, separator = study.plan, study.plan.process.data.separator
  if plan.files.pool:
    named = command_line.named_files("--domains", plan.files.domains)
    limits = (separator, plan.files.problems, plan.files.samples)
    return {"in distribution": study.task} | {
      name: tasks.Task((), tuple(tasks.read(path, *limits))) for name, path in named.items()
    }
  sizes = plan.embedded
  rng = np.random.default_rng([study.space.seed, *b"domains"])
  known = {each.text for each in (*study.task.pool, *study.task.test)}
  found = {}
  for name, setting in {"in distribution": plan.setting, **plan.domains}.items():
    stream = arithmetic.distinct_problems(study.space.seed + 5000, 10**6, setting)
    fresh = (each for each in stream if each.text not in known)
    found[name] = tasks.Task(
      (),
      tuple(
        tasks.sampled(next(fresh), plan.domain_samples, rng) for _ in range(sizes.test_problems)
      ),
    )
  return found


def judged(models: dict[str, Any], task: tasks.Task) -> dict[str, Any]:
  """Best-of-N of each method, and AUROC of the process model on steps with known ratings."""
  found = workspace.problems_of(task)
  for name, scorer in models.items():
    result = workspace.judged(scorer, task)
    found[name] = result["accuracy"]
    found[f"{name}_auroc"] = result.get("auroc")
  return found


def summarise(results: Results) -> dict[str, Any]:
  """Table 1 at the largest N of each domain, with intervals over seeds and problems."""
  runs_ = results.of("domains")
  names = [*runs_[0]["domains"]]
  table, crossed = {}, {}
  for name in names:
    each = [run["domains"][name] for run in runs_]
    crossed[name] = len({found["test_hash"] for found in each}) == 1  # the same for all seeds
    curves = {key: np.array([found[key] for found in each]) for key in METHODS}
    table[name] = _compared(curves, crossed[name])
    table[name] |= {"n": each[0]["n"], "problems": curves["prm"].shape[1]}
    for key in ("prm_auroc", "orm_auroc"):
      table[name][key] = [found[key] for found in each if found[key] is not None]
  unfamiliar = names[1:]
  if unfamiliar:  # each problem counts once, as in Table 1
    last = lambda key: np.concatenate(
      [np.array([run["domains"][name][key] for run in runs_])[:, :, -1:] for name in unfamiliar], 1
    )
    same = all(crossed[name] for name in unfamiliar)
    table[AGGREGATE] = _compared({key: last(key) for key in METHODS}, same)
    table[AGGREGATE]["n"] = sorted({table[name]["n"][-1] for name in unfamiliar})
    table[AGGREGATE]["problems"] = sum(table[name]["problems"] for name in unfamiliar)
  return {"table": table}


def _compared(curves: dict[str, np.ndarray], crossed: bool) -> dict[str, Any]:
  """Intervals of each method, and of PRM minus ORM."""
  curves = curves | {"prm - orm": curves["prm"] - curves["orm"]}
  return {key: intervals.intervals(curve, crossed) for key, curve in curves.items()}


def panels(results: Results, summary: dict[str, Any]) -> list[Panel]:
  """Best-of-N in each domain."""
  return [
    Panel(
      [Curve.over_n(label, found["n"], found[key]) for key, label in METHODS.items()],
      f"N, {name}",
      "% problems solved (best-of-N)",
    )
    for name, found in summary["table"].items()
    if name != AGGREGATE
  ]


def tables(results: Results, summary: dict[str, Any]) -> list[Table]:
  """Table 1."""
  text = lambda values: f"{np.mean(values):.3f}" if values else ""
  rows = [
    [
      name,
      *(percent(found[key]) for key in METHODS),
      percent(found["prm - orm"], sign=True),
      text(found.get("prm_auroc")),
      ", ".join(map(str, found["n"] if name == AGGREGATE else found["n"][-1:])),
      str(found["problems"]),
    ]
    for name, found in summary["table"].items()
  ]
  header = ["domain", *METHODS.values(), "PRM minus ORM", "AUROC of steps", "N", "problems"]
  theirs = [[name, *map(str, values)] for name, *values in TABLE_1]
  return [
    Table("Best-of-N, % of problems, with 95 % intervals", header, rows),
    Table("The paper's Table 1: best-of-100, %", ["domain", *METHODS.values(), "problems"], theirs),
  ]
