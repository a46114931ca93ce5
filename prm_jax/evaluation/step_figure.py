"""Draws a step benchmark's result: reliability, calibration by step, and F1 by threshold."""

from typing import Any

import numpy as np

from prm_jax.evaluation.figure_files import encoded
from prm_jax.runtime.json_lines import printable

CLASS_NAMES = {"-1": "P(wrong)", "0": "P(neutral)", "1": "P(right)"}
COLOURS = {"-1": "#c0392b", "0": "#8e7cc3", "1": "#2471a3"}


def draw(result: dict[str, Any]) -> bytes:
  """Returns a PNG of `step_benchmarks.result`."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(13, 4.8), dpi=110, layout="constrained")
  axes = figure.subplots(1, 3)
  calibration = result["diagnostics"]["calibration"]
  _reliability(axes[0], calibration)
  _by_step(axes[1], calibration["by_step"])
  _curve(axes[2], result)
  for each in axes:
    if each.get_legend_handles_labels()[0]:  # the legend is below the axes, where it hides nothing
      place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 3}
      style = {"fontsize": 8, "frameon": False, "columnspacing": 1, "handletextpad": 0.5}
      for text in each.legend(**place, **style).get_texts():
        text.set_parse_math(False)  # a group's name may hold "$"
    each.grid(alpha=0.3)
    each.spines[["top", "right"]].set_visible(False)
  return encoded(figure)


def _reliability(axes, calibration: dict[str, Any]) -> None:
  axes.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle="--")
  for name, part in calibration["by_class"].items():
    x = [b["mean_probability"] for b in part["bins"]]
    y = [b["share_not_wrong"] for b in part["bins"]]
    size = [4 + 200 * b["count"] / part["count"] for b in part["bins"]]
    label = f"{CLASS_NAMES[name]}, ECE {part['ece']:.3f}"
    axes.plot(x, y, color=COLOURS[name], linewidth=1)
    axes.scatter(x, y, size, color=COLOURS[name], label=label, alpha=0.8, clip_on=False)
  axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="mean probability", ylabel="share of steps")
  axes.set_title("Reliability by class (area: steps)", fontsize=10)


def _by_step(axes, rows: list[dict[str, Any]]) -> None:
  def name(first: int, last: int | None) -> str:
    if last is None:
      return f"{first}+"
    return str(first) if first == last else f"{first}-{last}"

  x = range(len(rows))
  scores = [row["mean_score"] for row in rows]
  axes.plot(x, scores, "o-", color=COLOURS["1"], label="mean score", clip_on=False)
  share = [row["share_not_wrong"] for row in rows]
  axes.plot(x, share, "s--", color="0.3", label="share not wrong", clip_on=False)
  ranked = [(i, row["auroc"]) for i, row in enumerate(rows) if row["auroc"] is not None]
  axes.plot(*zip(*ranked) if ranked else ([], []), "^:", color="#d68910", label="AUROC")
  axes.set_xticks(x, [f"{name(row['first'], row['last'])}\n{row['count']:,}" for row in rows])
  axes.set(ylim=(0, 1), xlabel="number of the step; labels below")
  axes.set_title("Calibration by step", fontsize=10)


def _curve(axes, result: dict[str, Any]) -> None:
  if "curve" not in result:
    classes = [
      (name, part) for name, part in result["classes"].items() if part["prm_score"] is not None
    ]
    axes.barh(range(len(classes)), [100 * part["prm_score"] for _, part in classes])
    names = [printable(name) for name, _ in classes]
    axes.set_yticks(range(len(classes)), names, parse_math=False)
    axes.set(xlim=(0, 100), xlabel="PRM-Score, %")
    axes.set_title("By class of error", fontsize=10)
    return
  curve = result["curve"]
  for name, part in curve["groups"].items():
    y = 100 * np.array(part["f1"], float)  # None becomes NaN, which is not drawn
    label = f" {printable(name)}"  # matplotlib hides a label that begins with "_"
    axes.plot(curve["threshold"], y, label=label)
  axes.axvline(result["threshold"], color="0.4", linewidth=1, linestyle="--")
  axes.set(xlim=(0, 1), ylim=(0, 100), xlabel="threshold", ylabel="F1 of the first wrong step, %")
  axes.set_title("First wrong step, by threshold", fontsize=10)
