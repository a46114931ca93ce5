"""Shows a comparison: figure, tables, and a page with solutions."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from prm_jax.evaluation import page, reranking, sample_checks, scored_samples
from prm_jax.evaluation.report_table import sentence
from prm_jax.experiments import figures
from prm_jax.experiments.comparison import disagreements
from prm_jax.experiments.comparison_files import Candidates, whole
from prm_jax.experiments.figures import COLOURS, Curve, Panel
from prm_jax.experiments.results import Table, number, percent

PLAIN = {"majority": 5, "random": 7, "oracle": 8}  # colours of the baselines, in both panels
SPARE = [i for i in range(len(COLOURS)) if i not in (*PLAIN.values(), 6)]  # 6 resembles 1
SHOWN = 60  # problems with a disagreement on the page, at most


def panels(found: Mapping[str, Any]) -> list[Panel]:
  """Returns a panel of best-of-N of scorers and baselines, and one of votes if there are any.

  Problems differ more than methods, so bands overlap even where a paired difference is established.
  Therefore only the majority has a band.
  """

  def panel(names: Sequence[str], how: str) -> Panel:
    curves = []
    for i, name in enumerate(names):
      colour = PLAIN.get(name, SPARE[i % len(SPARE)])
      accuracy = found["methods"][name]["accuracy"]
      curve = Curve.over_n(name, found["n"], accuracy, dashed=name in PLAIN, colour=colour)
      if name != "majority":
        curve = dataclasses.replace(curve, low=None, high=None)
      curves.append(curve)
    return Panel(curves, "N = number of solutions per problem", f"% problems solved ({how})")

  methods = found["methods"]
  names = [name for name in methods if whole(name) == name or whole(name) not in methods]
  votes = [name for name in names if name.startswith("vote by ")]
  plain = [name for name in PLAIN if name in names]
  scorers = [name for name in names if name not in votes and name not in plain]
  out = [panel([*scorers, *plain], "best-of-N")]
  if votes:
    out.append(panel([*votes, "majority"], "votes"))
  return out


def tables(found: Mapping[str, Any]) -> list[Table]:
  """Returns the tables of page and screen."""
  last, methods = f"N = {found['n'][-1]}", found["methods"]
  out = [_solved(found)]
  for kind, groups in found["by"].items():
    heads = [f"{name} ({group['problems']})" for name, group in groups.items()]
    rows = [[n, *(percent(group[n]) for group in groups.values())] for n in methods]
    out.append(Table(f"% solved at {last} by {kind}", ["", *heads], rows))
    if "majority" in methods:
      rows = [
        [n, *(percent(group[n]["minus"], sign=True) for group in groups.values())]
        for n in methods
        if n != "majority"
      ]
      out.append(Table(f"% solved minus majority at {last} by {kind}", ["", *heads], rows))
  out += [_differences(found), *_scores(found)]
  if judged := found.get("process_bench"):
    heads = [*dict.fromkeys(head for f1 in judged.values() for head in f1)]
    rows = [
      [name, *(percent(f1[head]) if head in f1 else "-" for head in heads)]
      for name, f1 in judged.items()
    ]
    out.append(Table("ProcessBench: % F1 of the first wrong step", ["", *heads], rows))
  if found["growth"]:
    rows = []
    for name, each in found["growth"].items():
      auc = percent(each["auc"], sign=True, scale=1, digits=3)
      rows.append([name, auc, percent(each["accuracy"], sign=True)])
    header = ["", "AUC", "points at the last N"]
    out.append(Table("What a doubling of the labels adds", header, rows))
  return out


def _solved(found: Mapping[str, Any]) -> Table:
  """Returns the table of every method at some N, and of its differences at the last N."""
  at = [k for k, n in enumerate(found["n"]) if n in (1, 4) or k == len(found["n"]) - 1]
  header = ["", "AUC within problems", *(f"N = {found['n'][k]}" for k in at)]
  header += [f"minus {name}" for name in found["baselines"]]
  rows = []
  for name, each in found["methods"].items():
    minus = each["minus"]
    row = [name, percent(each["auc"], scale=1, digits=3) if "auc" in each else ""]
    row += [percent(each["accuracy"], at=k) for k in at]
    row += [percent(minus[x], sign=True) if x in minus else "" for x in found["baselines"]]
    rows.append(row)
  caption = f"% of {found['problems']} problems solved, 95 % intervals over problems"
  return Table(caption, header, rows)


def _differences(found: Mapping[str, Any]) -> Table:
  """Returns the differences of each pair of a scorer and a baseline, and the power calculation."""
  rows: dict[tuple[str, str], list[str]] = {}
  for name, method in found["methods"].items():
    for other, each in method["minus"].items() if "auc" in method else ():
      if (other, name) not in rows:
        needed = "-" if each["problems_needed"] is None else f"{each['problems_needed']:,.0f}"
        auc = percent(each["auc"], sign=True, scale=1, digits=3) if "auc" in each else ""
        rows[name, other] = [f"{name} - {other}", percent(each, sign=True), needed, auc]
  caption = (
    "Paired differences; problems that a test needs to establish the first (5 %, power 80 %)"
  )
  header = ["", f"N = {found['n'][-1]}", "problems", "AUC within problems"]
  return Table(caption, header, [*rows.values()])


def _scores(found: Mapping[str, Any]) -> list[Table]:
  """Returns a table of each scorer's calibration and dependence on length, or none if unknown."""
  rows = []
  for name, each in found["methods"].items():
    if "auc" in each:
      length, calibration = each.get("length", {}), each.get("calibration")
      error = percent(calibration["ece"], scale=1, digits=2) if calibration else ""
      row = [error, number(length.get("correlation"), 2)]
      rows.append([name, *row, *(number(length.get(key), 1) for key in ("pick", "random"))])
  header = ["", "calibration error", "rank correlation with steps", "steps of the pick"]
  header += ["steps of a random candidate"]
  if not any(any(row[1:]) for row in rows):
    return []
  caption = "Scores of candidates with an answer; steps: of problems with two or more of these"
  return [Table(caption, header, rows)]


