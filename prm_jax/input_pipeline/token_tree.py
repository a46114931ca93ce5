"""Encodes step trees as token trees: the model's input, and the positions that the head reads.

A sequence is  [bos] problem separator step separator step separator ...  Problem, steps and
separators are encoded apart: a separator always has the same tokens, and training and scoring agree
on where a step ends.  (ProcessBench pull request 12: 56.1 against 60.3 mean F1 for that alone.)
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from prm_jax.input_pipeline.tokenizers import Tokenizer
from prm_jax.types import CLASSES, StepContract, StepTree

READS = {  # by objective: the position at which a score is read
  "process": "last separator token",
  "outcome": "last solution token",
  "language_model": "nothing",
}


@dataclasses.dataclass(frozen=True)
class TokenTree:
  """A tree of tokens in preorder.

  Arrays are int32 unless noted.  Indices count from the tree's first token.
  """

  tokens: np.ndarray  # [t]
  positions: np.ndarray  # [t] depth
  subtree_end: np.ndarray  # [t] index just past the last descendant
  previous: np.ndarray  # [t] index of the parent; -1: not a language-model target
  read_positions: np.ndarray  # [r] where the head reads
  read_targets: np.ndarray | None = None  # float32 [r, C] weight of each class; None: zeros, C = 1
  read_solutions: np.ndarray | None = None  # [r] index of the labelled solution; None: zeros

  def __post_init__(self):
    reads = len(self.read_positions)
    for name, value in vars(self).items():
      if value is None:
        value = np.zeros((reads, 1) if name == "read_targets" else reads)
      dtype = np.float32 if name == "read_targets" else np.int32
      object.__setattr__(self, name, np.asarray(value, dtype))

  def __len__(self) -> int:
    return len(self.tokens)


def step_contract(
  tokenizer: Tokenizer,
  separator: str,
  objective: str,
  recipe: str,
  neutral: str = "positive",
  classes: Sequence[str] = CLASSES["process"],
  heads: int = 1,
) -> StepContract:
  """Returns the contract of a model that is trained with these settings.

  Args:
    classes: the classes of step labels; unused for other objectives.

  Raises:
    ValueError: the separator is empty, which only a language model may have.
  """
  ids = tuple(tokenizer.encode(separator))
  if not ids and objective != "language_model":
    raise ValueError(
      "the separator (of a run: data.separator) is empty: there is no token at which to read a step"
    )
  return StepContract(
    objective=objective,
    classes=tuple(classes) if objective == "process" else CLASSES[objective],
    separator=separator,
    separator_ids=ids,
    read=READS[objective],
    neutral=neutral,
    tokenizer_hash=tokenizer.hash,
    recipe=recipe,
    heads=heads,
  )


def encode(
  tree: StepTree,
  tokenizer: Tokenizer,
  contract: StepContract,
  evaluation: bool = False,
  number: int = 0,
) -> TokenTree:
  """Encodes a labelled solution, with the targets of the contract's objective.

  An outcome model is trained to predict the outcome at every token of the solution.

  Args:
    evaluation: read an outcome model at the last token only.
    number: index of the solution in its dataset.

  Raises:
    ValueError: the objective is "outcome" and the solution has none, or a label is not among the
      contract's classes.
  """
  tokens, step_ends = _lay_out(tree, tokenizer, contract)
  *_, previous = tokens
  if contract.objective == "process":
    labelled = [i for i, label in enumerate(tree.labels) if label is not None]
    reads = step_ends[labelled] - 1
    targets = [_target(tree.labels[i], contract.classes, tree.source) for i in labelled]
  elif tree.outcome is None:
    raise ValueError(f"{tree.source}: no outcome to train an outcome model on")
  else:
    reads = np.flatnonzero(np.array(previous) >= 0)[-1 if evaluation else 0 :]
    targets = [(not tree.outcome, tree.outcome)] * len(reads)
  targets = np.reshape(targets, (len(reads), len(contract.classes)))
  return TokenTree(*tokens, reads, targets, np.full(len(reads), number))


def _target(
  label: int | tuple[float, float], classes: Sequence[str], source: str
) -> Sequence[float]:
  """Returns the weight of each class, from a hard label or the weights of wrong and right."""
  weights = {"-1": label[0], "1": label[1]} if isinstance(label, tuple) else {str(label): 1.0}
  if unknown := weights.keys() - {*classes}:
    raise ValueError(f"{source}: label {unknown.pop()}, but the classes are {', '.join(classes)}")
  return [weights.get(name, 0.0) for name in classes]


def encode_candidate(
  problem: str, steps: Sequence[str], tokenizer: Tokenizer, contract: StepContract
) -> TokenTree:
  """Encodes a solution to score, read after each step (process) or at its end."""
  count = len(steps)
  tree = StepTree(problem, tuple(steps), tuple(range(-1, count - 1)), (None,) * count)
  tokens, step_ends = _lay_out(tree, tokenizer, contract)
  reads = (step_ends if contract.objective == "process" else step_ends[-1:]) - 1
  return TokenTree(*tokens, reads)


def chain(ids: Sequence[int], reads: Sequence[int] = (), first: int = 1) -> TokenTree:
  """Returns token ids as a tree without branches.

  Args:
    reads: positions at which the head reads; they have no targets.
    first: index of the first language-model target; token 0 is never one.
  """
  index = np.arange(len(ids))
  previous = np.where(index >= max(first, 1), index - 1, -1)
  subtree_end = np.full(len(ids), len(ids))
  return TokenTree(ids, index, subtree_end, previous, reads)


def _lay_out(
  tree: StepTree, tokenizer: Tokenizer, contract: StepContract
) -> tuple[tuple[Sequence[int], ...], np.ndarray]:
  """Returns the first four fields of a `TokenTree`, and the end of each step's separator `[S]`."""
  separator = list(contract.separator_ids)
  tokens = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  tokens += tokenizer.encode(tree.problem) + separator
  positions = list(range(len(tokens)))
  previous = [-1] * len(tokens)  # no language-model target in the problem
  ends = [len(tokens)]  # end of each node: the problem, then the steps
  for step, parent in zip(tree.steps, tree.parents):
    ids = tokenizer.encode(step) + separator
    last, start = ends[parent + 1] - 1, len(tokens)
    tokens += ids
    positions += range(positions[last] + 1, positions[last] + 1 + len(ids))
    previous += [last, *range(start, len(tokens) - 1)]
    ends.append(len(tokens))
  subtree_ends = np.array(ends)
  for node in range(len(tree.steps), 0, -1):
    parent = tree.parents[node - 1] + 1
    subtree_ends[parent] = max(subtree_ends[parent], subtree_ends[node])
  subtree_end = np.repeat(subtree_ends, np.diff(ends, prepend=0))
  return (tokens, positions, subtree_end, previous), np.array(ends[1:], int)
