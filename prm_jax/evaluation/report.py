"""Writes a reranking report: report.json, the figure, and a page with a few solutions."""

from __future__ import annotations

import base64
import json
import pathlib

import jinja2
import numpy as np

from prm_jax.evaluation.methods import LABELS
from prm_jax.evaluation.report_figures import draw_curves, draw_groups, group_name
from prm_jax.evaluation.report_tables import shown, vote_note
from prm_jax.evaluation.reranking import BREAKDOWNS
from prm_jax.evaluation.sample_files import MissingSource, read_solutions
from prm_jax.evaluation.scored_samples import ScoredSamples
from prm_jax.runtime import json_lines

EXAMPLES = 4  # problems whose solutions the page shows
MAX_GROUPS = 20  # of a breakdown in a figure


def with_examples(report: dict, samples: ScoredSamples, scores: dict[str, np.ndarray]) -> dict:
  """The report of `reranking.rerank` with a few solutions, or with a notice why it has none."""
  try:
    return report | {"examples": pick_examples(samples, scores)}
  except MissingSource as error:
    return report | {
      "examples": [],
      "notices": [*report["notices"], f"no solutions to show: {error}"],
    }


def write_report(report: dict, directory) -> list[pathlib.Path]:
  """Writes report.json, best_of_n.png and report.html, each atomically; returns their paths.

  Args:
    report: of `with_examples`.
    directory: made if it is not there.
  """
  directory = pathlib.Path(directory)
  png = draw_curves(report)
  contents = {
    "report.json": (json.dumps(report, indent=1, allow_nan=False) + "\n").encode(),
    "best_of_n.png": png,
    "report.html": render_page(report, png).encode(),
  }
  for name, data in contents.items():
    with json_lines.written(directory / name, "wb") as file:
      file.write(data)
  return [directory / name for name in contents]


def pick_examples(samples: ScoredSamples, scores: dict[str, np.ndarray]) -> list[dict]:
  """A few problems with the solutions that the models pick out of all M; none without steps.

  Problems on which the PRM and the ORM differ come first: no sample from which to judge them.
  """
  if samples.step_probs is None:
    return []
  best = {
    name: np.where(samples.valid, scores[name], -np.inf).argmax(axis=1)
    for name in ("prm_product", "orm")
    if name in scores
  }
  prm = best["prm_product"]
  picks = []  # (problem, candidate, why it is shown)
  for p in _varied_problems(samples, prm, best.get("orm", prm)):
    shown = {int(prm[p]): ["the PRM's pick"]}
    if "orm" in best:
      shown.setdefault(int(best["orm"][p]), []).append("the ORM's pick")
    wrong = np.where(samples.valid[p] & ~samples.correct[p], scores["prm_product"][p], -np.inf)
    if np.isfinite(wrong).any() and len(shown) == 1:
      shown.setdefault(int(wrong.argmax()), []).append("the wrong answer the PRM likes best")
    picks += [(p, m, " and ".join(why)) for m, why in shown.items()]
  records = read_solutions(samples, [(p, m) for p, m, _ in picks])
  examples = {}
  for (p, m, why), record in zip(picks, records):
    example = {
      "problem": samples.problems[p],
      "solutions": [],
      "level": samples.levels[p],
      "subject": samples.subjects[p],
      "truth": record.get("ground_truth_answer"),
    }
    solutions = examples.setdefault(p, example)["solutions"]
    solutions.append(_solution(samples, scores, p, m, why, record))
  return list(examples.values())


def _varied_problems(samples: ScoredSamples, prm: np.ndarray, orm: np.ndarray) -> list[int]:
  """A few problems of different kinds, from each model's pick `[P]`.

  In turn: only the PRM's pick is right, only the ORM's, neither, both.
  """
  every = np.arange(len(prm))
  by_prm, by_orm = samples.correct[every, prm], samples.correct[every, orm]
  kinds = (by_prm & ~by_orm, ~by_prm & by_orm, ~by_prm & ~by_orm, by_prm & by_orm)
  answered = samples.valid.any(axis=1)
  ranked = sorted(
    (i, kind, p)
    for kind, chosen in enumerate(kinds)
    for i, p in enumerate(np.flatnonzero(chosen & answered))
  )
  return [p for _, _, p in ranked[:EXAMPLES]]


def _solution(samples: ScoredSamples, scores: dict, p: int, m: int, why: str, record: dict) -> dict:
  """A solution for the page."""
  return {
    "line": int(samples.lines[p, m]),
    "why": why,
    "correct": bool(samples.correct[p, m]),
    "answer": record.get("answer"),
    "prm_product": float(np.exp(scores["prm_product"][p, m])),
    "orm": float(scores["orm"][p, m]) if "orm" in scores else None,
    "steps": [
      {"text": step, "not_wrong": 1 - rating["-1"]}
      for step, rating in zip(record["steps"], record["rating_probs"])
    ],
  }


def render_page(report: dict, png: bytes) -> str:
  """The page: one file, nothing fetched, every text of the data escaped."""
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  return environment.get_template("report.html").render(
    report=report,
    labels=LABELS,
    figure=base64.b64encode(png).decode(),
    columns=shown(report["n"]),
    last=len(report["n"]) - 1,
    votes=vote_note(report),
    steps=any("prm_" in name for name in report["curves"]),
    breakdowns={
      kind: {
        "groups": [(group_name(kind, name), group) for name, group in groups.items()],
        "figure": base64.b64encode(draw_groups(report, kind)).decode()
        if len(groups) <= MAX_GROUPS
        else None,
      }
      for kind in BREAKDOWNS
      if (groups := report[f"by_{kind}"])
    },
  )
