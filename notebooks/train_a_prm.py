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
# # Train a process reward model
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/prm_jax/blob/main/notebooks/train_a_prm.ipynb)
#
# A transformer of 0.2 million parameters learns from scratch to find wrong steps, in under two
# minutes on two CPU cores. The data are generated arithmetic problems. The solutions are by a
# simulated solver that may misread a clause, slip in a result or copy an older value. Their labels
# are exact, in PRM800K's format.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("prm_jax") is None:  # on Colab, or wherever it is not installed
  package = "prm_jax[train] @ git+https://github.com/OWNER/prm_jax"
  subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)

# %% [markdown]
# With the sizes of `scripts/quickstart.sh` (8,000 labelled solutions, 5,000 updates) the model
# solves nearly all problems at best-of-1024. This notebook makes 3,000 updates, to show how it
# learns.

# %% tags=["parameters"]
STEPS = 3_000  # updates
TRAIN_PROBLEMS = 4_000  # with two labelled solutions each
TEST_PROBLEMS = 200
CANDIDATES = 64  # solutions of each test problem, to score
SEED = 0

# %%
import json
import pathlib
import tempfile

import matplotlib.pyplot as plt
import numpy as np

from prm_jax import aggregation as agg
from prm_jax import step_metrics
from prm_jax.config import Data, Experiment, Loss, Model, Optim, Train
from prm_jax.datasets import arithmetic, labelled, prepare
from prm_jax.evaluation import display
from prm_jax.input_pipeline import step_dataset, tokenizers
from prm_jax.scoring.scorer import Scorer
from prm_jax.training import loop

BLUE, RED, GREY = "#0072B2", "#D55E00", "#555555"
folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## Data
#
# `prepare_arithmetic` is `scripts/prepare_data.py --dataset=arithmetic` as a function. For labels
# of your own use `prepare.prepare_stepwise`, which reads Math-Shepherd's, TRL's or plain lines.

# %%
generator = arithmetic.Generator(
  seed=SEED,
  train_problems=TRAIN_PROBLEMS,
  test_problems=TEST_PROBLEMS,
  candidates=CANDIDATES,
)
manifest = prepare.prepare_arithmetic(folder / "data", generator)
rows = [
  [split, f"{counts['rows']['kept']:,}", *(f"{counts['labels'][k]:,}" for k in ("1", "0", "-1"))]
  for split, counts in manifest["splits"].items()
]
display.table(["split", "solutions", "right steps", "neutral", "wrong"], rows)

# %% [markdown]
# The table shows one labelled solution. The problem lists the operations to apply, in order, and
# the digit to start from; only the last digit is kept. Rows after the same step are alternatives,
# each with its rating.

# %%
trees, _ = labelled.step_trees(folder / "data", "train", "process", 200)
tree = max(trees, key=lambda tree: tree.labels.count(-1))
display.table(
  ["problem", "after step", "step", "rating"],
  [
    [tree.problem.replace("\n", ", ") if not i else "", parent + 1,
     display.shade(" ".join(text.split()), label >= 0), display.MARKS[label]]
    for i, (text, parent, label) in enumerate(zip(tree.steps, tree.parents, tree.labels))
  ],
)  # fmt: skip

# %% [markdown]
# ## Train
#
# Settings are fields of frozen dataclasses. `loss.objective="outcome"` trains an outcome model, and
# `init.checkpoint` starts from a public language model instead of random weights.

