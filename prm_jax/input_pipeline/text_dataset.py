"""Text to packed rows for next-token training, from JSON lines of documents or of prompts.

A line is {"text": ...}, a document for further pre-training as in the paper's MathMix (section 2.2
and appendix A), or {"prompt": ..., "completion": ...}, for fine-tuning a generator with loss on the
completion only.  Other keys are ignored; a file may have lines of both kinds.

A prompt may spell out the special tokens of a chat format (<|im_start|> and so on).  In completions
and documents, which others wrote, the same characters are plain text.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

from prm_jax.input_pipeline.packing import PackedRows
from prm_jax.input_pipeline.token_tree import TokenTree, chain
from prm_jax.input_pipeline.tokenizers import Tokenizer
from prm_jax.runtime import json_lines
from prm_jax.types import CLASSES, StepContract


def contract(tokenizer: Tokenizer) -> StepContract:
  """The contract of a model without a trained class head, which cannot score."""
  return StepContract(
    objective="language_model",
    classes=CLASSES["language_model"],
    separator="",
    separator_ids=(),
    read="nothing",
    neutral="positive",
    tokenizer_hash=tokenizer.hash,
    recipe="text",
  )


def read(path: str | pathlib.Path) -> Iterator[tuple[str, str | None, str]]:
  """("FILE:LINE", prompt or None, text) of each line of a file, plain or .gz.

  Raises:
    BadLine: a line has neither form, or a value is not a text.
    OSError: the file cannot be read.
  """
  for number, _, record in json_lines.read(path):
    where = f"{path}:{number}"
    keys = ("prompt", "completion") if "text" not in record else ("text",)
    for key in keys:
      value = record.get(key)
      if not isinstance(value, str) or (key != "prompt" and not value):
        raise json_lines.BadLine(
          f'{where}: "{key}" is {json_lines.show(value)}; a line has "text", or "prompt" and '
          '"completion", each a text'
        )
    yield where, record.get("prompt") if len(keys) == 2 else None, record[keys[-1]]


def encode(
  prompt: str | None, text: str, tokenizer: Tokenizer, row_length: int, special: bool = False
) -> tuple[list[TokenTree], int]:
  """The chains of a line, each at most a row long, and how many of its tokens did not fit.

  A document, with the tokenizer's first and last token if it has them, goes on in further chains,
  each of which repeats the last token of the one before: every token but the document's first is
  predicted once.  A completion is cut at the end of a row.

  Args:
    special: read special tokens that the prompt spells out as such; the tokenizer's first token is
      not added to a prompt that begins with it.
  """
  begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  if prompt:
    ids = tokenizer.encode(prompt, special=True) if special else tokenizer.encode(prompt)
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
  path: str | pathlib.Path, tokenizer: Tokenizer, row_length: int
) -> tuple[PackedRows, dict[str, Any]]:
  """Packed rows of a file, and counts for the run's manifest.

  Raises:
    ValueError: nothing in the file can be trained on; or as `read`.
  """
  pieces, lines, cut = [], 0, []
  for where, prompt, text in read(path):
    lines += 1
    encoded, lost = encode(prompt, text, tokenizer, row_length, special=True)
    pieces += encoded
    if lost:
      cut.append({"source": where, "tokens_lost": lost})
  if not pieces:
    raise ValueError(f"{path}: nothing to train on in {lines} lines with rows of {row_length}")
  rows = PackedRows(pieces, row_length)
  return rows, {
    "examples": lines,
    "tokens": sum(len(piece) for piece in pieces),
    "targets": {"tokens": int(sum((piece.previous >= 0).sum() for piece in pieces))},
    "rows": len(rows),
    "row_length": row_length,
    "fill": rows.fill,
    "longer_than_a_row": cut,
    "rows_hash": rows.hash,
  }
