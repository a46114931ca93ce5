"""Answers to label requests: checks, agreement of labellers, and the labels that are taken.

An answer is `{"request": ID, "labeller": NAME, "labels": [1, 0, -1]}`: ratings up to and including
the first wrong step, as in PRM800K.
"""

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from prm_jax import step_metrics
from prm_jax.runtime import json_lines
from prm_jax.supervision.label_requests import COMPLETE, Key, Ratings, Request, complete

PASS = 0.75  # agreement with quality control that a labeller must reach (appendix B)


class Answer(msgspec.Struct):
  request: str
  labeller: json_lines.Text
  labels: Ratings

  def __post_init__(self):
    if -1 in self.labels[:-1]:
      raise ValueError("labels go on after the first -1: end them there")


def collect(
  asked: Iterable[tuple[Request, Key]], answers: Iterable[tuple[str, Answer]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
  """Returns labelled solutions in the form of `datasets.stepwise`, and a report on the labellers.

  If there are quality-control solutions, labellers who agree with less than 75 % of them, or have
  answered none, are left out.  To agree is to find the same first wrong step, or none.  If a
  request has several answers, that of the labeller with the highest agreement is taken.

  Args:
    answers: pairs of FILE:LINE and answer.

  Raises:
    BadLine: an answer to an unknown request, a second answer by the same labeller, or more or fewer
      labels than the steps up to the first wrong one.
  """
  asked = {request.request: (request, key) for request, key in asked}
  by_request = _by_request(asked, answers)
  quality = _quality(asked, by_request)
  checked = any(key.kind == "quality_control" for _, key in asked.values())
  passed = lambda who: not checked or quality.get(who, 0.0) >= PASS
  lines, pairs = [], []
  for name, (request, key) in asked.items():
    trusted = {who: each for who, each in by_request.get(name, {}).items() if passed(who)}
    if not trusted or key.kind == "quality_control":
      continue
    for a, b in itertools.combinations(trusted.values(), 2):
      pairs += zip(a.labels, b.labels)
    best = max(trusted, key=lambda who: quality.get(who, 0.0))
    labels = trusted[best].labels
    unlabelled = [None] * (len(request.steps) - len(labels))
    line = {"problem": request.problem, "steps": request.steps, "labels": [*labels, *unlabelled]}
    if key.is_correct is not None:
      line["is_correct"] = key.is_correct
    line["provenance"] = {"method": "people", "request": name, "labeller": best, **key.about}
    lines.append(line)
  people = sorted({who for each in by_request.values() for who in each})
  report = {
    "requests": len(asked),
    "answered": len(by_request),
    "labelled": len(lines),
    "labellers": {
      who: {
        "answers": sum(who in each for each in by_request.values()),
        "quality_control": quality.get(who),
        "left_out": not passed(who),
      }
      for who in people
    },
    "agreement": agreement(pairs),
  }
  return lines, report


def _by_request(
  asked: Mapping[str, tuple[Request, Key]], answers: Iterable[tuple[str, Answer]]
) -> dict[str, dict[str, Answer]]:
  """Returns the answers by request and labeller; errors as `collect`."""
  by_request: dict[str, dict[str, Answer]] = collections.defaultdict(dict)
  for where, answer in answers:
    if answer.request not in asked:
      raise json_lines.BadLine(f"{where}: request {json_lines.show(answer.request)} was not made")
    if answer.labeller in by_request[answer.request]:
      who = json_lines.show(answer.labeller)
      raise json_lines.BadLine(f"{where}: {who} has answered request {answer.request} before")
    steps, labels = asked[answer.request][0].steps, answer.labels
    if not complete(labels, steps):
      raise json_lines.BadLine(
        f"{where}: {len(labels)} labels for {len(steps)} steps; expected {COMPLETE}"
      )
    by_request[answer.request][answer.labeller] = answer
  return by_request


def _quality(asked: Mapping[str, tuple], by_request: Mapping[str, dict]) -> dict[str, float]:
  """Returns the share of quality-control items whose first wrong step each labeller finds."""
  right = collections.defaultdict(list)
  for name, answers in by_request.items():
    if labels := asked[name][1].labels:
      for who, answer in answers.items():
        same = len(answer.labels) == len(labels) and (answer.labels[-1] < 0) == (labels[-1] < 0)
        right[who].append(same)
  return {who: float(np.mean(each)) for who, each in right.items()}


def agreement(pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
  """Returns two labellers' agreement on the steps that both labelled: share, and Cohen's kappa.

  Neutral and positive count as equal, as when a solution is scored; `share_of_ratings`
  distinguishes them.
  """
  if not pairs:
    return {"steps": 0, "share": None, "kappa": None, "share_of_ratings": None}
  a, b = np.array(pairs).T
  return {
    "steps": len(a),
    "share": float(np.mean((a < 0) == (b < 0))),
    "kappa": step_metrics.kappa(a < 0, b < 0),
    "share_of_ratings": float(np.mean(a == b)),
  }


def table(report: dict[str, Any]) -> list[str]:
  """Returns the report of `collect` as lines of text."""
  lines = [f"{report['answered']:,} of {report['requests']:,} requests have an answer"]
  for who, counts in report["labellers"].items():
    quality = counts["quality_control"]
    passed = (
      "no quality control" if quality is None else f"{100 * quality:.0f} % of quality control"
    )
    why = "" if quality is None else f", under {100 * PASS:.0f} %"
    out = f": left out{why}" if counts["left_out"] else ""
    lines.append(f"{json_lines.show(who)}: {counts['answers']:,} answers, {passed}{out}")
  both = report["agreement"]
  if both["steps"]:
    kappa = "none" if both["kappa"] is None else f"{both['kappa']:.2f}"
    lines.append(
      f"agreement on {both['steps']:,} shared steps: {100 * both['share']:.1f} %, "
      f"kappa {kappa}; of ratings {100 * both['share_of_ratings']:.1f} %"
    )
  return [*lines, f"{report['labelled']:,} labelled solutions"]
