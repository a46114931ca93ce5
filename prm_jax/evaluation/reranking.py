"""Computes a reranking report: samples -> scores -> methods -> curves with error bars."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Annotated, Literal

import jax
import msgspec
import numpy as np

from prm_jax import aggregation as agg
from prm_jax import config as config_lib
from prm_jax.evaluation import methods as methods_lib
from prm_jax.evaluation import sample_checks
from prm_jax.evaluation.sample_arrays import ScoredSamples

# The methods of the paper's Figure 3.  The figure and the paired differences show these and the
# user's own scores; the figure also shows votes with a --vote_weight.
DRAWN = ("prm_product", "orm", "majority")
MAX_DRAWN = 8  # styles in `report_figure`
BREAKDOWNS = ("level", "subject", "difficulty")
QUINTILES = 5
# Options that the report repeats.
STORED = ("neutral", "band", "vote_weight", "pad_short", "seed", "resamples", "permutations")
COLUMNS = 2048  # bootstrapped at once; memory is resamples x columns
INTERVALS = {
  "pointwise": "95 % percentile bootstrap over problems, each N by itself",
  "simultaneous": "95 % bootstrap band over problems that holds for all N of a curve at once "
  "(sup-t)",
  "generation": "1.96 jackknife standard errors either side: the same problems with candidates "
  "generated anew, where N is at most a fifth of them; none for votes and all_correct",
}
NO_WIDTH = "no width where all problems of a group agree, though other problems might not"
GROUP_INTERVAL = f"1.96 standard errors over the group's problems either side ({NO_WIDTH})"
DIFFICULTY_NOTE = (
  "Difficulty: fifths of the problems by the share of their candidates that is right (1: easiest; "
  "equal shares in the order of the file).  The same candidates define the fifths and give the "
  "figures, which overestimates the oracle and a random pick in an easy fifth, and underestimates "
  "them in a hard one."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(config_lib.Checked):
  """Options of `rerank`; also the flags of scripts/rerank.py."""

  n: tuple[config_lib.Count | Literal["all"], ...] = ()
  """Values of N; none given: powers of two up to the number of candidates, and that number. all:
  every N, with only those votes that --methods names."""
  score: tuple[str, ...] = ()
  """Keys of the input whose numbers rank candidates and weigh votes, higher is better. Each key is
  also the name of a method. None given: all that a bundle has."""
  label: tuple[str, ...] = ()
  """Names of the --score keys in the figure and the page; none given: the keys."""
  methods: tuple[str, ...] = ()
  """prm_product, prm_min and so on (every reduction of aggregation.reduce_steps), orm, majority,
  oracle, random, all_correct, and weighted_NAME or weighted_mean_NAME: a vote by the sum, or the
  mean, of an answer's scores. None given: those usually compared, as far as the file allows."""
  by: tuple[Literal["level", "subject", "difficulty"], ...] = ()
  """Breakdowns; none given: all that the file allows. Difficulty: fifths of the problems, by the
  share of their candidates that is right."""
  band: Literal["pointwise", "simultaneous", "generation"] = "pointwise"
  """Error bars of the curves. pointwise: bootstrap over problems, each N by itself; simultaneous:
  for all N of a curve or difference at once; generation: other candidates for the same problems,
  for N up to a fifth of the candidates."""
  neutral: Literal["positive", "negative"] = "positive"
  """How a neutral step counts in the PRM's scores."""
  votes: Literal["value", "text"] = "value"
  """Which answers vote together: answers of equal value, as grade.py decides, or equal texts. A
  bundle keeps the choice that it was written with."""
  vote_weight: Literal["plain", "sigmoid", "softmax"] = "plain"
  """The weight of a vote by orm_score or --score. plain: the score itself, which must not be
  negative; sigmoid: 1 / (1 + exp(-score)), which is P(right) if the score is its logit; softmax:
  exp(score) divided by its sum over the candidates drawn, so that a constant added to a problem's
  scores changes nothing. Step scores are probabilities, and always weigh votes as they are."""
  pad_short: bool = False
  """How to draw N from a problem with fewer candidates. False: draw all of them. True: add missing
  candidates, up to the most of any problem; these were cut off and are never right, as in OpenAI's
  evaluation. A file can give the true number as "drawn"; OpenAI's release is recognised."""
  seed: config_lib.Whole = 0
  """Seed of the bootstrap and of the orders of the votes."""
  resamples: config_lib.Count = 10_000
  """Bootstrap resamples of the problems."""
  permutations: Annotated[int, msgspec.Meta(ge=2, lt=2**31)] = 32
  """Random orders for each vote that is not exact, at least 2."""

  def _rules(self):
    yield "all" in self.n and len(self.n) > 1, "n", "all, or values of N"


