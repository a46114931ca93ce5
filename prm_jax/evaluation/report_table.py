"""Formats a reranking report as a table for the terminal and as CSV."""

import csv
import io
import textwrap
from collections.abc import Sequence

import numpy as np

from prm_jax.evaluation.reranking import BREAKDOWNS, powers_of_two
from prm_jax.runtime.json_lines import printable

WIDTH = 100  # terminal columns of the notes below the table
MAX_COLUMNS = 16  # values of N in a table; of more, it shows about the powers of two
NUMBERS = ("n", "value", "low", "high", "problem_standard_error", "standard_error")  # CSV columns
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet may run a cell that begins with these


def format_table(report: dict) -> str:
  """Returns the report as text: methods by N, with intervals at the largest N that has one."""
  columns = shown(report["n"])
  bounded = [i for i in columns if any(c["low"][i] is not None for c in report["curves"].values())]
  last = (bounded or columns)[-1]
  n = [report["n"][i] for i in columns]
  width = max(6, len(str(n[-1])) + 1)
  first = max(22, *(len(name) + 2 for name in [*report["curves"], *report["paired"]]))

  def row(name, curve, at, key="accuracy", sign=""):
    values = "".join(f"{100 * curve[key][i]:{sign}z{width}.1f}" for i in columns)
    return f"{name:{first}}{values}   {_interval(curve, at, sign)}".rstrip()

  lines = [
    f"problems: {report['problems']}, candidates: {report['samples']:,}; % of problems solved, "
    f"interval at N = {report['n'][last]}:",
    report["interval"],
    "",
    f"{'N':{first}}" + "".join(f"{k:>{width}}" for k in n),
    *(row(name, curve, last) for name, curve in report["curves"].items()),
  ]
  lines += textwrap.wrap(vote_note(report), WIDTH)
  if report["paired"]:
    head = f"differences on the same problems, interval at N = {n[-1]}:"
    lines += ["", head, report["paired_interval"]]
  lines += [row(name, each, -1, "difference", "+") for name, each in report["paired"].items()]
  groups = [breakdown for breakdown in BREAKDOWNS if report[f"by_{breakdown}"]]
  for breakdown in groups:
    lines += _group_table(report, breakdown)
  notes = [f"Intervals of groups: {report['group_interval']}."] * bool(groups)
  notes += [report["difficulty"]] * ("difficulty" in groups)
  notes += [sentence(notice) for notice in report["notices"]]
  lines = [printable(line) for line in lines] + [""] * bool(notes)
  return "\n".join(lines + [textwrap.fill(printable(note), WIDTH) for note in notes])


def _group_table(report: dict, breakdown: str) -> list[str]:
  """Returns the lines of a breakdown: its groups by drawn method, at the largest N."""
  drawn = report["drawn"]
  width = max(22, *(len(name) + 2 for name in drawn))
  head = f"{breakdown:24}{'problems':>8}" + "".join(f"{name:>{width}}" for name in drawn)
  lines = ["", f"by {breakdown}, at N = {report['n'][-1]}:", head]
  for group, each in report[f"by_{breakdown}"].items():
    line = f"{group_name(breakdown, group):24}{each['problems']:8}"
    for curve in (each["curves"][name] for name in drawn):
      cell = f"{100 * curve['accuracy'][-1]:.1f} {_interval(curve, -1):>14}"
      line += f"{cell:>{width}}"
    lines.append(line.rstrip())
  return lines


def _interval(curve: dict, at: int, sign: str = "") -> str:
  low, high = curve["low"][at], curve["high"][at]
  return "" if low is None else f"[{100 * low:{sign}z.1f}, {100 * high:{sign}z.1f}]"


def vote_note(report: dict) -> str:
  """Says which votes are exact, and how large the noise of the others is."""
  curves = report["curves"].items()
  errors = {name: 100 * max(x["standard_error"]) for name, x in curves if "standard_error" in x}
  is_exact = lambda name: name == "majority" and not errors[name]  # weighted votes never are
  exact = ", ".join(filter(is_exact, errors))
  noisy = ", ".join(f"{name} {errors[name]:.2g}" for name in errors if not is_exact(name))
  parts = [f"exact: {exact}"] * bool(exact)
  sampled = "Monte-Carlo (may exceed the oracle), standard error in points at most"
  parts += [f"{sampled}: {noisy}"] * bool(noisy)
  return f"votes: {'; '.join(parts)}" if parts else ""


def sentence(notice: str) -> str:
  """Returns the notice with a capital and a full stop; a name such as prm_score stays as it is."""
  first = notice.split(" ", 1)[0].rstrip(":")
  return f"{notice[:1].upper() if first.isalpha() else notice[:1]}{notice[1:]}."


def group_name(breakdown: str, group: str) -> str:
  """Returns the displayed name of a group, on one line."""
  if breakdown == "difficulty":
    return {"1": "1 (easiest)", "5": "5 (hardest)"}.get(group, group)
  return short(group, 24)


def short(text: str, most: int) -> str:
  """Returns the text on one line, cut to at most `most` characters."""
  text = printable(text)
  return text if len(text) <= most else text[: most - 1] + "…"


def shown(n: Sequence[int]) -> list[int]:
  """Returns the indices of the values of N that a table shows."""
  if len(n) <= MAX_COLUMNS:
    return list(range(len(n)))
  return sorted({int(np.searchsorted(n, power)) for power in powers_of_two(n[-1])})


def format_csv(report: dict) -> str:
  """Returns the report as CSV (RFC 4180): every curve, difference and group, a row for each N.

  `value` is a share of problems, or a difference of two; `breakdown` and `group` are empty for
  all problems together; `standard_error` is Monte-Carlo, empty where the value is exact.  An
  apostrophe precedes the name of a group or curve that a spreadsheet would take for a formula.
  """
  file = io.StringIO()
  writer = csv.writer(file)
  writer.writerow(("breakdown", "group", "curve", *NUMBERS))
  parts = [("", "", report["curves"]), ("", "", report["paired"])]
  for kind in BREAKDOWNS:
    parts += [(kind, group, each["curves"]) for group, each in report[f"by_{kind}"].items()]
  for kind, group, curves in parts:
    group = _cell(group)
    for name, curve in curves.items():
      values = curve.get("accuracy") or curve["difference"]
      sampled = [error or None for error in curve.get("standard_error", [None] * len(values))]
      error = curve["problem_standard_error"]
      columns = (report["n"], values, curve["low"], curve["high"], error, sampled)
      writer.writerows((kind, group, _cell(name), *row) for row in zip(*columns))
  return file.getvalue()


def _cell(text: str) -> str:
  return f"'{text}" if text.startswith(FORMULA) else text
