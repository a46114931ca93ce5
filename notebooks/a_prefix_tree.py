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
# # A prefix tree, and one rule of attention
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/prm_jax/blob/main/notebooks/a_prefix_tree.ipynb)
#
# Candidate solutions of a problem often begin with the same steps. In a prefix tree these steps are
# encoded once. One integer per token, `subtree_end`, defines the attention mask: token i attends to
# token j when `j <= i < subtree_end[j]`. This notebook draws the tree and the mask.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("prm_jax") is None:  # on Colab, or wherever it is not installed
  package = "prm_jax[train] @ git+https://github.com/OWNER/prm_jax"
  subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)

# %% tags=["parameters"]
SOLUTIONS = 8  # solutions in the drawn tree
MOST = 1024  # solutions sampled, for the curve of saved tokens
SEED = 3  # for the problem and its solutions

# %%
import dataclasses
import pathlib
import tempfile

import jax
import matplotlib.pyplot as plt
import numpy as np
import treescope
from flax import nnx
from matplotlib.patches import Rectangle
from treescope import rendering_parts as parts

from prm_jax.config import Model
from prm_jax.datasets import arithmetic
from prm_jax.evaluation import display
from prm_jax.input_pipeline import packing, prefix_tree, token_tree, tokenizers
from prm_jax.model.block_mask import TreeMask, active_blocks
from prm_jax.training import step as step_lib

COLOURS = {1: "#009E73", 0: "#E69F00", -1: "#D55E00"}  # by rating

# %% [markdown]
# ## The solutions
#
# The embedded domain generates a problem, and its simulated solver writes solutions. Each solution
# is a list of steps, and the domain knows which of them are right. The table counts the solutions.

# %%
rng = np.random.default_rng(SEED)
problem = arithmetic.make_problem(rng, level=5)
sampled = [arithmetic.solve(problem, rng) for _ in range(MOST)]
solutions = [[" ".join(text.split()) for text in each.steps] for each in sampled[:SOLUTIONS]]
display.table(
  [problem.text.replace("\n", ", "), ""],
  [
    [" | ".join(steps), solutions.count(steps)]
    for steps in map(list, dict.fromkeys(map(tuple, solutions)))
  ],
)

# %% [markdown]
# ## The tree
#
# Click a node to fold it. A node is a step, in the colour of its exact rating (green: right,
# yellow: neutral, red: wrong), with the number of solutions that pass through it. treescope draws
# the tree.


# %%
@dataclasses.dataclass
class Step:
  text: str
  rating: int = 1
  solutions: int = 0
  then: list["Step"] = dataclasses.field(default_factory=list)

  def __treescope_repr__(self, path, render):
    return parts.build_foldable_tree_node_from_children(
      prefix=parts.text(f"{self.text}   {self.solutions} of {root.solutions} "),
      children=[render(each, f"{path}.then[{i}]") for i, each in enumerate(self.then)],
      suffix=parts.text(""),
      path=path,
      background_color=COLOURS[self.rating] + "66",
      expand_state=parts.ExpandState.EXPANDED,
    )


root = Step(problem.text.replace("\n", ", "))
for solution in sampled[:SOLUTIONS]:
  node = root
  node.solutions += 1
  for text, rating in zip(solution.steps, solution.ratings):
    text = " ".join(text.split())
    child = next((each for each in node.then if each.text == text), None)
    if child is None:
      node.then.append(child := Step(text, rating))
    node = child
    node.solutions += 1
display.Html(treescope.render_to_html(root))

# %% [markdown]
# ## As tokens
#
# `encode_candidate` makes each solution a chain of tokens, and `merge` joins the chains. The tree
# is stored in preorder: every subtree is an interval of indices that ends at `subtree_end`.

# %%
folder = pathlib.Path(tempfile.mkdtemp())
texts = [problem.text, *(text for each in sampled for text in each.steps)]
tokenizers.train_sentencepiece(texts * 4, folder / "tokenizer.model", 300)
tokenizer = tokenizers.load(folder / "tokenizer.model")
contract = token_tree.step_contract(tokenizer, "\n", "process", "paper")


def chains(solutions):
  return [
    token_tree.encode_candidate(problem.text, each.steps, tokenizer, contract) for each in solutions
  ]


tree, indices = prefix_tree.merge(chains(sampled[:SOLUTIONS]))
print(f"{sum(map(len, chains(sampled[:SOLUTIONS])))} tokens path by path, {len(tree)} in the tree")

# %% [markdown]
# The upper figure shows each token as a bar from its own index j to `subtree_end[j]`, at its depth.
# The lower figure shows the mask: a key's column is dark for exactly the queries under its bar.

# %%
end = np.asarray(tree.subtree_end)
mask = np.asarray(TreeMask(end[None]).dense())[0]
figure, (above, below) = plt.subplots(
  2, 1, figsize=(7, 10), height_ratios=(2, 5), layout="constrained", sharex=True
)
depths = np.asarray(tree.positions)
reads = set(np.asarray(tree.read_positions).tolist())
for j, (stop, depth) in enumerate(zip(end, depths)):
  colour = "#D55E00" if j in reads else plt.cm.Blues(0.35 + 0.5 * (stop - j) / len(tree))
  above.add_patch(Rectangle((j, depth), stop - j, 0.9, color=colour, linewidth=0))