def rerank(
  samples: ScoredSamples, options: Options = Options()
) -> tuple[dict, dict[str, np.ndarray]]:
  """Returns the content of report.json: curves, paired differences, breakdowns.

  Returns:
    The report, which JSON can store, and the `methods.solution_scores` that it ranks by.
    Accuracies are shares of problems.  `interval`, `paired_interval` and `group_interval` say in
    words what `low` and `high` are; both are None where there is no interval.  Differences are
    between the user's own scores and `DRAWN`, or between the first of `options.methods` and each
    other one.  `problem_standard_error` is analytic, over problems.  Votes, and differences with a
    sampled vote, also have `standard_error`, their Monte-Carlo noise; simultaneous bands have
    `critical_value`.  `labels` has the displayed names of methods and differences, `own` the
    columns of the user's own scores.

  Raises:
    ValueError: N outside 1..M; a method, column or breakdown that is unknown or that the samples do
      not allow; a simultaneous band of one problem.
  """
  most = samples.correct.shape[1]
  if options.pad_short:
    samples = dataclasses.replace(samples, sizes=np.full_like(samples.sizes, most))
  own = methods_lib.own_scores(samples, options.score, options.label)
  scores = methods_lib.solution_scores(samples, options.neutral, own)
  every_n, weight = options.n == ("all",), options.vote_weight
  chosen, left_out = methods_lib.choose(samples, scores, options.methods, every_n, own, weight)
  groups, pairs = breakdowns(samples, options.by), _pairs(chosen, own, options)
  n = [*range(1, most + 1)] if every_n else sorted({*options.n}) or powers_of_two(most)
  curves, paired, by = _curves(samples, scores, chosen, pairs, n, groups, options)
  weighted = [name for name in chosen if weight != "plain" and chosen[name].has_vote_weight]
  shown = {*chosen} if options.methods else {*DRAWN, *own, *weighted}
  drawn = [name for name in chosen if name in shown] or [*chosen]
  if rest := ", ".join(drawn[MAX_DRAWN:]):
    left_out.append(f"the figures show the first {MAX_DRAWN} methods, without {rest}")
  total = len(samples.problems)
  for kind, each in groups.items():
    if lacking := total - sum(map(len, each.values())):
      left_out.append(f"{lacking} of {total} problems have no {kind} and are in no group")
  labels = {name: method.label for name, method in chosen.items()}
  labels |= {f"{a} - {b}": f"{labels[a]} \N{MINUS SIGN} {labels[b]}" for a, b in pairs}
  return {
    "problems": total,
    "samples": len(samples.slots),
    "candidates": most,
    "n": n,
    "curves": curves,
    "paired": paired,
    **{f"by_{kind}": by.get(kind, {}) for kind in BREAKDOWNS},
    "difficulty": DIFFICULTY_NOTE if "difficulty" in groups else None,
    "notices": _notices(samples, scores, options, weighted) + left_out,
    "drawn": drawn[:MAX_DRAWN],
    "labels": labels,
    "own": {name: each._asdict() for name, each in own.items()},
    "interval": INTERVALS[options.band],
    "paired_interval": INTERVALS["simultaneous" if options.band == "simultaneous" else "pointwise"],
    "group_interval": GROUP_INTERVAL,
    **{key: getattr(options, key) for key in STORED},
    "files": [str(path) for path in samples.files],
  }, scores


def _pairs(chosen, own, options: Options) -> list[tuple[str, str]]:
  """Returns the pairs of methods whose differences `rerank` computes."""
  if options.methods:
    first, *others = chosen
    return [(first, other) for other in others]
  return [*itertools.combinations([name for name in (*own, *DRAWN) if name in chosen], 2)]


