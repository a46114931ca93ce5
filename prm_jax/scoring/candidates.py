"""Candidate solutions in files: what scoring reads of a record, and what it adds."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from prm_jax.runtime import json_lines
from prm_jax.types import CLASSES, StepContract


class Solution(msgspec.Struct):
  """The keys of a record that are read; the others are kept as they are."""

  problem: json_lines.Text
  steps: Annotated[list[json_lines.Text], msgspec.Meta(min_length=1)]


def solution(record: dict[str, Any], separator: str, where: str) -> tuple[str, tuple[str, ...]]:
  """Problem and steps of a record; without `steps`, its `text` is split at `separator`.

  Args:
    where: "FILE:LINE", for messages.

  Raises:
    BadLine: a key is missing or holds a wrong value.
  """
  if "steps" not in record and isinstance(text := record.get("text"), str):
    record = record | {"steps": [step for step in text.split(separator) if step.strip()]}
  found = json_lines.convert(record, Solution, where)
  return found.problem, tuple(found.steps)


def scored(
  record: dict[str, Any], steps: Sequence[str], probabilities: np.ndarray, contract: StepContract
) -> dict[str, Any]:
  """The record with its scores: `rating_probs` and `prm_score`, or `orm_score`.

  Args:
    probabilities: `[steps, C]`, or `[1, C]` of an outcome model, in the contract's class order.
  """
  score = float(np.prod(probabilities[:, contract.right_classes].sum(1)))
  record = record | {"steps": steps}
  if contract.objective == "outcome":
    return record | {"orm_score": score}
  none = dict.fromkeys(CLASSES["process"], 0.0)  # a published model may have no neutral class
  ratings = [none | dict(zip(contract.classes, map(float, p))) for p in probabilities]
  return record | {"rating_probs": ratings, "prm_score": score}
