"""Calibrates the probabilities of steps to the outcomes of whole solutions.

Shapes: T steps of all solutions, S solutions.
"""

import jax
import numpy as np
import scipy.optimize

from prm_jax import aggregation as agg
from prm_jax.evaluation.sample_arrays import ScoredSamples

FOLDS = 5
BOUNDS = ((-7.0, 7.0), (-20.0, 20.0))  # of log a and b; outcomes that all agree have no optimum


def calibrated(samples: ScoredSamples, neutral: str = "positive") -> np.ndarray:
  """Returns log P(every step is right) `[P, M]` by calibrated steps; NaN: a solution without steps.

  A step of log-odds x has the calibrated log-odds a x + b with a > 0 (Platt scaling).  a and b are
  fitted on the valid candidates of the other folds of problems, so that no outcome of a problem
  changes its scores.

  Args:
    neutral: how a neutral step counts, "positive" or "negative".
  """
  with jax.enable_x64(True):
    right = np.asarray(agg.step_log_scores(samples.step_probs, neutral))
  log_odds = np.clip(right - np.log(np.maximum(-np.expm1(right), 1e-300)), -700, 700)
  slots = np.repeat(samples.slots, samples.step_counts)
  out = np.full(samples.correct.shape, np.nan)
  fold_of = np.arange(len(out)) % FOLDS  # of a problem
  fold_of_step = fold_of[slots // out.shape[1]]
  known = samples.valid.ravel()[slots]
  for fold in np.unique(fold_of):
    fitted = known & (fold_of_step != fold)
    a, b = fit(log_odds[fitted], slots[fitted], samples.correct.ravel())
    scored = fold_of_step == fold
    used, solution = np.unique(slots[scored], return_inverse=True)
    out.flat[used] = np.bincount(solution, _log_sigmoid(a * log_odds[scored] + b))
  return out


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
    log_right = np.bincount(solution, _log_sigmoid(np.exp(log_a) * log_odds + b), len(used))
    log_wrong = np.log(np.maximum(-np.expm1(log_right), 1e-300))
    return -np.where(right, log_right, log_wrong).sum()

  found = scipy.optimize.minimize(cost, (0.0, 0.0), method="Nelder-Mead", bounds=BOUNDS)
  return float(np.exp(found.x[0])), float(found.x[1])


def _log_sigmoid(x: np.ndarray) -> np.ndarray:
  return -np.logaddexp(0, -x)
