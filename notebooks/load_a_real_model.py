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
# # Load a real model, and look at its doubts
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/prm_jax/blob/main/notebooks/load_a_real_model.ipynb)
#
# This notebook loads a process reward model from a directory in the hub's layout (config.json,
# safetensors, tokenizer) and shows which steps it doubts. Without real weights it first trains and
# exports a tiny model, which takes half a minute.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("prm_jax") is None:  # on Colab, or wherever it is not installed
  package = "prm_jax[train] @ git+https://github.com/OWNER/prm_jax"
  subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)

# %% [markdown]
# For a real model, download its directory, and set `MODEL` to the path and `READOUT` to the
# authors' readout (listed below). Qwen2.5-Math-PRM-7B takes 15 GB in bfloat16; a TPU or GPU runtime
# helps.

# %% tags=["parameters"]
MODEL = ""  # such as "Qwen2.5-Math-PRM-7B"; "": train a tiny model here
READOUT = "qwen2.5-math-prm"  # how to read MODEL; "": written by scripts/export.py
DTYPE = "float32"  # "bfloat16" halves the memory
STEPS = 2_000  # updates of the tiny model
TRAIN_PROBLEMS = 2_000  # training problems of the tiny model
SEED = 0

# %%
import contextlib
import dataclasses
import html
import io
import pathlib
import tempfile

import jax
import matplotlib.pyplot as plt
import numpy as np

from prm_jax.config import Mesh
from prm_jax.datasets import arithmetic, prm800k
from prm_jax.datasets.prm800k import recipes
from prm_jax.evaluation import display, page
from prm_jax.input_pipeline import tokenizers
from prm_jax.model import sharding
from prm_jax.pretrained import export
from prm_jax.runtime import command_line
from prm_jax.scoring import candidates, readouts
from prm_jax.scoring.scorer import Scorer
from prm_jax.training import checkpoint, loop

folder = pathlib.Path(tempfile.mkdtemp())
print("readouts:", ", ".join(readouts.PUBLISHED))

# %% [markdown]
# ## A tiny model in the hub's layout
#
# The tiny model trains on the embedded arithmetic domain and is exported as by `scripts/export.py`.
# transformers can load the directory. `prm_jax.json` holds the contract: where a step is read and
# what the classes mean.


