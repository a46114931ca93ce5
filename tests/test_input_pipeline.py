"""Tokenizers, token trees, packing: text becomes rows without losing or moving anything."""

import dataclasses
import json

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from prm_jax.datasets import prm800k
from prm_jax.datasets.prm800k import recipes
from prm_jax.input_pipeline import packing, step_dataset, text_dataset, token_tree, tokenizers
from prm_jax.types import StepTree

CORPUS = ["Let $x = 12345$.", "So\n\n# Answer\n\n42", "  two  spaces\tand a tab", "π ≈ 3.14 ▁"] * 9


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
  path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
  return tokenizers.train_sentencepiece(CORPUS, path, vocab_size=400)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.text(max_size=20))
def test_text_round_trips(tokenizer, text, more):
  """decode(encode(x)) == x for any Unicode, and joining ids joins texts, so that steps and
  separators may be encoded apart."""
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert tokenizer.decode(ids + tokenizer.encode(more)) == text + more


def test_digits_and_newlines_are_tokens_of_their_own(tokenizer):
  """Numbers are read digit by digit, and a newline is never merged into a step."""
  assert len(tokenizer.encode("12345")) == 5
  assert len(tokenizer.encode("\n\n")) == 2


def test_training_a_tokenizer_is_deterministic(tokenizer, tmp_path):
  """The same corpus gives the same file: the hash in the step contract can be reproduced."""
  again = tokenizers.train_sentencepiece(CORPUS, tmp_path / "again.model", vocab_size=400)
  assert again.hash == tokenizer.hash


def test_other_files_are_refused(tmp_path):
  """A missing file says how to make one; another format is named as such."""
  with pytest.raises(FileNotFoundError, match=r"train_tokenizer\.py"):
    tokenizers.SentencePiece(tmp_path / "none.model")
  (tmp_path / "text.model").write_text("hello")
  with pytest.raises(ValueError, match="not a SentencePiece model"):
    tokenizers.SentencePiece(tmp_path / "text.model")


def test_layout_of_a_tree():
  """Preorder tokens, depth as position, and the read at each labelled step's separator."""
  tree = StepTree("p", ("a", "b", "cc"), (-1, -1, 1), (-1, None, 1))
  t = token_tree.encode(tree, tiny.TOKENIZER, tiny.contract())
  assert tiny.TOKENIZER.decode(t.tokens) == "p\na\nb\ncc\n"
  assert t.subtree_end.tolist() == [10, 10, 10, 5, 5, 10, 10, 10, 10, 10]
  assert (t.read_positions.tolist(), tiny.classes(t)) == ([4, 9], [0, 2])


@settings(max_examples=100, deadline=None)
@given(tiny.step_trees())
def test_visible_tokens_are_the_path(tree):
  """The rule j <= i < subtree_end[j] selects exactly the text before a token on its own path."""
  t = token_tree.encode(tree, tiny.TOKENIZER, tiny.contract())
  for chain in tiny.flatten(tree):
    alone = token_tree.encode(chain, tiny.TOKENIZER, tiny.contract())
    found = False
    for i in t.read_positions:
      seen = [j for j in range(i + 1) if i < t.subtree_end[j]]
      found |= t.tokens[seen].tolist() == alone.tokens.tolist()
      assert t.positions[seen].tolist() == list(range(len(seen)))
      assert all(t.previous[j] in (-1, seen[k - 1]) for k, j in enumerate(seen))
    assert found


def test_outcome_is_trained_on_every_solution_token():
  """The ORM has the solution's label at each of its tokens and at none of the problem's."""
  tree = StepTree("pp", ("a", "b"), (-1, 0), (None, None), outcome=True)
  t = token_tree.encode(tree, tiny.TOKENIZER, tiny.contract("outcome"))
  assert t.read_positions.tolist() == list(range(4, 8))
  assert {*tiny.classes(t)} == {1}
  with pytest.raises(ValueError, match="no outcome"):
    unknown = dataclasses.replace(tree, outcome=None, source="f:3")
    token_tree.encode(unknown, tiny.TOKENIZER, tiny.contract("outcome"))


