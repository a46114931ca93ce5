"""Majority and weighted voting: exact, or by Monte-Carlo with a standard error.

The estimate draws random orders of the candidates.  The first N of an order are one draw of N, and
the next N are another.  Up to 64 such disjoint blocks make one observation, far less noisy than a
single draw.  Each problem's candidates are first shuffled independently; then all problems share
the orders.  Their errors are therefore uncorrelated, and the standard error of a mean over problems
is sqrt(sum of squared standard errors) / P.

A control variate sharpens a weighted vote: the plain vote on the same draws, whose expectation is
known exactly.  The estimate is mean - beta (plain mean - exact plain vote), with one beta for each
N.  Beta is fitted over all problems of the call, which keeps the bias of fitting it to the same
draws negligible.  The result may leave 0..1 by a little.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from prm_jax.aggregation import candidates
from prm_jax.aggregation.exact_vote import exact_majority

MAX_BLOCKS = 64  # draws of one N from one order, at most
# Cells of all tallies, for each candidate: finding winners then takes about as long as counting
# votes.  More cells would sharpen small N at the cost of large N, the least certain.
CELLS_PER_CANDIDATE = 2
GROUP_CELLS = 2**25  # a group of N whose tally has more cells takes no further N
MAX_CELLS = 2**30  # cells of one tally
NO_VOTE = 2**30 - 1  # an answer id outside every tally; twice this number fits an int32


class _Pool(NamedTuple):
  """The candidates as votes."""

  ids: jax.Array  # int32 [P, M] answers; NO_VOTE for candidates without a vote
  correct: jax.Array  # bool [P, M]
  weights: jax.Array | None  # [P, M]; None: 1 each
  exists: jax.Array | None  # bool [P, M] whether a slot exists; None: all


class _Group(NamedTuple):
  """Values of N that share blocks: each N is a prefix of each block."""

  n: tuple[int, ...]  # ascending; the last one is the length of a block
  blocks: int  # blocks in an order


def majority_vote(
  answer_ids, correct, valid=None, n: Sequence[int] | None = None, weights=None, *, key=None,
  permutations: int | None = None, sizes=None, num_answers: int | None = None,
  combine: str = "sum", control=None,
) -> tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]:  # fmt: skip
  """Returns the expected correctness of the majority's answer among N candidates, and its error.

  N of a problem's M candidates are drawn uniformly without replacement.  The answer with the most
  votes, or the most weight, wins; answers that tie share evenly.  Missing candidates do not vote;
  a draw without votes is wrong.  Without `key` the result is exact, in float64 on the host
  (`exact_vote`).  With `key`, which `weights` require, it is a Monte-Carlo estimate and works
  under `jax.jit` and `jax.vmap`; `n`, `sizes`, `permutations` and `num_answers` must then be
  concrete.

  Args:
    answer_ids: `[P, M]` integers: equal within a problem means the same answer.
    correct: `[P, M]` bool or 0/1 integers.  An answer counts as right in the proportion of its
      valid candidates that are: 0 or 1 unless a grader disagreed with itself.
    valid, sizes: as in `best_of_n`.
    n: as in `best_of_n`.  With a key, None takes memory P x M x answers.
    weights: `[P, M]` non-negative finite weight of each vote; None: 1 each.  Only their ratios
      within a problem matter.  Answers whose weights are equal to within rounding tie.
    key: a `jax.random` key for the estimate.
    permutations: the number of random orders, at least 2; with a key only.
    num_answers: answer ids lie in 0..num_answers-1; a vote for any other is not counted.
      None: read from `answer_ids`, which must then be concrete.
    combine: an answer's weight is the "sum" or the "mean" of its drawn candidates' weights.
    control: `[P, K]` the exact plain vote of the same candidates at the same `n`, which removes the
      noise that both votes share from a weighted vote.

  Returns:
    mean `[P, K]` and its Monte-Carlo standard error `[P, K]`: 0 where N draws every candidate.

  Raises:
    ValueError: as in `best_of_n`; a concrete answer id is negative, or a concrete weight negative
      or not finite; `permutations` below 2; options that exclude each other; too large a tally.
  """
  answer_ids = candidates.wide(answer_ids)
  p, m = candidates.check_shapes(answer_ids.shape, correct, valid, sizes)
  n = candidates.check_n(n, m)
  _check_options(answer_ids, weights, key, permutations, num_answers, combine, control, (p, len(n)))
  correct, valid = candidates.mask(correct, valid, sizes)
  if num_answers is not None:
    valid = valid & (answer_ids >= 0) & (answer_ids < num_answers)
    answer_ids = jnp.where(valid, jnp.asarray(answer_ids % num_answers, jnp.int32), 0)
    correct = correct & valid
  elif not candidates.is_traced(answer_ids, valid):
    negative = np.asarray(answer_ids)[np.asarray(valid & (answer_ids < 0))]
    if negative.size:
      raise ValueError(f"answer id {negative.min()}: expected 0 or more (missing: valid=False)")
  if key is None:
    mean = exact_majority(answer_ids, correct, valid, n, sizes)
    return mean, np.zeros_like(mean)
  if num_answers is None:
    answer_ids, num_answers = _dense(answer_ids, valid)
  ids = jnp.where(valid, answer_ids, NO_VOTE).astype(jnp.int32)
  every = sizes is None or np.min(sizes) == m  # then the estimate needs no mask, and is faster
  exists = None if every else jnp.arange(m) < jnp.asarray(sizes)[:, None]
  pool = _Pool(ids, correct, _check_weights(weights, valid), exists)
  return _estimate(pool, n, key, control, num_answers, permutations, combine)


def _check_options(
  answer_ids, weights, key, permutations, num_answers, combine, control, shape
):  # fmt: skip
  """Raises ValueError for options that are wrong or exclude each other."""
  if not jnp.issubdtype(answer_ids.dtype, jnp.integer):
    raise ValueError(f"answer_ids of dtype {answer_ids.dtype}: expected integers")
  if permutations is not None and permutations < 2:
    raise ValueError(f"permutations={permutations}: a standard error needs at least 2")
  if (key is None) != (permutations is None):
    raise ValueError(
      f"key={key}, permutations={permutations}: an estimate needs both, the exact vote neither"
    )
  if num_answers is not None and num_answers < 1:
    raise ValueError(f"num_answers={num_answers}: expected at least 1")
  if num_answers is None and key is not None and candidates.is_traced(answer_ids):
    raise ValueError("under jit or vmap, give num_answers: one more than the largest answer id")
  if combine not in ("sum", "mean"):
    raise ValueError(f"combine={combine!r}: expected 'sum' or 'mean'")
  if weights is not None and key is None:
    raise ValueError("weights without a key: a weighted vote needs key and permutations")
  if weights is None and (control is not None or combine == "mean"):
    raise ValueError(f"weights=None: combine={combine!r} and control are for weighted votes")
  if control is not None and jnp.shape(control) != shape:
    raise ValueError(f"control {jnp.shape(control)}: expected {shape}")
  if control is not None and not candidates.is_traced(control) and not np.isfinite(control).all():
    raise ValueError("control is not finite: expected the exact vote")


def _dense(answer_ids, valid) -> tuple[np.ndarray, int]:
  """Renumbers each problem's answers 0, 1, ...; returns the ids and the largest answer count."""
  answer_ids, valid = np.asarray(answer_ids), np.asarray(valid)
  dense = np.zeros(answer_ids.shape, np.int32)
  for p, (ids, votes) in enumerate(zip(answer_ids, valid)):
    dense[p, votes] = np.unique(ids[votes], return_inverse=True)[1]
  return dense, int(dense.max()) + 1


