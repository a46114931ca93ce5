"""The evaluations of a run by step: ranking them, and early stopping."""

import math
from collections.abc import Mapping
from typing import Any, get_args

from prm_jax import config as config_lib

Evaluations = Mapping[int, Mapping[str, Any]]  # metrics by step


def brief(evaluation: Mapping[str, Any]) -> dict[str, float | None]:
  """Returns the metrics of an evaluation that `train.best_metric` may name."""
  return {name: evaluation[name] for name in get_args(config_lib.Metric) if name in evaluation}


def ranked(evaluations: Evaluations, metric: str) -> list[int]:
  """Returns the steps at which the metric is defined, best first; of equals, the later first."""
  values = _values(evaluations, metric)
  return sorted(values, key=lambda step: (values[step], step), reverse=True)


def without_better(evaluations: Evaluations, metric: str) -> tuple[int | None, int]:
  """Returns the first step with the best value, and the number of evaluations after it.

  An undefined value counts as no better.  Returns (None, 0) if the metric is never defined.
  """
  values = _values(evaluations, metric)
  if not values:
    return None, 0
  best = max(values, key=lambda step: (values[step], -step))
  return best, sum(step > best for step in evaluations)


def why_stop(evaluations: Evaluations, c: config_lib.Train) -> str:
  """Returns why `train.stop_patience` ends a run after these evaluations; "": it does not."""
  best, since = without_better(evaluations, c.best_metric)
  if not c.stop_patience or since < c.stop_patience:
    return ""
  return (
    f"{c.best_metric} has not improved in {since} evaluation(s), since step {best} "
    f"(train.stop_patience={c.stop_patience}); --step=best names the best saved checkpoint"
  )


def why_too_few(c: config_lib.Train) -> str:
  """Returns why `train.stop_patience` cannot end a run of these settings early; "": it can."""
  available, needed = (c.steps - 1) // c.eval_every, c.stop_patience + 1
  if not c.stop_patience or available >= needed:
    return ""
  return (
    f"train.stop_patience={c.stop_patience} needs {needed} evaluations before the last step; "
    f"train.steps={c.steps} and train.eval_every={c.eval_every} give {available}: lower "
    "--config.train.eval_every"
  )


def why_undefined(evaluation: Mapping[str, Any], c: config_lib.Train, split: str) -> str:
  """Returns why an evaluation of `split` cannot rank its step; "": it can."""
  if _values({0: evaluation}, c.best_metric):
    return ""
  text = f"{c.best_metric} (train.best_metric) is undefined on the split {split}"
  if counts := evaluation.get("count_by_class"):
    text += f", whose steps by label are {', '.join(f'{k}: {n}' for k, n in counts.items())}"
  text += "; no step is the best"
  if c.stop_patience:
    text += f", and train.stop_patience={c.stop_patience} cannot act"
  return text


def _values(evaluations: Evaluations, metric: str) -> dict[int, float]:
  """Returns the defined values of the metric by step, negated if lower is better."""
  sign = -1 if metric in config_lib.LOWER_IS_BETTER else 1
  values = {step: evaluation.get(metric) for step, evaluation in evaluations.items()}
  return {step: sign * x for step, x in values.items() if x is not None and math.isfinite(x)}
