"""Step-level evaluation of a model on labelled solutions, such as PRM800K's test split."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from prm_jax import step_metrics
from prm_jax.datasets import labelled
from prm_jax.input_pipeline import token_tree
from prm_jax.runtime.progress import Progress
from prm_jax.scoring.scorer import Scorer


def evaluate(scorer: Scorer, directory: str | pathlib.Path, split: str) -> dict[str, Any]:
  """Metrics of a model on one split of a prepared dataset.

  A process model is read after every labelled step, an outcome model at the end of each solution.

  Returns:
    The keys of `step_metrics.step_metrics`, and `calibration`: for each bin of the probability of
    "not wrong", its count, mean probability and share not wrong.

  Raises:
    FileNotFoundError: no prepared dataset in `directory`.
    ValueError: the data was prepared by another recipe than the model's training data; or the split
      is not there, or holds nothing to evaluate on.
  """
  contract = scorer.contract
  recipe = labelled.read_manifest(directory).recipe.name
  if recipe != contract.recipe:
    raise ValueError(
      f"{directory} was prepared with --recipe={recipe}, the model's training data with "
      f"{contract.recipe}: their labels mean different things"
    )
  solutions, _ = labelled.step_trees(directory, split, contract.objective)
  if not solutions:
    raise ValueError(f"{directory}, split {split}: no {contract.objective} example")
  encoded = [token_tree.encode(tree, scorer.tokenizer, contract, True) for tree in solutions]
  with Progress(desc="scoring", total=len(solutions), unit="solutions", leave=False) as bar:
    on_share = lambda share: bar.reach(share * len(solutions))
    read = scorer.read(encoded, [tree.problem for tree in solutions], on_share)
  probs = np.concatenate(read)
  targets = np.concatenate([tree.read_targets for tree in encoded])
  classes = step_metrics.LABELS[contract.objective]
  score = 1 - probs[:, 0] if contract.objective == "process" else probs[:, 1]
  return {
    "split": split,
    "solutions": len(solutions),
    "objective": contract.objective,
    "checkpoint_step": scorer.step,
    **step_metrics.step_metrics(probs, np.take(classes, targets), classes),
    "calibration": step_metrics.calibration(score, targets != 0),
  }


def table(result: dict[str, Any]) -> str:
  """The result as text for a terminal."""
  number = lambda value: "-" if value is None else f"{value:.3f}"
  lines = [
    f"{result['split']}: {result['count']:,} labels of {result['solutions']:,} solutions, "
    f"checkpoint at step {result['checkpoint_step']}",
    f"AUROC {number(result['auroc'])}   accuracy {number(result['accuracy'])}   "
    f"log-likelihood {number(-result['nll'])} nats   calibration error {number(result['ece'])}",
    "class      labels  accuracy",
  ]
  for name, count in result["count_by_class"].items():
    lines.append(f"{name:>5}{count:12,}{number(result['accuracy_by_class'][name]):>10}")
  lines.append("P(not wrong)   steps  mean P  not wrong")
  for b in result["calibration"]:
    lines.append(
      f"{b['low']:.1f} - {b['high']:.1f}{b['count']:10,}{b['mean_probability']:8.3f}"
      f"{b['share_not_wrong']:11.3f}"
    )
  return "\n".join(lines)