def _check_weights(weights, valid) -> jax.Array | None:
  """Returns `weights` as floats `[P, M]`, 0 where missing, scaled to at most 1 if concrete."""
  if weights is None:
    return None
  weights = candidates.as_array(weights)
  if weights.shape != valid.shape:
    raise ValueError(f"weights {weights.shape}: expected {valid.shape}")
  if not candidates.is_traced(weights, valid):
    weights, votes = np.asarray(weights, np.float64), np.asarray(valid)
    wrong = votes & ~(np.isfinite(weights) & (weights >= 0))
    if wrong.any():
      raise ValueError(
        f"weight {weights[wrong][0]} of candidate {np.argwhere(wrong)[0]}: "
        "expected a finite number, not negative"
      )
    weights = np.where(votes, weights, 0)
    # Scaled before rounding to float32: only ratios count, and all weights may be tiny or large.
    weights = weights / np.maximum(weights.max(axis=1, keepdims=True), np.finfo(float).tiny)
  return jnp.where(valid, jnp.asarray(weights, jax.dtypes.canonicalize_dtype(np.float64)), 0)


def _estimate(pool, n, key, control, num_answers, permutations, combine):
  """Returns mean and standard error `[P, K]`; `n` `[K]` may be unsorted and repeat values."""
  values, first, column = np.unique(n, return_index=True, return_inverse=True)
  if control is not None:
    control = jnp.asarray(control, jax.dtypes.canonicalize_dtype(np.float64))[:, first]
  p, m = pool.ids.shape
  plan = _plan(values[values < m], p, m, num_answers)
  n = tuple(values.tolist())
  mean, error = _block_votes(pool, control, key, n, plan, num_answers, permutations, combine)
  return mean[:, column], error[:, column]


