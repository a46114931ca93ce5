"""Draws curves with bands over seeds and problems, like the paper's figures; and their HTML."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.figure
import matplotlib.ticker
import numpy as np

from prm_jax.evaluation import page
from prm_jax.evaluation.figure_files import encoded
from prm_jax.experiments.results import Results, Table

COLOURS = (
  *("#1b6ca8", "#d1603d", "#3a9d5d", "#8e5ea2", "#b8860b", "#5f6b6d"),
  *("#c0392b", "#16a085", "#222222", "#d6619c", "#8a8a00", "#2c3e80"),
  *("#00a0c6", "#a65628", "#e8a0bf"),
)
MARKERS = "osD^vPX*"
MANY = 10  # a legend of more names has no room among the curves


@dataclasses.dataclass(frozen=True)
class Curve:
  label: str
  x: Sequence[float]
  y: np.ndarray  # in units of the panel's axis
  low: np.ndarray | None = None
  high: np.ndarray | None = None
  dashed: bool = False
  colour: int | None = None  # index into COLOURS; None: its index in the panel

  @classmethod
  def over_n(cls, label: str, n: Sequence[float], accuracy: dict[str, Any], **style: Any):
    """Returns best-of-N in % over N, from `Results.intervals`; `style`: `dashed` and `colour`."""
    values = (100 * np.array(accuracy[key], float) for key in ("mean", "low", "high"))
    return cls(label, n, *values, **style)

  @classmethod
  def at_last(cls, label: str, x: Sequence[float], accuracies: Sequence[dict[str, Any]]):
    """Returns best-of-N in % at the largest N over `x`, from `Results.intervals` at each x."""
    y = [[100 * each[k][-1] for each in accuracies] for k in ("mean", "low", "high")]
    return cls(label, x, *map(np.array, y))


@dataclasses.dataclass(frozen=True)
class Panel:
  curves: Sequence[Curve]
  x: str  # label of the axis
  y: str
  log: bool = True  # x in powers of two


def draw(panels: Sequence[Panel]) -> matplotlib.figure.Figure:
  """Draws the panels: up to three side by side, more in two rows."""
  rows = 1 if len(panels) <= 3 else 2
  columns = math.ceil(len(panels) / rows)
  names = max(len(panel.curves) + 1 for panel in panels)
  below = names > MANY  # the legend, two columns of a line each 0.18 inches high
  size = (5.2 * columns, (4.4 + below * 0.09 * names) * rows)
  figure = matplotlib.figure.Figure(figsize=size, dpi=150, layout="constrained")
  for i, panel in enumerate(panels):
    axes = figure.add_subplot(rows, columns, i + 1)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    bands = {}
    for j, curve in enumerate(panel.curves):
      colour = j if curve.colour is None else curve.colour
      style = {"color": COLOURS[colour % len(COLOURS)], "linewidth": 1.5}
      style |= {"linestyle": "--"} if curve.dashed else {"marker": MARKERS[colour % len(MARKERS)]}
      axes.plot(curve.x, curve.y, markersize=4.5, **style)
      if curve.low is not None:
        fill = {"color": style["color"], "alpha": 0.13, "lw": 0}
        label = f"95 % interval of {curve.label}"
        bands[label] = axes.fill_between(curve.x, curve.low, curve.high, **fill)
    if panel.log:
      axes.set_xscale("log", base=2)
      ticks = sorted({x for curve in panel.curves for x in curve.x})
      if len(ticks) <= 12 and all(x == int(x) for x in ticks):
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks], fontsize=8)
      axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    elif all(x == int(x) for curve in panel.curves for x in curve.x):
      axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.set_xlabel(panel.x, parse_math=False)
    axes.set_ylabel(panel.y)
    # The legend names a band only if one curve among several has it.
    bands = bands if len(bands) == 1 < len(panel.curves) else {}
    handles, labels = [*axes.get_lines(), *bands.values()], [c.label for c in panel.curves]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 2} if below else {}
    legend = axes.legend(handles, ["label"] * len(handles), fontsize=8, frameon=False, **place)
    for text, label in zip(legend.get_texts(), [*labels, *bands]):  # "_" or "$" may be in a label
      text.set(text=label, parse_math=False)
  return figure


def over_n(
  labels: Mapping[str, str], results: Results, x: str = "N = number of solutions per problem"
) -> Panel:
  """Returns the panel of best-of-N of the labelled runs; voting is dashed."""
  drawn = [
    Curve.over_n(label, results.n, results.curve(name), dashed=name == "majority")
    for name, label in labels.items()
  ]
  return Panel(drawn, x, "% problems solved (best-of-N)")


def contents(
  panels: Sequence[Panel],
  tables: Sequence[Table],
  *,
  title: str,
  about: str,
  alt: str,
  question: str = "",
  paper: str = "",
  notes: str = "",
  problems: Sequence[page.Problem] = (),
  vector: Sequence[str] = (),
) -> dict[str, bytes]:
  """Returns the files of a figure with tables, by suffix: ".png", ".html".

  Args:
    title, about: head of the page.
    alt: what the figure shows.
    question, paper, notes: texts above the figure, above the tables and below them.
    problems: problems whose solutions the page shows.
    vector: further formats of the figure: "pdf", "svg".
  """
  figure = draw(panels)
  png = encoded(figure)
  template = page.template(pathlib.Path(__file__).with_name("figure_and_tables.html"))
  body = template.render(
    figure=png, alt=alt, tables=tables, question=question, paper=paper, notes=notes
  )
  files = {".png": png, ".html": page.render(problems, title, about, body).encode()}
  return files | {f".{kind}": encoded(figure, kind) for kind in vector}
