"""Active learning: rules for what to label against uniform sampling (paper section 4.2)."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from prm_jax.experiments import figures
from prm_jax.experiments.figures import Curve, Panel
from prm_jax.experiments.plan import Plan, middle
from prm_jax.experiments.results import Results, Table, means, percent, ratio_interval
from prm_jax.experiments.study import Make, Place, Study

TITLE = "Active learning"
QUESTION = (
  "How many labels does it save to choose which solutions to label? A selector, trained on one "
  "solution of each problem, scores the pool. For each problem, 80 % of the chosen solutions are "
  "its most convincing wrong answers and 20 % the most convincing of the others."
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


def runs(plan: Plan) -> dict[str, Make]:
  """Returns the makers of a seed's results; the selectors come first, and choose for the others."""
  chosen = [(rule, n) for n in plan.samples for rule in GROWING]
  chosen += [(rule, middle(plan.samples)) for rule in OTHERS]
  made = {f"{rule}-{n}": functools.partial(_model, rule=rule, n=n) for rule, n in chosen}
  return {"start": _selector, "ensemble": _selector} | made | {"labeller": _labels}


def growing(rule: str, samples: Sequence[int]) -> list[str]:
  """Returns the names of a rule's results, by growing data; the first is the selector alone."""
  return ["start", *(f"{rule}-{n}" for n in samples)]


def _selector(study: Study, name: str) -> dict[str, Any]:
  trees = study.trees(study.uniform(1), "process")
  if name == "start":
    return study.judged(name, "process", trees, "selector")
  return study.judged(name, "process", trees, "ensemble", heads=study.plan.heads)


def _model(study: Study, name: str, rule: str, n: int) -> dict[str, Any]:
  """Trains a model on what a rule chooses and on the selector's labels, and judges it."""
  trees = study.trees(study.uniform(1) + _choice(study, rule, n), "process")
  return study.judged(name, "process", trees, rule)


def _choice(study: Study, rule: str, per_problem: int) -> list[Place]:
  """Returns the solutions that a rule chooses in addition to the selector's."""
  first, seed = study.uniform(1), study.seed
  if rule == "global":
    count = per_problem * len(study.task.pool)
    return study.choice("start", "convincing", count, seed, first, per_problem=False)
  selector = "ensemble" if rule == "uncertain" else "start"
  return study.choice(selector, rule, per_problem, seed, first)


def _labels(study: Study, name: str) -> dict[str, Any]:
  """Returns the labeller's errors on the solutions that each rule chooses."""
  n = middle(study.plan.samples)
  return {rule: study.errors(_choice(study, rule, n)) for rule in (*GROWING, *OTHERS)}


def _efficiency(results: Results, size: Callable[[str], float], at: int = -1) -> dict[str, Any]:
  """Returns the `efficiency` of the growing rules at an index of N, given each result's size."""
  names = {rule: growing(rule, results.plan["samples"]) for rule in GROWING}
  curves = {
    rule: np.stack([results.accuracy(name)[:, :, at] for name in each], axis=-1)
    for rule, each in names.items()
  }
  sizes = {rule: [*map(size, each)] for rule, each in names.items()}
  return efficiency(curves, sizes, "uniform", results.crossed)


def efficiency(
  arms: Mapping[str, np.ndarray],
  sizes: Mapping[str, Sequence[float]],
  base: str,
  crossed: bool = False,
) -> dict[str, Any]:
  """Returns the data efficiency of each arm, relative to the arm `base`.

  A line, accuracy = a + b log2(size), is fitted to each arm by least squares (paper section 4.2,
  which compares slopes).  `slope_ratio` is b of the arm over b of `base`.  `data_ratio` is how many
  times the labels `base` needs for the same accuracy: 2 to the power of the mean horizontal
  distance of the lines, at the accuracies of the arm's sizes.

  Args:
    arms: `[S, P, K]` accuracies at K sizes.  At the first size all arms are the same model; it
      counts in the fit, but the horizontal distance is taken at the other sizes.
    sizes: the number of labelled solutions, or of labels of steps, at each size.

  Returns:
    Line, slope_ratio and data_ratio of each arm, the last two with intervals.  A ratio whose base
    has no positive slope in more than 2.5 % of the resamples has no limits (None).
  """
  x = {name: np.log2(sizes[name]) for name in arms}
  lines = {name: np.polyfit(x[name], means(arms[name], crossed).T, 1) for name in arms}
  out, (slope_to, intercept_to) = {}, lines[base]
  for name, (slope, intercept) in lines.items():  # [1 + R] each
    at = x[name][1:].mean()
    with np.errstate(all="ignore"):
      distance = (intercept + slope * at - intercept_to) / slope_to - at
      by_slope, by_data = np.where(slope_to > 0, [slope / slope_to, 2**distance], np.nan)
    out[name] = {
      "slope": float(slope[0]),
      "intercept": float(intercept[0]),
      "slope_ratio": ratio_interval(by_slope),
      "data_ratio": ratio_interval(by_data),
    }
  return out


