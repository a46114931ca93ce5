"""Tokenizers, token trees and packing: rows hold every token of a text, in its place."""

import dataclasses
import json

import numpy as np
import pytest
import tiny
import tokenizers as library
from hypothesis import given, settings
from hypothesis import strategies as st

from prm_jax.datasets import prm800k
from prm_jax.datasets.prm800k import recipes
from prm_jax.input_pipeline import packing, step_dataset, text_dataset, token_tree, tokenizers
from prm_jax.types import StepTree

CORPUS = ["Let $x = 12345$.", "So\n\n# Answer\n\n42", "  two  spaces\tand a tab", "π ≈ 3.14 ▁"] * 9


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  """A tokenizer trained on CORPUS."""
  path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
  return tokenizers.train_sentencepiece(CORPUS, path, vocab_size=400)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.text(max_size=20))
def test_text_round_trips(tokenizer, text, more):
  """Any Unicode text survives encoding and decoding, and joined ids decode to the joined texts."""
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert tokenizer.decode(ids + tokenizer.encode(more)) == text + more


def test_digits_and_newlines_are_tokens_of_their_own(tokenizer):
  assert len(tokenizer.encode("12345")) == 5
  assert len(tokenizer.encode("\n\n")) == 2


def test_a_large_corpus_is_thinned_evenly(tmp_path, monkeypatch):
  """Of a corpus over the limit every second text is used, not a sample that differs each time."""
  monkeypatch.setattr(tokenizers, "MOST_TEXTS", 300)
  texts = [f"{i} {CORPUS[i % 4]}" for i in range(600)]
  files = tmp_path / "all.model", tmp_path / "half.model"
  for used, file in zip((texts, texts[::2]), files):
    tokenizers.train_sentencepiece(used, file, vocab_size=400)
  assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("parents", [(-1, -1, 0), (-1, 1), (0,), (-1, 0, -1, 1)])
def test_steps_that_are_not_in_preorder_are_an_error(parents):
  """Else a step would attend to another branch."""
  with pytest.raises(ValueError, match="steps must be in preorder"):
    StepTree("p", ("a",) * len(parents), parents, (1,) * len(parents))


def test_a_tree_is_in_preorder_and_read_at_separators():
  """Tokens are in preorder, and each labelled step is read at its separator."""
  tree = StepTree("p", ("a", "b", "cc"), (-1, -1, 1), (-1, None, 1))
  t = token_tree.encode(tree, tiny.TOKENIZER, tiny.contract())
  assert tiny.TOKENIZER.decode(t.tokens) == "p\na\nb\ncc\n"
  assert t.subtree_end.tolist() == [10, 10, 10, 5, 5, 10, 10, 10, 10, 10]
  assert (t.read_positions.tolist(), tiny.classes(t)) == ([4, 9], [0, 2])


@settings(max_examples=100, deadline=None)
@given(tiny.step_trees())
def test_visible_tokens_are_the_path(tree):
  """A token sees exactly the tokens before it on its own path, by j <= i < subtree_end[j]."""
  t = token_tree.encode(tree, tiny.TOKENIZER, tiny.contract())
  for chain in tiny.flatten(tree):
    alone = token_tree.encode(chain, tiny.TOKENIZER, tiny.contract())
    matches = False
    for i in t.read_positions:
      seen = [j for j in range(i + 1) if i < t.subtree_end[j]]
      matches |= t.tokens[seen].tolist() == alone.tokens.tolist()
      assert t.positions[seen].tolist() == list(range(len(seen)))
      assert all(t.previous[j] in (-1, seen[k - 1]) for k, j in enumerate(seen))
    assert matches


def test_outcome_is_trained_on_every_solution_token():
  """An outcome model is trained on every token of the solution and on none of the problem."""
  tree = StepTree("pp", ("a", "b"), (-1, 0), (None, None), outcome=True)
  t = token_tree.encode(tree, tiny.TOKENIZER, tiny.contract("outcome"))
  assert t.read_positions.tolist() == list(range(4, 8))
  assert {*tiny.classes(t)} == {1}
  with pytest.raises(ValueError, match="no outcome"):
    unknown = dataclasses.replace(tree, outcome=None, source="f:3")
    token_tree.encode(unknown, tiny.TOKENIZER, tiny.contract("outcome"))


def test_scoring_and_training_read_the_same_positions():
  """A candidate is scored at the positions at which training reads its steps."""
  steps = ("a", "bb", "c")
  tree = StepTree("p", steps, (-1, 0, 1), (1, 1, -1), outcome=False)
  for objective in ("process", "outcome"):
    contract = tiny.contract(objective)
    trained = token_tree.encode(tree, tiny.TOKENIZER, contract)
    scored = token_tree.encode_candidate("p", steps, tiny.TOKENIZER, contract)
    np.testing.assert_array_equal(trained.tokens, scored.tokens)
    reads = trained.read_positions if objective == "process" else trained.read_positions[-1:]
    np.testing.assert_array_equal(reads, scored.read_positions)


