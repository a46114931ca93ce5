"""A reranking report as text: a table for the terminal, CSV for other programs."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Sequence

from prm_jax.evaluation.report_figures import group_name, printable
from prm_jax.evaluation.reranking import BREAKDOWNS, powers_of_two

WIDTH = 100  # columns of the terminal, for the notes below the table
MAX_COLUMNS = 16  # values of N in the table; of more, about the powers of two are shown
ERRORS = ("problem_standard_error", "standard_error")
HEADER = ("breakdown", "group", "curve", "n", "value", "low", "high", *ERRORS)
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet may run when a cell begins so


def shown(n: Sequence[int]) -> list[int]:
  """Indices of the values of N that a table shows."""
  if len(n) <= MAX_COLUMNS:
    return list(range(len(n)))
  wanted = powers_of_two(n[-1])
  return sorted({next(i for i, k in enumerate(n) if k >= power) for power in wanted})


def format_table(report: dict) -> str:
  """The report in lines of text: methods by N, with intervals at the largest N that has one."""
  columns = shown(report["n"])
  bounded = [i for i in columns if any(c["low"][i] is not None for c in report["curves"].values())]
  last = bounded[-1] if bounded else columns[-1]
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
  if note := vote_note(report):
    lines.append(note)
  if report["paired"]:
    lines += [
      "",
      f"differences on the same problems, interval at N = {n[-1]}:",
      report["paired_interval"],
    ]
  lines += [row(name, each, -1, "difference", "+") for name, each in report["paired"].items()]
  groups = [breakdown for breakdown in BREAKDOWNS if report[f"by_{breakdown}"]]
  for breakdown in groups:
    lines += ["", *_groups(report, breakdown)]
  notes = [f"Intervals of groups: {report['group_interval']}."] * bool(groups)
  notes += [report["difficulty"]] * ("difficulty" in groups) + report["notices"]
  lines = [printable(line) for line in lines] + [""] * bool(notes)
  return "\n".join(lines + [textwrap.fill(printable(note), WIDTH) for note in notes])


def _groups(report: dict, breakdown: str) -> list[str]:
  """A table of the groups: the methods that the figure draws, at the largest N."""
  drawn = report["drawn"]
  width = max(22, *(len(name) + 2 for name in drawn))
  lines = [
    f"by {breakdown}, at N = {report['n'][-1]}:",
    f"{breakdown:24}{'problems':>8}" + "".join(f"{name:>{width}}" for name in drawn),
  ]
  for group, each in report[f"by_{breakdown}"].items():
    line = f"{group_name(breakdown, group):24}{each['problems']:8}"
    for name in drawn:
      curve = each["curves"][name]
      cell = f"{100 * curve['accuracy'][-1]:.1f} {_interval(curve, -1):>14}"
      line += f"{cell:>{width}}"
    lines.append(line.rstrip())
  return lines


def _interval(curve: dict, at: int, sign: str = "") -> str:
  low, high = curve["low"][at], curve["high"][at]
  if low is None:
    return ""
  return f"[{100 * low:{sign}z.1f}, {100 * high:{sign}z.1f}]"


def vote_note(report: dict) -> str:
  """Which votes are exact, and the noise of those that are not."""
  errors = {
    name: 100 * max(curve["standard_error"])
    for name, curve in report["curves"].items()
    if "standard_error" in curve
  }
  exact = [name for name, error in errors.items() if not error]
  noisy = [f"{name} {error:.2g}" for name, error in errors.items() if error]
  parts = [f"exact: {', '.join(exact)}"] * bool(exact)
  if noisy:
    parts.append(f"Monte-Carlo, standard error in points at most: {', '.join(noisy)}")
  return f"votes: {'; '.join(parts)}" if parts else ""


def format_csv(report: dict) -> str:
  """The report as CSV (RFC 4180): every curve, difference and group, a row for each N.

  `value` is a share of problems, or a difference of two; `breakdown` and `group` are empty for
  all problems together; `standard_error` is Monte-Carlo, empty where the value is exact.  A group
  that a spreadsheet would take for a formula is prefixed with an apostrophe.
  """
  file = io.StringIO()
  writer = csv.writer(file)
  writer.writerow(HEADER)

  def write(breakdown, group, curves, key):
    group = f"'{group}" if group.startswith(FORMULA) else group
    for name, curve in curves.items():
      absent = [None] * len(report["n"])
      over_problems, sampled = (curve.get(error, absent) for error in ERRORS)
      sampled = [error or None for error in sampled]
      columns = (curve[key], curve["low"], curve["high"], over_problems, sampled)
      for numbers in zip(report["n"], *columns):
        writer.writerow((breakdown, group, name, *numbers))

  write("", "", report["curves"], "accuracy")
  write("", "", report["paired"], "difference")
  for breakdown in BREAKDOWNS:
    for group, each in report[f"by_{breakdown}"].items():
      write(breakdown, group, each["curves"], "accuracy")
  return file.getvalue()