# %%
def tiny_model(directory):
  generator = arithmetic.Generator(seed=SEED, train_problems=TRAIN_PROBLEMS, test_problems=50)
  trees = {
    split: recipes.convert_all(prm800k.numbered(rows, split), recipes.RECIPES["paper"])[0]
    for split, rows in generator.rows().items()
  }
  texts = [text for tree in trees["train"][:1000] for text in (tree.problem, *tree.steps)]
  tokenizers.train_sentencepiece(texts, folder / "tokenizer.model", 320)
  base = command_line.read("configs/arithmetic.py")
  data = dataclasses.replace(base.data, tokenizer=str(folder / "tokenizer.model"))
  often = {"eval_every": STEPS, "save_every": STEPS}
  train = dataclasses.replace(base.train, steps=STEPS, seed=SEED, **often)
  experiment = dataclasses.replace(base, data=data, train=train)
  with contextlib.redirect_stderr(io.StringIO()):  # the log
    result = loop.run(experiment, folder / "run", loop.Solutions(*trees.values(), "paper"))
  print(f"trained: step AUROC {result['auroc']:.3f} on held-out problems")
  _, about, params = checkpoint.restore_params(folder / "run", sharding.make_mesh(Mesh()))
  tokenizer = tokenizers.load(folder / "run")
  export.write(
    directory,
    params,
    about.config.model,
    about.vocab_size,
    contract=about.contract,
    files=tokenizer.files(),
    tokens={"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id},
  )


if not MODEL:
  tiny_model(folder / "tiny")
directory = pathlib.Path(MODEL or folder / "tiny")
display.table(
  ["file", "KB"],
  [[path.name, f"{path.stat().st_size / 1e3:,.1f}"] for path in sorted(directory.iterdir())],
)

# %% [markdown]
# ## Load it
#
# The same call loads an export or a published model. The contract defines what the probabilities
# mean. A tensor of the wrong shape, or a tokenizer other than the model's, is an error here.

# %%
scorer = Scorer.load_model(directory, READOUT if MODEL else "", DTYPE)
contract = dataclasses.asdict(scorer.contract)
display.table(
  ["", directory.name],
  [
    ["parameters", f"{sum(x.size for x in jax.tree.leaves(scorer.params)):,}"],
    ["laid out as", scorer.layout],
    *([name, repr(value)] for name, value in contract.items() if name != "tokenizer_hash"),
  ],
)

# %% [markdown]
# ## Solutions to look at
#
# A real model scores three solutions of a word problem, two of them with a mistake. The tiny model
# knows only its own domain. Each case is a problem, a solution and the ratings of its steps, up to
# the first error.

# %%
if MODEL:
  eggs = "Janet's ducks lay 16 eggs a day. She eats 3 and bakes with 4. She sells the others at $2 "
  eggs += "each. How many dollars does she make a day?"
  cases = [
    (eggs, ["She uses 3 + 4 = 7 eggs.", "So 16 - 7 = 9 are left.", "She makes 9 * 2 = 18 dollars.",
            "The answer is \\boxed{18}."], [1, 1, 1, 1]),
    (eggs, ["She uses 3 + 4 = 7 eggs.", "So 16 - 7 = 8 are left.", "She makes 8 * 2 = 16 dollars.",
            "The answer is \\boxed{16}."], [1, -1]),
    (eggs, ["She uses 3 * 4 = 12 eggs.", "So 16 - 12 = 4 are left.", "She makes 4 * 2 = 8 dollars.",
            "The answer is \\boxed{8}."], [-1]),
  ]  # fmt: skip
else:
  rng = np.random.default_rng(SEED + 7)
  drawn = arithmetic.make_problem(rng, level=5)
  sampled = [arithmetic.solve(drawn, rng).steps for _ in range(200)]
  distinct = sorted(set(sampled), key=lambda steps: -sampled.count(steps))[:12]
  cases = [(drawn.text, list(steps), arithmetic.rate(drawn, steps)) for steps in distinct]
probabilities = scorer.probabilities([(problem, steps) for problem, steps, _ in cases])
right = [each[:, scorer.contract.right_classes].sum(1) for each in probabilities]

# %% [markdown]
# ## Doubts, step by step
#
# The deeper the shade, the lower P(right). The first error is the step rated wrong. Does the model
# doubt that step, an earlier one, or only a later one?


# %%
def doubts(i):
  _, steps, rating = cases[i]
  labels = [*rating, *[None] * (len(steps) - len(rating))]
  return display.steps([" ".join(step.split()) for step in steps], right[i], labels)


wrong = next((i for i, (_, _, rating) in enumerate(cases) if rating[-1] < 0), 0)
good = max(range(len(cases)), key=lambda i: cases[i][2][-1] + right[i].prod())
display.table([cases[wrong][0].replace("\n", ", "), ""], [[doubts(wrong), doubts(good)]])

# %% [markdown]
# The figure shows all solutions: a row is a solution, a column a step, and a cross marks the first
# error. In the row of a good model the first dark cell is at the cross.

# %%
order = sorted(range(len(cases)), key=lambda i: -right[i].prod())
grid = np.full((len(cases), max(map(len, right))), np.nan)
for row, i in enumerate(order):
  grid[row, : len(right[i])] = 1 - right[i]
plt.figure(figsize=(1.2 + 0.9 * grid.shape[1], 0.8 + 0.35 * len(cases)), layout="constrained")
plt.imshow(grid, cmap="Oranges", vmin=0, vmax=1, aspect="auto")
for row, i in enumerate(order):
  if cases[i][2][-1] < 0:
    plt.plot(len(cases[i][2]) - 1, row, "x", color="black")
plt.colorbar(label="doubt: 1 - P(right)")
plt.xticks(range(grid.shape[1]), range(1, grid.shape[1] + 1))
plt.yticks(range(len(cases)), [f"{right[i].prod():.2f}" for i in order])
plt.xlabel("step")
plt.ylabel("product of steps")
plt.show()

# %% [markdown]
# ## What the model reads
#
# These are the tokens of a solution, with P(right) at those where the head reads. For a published
# model they show the chat template and the step tag: look here first when scores seem wrong.

# %%
tree = scorer.encode(*cases[wrong][:2])
reads = dict(zip(tree.read_positions.tolist(), right[wrong]))
spans = []
for i, token in enumerate(tree.tokens.tolist()):
  text = scorer.tokenizer.decode([token]).replace("\n", "⏎") or f"<{token}>"
  spans.append(display.shade(f"{text} {reads[i]:.2f}", 0.4) if i in reads else html.escape(text))
display.Html(" · ".join(spans))

# %% [markdown]
# ## Repair a step
#
# To test whether a doubt is about the step itself, replace it with a right step and score again. If
# the doubt remains, it has another cause.

# %%
problem, steps, rating = cases[wrong]
at = len(rating) - 1
if MODEL:
  repaired = next(s for _, s, r in cases if r[-1] > 0)[at]
else:
  tries = [s for s in sampled if s[:at] == tuple(steps[:at]) and len(s) > at]
  tries = [s[at] for s in tries if arithmetic.rate(drawn, s[: at + 1])[-1] > 0]
  repaired = tries[0] if tries else steps[at]
pair = scorer.probabilities([(problem, steps[: at + 1]), (problem, [*steps[:at], repaired])])
before, after = (float(each[-1, scorer.contract.right_classes].sum()) for each in pair)
display.table(
  [f"step {at + 1}", "P(right)"],
  [[display.shade(steps[at], before), before], [display.shade(repaired, after), after]],
)

# %% [markdown]
# ## The page
#
# `scripts/view.py` writes this page for any scored file, with thousands of solutions. The page is
# one file that fetches nothing, so it can be shown in a notebook too.

# %%
records, labels = [], {}
for (problem, steps, rating), each in zip(cases, scorer.by_head([case[:2] for case in cases])):
  records.append(candidates.scored({"problem": problem}, steps, each, scorer.contract))
  labels[problem, tuple(steps)] = [*rating, *[None] * (len(steps) - len(rating))]
problems = page.from_records(records, labels)
text = page.render(problems, directory.name, f"{len(cases)} solutions")
display.Html(f'<iframe srcdoc="{html.escape(text)}" width="100%" height="640"></iframe>')
