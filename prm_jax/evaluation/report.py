"""A reranking report for people: table, CSV, figure, and a page with a few solutions."""

import base64
import csv
import io
import itertools
import json
import pathlib
import textwrap
from collections.abc import Sequence

import jinja2
import matplotlib.figure
import matplotlib.ticker
import numpy as np

from prm_jax.aggregation import ranking
from prm_jax.evaluation.methods import LABELS
from prm_jax.evaluation.reranking import BREAKDOWNS, powers_of_two
from prm_jax.evaluation.sample_arrays import ScoredSamples
from prm_jax.evaluation.scored_samples import read_solutions

FILES = ("report.json", "best_of_n.png", "report.html")
EXAMPLES = 4  # problems whose solutions the page shows
MAX_GROUPS = 20  # of a breakdown in a figure
WIDTH = 100  # columns of the terminal, for the notes below the table
MAX_COLUMNS = 16  # values of N in a table; of more, about the powers of two are shown
MAX_MARKERS = 40  # values of N
NUMBERS = ("n", "value", "low", "high", "problem_standard_error", "standard_error")  # of the CSV
# What a page shows as a question mark: halves of surrogate pairs, of paths that are no UTF-8, and
# the controls that reverse text.
UNSEEN = {*range(0xD800, 0xE000), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F)}
UNSEEN |= {*range(0x2066, 0x206A), *range(32), *range(0x7F, 0xA0)} - {*b"\t\n\r"}
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet may run when a cell begins so
# Okabe and Ito's palette, distinct with any colour vision; markers distinguish in print.
# The paper's three methods always have the same.
STYLES = {"prm_product": ("#0072B2", "o"), "orm": ("#D55E00", "s"), "majority": ("#555555", "^")}
SPARE = (("#009E73", "D"), ("#CC79A7", "v"), ("#E69F00", "P"), ("#56B4E9", "X"), ("#000000", "*"))
BANDS = {
  "pointwise": "Shaded: 95 % interval over problems, each N by itself (bootstrap)",
  "simultaneous": "Shaded: 95 % band over problems, for all N of a curve at once (sup-t)",
  "generation": "Shaded: 95 % interval for other candidates of the same problems\n"
  "(jackknife, N ≤ M/5; none for votes)",
}


def contents(report: dict) -> dict[str, bytes]:
  """The files of a report, by the names in `FILES`."""
  png = draw_curves(report)
  text = json.dumps(report, indent=1, allow_nan=False) + "\n"
  return dict(zip(FILES, (text.encode(), png, render_page(report, png).encode())))


def with_examples(report: dict, samples: ScoredSamples, scores: dict[str, np.ndarray]) -> dict:
  """The report of `reranking.rerank` with a few solutions, or with a notice why it has none."""
  picks = _picks(samples, scores) if samples.step_probs is not None else []
  try:
    records = read_solutions(samples, [slot for slot, _ in picks])
  except OSError as error:
    notices = [*report["notices"], f"no solutions to show: {error}"]
    return report | {"examples": [], "notices": notices}
  examples = {}
  for ((p, m), why), record in zip(picks, records):
    about = {"problem": samples.problems[p], "solutions": []}
    about |= {"level": samples.levels[p], "subject": samples.subjects[p]}
    truth = record.get("ground_truth_answer")  # of any type, NaN too
    about["truth"] = None if truth is None else str(truth)
    example = examples.setdefault(p, about)
    steps = zip(record["steps"], record["rating_probs"])
    solution = {
      "line": int(samples.places[p, m, 0, 0]),
      "why": why,
      "correct": bool(samples.correct[p, m]),
      "answer": record.get("answer"),
      "prm_product": float(np.exp(scores["prm_product"][p, m])),
      "orm": float(scores["orm"][p, m]) if "orm" in scores else None,
      "steps": [{"text": step, "not_wrong": 1 - rating["-1"]} for step, rating in steps],
    }
    example["solutions"].append(solution)
  return report | {"examples": list(examples.values())}


def _picks(samples: ScoredSamples, scores: dict[str, np.ndarray]) -> list[tuple]:
  """Candidates (p, m) that the models pick out of all M, each with the reason to show it.

  Problems on which the PRM and the ORM differ come first: no sample from which to judge them.
  """
  score = {name: np.where(samples.valid, scores[name], -np.inf) for name in scores}
  prm = score["prm_product"].argmax(axis=1)
  orm = score["orm"].argmax(axis=1) if "orm" in score else prm
  picks = []
  for p in _varied_problems(samples, prm, orm):
    shown = {int(prm[p]): ["the PRM's pick"]}
    if "orm" in score:
      shown.setdefault(int(orm[p]), []).append("the ORM's pick")
    wrong = np.where(samples.correct[p], -np.inf, score["prm_product"][p])
    if np.isfinite(wrong).any() and len(shown) == 1:
      shown.setdefault(int(wrong.argmax()), []).append("the wrong answer the PRM likes best")
    picks += [((p, m), " and ".join(why)) for m, why in shown.items()]
  return picks


