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
# # Rerank, and read the curves
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/prm_jax/blob/main/notebooks/rerank_and_read_curves.ipynb)
#
# This notebook trains a process (PRM) and an outcome reward model (ORM) on the same solutions. Each
# picks the best of N candidates, and majority voting and the oracle are shown for comparison. The
# second half explains which question each kind of error bar answers.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("prm_jax") is None:  # on Colab, or wherever it is not installed
  package = "prm_jax[train] @ git+https://github.com/OWNER/prm_jax"
  subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)

# %% tags=["parameters"]
STEPS = 2_000  # updates of each model
TRAIN_PROBLEMS = 3_000  # with two labelled solutions each
TEST_PROBLEMS = 800
CANDIDATES = 64  # candidates of each test problem
SETS = 100  # random sets of problems, to see how often an interval holds
SEED = 0

# %%
import base64
import contextlib
import dataclasses
import io
import json
import pathlib
import tempfile

import jax
import matplotlib.pyplot as plt
import numpy as np

from prm_jax import aggregation as agg
from prm_jax.config import Loss
from prm_jax.datasets import arithmetic, prm800k
from prm_jax.datasets.prm800k import recipes
from prm_jax.evaluation import display, methods, report_figure, reranking, scored_samples
from prm_jax.evaluation.figure_files import encoded
from prm_jax.input_pipeline import tokenizers
from prm_jax.runtime import command_line
from prm_jax.scoring import candidates
from prm_jax.scoring.scorer import Scorer
from prm_jax.training import loop

BLUE, RED, GREY, GREEN = "#0072B2", "#D55E00", "#555555", "#009E73"
folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## Two models
#
# A recipe turns the embedded domain's records into labelled trees, all in memory. The PRM learns
# from the ratings of steps, the ORM from the correctness of the final answer. Model and settings
# are those of `configs/arithmetic.py`.

# %%
generator = arithmetic.Generator(
  seed=SEED,
  train_problems=TRAIN_PROBLEMS,
  test_problems=TEST_PROBLEMS,
  candidates=CANDIDATES,
)
records = {split: list(prm800k.numbered(rows, split)) for split, rows in generator.rows().items()}
trees = {
  (objective, split): recipes.convert_all(each, recipes.RECIPES["paper"], objective)[0]
  for objective in ("process", "outcome")
  for split, each in records.items()
}
texts = [t for tree in trees["process", "train"][:1000] for t in (tree.problem, *tree.steps)]
tokenizers.train_sentencepiece(texts, folder / "tokenizer.model", 320)
{objective: len(each) for (objective, split), each in trees.items() if split == "train"}

# %%
base = command_line.read("configs/arithmetic.py")
data = dataclasses.replace(base.data, tokenizer=str(folder / "tokenizer.model"))
often = {"eval_every": STEPS, "save_every": STEPS}
train = dataclasses.replace(base.train, steps=STEPS, seed=SEED, **often)
experiment = dataclasses.replace(base, data=data, train=train)
for objective in ("process", "outcome"):
  c = dataclasses.replace(experiment, loss=Loss(objective, language_model_weight=1.0))
  solutions = loop.Solutions(trees[objective, "train"], trees[objective, "test"], "paper")
  with contextlib.redirect_stderr(io.StringIO()):  # the log
    result = loop.run(c, folder / objective, solutions)
  print(f"{objective}: AUROC {result['auroc']:.3f} over {result['count']:,} held-out targets")

# %% [markdown]
# ## Scores
#
# This cell does what `scripts/score.py` does. A file of scored candidates has the keys of OpenAI's
# `scored-test-samples.jsonl`, so you can use any other model's scores instead.

