"""The content of a reranking report: curves with error bars, differences, breakdowns."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from prm_jax import aggregation as agg
from prm_jax.evaluation import methods as methods_lib
from prm_jax.evaluation.methods import solution_scores
from prm_jax.evaluation.scored_samples import ScoredSamples

PAIRS = (("prm_product", "orm"), ("prm_product", "majority"), ("orm", "majority"))
DRAWN = ("prm_product", "orm", "majority")  # in the figure, as in the paper's Figure 3
MAX_DRAWN = 8  # as many as there are styles
BREAKDOWNS = ("level", "subject", "difficulty")
QUINTILES = 5
SCORE_TOLERANCE = 1e-3  # between a file's prm_score and its rating_probs: scorers round
COLUMNS = 2048  # bootstrapped at once: memory is resamples x columns
INTERVALS = {
  "pointwise": "95 % percentile bootstrap over problems, each N by itself",
  "simultaneous": "95 % bootstrap band over problems that holds for all N of a curve at once "
  "(sup-t)",
  "generation": "1.96 jackknife standard errors either side: the same problems with candidates "
  "generated anew, where N is at most a fifth of them; none for votes",
}
GROUP_INTERVAL = (
  "1.96 standard errors over the group's problems either side (no width where these all agree, "
  "though other problems might not)"
)
DIFFICULTY_NOTE = (
  "Difficulty: fifths of the problems by the share of their candidates that is right (1: easiest; "
  "missing ones count as wrong; equal shares in the order of the file).  The same candidates make "
  "the fifths and the figures, which flatters the oracle and a random pick in an easy fifth, and "
  "the reverse in a hard one."
)


def powers_of_two(m: int) -> list[int]:
  """1, 2, 4, ... up to M, and M."""
  return sorted({2**i for i in range(m.bit_length())} | {m})


def rerank(
  samples: ScoredSamples,
  n: Sequence[int] | Literal["all"] | None = None,
  *,
  methods: Sequence[str] = (),
  by: Sequence[str] = (),
  band: str = "pointwise",
  neutral: str = "positive",
  pad_short: bool = True,
  seed: int = 0,
  resamples: int = 10_000,
  permutations: int = 32,
  progress: bool = False,
) -> tuple[dict, dict[str, np.ndarray]]:
  """The content of report.json: curves, paired differences, breakdowns.

  Args:
    samples: the candidates.
    n: values of N; None: powers of two up to M, and M; "all": 1..M, of votes only those that
      `methods` names.
    methods: keys of `methods.LABELS`; none: the standard ones that the samples allow.
    by: of `BREAKDOWNS`; none: those that the samples allow.
    band: what the curves' `low` and `high` are, of `INTERVALS`.
    neutral: how a neutral step counts in the PRM's scores, "positive" or "negative".
    pad_short: what a problem with fewer than M candidates lacks counts as drawn and missing, as
      in OpenAI's evaluation, where it was cut off; False: it was never generated, and N beyond
      what the problem has draws all of it.
    seed: of the resamples and of the orders of the votes.
    resamples: of the bootstrap over problems.
    permutations: of each vote's Monte-Carlo.
    progress: show a progress bar, if standard error is a terminal.

  Returns:
    The report, which JSON can store, and the `solution_scores` that it ranks by.  Accuracies are
    shares of problems.  `interval` says what `low` and `high` of the curves are (None where there
    is none), `paired_interval` and `group_interval` those of the differences and breakdowns.
    `problem_standard_error` is analytic, over problems; `standard_error` is the Monte-Carlo noise
    of a vote's curve, zero where it is exact, as all other curves are, and of a difference in
    which a vote is sampled.  Differences: `PAIRS`, or the first of `methods` and each other.

  Raises:
    ValueError: N outside 1..M; a method or breakdown that is unknown or that the samples do not
      allow; a simultaneous band of one problem.
  """
  _check_band(band, len(samples.problems))
  m = samples.correct.shape[1]
  every_n = isinstance(n, str) and n == "all"
  names, left_out = methods_lib.choose(samples, methods, every_n)
  grouped = {kind: _groups(samples, kind, pad_short) for kind in _breakdowns(samples, by)}
  n = powers_of_two(m) if n is None else range(1, m + 1) if every_n else sorted(set(n))
  scores = solution_scores(samples, neutral)
  boot_key, vote_key = jax.random.split(jax.random.key(seed))
  sizes = None if pad_short else samples.sizes
  draws = methods_lib.Draws(np.array(n), sizes, vote_key, permutations)
  with jax.enable_x64(True):
    solved, vote_error = methods_lib.solve(samples, scores, names, draws, progress)
    pairs = [(names[0], name) for name in names[1:]] if methods else PAIRS
    curves, paired = _curves(solved, pairs, band, samples, scores, draws, boot_key, resamples)
    by_groups = {kind: _by(solved, vote_error, groups) for kind, groups in grouped.items()}
  _add_noise(curves, paired, vote_error)
  drawn = [name for name in names if methods or name in DRAWN] or names
  if rest := ", ".join(drawn[MAX_DRAWN:]):
    left_out.append(f"the figures show the first {MAX_DRAWN} methods, without {rest}")
  report = {
    "problems": len(samples.problems),
    "samples": int(samples.sizes.sum()),
    "candidates": m,
    "n": list(n),
    "curves": curves,
    "paired": paired,
    **{f"by_{kind}": by_groups.get(kind, {}) for kind in BREAKDOWNS},
    "difficulty": DIFFICULTY_NOTE if "difficulty" in grouped else None,
    "notices": _notices(samples, scores) + left_out + _ungrouped(samples, grouped),
    "drawn": drawn[:MAX_DRAWN],
    "neutral": neutral,
    "band": band,
    "interval": INTERVALS[band],
    "paired_interval": INTERVALS["simultaneous" if band == "simultaneous" else "pointwise"],
    "group_interval": GROUP_INTERVAL,
    "pad_short": pad_short,
    "seed": seed,
    "resamples": resamples,
    "permutations": permutations,
    "files": [str(path) for path in samples.files],
  }
  if grouped.get("difficulty"):
    for name, chosen in grouped["difficulty"].items():
      share = _pass_rates(samples, pad_short)[chosen]
      report["by_difficulty"][name]["pass_rate"] = [float(share.min()), float(share.max())]
  return report, scores


def _check_band(band: str, problems: int) -> None:
  if band not in INTERVALS:
    raise ValueError(f"band={band!r}: expected one of {', '.join(INTERVALS)}")
  if band == "simultaneous" and problems < 2:
    raise ValueError(f"--band simultaneous takes at least 2 problems, and there is {problems}")


def _add_noise(curves: dict, paired: dict, vote_error: dict[str, np.ndarray]) -> None:
  """Adds the Monte-Carlo error of votes to their curves, and to differences of sampled ones."""
  errors = {name: _mean_error(error) for name, error in vote_error.items()}
  for name, error in errors.items():
    curves[name]["standard_error"] = error.tolist()
  for name, each in paired.items():
    a, b = name.split(" - ")
    error = np.hypot(errors.get(a, 0), errors.get(b, 0))
    if np.any(error):
      each["standard_error"] = error.tolist()


def _notices(samples: ScoredSamples, scores: dict[str, np.ndarray]) -> list[str]:
  """What a reader of the curves must know about the candidates, in words."""
  result = []
  short = int((samples.sizes < samples.sizes.max()).sum())
  if short:
    result.append(
      f"{short} of {len(samples.sizes)} problems have fewer than {samples.sizes.max()} candidates"
    )
  unanswered = int(((samples.lines > 0) & ~samples.valid).sum())
  if unanswered:
    result.append(f"{unanswered} candidates have no answer: drawn like any, never chosen")
  if "prm_product" in scores:
    product = np.exp(scores["prm_product"])
    gap = np.abs(product - samples.prm_score)  # NaN where prm_score is not given
    given = int((~np.isnan(gap)).sum())
    wrong = np.argwhere(gap > SCORE_TOLERANCE)
    if len(wrong):
      p, m = min(map(tuple, wrong), key=lambda slot: samples.lines[slot])
      result.append(
        f"warning: {samples.where(p, m)}: prm_score is {samples.prm_score[p, m]:.6g}, but the "
        f"product of its rating_probs is {product[p, m]:.6g} ({len(wrong)} such lines); "
        "another reduction, or neutral counted otherwise?  The curves use rating_probs"
      )
    elif given:
      result.append(
        f"prm_score is the product of rating_probs on all {given} lines that have it "
        f"(largest difference {np.nanmax(gap):.1g})"
      )
  return result


def _curves(solved, pairs, band, samples, scores, draws, key, resamples) -> tuple[dict, dict]:
  """Curves and paired differences; every mean is taken over the same resamples."""
  pairs = [(a, b) for a, b in pairs if a in solved and b in solved]
  difference = {f"{a} - {b}": solved[a] - solved[b] for a, b in pairs}
  every = solved | difference
  bounds, critical = {}, {}
  if band == "simultaneous":
    for name, per_problem in every.items():
      low, high, value = agg.simultaneous_band(per_problem, key, resamples)
      bounds[name] = (low, high)
      critical[name] = {"critical_value": float(value)}
  else:
    pointwise = every if band == "pointwise" else difference
    bounds = dict(zip(pointwise, _bootstrap(list(pointwise.values()), key, resamples)))
    if band == "generation":
      for name, per_problem in solved.items():
        bounds[name] = _generation(name, per_problem, samples, scores, draws)
  curves, paired = {}, {}
  for (name, per_problem), error in zip(every.items(), _standard_errors(every)):
    if name in solved:
      curves[name] = each = _shares(per_problem, *bounds[name])
    else:
      paired[name] = each = _rows("difference", per_problem.mean(axis=0), *bounds[name])
    each["problem_standard_error"] = _numbers(error)
    each |= critical.get(name, {})
  return curves, paired


def _bootstrap(curves: list[np.ndarray], key, resamples: int) -> list:
  """(low, high), `[K]` each, of each `[P, K]` curve."""
  if not curves:
    return []
  columns = np.concatenate(curves, axis=1)
  parts = [
    agg.bootstrap(columns[:, start : start + COLUMNS], key, resamples)  # the same resamples
    for start in range(0, columns.shape[1], COLUMNS)
  ]
  low, high = np.concatenate([np.asarray(part) for part in parts], axis=1)
  each = len(curves)
  return list(zip(np.split(low, each), np.split(high, each)))


def _generation(name, per_problem, samples, scores, draws):
  """(low, high): where the curve would be with other candidates for the same problems."""
  mean = per_problem.mean(axis=0)
  score = methods_lib.ranking(name, samples, scores)
  if score is None:
    return np.full((2, len(mean)), np.nan)
  error = agg.generation_error(score, samples.correct, samples.valid, **draws.options)
  reach = 1.96 * np.sqrt(np.square(np.asarray(error)).sum(axis=0)) / len(per_problem)
  return mean - reach, mean + reach


def _breakdowns(samples: ScoredSamples, by: Sequence[str]) -> list[str]:
  """Those asked for, or all that the samples allow."""
  known = {"level": samples.levels, "subject": samples.subjects}
  there = [k for k in BREAKDOWNS if k not in known or any(x is not None for x in known[k])]
  for kind in by:
    if kind not in there:
      raise ValueError(f"--by {kind}: no candidate has a {kind}; there are {', '.join(there)}")
  return [kind for kind in there if kind in (by or there)]


def _groups(samples: ScoredSamples, kind: str, pad_short: bool) -> dict[str, np.ndarray]:
  """Indices of the problems of each level, subject or fifth."""
  if kind == "difficulty":
    hardest_last = np.argsort(-_pass_rates(samples, pad_short), kind="stable")
    parts = np.array_split(hardest_last, min(QUINTILES, len(hardest_last)))
    return {str(i): part for i, part in enumerate(parts, start=1)}
  groups = collections.defaultdict(list)
  for p, name in enumerate(samples.levels if kind == "level" else samples.subjects):
    if name is not None:
      groups[name].append(p)
  return {name: np.array(groups[name]) for name in sorted(groups, key=_natural)}


def _pass_rates(samples: ScoredSamples, pad_short: bool) -> np.ndarray:
  """`[P]` share of a problem's candidates that are right."""
  right = (samples.correct & samples.valid).sum(axis=1)
  return right / (samples.correct.shape[1] if pad_short else samples.sizes)