def _varied_problems(samples: ScoredSamples, prm: np.ndarray, orm: np.ndarray) -> list[int]:
  """A few problems, from each model's pick `[P]`.

  In turn: only the PRM's pick is right, only the ORM's, neither, both.
  """
  every = np.arange(len(prm))
  by_prm, by_orm = samples.correct[every, prm], samples.correct[every, orm]
  kinds = (by_prm & ~by_orm, ~by_prm & by_orm, ~by_prm & ~by_orm, by_prm & by_orm)
  answered = samples.valid.any(axis=1)
  turns = itertools.zip_longest(*(np.flatnonzero(kind & answered).tolist() for kind in kinds))
  return [p for turn in turns for p in turn if p is not None][:EXAMPLES]


def render_page(report: dict, png: bytes) -> str:
  """The page: one file, nothing fetched, every text of the data escaped."""
  seen = dict.fromkeys(UNSEEN, "?")
  shown_text = lambda x: x.translate(seen) if type(x) is str else x  # Markup is ours
  template = jinja2.Template(
    pathlib.Path(__file__).with_name("report.html").read_text(),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=shown_text,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  encoded = lambda figure: base64.b64encode(figure).decode()
  breakdowns = {}
  for kind in BREAKDOWNS:
    if groups := report[f"by_{kind}"]:
      figure = encoded(draw_groups(report, kind)) if len(groups) <= MAX_GROUPS else None
      names = [(group_name(kind, name), group) for name, group in groups.items()]
      breakdowns[kind] = {"groups": names, "figure": figure}
  return template.render(
    report=report,
    labels=LABELS,
    figure=encoded(png),
    columns=shown(report["n"]),
    last=len(report["n"]) - 1,
    votes=vote_note(report),
    tie=ranking.TIE,
    steps=any("prm_" in name for name in report["curves"]),
    breakdowns=breakdowns,
  )


def draw_curves(report: dict) -> bytes:
  """The figure (PNG) in the form of the paper's Figure 3: accuracy over N, log2 axis."""
  figure, axes = _figure(4.6, "both")
  n = report["n"]
  ends, reach = [], []  # reach: all values that are drawn, for the limits of the axis
  for name, (colour, marker) in _styles(report).items():
    low, middle, high = _percent(report["curves"][name])
    axes.fill_between(n, low, high, color=colour, alpha=0.15, linewidth=0)
    marker = marker if len(n) <= MAX_MARKERS else None
    axes.plot(n, middle, color=colour, marker=marker, markersize=4, linewidth=1.8)
    ends.append((middle[-1], LABELS[name], colour))
    reach += [*low, *middle, *high]
  axes.set_ylim(max(np.nanmin(reach) - 4, 0), min(np.nanmax(reach) + 4, 101))
  axes.set_xscale("log", base=2)
  if len(n) <= 12:
    axes.set_xticks(n, [str(k) for k in n], fontsize=8.5)  # 1024 and 1860 are close
  else:
    axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(base=2, numticks=40))
    axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:.0f}"))
    axes.set_xlim(n[0] / 1.1, n[-1] * 1.1)
  axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
  axes.set_xlabel("N = number of solutions per problem")
  axes.set_ylabel("% problems solved (best-of-N)")
  title = f"Problems: {report['problems']}, solutions: {report['samples']:,}"
  axes.set_title(f"{title}\n{BANDS[report['band']]}", fontsize=9, loc="left")
  _label_ends(axes, n[-1], ends)
  return _png(figure)


def draw_groups(report: dict, breakdown: str) -> bytes:
  """The drawn methods by group of a breakdown, at the largest N: a line for each group."""
  groups = report[f"by_{breakdown}"]
  styles = _styles(report)
  figure, axes = _figure(1.3 + 0.42 * len(groups), "x")
  rows = np.arange(len(groups))
  for i, (name, (colour, marker)) in enumerate(styles.items()):
    low, middle, high = np.transpose([_percent(g["curves"][name])[:, -1] for g in groups.values()])
    apart = 0.5 * ((i + 0.5) / len(styles) - 0.5)  # offset of the method within its group's line
    axes.hlines(rows + apart, low, high, color=colour, alpha=0.45, linewidth=2)
    axes.plot(middle, rows + apart, marker, color=colour, markersize=5, label=LABELS[name])
  axes.set_yticks(rows, [group_name(breakdown, name) for name in groups], parse_math=False)
  axes.invert_yaxis()
  axes.set_xlim(-1, 101)
  axes.set_xlabel(f"% problems solved at N = {report['n'][-1]}")
  figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=9)
  return _png(figure)


def _figure(height: float, grid: str) -> tuple:
  """An empty figure and its axes."""
  figure = matplotlib.figure.Figure(figsize=(7, height), dpi=150, layout="constrained")
  axes = figure.subplots()
  axes.grid(alpha=0.25, linewidth=0.6, axis=grid)
  axes.spines[["top", "right"]].set_visible(False)
  return figure, axes


def _png(figure) -> bytes:
  figure.savefig(buffer := io.BytesIO(), format="png")
  return buffer.getvalue()


