"""Candidate solutions in files: what scoring reads of a record, and what it adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from prm_jax.runtime import json_lines
from prm_jax.runtime.json_lines import BadLine, Text
from prm_jax.types import RATINGS, StepContract

NO_RATING = {str(rating): 0.0 for rating in RATINGS}


class Solution(msgspec.Struct):
  """The keys of a record that are read; the others are kept as they are."""

  problem: Text
  steps: Annotated[list[Text], msgspec.Meta(min_length=1)]


def solution(record: dict[str, Any], separator: str, where: str) -> tuple[str, tuple[str, ...]]:
  """Problem and steps of a record; without `steps`, its `text` is split at `separator`.

  Args:
    where: "FILE:LINE", for messages.

  Raises:
    BadLine: a key is missing or holds a wrong value.
  """
  if "steps" not in record:
    text = record.get("text")
    if not isinstance(text, str):
      raise BadLine(f'{where}: neither "steps" (a list of texts) nor "text" is there')
    record = record | {"steps": [step for step in text.split(separator) if step.strip()]}
  try:
    found = json_lines.convert(record, Solution)
  except BadLine as error:
    raise BadLine(f"{where}: {error}") from None
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
  ratings = [NO_RATING | dict(zip(contract.classes, map(float, p))) for p in probabilities]
  return record | {"rating_probs": ratings, "prm_score": score}
