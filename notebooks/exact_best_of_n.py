# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exact best-of-N, as a library
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/prm_jax/blob/main/notebooks/exact_best_of_n.ipynb)
#
# `prm_jax.aggregation` takes arrays of scores from any reward model and returns best-of-N curves.
# It imports JAX and numpy only. The usual estimate shuffles the candidates many times and picks the
# best of the first N each time. The exact expectation over all draws takes one sort and one dot
# product.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("prm_jax") is None:  # on Colab, or wherever it is not installed
  package = "prm_jax[train] @ git+https://github.com/OWNER/prm_jax"
  subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)

# %% [markdown]
# The sizes are those of OpenAI's scored samples: 500 problems with 1,860 candidates each.

# %% tags=["parameters"]
PROBLEMS = 500
CANDIDATES = 1860
TRIALS = 400  # shuffles, for the comparison
SEED = 0

# %%
import time

import jax
import matplotlib.pyplot as plt
import numpy as np

from prm_jax import aggregation as agg
from prm_jax.evaluation import display

BLUE, RED, GREY, GREEN = "#0072B2", "#D55E00", "#555555", "#009E73"
rng = np.random.default_rng(SEED)

# %% [markdown]
# ## A pool of candidates
#
# Problems differ in difficulty. The scorer is better than chance, but overrates a few wrong
# candidates: their scores have a heavy tail. The larger N is, the likelier a draw contains one.

# %%
shape = (PROBLEMS, CANDIDATES)
difficulty = rng.beta(0.5, 1.2, (PROBLEMS, 1))  # share of right candidates
correct = rng.random(shape) < difficulty
fooled = (rng.random(shape) < 0.0003) * rng.exponential(3, shape)
scores = (2 * correct + rng.normal(size=shape) + ~correct * fooled).astype(np.float32)
answers = np.where(correct, 0, 1 + rng.geometric(0.4, shape))  # 0 is the right answer
print(f"pass rate {correct.mean():.3f}; {(correct.any(1)).mean():.1%} of problems can be solved")

# %% [markdown]
# ## Exact against shuffled
#
# A draw of N picks the candidate at depth d of the ranking if it is drawn and no better one is:
# E(N) = sum over d of a_d C(M-1-d, N-1) / C(M, N). Here a_d is 1 if that candidate is right, and
# ties share evenly. One call computes every N = 1..M.

# %%
jax.block_until_ready(agg.best_of_n(scores, correct))  # compiles
began = time.perf_counter()
exact = np.asarray(agg.best_of_n(scores, correct))  # [problems, N]
exact_seconds = time.perf_counter() - began
curve = exact.mean(0)


def shuffled_trial():
  """The share of right picks among the first N of one order, for every N, by running maximum."""
  order = rng.permutation(CANDIDATES)
  drawn, outcome = scores[:, order], correct[:, order]
  best = np.maximum.accumulate(drawn, axis=1)
  is_new = np.append(np.ones((PROBLEMS, 1), bool), best[:, 1:] > best[:, :-1], axis=1)
  at = np.maximum.accumulate(np.where(is_new, np.arange(CANDIDATES), 0), axis=1)
  return np.take_along_axis(outcome, at, axis=1).mean(0)


began = time.perf_counter()
trials = np.stack([shuffled_trial() for _ in range(TRIALS)])
trial_seconds = (time.perf_counter() - began) / TRIALS

# %%
n = np.arange(1, CANDIDATES + 1)
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for trial in trials[:3]:
  left.semilogx(n, 100 * trial, color=RED, alpha=0.4, linewidth=0.8, label="one shuffle each")
