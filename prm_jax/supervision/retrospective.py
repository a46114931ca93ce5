"""Reports how PRM800K's solutions were chosen to be labelled, from its own fields.

`generation` is the round of the collection in which a solution was labelled, and
`pre_generated_verifier_score` its score by the PRM of that round.  Section 2.4 and appendix B of
the paper: after phase 1, the most convincing wrong answers of each round were labelled.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from prm_jax.datasets.prm800k.records import LabelledSolution, Record
from prm_jax.evaluation.answers.string_graders import math_equal

UNKNOWN = "unknown"
QUANTILES = (10, 50, 90)


def report(records: Iterable[Record]) -> dict[str, Any]:
  """Describes the selection by phase and generation, in the order of the collection.

  Returns:
    "groups", by phase and generation: counts of records, problems, labellers, quality control and
    screening, and the most records of one problem.  Of all records but those of quality control and
    screening, which were not selected: finish reasons, labels by rating, final answers by MATH's
    grader, and quantiles of the scores at selection, of right and of wrong answers.
    "lacking": numbers of phase 2's records that lack each of the two fields.
  """
  groups: dict[tuple[int, int | None], list[LabelledSolution]] = collections.defaultdict(list)
  lacking = {"generation": 0, "score": 0}
  for record in records:
    phase = 1 if record.source.startswith("phase1") else 2
    solution = record.solution
    groups[phase, solution.generation].append(solution)
    if phase == 2:
      lacking["generation"] += solution.generation is None
      lacking["score"] += solution.question.pre_generated_verifier_score is None
  order = sorted(groups, key=lambda key: (key[0], key[1] is not None, key[1] or 0))
  name = lambda phase, number: f"phase {phase}, generation {UNKNOWN if number is None else number}"
  return {
    "groups": {name(*key): _group(groups[key]) for key in order},
    "records": sum(map(len, groups.values())),
    "lacking": lacking,
  }


def _group(solutions: Sequence[LabelledSolution]) -> dict[str, Any]:
  labels, reasons, answers = (collections.Counter() for _ in range(3))
  scores: dict[str, list[float]] = {"right": [], "wrong": [], UNKNOWN: []}
  for solution in solutions:
    if solution.is_quality_control_question or solution.is_initial_screening_question:
      continue
    reasons[solution.label.finish_reason] += 1
    for step in solution.label.steps:
      labels.update(str(c.rating) for c in step.completions or () if c.rating is not None)
    question, kind = solution.question, UNKNOWN
    if question.pre_generated_answer is not None and question.ground_truth_answer is not None:
      same = math_equal(question.pre_generated_answer, question.ground_truth_answer)
      kind = "right" if same else "wrong"
    answers[kind] += 1
    if (score := question.pre_generated_verifier_score) is not None:
      scores[kind].append(score)
  problems = collections.Counter(solution.question.problem for solution in solutions)
  return {
    "records": len(solutions),
    "problems": len(problems),
    "most_of_a_problem": max(problems.values()),
    "quality_control": sum(x.is_quality_control_question for x in solutions),
    "screening": sum(x.is_initial_screening_question for x in solutions),
    "labellers": len({x.labeler for x in solutions}),
    "finish_reasons": dict(sorted(reasons.items())),
    "labels": dict(sorted(labels.items())),
    "answers": dict(sorted(answers.items())),
    "scores": {kind: _quantiles(values) for kind, values in scores.items() if values},
  }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
  quantiles = {f"q{q}": float(x) for q, x in zip(QUANTILES, np.percentile(values, QUANTILES))}
  return {"count": len(values), "mean": float(np.mean(values))} | quantiles


def table(selected: dict[str, Any]) -> list[str]:
  """Returns the result of `report` as lines of text."""
  lacking = selected["lacking"]
  lines = [
    f"{selected['records']:,} records; of phase 2, {lacking['generation']:,} lack `generation` and "
    f"{lacking['score']:,} `pre_generated_verifier_score`"
  ]
  for name, group in selected["groups"].items():
    labels, answers = group["labels"], group["answers"]
    total = sum(labels.values()) or 1
    shares = ", ".join(f"{100 * labels.get(r, 0) / total:.1f} % {r}" for r in ("1", "0", "-1"))
    known = answers.get("right", 0) + answers.get("wrong", 0)
    wrong = f"{100 * answers.get('wrong', 0) / known:.1f} % wrong" if known else "none known"
    lines.append(
      f"{name}: {group['records']:,} records of {group['problems']:,} problems (up to "
      f"{group['most_of_a_problem']} of one), {group['labellers']} labellers, "
      f"{group['quality_control']} quality control, {group['screening']} screening"
    )
    lines.append(f"  labels: {sum(labels.values()):,}: {shares}; final answers: {known}, {wrong}")
    for kind, score in group["scores"].items():
      lines.append(
        f"  score at selection, {kind} answers: {score['count']:,}, mean {score['mean']:.3f}, "
        f"10/50/90 %: {score['q10']:.3f} {score['q50']:.3f} {score['q90']:.3f}"
      )
  return lines
