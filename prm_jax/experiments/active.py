"""Choosing what to label: active learning against uniform sampling (paper section 4.2)."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from prm_jax.experiments import intervals, workspace
from prm_jax.experiments.figures import Curve, Panel
from prm_jax.experiments.plan import Plan, middle
from prm_jax.experiments.results import Results, Table, percent
from prm_jax.experiments.study import Place, Study
from prm_jax.supervision import active as active_lib
from prm_jax.types import StepTree

TITLE = "Active learning"
QUESTION = (
  "How many labels does it save to choose which solutions to label? A selector, trained on one "
  "solution of each problem, scores the pool. Of each problem 80 % of the chosen are its most "
  "convincing wrong answers and 20 % the most convincing of the rest."
)
PAPER = (
  "Section 4.2 (a selector trained on one solution a problem scores 1,000 of each): 2.6 times the "
  "data efficiency of uniform labelling, by the slopes of fitted lines; the largest active set, "
  "200 a problem, is slightly below its line."
)
GROWING = {"uniform": "Uniform", "convincing": "Most convincing wrong answers"}
OTHERS = {
  "global": "Most convincing, over all problems",
  "entropy": "Highest entropy of steps",
  "uncertain": "Uncertain ensemble (ActPRM)",
  "coverage": "Most steps not yet covered",
}


def runs(plan: Plan) -> list[str]:
  """Names of the results of a seed."""
  growing = [f"{rule}-{n}" for n in plan.samples for rule in GROWING]
  return ["selector", "start", *growing, *(f"{rule}-{middle(plan.samples)}" for rule in OTHERS)]


def growing(rule: str, samples: Sequence[int]) -> list[str]:
  """The results of a rule by growing data, from that on which has the selector's labels alone."""
  return ["start", *(f"{rule}-{n}" for n in samples)]


def run(study: Study) -> None:
  """Trains and judges the models of one seed.

  The selector's labels are paid for, so every later model is trained on them too.
  """
  first = study.uniform(1)
  ensemble = {"heads": study.plan.heads}
  study.judged(
    "selector", "process", lambda: study.process_trees(first), "experiment: selector", **ensemble
  )

  study.judged("start", "process", lambda: study.process_trees(first), "experiment: start")

  @functools.cache
  def unlabelled() -> tuple[active_lib.Pool, list[Place]]:
    pool, places = study.pool(workspace.load(study.space.directory / "selector"))
    known = {*first}
    left = np.flatnonzero([place not in known for place in places])
    return pool.subset(left), [places[i] for i in left]

  def train(name: str, rule: str, per_problem: int, globally: bool = False) -> None:
    def trees() -> list[StepTree]:
      candidates, places = unlabelled()
      count = per_problem * (len(study.task.pool) if globally else 1)
      at = active_lib.select(candidates, rule, count, study.space.seed, not globally)
      return study.process_trees(first + [places[i] for i in at])

    study.judged(name, "process", trees, f"experiment: {rule}")

  for n in study.plan.samples:
    for rule in GROWING:
      train(f"{rule}-{n}", rule, n)
  n = middle(study.plan.samples)
  for rule in OTHERS:
    train(f"{rule}-{n}", "convincing" if rule == "global" else rule, n, rule == "global")


def summarise(results: Results) -> dict[str, Any]:
  """Curves, fitted lines and ratios, with intervals over seeds and problems."""
  samples, n = results.plan["samples"], middle(results.plan["samples"])
  names = ["selector", "start"] + [f"{rule}-{k}" for k in samples for rule in GROWING]
  names += [f"{rule}-{n}" for rule in OTHERS]
  curves = {name: results.accuracy(name) for name in names}
  sizes = {name: results.mean(name, "solutions") for name in names}
  grow = lambda at: {
    rule: np.stack([curves[name][:, :, at] for name in growing(rule, samples)], axis=-1)
    for rule in GROWING
  }
  size = {rule: [sizes[name] for name in growing(rule, samples)] for rule in GROWING}
  gain = lambda rule, k: results.intervals(curves[f"{rule}-{k}"] - curves[f"uniform-{k}"])
  return {
    "curves": {name: results.intervals(curve) for name, curve in curves.items()},
    "solutions": sizes,
    "labels": {name: results.labels(name) for name in names},
    "auroc": {name: results.mean(name, "auroc") for name in names if results.has(name, "auroc")},
    "efficiency": {
      str(results.n[at]): intervals.efficiency(grow(at), size, "uniform", results.crossed, common=1)
      for at in range(len(results.n))
      if results.n[at] >= 16 or at == len(results.n) - 1
    },
    "gains": {str(k): gain("convincing", k) for k in samples},
    "differences": {rule: gain(rule, n) for rule in ("convincing", *OTHERS)},
    "majority": results.intervals(results.problems("majority")),
  }


