"""Candidate solutions in files: the keys of a record that scoring reads, and those it adds."""

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
ANSWER = "# Answer"  # a heading
SCORES = {  # keys of a model's scores, by its objective
  "process": {"rating_probs", "step_scores", "prm_score", "step_std", "prm_score_std"},
  "outcome": {"orm_score", "orm_score_std"},
}


class Keys(msgspec.Struct):
  """The keys read from a record; all others pass through unchanged."""

  problem: json_lines.Text
  steps: Annotated[list[json_lines.Text], msgspec.Meta(min_length=1)]
  is_correct: bool | None = None
  final_answer_correct: bool | None = None  # ProcessBench's name of it
  finished: bool | None = None


def solution(record: dict[str, Any], separator: str, where: str) -> tuple[str, tuple[str, ...]]:
  """Returns a record's problem and steps; without `steps`, splits its `text` at `separator`.

  Args:
    where: "FILE:LINE", for messages.

  Raises:
    BadLine: a key is missing or holds a wrong value.
  """
  if "steps" not in record and isinstance(text := record.get("text"), str):
    record = record | {"steps": split(text, separator)[0]}
  if "problem" in record and "steps" not in record:
    whole = 'a problem with "samples"; expected one candidate a line'
    message = whole if "samples" in record else 'no "steps" or "text"'
    raise json_lines.BadLine(f"{where}: {message}")
  checked = json_lines.convert(record, Keys, where)
  return checked.problem, tuple(checked.steps)


def outcome(record: dict[str, Any]) -> bool | None:
  """Returns whether the final answer of a record that `solution` has checked is right.

  None: unknown, or `is_correct` is null because a grader or a judge was undecided.
  """
  right = record.get("is_correct")
  return record.get("final_answer_correct") if right is None else right


def split(text: str, separator: str) -> tuple[list[str], list[int]]:
  """Returns the steps of a text that are not blank, and the index just past the text of each.

  The heading "# Answer" and the answer below it are one step, as in PRM800K.
  """
  steps, ends, start = [], [], 0
  for piece in text.split(separator):
    if piece.strip():
      end = start + len(piece.rstrip())
      if steps and steps[-1].strip() == ANSWER:
        steps[-1], ends[-1] = f"{ANSWER}\n\n{piece.strip()}", end
      else:
        steps.append(piece)
        ends.append(end)
    start += len(piece) + len(separator)
  return steps, ends


def unscored(record: dict[str, Any], contract: StepContract) -> dict[str, Any]:
  """Returns the record without the scores of an earlier model of the contract's objective."""
  return {key: x for key, x in record.items() if key not in SCORES[contract.objective]}


def scored(
  record: dict[str, Any], steps: Sequence[str], probabilities: np.ndarray, contract: StepContract
) -> dict[str, Any]:
  """Returns the record with its scores: `rating_probs` and `prm_score`, or `orm_score`.

  An ensemble is scored by its mean over heads.  It also gets standard deviations over heads:
  `step_std` of each step's P(right), and `prm_score_std` or `orm_score_std` of the score.

  Args:
    probabilities: `[steps, K, C]`, or `[1, K, C]` of an outcome model, by head and in the
      contract's class order.
  """
  right = contract.right(probabilities)
  score, score_std = float(np.prod(right.mean(1))), float(np.prod(right, axis=0).std())
  ensemble = contract.heads > 1
  record = unscored(record, contract) | {"steps": steps}
  if contract.objective == "outcome":
    return record | {"orm_score": score} | ({"orm_score_std": score_std} if ensemble else {})
  zeros = dict.fromkeys(CLASSES["process"], 0.0)  # a model may have no neutral class
  ratings = [zeros | dict(zip(contract.classes, map(float, p))) for p in probabilities.mean(1)]
  record |= {"rating_probs": ratings, "prm_score": score}
  if ensemble:
    record |= {"step_std": right.std(1).tolist(), "prm_score_std": score_std}
  return record


class Line(NamedTuple):
  """A candidate of a file, with a model's class probabilities."""

  where: str  # FILE:LINE
  record: dict[str, Any]
  problem: str
  steps: tuple[str, ...]
  probabilities: np.ndarray | None = None  # as `Rater.by_head` returns them; None: skipped


def rated(
  path: pathlib.Path, scorer: Rater, doing: str, skip_cut_off: bool = False
) -> Iterator[Line]:
  """Yields the lines of a file of candidates in order, with the class probabilities of their steps.

  Args:
    doing: label of the progress bar.
    skip_cut_off: do not rate candidates with `finished` false.

  Raises:
    BadLine: a line is not a candidate, which is found before any is rated, or cannot be scored.
  """

  def read() -> Iterator[Line]:
    for number, _, record in json_lines.read(path):
      where = f"{path}:{number}"
      yield Line(where, record, *solution(record, scorer.contract.separator, where))

  total = sum(1 for _ in read())  # a wrong line fails here, not after hours of work
  lines, done = read(), 0
  with progress.Progress(desc=doing, total=total, unit="solutions") as bar:
    while chunk := list(itertools.islice(lines, CHUNK)):
      skipped = lambda line: skip_cut_off and line.record.get("finished") is False
      kept = [i for i, line in enumerate(chunk) if not skipped(line)]
      solutions = [(chunk[i].problem, chunk[i].steps) for i in kept]
      on_share = lambda share, done=done, chunk=chunk: bar.reach(done + share * len(chunk))
      try:
        probabilities = dict(zip(kept, scorer.by_head(solutions, on_share)))
      except SolutionError as error:
        raise json_lines.BadLine(f"{chunk[kept[error.index]].where}: {error}") from error
      for i, line in enumerate(chunk):
        yield line._replace(probabilities=probabilities.get(i))
      bar.reach(done := done + len(chunk))