left.semilogx(n, 100 * curve, color=BLUE, label="exact")
left.plot(n[curve.argmax()], 100 * curve.max(), "o", color=BLUE)
left.set(xlabel="N", ylabel="% of problems solved")
labels = dict(zip(*left.get_legend_handles_labels()[::-1]))
left.legend(labels.values(), labels.keys(), frameon=False)
running = np.abs(np.cumsum(trials, 0) / np.arange(1, TRIALS + 1)[:, None] - curve)
right.loglog(np.arange(1, TRIALS + 1), 100 * running.mean(1), color=RED)
right.set(xlabel="shuffled trials", ylabel="mean error over N, in points")
plt.show()
print(f"the curve peaks at N = {n[curve.argmax()]}: {curve.max():.2%}, {curve[-1]:.2%} at N = M")

# %% [markdown]
# One shuffle gives an estimate for every N. The error of the mean falls with the square root of the
# number of trials. How many trials reach the precision of float32, and how long do they take?

# %%
error = running[-1].mean() * TRIALS**0.5  # of one trial
needed = (error / 1e-7) ** 2
display.table(
  ["", "seconds", "mean error, in points"],
  [
    ["exact, all N", f"{exact_seconds:.2f}", "rounding"],
    [f"{TRIALS} shuffles", f"{TRIALS * trial_seconds:.1f}", f"{100 * running[-1].mean():.3f}"],
    [f"{needed:.0e} shuffles", f"{needed * trial_seconds:.0e}", "1e-5"],
  ],
)

# %% [markdown]
# ## Is the fall real?
#
# The curve falls after its peak, because large N finds the overrated candidates. Other problems
# would give another curve. `bootstrap` gives an interval for each N by itself. A claim about a
# whole curve needs `simultaneous_band`, and a claim about two points needs their paired difference.

# %%
key = jax.random.key(SEED)
some = np.unique(np.geomspace(1, CANDIDATES, 40).astype(int))
per_problem = agg.best_of_n(scores, correct, n=some)
low, high = agg.bootstrap(per_problem, key, 2000)
band_low, band_high, critical = agg.simultaneous_band(per_problem, key, 2000)
peak = int(per_problem.mean(0).argmax())
fall, fall_low, fall_high = agg.paired_bootstrap(
  per_problem[:, peak : peak + 1], per_problem[:, -1:], key, 2000
)
print(f"peak (N = {some[peak]}) less N = M: {100 * fall[0]:.1f} points, "
      f"95 % interval {100 * fall_low[0]:.1f} to {100 * fall_high[0]:.1f}")  # fmt: skip

# %%
plt.figure(figsize=(6, 3.4), layout="constrained")
plt.fill_between(some, 100 * band_low, 100 * band_high, color=BLUE, alpha=0.15,
                 label=f"whole curve ({critical:.1f} standard errors)")  # fmt: skip
plt.fill_between(some, 100 * low, 100 * high, color=BLUE, alpha=0.3, label="each N by itself")
plt.semilogx(some, 100 * per_problem.mean(0), color=BLUE)
plt.xlabel("N")
plt.ylabel("% of problems solved")
plt.legend(frameon=False, loc="lower right")
plt.show()

# %% [markdown]
# The bands at the peak and at the end overlap, but the paired interval excludes zero: both points
# use the same problems, so their difficulty cancels.

# %% [markdown]
# ## Votes
#
# The majority vote is exact too: a Fourier sum over the numbers of votes. A vote weighted by scores
# is sampled, with a standard error. The exact majority vote is its control variate, which removes
# the noise that both votes share. The more alike the two votes are, the more it removes.

# %%
few = [1, 4, 16, 64, 256]
part = slice(0, min(PROBLEMS, 100))
outcomes = answers[part], correct[part]
majority, _ = agg.majority_vote(*outcomes, n=few)
draws = {"weights": jax.nn.sigmoid(scores[part]), "key": key, "permutations": 32}
plain, plain_error = agg.majority_vote(*outcomes, n=few, **draws)
weighted, error = agg.majority_vote(*outcomes, n=few, control=majority, **draws)


def mean_error(per_problem):
  return 100 * np.sqrt(np.square(per_problem).sum(0)) / len(per_problem)


