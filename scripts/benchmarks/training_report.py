"""What the training benchmark makes of its runs: AUROC with intervals, targets, tables."""

from __future__ import annotations

import pathlib

import numpy as np

from prm_jax import step_metrics

RESAMPLES = 2000
PEER, OURS = "TRL", "this project, {}"
# Of labelled steps a second, this project's by the peer's: by rows and layout.
FASTER = {("phase2", "packed"): 1.3, ("phase2", "trees"): 2.0, ("phase1", "trees"): 10.0}


def sides(result: dict) -> dict[str, list[dict]]:
  """The runs of the peer, if it was measured, and of each layout of this project."""
  out = {PEER: result["peers"]} if result["peers"] else {}
  for run in result["ours"]:
    out.setdefault(OURS.format(run["layout"]), []).append(run)
  return out


def auroc(side: dict, when: str, rows: np.ndarray) -> float:
  """Step AUROC over some of the test rows, which may be drawn several times."""
  scores = np.concatenate([side[when]["scores"][i] for i in rows])
  labels = np.concatenate([side[when]["labels"][i] for i in rows])
  value = step_metrics.auroc(scores, labels == 1)
  return float("nan") if value is None else value


def aurocs(result: dict, problems: list[str]) -> dict:
  """AUROC before and after by run; of the means over seeds, and differences, 95 % intervals.

  Intervals are percentiles over resampled test problems, each with all its rows, the same ones for
  all sides: they do not say how much seeds vary; `by_seed` does.

  Returns:
    "problems", their number; "sides" by name; "differences" of this project's sides to the peer.
  """
  runs = sides(result)
  labels = result["ours"][0]["after"]["labels"]
  if len(labels) != len(problems):
    raise ValueError(f"{len(labels)} test rows scored, not {len(problems)}")
  if any(run["after"]["labels"] != labels for each in runs.values() for run in each):
    raise ValueError("the sides scored other test labels; figures are not comparable")
  groups = [[i for i, p in enumerate(problems) if p == each] for each in dict.fromkeys(problems)]
  everything = np.arange(len(problems))
  rng = np.random.default_rng(0)
  draws = [
    np.concatenate([groups[g] for g in rng.integers(len(groups), size=len(groups))])
    for _ in range(RESAMPLES)
  ]
  out, means = {"problems": len(groups), "sides": {}, "differences": {}}, {}
  for name, each in runs.items():
    by_seed = {w: [auroc(run, w, everything) for run in each] for w in ("before", "after")}
    means[name] = np.array([[auroc(run, "after", rows) for run in each] for rows in draws]).mean(1)
    low, high = np.nanpercentile(means[name], [2.5, 97.5])
    mean = float(np.mean(by_seed["after"]))
    out["sides"][name] = {"by_seed": by_seed, "after": mean, "low": low, "high": high}
  for name in [name for name in means if PEER in means and name != PEER]:
    low, high = np.nanpercentile(means[name] - means[PEER], [2.5, 97.5])
    difference = out["sides"][name]["after"] - out["sides"][PEER]["after"]
    out["differences"][name] = {"mean": difference, "low": low, "high": high}
  return out


def rate(sides: list[dict], what: str, seconds: str = "train_seconds") -> float:
  """So many per second of training, over all runs of a side."""
  return sum(s[what] for s in sides) / sum(s[seconds] for s in sides)


def with_compilation(side: dict) -> float:
  return side["train_seconds"] + side.get("compile_seconds", 0.0)


