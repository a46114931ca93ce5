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
# # Look at PRM800K
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/prm_jax/blob/main/notebooks/look_at_prm800k.ipynb)
#
# PRM800K ([Lightman et al. 2023](https://arxiv.org/abs/2305.20050)) holds human ratings of single
# steps in solutions of MATH problems: 1 (right), 0 (neutral) or -1 (wrong). A *recipe* turns
# its records into labels. Public code uses several recipes; this notebook shows where they differ.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("prm_jax") is None:  # on Colab, or wherever it is not installed
  package = "prm_jax[train] @ git+https://github.com/OWNER/prm_jax"
  subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)

# %% [markdown]
# Without a download the notebook uses five hand-written records in PRM800K's format, and generated
# records for statistics. The real files are 477 MB: clone
# [openai/prm800k](https://github.com/openai/prm800k), run `git lfs pull`, and set `SOURCE` to the
# folder.

# %% tags=["parameters"]
SOURCE = ""  # a folder with phase1_train.jsonl and so on; "": the hand-written records
LIMIT = 20_000  # records to read from each file
GENERATED = 4_000  # generated problems, with two solutions each, where there is no SOURCE

# %%
import collections
import itertools
import json
import pathlib
import tempfile

import matplotlib.pyplot as plt
import msgspec
import numpy as np

from prm_jax import aggregation as agg
from prm_jax.datasets import arithmetic, prm800k
from prm_jax.datasets.prm800k import recipes
from prm_jax.evaluation import display

COLOURS = {1: "#009E73", 0: "#E69F00", -1: "#D55E00"}  # by rating
NAMES = {1: "right", 0: "neutral", -1: "wrong", None: "not rated"}

# %% [markdown]
# ## Records
#
# A record is one line of a file: a labelled solution. In phase 1 labelers chose among several
# completions at each step, and could write their own. In phase 2 they rated a finished solution up
# to its first error.


# %%
def step(*completions, chosen=0, human=None):
  rated = [{"text": text, "rating": rating, "flagged": False} for text, rating in completions]
  written = human and {"text": human, "rating": None, "source": "human", "flagged": False}
  return {"completions": rated, "human_completion": written, "chosen_completion": chosen}


def line(problem, answer, steps, reason="solution", check=False, **question):
  return {
    "labeler": "you",
    "timestamp": "2022-08-01T10:00:00",
    "generation": 5 if "pre_generated_steps" in question else None,
    "is_quality_control_question": check,
    "is_initial_screening_question": False,
    "question": {"problem": problem, "ground_truth_answer": answer, **question},
    "label": {"steps": steps, "total_time": 60_000, "finish_reason": reason},
  }


DIVISORS = "How many positive divisors does $12$ have?"
phase1 = [
  line(
    DIVISORS,
    "6",
    [
      step(
        ("Let me think about what a divisor is.", 0),
        ("I factor 12 as 2^2 * 3.", 1),
        ("I factor 12 as 2 * 3.", -1),
        chosen=1,
      ),
      step(("There are 2 * 2 = 4 of them.", -1), ("I add 2 + 1.", -1), chosen=None,
           human="There are (2 + 1)(1 + 1) of them."),
      step(("That is 6.\n\n# Answer\n\n6", 1), ("So 6.\n\n# Answer\n\n6", None)),
    ],
  ),
  line("What is the largest $x$?", None, [step(("x can be anything.", 0))], reason="give_up"),
]  # fmt: skip
slow = ["I write down 1, 2, 3.", "Then come 4, 6, 12.", "I count 6.\n\n# Answer\n\n6"]
wrong = ["12 = 2^2 * 3.", "So there are 2 * 1 = 2.", "# Answer\n\n2"]
phase2 = [
  line(
    DIVISORS,
    "6",
    [step((slow[0], 1)), step((slow[1], 0)), step((slow[2], 1))],
    pre_generated_steps=slow,
    pre_generated_answer="6",
  ),
  line(
    DIVISORS,
    "6",
    [
      step((wrong[0], 1)),
      step((wrong[1], -1), ("Exponents plus one: 3 * 2.", 1), ("Hmm.", 0), chosen=None),
    ],
    reason="found_error",
    pre_generated_steps=wrong,
    pre_generated_answer="2",
  ),
  line("What is $1 + 1$?", "2", [step(("# Answer\n\n2", 1))], check=True),
]

