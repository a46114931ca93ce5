"""Presents a reranking report: table, CSV, figure, and a page with a few solutions."""

import csv
import io
import json
import pathlib
import textwrap
from collections.abc import Sequence

import matplotlib.figure
import matplotlib.ticker
import matplotlib.transforms
import numpy as np

from prm_jax.aggregation import ranking
from prm_jax.evaluation import page
from prm_jax.evaluation.figure_files import encoded
from prm_jax.evaluation.methods import OF_STEPS
from prm_jax.evaluation.reranking import BREAKDOWNS, powers_of_two
from prm_jax.evaluation.sample_arrays import ScoredSamples
from prm_jax.evaluation.scored_samples import read_solutions
from prm_jax.runtime.json_lines import printable

FILES = ("report.json", "best_of_n.png", "report.html")
# Solutions on the page: of a problem, and in all.  Those that `_chosen` picks may exceed both.
SHOWN, MAX_SOLUTIONS = 8, 2_000
MAX_GROUPS = 20  # a breakdown with more groups has no figure
WIDTH = 100  # terminal columns of the notes below the table
MAX_COLUMNS = 16  # values of N in a table; of more, it shows about the powers of two
LEGEND = 90  # characters of a line of the legend, about
MAX_MARKERS = 40  # a curve over more values of N has no markers
BARS_APART = 2.5  # most points between the intervals of two methods at one N
AXIS_POINTS = 300  # width of the N axis in points, about
NUMBERS = ("n", "value", "low", "high", "problem_standard_error", "standard_error")  # CSV columns
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet may run a cell that begins with these
# Okabe and Ito's palette is distinct with any colour vision; markers are distinct in print.  The
# paper's three methods always have the same style.
STYLES = {"prm_product": ("#0072B2", "o"), "orm": ("#D55E00", "s"), "majority": ("#555555", "^")}
SPARE = (("#009E73", "D"), ("#CC79A7", "v"), ("#E69F00", "P"), ("#56B4E9", "X"), ("#000000", "*"))
BANDS = {
  "pointwise": "Bars: 95 % interval over problems, each N by itself (bootstrap)",
  "simultaneous": "Bars: 95 % band over problems, for all N of a curve at once (sup-t)",
  "generation": "Bars: 95 % interval for other candidates of the same problems\n"
  "(jackknife, N ≤ M/5; none for votes and all-correct)",
}


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
  reasons = {name: f"the pick of {label}" for name, label in own.items()}
  reasons |= {"prm_product": "the PRM's pick", "orm": "the ORM's pick"}
  right, wrong = samples.valid & samples.correct, samples.valid & ~samples.correct
  rules = [(scores[name], why, samples.valid) for name, why in reasons.items() if name in scores]
  if rules:
    best = rules[0][0]
    rules.append((best, "the wrong one it likes best", wrong))
    rules.append((-best, "the right one it likes least", right))
  problems, pool = samples.correct.shape
  most = max(min(SHOWN, MAX_SOLUTIONS // problems), 2)
  out: list[dict[int, str]] = [{} for _ in range(min(problems, MAX_SOLUTIONS // 2))]
  for p, shown in enumerate(out):
    for score, why, allowed in rules:
      if len(among := np.flatnonzero(allowed[p])):
        m = int(among[score[p, among].argmax()])  # a score may be -inf
        shown[m] = f"{shown[m]} and {why}" if m in shown else why
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
    last=len(report["n"]) - 1,
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


def draw_curves(report: dict) -> matplotlib.figure.Figure:
  """Draws accuracy over N on a log2 axis, in the form of the paper's Figure 3."""
  figure, axes = _figure(4.6, "both")
  n, styles = report["n"], _styles(report)
  ends, reach = [], []  # reach: all values that are drawn, for the limits of the axis
  bars = shown(n)  # indices of the values of N with an interval
  at, apart = [n[k] for k in bars], _bars_apart([n[k] for k in bars], len(styles))
  for i, (name, (colour, marker)) in enumerate(styles.items()):
    low, middle, high = _percent(report["curves"][name])
    # The intervals of an N stand side by side so that none hides another.
    aside = {"x": apart * (i - (len(styles) - 1) / 2), "units": "points"}
    beside = matplotlib.transforms.offset_copy(axes.transData, figure, **aside)
    style = {"color": colour, "alpha": 0.55, "linewidth": 1.3, "transform": beside}
    axes.vlines(at, low[bars], high[bars], **style)
    marker = marker if len(n) <= MAX_MARKERS else None
    axes.plot(n, middle, color=colour, marker=marker, markersize=4, linewidth=1.4)
    ends.append((middle[-1], _short(report["labels"][name], 40), colour))
    reach += [*low, *middle, *high]
  axes.set_ylim(max(np.nanmin(reach) - 4, 0), min(np.nanmax(reach) + 4, 101))
  axes.set_xscale("log", base=2)
  if len(n) <= 12:
    axes.set_xticks(n, [str(k) for k in n], fontsize=8.5)  # small: 1024 and 1860 are close
  else:
    axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(base=2, numticks=40))
    axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:.0f}"))
    axes.set_xlim(n[0] / 1.3, n[-1] * 1.3)
  axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
  axes.set_xlabel("N = number of solutions per problem")
  axes.set_ylabel("% problems solved (best-of-N)")
  title = f"Problems: {report['problems']}, solutions: {report['samples']:,}"
  axes.set_title(f"{title}\n{BANDS[report['band']]}", fontsize=9, loc="left")
  _label_ends(axes, n[-1], ends)
  return figure


def _bars_apart(n: Sequence[int], methods: int) -> float:
  """Returns the points between two methods' intervals, so few that neighbouring N stay apart."""
  octaves = np.diff(np.log2(n))
  if not len(octaves):
    return BARS_APART
  return min(BARS_APART, 0.7 * AXIS_POINTS * octaves.min() / octaves.sum() / methods)


def draw_groups(report: dict, breakdown: str) -> matplotlib.figure.Figure:
  """Draws a breakdown at the largest N: a line for each group, a point for each drawn method."""
  groups = report[f"by_{breakdown}"]
  styles = _styles(report)
  figure, axes = _figure(1.3 + 0.42 * len(groups), "x")
  rows = np.arange(len(groups))
  for i, (name, (colour, marker)) in enumerate(styles.items()):
    low, middle, high = np.transpose([_percent(g["curves"][name])[:, -1] for g in groups.values()])
    apart = 0.5 * ((i + 0.5) / len(styles) - 0.5)  # offset of the method within its group's line
    axes.hlines(rows + apart, low, high, color=colour, alpha=0.45, linewidth=2)
    axes.plot(middle, rows + apart, marker, color=colour, markersize=5)
  axes.set_yticks(rows, [group_name(breakdown, name) for name in groups], parse_math=False)
  axes.invert_yaxis()
  axes.set_xlim(-1, 101)
  axes.set_xlabel(f"% problems solved at N = {report['n'][-1]}")
  labels = [_short(report["labels"][name], 40) for name in styles]
  columns = min(max(LEGEND // (6 + max(map(len, labels))), 1), 4)
  place = {"loc": "outside upper left", "ncols": columns, "frameon": False, "fontsize": 9}
  legend = figure.legend(axes.get_lines(), ["label"] * len(labels), **place)
  for text, label in zip(legend.get_texts(), labels):  # a label may begin with "_" or hold "$"
    text.set(text=label, parse_math=False)
  return figure


def _figure(height: float, grid: str) -> tuple:
  """Returns an empty figure and its axes."""
  figure = matplotlib.figure.Figure(figsize=(7, height), dpi=150, layout="constrained")
  axes = figure.subplots()
  axes.grid(alpha=0.25, linewidth=0.6, axis=grid)
  axes.spines[["top", "right"]].set_visible(False)
  return figure, axes


def _styles(report: dict) -> dict[str, tuple[str, str]]:
  """Returns the colour and marker of each drawn method; there are at least MAX_DRAWN styles."""
  drawn = report["drawn"]
  spare = iter((*SPARE, *(style for name, style in STYLES.items() if name not in drawn)))
  return {name: STYLES.get(name) or next(spare) for name in drawn}


def _percent(curve: dict) -> np.ndarray:
  """Returns low, middle and high `[3, K]` of a curve in percent; NaN where there is none."""
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
  for i in reversed(range(len(ends))):  # back down where names went over the top
    positions[i] = min(positions[i], highest)
    highest = positions[i] - line
  for (y, label, colour), position in zip(ends, positions):
    arrow = leader if abs(position - y) > line / 4 else None
    at = {"xytext": (14, position), "textcoords": ("offset points", "data"), "arrowprops": arrow}
    style = {"color": colour, "va": "center", "fontweight": "bold", "fontsize": 9}
    axes.annotate(label, (x, y), **at, **style, parse_math=False, annotation_clip=False)


def group_name(breakdown: str, group: str) -> str:
  """Returns the displayed name of a group, on one line."""
  if breakdown == "difficulty":
    return {"1": "1 (easiest)", "5": "5 (hardest)"}.get(group, group)
  return _short(group, 24)


def _short(text: str, most: int) -> str:
  """Returns the text on one line, cut to at most `most` characters."""
  text = printable(text)
  return text if len(text) <= most else text[: most - 1] + "…"


def shown(n: Sequence[int]) -> list[int]:
  """Returns the indices of the values of N that a table shows."""
  if len(n) <= MAX_COLUMNS:
    return list(range(len(n)))
  return sorted({int(np.searchsorted(n, power)) for power in powers_of_two(n[-1])})


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
