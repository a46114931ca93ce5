"""Prefix trees and packed rows hold every distinct token and every label once, in its place."""

import collections
import dataclasses

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from prm_jax.input_pipeline import packing, prefix_tree, step_dataset, token_tree
from prm_jax.types import StepTree


@st.composite
def solutions(draw, most: int = 4, max_steps: int = 6) -> list[token_tree.TokenTree]:
  """Draws token trees of solutions of one problem, which often share a prefix."""
  drawn = draw(st.lists(tiny.step_trees(max_steps), min_size=1, max_size=most))
  return [encode(dataclasses.replace(tree, problem="ab")) for tree in drawn]


def encode(tree: StepTree, objective: str = "process") -> token_tree.TokenTree:
  """The token tree of a step tree."""
  return token_tree.encode(tree, tiny.TOKENIZER, tiny.contract(objective))


def path(tree: token_tree.TokenTree, i: int) -> tuple[int, ...]:
  """The token ids from the root to token i."""
  return tuple(tree.tokens[: i + 1][tree.subtree_end[: i + 1] > i].tolist())


def reads(tree: token_tree.TokenTree) -> list[tuple[tuple[int, ...], int]]:
  """The text before each read, and its target."""
  targets = zip(tree.read_positions.tolist(), tiny.classes(tree))
  return [(path(tree, i), target) for i, target in targets]


def check(tree: token_tree.TokenTree) -> None:
  """Asserts that a tree is well formed: preorder, depths, parents, sorted reads, dtypes."""
  index = np.arange(len(tree))
  assert np.all(tree.subtree_end > index) and np.all(tree.subtree_end <= len(tree))
  for i in index:
    above = np.flatnonzero(tree.subtree_end[:i] > i)
    assert tree.positions[i] == len(above)
    assert np.all(tree.subtree_end[above] >= tree.subtree_end[i])
    assert tree.previous[i] == -1 or tree.previous[i] == above[-1]
  assert np.all(np.diff(tree.read_positions) >= 0)
  dtypes = dict.fromkeys(vars(tree), np.int32) | {"read_targets": np.float32}
  assert {name: value.dtype for name, value in vars(tree).items()} == dtypes


# Chains of few distinct ids: single tokens, different first tokens, duplicates, prefixes.
IDS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
CHAINS = st.lists(IDS.map(lambda ids: token_tree.chain(ids, reads=[len(ids) - 1])), min_size=1)


@settings(max_examples=200, deadline=None)
@given(solutions() | CHAINS)
def test_a_merged_tree_has_every_prefix_once(trees):
  """A merged tree has each distinct prefix once, as a target once, and large subtrees first."""
  merged, places = prefix_tree.merge(trees)
  check(merged)
  prefixes = [path(merged, i) for i in range(len(merged))]
  expected = {path(tree, i) for tree in trees for i in range(len(tree))}
  assert len(prefixes) == len(expected) and set(prefixes) == expected
  for tree, place in zip(trees, places):
    assert [prefixes[i] for i in place] == [path(tree, i) for i in range(len(tree))]
  predicted = {path(tree, i) for tree in trees for i in np.flatnonzero(tree.previous >= 0)}
  assert {prefixes[i] for i in np.flatnonzero(merged.previous >= 0)} == predicted
  branches = collections.defaultdict(list)
  for i, prefix in enumerate(prefixes):
    branches[prefix[:-1]].append(int(merged.subtree_end[i]) - i)
  assert all(sizes == sorted(sizes, reverse=True) for sizes in branches.values())


@settings(max_examples=100, deadline=None)
@given(solutions())
def test_merging_keeps_each_step_and_rating_once(trees):
  """A merged tree reads each distinct (step, rating) pair once, or all with `every_read`."""
  every = [read for tree in trees for read in reads(tree)]
  assert collections.Counter(reads(prefix_tree.merge(trees)[0])) == collections.Counter(set(every))
  all_kept = reads(prefix_tree.merge(trees, every_read=True)[0])
  assert collections.Counter(all_kept) == collections.Counter(every)


@settings(max_examples=100, deadline=None)
@given(solutions())
def test_sequences_are_the_paths_of_a_tree(trees):
  """`sequences` returns one chain per leaf, and all chains together have each read once."""
  merged, _ = prefix_tree.merge(trees)
  chains = prefix_tree.sequences([merged])
  leaves = np.flatnonzero(merged.subtree_end == np.arange(len(merged)) + 1)
  assert [tuple(c.tokens.tolist()) for c in chains] == [path(merged, i) for i in leaves]
  for c in chains:
    check(c)
    assert np.all(c.subtree_end == len(c))
  assert [read for c in chains for read in reads(c)] == reads(merged)
  targets = sum(int((c.previous >= 0).sum()) for c in chains)
  assert targets == (merged.previous >= 0).sum()