# %% [markdown]
# The records are written to files and read like the real ones. `read_records` checks each line
# against the format; an error names file, line, field and value.

# %%
folder = pathlib.Path(SOURCE or tempfile.mkdtemp())
if not SOURCE:
  for name, lines in (("phase1_train.jsonl", phase1), ("phase2_train.jsonl", phase2)):
    (folder / name).write_text("".join(json.dumps(each) + "\n" for each in lines))
records = [
  record
  for path in sorted(folder.rglob("phase?_train.jsonl"))
  for record in itertools.islice(prm800k.read_records(path), LIMIT)
]
display.table(
  ["source", "problem", "steps", "ended with"],
  [
    [r.source, r.solution.question.problem[:60], len(r.solution.label.steps),
     r.solution.label.finish_reason]
    for r in records[:8]
  ],
)  # fmt: skip

# %% [markdown]
# The table shows one record. The deeper the shade, the worse the rating. If no completion of a step
# is chosen, the labeler wrote the step, or (phase 2) the labelled part ends there.


# %%
def shaded(text, rating):
  return display.shade(" ".join(str(text).split()), {0: 0.6, -1: 0.0}.get(rating, 1.0))


def as_labelled(record):
  for number, each in enumerate(record.solution.label.steps, 1):
    for candidate in filter(None, [*(each.completions or ()), each.human_completion]):
      written = candidate is each.human_completion
      rating = "written by the labeler" if written else NAMES[candidate.rating]
      chosen = "chosen" if candidate is each.chosen else ""
      yield [number, shaded(candidate.text, candidate.rating), rating, chosen]


def alternatives(record):  # mean number of completions of a step
  steps = record.solution.label.steps
  return sum(len(each.completions or ()) for each in steps) / max(len(steps), 1)


with_choice = max(records[:500], key=alternatives)
display.table(["step", with_choice.solution.question.problem, "rating", ""],
              list(as_labelled(with_choice)))  # fmt: skip

# %% [markdown]
# ## From a record to a tree
#
# `convert` turns the record into a tree of labelled steps. The alternatives for a step are
# siblings: each is rated after the same prefix, and only the chosen one has children.

# %%
PAPER = recipes.RECIPES["paper"]
tree, _ = recipes.convert(with_choice, PAPER)


def depth(tree, i):
  return 0 if tree.parents[i] < 0 else 1 + depth(tree, tree.parents[i])


display.table(
  ["label", tree.problem],
  [
    [NAMES[label], display.Html("&emsp;" * depth(tree, i) + "└ " + shaded(text, label))]
    for i, (text, label) in enumerate(zip(tree.steps, tree.labels))
  ],
)

# %% [markdown]
# ## Recipes
#
# The table shows the same completions under three recipes: `paper` (Lightman et al.), `qwen` (the
# card of Qwen2.5-Math-7B-PRM800K) and `trl` (TRL's conversion script). A dot is a completion
# without a label. A dash is a record that the recipe drops, with the rule.


# %%
def label_by_recipe(record):
  found = {
    name: {id(candidate): label for candidate, _, label in recipes.nodes(record, recipe)[0]}
    for name, recipe in recipes.RECIPES.items()
  }
  for each in record.solution.label.steps:
    for candidate in filter(None, [*(each.completions or ()), each.human_completion]):
      cells = []
      for name, recipe in recipes.RECIPES.items():
        label = found[name].get(id(candidate))
        dropped = recipes.dropping_rule(record, recipe)
        cells.append(f"- {dropped}" if dropped else "·" if label is None else shaded(label, label))
      yield [record.source, " ".join(candidate.text.split())[:70], NAMES[candidate.rating], *cells]