# %%
generator.write_candidates(folder)
lines = [json.loads(line) for line in (folder / arithmetic.CANDIDATES).read_text().splitlines()]
paths = []
for objective in ("process", "outcome"):
  scorer = Scorer.load(folder / objective)
  found = scorer.by_head([(line["problem"], line["steps"]) for line in lines])
  scored = [candidates.scored(x, x["steps"], p, scorer.contract) for x, p in zip(lines, found)]
  paths.append(folder / f"{objective}.jsonl")
  paths[-1].write_text("".join(json.dumps(each) + "\n" for each in scored))
samples = scored_samples.read_scored_samples(paths)
problems, most = samples.correct.shape
print(f"{problems:,} problems x {most} candidates, {samples.correct.mean():.1%} of them right")

# %% [markdown]
# ## Curves
#
# `rerank` computes each method at each requested N with intervals, exactly where possible.
# `scripts/rerank.py` prints the same table and writes a page with the solutions.

# %%
NAMES = ("oracle", "prm_product", "orm", "majority", "random")
found, scores = reranking.rerank(samples, reranking.Options(methods=NAMES))
rows = []
for name in NAMES:
  curve = found["curves"][name]
  interval = f"{100 * curve['low'][-1]:.1f} to {100 * curve['high'][-1]:.1f}"
  rows.append(
    [methods.catalogue()[name].label, *(f"{100 * x:.1f}" for x in curve["accuracy"]), interval]
  )
display.table(["% solved, N =", *found["n"], "95 % interval"], rows)

# %%
png = base64.b64encode(encoded(report_figure.draw_curves(found))).decode()
display.Html(f'<img src="data:image/png;base64,{png}" width="700">')

# %% [markdown]
# The oracle is the upper bound that the candidates allow. At N = 1, every method is a random pick.
# Voting does not help here, because the likeliest mistake is often more frequent than the right
# answer. The ORM trained on the same solutions, but only on whether each final answer is right.

# %% [markdown]
# ## Where is it won?
#
# The problems are split into fifths by difficulty: the share of their candidates that is right.

# %%
fifths = reranking.by_difficulty(samples.correct.mean(1))
plt.figure(figsize=(6, 3), layout="constrained")
styles = {"oracle": GREY, "prm_product": BLUE, "orm": RED, "random": GREEN}
for i, (name, colour) in enumerate(styles.items()):
  solved = np.asarray(agg.best_of_n(scores[name], samples.correct, n=[most]))[:, 0]
  shares = [100 * solved[each].mean() for each in fifths.values()]
  plt.bar(np.arange(len(shares)) + 0.2 * i - 0.3, shares, 0.2, color=colour,
          label=methods.catalogue()[name].label)  # fmt: skip
plt.xticks(range(len(fifths)), ["easiest", *" " * (len(fifths) - 2), "hardest"])
plt.ylabel(f"% solved at best-of-{most}")
plt.legend(frameon=False, ncols=4, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1))
plt.show()

# %% [markdown]
# ## Three kinds of spread
#
# | spread | repeats | in the figure |
# |---|---|---|
# | shuffled trials (shaded in the paper's Figure 3) | draws of N from the same candidates | red |
# | generation | new candidates for the same problems | green |
# | problems | other problems, with candidates of their own | blue |
#
# Only the spread over problems says how the model would do beyond this test set.

# %%
n = np.unique(np.geomspace(1, most, 25).astype(int))
rng, key = np.random.default_rng(SEED), jax.random.key(SEED)
few = slice(0, 100)  # a test set of the size that many papers use
score, correct = scores["prm_product"][few], samples.correct[few]
per_problem = agg.best_of_n(score, correct, n=n)


def trial():
  order = rng.permuted(np.tile(np.arange(most), (len(score), 1)), axis=1)
  drawn, outcome = (np.take_along_axis(x, order, 1) for x in (score, correct))
  return [outcome[np.arange(len(score)), drawn[:, :k].argmax(1)].mean() for k in n]