above.set(ylim=(depths.max() + 1, 0), ylabel="depth", title="token j spans j .. subtree_end[j]")
below.imshow(mask, cmap="Blues", vmax=1.4, extent=(0, len(tree), len(tree), 0), aspect="auto")
for read in reads:
  below.axhline(read + 0.5, color="#D55E00", alpha=0.25, linewidth=0.8)
below.set(xlabel="key j", ylabel="query i", title="i attends to j:  j <= i < subtree_end[j]")
plt.show()

# %% [markdown]
# Orange tokens are separators, at which a step ends and the head reads. Each attends to the problem
# and to the steps on its own path, but not to sibling branches. The next figure shows only their
# rows of the mask: hover over a cell for its indices.

# %%
at = np.sort(tree.read_positions)
treescope.render_array(mask[at].astype(int), rows=[0], columns=[1], vmin=-1, vmax=1)

# %% [markdown]
# ## The same numbers
#
# A transformer with random weights reads the tree in one pass, then each solution by itself. The
# hidden states agree up to rounding, because each token attends to the same tokens at the same
# positions.

# %%
config = Model(width=64, layers=3, heads=8, kv_heads=8, head_size=8, mlp_width=176)
params = step_lib.init_params(
  jax.random.key(SEED), config=config, vocab_size=tokenizer.vocab_size, num_classes=3
)
model = nnx.merge(step_lib.graph(config, tokenizer.vocab_size, 3), params)


@jax.jit
def hidden(tokens, positions, subtree_end):
  return model.hidden(tokens[None], positions[None], subtree_end[None])[0]


in_tree = hidden(tree.tokens, tree.positions, tree.subtree_end)
worst = 0.0
for chain, index in zip(chains(sampled[:SOLUTIONS]), indices):
  pad = np.arange(len(chain), len(tree))  # to one length, so that it compiles once
  alone = hidden(
    np.append(chain.tokens, 0 * pad),
    np.append(chain.positions, 0 * pad),
    np.append(chain.subtree_end, pad + 1),
  )[: len(chain)]
  worst = max(worst, float(abs(alone - in_tree[index]).max()))
print(
  f"largest difference of a hidden state: {worst:.1e}, of values up to {abs(in_tree).max():.1f}"
)

# %% [markdown]
# ## What it saves
#
# With more candidates, a smaller share of their tokens is new. Attention saves more than the rest
# of the network: sibling branches do not attend to each other, so most blocks of the mask are empty
# and skipped.

# %%
counts = [2**i for i in range(MOST.bit_length())]
rows = []
every = chains(sampled)
for count in counts:
  each = every[:count]
  merged = prefix_tree.merge(each)[0]
  padded = TreeMask(merged.subtree_end[None]).padded(-len(merged) % 16)
  active = active_blocks(padded, 16, 16)
  rows.append((sum(map(len, each)), len(merged), 16 * 16 * int(active.sum())))
paths, tokens, pairs = np.array(rows).T
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.loglog(counts, paths, color="#555555", base=2, label="path by path")
left.loglog(counts, tokens, color="#0072B2", base=2, label="in the tree")
left.set(xlabel="solutions", ylabel="tokens encoded")
left.legend(frameon=False)
right.semilogx(counts, 100 * pairs / tokens**2, "o-", color="#0072B2", base=2)
right.set(xlabel="solutions", ylabel="% of the tree's mask computed", ylim=(0, None))
plt.show()
print(f"{counts[-1]} solutions: {paths[-1] / tokens[-1]:.0f} times fewer tokens")

# %% [markdown]
# ## Many trees in a row
#
# Training packs trees of several problems into rows of one length. The trees of a row follow one
# another, and the same rule separates them. A padding token is a tree of its own.

# %%
trees = []
for level in (1, 2, 3, 4, 5):
  other = arithmetic.make_problem(rng, level)
  few = [arithmetic.solve(other, rng).steps for _ in range(4)]
  each = [token_tree.encode_candidate(other.text, steps, tokenizer, contract) for steps in few]
  trees.append(prefix_tree.merge(each)[0])
rows = packing.PackedRows(trees, row_length=256)
figure, panels = plt.subplots(1, len(rows), figsize=(4 * len(rows), 4), layout="constrained")
for i, axes in enumerate(np.atleast_1d(panels)):
  row = rows[i]["subtree_end"][None]
  axes.imshow(np.asarray(TreeMask(row).dense())[0], cmap="Blues", vmax=1.4)
  axes.set(title=f"row {i}: {len(rows.plan[i])} trees", xlabel="key j", ylabel="query i")
plt.show()
print(f"{rows.fill:.0%} of the slots hold tokens; {rows.repeated} tokens repeated by cuts")

# %% [markdown]
# [docs/trees.md](https://github.com/OWNER/prm_jax/blob/main/docs/trees.md) describes how trees are
# cut, which labels count as targets, and where the code is.
