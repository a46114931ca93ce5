"""Presents a reranking report: its JSON, its figure, and a page with a few solutions."""

import json
import pathlib
from collections.abc import Sequence

import numpy as np

from prm_jax.aggregation import ranking
from prm_jax.evaluation import page
from prm_jax.evaluation.figure_files import encoded
from prm_jax.evaluation.methods import OF_STEPS
from prm_jax.evaluation.report_figure import draw_curves, draw_groups
from prm_jax.evaluation.report_table import group_name, sentence, shown, vote_note
from prm_jax.evaluation.reranking import BREAKDOWNS
from prm_jax.evaluation.sample_arrays import ScoredSamples
from prm_jax.evaluation.scored_samples import read_solutions

FILES = ("report.json", "best_of_n.png", "report.html")
# Solutions on the page: of a problem, and in all.  Those that `_chosen` picks may exceed both.
SHOWN, MAX_SOLUTIONS = 8, 2_000
MAX_GROUPS = 20  # a breakdown with more groups has no figure


def file_names(figures: Sequence[str] = ()) -> list[str]:
  """Returns the names of a report's files; `figures` adds formats: "pdf", "svg"."""
  return [*FILES, *(f"best_of_n.{kind}" for kind in dict.fromkeys(figures))]


def contents(
  report: dict, problems: Sequence[page.Problem], figures: Sequence[str] = ()
) -> dict[str, bytes]:
  """Returns the content of each of `file_names`; the page shows the problems."""
  figure = draw_curves(report)
  png = encoded(figure)
  text = json.dumps(report, indent=1, allow_nan=False) + "\n"
  files = [text.encode(), png, render_page(report, png, problems).encode()]
  files += [encoded(figure, kind) for kind in dict.fromkeys(figures)]
  return dict(zip(file_names(figures), files))


def solutions(
  samples: ScoredSamples, scores: dict[str, np.ndarray], report: dict
) -> tuple[list[page.Problem], list[str]]:
  """Returns problems with some of their solutions for the page; or none, and a notice why."""
  slots, why = [], []
  own = {name: each["label"] for name, each in report["own"].items()}
  for p, chosen in enumerate(_chosen(samples, scores, own)):
    slots += [(p, m) for m in chosen]
    why += chosen.values()
  try:
    records = read_solutions(samples, slots)
  except OSError as error:
    return [], [f"no solutions to show: {error}"]
  columns = {each["label"]: each["column"] for each in report["own"].values()}
  return page.from_records(records, why=why, neutral=report["neutral"], own=columns), []


def _chosen(
  samples: ScoredSamples, scores: dict[str, np.ndarray], own: dict[str, str]
) -> list[dict[int, str]]:
  """Chooses the candidates of each problem that the page shows, with the reason for each.

  These are the models' picks, the wrong candidate with the highest score, the right one with the
  lowest, and the first ones of the file.
  """
  models = own | {"prm_product": "the PRM", "orm": "the ORM"}
  right, wrong = samples.valid & samples.correct, samples.valid & ~samples.correct
  used = {name: model for name, model in models.items() if name in scores}
  rules = [(scores[name], f"the pick of {model}", samples.valid) for name, model in used.items()]
  if used:
    name, model = next(iter(used.items()))
    rules.append((scores[name], f"the wrong one that {model} likes best", wrong))
    rules.append((-scores[name], f"the right one that {model} likes least", right))
  problems, pool = samples.correct.shape
  most = max(min(SHOWN, MAX_SOLUTIONS // problems), 2)
  out: list[dict[int, str]] = [{} for _ in range(min(problems, MAX_SOLUTIONS // 2))]
  for p, listed in enumerate(out):
    for score, why, allowed in rules:
      if len(among := np.flatnonzero(allowed[p])):
        m = int(among[score[p, among].argmax()])  # a score may be -inf
        listed[m] = f"{listed[m]} and {why}" if m in listed else why
  slots = np.sort(samples.slots)
  for slot in slots[: np.searchsorted(slots, len(out) * pool)].tolist():
    p, m = divmod(slot, pool)
    if len(out[p]) < most:
      out[p].setdefault(m, "")
  return out


def render_page(report: dict, png: bytes, problems: Sequence[page.Problem]) -> str:
  """Returns the HTML page: it fetches nothing, and every text of the data is escaped."""
  template = page.template(pathlib.Path(__file__).with_name("report.html"))
  breakdowns = {}
  for kind in BREAKDOWNS:
    if groups := report[f"by_{kind}"]:
      figure = encoded(draw_groups(report, kind)) if len(groups) <= MAX_GROUPS else None
      names = [(group_name(kind, name), group) for name, group in groups.items()]
      breakdowns[kind] = {"groups": names, "figure": figure}
  body = template.render(
    report=report,
    figure=png,
    sentence=sentence,
    columns=shown(report["n"]),
    votes=vote_note(report),
    tie=ranking.TIE,
    steps=any(
      name.removeprefix("weighted_").removeprefix("mean_") in OF_STEPS for name in report["curves"]
    ),
    breakdowns=breakdowns,
  )
  about = f"{report['problems']} problems, {report['samples']:,} candidate solutions, up to "
  about += f"{report['candidates']} a problem, from {', '.join(report['files'])}."
  count = sum(len(problem.solutions) for problem in problems)
  if 0 < count < report["samples"]:
    about += f" {count:,} of them are shown; view.py shows all."
  return page.render(problems, "Best-of-N", about, body)