def _plan(values: np.ndarray, problems: int, m: int, num_answers: int) -> tuple[_Group, ...]:
  """Groups the ascending values of N, so that all N = 1..M take few groups.

  Values that fit about equally often into M share a group.
  """
  cap = MAX_BLOCKS
  while cap > 1 and np.minimum(m // values, cap).sum() * num_answers > CELLS_PER_CANDIDATE * m:
    cap -= 1
  groups: list[tuple[int, list[int]]] = []  # blocks of the smallest N, all N
  for value in values.tolist():
    blocks = min(m // value, cap)
    full = groups and problems * blocks * len(groups[-1][1]) * num_answers > GROUP_CELLS
    if groups and 4 * blocks >= 3 * groups[-1][0] and not full:
      groups[-1][1].append(value)
    else:
      groups.append((blocks, [value]))
  plan = tuple(_Group(tuple(n), min(m // n[-1], cap)) for _, n in groups)
  for group in plan:
    if problems * group.blocks * len(group.n) * num_answers >= MAX_CELLS:
      raise ValueError(
        f"{problems} problems x {len(group.n)} values of N x {num_answers} answers is too large a "
        "tally: give fewer problems at once"
      )
  return plan


@functools.partial(jax.jit, static_argnames=("n", "plan", "num_answers", "permutations", "combine"))
def _block_votes(pool: _Pool, control, key, n, plan, num_answers, permutations, combine):
  """Returns mean and standard error `[P, K]` of the vote over random orders.

  `n` ascends strictly, and the groups of `plan` hold every N below M.
  """
  problems, m = pool.ids.shape
  # First an order of each problem's candidates, then the orders that all problems share.
  shuffles = jnp.argsort(jax.random.bits(key, (problems + permutations, m)), axis=1)
  slots, orders = shuffles[:problems], shuffles[problems:]
  pool = jax.tree.map(lambda x: jnp.take_along_axis(x, slots, axis=1), pool)
  sizes = m if pool.exists is None else pool.exists.sum(axis=1, keepdims=True)

  everyone = _Group((m,), 1)
  votes = _tally(everyone, pool.ids, 1, None, num_answers)
  right = _tally(everyone, pool.ids, pool.correct.astype(jnp.int32), None, num_answers)
  shares = right / jnp.maximum(votes, 1).astype(jax.dtypes.canonicalize_dtype(np.float64))
  outcomes = functools.partial(_outcomes, shares=shares, combine=combine, both=control is not None)
  full = outcomes(everyone, pool, None)[0, :, 0]
  if not plan:
    mean = jnp.broadcast_to(full, (problems, len(n)))
    return mean, jnp.zeros_like(mean)

  def observation(order):  # mean correctness [V, P, K] over the blocks of one order [M]
    drawn = jax.tree.map(lambda x: x[:, order], pool)
    rank = sizes = None
    if pool.exists is not None:  # slots that do not exist are skipped, not drawn
      rank = jnp.cumsum(drawn.exists, axis=1, dtype=jnp.int32) - 1
      sizes = rank[:, -1:, None] + 1
    columns = [_mean_over_blocks(outcomes(group, drawn, rank), group, sizes) for group in plan]
    return jnp.concatenate(columns, axis=-1)

  mean, covariance = _moments(observation, orders)
  sampled = mean.shape[-1]
  if control is None:
    mean, variance = mean[0], covariance[0, 0]
  else:
    mean, variance = _with_control(mean, covariance, control[:, :sampled])
  error = jnp.sqrt(variance / permutations)
  pad = ((0, 0), (0, len(n) - sampled))
  drew_all = np.array(n) >= sizes
  mean = jnp.where(drew_all, full, jnp.pad(mean, pad))
  return mean, jnp.where(drew_all, 0, jnp.pad(error, pad))


def _outcomes(group: _Group, drawn: _Pool, rank, *, shares, combine: str, both: bool):
  """Returns the winners' correctness `[V, P, blocks, G]`; V is 2, with a plain vote, if `both`.

  `shares` `[P, 1, 1, answers]` is the correctness of each answer.
  """
  num_answers = shares.shape[-1]
  counts = _tally(group, drawn.ids, 1, rank, num_answers)
  plain = _winner_correct(counts, counts, shares)
  if drawn.weights is None:
    return plain[None]
  weight = _tally(group, drawn.ids, drawn.weights, rank, num_answers)
  if combine == "mean":
    weight = weight / jnp.maximum(counts, 1)
  # Equal sums added in another order differ by rounding; they still tie.
  slack = 64 * max(1, drawn.ids.shape[1] / 1000) ** 0.5 * jnp.finfo(weight.dtype).eps
  weighted = _winner_correct(weight, counts, shares, slack)
  return jnp.stack([weighted, plain] if both else [weighted])


def _tally(group: _Group, ids, vote, rank, num_answers: int):
  """Counts each answer's votes among the first N of each block: `[P, blocks, G, answers]`.

  Args:
    group: the G values of N, and the number of blocks.
    ids: `[P, M]` answers in drawing order: 0..num_answers-1, or NO_VOTE, which is not counted.
    vote: `[P, M]` amount that a candidate adds to its answer, in drawing order; or one number.
    rank: `[P, M]` the number of candidates drawn before each; None: its column.
    num_answers: the number of answers of a problem.
  """
  (problems, m), width = ids.shape, group.n[-1]
  place = np.arange(m)
  interval = np.searchsorted(group.n, place % width + 1)  # the first N that takes this place
  offset = (place // width * len(group.n) + interval) * num_answers
  offset = np.where(place < group.blocks * width, offset, NO_VOTE).astype(np.int32)
  if rank is None:
    end = group.blocks * width
    index = ids[:, :end] + offset[:end]
    vote = vote if isinstance(vote, int) else vote[:, :end]
  else:
    index = ids + jnp.asarray(offset)[rank]
  dtype = jnp.int32 if isinstance(vote, int) else vote.dtype
  cells = jnp.zeros((problems, group.blocks * len(group.n) * num_answers), dtype)
  cells = cells.at[jnp.arange(problems)[:, None], index].add(vote, mode="drop")
  cells = cells.reshape(problems, group.blocks, len(group.n), num_answers)
  return cells if len(group.n) == 1 else jnp.cumsum(cells, axis=2)


def _winner_correct(votes, counts, shares, slack=0):
  """Returns the mean correctness of the answers within `slack` of the most votes."""
  least = votes.max(axis=-1, keepdims=True) * (1 - slack)
  wins = (votes >= least) & (counts > 0)
  shared = jnp.where(wins, shares, 0).sum(axis=-1)
  return shared / jnp.maximum(jnp.where(wins, 1.0, 0.0).sum(axis=-1), 1)


def _mean_over_blocks(outcomes, group: _Group, sizes):
  """Averages `[V, P, blocks, G]` to `[V, P, G]`; `sizes` is `[P, 1, 1]`, or None: M each."""
  if sizes is None:
    return outcomes.mean(axis=2)
  # A block that the end of an order cuts short is no draw of N, unless N draws all candidates.
  start = np.arange(group.blocks)[:, None] * group.n[-1]
  whole = (start == 0) | (start + np.array(group.n) <= sizes)
  return (outcomes * whole).sum(axis=2) / whole.sum(axis=1)


def _moments(observe, orders):
  """Returns mean `[V, P, K]` and covariance `[V, V, P, K]` of observations, by Welford's update."""

  def accumulate(state, order):
    seen, mean, products = state
    x = observe(order)
    before = x - mean
    mean = mean + before / (seen + 1)
    return (seen + 1, mean, products + before[:, None] * (x - mean)[None]), None

  shape = jax.eval_shape(observe, orders[0])
  mean = jnp.zeros(shape.shape, shape.dtype)
  products = jnp.zeros((len(mean), *mean.shape), shape.dtype)
  (_, mean, products), _ = jax.lax.scan(accumulate, (0, mean, products), orders)
  return mean, products / (len(orders) - 1)


def _with_control(mean, covariance, exact):
  """Returns mean and variance `[P, K]` of x - beta (y - exact) for observations (x, y), V = 2.

  beta = cov(x, y) / var(y), both summed over problems, minimises the summed variance.
  """
  spread = covariance[1, 1].sum(axis=0)
  beta = jnp.where(spread > 0, covariance[0, 1].sum(axis=0) / jnp.where(spread > 0, spread, 1), 0)
  variance = covariance[0, 0] - 2 * beta * covariance[0, 1] + beta**2 * covariance[1, 1]
  return mean[0] - beta * (mean[1] - exact), jnp.maximum(variance, 0)