display.table(
  ["% solved at N =", *few],
  [
    ["oracle", *(f"{100 * x:.1f}" for x in agg.pass_at_n(correct[part], n=few).mean(0))],
    ["best by score", *(f"{100 * x:.1f}" for x in exact[part][:, np.array(few) - 1].mean(0))],
    ["weighted vote", *(f"{100 * x:.1f}" for x in weighted.mean(0))],
    ["majority", *(f"{100 * x:.1f}" for x in majority.mean(0))],
    ["standard error, plain", *(f"{x:.3f}" for x in mean_error(plain_error))],
    ["with the control", *(f"{x:.3f}" for x in mean_error(error))],
  ],
)

# %% [markdown]
# ## Ties and missing candidates
#
# Probabilities rounded to bfloat16 tie near 1. `best_of_n` shares the pick evenly among ties, so
# the order of a file does not matter. `argmax` picks the first of the tied candidates, so its
# result is too high if the file lists right answers first.

# %%
probability = jax.nn.sigmoid(2 * scores).astype(jax.numpy.bfloat16)
rounded = np.asarray(probability, np.float32)
tied = (rounded == rounded.max(1, keepdims=True)).sum(1)


def argmax_picks(order):
  """The share of problems that argmax solves, with candidates in this order `[P, M]`."""
  picked = np.take_along_axis(rounded, order, 1).argmax(1)
  return correct[np.arange(PROBLEMS), order[np.arange(PROBLEMS), picked]].mean()


right_first = np.argsort(~correct, axis=1, kind="stable")
exact_share = agg.best_of_n(rounded, correct, n=[CANDIDATES]).mean()
print(f"{tied.mean():.0f} candidates tie for the best score, on average")
print(f"argmax, right answers first: {argmax_picks(right_first):.1%} of problems solved")
print(f"argmax, right answers last:  {argmax_picks(right_first[:, ::-1]):.1%}")
print(f"exact, in any order:         {exact_share:.1%}")

# %% [markdown]
# `valid` marks solutions that were not cut off. The others count as drawn but are never picked.
# Leaving them out of the arrays instead makes every N look better.

# %%
valid = rng.random(shape) < 0.7
kept = [correct[p][valid[p]] for p in range(PROBLEMS)]
short = np.array([len(each) for each in kept])
left_out = np.zeros((2, PROBLEMS, short.max()))
for p in range(PROBLEMS):
  left_out[:, p, : short[p]] = scores[p][valid[p]], kept[p]
counted = agg.best_of_n(scores, correct, valid, n=few).mean(0)
dropped = agg.best_of_n(left_out[0], left_out[1].astype(bool), n=few, sizes=short).mean(0)
display.table(
  ["30 % cut off, N =", *few],
  [
    ["counted as drawn", *(f"{100 * x:.1f}" for x in counted)],
    ["left out", *(f"{100 * x:.1f}" for x in dropped)],
  ],
)

# %% [markdown]
# ## Under jit and vmap
#
# The functions work under `jit` and `vmap`. One call computes the curves for 16 noise levels of a
# scorer: how good must scores be for more candidates to help?

# %%
noises = np.geomspace(0.1, 30, 16).astype(np.float32)
noise = rng.normal(size=shape).astype(np.float32)[:100, :256]
sweep = jax.jit(
  jax.vmap(lambda s: agg.best_of_n(correct[:100, :256] + s * noise, correct[:100, :256]).mean(0))
)(noises)
plt.figure(figsize=(6, 3.4), layout="constrained")
colours = plt.cm.viridis(np.linspace(0, 0.9, len(noises)))
for each, colour in zip(np.asarray(sweep), colours):
  plt.semilogx(np.arange(1, each.size + 1), 100 * each, color=colour, base=2)
plt.xlabel("N")
plt.ylabel("% of problems solved")
plt.title("noise of the scores, from 0.1 (dark) to 30 (light) times their signal", fontsize=9)
plt.show()

# %% [markdown]
# `help(prm_jax.aggregation)` documents all functions, with formulas. `rerank_and_read_curves.ipynb`
# applies them to the scores of trained models.
