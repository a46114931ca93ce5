"""The content of a reranking report: samples -> scores -> methods -> curves with intervals."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from prm_jax.evaluation import curves as curves_lib
from prm_jax.evaluation import methods as methods_lib
from prm_jax.evaluation.scored_samples import ScoredSamples

PAIRS = (("prm_product", "orm"), ("prm_product", "majority"), ("orm", "majority"))
DRAWN = ("prm_product", "orm", "majority")  # in the figure, as in the paper's Figure 3
MAX_DRAWN = 8  # as many as there are styles
BREAKDOWNS = ("level", "subject", "difficulty")
QUINTILES = 5
SCORE_TOLERANCE = 1e-3  # between a file's prm_score and its rating_probs: scorers round
DIFFICULTY_NOTE = (
  "Difficulty: fifths of the problems by the share of their candidates that is right (1: easiest; "
  "missing ones count as wrong; equal shares in the order of the file).  The same candidates make "
  "the fifths and the figures, which flatters the oracle and a random pick in an easy fifth, and "
  "the reverse in a hard one."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """What to compute; also the flags of scripts/rerank.py."""

  n: tuple[int, ...] | tuple[Literal["all"]] = ()
  """Values of N; none given: powers of two up to the number of candidates, and that number. all:
  every N, without the votes that --methods does not name."""
  methods: tuple[str, ...] = ()
  """prm_product, prm_min, prm_mean, prm_last, prm_soft_min, orm, majority, oracle, random,
  all_correct, and weighted_NAME or weighted_mean_NAME: a vote by the sum, or the mean, of an
  answer's scores. None given: all that the file allows of those usually compared."""
  by: tuple[Literal["level", "subject", "difficulty"], ...] = ()
  """Breakdowns; none given: all that the file allows. Difficulty: fifths of the problems, by the
  share of their candidates that is right."""
  band: Literal["pointwise", "simultaneous", "generation"] = "pointwise"
  """Error bars of the curves. pointwise: bootstrap over problems, each N by itself; simultaneous:
  for all N of a curve or difference at once; generation: other candidates for the same problems,
  up to M/5."""
  neutral: Literal["positive", "negative"] = "positive"
  """How a neutral step counts in the PRM's scores."""
  pad_short: bool = True
  """Whether the candidates that a problem lacks, where others have more, count as drawn and
  missing, as in OpenAI's evaluation. False: N beyond a problem's candidates draws all of them."""
  seed: int = 0
  """Of the bootstrap and of the orders of the votes."""
  resamples: int = 10_000
  """Bootstrap resamples of the problems."""
  permutations: int = 32
  """Random orders for each vote that is not exact."""


