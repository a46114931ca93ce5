"""Candidate solutions as they stand in files."""

from __future__ import annotations

from typing import Any

from prm_jax.runtime.json_lines import BadLine, show
from prm_jax.types import StepContract


def solution(record: dict[str, Any], separator: str, where: str) -> tuple[str, tuple[str, ...]]:
  """Problem and steps of a record; `text` is split into steps at `separator`.

  Args:
    where: "FILE:LINE", for messages.

  Raises:
    BadLine: a key is missing, or is not what it should be.
  """
  problem = record.get("problem")
  if not isinstance(problem, str) or not problem:
    raise BadLine(f'{where}: "problem" is {show(problem)}; expected a non-empty text')
  if "steps" in record:
    steps = record["steps"]
  else:
    text = record.get("text")
    if not isinstance(text, str):
      raise BadLine(f'{where}: neither "steps" (a list of texts) nor "text" is there')
    steps = [step for step in text.split(separator) if step.strip()]
  if not isinstance(steps, list) or not steps:
    raise BadLine(f'{where}: "steps" is {show(steps)}; expected at least one step')
  for i, step in enumerate(steps):
    if not isinstance(step, str) or not step:
      raise BadLine(f'{where}: "steps"[{i}] is {show(step)}; expected a non-empty text')
  return problem, tuple(steps)


def right_classes(contract: StepContract) -> list[int]:
  """Indices of the classes that count as right: of a step, or of a whole solution."""
  if contract.objective == "outcome":
    return [contract.classes.index("correct")]
  names = ["1", "0"] if contract.neutral == "positive" else ["1"]
  return [contract.classes.index(name) for name in names]