def _missed(results: Results) -> dict[str, float]:
  """Returns the share of chosen wrong steps that the labeller called right, by rule, if known."""
  errors = results.of("labeller")
  return {
    rule: sum(each[rule]["missed"] for each in errors) / sum(each[rule]["wrong"] for each in errors)
    for rule in (*GROWING, *OTHERS)
    if all(each[rule] and each[rule]["wrong"] for each in errors)
  }


def panels(results: Results) -> list[Panel]:
  """Returns panels of best-of-N over labelled solutions, with the fitted lines, and over N."""
  samples, last = results.plan["samples"], results.n[-1]
  solutions = lambda name: results.mean(name, "solutions")
  curves, fitted, lines = [], [], _efficiency(results, solutions)
  for i, (rule, label) in enumerate(GROWING.items()):
    names = growing(rule, samples)
    x = np.array([*map(solutions, names)])
    curves.append(Curve.at_last(label, x, [*map(results.curve, names)]))
    y = 100 * (lines[rule]["intercept"] + lines[rule]["slope"] * np.log2(x))
    label = f"line, {label[0].lower()}{label[1:]}"
    fitted.append(Curve(label, x, y, dashed=True, colour=i))
  n = middle(samples)
  labels = {f"{rule}-{n}": label for rule, label in (GROWING | OTHERS).items()}
  return [
    Panel([*curves, *fitted], "labelled solutions", f"% problems solved (best-of-{last})"),
    figures.over_n(labels, results, f"N, {n} chosen solutions a problem"),
  ]


def tables(results: Results) -> list[Table]:
  """Returns the tables of page and screen."""
  samples, last, n = results.plan["samples"], results.n[-1], middle(results.plan["samples"])
  minus_uniform = lambda rule, k: percent(results.minus(f"{rule}-{k}", f"uniform-{k}"), sign=True)
  rows = [
    [label, *(percent(results.curve(name)) for name in growing(rule, samples))]
    for rule, label in GROWING.items()
  ]
  gains = (minus_uniform("convincing", k) for k in samples)
  rows.append(["convincing minus uniform", "", *gains])
  solutions = lambda name: results.mean(name, "solutions")
  steps = lambda name: sum(results.labels(name).values()) / len(results.seeds)
  lines = []
  for at, k in enumerate(results.n):
    if k >= 16 or k == last:
      by_solution, by_step = (
        _efficiency(results, size, at)["convincing"] for size in (solutions, steps)
      )
      found = by_solution["slope_ratio"], by_solution["data_ratio"], by_step["data_ratio"]
      lines.append([str(k), *(percent(each, scale=1, digits=2) for each in found)])
  others, missed = [], _missed(results)
  for rule, label in (GROWING | OTHERS).items():
    name, labels = f"{rule}-{n}", results.labels(f"{rule}-{n}")
    row = [label, f"{solutions(name):,.0f}", f"{steps(name):,.0f}"]
    row.append(f"{100 * labels.get('-1', 0) / sum(labels.values()):.0f} %")
    row.append(f"{100 * missed[rule]:.1f} %" if rule in missed else "")
    row += [percent(results.curve(name)), "" if rule == "uniform" else minus_uniform(rule, n)]
    others.append(row)
  header = ["rule", "solutions", "labels of steps", "negative", "missed by the labeller"]
  header += [f"best-of-{last}, %", "minus uniform"]
  return [
    Table(
      f"Best-of-{last}, % of problems, by solutions of each problem chosen after the selector's",
      ["rule", "0", *map(str, samples)],
      rows,
    ),
    Table(
      "Efficiency of the most convincing wrong answers over uniform, with 95 % intervals: ratio of "
      "the lines' slopes, as the paper has it; and how many times the solutions, or the labels of "
      "steps, uniform needs for the same accuracy",
      ["best-of-N", "slopes", "solutions", "labels of steps"],
      lines,
    ),
    Table(f"All rules, {n} chosen solutions a problem", header, others),
  ]
