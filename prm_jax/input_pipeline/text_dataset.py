"""Packs text into rows for next-token training, from JSON lines of documents or prompts.

A line is {"text": ...}, a document for further pre-training as in the paper's MathMix (section 2.2
and appendix A), or {"prompt": ..., "completion": ...}, for fine-tuning a generator with loss on the
completion only.  Other keys are ignored; a file may mix both kinds of lines.

A prompt may spell out the special tokens of a chat format (<|im_start|> and so on).  Completions
and documents are untrusted: in them the same characters are plain text.
"""

import pathlib
from typing import Any

from prm_jax.input_pipeline.packing import PackedRows
from prm_jax.input_pipeline.token_tree import TokenTree, chain
from prm_jax.input_pipeline.tokenizers import Tokenizer
from prm_jax.runtime import json_lines


def encode(
  prompt: str | None, text: str, tokenizer: Tokenizer, row_length: int
) -> tuple[list[TokenTree], int]:
  """Returns the chains of a line, each at most a row long, and the number of tokens cut off.

  A long document continues in further chains.  Each repeats the last token of the chain before it,
  so that every token but the document's first is predicted once.  A completion is cut at the row's
  end.  A prompt that begins with the tokenizer's BOS token does not get a second one.
  """
  begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  if prompt:
    ids = tokenizer.encode(prompt, special=True)
    begin = ids if begin and ids[:1] == begin else begin + ids
  end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
  tokens = begin + tokenizer.encode(text) + end
  if prompt is not None:
    piece = chain(tokens[:row_length], first=len(begin))
    return [piece] if (piece.previous >= 0).any() else [], max(len(tokens) - row_length, 0)
  starts = range(0, max(len(tokens) - 1, 1), max(row_length - 1, 1))
  pieces = [chain(tokens[start : start + row_length]) for start in starts]
  return [piece for piece in pieces if len(piece) > 1], 0


def load(
  path: str | pathlib.Path, tokenizer: Tokenizer, row_length: int, vocab_size: int
) -> tuple[PackedRows, dict[str, Any]]:
  """Returns the packed rows of a file, plain or .gz, and counts for the run's manifest.

  Args:
    vocab_size: number of tokens for which the model has an embedding.

  Raises:
    BadLine: a line has neither form, or a prompt spells out a token without an embedding.
    ValueError: the file has nothing to train on.
  """
  pieces, lines, cut = [], 0, []
  for number, _, record in json_lines.read(path):
    lines += 1
    where = f"{path}:{number}"
    keys = ("text",) if "text" in record else ("prompt", "completion")
    for key in keys:
      value = record.get(key)
      if not isinstance(value, str) or (key != "prompt" and not value):
        raise json_lines.BadLine(
          f'{where}: "{key}" is {json_lines.show(value)}; a line has "text", or "prompt" and '
          '"completion", each a text'
        )
    prompt = record["prompt"] if len(keys) == 2 else None
    encoded, lost = encode(prompt, record[keys[-1]], tokenizer, row_length)
    if missing := [id for piece in encoded for id in piece.tokens if id >= vocab_size]:
      text = f"the prompt spells out token {missing[0]}, but the model embeds only {vocab_size}"
      raise json_lines.BadLine(f"{where}: {text}")
    pieces += encoded
    if lost:
      cut.append({"source": where, "tokens": row_length + lost, "tokens_lost": lost})
  if not pieces:
    raise ValueError(f"{path}: nothing to train on in {lines} lines with rows of {row_length}")
  rows = PackedRows(pieces, row_length)
  return rows, rows.manifest() | {
    "examples": lines,
    "targets": {"tokens": int(sum((piece.previous >= 0).sum() for piece in pieces))},
    "longer_than_a_row": cut,
  }
