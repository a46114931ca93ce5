"""From scored candidate solutions to best-of-N curves: exact, with error bars.

A generator writes M candidate solutions for each of P problems, a reward model scores them, and
a method picks one of N: the best-scored, or the answer most of them give.  How often is the pick
right?  Drawing N at random and counting is an estimate, and a slow one; these functions return
the expectation over all draws of N from the M itself.  They need arrays and JAX only: any reward
model's scores will do.

  >>> import jax, numpy as np
  >>> from prm_jax import aggregation as agg

Steps to solutions.  A process reward model gives each step the probabilities of the ratings
-1, 0, 1.  The probability that every step is right is their product; `reduce_steps` works in log
space over the steps of all solutions laid end to end, here two of one problem:

  >>> rating_probs = np.array([[0.1, 0.1, 0.8], [0.5, 0.0, 0.5], [0.2, 0.0, 0.8]], np.float32)
  >>> steps = agg.step_log_scores(rating_probs, neutral="positive")
  >>> log_scores = agg.reduce_steps(steps, np.array([0, 0, 1]), num_solutions=2, how="product")
  >>> print(np.exp(np.asarray(log_scores)).round(3))
  [0.45 0.8 ]

Solutions to curves.  Two problems of four candidates; the last candidate of the second one never
reached an answer, so it is missing: it counts as drawn, and is never chosen.

  >>> scores = np.array([[0.9, 0.7, 0.4, 0.2], [0.8, 0.8, 0.3, 0.0]], np.float32)
  >>> correct = np.array([[1, 0, 1, 0], [1, 0, 0, 0]], bool)
  >>> valid = np.array([[1, 1, 1, 1], [1, 1, 1, 0]], bool)
  >>> print(np.asarray(agg.best_of_n(scores, correct, valid, n=[1, 2, 4])).round(3))
  [[0.5   0.667 1.   ]
   [0.25  0.417 0.5  ]]
  >>> print(np.asarray(agg.pass_at_n(correct, valid, n=[1, 2, 4])).round(3))
  [[0.5   0.833 1.   ]
   [0.25  0.5   1.   ]]

With a problem's candidates sorted best first, the one at depth d is chosen when it is drawn and
nothing above it is, so

  E(N) = sum_d a_d C(M-1-d, N-1) / C(M, N),

where a_d is the mean correctness of the candidates tied with depth d: **tied scores share the
pick evenly**, whatever the order in the file (above, 0.8 is scored twice, once rightly: 0.5 at
N = 4).  Ties matter: scores rounded to bfloat16 tie by the hundred.  pass@N, the oracle, is
1 - C(M-c, N) / C(M, N) with c right candidates; `all_correct_at_n` is C(c, N) / C(M, N).  Leave
out `n` for every N = 1..M at little more cost.

Voting.  The answer that most of the N give wins, ties shared evenly.  The expectation is exact
too, by a Fourier sum in place of a closed form, and computed on the host:

  >>> answers = np.array([[0, 1, 0, 2], [0, 1, 1, 0]])
  >>> mean, standard_error = agg.majority_vote(answers, correct, valid, n=[1, 2, 4])
  >>> print(mean.round(3), standard_error.max())
  [[0.5   0.5   1.   ]
   [0.25  0.333 0.   ]] 0.0

Weights turn it into a weighted vote, an average over random orders that says how exact it is.
The exact vote as `control` takes out the noise that both share:

  >>> mean, standard_error = agg.majority_vote(
  ...   answers, correct, valid, [1, 2, 4], weights=scores,
  ...   control=mean, key=jax.random.key(0), permutations=200)
  >>> exact = np.array([4 / 6, 2.5 / 6])  # of six draws of two
  >>> bool((abs(mean[:, 1] - exact) < 4 * standard_error[:, 1]).all())
  True

Curves to claims.  The mean over problems would differ for other problems: `bootstrap` says by how
much, over problems, each N by itself; `simultaneous_band` for the whole curve at once;
`standard_error` by formula.  All three hold the noise of generation too, which
`generation_error` tells apart.  (The spread between random draws of N from the same candidates,
which the paper's Figure 3 shades, is no such error: it shrinks to nothing at N = M.)  To compare
two methods, resample their differences, `paired_bootstrap`: what makes a problem hard for both
cancels.

  >>> per_problem = agg.best_of_n(scores, correct, valid, n=[1, 2])
  >>> low, high = agg.bootstrap(per_problem, jax.random.key(1), resamples=1000)
  >>> print(np.asarray(low).round(2), np.asarray(high).round(2))
  [0.25 0.42] [0.5  0.67]

All but the exact vote work under `jax.jit` and `jax.vmap`, with `n` and the other sizes concrete,
and sharded over problems.  Called with arrays on a CPU, `best_of_n` leaves its sort to numpy, which
is much faster there than XLA's: for speed, do not wrap it in `jax.jit` on a CPU.
Source: *Let's Verify Step by Step* (arXiv 2305.20050), sections 2.6 and 3, Figure 3, appendix F.2.
"""

from prm_jax.aggregation.best_of_n import all_correct_at_n, best_of_n, pass_at_n
from prm_jax.aggregation.exact_vote import exact_majority
from prm_jax.aggregation.intervals import (
  bootstrap,
  paired_bootstrap,
  simultaneous_band,
  standard_error,
)
from prm_jax.aggregation.jackknife import generation_error
from prm_jax.aggregation.reduce import REDUCTIONS, reduce_steps, step_log_scores
from prm_jax.aggregation.voting import majority_vote

__all__ = [
  "REDUCTIONS",
  "all_correct_at_n",
  "best_of_n",
  "bootstrap",
  "exact_majority",
  "generation_error",
  "majority_vote",
  "paired_bootstrap",
  "pass_at_n",
  "reduce_steps",
  "simultaneous_band",
  "standard_error",
  "step_log_scores",
]