def _curves(samples, scores, chosen, pairs, n, groups, options) -> tuple[dict, ...]:
  """Returns curves by method, differences by pair, and curves by breakdown, group and method."""
  if options.band == "simultaneous" and len(samples.problems) < 2:
    raise ValueError("--band simultaneous needs at least 2 problems; the input has 1")
  bootstrap_key, vote_key = jax.random.split(jax.random.key(options.seed))
  draws = {"n": np.array(n), "sizes": samples.sizes}
  orders = {"key": vote_key, "permutations": options.permutations}
  with jax.enable_x64(True):
    solved, vote_error = methods_lib.solve(
      samples, scores, chosen, draws, orders, options.vote_weight
    )
    if unranked := [name for name, each in solved.items() if np.isnan(each).any()]:
      raise ValueError(
        f"{unranked[0]}: the scores of a problem are too far apart to rank, such as 1e-300 and "
        "1e300 of both signs; rescale them"
      )
    noise = {name: _mean_error(error) for name, error in vote_error.items()}
    differences = {}
    for a, b in pairs:
      differences[f"{a} - {b}"] = solved[a] - solved[b]
      error = np.hypot(noise.get(a, 0), noise.get(b, 0))
      noise |= {f"{a} - {b}": error} if np.any(error) else {}
    every = solved | differences
    bounds = _bounds(every, options, bootstrap_key)
    if options.band == "generation":
      for name, each in solved.items():
        error = np.full(each.shape, np.nan)
        if name in scores:
          outcomes = (samples.correct, samples.valid)
          error = np.asarray(agg.generation_error(scores[name], *outcomes, **draws))
        bounds[name] = _normal(each, _mean_error(error))
    every = _with_errors(every, noise, bounds, differences)
    by = {kind: {} for kind in groups}
    for kind, each in groups.items():
      for group, members in each.items():
        errors = {name: _mean_error(error[members]) for name, error in vote_error.items()}
        accuracy = _with_errors({name: x[members] for name, x in solved.items()}, errors)
        by[kind][group] = {"problems": len(members), "curves": accuracy}
  rates = _pass_rates(samples)
  for group, members in groups.get("difficulty", {}).items():
    share = rates[members]
    by["difficulty"][group]["pass_rate"] = [float(share.min()), float(share.max())]
  return {k: every[k] for k in solved}, {k: every[k] for k in differences}, by


def _bounds(every: dict[str, np.ndarray], options: Options, key: jax.Array) -> dict[str, tuple]:
  """Returns low and high `[K]` of `[P, K]` curves; and the critical value of simultaneous bands."""
  resamples = options.resamples
  if options.band == "simultaneous":
    return {name: agg.simultaneous_band(x, key, resamples) for name, x in every.items()}
  columns = np.concatenate(list(every.values()), axis=1)
  parts = [
    agg.bootstrap(columns[:, start : start + COLUMNS], key, resamples)  # the same resamples
    for start in range(0, columns.shape[1], COLUMNS)
  ]
  low, high = np.concatenate([np.asarray(part) for part in parts], axis=1)
  return dict(zip(every, zip(np.split(low, len(every)), np.split(high, len(every)))))


def _with_errors(solved: dict, noise: dict, bounds: dict | None = None, differences=()) -> dict:
  """Returns the mean of each `[P, K]` curve with its errors, for JSON: NaN becomes None.

  Groups give no `bounds`, as they may be small: low and high are then 1.96 standard errors away.
  """
  errors = agg.standard_error(np.concatenate(list(solved.values()), axis=1))
  result = {}
  for (name, each), error in zip(solved.items(), np.asarray(errors).reshape(len(solved), -1)):
    low, high, *critical = bounds[name] if bounds else _normal(each, error)
    rows = {"accuracy": each.mean(axis=0), "low": np.asarray(low), "high": np.asarray(high)}
    if name in differences:
      rows = {"difference": rows.pop("accuracy")} | rows
    else:  # a normal interval or a control variate may leave 0..1
      rows = {key: np.clip(row, 0, 1) for key, row in rows.items()}
    rows |= {"problem_standard_error": error}
    rows |= {"standard_error": noise[name]} if name in noise else {}
    # Rounded, so that equal shares print alike, however they were summed; + 0.0 makes -0.0 0.0.
    result[name] = {
      key: [None if np.isnan(value) else round(float(value), 12) + 0.0 for value in row]
      for key, row in rows.items()
    }
    result[name] |= {"critical_value": float(critical[0])} if critical else {}
  return result