def panels(results: Results, summary: dict[str, Any]) -> list[Panel]:
  """Best-of-N of the largest N against labelled solutions, with the fitted lines."""
  samples, last = results.plan["samples"], results.n[-1]
  curves = []
  lines = summary["efficiency"][str(last)]
  for rule, label in GROWING.items():
    names = growing(rule, samples)
    x = [summary["solutions"][name] for name in names]
    curves.append(Curve.at_last(label, x, [summary["curves"][name] for name in names]))
  for i, rule in enumerate(GROWING):
    x = np.array([summary["solutions"][name] for name in growing(rule, samples)])
    y = 100 * (lines[rule]["intercept"] + lines[rule]["slope"] * np.log2(x))
    label = f"line, {GROWING[rule][0].lower()}{GROWING[rule][1:]}"
    curves.append(Curve(label, x, y, dashed=True, colour=i))
  n = middle(results.plan["samples"])
  rules = {**GROWING, **OTHERS}
  right = [
    Curve.over_n(label, results.n, summary["curves"][f"{rule}-{n}"])
    for rule, label in rules.items()
  ]
  return [
    Panel(curves, "labelled solutions", f"% problems solved (best-of-{last})"),
    Panel(right, f"N, {n} chosen solutions a problem", "% problems solved (best-of-N)"),
  ]


def tables(results: Results, summary: dict[str, Any]) -> list[Table]:
  """Tables of the page and the screen."""
  samples, last, n = results.plan["samples"], results.n[-1], middle(results.plan["samples"])
  rows = [
    [label, *(percent(summary["curves"][name]) for name in growing(rule, samples))]
    for rule, label in GROWING.items()
  ]
  gains = (percent(summary["gains"][str(k)], sign=True) for k in samples)
  rows.append(["convincing minus uniform", "", *gains])
  ratio = lambda found: f"{text(found['value'])} ({text(found['low'])} to {text(found['high'])})"
  text = lambda x: "none" if x is None else f"{x:.2f}"
  lines = [
    [at, ratio(each["convincing"]["data_ratio"]), ratio(each["convincing"]["slope_ratio"])]
    for at, each in summary["efficiency"].items()
  ]
  others = []
  for rule, label in {**GROWING, **OTHERS}.items():
    name = f"{rule}-{n}"
    change = percent(summary["differences"][rule], sign=True) if rule != "uniform" else ""
    labels = summary["labels"][name]
    negative = f"{100 * labels.get('-1', 0) / sum(labels.values()):.0f} %"
    cost = [
      f"{summary['solutions'][name]:,.0f}",
      f"{sum(labels.values()) / len(results.seeds):,.0f}",
    ]
    others.append([label, *cost, negative, percent(summary["curves"][name]), change])
  return [
    Table(
      f"Best-of-{last}, % of problems, by solutions of each problem chosen beside the selector's",
      ["rule", "0", *map(str, samples)],
      rows,
    ),
    Table(
      "Efficiency of the most convincing wrong answers over uniform, with 95 % intervals: how many "
      "times the solutions uniform needs for the same accuracy, and the ratio of slopes",
      ["best-of-N", "data", "slopes"],
      lines,
    ),
    Table(
      f"All rules, {n} chosen solutions a problem",
      ["rule", "solutions", "labels of steps", "negative", f"best-of-{last}, %", "minus uniform"],
      others,
    ),
  ]
