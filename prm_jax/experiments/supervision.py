"""Process against outcome supervision, on identical solutions (paper section 4.1, Figure 4)."""

import functools
from typing import Any

from prm_jax.experiments import figures, models
from prm_jax.experiments.figures import Curve, Panel
from prm_jax.experiments.plan import Plan
from prm_jax.experiments.results import Results, Table, mean, number, percent
from prm_jax.experiments.study import Make, Place, Study

TITLE = "Process and outcome supervision"
QUESTION = (
  "Does a label for each step teach a reward model more than a label for the whole solution? "
  "Three series on the same solutions: step labels of a large PRM up to its first wrong step; one "
  "outcome of the same PRM, right when every step passes; and one outcome from the final answer."
)
ARMS = {
  "process": "Process supervision",
  "outcome_labeller": "Outcome supervision, by the large PRM",
  "outcome_answer": "Outcome supervision, by final answer",
}
PAIRS = (("process", "outcome_labeller"), ("outcome_labeller", "outcome_answer"))  # compared
REPEATS = "outcome_repeats"  # also by final answer; the largest set's samples, with repeats
BASES = {"process-0": "process", "outcome-0": "outcome"}  # objective of each base, before any label
PAPER = (
  "Figure 4 (small models labelled by PRM_large, 1 to 200 solutions a problem, best-of-500, three "
  "seeds): process supervision is above outcome supervision by the large PRM, and that above "
  "outcome supervision by final answer, at every size but the smallest, and at every N. The paper "
  "gives the curves without numbers; at large scale (Figure 3) PRM 78.2, ORM 72.4, majority 69.6 "
  "for best-of-1860."
)


def runs(plan: Plan) -> dict[str, Make]:
  most, made = plan.samples[-1], {}
  if not plan.files.base:  # a base that is given need not be a reward model
    made |= {name: functools.partial(_base, objective=each) for name, each in BASES.items()}
  for n in plan.samples:
    made |= {f"{arm}-{n}": functools.partial(_model, arm=arm, n=n) for arm in ARMS}
  made[f"{REPEATS}-{most}"] = functools.partial(_model, arm=REPEATS, n=most)
  return made | {"labeller": _labels}


def _base(study: Study, name: str, objective: str) -> dict[str, Any]:
  return study.measured(models.load(study.bases[objective]), [])


def _model(study: Study, name: str, arm: str, n: int) -> dict[str, Any]:
  """Trains and judges a model of an arm on n solutions of each problem."""
  if arm == REPEATS:
    trees = study.trees(_samples(study, n), "outcome_answer")
    return study.judged(name, "outcome", trees, "repeats")
  trees = study.trees(study.uniform(n), arm)
  return study.judged(name, arm.partition("_")[0], trees, ARMS[arm])


def _samples(study: Study, per_problem: int) -> list[Place]:
  """Returns each problem's first samples, repeated solutions included."""
  return [(p, s) for p, each in enumerate(study.task.pool) for s in each.samples[:per_problem]]


def _labels(study: Study, name: str) -> dict[str, Any]:
  """Returns the labeller's errors, and how often wrong steps lead to right answers, if known."""
  most, shares = study.plan.samples[-1], {}
  sets = {str(n): study.uniform(n) for n in study.plan.samples}
  sets["samples"] = _samples(study, most)
  for key, chosen in sets.items():
    solutions = [study.task.pool[p].solutions[s] for p, s in chosen]
    right = [x for x in solutions if x.correct and x.ratings is not None]
    shares[key] = mean(min(x.ratings) < 0 for x in right)
  return {"exact": study.errors(sets[str(most)]), "right_answers_by_wrong_steps": shares}