@settings(max_examples=100, deadline=None)
@given(st.lists(solutions(), min_size=1, max_size=5), st.integers(20, 60))
def test_rows_hold_every_read_once_behind_its_own_path(groups, row_length):
  """However trees are cut, rows hold each read once after its own path; `by_tree` unpacks them."""
  merged = []
  for i, trees in enumerate(groups):  # another first token for each problem
    tree, _ = prefix_tree.merge(trees)
    tokens = np.concatenate([[300 + i], tree.tokens[1:]]).astype(np.int32)
    tree = prefix_tree.shorten(dataclasses.replace(tree, tokens=tokens), row_length)
    if len(tree.read_targets):
      merged.append(tree)
  packed = packing.PackedRows(merged, row_length)
  assert packed.plan == packing.PackedRows(merged, row_length).plan
  row_reads = []
  rows = [packed[i] for i in range(len(packed))]
  for row in rows:
    kept = row["read_targets"].any(-1)
    unpadded = {name: row[name][kept] for name in row if name.startswith("read_")}
    row_reads += reads(token_tree.TokenTree(**row | unpadded))
  tokens = sum((row["tokens"] != 0).sum() for row in rows)
  targets = packed.by_tree(np.stack([row["read_targets"] for row in rows])) if rows else []
  assert [x.tolist() for x in targets] == [tree.read_targets.tolist() for tree in merged]
  tree_reads = [read for tree in merged for read in reads(tree)]
  assert collections.Counter(row_reads) == collections.Counter(tree_reads)
  assert tokens == sum(map(len, merged)) + packed.repeated
  assert packed.fill == pytest.approx(tokens / (len(packed) * row_length))


def test_a_tree_is_cut_where_it_repeats_the_fewest_tokens():
  """A tree with a deep and a shallow branch point is cut at the shallow one."""
  tree = encode(StepTree("p", ("aa", "bb", "cc", "d"), (-1, 0, 0, -1), (1, 1, 1, 1)))
  assert len(tree) == 14
  packed = packing.PackedRows([tree], 12)
  assert packed.repeated == len("_p\n") and len(packed) == 2


def test_a_path_longer_than_a_row_is_an_error():
  """Packing a path that is longer than a row is an error that names the example and its length."""
  with pytest.raises(ValueError, match="example 0 has a path of 7 tokens, but a row holds 6"):
    packing.PackedRows([encode(StepTree("p", ("aaa",), (-1,), (1,)))], 6)


@settings(max_examples=100, deadline=None)
@given(solutions(), st.integers(1, 20))
def test_shortening_keeps_exactly_the_reads_within_the_length(trees, longest):
  """`shorten` keeps the reads within the length and the paths to them, and no other token."""
  merged, _ = prefix_tree.merge(trees)
  short = prefix_tree.shorten(merged, longest)
  check(short)
  assert reads(short) == [(text, target) for text, target in reads(merged) if len(text) <= longest]
  assert {path(short, i) for i in range(len(short))} == {
    text[:end] for text, _ in reads(short) for end in range(1, len(text) + 1)
  }


def pack(examples, row_length, objective="process", **kwargs):
  """The packed rows of step trees, and their part of the run's manifest."""
  contract = tiny.contract(objective)
  return step_dataset.pack(examples, tiny.TOKENIZER, contract, row_length, **kwargs)


def test_a_long_example_is_cut_at_a_step_and_reported():
  """A path longer than a row loses its last steps, keeps the other labels and is reported."""
  tree = StepTree("p", ("aaaa", "bbbb", "cccc"), (-1, 0, 1), (1, 0, -1), source="f:3")
  rows, about = pack([tree], 13)
  assert tiny.TOKENIZER.decode(rows.trees[0].tokens) == "p\naaaa\nbbbb\n"
  assert tiny.classes(rows.trees[0]) == [2, 1]
  assert about["longer_than_a_row"] == [{"source": "f:3", "tokens": 18, "targets_lost": 1}]
  context = dataclasses.replace(tree, labels=(1, None, -1))
  assert len(pack([context], 13)[0].trees[0]) == len("_p\naaaa\n")
  with pytest.raises(ValueError, match=r"none of 1 .* of 5 tokens: --config\.data\.row_length=32 "):
    pack([tree], 5)
  with pytest.raises(ValueError, match="none of 1 process examples has a label"):
    pack([dataclasses.replace(tree, labels=(None, None, None))], 64)


def test_a_solution_longer_than_a_row_is_no_outcome_example():
  """A solution that does not fit a row is left out of outcome training, because its answer would
  be missing."""
  tree = StepTree("p", ("aaaa", "bbbb"), (-1, 0), (None, None), outcome=True)
  short = dataclasses.replace(tree, steps=("a", "b"))
  rows, about = pack([tree, short], 10, "outcome")
  assert tiny.TOKENIZER.decode(rows.trees[0].tokens) == "p\na\nb\n"
  assert about["longer_than_a_row"][0]["targets_lost"] == 10


def test_a_shared_token_has_the_outcome_of_each_solution():
  """A token that several solutions share has one outcome target for each of them."""
  examples = [StepTree("p", ("a", x), (-1, 0), (None, None), outcome=x == "b") for x in "bbc"]
  (tree,) = pack(examples, 64, "outcome")[0].trees
  assert np.array(tiny.classes(tree))[tree.read_positions == 3].tolist() == [0, 1, 1]
  (tree,) = pack(examples, 64, "outcome", evaluation=True)[0].trees
  assert sorted(tiny.classes(tree)) == [0, 1, 1]


def test_the_manifest_counts_shared_and_repeated_tokens():
  """The manifest counts tokens in trees, in separate paths, and those that cutting repeats."""
  both = [StepTree("p", ("aa", step), (-1, 0), (1, 1)) for step in ("bb", "cc")]
  _, about = pack(both, 64)
  assert (about["tokens"], about["tokens_of_paths"], about["examples"]) == (12, 18, 2)
  assert about["targets"] == {"-1": 0, "0": 0, "1": 3}  # "aa" is one step
  assert about["tokens_repeated_by_cuts"] == 0
  assert pack(both, 9)[1]["tokens_repeated_by_cuts"] == len("_p\naa\n")