def targets(result: dict) -> list[dict]:
  """What the project asks of the comparison, and what was measured; nothing without a peer."""
  runs = sides(result)
  peers = runs.pop(PEER, [])
  rows = []
  for name, ours in runs.items() if peers else ():
    asked = FASTER.get((result["rows_of"], ours[0]["layout"]))
    ratio = rate(ours, "steps") / rate(peers, "steps")
    with_compile = sum(s["steps"] for s in ours) / sum(map(with_compilation, ours))
    met = None if asked is None else ratio >= asked
    what = f"labelled steps a second, {name} / {PEER}"
    rows.append((what, "" if asked is None else f">= {asked:g}", ratio, met, ""))
    what = f"the same with compilation counted, {name}"
    rows.append((what, "", with_compile / rate(peers, "steps"), None, ""))
    own, other = (rate(each, "steps", "train_cpu_seconds") for each in (ours, peers))
    what = f"labelled steps a second of processor time, {name}"  # whatever else the machine does
    rows.append((what, "", own / other, None, ""))
    if result["auroc"]:
      difference = result["auroc"]["differences"][name]
      mean, low, high = (difference[key] for key in ("mean", "low", "high"))
      what = f"step AUROC on the test rows, {name} ({seeds(ours)}) - {PEER} ({seeds(peers)})"
      note = ", within noise: not distinguishable" if low <= 0 <= high else ""
      rows.append((f"{what} (95 % [{low:.3f}, {high:.3f}])", ">= 0", mean, mean >= 0, note))
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
  parts.append(speed_table(sides(figures)))
  if figures["auroc"]:
    parts.append(auroc_table(figures))
  parts.append(footer(figures))
  return "\n\n".join(parts)


def footer(figures: dict) -> str:
  """What was measured, in words."""
  settings, rows = figures["settings"], figures["rows"]
  model, config = (pathlib.Path(settings[name]).name for name in ("model", "config"))
  parts = [f"Model {model}", f"{settings['threads']} threads", f"this project's settings {config}"]
  batch, devices = figures["ours"][0]["batch_rows"], settings["devices"]
  parts.append(
    f"{batch} packed row{'s' * (batch > 1)} of {settings['row_length']:,} tokens an update, on "
    f"{devices} CPU device{'s' * (devices > 1)}"
  )
  for name, side in (("this project", figures["ours"]), (PEER, figures["peers"])):
    if side:
      installed = ", ".join(" ".join(each) for each in side[0]["versions"].items())
      parts.append(f"{name}: {installed}")
  parts.append(f"{rows['train']} training rows")
  if figures["auroc"]:
    parts.append(f"{rows['test']} test rows of {figures['auroc']['problems']} problems")
  for split, about in figures["left_out"].items():
    parts.append(
      f"left out of {split}: {about['unlabelled']} with unlabelled steps, {about['long']} of more "
      f"than {settings['max_length']} tokens"
    )
  return "; ".join(parts) + "."


def speed_table(runs: dict[str, list[dict]]) -> str:
  """Of each run.  Labelled steps are those of the peer's rows; "labels read", its targets."""
  rows = []
  for name, s in ((name, run) for name, each in runs.items() for run in each):
    seconds = s["train_seconds"]
    compiled = f"{s['compile_seconds']:.0f}" if "compile_seconds" in s else ""
    rows.append(
      (
        f"{name}, seed {s['seed']}",
        s["updates"],
        f"{s['steps']:,}",
        f"{s.get('targets', s['steps']):,}",
        f"{s['tokens']:,}",
        f"{1 - s['tokens'] / s['slots']:.1%}",
        f"{seconds:.0f}",
        compiled,
        f"{s['train_cpu_seconds']:.0f}",
        f"{s['slots'] / seconds:.1f}",
        f"{s['steps'] / seconds:.2f}",
        f"{s['load_at_end']:.1f}",
      )
    )
  head = ("run", "updates", "labelled steps", "labels read", "tokens", "padding", "training s")
  head += ("compilation s", "CPU s", "slots/s", "labelled steps/s", "load average")
  return table(head, rows)


def auroc_table(figures: dict) -> str:
  rows = []
  for name, runs in sides(figures).items():
    about = figures["auroc"]["sides"][name]
    for i, run in enumerate(runs):
      values = (f"{about['by_seed'][when][i]:.3f}" for when in ("before", "after"))
      rows.append((f"{name}, seed {run['seed']}", *values, "", f"{np.mean(run['losses']):.3f}"))
    interval = f"[{about['low']:.3f}, {about['high']:.3f}]"
    rows.append((f"{name}, mean", "", f"{about['after']:.3f}", interval, ""))
  head = ("run", "step AUROC before", "after", "95 % over problems", "mean training loss")
  return table(head, rows)


def table(head: tuple, rows: list[tuple]) -> str:
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
