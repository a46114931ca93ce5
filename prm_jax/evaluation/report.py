"""Writes a reranking report: report.json, the figure, a page, and a table for the terminal."""

from __future__ import annotations

import base64
import io
import json
import pathlib

import jinja2
import matplotlib.figure
import matplotlib.ticker
import numpy as np

from prm_jax import json_lines
from prm_jax.evaluation.scored_samples import ScoredSamples, read_solutions

LABELS = {
  "prm_product": "PRM",
  "prm_min": "PRM, weakest step",
  "prm_mean": "PRM, mean of steps",
  "prm_last": "PRM, last step",
  "orm": "ORM",
  "majority": "Majority voting",
  "weighted_prm_product": "PRM-weighted voting",
  "weighted_orm": "ORM-weighted voting",
  "oracle": "Oracle (any right)",
  "random": "Random pick",
}
# Okabe and Ito's colours, told apart with any colour vision; markers tell them apart in print.
DRAWN = {"prm_product": ("#0072B2", "o"), "orm": ("#D55E00", "s"), "majority": ("#555555", "^")}
EXAMPLES = 4  # problems whose solutions the page shows


def write_report(
  report: dict, samples: ScoredSamples, scores: dict[str, np.ndarray], directory
) -> list[pathlib.Path]:
  """Writes report.json, best_of_n.png and report.html; a reader never sees half a file.

  Args:
    report: of `reranking.rerank`.
    samples: the candidates.
    scores: of `reranking.rerank`.
    directory: where to; made if it is not there.

  Returns:
    The three paths.
  """
  directory = pathlib.Path(directory)
  png = draw_curves(report)
  examples = pick_examples(samples, scores)
  report = report | {"examples": examples}
  contents = {
    "report.json": (json.dumps(report, indent=1, allow_nan=False) + "\n").encode(),
    "best_of_n.png": png,
    "report.html": render_page(report, png).encode(),
  }
  for name, data in contents.items():
    with json_lines.written(directory / name, "wb") as file:
      file.write(data)
  return [directory / name for name in contents]


def draw_curves(report: dict) -> bytes:
  """The figure as PNG, in the form of the paper's Figure 3: accuracy over N, log2 axis."""
  figure = matplotlib.figure.Figure(figsize=(7, 4.6), dpi=150, layout="constrained")
  axes = figure.subplots()
  n = report["n"]
  ends = []
  reach = []  # lowest and highest of what is drawn
  for name, (colour, marker) in DRAWN.items():
    if name not in report["curves"]:
      continue
    curve = {key: 100 * np.array(value) for key, value in report["curves"][name].items()}
    axes.fill_between(n, curve["low"], curve["high"], color=colour, alpha=0.15, linewidth=0)
    axes.plot(n, curve["accuracy"], color=colour, marker=marker, markersize=4, linewidth=1.8)
    ends.append((curve["accuracy"][-1], LABELS[name], colour))
    reach += [curve["low"].min(), curve["high"].max()]
  if reach:
    axes.set_ylim(max(min(reach) - 4, 0), min(max(reach) + 4, 101))
  axes.set_xscale("log", base=2)
  axes.set_xticks(n, [str(k) for k in n] if len(n) <= 12 else None)
  if len(n) > 12:
    axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(base=2))
    axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:.0f}"))
  axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
  axes.set_xlabel("N = number of solutions per problem")
  axes.set_ylabel("% problems solved (best-of-N)")
  axes.grid(alpha=0.25, linewidth=0.6)
  axes.spines[["top", "right"]].set_visible(False)
  axes.set_title(
    f"Problems: {report['problems']}, solutions: {report['samples']:,}. "
    "Shaded: 95 % interval over problems",
    fontsize=9,
    loc="left",
  )
  _label_ends(axes, n[-1], ends)
  buffer = io.BytesIO()
  figure.savefig(buffer, format="png")
  return buffer.getvalue()


def _label_ends(axes, x: float, ends) -> None:
  """Names each curve at its right end, pushed apart where they would overlap."""
  low, high = axes.get_ylim()
  line = (high - low) * 0.05
  position = -np.inf
  for y, label, colour in sorted(ends):
    position = max(y, position + line)
    axes.annotate(
      label,
      (x, position),
      xytext=(8, 0),
      textcoords="offset points",
      color=colour,
      va="center",
      fontweight="bold",
      fontsize=9,
      annotation_clip=False,
    )


