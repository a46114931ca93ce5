"""Rows to typed TFDS features and back, exactly.

`decode(encode(record)) == record`, key for key, null for null.  The features hold everything that
upstream's rows say; null has a value of its own in each.  What they cannot tell (a key upstream
does not have, a missing one, an empty text where null is usual) is written to `extra` as a list
of edits, so nothing is lost.

Completions are one flat sequence with the index of their step: TFDS cannot write sequences of
sequences without TensorFlow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from prm_jax.datasets.prm800k.records import Record

NULL_RATING = -2  # ratings are -1, 0, 1
NO_RATING = -3  # the key is missing
NULL_FLAG = -1  # flags are 0, 1
NULL_INDEX = -1
NULL_INT = -(2**31)
_FLAGS = {None: NULL_FLAG, False: 0, True: 1}
_FROM_FLAG = {NULL_FLAG: None, 0: False, 1: True}


def features() -> tfds.features.FeaturesDict:
  """The stored form of a row.  Null texts are empty; other nulls as named above."""
  text, flag = tfds.features.Text, tfds.features.Scalar
  return tfds.features.FeaturesDict(
    {
      "labeler": text(),
      "timestamp": text(),
      "generation": np.int32,  # null in phase 1
      "is_quality_control_question": flag(np.bool_),
      "is_initial_screening_question": flag(np.bool_),
      "problem": text(),
      "ground_truth_answer": text(),
      "is_pre_generated": flag(np.bool_),  # phase 2: the four keys below are there
      "ground_truth_solution": text(),
      "pre_generated_steps": tfds.features.Sequence(text()),
      "pre_generated_answer": text(),
      # as bytes: a float feature keeps 32 bits only
      "pre_generated_verifier_score": tfds.features.Tensor(
        shape=(), dtype=np.float64, encoding="bytes"
      ),
      "steps": tfds.features.Sequence(
        {
          "chosen_completion": np.int32,
          "human_text": text(),  # empty: no human completion
          "human_rating": np.int8,
          "human_corrected_rating": np.int8,
          "human_source": text(),
          "human_flagged": np.int8,
        }
      ),
      "completions": tfds.features.Sequence(
        {"step": np.int32, "text": text(), "rating": np.int8, "flagged": np.int8}
      ),
      "total_time": np.int64,  # milliseconds
      "finish_reason": text(),
      "source_file": text(),
      "source_line": np.int32,  # 1-based
      "extra": text(),  # JSON: [[path, value], ...] to set, [[path], ...] to delete
    }
  )


def encode(record: Record) -> dict[str, Any]:
  """The features of a checked row (`rows.check_row`)."""
  row = record.row
  question, label = row["question"], row["label"]
  steps: dict[str, list] = {key: [] for key in _STEP_KEYS}
  completions: dict[str, list] = {"step": [], "text": [], "rating": [], "flagged": []}
  for i, step in enumerate(label["steps"]):
    chosen = step["chosen_completion"]
    steps["chosen_completion"].append(NULL_INDEX if chosen is None else chosen)
    human = step["human_completion"] or {}
    steps["human_text"].append(human.get("text", ""))
    steps["human_rating"].append(_rating(human.get("rating")))
    corrected = human.get("corrected_rating", NO_RATING)
    steps["human_corrected_rating"].append(_rating(corrected))
    steps["human_source"].append(human.get("source") or "")
    steps["human_flagged"].append(_FLAGS[human.get("flagged")])
    for completion in step["completions"] or ():
      completions["step"].append(i)
      completions["text"].append(completion["text"])
      completions["rating"].append(_rating(completion["rating"]))
      completions["flagged"].append(_FLAGS[completion["flagged"]])
  score = question.get("pre_generated_verifier_score")
  example = {
    "labeler": row["labeler"],
    "timestamp": row["timestamp"],
    "generation": _integer(row["generation"], 32),
    "is_quality_control_question": row["is_quality_control_question"],
    "is_initial_screening_question": row["is_initial_screening_question"],
    "problem": question["problem"],
    "ground_truth_answer": question["ground_truth_answer"] or "",
    "is_pre_generated": "pre_generated_steps" in question,
    "ground_truth_solution": question.get("ground_truth_solution") or "",
    "pre_generated_steps": question.get("pre_generated_steps") or [],
    "pre_generated_answer": question.get("pre_generated_answer") or "",
    "pre_generated_verifier_score": math.nan if score is None else _float(score),
    "steps": steps,
    "completions": completions,
    "total_time": _integer(label["total_time"], 64),
    "finish_reason": label["finish_reason"],
    "source_file": record.file,
    "source_line": record.line,
  }
  edits = list(_edits(row, _untyped(example), []))
  example["extra"] = json.dumps(edits, ensure_ascii=False) if edits else ""
  return example


def decode(example: Mapping[str, Any]) -> Record:
  """The record of a stored example, as `as_data_source` gives it."""
  row = _untyped(example)
  if extra := _text(example["extra"]):
    for path, *value in json.loads(extra):
      _edit(row, path, value)
  return Record(row, _text(example["source_file"]), int(example["source_line"]))


_STEP_KEYS = (
  "chosen_completion",
  "human_text",
  "human_rating",
  "human_corrected_rating",
  "human_source",
  "human_flagged",
)


def _untyped(example: Mapping[str, Any]) -> dict[str, Any]:
  """The row that the typed features alone describe, with the keys upstream usually has."""
  question: dict[str, Any] = {
    "problem": _text(example["problem"]),
    "ground_truth_answer": _text(example["ground_truth_answer"]) or None,
  }
  if example["is_pre_generated"]:
    score = float(example["pre_generated_verifier_score"])
    question |= {
      "ground_truth_solution": _text(example["ground_truth_solution"]) or None,
      "pre_generated_steps": [_text(t) for t in example["pre_generated_steps"]],
      "pre_generated_answer": _text(example["pre_generated_answer"]) or None,
      "pre_generated_verifier_score": None if math.isnan(score) else score,
    }
  steps = []
  for chosen, text, rating, corrected, source, flagged in zip(
    *(example["steps"][key] for key in _STEP_KEYS)
  ):
    human: dict[str, Any] | None = None
    if text:
      human = {"text": _text(text), "rating": _null_rating(rating)}
      human |= {"source": _text(source) or None, "flagged": _FROM_FLAG[int(flagged)]}
      if int(corrected) != NO_RATING:
        human["corrected_rating"] = _null_rating(corrected)
    steps.append(
      {
        "completions": None,
        "human_completion": human,
        "chosen_completion": None if int(chosen) == NULL_INDEX else int(chosen),
      }
    )
  columns = example["completions"]
  for i, text, rating, flagged in zip(*(columns[k] for k in ("step", "text", "rating", "flagged"))):
    step = steps[int(i)]
    if step["completions"] is None:
      step["completions"] = []
    step["completions"].append(
      {
        "text": _text(text),
        "rating": _null_rating(rating),
        "flagged": _FROM_FLAG[int(flagged)],
      }
    )
  return {
    "labeler": _text(example["labeler"]),
    "timestamp": _text(example["timestamp"]),
    "generation": _null_integer(example["generation"]),
    "is_quality_control_question": bool(example["is_quality_control_question"]),
    "is_initial_screening_question": bool(example["is_initial_screening_question"]),
    "question": question,
    "label": {
      "steps": steps,
      "total_time": _null_integer(example["total_time"]),
      "finish_reason": _text(example["finish_reason"]),
    },
  }


def _edits(want: Any, got: Any, path: list):
  """The edits that make `want` of `got`."""
  if isinstance(want, dict) and isinstance(got, dict):
    for key in want:
      if key in got:
        yield from _edits(want[key], got[key], [*path, key])
      else:
        yield [[*path, key], want[key]]
    for key in got.keys() - want.keys():
      yield [[*path, key]]
  elif isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
    for i, (w, g) in enumerate(zip(want, got)):
      yield from _edits(w, g, [*path, i])
  elif type(want) is not type(got) or want != got:  # 1, 1.0 and true are equal, and not the same
    yield [path, want]


def _edit(row: dict, path: list, value: list) -> None:
  for key in path[:-1]:
    row = row[key]
  if value:
    row[path[-1]] = value[0]
  else:
    del row[path[-1]]


def _text(value: str | bytes) -> str:
  return value.decode("utf-8") if isinstance(value, bytes) else value


def _rating(rating: int | None) -> int:
  return NULL_RATING if rating is None else rating


def _null_rating(rating: int) -> int | None:
  return None if int(rating) == NULL_RATING else int(rating)


def _integer(value: Any, bits: int) -> int:
  fits = isinstance(value, int) and -(2 ** (bits - 1)) <= value < 2 ** (bits - 1)
  return value if fits else NULL_INT


def _null_integer(value: int) -> int | None:
  return None if int(value) == NULL_INT else int(value)


def _float(value: float) -> float:
  try:
    return float(value)
  except OverflowError:  # an integer beyond floats: `extra` keeps it
    return math.nan