def paths(directory: pathlib.Path, vector: Sequence[str] = ()) -> list[pathlib.Path]:
  """Returns the paths of the files of `contents`, in their order."""
  ends = (".json", ".png", ".html", *(f".{kind}" for kind in dict.fromkeys(vector)))
  return [directory / f"comparison{end}" for end in ends]


def contents(
  candidates: Candidates, found: Mapping[str, Any], title: str, vector: Sequence[str] = ()
) -> tuple[list[bytes], list[str]]:
  """Returns the content of each of `paths`, and lines for the screen.

  The page shows solutions on which the first model and the majority disagree.

  Args:
    found: from `comparison.compare`, with the flags of compare.py.
    vector: further formats of the figure: "pdf", "svg".
  """
  problems, about = [], f"{found['problems']} problems, {found['candidates']:,} candidates"
  if candidates.scored:
    model = next(iter(candidates.scored))
    slots, why = disagreements(candidates, model)
    slots, why = slots[: 2 * SHOWN], why[: 2 * SHOWN]
    records = scored_samples.read_solutions(candidates.scored[model], slots)
    problems = page.from_records(records, why=why, neutral=found["neutral"])
    about += f"; shown: where the pick of {model} or the majority is right, and not both"
  shown = tables(found)
  notes = [sentence(each) for each in sample_checks.unanswered(candidates.samples)]
  of_groups = f"Intervals of levels and of difficulty have {reranking.NO_WIDTH}."
  files = figures.contents(
    panels(found),
    shown,
    title=title,
    about=about,
    alt="Share of problems solved over N, by method",
    notes=" ".join(
      [*notes, reranking.DIFFICULTY_NOTE, of_groups, *map(sentence, found["notices"])]
    ),
    problems=problems,
    vector=vector,
  )
  text = json.dumps(found, indent=1, allow_nan=False) + "\n"
  lines = [*shown[0].lines(), *notes, ""]
  lines += [line for table in shown[1:] for line in [*table.lines(), ""]]
  return [text.encode(), *files.values()], lines
