"""Calibrates the probabilities of steps to the outcomes of whole solutions.

Shapes: P problems, M candidates of each, T steps of S solutions.
"""

import jax
import numpy as np
import scipy.optimize
import scipy.special

from prm_jax import aggregation as agg
from prm_jax.evaluation.sample_arrays import ScoredSamples

FOLDS = 5
CERTAIN = 15.0  # log-odds beyond it are rounded to it, or one such step would decide the fit
BOUNDS = ((-7.0, 7.0), (-20.0, 20.0))  # of log a and b; outcomes that all agree have no optimum
NO_SLOPE = np.exp(BOUNDS[0][0]) * 1.01


def calibrated(
  samples: ScoredSamples, neutral: str = "positive"
) -> tuple[np.ndarray, list[tuple[float, float]]]:
  """Returns log P(every step is right) `[P, M]` by calibrated steps, and a and b of each fold.

  A step of log-odds x has the calibrated log-odds a x + b with a > 0 (Platt scaling).  a and b are
  fitted on the valid candidates of the other folds of problems, so that no outcome of a problem
  changes its scores.  With a at most `NO_SLOPE`, higher probabilities of steps did not go with
  right solutions, and the score only counts steps.  A candidate without steps has NaN.

  Args:
    neutral: how a neutral step counts, "positive" or "negative".
  """
  lines, out = [], np.full(samples.correct.shape, np.nan)
  slots = np.repeat(samples.slots, samples.step_counts)
  fold_of_step = slots // out.shape[1] % FOLDS
  known = samples.valid.ravel()[slots]
  with jax.enable_x64(True):
    right = np.asarray(agg.step_log_scores(samples.step_probs, neutral))
    with np.errstate(divide="ignore"):
      log_odds = np.clip(right - np.log(-np.expm1(right)), -CERTAIN, CERTAIN)
    for fold in np.unique(fold_of_step):
      fitted = known & (fold_of_step != fold)
      a, b = fit(log_odds[fitted], slots[fitted], samples.correct.ravel())
      lines.append((a, b))
      scored = fold_of_step == fold
      used, solution = np.unique(slots[scored], return_inverse=True)
      out.flat[used] = np.bincount(solution, scipy.special.log_expit(a * log_odds[scored] + b))
    return np.asarray(agg.join_ties(out)), lines


def fit(log_odds: np.ndarray, solution_of: np.ndarray, correct: np.ndarray) -> tuple[float, float]:
  """Returns the a and b under which the outcomes are most likely.

  Args:
    log_odds: `[T]` of the steps.
    solution_of: `[T]` the solution of each step, 0..S-1; solutions without steps do not count.
    correct: bool `[S]`.
  """
  used, solution = np.unique(solution_of, return_inverse=True)
  right = correct[used]

  def cost(parameters):
    log_a, b = parameters
    steps = scipy.special.log_expit(np.exp(log_a) * log_odds + b)
    log_right = np.bincount(solution, steps, len(used))
    log_wrong = np.log(np.maximum(-np.expm1(log_right), 1e-300))
    return -np.where(right, log_right, log_wrong).sum()

  found = scipy.optimize.minimize(cost, (0.0, 0.0), method="Nelder-Mead", bounds=BOUNDS)
  return float(np.exp(found.x[0])), float(found.x[1])
