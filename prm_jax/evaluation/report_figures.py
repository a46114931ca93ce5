"""The figures of a reranking report, as PNG."""

from __future__ import annotations

import io

import matplotlib.figure
import matplotlib.ticker
import numpy as np

from prm_jax.evaluation.methods import LABELS

# Okabe and Ito's palette, distinct with any colour vision; markers distinguish in print.
# The paper's three methods always have the same.
STYLES = {"prm_product": ("#0072B2", "o"), "orm": ("#D55E00", "s"), "majority": ("#555555", "^")}
MORE_STYLES = (
  ("#009E73", "D"),
  ("#CC79A7", "v"),
  ("#E69F00", "P"),
  ("#56B4E9", "X"),
  ("#000000", "*"),
)
MAX_MARKERS = 40  # values of N
BANDS = {
  "pointwise": "Shaded: 95 % interval over problems, each N by itself (bootstrap)",
  "simultaneous": "Shaded: 95 % band over problems, for all N of a curve at once (sup-t)",
  "generation": "Shaded: 95 % interval for other candidates of the same problems\n"
  "(jackknife, N ≤ M/5; none for votes)",
}


def draw_curves(report: dict) -> bytes:
  """The figure in the form of the paper's Figure 3: accuracy over N, log2 axis."""
  figure = matplotlib.figure.Figure(figsize=(7, 4.6), dpi=150, layout="constrained")
  axes = figure.subplots()
  n = report["n"]
  ends = []
  reach = []  # all values that are drawn, for the limits of the axis
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
  axes.grid(alpha=0.25, linewidth=0.6)
  axes.spines[["top", "right"]].set_visible(False)
  axes.set_title(
    f"Problems: {report['problems']}, solutions: {report['samples']:,}\n{BANDS[report['band']]}",
    fontsize=9,
    loc="left",
  )
  _label_ends(axes, n[-1], ends)
  return _png(figure)


def draw_groups(report: dict, breakdown: str) -> bytes:
  """The drawn methods by group of a breakdown, at the largest N: a line for each group."""
  groups = report[f"by_{breakdown}"]
  styles = _styles(report)
  figure = matplotlib.figure.Figure(
    figsize=(7, 1.3 + 0.42 * len(groups)), dpi=150, layout="constrained"
  )
  axes = figure.subplots()
  rows = np.arange(len(groups))
  for i, (name, (colour, marker)) in enumerate(styles.items()):
    low, middle, high = np.transpose([_percent(g["curves"][name])[:, -1] for g in groups.values()])
    apart = 0.5 * ((i + 0.5) / len(styles) - 0.5)  # offset of the method within its group's line
    axes.hlines(rows + apart, low, high, color=colour, alpha=0.45, linewidth=2)
    axes.plot(middle, rows + apart, marker, color=colour, markersize=5, label=LABELS[name])
  axes.set_yticks(rows, [f"{group_name(breakdown, k)}" for k in groups], parse_math=False)
  axes.invert_yaxis()
  axes.set_xlim(-1, 101)
  axes.set_xlabel(f"% problems solved at N = {report['n'][-1]}")
  axes.grid(alpha=0.25, linewidth=0.6, axis="x")
  axes.spines[["top", "right"]].set_visible(False)
  figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=9)
  return _png(figure)


def group_name(breakdown: str, group: str) -> str:
  """The label of a group, on one line."""
  if breakdown == "difficulty":
    return {"1": "1 (easiest)", "5": "5 (hardest)"}.get(group, group)
  group = printable(group)
  return group if len(group) <= 24 else group[:23] + "…"


def printable(text: str) -> str:
  """The text with "?" for control characters: one safe line of a terminal or figure."""
  return "".join(c if c.isprintable() else "?" for c in text)


def _styles(report: dict) -> dict[str, tuple[str, str]]:
  """Colour and marker of each drawn method; there are at least as many styles."""
  drawn = report["drawn"]
  spare = iter((*MORE_STYLES, *(style for name, style in STYLES.items() if name not in drawn)))
  return {name: STYLES.get(name) or next(spare) for name in drawn}


def _percent(curve: dict) -> np.ndarray:
  """Low, middle and high `[3, K]` of a curve in percent; NaN where there is none."""
  return 100 * np.array([curve[key] for key in ("low", "accuracy", "high")], float)


def _label_ends(axes, x: float, ends) -> None:
  """Writes each curve's name at its right end; overlapping names are pushed apart."""
  low, high = axes.get_ylim()
  line = (high - low) * 0.05
  leader = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "relpos": (0, 0.5)}
  leader |= {"shrinkA": 0, "shrinkB": 2}
  ends = sorted(ends)
  positions = [y for y, _, _ in ends]
  for i in range(1, len(ends)):
    positions[i] = max(positions[i], positions[i - 1] + line)
  highest = high
  for i in reversed(range(len(ends))):  # back down, where they went over the top
    positions[i] = min(positions[i], highest)
    highest = positions[i] - line
  for (y, label, colour), position in zip(ends, positions):
    axes.annotate(
      label,
      (x, y),
      xytext=(14, position),
      textcoords=("offset points", "data"),
      arrowprops=leader if abs(position - y) > line / 4 else None,
      color=colour,
      va="center",
      fontweight="bold",
      fontsize=9,
      annotation_clip=False,
    )


def _png(figure) -> bytes:
  buffer = io.BytesIO()
  figure.savefig(buffer, format="png")
  return buffer.getvalue()
