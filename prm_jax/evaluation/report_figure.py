"""Draws a reranking report: best-of-N curves, and a breakdown by group."""

from collections.abc import Sequence

import matplotlib.figure
import matplotlib.ticker
import matplotlib.transforms
import numpy as np

from prm_jax.evaluation.report_table import group_name, short, shown

LEGEND = 90  # characters of a line of the legend, about
MAX_MARKERS = 40  # a curve over more values of N has no markers
BARS_APART = 2.5  # most points between the intervals of two methods at one N
AXIS_POINTS = 300  # width of the N axis in points, about
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
    ends.append((middle[-1], short(report["labels"][name], 40), colour))
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
  labels = [short(report["labels"][name], 40) for name in styles]
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