def _styles(report: dict) -> dict[str, tuple[str, str]]:
  """Colour and marker of each drawn method; there are at least as many styles."""
  drawn = report["drawn"]
  spare = iter((*SPARE, *(style for name, style in STYLES.items() if name not in drawn)))
  return {name: STYLES.get(name) or next(spare) for name in drawn}


def _percent(curve: dict) -> np.ndarray:
  """Low, middle and high `[3, K]` of a curve in percent; NaN where there is none."""
  return 100 * np.array([curve[key] for key in ("low", "accuracy", "high")], float)


def _label_ends(axes, x: float, ends) -> None:
  """Writes each curve's name at its right end; overlapping names are pushed apart."""
  low, highest = axes.get_ylim()
  line = (highest - low) * 0.05
  leader = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2}
  leader["relpos"] = (0, 0.5)
  ends = sorted(ends)
  positions = [y for y, _, _ in ends]
  for i in range(1, len(ends)):
    positions[i] = max(positions[i], positions[i - 1] + line)
  for i in reversed(range(len(ends))):  # back down, where they went over the top
    positions[i] = min(positions[i], highest)
    highest = positions[i] - line
  for (y, label, colour), position in zip(ends, positions):
    arrow = leader if abs(position - y) > line / 4 else None
    at = {"xytext": (14, position), "textcoords": ("offset points", "data"), "arrowprops": arrow}
    style = {"color": colour, "va": "center", "fontweight": "bold", "fontsize": 9}
    axes.annotate(label, (x, y), **at, **style, annotation_clip=False)


def group_name(breakdown: str, group: str) -> str:
  """The label of a group, on one line."""
  if breakdown == "difficulty":
    return {"1": "1 (easiest)", "5": "5 (hardest)"}.get(group, group)
  group = printable(group)
  return group if len(group) <= 24 else group[:23] + "…"


def printable(text: str) -> str:
  """The text with "?" for control characters: one safe line of a terminal or figure."""
  return "".join(c if c.isprintable() else "?" for c in text)


def shown(n: Sequence[int]) -> list[int]:
  """Indices of the values of N that a table shows."""
  if len(n) <= MAX_COLUMNS:
    return list(range(len(n)))
  return sorted({int(np.searchsorted(n, power)) for power in powers_of_two(n[-1])})


def format_table(report: dict) -> str:
  """The report in lines of text: methods by N, with intervals at the largest N that has one."""
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
  lines += [vote_note(report)] * bool(vote_note(report))
  if report["paired"]:
    head = f"differences on the same problems, interval at N = {n[-1]}:"
    lines += ["", head, report["paired_interval"]]
  lines += [row(name, each, -1, "difference", "+") for name, each in report["paired"].items()]
  groups = [breakdown for breakdown in BREAKDOWNS if report[f"by_{breakdown}"]]
  for breakdown in groups:
    lines += _group_table(report, breakdown)
  notes = [f"Intervals of groups: {report['group_interval']}."] * bool(groups)
  notes += [report["difficulty"]] * ("difficulty" in groups) + report["notices"]
  lines = [printable(line) for line in lines] + [""] * bool(notes)
  return "\n".join(lines + [textwrap.fill(printable(note), WIDTH) for note in notes])


def _group_table(report: dict, breakdown: str) -> list[str]:
  """A table of the groups: the methods that the figure draws, at the largest N."""
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
  """Which votes are exact, and the noise of those that are not."""
  curves = report["curves"].items()
  errors = {name: 100 * max(x["standard_error"]) for name, x in curves if "standard_error" in x}
  exact = ", ".join(name for name, error in errors.items() if not error)
  noisy = ", ".join(f"{name} {error:.2g}" for name, error in errors.items() if error)
  parts = [f"exact: {exact}"] * bool(exact)
  parts += [f"Monte-Carlo, standard error in points at most: {noisy}"] * bool(noisy)
  return f"votes: {'; '.join(parts)}" if parts else ""


def format_csv(report: dict) -> str:
  """The report as CSV (RFC 4180): every curve, difference and group, a row for each N.

  `value` is a share of problems, or a difference of two; `breakdown` and `group` are empty for
  all problems together; `standard_error` is Monte-Carlo, empty where the value is exact.  A group
  that a spreadsheet would take for a formula is prefixed with an apostrophe.
  """
  file = io.StringIO()
  writer = csv.writer(file)
  writer.writerow(("breakdown", "group", "curve", *NUMBERS))
  parts = [("", "", report["curves"]), ("", "", report["paired"])]
  for kind in BREAKDOWNS:
    parts += [(kind, group, each["curves"]) for group, each in report[f"by_{kind}"].items()]
  for kind, group, curves in parts:
    group = f"'{group}" if group.startswith(FORMULA) else group
    for name, curve in curves.items():
      values = curve.get("accuracy") or curve["difference"]
      sampled = [error or None for error in curve.get("standard_error", [None] * len(values))]
      error = curve["problem_standard_error"]
      columns = (report["n"], values, curve["low"], curve["high"], error, sampled)
      writer.writerows((kind, group, name, *row) for row in zip(*columns))
  return file.getvalue()
