"""Candidate solutions in files: what scoring reads of a record, and what it adds."""

import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from prm_jax.runtime import json_lines, progress
from prm_jax.scoring.rater import Rater, SolutionError
from prm_jax.types import CLASSES, StepContract

CHUNK = 16_384  # lines in memory at once


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

  Of an ensemble, the scores are those of the mean over heads; `step_std` is the standard deviation
  over heads of each step's P(right), and `prm_score_std` or `orm_score_std` that of the score.

  Args:
    probabilities: `[steps, K, C]`, or `[1, K, C]` of an outcome model, by head and in the
      contract's class order.
  """
  mean, right = probabilities.mean(1), probabilities[:, :, contract.right_classes].sum(-1)
  score, record = float(np.prod(right.mean(1))), record | {"steps": steps}
  spread = float(np.prod(right, axis=0).std())
  ensemble = contract.heads > 1
  if contract.objective == "outcome":
    return record | {"orm_score": score} | ({"orm_score_std": spread} if ensemble else {})
  none = dict.fromkeys(CLASSES["process"], 0.0)  # a model may have no neutral class
  ratings = [none | dict(zip(contract.classes, map(float, p))) for p in mean]
  record = record | {"rating_probs": ratings, "prm_score": score}
  if not ensemble:
    return record
  return record | {"step_std": right.std(1).tolist(), "prm_score_std": spread}


class Line(NamedTuple):
  """A candidate of a file, as a model rates it."""

  where: str  # FILE:LINE
  record: dict[str, Any]
  problem: str
  steps: tuple[str, ...]
  probabilities: np.ndarray | None  # as of `Scorer.by_head`; None: skipped


def rated(
  path: pathlib.Path, scorer: Rater, doing: str, skip_cut_off: bool = False
) -> Iterator[Line]:
  """The lines of a file of candidates with the class probabilities of their steps, in order.

  Args:
    doing: what the progress bar says.
    skip_cut_off: do not rate candidates with `finished` false.

  Raises:
    BadLine: a line is no candidate, or cannot be scored.
  """
  done, total, lines = 0, sum(1 for _ in json_lines.lines(path)), json_lines.read(path)
  with progress.Progress(desc=doing, total=total, unit="solutions") as bar:
    while chunk := list(itertools.islice(lines, CHUNK)):
      places = [f"{path}:{number}" for number, _, _ in chunk]
      solutions = [
        solution(record, scorer.contract.separator, where)
        for where, (_, _, record) in zip(places, chunk)
      ]
      kept = [
        i for i, line in enumerate(chunk) if not (skip_cut_off and line[2].get("finished") is False)
      ]
      on_share = lambda share, done=done, chunk=chunk: bar.reach(done + share * len(chunk))
      try:
        found = dict(zip(kept, scorer.by_head([solutions[i] for i in kept], on_share)))
      except SolutionError as error:
        raise json_lines.BadLine(f"{places[kept[error.index]]}: {error}") from error
      for i, (where, (_, _, record), each) in enumerate(zip(places, chunk, solutions)):
        yield Line(where, record, *each, found.get(i))
      bar.reach(done := done + len(chunk))