def _normal(per_problem: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns low and high `[K]`, 1.96 standard errors either side of the mean over problems."""
  mean = per_problem.mean(axis=0)
  return mean - 1.96 * error, mean + 1.96 * error


def _mean_error(per_problem: np.ndarray) -> np.ndarray:
  """Returns the standard error `[K]` of a mean over problems with independent errors `[P, K]`."""
  return np.sqrt(np.square(per_problem).sum(axis=0)) / len(per_problem)


def powers_of_two(m: int) -> list[int]:
  """Returns 1, 2, 4, ... up to M, and M."""
  return sorted({2**i for i in range(m.bit_length())} | {m})


def breakdowns(samples: ScoredSamples, by: Sequence[str] = ()) -> dict[str, dict[str, np.ndarray]]:
  """Returns indices of problems by breakdown and group, for those of `by` or all breakdowns."""

  def natural(name: str):  # level 2 before 10
    number = re.search(r"[0-9]{1,9}", name)
    return int(number[0]) if number else -1, name

  groups = {}
  for kind, names in (("level", samples.levels), ("subject", samples.subjects)):
    members = collections.defaultdict(list)
    for p, name in enumerate(names):
      members[name].append(p)
    members.pop(None, None)
    if members:
      groups[kind] = {name: np.array(members[name]) for name in sorted(members, key=natural)}
  groups["difficulty"] = by_difficulty(_pass_rates(samples))
  for kind in by:
    if kind not in groups:
      raise ValueError(f"--by {kind}: no candidate has a {kind}; there are {', '.join(groups)}")
  return {kind: each for kind, each in groups.items() if kind in (by or groups)}


def by_difficulty(pass_rates: np.ndarray) -> dict[str, np.ndarray]:
  """Splits the problems into fifths by pass rate `[P]`: 1 is the easiest (paper appendix G)."""
  hardest_last = np.argsort(-pass_rates, kind="stable")
  fifths = np.array_split(hardest_last, min(QUINTILES, len(hardest_last)))
  return {str(i): part for i, part in enumerate(fifths, start=1)}


def _pass_rates(samples: ScoredSamples) -> np.ndarray:
  """Returns the share of each problem's candidates that is right `[P]`."""
  return (samples.correct & samples.valid).sum(axis=1) / samples.sizes


def _notices(
  samples: ScoredSamples, scores: dict[str, np.ndarray], options: Options, weighted: list[str]
) -> list[str]:
  """Says what a reader of the curves must know about the candidates, and about `weighted` votes."""
  result, (problems, most) = [], samples.correct.shape
  present = np.bincount(samples.slots // most, minlength=problems)
  if short := int((present < most).sum()):
    counts = "N counts those that exist, and a larger N draws all of them"
    if cut_off := int((samples.sizes - present).sum()):
      why = "as --pad_short says" if options.pad_short else 'as "drawn" or OpenAI\'s README says'
      counts = (
        f"{cut_off:,} more were generated and cut off, {why}: N counts them, and they are never "
        "right"
      )
    notice = f"{short} of {problems} problems have fewer than {most} candidates; {counts}"
    if most >= 2 * np.median(present):  # perhaps one text joined two problems
      notice += "; if one problem text stands for several problems, give each its unique_id"
    result.append(notice)
  result += [*sample_checks.unanswered(samples), *sample_checks.graded_both_ways(samples)]
  gap = sample_checks.score_gap(samples, scores)
  warnings = sample_checks.contradictions(samples, scores)
  if not warnings and (given := int((~np.isnan(gap)).sum())):
    result.append(
      f"prm_score is the product of the step scores on all {given} lines that have it "
      f"(largest difference {np.nanmax(gap):.1g})"
    )
  result += warnings
  if weighted:
    result.append(
      f"where orm_score or a --score weighs votes, the weight is its {options.vote_weight}"
    )
  elif options.vote_weight != "plain":
    nothing = "has no effect: no vote is weighted by orm_score or a --score"
    result.append(f"--vote_weight={options.vote_weight} {nothing}")
  return result