draws = np.std([trial() for _ in range(100)], axis=0)
generation = np.asarray(agg.generation_error(score, correct, n=n))
generation = np.sqrt(np.square(generation).sum(0)) / len(score)
over_problems = np.asarray(agg.standard_error(per_problem))
plt.figure(figsize=(6, 3.2), layout="constrained")
for spread, colour, label in (
  (over_problems, BLUE, "other problems"),
  (generation, GREEN, "other candidates (N <= M/5)"),
  (draws, RED, "other draws of the same candidates"),
):
  plt.semilogx(n, 100 * spread, color=colour, base=2, label=label)
plt.xlabel("N")
plt.ylabel("standard error, in points")
plt.ylim(0, None)
plt.legend(frameon=False)
plt.show()

# %% [markdown]
# The spread of draws is zero at N = M, where only one draw exists. A curve shaded with this spread
# looks exact at its right end, although other problems would move it by points.

# %% [markdown]
# ## Does a 95 % interval hold?
#
# Each of many random sets holds a twentieth of the problems and stands for the test set of a paper.
# About one interval in twenty should miss the mean of all problems. The figure shows this mean as a
# line, and the first twenty intervals, in red if they miss it.

# %%
solved = np.asarray(agg.best_of_n(scores["prm_product"], samples.correct, n=n))
truth, size = solved.mean(0), max(problems // 20, 2)
sets = np.stack([solved[rng.permutation(problems)[:size]] for _ in range(SETS)])
keys = jax.random.split(key, len(sets))
low, high = jax.vmap(lambda x, key: agg.bootstrap(x, key, 500))(sets, keys)
inside = np.asarray((low <= truth) & (truth <= high))  # [sets, N]
plt.figure(figsize=(6, 3.4), layout="constrained")
for i in range(min(SETS, 20)):
  colour = BLUE if inside[i, -1] else RED
  plt.plot([i, i], [100 * low[i, -1], 100 * high[i, -1]], color=colour)
  plt.plot(i, 100 * sets[i, :, -1].mean(), "o", color=colour, markersize=4)
plt.axhline(100 * truth[-1], color=GREY, linewidth=0.8)
plt.xticks(range(0, 20, 5))
plt.xlabel(f"set of {size} problems")
plt.ylabel(f"% solved at best-of-{most}")
plt.show()

# %% [markdown]
# Pointwise intervals hold at each N by itself, but in more than 5 % of sets the whole curve leaves
# them at some N. The simultaneous band is wide enough for all N at once. With so few problems, the
# coverage of both is a little below 95 %.

# %%
low, high, _ = jax.vmap(lambda x, key: agg.simultaneous_band(x, key, 500))(sets, keys)
whole = np.asarray((low <= truth) & (truth <= high)).all(1)
display.table(
  ["the mean of all problems is inside", f"of {len(sets)} sets"],
  [
    ["pointwise, at the largest N", inside[:, -1].sum()],
    ["pointwise, at every N", inside.all(1).sum()],
    ["simultaneous, at every N", whole.sum()],
  ],
)

# %% [markdown]
# ## Two methods on the same problems
#
# To decide which of two methods is better, compare their differences on the same problems
# (`paired_bootstrap`): the difficulty of the problems cancels.

# %%
a, b = (
  np.asarray(agg.best_of_n(scores[f"prm_{how}"][few], correct, n=[most]))
  for how in ("product", "mean")
)
rows = []
for name, (low, high), middle in (
  ("PRM, product of steps", agg.bootstrap(a, key), a.mean()),
  ("PRM, mean of steps", agg.bootstrap(b, key), b.mean()),
  ("difference", agg.paired_bootstrap(a, b, key)[1:], (a - b).mean()),
):
  rows.append([name, f"{100 * middle:.1f}", f"{100 * low[0]:.1f} to {100 * high[0]:.1f}"])
display.table([f"{len(a)} problems, N = {most}", "points", "95 % interval"], rows)

# %% [markdown]
# **Your own scores:** write lines with `problem`, `steps`, `answer`, `is_correct` and
# `rating_probs` or `orm_score`, and pass the paths of the files to `read_scored_samples` above.