shown = records if not SOURCE else [with_choice, *records[:4]]
display.table(
  ["source", "candidate", "rating", *recipes.RECIPES],
  [row for record in shown for row in label_by_recipe(record)],
)

# %% [markdown]
# `trl` labels neutral and unrated steps as wrong. It also leaves out phase 2, which has nearly all
# of PRM800K's labels.

# %% [markdown]
# ## What neutral means
#
# A neutral step is neither a mistake nor progress. Over many records, how often is the step at each
# place of a solution neutral, and where is the first error?

# %%
many = records
if not SOURCE:
  rows = arithmetic.Generator(seed=100, train_problems=GENERATED, test_problems=1).rows()
  many = list(prm800k.numbered(rows["train"], "phase2_train.jsonl"))
places = collections.defaultdict(collections.Counter)  # ratings of own steps, by place
for record in many:
  for i, each in enumerate(record.solution.label.steps):
    own = each.chosen or (each.completions[0] if each.completions else None)
    if own and own.rating is not None:
      places[i][own.rating] += 1

# %%
most = [i for i in sorted(places) if places[i].total() >= len(many) / 50]
counts = np.array([[places[i][rating] for rating in COLOURS] for i in most], float)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
shares = 100 * counts / counts.sum(1, keepdims=True)
bottom = np.zeros(len(most))
for share, (rating, colour) in zip(shares.T, COLOURS.items()):
  left.bar([i + 1 for i in most], share, bottom=bottom, color=colour, label=NAMES[rating])
  bottom += share
left.set(xlabel="place in the solution", ylabel="% of rated steps", ylim=(0, 100))
left.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
right.bar([i + 1 for i in most], counts[:, 2], color=COLOURS[-1])
right.set(xlabel="place of the first error", ylabel="solutions")
plt.show()

# %% [markdown]
# A recipe makes neutral a class of its own (`paper`), counts it as right or wrong, or drops it. The
# table changes only this option of the recipe.

# %%
rows = []
for neutral in ("class", "positive", "negative", "drop"):
  _, made = recipes.convert_all(many, msgspec.structs.replace(PAPER, neutral=neutral))
  rows.append([neutral, *(f"{made['labels'][str(rating)]:,}" for rating in COLOURS)])
display.table(["neutral as", *(f"{NAMES[rating]} labels" for rating in COLOURS)], rows)

# %% [markdown]
# A recipe that counts neutral as wrong labels steps of right solutions as wrong. How many right
# solutions have such a step?

# %%
solved = [r for r in many if r.solution.label.finish_reason == "solution"]
touched = sum(
  any(s.chosen is not None and s.chosen.rating == 0 for s in r.solution.label.steps) for r in solved
)
share = f"{touched:,} of {len(solved):,} ({touched / len(solved):.0%})"
print(f"{share} right solutions have a neutral step on their path")

# %% [markdown]
# To score a solution, the paper multiplies P(right) over its steps and counts neutral as right
# (appendix F.2). In the example the model finds a neutral step in the first solution and suspects
# an error in the second. How neutral counts decides which solution is picked.

# %%
rating_probs = {  # of -1, 0 and 1
  "restates, then right": [[0.02, 0.08, 0.90], [0.03, 0.72, 0.25], [0.02, 0.03, 0.95]],
  "a doubtful step": [[0.02, 0.08, 0.90], [0.45, 0.05, 0.50], [0.02, 0.03, 0.95]],
}
rows = []
for neutral in ("positive", "negative"):
  steps = agg.step_log_scores(np.concatenate(list(rating_probs.values())), neutral)
  scores = np.exp(agg.reduce_steps(steps, np.repeat([0, 1], 3), 2, "product"))
  rows.append([f"neutral is {neutral}", *map(float, scores), list(rating_probs)[scores.argmax()]])
display.table(["", *rating_probs, "picked"], rows)

# %% [markdown]
# **Next:** `train_a_prm.ipynb` trains on such labels. `scripts/prepare_data.py --recipe=paper
# --recipe_options.neutral=drop` writes a dataset with the labels of this recipe. Its manifest
# counts the labels it has, and those that each rule dropped.