def pick_examples(samples: ScoredSamples, scores: dict[str, np.ndarray]) -> list[dict]:
  """A few problems, with the solutions that the models pick out of all M.

  Chosen to differ: first problems that the PRM solves and the ORM does not, then the reverse,
  then one that neither solves, then any.  Not a sample from which to judge the models.
  """
  if samples.step_probs is None:
    return []
  pools = np.flatnonzero(samples.valid.any(axis=1))
  best = {
    name: np.where(samples.valid, scores[name], -np.inf).argmax(axis=1)
    for name in ("prm_product", "orm")
    if name in scores
  }
  prm = best["prm_product"]
  solved = samples.correct[np.arange(len(prm)), prm]
  other = best.get("orm", prm)
  other_solved = samples.correct[np.arange(len(prm)), other]
  kinds = [
    [p for p in pools if solved[p] and not other_solved[p]],
    [p for p in pools if not solved[p] and other_solved[p]],
    [p for p in pools if not solved[p] and not other_solved[p]],
    [p for p in pools if solved[p] and other_solved[p]],
  ]
  # The first of each kind, then the second of each, ...
  ranked = sorted((i, kind, p) for kind, some in enumerate(kinds) for i, p in enumerate(some))
  chosen = [p for _, _, p in ranked[:EXAMPLES]]

  picks = []
  for p in chosen:
    slots = {int(prm[p]): ["the PRM's pick"]}
    if "orm" in best:
      slots.setdefault(int(other[p]), []).append("the ORM's pick")
    wrong = np.where(samples.valid[p] & ~samples.correct[p], scores["prm_product"][p], -np.inf)
    if np.isfinite(wrong).any() and len(slots) == 1:
      slots.setdefault(int(wrong.argmax()), []).append("the wrong answer the PRM likes best")
    picks += [(p, m, why) for m, why in slots.items()]
  records = read_solutions(samples, [(p, m) for p, m, _ in picks])

  examples = {p: {"problem": samples.problems[p], "solutions": []} for p in chosen}
  for (p, m, why), record in zip(picks, records):
    examples[p] |= {
      "level": samples.levels[p],
      "subject": samples.subjects[p],
      "truth": record.get("ground_truth_answer"),
    }
    examples[p]["solutions"].append(
      {
        "line": int(samples.lines[p, m]),
        "why": " and ".join(why),
        "correct": bool(samples.correct[p, m]),
        "answer": record.get("answer"),
        "prm_product": float(np.exp(scores["prm_product"][p, m])),
        "orm": float(scores["orm"][p, m]) if "orm" in scores else None,
        "steps": [
          {"text": step, "not_wrong": 1 - rating["-1"]}
          for step, rating in zip(record["steps"], record["rating_probs"])
        ],
      }
    )
  return list(examples.values())


def render_page(report: dict, png: bytes) -> str:
  """The page: one file, nothing fetched, every text of the data escaped."""
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  return environment.get_template("report.html").render(
    report=report,
    labels=LABELS,
    figure=base64.b64encode(png).decode(),
    last=len(report["n"]) - 1,
  )


def format_table(report: dict) -> str:
  """The report in lines of text: methods by N, with intervals at the largest N."""
  n = report["n"]
  width = max(6, len(str(n[-1])) + 1)
  lines = [
    f"problems: {report['problems']}, candidates: {report['samples']:,}; % of problems solved, "
    f"95 % interval at N = {n[-1]}",
    "",
    f"{'N':22}" + "".join(f"{k:>{width}}" for k in n),
  ]
  for name, curve in report["curves"].items():
    row = "".join(f"{100 * a:{width}.1f}" for a in curve["accuracy"])
    lines.append(f"{name:22}{row}   [{100 * curve['low'][-1]:.1f}, {100 * curve['high'][-1]:.1f}]")
  if report["paired"]:
    lines += ["", "differences on the same problems"]
  for name, curve in report["paired"].items():
    row = "".join(f"{100 * a:+{width}.1f}" for a in curve["difference"])
    low, high = 100 * curve["low"][-1], 100 * curve["high"][-1]
    lines.append(f"{name:22}{row}   [{low:+.1f}, {high:+.1f}]")
  return "\n".join(lines + [""] * bool(report["notices"]) + report["notices"])
