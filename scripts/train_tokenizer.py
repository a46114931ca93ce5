"""Trains a SentencePiece tokenizer on the training texts of a prepared dataset.

  python scripts/train_tokenizer.py --data=data/prm800k --output=data/prm800k/tokenizer.model \\
    --vocab_size=8000
"""

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import dataclasses
import pathlib

from prm_jax import config as config_lib
from prm_jax.runtime import command_line


@dataclasses.dataclass(frozen=True)
class Args(config_lib.Checked):
  data: pathlib.Path  # output of prepare_data.py
  output: pathlib.Path  # model file to write
  vocab_size: int = 8000  # upper bound, at least 300
  max_rows: config_lib.Count = 20_000  # maximum number of records to read


def main() -> None:
  args = command_line.parse(Args, __doc__)
  from prm_jax.input_pipeline import step_dataset, tokenizers
  from prm_jax.runtime import progress

  texts = step_dataset.texts(args.data, "train", args.max_rows)
  with progress.waiting(f"training a tokenizer on {args.data}"):
    tokenizer = tokenizers.train_sentencepiece(texts, args.output, args.vocab_size)
  print(f"{tokenizer.vocab_size} pieces, sha256 {tokenizer.hash[:16]}... -> {args.output}")


if __name__ == "__main__":
  exits.run(main)
