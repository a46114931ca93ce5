"""Best-of-N, pass@N and all-N-correct: exact expectations under sampling without replacement."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from prm_jax.aggregation import candidates
from prm_jax.aggregation.order_statistics import draw_weights, expectation
from prm_jax.aggregation.ranking import rank_correctness

BLOCK = 2**22  # candidates in a block of problems on a CPU: 16 MiB of float32


def best_of_n(
  scores, correct, valid=None, n: Sequence[int] | None = None, *, sizes=None
) -> jax.Array:
  """Returns the exact expected correctness of the best-scored of N candidates.

  N of a problem's M candidates are drawn uniformly without replacement, and the valid one with
  the highest score is picked; candidates with equal scores are equally likely.  A draw without a
  valid candidate is wrong.  `prm_jax.aggregation` has the formula.  The shuffled trials of
  OpenAI's `prm800k/eval/eval.py` (Figure 3 of *Let's Verify Step by Step*) estimate this number.

  Works under `jax.jit` and `jax.vmap`, and on arrays sharded over problems; `n` and `sizes` must be
  concrete.  Takes the time of one sort, and memory O(M) beside the arguments.

  Args:
    scores: `[P, M]` floats on any monotone scale; higher is better, and -inf is allowed.  float64
      scores are rounded to float32 unless `jax.enable_x64` is on, which may tie neighbours.
      Magnitudes below the smallest normal number (float32: 1.2e-38) count as 0: prefer logarithms.
    correct: `[P, M]` bool or 0/1 integers.
    valid: `[P, M]` bool; False marks a missing candidate (never generated, or without an answer):
      it may be drawn, but is never picked and never correct.  None: all valid.
    n: the values of N, each in 1..M, missing candidates counted.  None: all of 1..M.
    sizes: `[P]` the number of candidates of each problem.  Slots beyond it do not exist, and a
      larger N draws all candidates.  (A slot with valid=False does exist: it may be drawn, and
      fails, as OpenAI counts solutions cut off at the token limit.)  None: M each.

  Returns:
    `[P, K]` expected correctness for each problem and N.  NaN for a problem with a valid NaN
    score, or with finite scores of both signs whose magnitudes span more powers of two than sort
    keys hold (float32: 254 in all).

  Raises:
    ValueError: shapes disagree, `scores` are not floats, `correct` or `valid` is neither bool nor
      0/1 integers, N or a size is outside 1..M, or `n` and `sizes` have so many values that there
      are over 2**29 weights.
  """
  scores = candidates.check_scores(scores)
  return _expected(rank_correctness, n, correct, valid, sizes, scores)


def pass_at_n(correct, valid=None, n: Sequence[int] | None = None, *, sizes=None) -> jax.Array:
  """Returns the exact chance that at least one of N candidates is right: the oracle's best-of-N.

  The chance is 1 - C(M-c, N) / C(M, N), where c of a problem's M candidates are right; a missing
  candidate is never right.  Takes the arguments of `best_of_n` without its scores, and returns
  probabilities `[P, K]`.
  """
  return _expected(_right_on_top, n, correct, valid, sizes)


def all_correct_at_n(
  correct, valid=None, n: Sequence[int] | None = None, *, sizes=None
) -> jax.Array:
  """Returns the exact chance that all of N candidates are right: C(c, N) / C(M, N), with c right.

  Takes the arguments of `pass_at_n`, and returns probabilities `[P, K]`, to about 1e-7: it is one
  minus the chance of drawing a wrong one.
  """
  candidates.check_shapes(np.shape(correct), correct, valid, sizes)
  right, _ = candidates.mask(correct, valid, sizes)
  return 1 - pass_at_n(~right, None, n, sizes=sizes)


@jax.jit
def _right_on_top(correct, valid, sizes):
  """Ranks right candidates above wrong ones: `[P, M]` bool, the best last, True where right."""
  correct, _ = candidates.mask(correct, valid, sizes)
  m = correct.shape[1]
  return jnp.arange(m) >= m - correct.sum(axis=1, keepdims=True)


def _expected(rank, n, correct, valid, sizes, *scores) -> jax.Array:
  """Returns the expected correctness `[P, K]` of the best of N candidates.

  `rank` takes the scores, if there are any, then correct, valid and sizes.  It returns the
  correctness of each candidate `[P, M]`, the best candidate last.
  """
  p, m = candidates.check_shapes(np.shape([*scores, correct][0]), correct, valid, sizes)
  weights = draw_weights(m, candidates.check_n(n, m), sizes=sizes)
  arrays = [candidates.as_array(x) for x in (*scores, correct, valid, sizes)]
  if not candidates.on_one_cpu(*arrays):
    return expectation(rank(*arrays), weights)
  arrays = [None if x is None else np.asarray(x) for x in arrays]
  weights, row = jax.device_put(weights), weights.row
  length = -(-p // -(-p * m // max(m, BLOCK)))
  parts = []
  for done in range(0, p, length):
    start = min(done, p - length)  # blocks have one length, so that only one is compiled
    block = slice(start, start + length)
    ranked = rank(*(None if x is None else x[block] for x in arrays))
    own = weights if arrays[-1] is None else dataclasses.replace(weights, row=row[block])
    parts.append(expectation(ranked, own)[done - start :])
  return jnp.concatenate(parts)
