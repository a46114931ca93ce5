"""Majority and weighted voting: exact, or by Monte-Carlo with a standard error."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from prm_jax.aggregation.best_of_n import as_array, check_candidates, check_n
from prm_jax.aggregation.exact_vote import exact_majority

MAX_BLOCKS = 64  # draws of one N taken from one order
# Cells of all tallies, for each candidate: finding winners then takes about as long as counting
# votes.  More would cost the large N, the least certain, to sharpen the small.
CELLS_PER_CANDIDATE = 2
GROUP_CELLS = 2**25  # of the tally of a group of N, while one N alone does not exceed it
MAX_CELLS = 2**30  # of one tally
NO_VOTE = 2**30 - 1  # outside of any tally; twice that is still an int32


def majority_vote(
  answer_ids,
  correct,
  valid=None,
  n: Sequence[int] | None = None,
  weights=None,
  *,
  key=None,
  permutations: int | None = None,
  sizes=None,
  num_answers: int | None = None,
  combine: str = "sum",
  control=None,
):
  """Expected correctness of the answer with most votes among N candidates, and its error.

  N of a problem's M candidates are drawn uniformly without replacement; the answer with the
  most votes, or the most weight, wins, and answers that tie share evenly.  Missing candidates do
  not vote; a draw without votes is wrong.

  Without `weights` and `key` this is exact: `exact_majority`, on the host.  With a `key`, as
  weights need one, the mean is estimated from random orders of the candidates.  The first N of an
  order are one draw, the next N another: up to 64 such disjoint blocks make one observation, far
  less noisy than a single draw.  Where N draws every candidate there is nothing to estimate, and
  the standard error is 0.

  Orders are shared by problems whose candidates were first shuffled apart, which makes the errors
  of different problems uncorrelated: the standard error of a mean over problems is
  sqrt(sum of squared standard errors) / P.

  `control` sharpens a weighted vote: a plain vote is taken on the same draws, and beta times its
  distance from the exact value is subtracted (a control variate; it may lead a hair outside
  0..1).  One beta for each N, fitted over all problems of the call, keeps the bias of fitting it
  to the same draws negligible.

  With a key this works under `jax.jit` and `jax.vmap`, where `n`, `sizes`, `permutations` and
  `num_answers` must be concrete.

  Args:
    answer_ids: `[P, M]` integers: equal within a problem means the same answer.
    correct: `[P, M]` bool or 0/1 integers.  An answer counts as right in the proportion of its
      valid candidates that are: 0 or 1 unless a grader disagreed with itself.
    valid: `[P, M]` bool, or None; False: missing, as in `best_of_n`.  A problem whose candidates
      are all missing is never solved: 0, with standard error 0.
    n: as in `best_of_n`.  With a key, None takes memory P x M x answers.
    weights: `[P, M]` non-negative finite weight of each vote; None: 1 each.  Only their ratios
      within a problem matter.  Answers whose weights are equal to within rounding tie.
    key: a `jax.random` key: the result is an estimate.
    permutations: how many orders, at least 2; with a key only.
    sizes: as in `best_of_n`.
    num_answers: answer ids lie in 0..num_answers-1; a vote for any other is not counted.
      None: read from `answer_ids`, which must then be concrete.
    combine: an answer's weight is the "sum" or the "mean" of its drawn candidates' weights.
    control: `[P, K]` the exact plain vote of the same candidates at the same `n`.

  Returns:
    mean `[P, K]` and its Monte-Carlo standard error `[P, K]`.

  Raises:
    ValueError: as in `best_of_n`; a negative answer id; a weight that is negative or not finite
      (checked where the arrays are concrete); fewer than 2 permutations; a key without
      permutations, or the reverse; weights without a key; "mean" or control without weights.
  """
  answer_ids = as_array(answer_ids)
  if not jnp.issubdtype(answer_ids.dtype, jnp.integer):
    raise ValueError(f"answer_ids of dtype {answer_ids.dtype}: expected integers")
  correct, valid = check_candidates(answer_ids.shape, correct, valid, sizes)
  n = check_n(n, answer_ids.shape[1])
  _check_options(weights, key, permutations, combine, control, (len(answer_ids), len(n)))
  if num_answers is not None:
    if num_answers < 1:
      raise ValueError(f"num_answers={num_answers}: expected at least 1")
    valid = valid & (answer_ids >= 0) & (answer_ids < num_answers)
    answer_ids = jnp.where(valid, jnp.asarray(answer_ids % num_answers, jnp.int32), 0)
  if key is None:
    mean = exact_majority(answer_ids, correct, valid, n, sizes=sizes)
    return mean, np.zeros_like(mean)
  if num_answers is None:
    if isinstance(answer_ids, jax.core.Tracer):
      raise ValueError("under jit or vmap, give num_answers: one more than the largest answer id")
    answer_ids, num_answers = _dense(np.asarray(answer_ids), valid)
  if weights is not None:
    weights = _check_weights(weights, valid)
  values, first, column = np.unique(n, return_index=True, return_inverse=True)
  if control is not None:
    control = jnp.asarray(control, jax.dtypes.canonicalize_dtype(np.float64))[:, first]
  sizes = None if sizes is None else np.asarray(sizes)
  plan = _plan(values[values < valid.shape[1]], *valid.shape, num_answers)
  mean, error = _block_votes(
    answer_ids, correct & valid, valid, weights, control, sizes, key,
    n=tuple(values.tolist()), plan=plan, num_answers=num_answers, permutations=permutations,
    combine=combine,
  )  # fmt: skip
  return mean[:, column], error[:, column]


def _check_options(weights, key, permutations, combine, control, shape):
  """A ValueError unless the arguments that say how to vote agree."""
  if permutations is not None and permutations < 2:
    raise ValueError(f"permutations={permutations}: a standard error takes at least 2")
  if (key is None) != (permutations is None):
    raise ValueError(
      f"key={key}, permutations={permutations}: an estimate takes both, the exact vote neither"
    )
  if combine not in ("sum", "mean"):
    raise ValueError(f"combine={combine!r}: expected 'sum' or 'mean'")
  if weights is not None and key is None:
    raise ValueError("weights without a key: a weighted vote takes key and permutations")
  if weights is None and (control is not None or combine == "mean"):
    raise ValueError(f"weights=None: combine={combine!r} and control are for weighted votes")
  if control is not None and jnp.shape(control) != shape:
    raise ValueError(f"control {jnp.shape(control)}: expected {shape}")
  known = control is not None and not isinstance(control, jax.core.Tracer)
  if known and not np.isfinite(control).all():
    raise ValueError("control is not finite: expected the exact vote")


def _dense(answer_ids: np.ndarray, valid) -> tuple[np.ndarray, int]:
  """Answer ids numbered 0, 1, ... within each problem, and the largest number of them."""
  valid = np.asarray(valid)
  if (valid & (answer_ids < 0)).any():
    lowest = answer_ids[valid].min()
    raise ValueError(f"answer id {lowest}: expected 0 or more (missing: valid=False)")
  dense = np.zeros(answer_ids.shape, np.int32)
  for row, ids, votes in zip(dense, answer_ids, valid):
    row[votes] = np.unique(ids[votes], return_inverse=True)[1]
  return dense, int(dense.max()) + 1


def _check_weights(weights, valid):
  """`weights` as floats `[P, M]`, the largest of each problem 1, or a ValueError."""
  weights = as_array(weights)
  if weights.shape != valid.shape:
    raise ValueError(f"weights {weights.shape}: expected {valid.shape}")
  if not any(isinstance(x, jax.core.Tracer) for x in (weights, valid)):
    weights, votes = np.asarray(weights, np.float64), np.asarray(valid)
    wrong = votes & ~(np.isfinite(weights) & (weights >= 0))
    if wrong.any():
      raise ValueError(
        f"weight {weights[wrong][0]} of candidate {np.argwhere(wrong)[0]}: "
        "expected a finite number, not negative"
      )
    weights = np.where(votes, weights, 0)
    # Before rounding to float32: only ratios count, and all may be tiny, or large.
    weights = weights / np.maximum(weights.max(axis=1, keepdims=True), np.finfo(float).tiny)
  return jnp.asarray(weights, jax.dtypes.canonicalize_dtype(np.float64))


def _plan(values: np.ndarray, problems: int, m: int, num_answers: int) -> tuple:
  """How to draw each N, ascending: groups (values of N, blocks, the earlier group to add up).

  Values that fit about equally often into M share blocks, each value a prefix of each block, so
  that all N = 1..M take few groups.  A group of one N that is a multiple of an earlier group's
  block adds up that group's votes instead of counting its own (None: it counts).
  """
  cap = MAX_BLOCKS
  while cap > 1 and np.minimum(m // values, cap).sum() * num_answers > CELLS_PER_CANDIDATE * m:
    cap -= 1
  groups = []
  for value in values.tolist():
    blocks = min(m // value, cap)
    full = groups and problems * blocks * len(groups[-1][1]) * num_answers > GROUP_CELLS
    if groups and 4 * blocks >= 3 * groups[-1][0] and not full:
      groups[-1][1].append(value)
    else:
      groups.append((blocks, [value]))
  plan = []
  for _, members in groups:
    blocks = min(m // members[-1], cap)
    if problems * blocks * len(members) * num_answers >= MAX_CELLS:
      raise ValueError(
        f"{problems} problems x {len(members)} values of N x {num_answers} answers is too large a "
        "tally: give fewer problems at once"
      )
    source = None
    for i, (earlier, earlier_blocks, _) in enumerate(plan):
      times, rest = divmod(members[-1], earlier[-1])
      if len(members) == 1 and rest == 0 and blocks * times <= earlier_blocks:
        source = i
    plan.append((tuple(members), blocks, source))
  return tuple(plan)


@functools.partial(jax.jit, static_argnames=("n", "plan", "num_answers", "permutations", "combine"))
def _block_votes(
  answer_ids, correct, valid, weights, control, sizes, key, *,
  n: tuple, plan: tuple, num_answers: int, permutations: int, combine: str,
):  # fmt: skip
  """Mean and standard error `[P, K]` of the vote over random orders; `n` ascends strictly."""
  problems, m = answer_ids.shape
  dtype = jax.dtypes.canonicalize_dtype(np.float64)
  # A shuffle of each problem's candidates, then the orders all problems share.
  shuffles = jnp.argsort(jax.random.bits(key, (problems + permutations, m)), axis=1)
  slots, orders = shuffles[:problems], shuffles[problems:]

  def shuffle(x):
    return jnp.take_along_axis(x, slots, axis=1)

  ids = shuffle(jnp.where(valid, answer_ids, NO_VOTE).astype(jnp.int32))
  votes = [jnp.ones((), jnp.int32)]
  if weights is not None:
    votes.append(shuffle(jnp.where(valid, weights, 0)))
  exists = None if sizes is None else shuffle(jnp.arange(m) < sizes[:, None])

  everyone = ((m,), 1, None)
  totals = [_count(everyone, ids, vote, None, num_answers) for vote in votes]
  right = _count(everyone, ids, shuffle(correct).astype(jnp.int32), None, num_answers)
  answer_correct = right / jnp.maximum(totals[0], 1).astype(dtype)

  def outcomes(tallies):
    """`[V, P, blocks, G]` correctness of the winners; V: weighted, and plain for control."""
    counts = tallies[0]
    plain = _winner_correct(counts, counts, answer_correct)
    if weights is None:
      return plain[None]
    weight = tallies[1] if combine == "sum" else tallies[1] / jnp.maximum(counts, 1)
    # Equal sums added in another order differ by rounding; they are ties all the same.
    slack = 64 * max(1, m / 1000) ** 0.5 * jnp.finfo(dtype).eps
    weighted = _winner_correct(weight, counts, answer_correct, slack)
    return jnp.stack([weighted] if control is None else [weighted, plain])

  def observe(order):
    """`[V, P, K]` mean correctness over the blocks of one order."""
    drawn = ids[:, order]
    drawn_votes = [vote if vote.ndim == 0 else vote[:, order] for vote in votes]
    # Slots that do not exist are skipped, not drawn.
    rank = None if exists is None else jnp.cumsum(exists[:, order], axis=1, dtype=jnp.int32) - 1
    tallies, columns = [], []
    for group in plan:
      members, blocks, source = group
      if source is None:
        tallies.append([_count(group, drawn, vote, rank, num_answers) for vote in drawn_votes])
      else:
        times = members[-1] // plan[source][0][-1]
        split = (problems, blocks, times, num_answers)
        whole_blocks = [x[:, : blocks * times, -1] for x in tallies[source]]
        tallies.append([x.reshape(split).sum(axis=2)[:, :, None] for x in whole_blocks])
      columns.append(_mean_over_blocks(outcomes(tallies[-1]), members, sizes))
    return jnp.concatenate(columns, axis=-1)

  full = outcomes(totals)[0, :, 0]
  if not plan:
    mean = jnp.broadcast_to(full, (problems, len(n)))
    return mean, jnp.zeros_like(mean)
  mean, covariance = _moments(observe, orders)
  sampled = mean.shape[-1]
  if control is None:
    mean, variance = mean[0], covariance[0, 0]
  else:
    spread = covariance[1, 1].sum(axis=0)
    beta = jnp.where(spread > 0, covariance[0, 1].sum(axis=0) / jnp.where(spread > 0, spread, 1), 0)
    mean = mean[0] - beta * (mean[1] - control[:, :sampled])
    variance = covariance[0, 0] - 2 * beta * covariance[0, 1] + beta**2 * covariance[1, 1]
    variance = jnp.maximum(variance, 0)
  error = jnp.sqrt(variance / permutations)
  pad = ((0, 0), (0, len(n) - sampled))
  drew_all = np.array(n) >= (m if sizes is None else sizes[:, None])
  mean = jnp.where(drew_all, full, jnp.pad(mean, pad))
  return mean, jnp.where(drew_all, 0, jnp.pad(error, pad))


def _count(group, ids, vote, rank, num_answers: int):
  """Votes for each answer among the first N of each block, `[P, blocks, G, answers]`.

  `ids` and `vote` are in drawing order; `rank` says how many were drawn before each (None: its
  column does).
  """
  (members, blocks, _), (problems, m) = group, ids.shape
  width, place = members[-1], np.arange(m)
  interval = np.searchsorted(members, place % width + 1)  # the first N that takes this place
  offset = (place // width * len(members) + interval) * num_answers
  offset = np.where(place < blocks * width, offset, NO_VOTE).astype(np.int32)
  if rank is None:
    ids, offset = ids[:, : blocks * width], offset[: blocks * width]
    vote = vote if vote.ndim == 0 else vote[:, : blocks * width]
  else:
    offset = jnp.asarray(offset)[rank]
  problem = jnp.arange(problems)[:, None]
  cells = jnp.zeros((problems, blocks * len(members) * num_answers), vote.dtype)
  cells = cells.at[problem, ids + offset].add(vote, mode="drop")
  cells = cells.reshape(problems, blocks, len(members), num_answers)
  return cells if len(members) == 1 else jnp.cumsum(cells, axis=2)


def _mean_over_blocks(each, members, sizes):
  """`[V, P, blocks, G]` -> `[V, P, G]`."""
  if sizes is None:
    return each.mean(axis=2)
  # Blocks cut short by the end of an order are no draws of N, unless N draws all there is.
  start = np.arange(each.shape[2])[:, None] * members[-1]
  whole = (start == 0) | (start + np.array(members) <= sizes[:, None, None])
  return (each * whole).sum(axis=2) / whole.sum(axis=1)


def _winner_correct(votes, counts, answer_correct, slack=0):
  """Correctness of the answer with most votes, shared by those within `slack` of it."""
  least = votes.max(axis=-1, keepdims=True) * (1 - slack)
  wins = (votes >= least) & (counts > 0)
  shared = jnp.where(wins, answer_correct, 0).sum(axis=-1)
  return shared / jnp.maximum(jnp.where(wins, 1.0, 0.0).sum(axis=-1), 1)


def _moments(observe, orders):
  """Mean `[V, P, K]` and covariance `[V, V, P, K]` of observations, without cancellation."""

  def accumulate(state, order):  # Welford's update
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