def rerank(
  samples: ScoredSamples, options: Options = Options(), progress: bool = False
) -> tuple[dict, dict[str, np.ndarray]]:
  """The content of report.json: curves, paired differences, breakdowns.

  Args:
    samples: the candidates.
    options: what to compute.
    progress: show a progress bar, if standard error is a terminal.

  Returns:
    The report, which JSON can store, and the `methods.solution_scores` that it ranks by.
    Accuracies are shares of problems; `interval`, `paired_interval` and `group_interval` say in
    words what `low` and `high` are, which are None where there is no interval.  Differences are of
    `PAIRS`, or of the first of `options.methods` and each other.  See `curves` for the rest.

  Raises:
    ValueError: N outside 1..M; a method or breakdown that is unknown or that the samples do not
      allow; a simultaneous band of one problem.
  """
  pad_short = options.pad_short
  if options.band == "simultaneous" and len(samples.problems) < 2:
    raise ValueError("--band simultaneous takes at least 2 problems, and there is 1")
  names, left_out = methods_lib.choose(samples, options.methods, options.n == ("all",))
  groups = {kind: _groups(samples, kind, pad_short) for kind in _breakdowns(samples, options.by)}
  scores = methods_lib.solution_scores(samples, options.neutral)
  bootstrap_key, vote_key = jax.random.split(jax.random.key(options.seed))
  n = _values_of_n(options.n, samples.correct.shape[1])
  sizes = None if pad_short else samples.sizes
  draws = methods_lib.Draws(np.array(n), sizes, vote_key, options.permutations)
  with jax.enable_x64(True):
    solved, vote_error = methods_lib.solve(samples, scores, names, draws, progress)
    pairs = [(names[0], name) for name in names[1:]] if options.methods else PAIRS
    pairs = [(a, b) for a, b in pairs if a in solved and b in solved]
    generation_error = lambda name: methods_lib.generation_error(name, samples, scores, draws)
    curves, paired = curves_lib.curves_and_differences(
      solved, pairs, vote_error, options.band, generation_error, bootstrap_key, options.resamples
    )
    by = {k: curves_lib.curves_by_group(solved, vote_error, group) for k, group in groups.items()}
  for name, chosen in groups.get("difficulty", {}).items():
    share = _pass_rates(samples, pad_short)[chosen]
    by["difficulty"][name]["pass_rate"] = [float(share.min()), float(share.max())]
  drawn = [name for name in names if options.methods or name in DRAWN] or names
  if rest := ", ".join(drawn[MAX_DRAWN:]):
    left_out.append(f"the figures show the first {MAX_DRAWN} methods, without {rest}")
  return {
    "problems": len(samples.problems),
    "samples": int(samples.sizes.sum()),
    "candidates": samples.correct.shape[1],
    "n": n,
    "curves": curves,
    "paired": paired,
    **{f"by_{kind}": by.get(kind, {}) for kind in BREAKDOWNS},
    "difficulty": DIFFICULTY_NOTE if "difficulty" in groups else None,
    "notices": _notices(samples, scores) + left_out + _ungrouped(samples, groups),
    "drawn": drawn[:MAX_DRAWN],
    **_settings(options),
    "files": [str(path) for path in samples.files],
  }, scores


def _settings(options: Options) -> dict:
  """The options as the report states them, with what its intervals are in words."""
  intervals, band = curves_lib.INTERVALS, options.band
  return {
    "neutral": options.neutral,
    "band": band,
    "interval": intervals[band],
    "paired_interval": intervals["simultaneous" if band == "simultaneous" else "pointwise"],
    "group_interval": curves_lib.GROUP_INTERVAL,
    "pad_short": options.pad_short,
    "seed": options.seed,
    "resamples": options.resamples,
    "permutations": options.permutations,
  }


def powers_of_two(m: int) -> list[int]:
  """1, 2, 4, ... up to M, and M."""
  return sorted({2**i for i in range(m.bit_length())} | {m})


def _values_of_n(wanted: Sequence, m: int) -> list[int]:
  if wanted == ("all",):
    return list(range(1, m + 1))
  return sorted(set(wanted)) if wanted else powers_of_two(m)


def _breakdowns(samples: ScoredSamples, by: Sequence[str]) -> list[str]:
  """The breakdowns asked for, or all that the samples allow."""
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

  def natural(name: str):  # level 2 before 10
    digits = "".join(c for c in name if c.isdigit())
    return (int(digits) if digits else -1, name)

  return {name: np.array(groups[name]) for name in sorted(groups, key=natural)}


def _pass_rates(samples: ScoredSamples, pad_short: bool) -> np.ndarray:
  """`[P]` share of a problem's candidates that are right."""
  right = (samples.correct & samples.valid).sum(axis=1)
  return right / (samples.correct.shape[1] if pad_short else samples.sizes)


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


def _ungrouped(samples: ScoredSamples, groups: dict[str, dict]) -> list[str]:
  """Which breakdowns leave problems out, in words."""
  total = len(samples.problems)
  return [
    f"{total - found} of {total} problems have no {kind}: in none of the groups"
    for kind, each in groups.items()
    if (found := sum(map(len, each.values()))) < total
  ]
