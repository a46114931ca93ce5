"""The evaluations of a run by step: which was best, and when to stop for want of a better one."""

import math
from collections.abc import Mapping
from typing import Any, get_args

from prm_jax import config as config_lib


def brief(evaluation: Mapping[str, Any]) -> dict[str, float | None]:
  """The metrics that `train.best_metric` may name, of those that an evaluation has."""
  return {name: evaluation[name] for name in get_args(config_lib.Metric) if name in evaluation}


def ranked(evaluations: Mapping[int, Mapping[str, Any]], metric: str) -> list[int]:
  """The steps, best first, of equals the later; without those where the metric is undefined."""
  values = _values(evaluations, metric)
  return sorted(values, key=lambda step: (values[step], step), reverse=True)


def without_better(
  evaluations: Mapping[int, Mapping[str, Any]], metric: str
) -> tuple[int | None, int]:
  """The first step with the best value, and how many evaluations came after it.

  Where the metric is undefined counts as no better.  (None, 0): it never was defined.
  """
  values = _values(evaluations, metric)
  if not values:
    return None, 0
  best = max(values, key=lambda step: (values[step], -step))
  return best, sum(step > best for step in evaluations)


def why_stop(evaluations: Mapping[int, Mapping[str, Any]], c: config_lib.Train) -> str:
  """Why `train.stop_patience` ends a run after these evaluations; "": it does not."""
  best, since = without_better(evaluations, c.best_metric)
  if not c.stop_patience or since < c.stop_patience:
    return ""
  return (
    f"no better {c.best_metric} than {since} evaluation(s) ago, at step {best} "
    f"(train.stop_patience={c.stop_patience}); --step=best names the best checkpoint"
  )


def too_few(c: config_lib.Train) -> str:
  """Why `train.stop_patience` can end no run of these settings early; "": it can."""
  before_the_end, needed = (c.steps - 1) // c.eval_every, c.stop_patience + 1
  if not c.stop_patience or before_the_end >= needed:
    return ""
  return (
    f"train.stop_patience={c.stop_patience} needs {needed} evaluations before the last step; "
    f"train.steps={c.steps} and train.eval_every={c.eval_every} give {before_the_end}: lower "
    "--config.train.eval_every"
  )


def undefined(evaluation: Mapping[str, Any], c: config_lib.Train, split: str) -> str:
  """Why an evaluation of `split` cannot rank its step; "": `train.best_metric` is defined."""
  if _values({0: evaluation}, c.best_metric):
    return ""
  text = f"{c.best_metric} (train.best_metric) is undefined on the split {split}"
  if counts := evaluation.get("count_by_class"):
    text += f", whose steps by label are {', '.join(f'{k}: {n}' for k, n in counts.items())}"
  text += "; no step is the best"
  return text + (f", and train.stop_patience={c.stop_patience} cannot act" * (c.stop_patience > 0))


def _values(evaluations: Mapping[int, Mapping[str, Any]], metric: str) -> dict[int, float]:
  """The metric by step, so that more is better."""
  sign = -1 if metric in config_lib.LOWER_IS_BETTER else 1
  found = {step: each.get(metric) for step, each in evaluations.items()}
  return {k: sign * x for k, x in found.items() if x is not None and math.isfinite(x)}