def test_candidates_are_read_where_training_read():
  """Scoring and training agree on every read position: that is the step contract."""
  steps = ("a", "bb", "c")
  tree = StepTree("p", steps, (-1, 0, 1), (1, 1, -1), outcome=False)
  for objective in ("process", "outcome"):
    contract = tiny.contract(objective)
    trained = token_tree.encode(tree, tiny.TOKENIZER, contract)
    scored = token_tree.encode_candidate("p", steps, tiny.TOKENIZER, contract)
    np.testing.assert_array_equal(trained.tokens, scored.tokens)
    reads = trained.read_positions if objective == "process" else trained.read_positions[-1:]
    np.testing.assert_array_equal(reads, scored.read_positions)


def test_the_rows_hash_sees_structure():
  """A run is not resumed on rows with the same texts in another tree."""
  chain = StepTree("p", ("a", "b"), (-1, 0), (1, 1))
  siblings = dataclasses.replace(chain, parents=(-1, -1))
  encoded = (token_tree.encode(t, tiny.TOKENIZER, tiny.contract()) for t in (chain, siblings))
  assert len({packing.PackedRows([tree], 32).hash for tree in encoded}) == 2


def short_to_long(row_length):
  """Rows of solutions of one step, of 1 to 29 letters."""
  trees = [StepTree("p", ("a" * n,), (-1,), (1,)) for n in range(1, 30)]
  encoded = [token_tree.encode(tree, tiny.TOKENIZER, tiny.contract()) for tree in trees]
  return packing.PackedRows(encoded, row_length)


def test_a_share_of_the_evaluation_is_a_sample():
  """The plan puts long rows first, so a limited evaluation is spread over all rows."""
  rows = short_to_long(34)
  (part,) = packing.eval_order(rows, 8, limit=6)
  assert part[6:] == [packing.EMPTY] * 2 and not rows[packing.EMPTY]["tokens"].any()
  lengths = np.array([(rows[i]["tokens"] != 0).sum() for i in part[:6]])
  whole = np.mean([(rows[i]["tokens"] != 0).sum() for i in range(len(rows))])
  assert lengths.mean() == pytest.approx(whole, rel=0.2)


def test_rows_are_a_pure_function_of_their_index():
  """Rows are the same in any order of access and in another process; an epoch has each once."""
  rows = short_to_long(40)
  first, second = packing.shuffled(rows, 5), packing.shuffled(short_to_long(40), 5)
  for i in (17, 0, 3):
    np.testing.assert_array_equal(first[i]["tokens"], second[i]["tokens"])
  for epoch in range(3):
    seen = [first[epoch * len(rows) + i]["tokens"].tobytes() for i in range(len(rows))]
    assert len(set(seen)) == len(rows)


@pytest.fixture(scope="module", params=["tokenizer.model", "tokenizer.json"])
def either(request, arithmetic_data, tmp_path_factory):
  """A tokenizer with <s> and </s>, of each kind."""
  if request.param == "tokenizer.model":
    return tokenizers.load(arithmetic_data / request.param)
  library = pytest.importorskip("tokenizers", reason="it makes a tokenizer.json")
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
  """The ids of the one row that a line becomes."""
  path = tmp_path / "lines.jsonl"
  path.write_text(json.dumps(line) + "\n")
  rows, _ = text_dataset.load(path, tokenizer, 64)
  (piece,) = rows.trees
  return piece.tokens.tolist()


def test_special_tokens_count_in_prompts_alone(tmp_path, either):
  """Spelled out in a prompt they are tokens; in a completion or a document, plain text."""
  (end,) = either.encode("</s>", special=True)
  found = tokens(tmp_path, either, prompt="a</s>b", completion="a</s>b")
  prompt, letters = either.encode("a</s>b", special=True), either.encode("a</s>b")
  begin, last = [either.bos_id], [either.eos_id]
  assert end in prompt and end not in letters
  assert found == begin + prompt + letters + last
  assert tokens(tmp_path, either, text="a</s>b") == begin + letters + last


def test_a_prompt_that_begins_a_sequence_begins_it_once(tmp_path, either):
  """A chat template writes the first token itself, and it is not added again."""
  written, plain = (
    tokens(tmp_path, either, prompt=prompt, completion="b") for prompt in ("<s>a", "a")
  )
  assert written == plain and written.count(either.bos_id) == 1


@pytest.mark.shared_data
def test_real_rows_fill_97_percent(prm800k_sample, tmp_path):
  """A training epoch of the real sample at row length 2048 is at most 3 % padding."""
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