def panels(results: Results) -> list[Panel]:
  """Returns Figure 4a, over data at the largest N, and 4b, over N with the most data."""
  samples, last = results.plan["samples"], results.n[-1]
  left = [
    Curve.at_last(label, samples, [results.curve(f"{arm}-{k}") for k in samples])
    for arm, label in ARMS.items()
  ]
  labels = {f"{arm}-{samples[-1]}": label for arm, label in ARMS.items()}
  labels["majority"] = "Majority voting"
  return [
    Panel(left, "solutions labelled per problem", f"% problems solved (best-of-{last})"),
    figures.over_n(labels, results, f"N, models of {samples[-1]} solutions a problem"),
  ]


def tables(results: Results) -> list[Table]:
  """Returns the tables of page and screen."""
  last, samples = results.n[-1], results.plan["samples"]
  out = [_series(results, at) for at in reversed(results.at(16, 64))]
  percentage = lambda values: number(mean(values), 1, 100, "none")
  by_seed = results.of("labeller")
  share = lambda key: percentage(x["right_answers_by_wrong_steps"][str(key)] for x in by_seed)
  header = ["solutions a problem", *map(str, samples), f"{samples[-1]}, with repeats"]
  shares = ["share of the right answers", *map(share, (*samples, "samples"))]
  out.append(Table("Right answers from wrong steps, %", header, [shares]))
  exact = [each["exact"] for each in by_seed if each["exact"]]
  if exact:
    errors = {
      "missed_share": "wrong steps missed",
      "false_alarm_share": "right steps called wrong",
      "first_errors_found": "first errors found",
      "outcomes_wrong": "outcomes wrong",
    }
    shares = [percentage(each[key] for each in exact) for key in errors]
    caption = "The labeller against exact labels, % (mean over seeds)"
    out.append(Table(caption, [*errors.values()], [shares]))
  for kind in ("level", "difficulty"):
    groups = results.breakdown([f"{arm}-{samples[-1]}" for arm in ARMS], kind)
    header = [kind, "problems", *ARMS.values(), "Majority voting"]
    rows = [
      [name, str(group["problems"]), *(f"{100 * x:.1f}" for x in group["accuracy"])]
      for name, group in groups.items()
    ]
    out.append(Table(f"Best-of-{last} by {kind}, models of {samples[-1]} solutions", header, rows))
  return out


def _series(results: Results, at: int) -> Table:
  """Returns the table of best-of-N of every arm, and of differences between arms, at one N."""
  samples, accuracy = results.plan["samples"], results.accuracy
  has_bases = any(each["run"] in BASES for each in results.runs)
  base = lambda arm: accuracy(f"{arm.partition('_')[0]}-0")
  gain = lambda arm, n: accuracy(f"{arm}-{n}") - base(arm)
  cell = lambda curve, sign=False: percent(results.intervals(curve), sign, at)
  rows = []
  for arm, label in ARMS.items():
    curves = (cell(accuracy(f"{arm}-{n}")) for n in samples)
    rows.append([label, cell(base(arm)) if has_bases else "", *curves])
    if has_bases:
      rows.append(["its gain over the base", "", *(cell(gain(arm, n), True) for n in samples)])
  for a, b in PAIRS:
    name = f"{ARMS[a]} minus {ARMS[b][0].lower()}{ARMS[b][1:]}"
    differences = (cell(accuracy(f"{a}-{n}") - accuracy(f"{b}-{n}"), True) for n in samples)
    rows.append([name, cell(base(a) - base(b), True) if has_bases else "", *differences])
  if has_bases:
    beyond = (cell(gain("process", n) - gain("outcome_labeller", n), True) for n in samples)
    rows.append(["Process minus the large PRM's outcomes, beyond their bases", "", *beyond])
  repeats = "Outcome supervision, by final answer of samples with repeats"
  rows.append([repeats, *[""] * len(samples), cell(accuracy(f"{REPEATS}-{samples[-1]}"))])
  return Table(
    f"Best-of-{results.n[at]}, % of problems, with 95 % intervals",
    ["solutions a problem", "0: its base", *map(str, samples)],
    rows,
  )
