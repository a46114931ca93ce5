"""Special tokens in text for next-token training: read in prompts, plain text elsewhere."""

import json

import pytest

from prm_jax.input_pipeline import text_dataset, tokenizers


@pytest.fixture(scope="module", params=["tokenizer.model", "tokenizer.json"])
def tokenizer(request, arithmetic_data, tmp_path_factory):
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


def test_special_tokens_count_in_prompts_alone(tmp_path, tokenizer):
  """Spelled out in a prompt they are tokens; in a completion or a document, plain text."""
  (end,) = tokenizer.encode("</s>", special=True)
  found = tokens(tmp_path, tokenizer, prompt="a</s>b", completion="a</s>b")
  prompt, letters = tokenizer.encode("a</s>b", special=True), tokenizer.encode("a</s>b")
  begin, last = [tokenizer.bos_id], [tokenizer.eos_id]
  assert end in prompt and end not in letters
  assert found == begin + prompt + letters + last
  assert tokens(tmp_path, tokenizer, text="a</s>b") == begin + letters + last


def test_a_prompt_that_begins_a_sequence_begins_it_once(tmp_path, tokenizer):
  """A chat template writes the first token itself, and it is not added again."""
  written, plain = (
    tokens(tmp_path, tokenizer, prompt=prompt, completion="b") for prompt in ("<s>a", "a")
  )
  assert written == plain and written.count(tokenizer.bos_id) == 1
