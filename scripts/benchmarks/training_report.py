"""What the training benchmark makes of its runs: AUROC with intervals, targets, tables."""

from __future__ import annotations

import pathlib

import numpy as np

from prm_jax.training import metrics

RESAMPLES = 2000


def auroc(side: dict, when: str, rows: np.ndarray) -> float:
  """Step AUROC over some of the test rows, which may be drawn several times."""
  scores = np.concatenate([side[when]["scores"][i] for i in rows])
  labels = np.concatenate([side[when]["labels"][i] for i in rows])
  value = metrics.auroc(scores, labels == 1)
  return float("nan") if value is None else value


def aurocs(ours: list[dict], peers: list[dict], problems: list[str]) -> dict:
  """AUROC before and after by run; of the means over seeds, and their difference, 95 % intervals.

  Intervals are percentiles over resampled test problems, each with all its rows, the same ones for
  both sides: they do not say how much seeds vary; `by_seed` does.
  """
  for side in ours + peers:
    if len(side["after"]["labels"]) != len(problems):
      raise ValueError(f"{len(side['after']['labels'])} test rows scored, not {len(problems)}")
    if side["after"]["labels"] != ours[0]["after"]["labels"]:
      raise ValueError("the two sides scored other test labels; figures are not comparable")
  groups = [[i for i, p in enumerate(problems) if p == each] for each in dict.fromkeys(problems)]
  everything = np.arange(len(problems))
  rng = np.random.default_rng(0)
  draws = [
    np.concatenate([groups[g] for g in rng.integers(len(groups), size=len(groups))])
    for _ in range(RESAMPLES)
  ]
  out, means = {"problems": len(groups)}, {}
  for name, sides in (("ours", ours), ("peers", peers)):
    if not sides:
      continue
    by_seed = {w: [auroc(s, w, everything) for s in sides] for w in ("before", "after")}
    means[name] = np.array([[auroc(s, "after", rows) for s in sides] for rows in draws]).mean(1)
    low, high = np.nanpercentile(means[name], [2.5, 97.5])
    mean = float(np.mean(by_seed["after"]))
    out[name] = {"by_seed": by_seed, "after": mean, "low": low, "high": high}
  if len(means) == 2:
    low, high = np.nanpercentile(means["ours"] - means["peers"], [2.5, 97.5])
    difference = out["ours"]["after"] - out["peers"]["after"]
    out["difference"] = {"mean": difference, "low": low, "high": high}
  return out


def rate(sides: list[dict], what: str, seconds: str = "train_seconds") -> float:
  """So many per second of training, over all runs of a side."""
  return sum(s[what] for s in sides) / sum(s[seconds] for s in sides)


def with_compilation(side: dict) -> float:
  return side["train_seconds"] + side.get("compile_seconds", 0.0)


def targets(result: dict) -> list[dict]:
  """What issue and project ask of the comparison, and what was measured; nothing without a peer."""
  ours, peers = result["ours"], result["peers"]
  if not peers:
    return []
  ratio = rate(ours, "steps") / rate(peers, "steps")
  with_compile = sum(s["steps"] for s in ours) / sum(map(with_compilation, ours))
  difference = result["auroc"]["difference"]
  mean, low, high = (difference[name] for name in ("mean", "low", "high"))
  rows = [
    ("labelled steps a second, this project / TRL", ">= 1.3", ratio, ratio >= 1.3, ""),
    ("the same with compilation counted", "", with_compile / rate(peers, "steps"), None, ""),
    (
      f"step AUROC on the test rows, this project ({seeds(ours)}) - TRL ({seeds(peers)}) "
      f"(95 % [{low:.3f}, {high:.3f}])",
      ">= 0",
      mean,
      mean >= 0,
      ", within noise: not distinguishable" if low <= 0 <= high else "",
    ),
  ]
  names = ("what", "target", "measured", "met", "note")
  return [dict(zip(names, row)) for row in rows]


def seeds(sides: list[dict]) -> str:
  return f"seed{'s' * (len(sides) > 1)} {' '.join(str(s['seed']) for s in sides)}"


def tables(figures: dict) -> str:
  """The figures as Markdown."""
  parts = []
  if figures["peers"]:
    words = {True: "yes", False: "**no**", None: ""}
    rows = [
      (
        r["what"],
        r["target"],
        f"{r['measured']:.3f}",
        "" if figures["quick"] else words[r["met"]] + r["note"],
      )
      for r in targets(figures)
    ]
    parts.append(table(("target", "asked", "measured", "met"), rows))
  sides = [("TRL", s) for s in figures["peers"]] + [("this project", s) for s in figures["ours"]]
  parts.append(speed_table(sides))
  parts.append(auroc_table(figures["auroc"], figures["peers"], figures["ours"]))
  parts.append(footer(figures, dict(reversed(sides))))
  return "\n\n".join(parts)


def footer(figures: dict, sides: dict[str, dict]) -> str:
  """What was measured, in words.  `sides`: a run of each."""
  settings, rows = figures["settings"], figures["rows"]
  model, config = (pathlib.Path(settings[name]).name for name in ("model", "config"))
  parts = [f"Model {model}", f"this project's settings {config}", f"{settings['threads']} threads"]
  for name, side in sides.items():
    installed = ", ".join(" ".join(each) for each in side["versions"].items())
    parts.append(f"{name}: {installed}")
  parts.append(
    f"{rows['train']} training rows, {rows['test']} test rows of "
    f"{figures['auroc']['problems']} problems"
  )
  for split, about in figures.get("left_out", {}).items():
    parts.append(
      f"left out of {split}: {about['unlabelled']} with unlabelled steps, {about['long']} of more "
      f"than {settings['max_length']} tokens"
    )
  return "; ".join(parts) + "."


def speed_table(sides: list[tuple[str, dict]]) -> str:
  rows = []
  for name, s in sides:
    seconds = s["train_seconds"]
    compiled = f"{s['compile_seconds']:.0f}" if "compile_seconds" in s else ""
    rows.append(
      (
        f"{name}, seed {s['seed']}",
        s["updates"],
        f"{seconds:.0f}",
        compiled,
        f"{s['train_cpu_seconds']:.0f}",
        f"{s['slots'] / seconds:.1f}",
        f"{1 - s['tokens'] / s['slots']:.1%}",
        f"{s['tokens'] / seconds:.1f}",
        f"{s['steps'] / seconds:.2f}",
        f"{s['load_at_end']:.1f}",
      )
    )
  head = ("run", "updates", "training s", "compilation s", "CPU s", "slots/s", "padding")
  return table((*head, "real tokens/s", "labelled steps/s", "load average"), rows)


def auroc_table(about: dict, peers: list[dict], ours: list[dict]) -> str:
  rows = []
  for label, name, sides in (("TRL", "peers", peers), ("this project", "ours", ours)):
    if not sides:
      continue
    for i, side in enumerate(sides):
      by_seed = about[name]["by_seed"]
      values = (f"{by_seed[when][i]:.3f}" for when in ("before", "after"))
      rows.append((f"{label}, seed {side['seed']}", *values, "", f"{np.mean(side['losses']):.3f}"))
    interval = f"[{about[name]['low']:.3f}, {about[name]['high']:.3f}]"
    rows.append((f"{label}, mean", "", f"{about[name]['after']:.3f}", interval, ""))
  head = ("run", "step AUROC before", "after", "95 % over problems", "mean training loss")
  return table(head, rows)


def table(head: tuple, rows: list[tuple]) -> str:
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
