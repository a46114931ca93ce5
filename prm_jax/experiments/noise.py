"""Label quality: how flipped labels harm process and outcome models, and how labellers agree."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from prm_jax.evaluation.judged import first_below
from prm_jax.experiments.figures import Curve, Panel
from prm_jax.experiments.plan import Plan, middle
from prm_jax.experiments.results import Results, Table, mean, number, percent
from prm_jax.experiments.study import Make, Study
from prm_jax.supervision import label_answers, synthetic

TITLE = "Label quality"
QUESTION = (
  "What do wrong labels cost? A share of the labels is flipped at random: of steps for the process "
  "model, of whole solutions for the outcome model. The two shares are not the same damage: a step "
  "that is wrongly called wrong ends the labels of its solution. Two independent labellers with "
  "this error rate agree as often as the table says, so agreement on shared items tells the noise."
)
PAPER = (
  "The paper injects no noise. Its labellers had to agree with 75 % of the screening labels, and "
  "quality-control problems were mixed in throughout (appendix B); the large PRM that labels in "
  "section 4 makes mistakes too (appendix H)."
)
ARMS = {"process": "Process supervision", "outcome": "Outcome supervision, by final answer"}


def runs(plan: Plan) -> dict[str, Make]:
  return {
    f"{arm}-{share:g}": functools.partial(make, share=share)
    for share in plan.noise
    for arm, make in (("process", _process), ("outcome", _outcome))
  }


def _process(study: Study, name: str, share: float) -> dict[str, Any]:
  """Trains and judges a process model, and measures the agreement of two such labellers."""
  solutions = study.solutions(study.uniform(middle(study.plan.samples)))
  labels, seed = [each for _, _, each in solutions], study.seed
  mine, theirs = (
    [
      synthetic.process(text, each.steps, ratings)
      for (text, each, _), ratings in zip(solutions, flipped(labels, share, seed))
    ]
    for seed in (seed, seed + 1000)
  )
  pairs = [pair for a, b in zip(mine, theirs) for pair in zip(a.labels, b.labels)]
  ends = [(first_below(x.labels, 0), first_below(given, 0)) for x, given in zip(mine, labels)]
  return study.judged(name, "process", mine, "noise") | {
    "agreement": label_answers.agreement(pairs),
    "moved": float(np.mean([noisy != given for noisy, given in ends])),
  }


def _outcome(study: Study, name: str, share: float) -> dict[str, Any]:
  """Trains and judges an outcome model."""
  solutions = study.solutions(study.uniform(middle(study.plan.samples)))
  rng = np.random.default_rng([study.seed, *b"outcome"])
  wrong = rng.random(len(solutions)) < share
  trees = [
    synthetic.outcome(text, each.steps, each.correct != flip)
    for (text, each, _), flip in zip(solutions, wrong)
  ]
  return study.judged(name, "outcome", trees, "noise")


def flipped(ratings: Sequence[Sequence[int]], share: float, seed: int) -> list[tuple[int, ...]]:
  """Returns the ratings with a share of them flipped: -1 to 1, and 0 and 1 to -1.

  A larger share flips all that a smaller share does.
  """
  rng = np.random.default_rng([seed, *b"process"])
  flip = lambda rating: 1 if rating < 0 else -1
  return [
    tuple(flip(r) if wrong else r for r, wrong in zip(each, rng.random(len(each)) < share))
    for each in ratings
  ]


def _lost(results: Results, arm: str, share: float) -> dict[str, list]:
  """Returns the change of best-of-N from the first share, which has no flips."""
  return results.minus(f"{arm}-{share:g}", f"{arm}-{results.plan['noise'][0]:g}")


def panels(results: Results) -> list[Panel]:
  """Returns panels of best-of-N at the largest N over the share of flips, and of its change."""
  shares, last = results.plan["noise"], results.n[-1]
  solved = lambda arm, share: results.curve(f"{arm}-{share:g}")
  titles = {f"% problems solved (best-of-{last})": solved}
  titles["change against no noise, points"] = functools.partial(_lost, results)
  out = []
  for title, found in titles.items():
    curves = [
      Curve.at_last(label, [100 * s for s in shares], [found(arm, s) for s in shares])
      for arm, label in ARMS.items()
    ]
    out.append(Panel(curves, "% labels flipped", title, log=False))
  return out


def tables(results: Results) -> list[Table]:
  """Returns the table of page and screen."""
  shares, last = results.plan["noise"], results.n[-1]
  rows = [
    [label, *(percent(results.curve(f"{arm}-{s:g}")) for s in shares)]
    for arm, label in ARMS.items()
  ]
  rows += [
    [f"{label}: change", "", *(percent(_lost(results, arm, s), True) for s in shares[1:])]
    for arm, label in ARMS.items()
  ]
  runs = [f"process-{s:g}" for s in shares]
  agreement = lambda run, key: mean(each["agreement"][key] for each in results.of(run))
  counts = (f"{sum(results.labels(run).values()) / len(results.seeds):,.0f}" for run in runs)
  rows.append(["labelled steps, up to the first error", *counts])
  moved = (f"{100 * results.mean(run, 'moved'):.1f}" for run in runs)
  rows.append(["solutions with another first error, %", *moved])
  agree = (f"{100 * agreement(run, 'share'):.1f}" for run in runs)
  rows.append(["two such labellers agree, % of steps", *agree])
  # Kappa is not defined where all labels are the same.
  kappas = (number(agreement(run, "kappa"), 2, missing="none") for run in runs)
  rows.append(["Cohen's kappa of right and wrong", *kappas])
  header = ["labels flipped", *(f"{100 * s:g} %" for s in shares)]
  return [Table(f"Best-of-{last}, % of problems, with 95 % intervals", header, rows)]
