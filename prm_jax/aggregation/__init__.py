"""Turns scored candidate solutions into exact best-of-N curves with error bars.

A generator writes M candidate solutions for each of P problems, a reward model scores them, and a
method picks one of N: the best-scored, or the answer that most of them give.  These functions
return how often the pick is right, as the exact expectation over all draws of N from the M.  They
need only arrays and JAX, and take the scores of any reward model.

Shapes: P problems, M candidates of each, K values of N, S solutions, T steps of all solutions.

  >>> import jax, numpy as np
  >>> from prm_jax import aggregation as agg

Steps to solutions.  A process reward model gives each step the probabilities of the ratings
-1, 0, 1.  The probability that every step is right is their product.  `reduce_steps` works in log
space, on the steps of all solutions laid end to end.  Here are two solutions of one problem:

  >>> rating_probs = np.array([[0.1, 0.1, 0.8], [0.5, 0.0, 0.5], [0.2, 0.0, 0.8]], np.float32)
  >>> steps = agg.step_log_scores(rating_probs, neutral="positive")
  >>> log_scores = agg.reduce_steps(steps, np.array([0, 0, 1]), num_solutions=2, how="product")
  >>> print(np.exp(np.asarray(log_scores)).round(3))
  [0.45 0.8 ]

Solutions to curves.  Two problems of four candidates.  The last candidate of the second problem
never reached an answer, so it is missing: it may be drawn, but is never picked.

  >>> scores = np.array([[0.9, 0.7, 0.4, 0.2], [0.8, 0.8, 0.3, 0.0]], np.float32)
  >>> correct = np.array([[1, 0, 1, 0], [1, 0, 0, 0]], bool)
  >>> valid = np.array([[1, 1, 1, 1], [1, 1, 1, 0]], bool)
  >>> print(np.asarray(agg.best_of_n(scores, correct, valid, n=[1, 2, 4])).round(3))
  [[0.5   0.667 1.   ]
   [0.25  0.417 0.5  ]]
  >>> print(np.asarray(agg.pass_at_n(correct, valid, n=[1, 2, 4])).round(3))
  [[0.5   0.833 1.   ]
   [0.25  0.5   1.   ]]

With a problem's candidates sorted best first, the candidate at depth d is picked if it is drawn
and nothing above it is, so

  E(N) = sum_d a_d C(M-1-d, N-1) / C(M, N),

where a_d is the mean correctness of the candidates tied with depth d.  **Tied scores share the
pick evenly**, whatever their order in the file: above, two candidates score 0.8 and one of them is
right, which gives 0.5 at N = 4.  Ties matter, as scores rounded to bfloat16 tie by the hundred.
`join_ties` makes float64 scores that differ only by rounding tie.

pass@N, the oracle, is 1 - C(M-c, N) / C(M, N) with c right candidates; `all_correct_at_n` is
C(c, N) / C(M, N).  Without `n`, results have every N = 1..M, at little more cost.

Voting.  The answer that most of the N give wins, and tied answers share the win evenly.  This
expectation is exact too: a Fourier sum computed on the host.

  >>> answers = np.array([[0, 1, 0, 2], [0, 1, 1, 0]])
  >>> mean, standard_error = agg.majority_vote(answers, correct, valid, n=[1, 2, 4])
  >>> print(mean.round(3), standard_error.max())
  [[0.5   0.5   1.   ]
   [0.25  0.333 0.   ]] 0.0

A weighted vote is estimated from random orders, with a standard error.  The exact plain vote as
`control` removes the noise that both votes share:

  >>> mean, standard_error = agg.majority_vote(
  ...   answers, correct, valid, [1, 2, 4], weights=scores,
  ...   control=mean, key=jax.random.key(0), permutations=200)
  >>> exact = np.array([4 / 6, 2.5 / 6])  # of six draws of two
  >>> bool((abs(mean[:, 1] - exact) < 4 * standard_error[:, 1]).all())
  True

Curves to claims.  Other problems would give another mean.  `bootstrap` gives the mean's interval at
each N separately, `simultaneous_band` a band for the whole curve at once, and `standard_error` the
standard error by formula.  All three include the noise of generation; `generation_error` is that
noise alone.  (The paper's Figure 3 shades the spread between random draws of N from the same
candidates, which is neither: it is 0 at N = M, where all draws are the same.)  To compare two
methods, resample their differences with `paired_bootstrap`: the difficulty of a problem cancels.

  >>> per_problem = agg.best_of_n(scores, correct, valid, n=[1, 2])
  >>> low, high = agg.bootstrap(per_problem, jax.random.key(1), resamples=1000)
  >>> print(np.asarray(low).round(2), np.asarray(high).round(2))
  [0.25 0.42] [0.5  0.67]

All functions but the exact vote work under `jax.jit` and `jax.vmap`, with `n` and the other sizes
concrete, and on arrays sharded over problems.  On a CPU, call `best_of_n` outside of `jax.jit`: it
then sorts with numpy, which is much faster there than XLA.

Source: *Let's Verify Step by Step* (arXiv 2305.20050), sections 2.6 and 3, Figure 3, appendix F.2.
"""

from prm_jax.aggregation.best_of_n import all_correct_at_n, best_of_n, pass_at_n
from prm_jax.aggregation.intervals import (
  bootstrap,
  paired_bootstrap,
  simultaneous_band,
  standard_error,
)
from prm_jax.aggregation.jackknife import generation_error
from prm_jax.aggregation.ranking import join_ties
from prm_jax.aggregation.reduce import REDUCTIONS, reduce_steps, step_log_scores
from prm_jax.aggregation.voting import majority_vote

__all__ = [
  "REDUCTIONS",
  "all_correct_at_n",
  "best_of_n",
  "bootstrap",
  "generation_error",
  "join_ties",
  "majority_vote",
  "paired_bootstrap",
  "pass_at_n",
  "reduce_steps",
  "simultaneous_band",
  "standard_error",
  "step_log_scores",
]