def _ungrouped(samples: ScoredSamples, grouped: dict) -> list[str]:
  """Which breakdowns leave problems out."""
  total = len(samples.problems)
  return [
    f"{total - found} of {total} problems have no {kind}: in none of the groups"
    for kind, groups in grouped.items()
    if (found := sum(map(len, groups.values()))) < total
  ]


def _by(solved: dict, vote_error: dict, groups: dict[str, np.ndarray]) -> dict:
  """The curves over the problems of each group; too few for better than a normal interval."""
  result = {}
  for group, chosen in groups.items():
    each = {name: per_problem[chosen] for name, per_problem in solved.items()}
    curves = {}
    for (name, some), error in zip(each.items(), _standard_errors(each)):
      mean, reach = some.mean(axis=0), 1.96 * error
      curves[name] = _shares(some, mean - reach, mean + reach)
      curves[name]["problem_standard_error"] = _numbers(error)
      if name in vote_error:
        curves[name]["standard_error"] = _mean_error(vote_error[name][chosen]).tolist()
    result[group] = {"problems": len(chosen), "curves": curves}
  return result


def _mean_error(per_problem: np.ndarray) -> np.ndarray:
  """`[K]` Monte-Carlo standard error of the mean of problems with independent errors `[P, K]`."""
  return np.sqrt(np.square(per_problem).sum(axis=0)) / len(per_problem)


def _standard_errors(solved: dict[str, np.ndarray]) -> np.ndarray:
  """`[curves, K]`, over problems."""
  columns = np.concatenate(list(solved.values()), axis=1)
  return np.asarray(agg.standard_error(columns)).reshape(len(solved), -1)


def _shares(per_problem, low, high) -> dict:
  """A curve; normal intervals and control variates may leave 0..1."""
  bounds = np.stack([per_problem.mean(axis=0), np.asarray(low), np.asarray(high)])
  return _rows("accuracy", *np.clip(bounds, 0, 1))


def _rows(key: str, middle, low, high) -> dict:
  return {key: _numbers(middle), "low": _numbers(low), "high": _numbers(high)}


def _numbers(values) -> list[float | None]:
  """Floats; None, JSON's null, for NaN."""
  return [None if np.isnan(value) else float(value) for value in np.asarray(values)]


def _natural(name: str):
  """In the order of their numbers: level 2 before 10."""
  digits = "".join(c for c in name if c.isdigit())
  return (int(digits) if digits else -1, name)