def test_the_hash_of_rows_depends_on_the_tree():
  """Rows with the same texts in another tree have another hash, so no run resumes on them."""
  chain = StepTree("p", ("a", "b"), (-1, 0), (1, 1))
  siblings = dataclasses.replace(chain, parents=(-1, -1))
  encoded = (token_tree.encode(t, tiny.TOKENIZER, tiny.contract()) for t in (chain, siblings))
  assert len({packing.PackedRows([tree], 32).hash for tree in encoded}) == 2


def short_to_long(row_length):
  """Packed rows of one-step solutions of 1 to 29 letters."""
  trees = [StepTree("p", ("a" * n,), (-1,), (1,)) for n in range(1, 30)]
  encoded = [token_tree.encode(tree, tiny.TOKENIZER, tiny.contract()) for tree in trees]
  return packing.PackedRows(encoded, row_length)


def test_a_limited_evaluation_takes_rows_of_all_lengths():
  """A limited evaluation is spread over all rows, although the plan puts long rows first."""
  rows = short_to_long(34)
  (part,) = packing.eval_order(rows, 8, limit=6)
  assert part[6:] == [packing.EMPTY] * 2 and not rows[packing.EMPTY]["tokens"].any()
  lengths = np.array([(rows[i]["tokens"] != 0).sum() for i in part[:6]])
  whole = np.mean([(rows[i]["tokens"] != 0).sum() for i in range(len(rows))])
  assert lengths.mean() == pytest.approx(whole, rel=0.2)


def test_rows_are_a_pure_function_of_their_index():
  """A row depends only on its index, not on the order of access; an epoch has each row once."""
  rows = short_to_long(40)
  first, second = packing.shuffled(rows, 5), packing.shuffled(short_to_long(40), 5)
  for i in (17, 0, 3):
    np.testing.assert_array_equal(first[i]["tokens"], second[i]["tokens"])
  for epoch in range(3):
    seen = [first[epoch * len(rows) + i]["tokens"].tobytes() for i in range(len(rows))]
    assert len(set(seen)) == len(rows)


@pytest.fixture(scope="module", params=["tokenizer.model", "tokenizer.json"])
def either(request, arithmetic_data, tmp_path_factory):
  """A tokenizer of each kind with the special tokens <s> and </s>."""
  if request.param == "tokenizer.model":
    return tokenizers.load(arithmetic_data / request.param)
  letters = {letter: i for i, letter in enumerate("<s>/ab", start=2)}
  made = library.Tokenizer(library.models.BPE({"<s>": 0, "</s>": 1} | letters, []))
  made.add_special_tokens(["<s>", "</s>"])
  made.post_processor = library.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
  directory = tmp_path_factory.mktemp("tokenizer")
  made.save(str(directory / request.param))
  names = {"bos_token": "<s>", "eos_token": "</s>"}
  (directory / "tokenizer_config.json").write_text(json.dumps(names))
  return tokenizers.load(directory)


def tokens(tmp_path, tokenizer, **line):
  """The token ids of a text dataset with one line."""
  path = tmp_path / "lines.jsonl"
  path.write_text(json.dumps(line) + "\n")
  rows, _ = text_dataset.load(path, tokenizer, 64, tokenizer.vocab_size)
  (piece,) = rows.trees
  return piece.tokens.tolist()


def test_special_tokens_are_parsed_only_in_prompts(tmp_path, either):
  """A special token spelled out in a prompt is a token; in completions and documents it is text."""
  (end,) = either.encode("</s>", special=True)
  prompt, letters = either.encode("a</s>b", special=True), either.encode("a</s>b")
  begin, last = [either.bos_id], [either.eos_id]
  assert end in prompt and end not in letters
  ids = tokens(tmp_path, either, prompt="a</s>b", completion="a</s>b")
  assert ids == begin + prompt + letters + last
  assert tokens(tmp_path, either, text="a</s>b") == begin + letters + last


def test_the_first_token_is_not_added_twice(tmp_path, either):
  """A prompt that begins with the first token, as chat templates write it, gets no second one."""
  written, plain = (
    tokens(tmp_path, either, prompt=prompt, completion="b") for prompt in ("<s>a", "a")
  )
  assert written == plain and written.count(either.bos_id) == 1


@pytest.mark.shared_data
def test_rows_of_real_solutions_are_97_percent_full(prm800k_sample, tmp_path):
  """Rows of 2048 tokens of the real sample are at most 3 % padding, and its texts round-trip."""
  files = [prm800k_sample / f"phase{phase}_train.jsonl" for phase in (1, 2)]
  records = [record for path in files for record in prm800k.read_records(path)]
  solutions, _ = recipes.convert_all(records, recipes.RECIPES["paper"])
  text = [part for tree in solutions for part in (tree.problem, *tree.steps)]
  tokenizer = tokenizers.train_sentencepiece(text, tmp_path / "t.model", vocab_size=2000)
  contract = token_tree.step_contract(tokenizer, "\n\n", "process", "paper")
  for merge in (True, False):
    rows, about = step_dataset.pack(solutions, tokenizer, contract, 2048, merge)
    assert rows.fill >= 0.97 and not about["longer_than_a_row"]
  assert all(tokenizer.decode(tokenizer.encode(part)) == part for part in text)