# %%
tokenizer = folder / "tokenizer.model"
tokenizers.train_sentencepiece(step_dataset.texts(folder / "data", "train", 1000), tokenizer, 320)
experiment = Experiment(
  data=Data(str(folder / "data"), str(tokenizer), separator="\n", row_length=96),
  model=Model(
    width=64,
    layers=3,
    heads=8,
    kv_heads=8,
    head_size=8,
    mlp_width=176,
    rope_theta=300.0,
    tied_embeddings=False,
    embedding_std=0.6,
    unroll_layers=True,
  ),
  loss=Loss(objective="process", language_model_weight=1.0),
  optim=Optim(learning_rate=4e-3, warmup_steps=50),
  train=Train(
    steps=STEPS,
    batch_rows=4,
    log_every=max(STEPS // 20, 1),
    eval_every=max(STEPS // 10, 1),
    save_every=STEPS,
    seed=SEED,
  ),
)

# %%
result = loop.run(experiment, folder / "run")
print(f"step AUROC on held-out problems: {result['auroc']:.3f}")

# %% [markdown]
# The work directory holds the whole run; `metrics.jsonl` can be read during or after it. AUROC is
# the chance that a random right step scores above a random wrong one.

# %%
lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
train = [line for line in lines if line["split"] == "train"]
test = [line for line in lines if line["split"] == "test"]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot([x["step"] for x in train], [x["loss"] for x in train], color=GREY, label="train loss")
left.plot([x["step"] for x in test], [x["nll"] for x in test], "o-", color=BLUE, label="test nll")
left.set(xlabel="update", yscale="log")
left.legend(frameon=False)
right.plot([x["step"] for x in test], [x["auroc"] for x in test], "o-", color=BLUE)
right.set(xlabel="update", title="step AUROC on held-out problems")
for axes in (left, right):
  axes.grid(alpha=0.25)
plt.show()

# %% [markdown]
# ## What it has learnt
#
# `Scorer` loads the checkpoint with its step-token contract, which defines where a step is read and
# what the classes mean. The solutions of a problem are encoded as one prefix tree, so 64 candidates
# cost little.

# %%
scorer = Scorer.load(folder / "run")
candidates = [
  json.loads(line) for line in (folder / "data" / arithmetic.CANDIDATES).read_text().splitlines()
]
probabilities = scorer.probabilities([(c["problem"], c["steps"]) for c in candidates])
right = [each[:, scorer.contract.right_classes].sum(1) for each in probabilities]
print(f"{len(candidates):,} solutions, {sum(map(len, right)):,} steps")
print(f"read at: {scorer.contract.read}; classes: {', '.join(scorer.contract.classes)}")

# %% [markdown]
# The domain can rate any step, so the table shows the model's P(right) beside the true rating, up
# to the first error: a wrong and a right solution of the same problem.

# %%
problem_of = {problem.text: problem for problem in generator.problems()["test"]}
ratings = [arithmetic.rate(problem_of[c["problem"]], c["steps"]) for c in candidates]


def shown(i):
  labels = [*ratings[i], *[None] * (len(right[i]) - len(ratings[i]))]
  return display.steps(
    [" ".join(step.split()) for step in candidates[i]["steps"]], right[i], labels
  )


wrong = next(i for i, each in enumerate(ratings) if len(each) > 2 and each[-1] < 0)
of_problem = [i for i, c in enumerate(candidates) if c["problem"] == candidates[wrong]["problem"]]
best = max(of_problem, key=lambda i: ratings[i][-1] + right[i].prod())
problem = candidates[wrong]["problem"].replace("\n", ", ")
display.table([problem, ""], [[shown(wrong), shown(best)]])

# %% [markdown]
# These figures use every rated step of every candidate. Left: the distribution of P(right). Right:
# calibration. Three in ten of the steps with P(right) near 0.3 should be right (the diagonal).

# %%
rated = [len(each) for each in ratings]
p = np.concatenate([each[:count] for each, count in zip(right, rated)])
is_right = np.concatenate(ratings) >= 0
figure, (left, middle) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
bins = np.linspace(0, 1, 31)
left.hist([p[is_right], p[~is_right]], bins, color=[BLUE, RED], label=["right", "wrong"], log=True)
left.set(xlabel="P(right)", ylabel="steps")
left.legend(frameon=False)
rows = step_metrics.calibration(p, is_right)["bins"]
middle.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
middle.plot(
  [row["mean_probability"] for row in rows], [row["share_not_wrong"] for row in rows], "o-",
  color=BLUE,
)  # fmt: skip
middle.set(xlabel="mean P(right) of a bin", ylabel="share that is right", xlim=(0, 1), ylim=(0, 1))
plt.show()
print(f"AUROC over all candidates' steps: {step_metrics.auroc(p, is_right):.3f}")

# %% [markdown]
# ## Which mistakes does it miss?
#
# A wrong step misreads the problem, or computes or copies wrongly. To detect a misreading, the
# model must compare the step with the problem's text; to detect the others, with the step before.
# Which of them has the model learnt?


# %%
def mistake(problem, step):
  name = step.split()[0]
  clauses = problem.text.split("\n")[:-1]
  return "misread clause" if name not in clauses else "wrong value or result"


kinds = {"misread clause": [], "wrong value or result": []}
for c, each, rating in zip(candidates, right, ratings):
  if rating[-1] < 0 and "->" in c["steps"][len(rating) - 1]:
    kind = mistake(problem_of[c["problem"]], c["steps"][len(rating) - 1])
    kinds[kind].append(each[len(rating) - 1])
display.table(
  ["first error of a candidate", "solutions", "doubted (P < 0.5)", "mean P(right)"],
  [
    [kind, f"{len(each):,}", f"{np.mean(np.array(each) < 0.5):.1%}", float(np.mean(each))]
    for kind, each in kinds.items()
    if each
  ],
)

# %% [markdown]
# ## What it is for
#
# Each candidate's score is the product of its steps' P(right), and the best of N candidates is
# picked. `agg.best_of_n` computes the expected result exactly for every N.

# %%
shape = (TEST_PROBLEMS, CANDIDATES)
scores = np.reshape([each.prod() for each in right], shape)
correct = np.reshape([c["is_correct"] for c in candidates], shape)
n = np.arange(1, CANDIDATES + 1)
plt.figure(figsize=(6, 3.2), layout="constrained")
plt.semilogx(n, 100 * agg.best_of_n(scores, correct).mean(0), color=BLUE, label="PRM", base=2)
plt.semilogx(n, 100 * agg.pass_at_n(correct).mean(0), color=GREY, label="oracle", base=2)
plt.axhline(100 * correct.mean(), color=RED, linewidth=0.8, label="random pick")
plt.xlabel("N")
plt.ylabel("% of problems solved")
plt.legend(frameon=False)
plt.show()

# %% [markdown]
# **Try changes:** `STEPS = 500`; `Generator(alternatives=0)` for one labelled completion per step;
# or `loss=Loss(heads=8, language_model_weight=1.0)` for an ensemble with uncertainty.
# `rerank_and_read_curves.ipynb` compares the model with other methods, with error bars.
