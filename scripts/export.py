"""Exports a trained model to a directory that transformers and vLLM open.

  python scripts/export.py --checkpoint=runs/prm --output=exported

The directory has config.json, model.safetensors (or shards), the tokenizer, and the step-token
contract, in prm_jax.json and in config.json under "prm_jax".  With transformers:

  model = AutoModelForTokenClassification.from_pretrained("exported").eval()
  tokenizer = AutoTokenizer.from_pretrained("exported")

Lay out a sequence as "layout" in prm_jax.json describes.  Class probabilities are the softmax of
the logits at the contract's read positions; id2label has the classes in order.

--kind=causal-lm exports the trunk and the language-model head instead (a fine-tuned generator).
"""

import dataclasses
import json
import pathlib
import tempfile
from typing import Literal

from prm_jax import config as config_lib


@dataclasses.dataclass(frozen=True)
class Args:
  checkpoint: str  # work directory of train.py
  output: pathlib.Path  # a new directory
  step: str = "latest"  # of the checkpoint: "latest", "best" by train.best_metric, or a number
  kind: Literal["token-classification", "causal-lm"] = "token-classification"
  dtype: Literal["", "float32", "bfloat16"] = ""  # of the file's tensors; "": the parameters' own


def tokenizer_files(tokenizer) -> dict[str, bytes]:
  """The tokenizer's files by name, with a tokenizer_config.json for AutoTokenizer."""
  with tempfile.TemporaryDirectory() as directory:
    tokenizer.save(directory)
    files = {path.name: path.read_bytes() for path in sorted(pathlib.Path(directory).iterdir())}
  if "tokenizer_config.json" not in files:
    if "tokenizer.json" in files:
      config = _of_json(tokenizer, files["tokenizer.json"])
    else:
      config = _of_sentencepiece(tokenizer, files["tokenizer.model"])
    files["tokenizer_config.json"] = json.dumps(config, indent=2).encode()
  return files


def _of_json(tokenizer, data: bytes) -> dict:
  import tokenizers

  names = tokenizers.Tokenizer.from_buffer(data)
  ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
  known = {key: names.id_to_token(id) for key, id in ids.items() if id is not None}
  return {"tokenizer_class": "PreTrainedTokenizerFast", **known}


def _of_sentencepiece(tokenizer, data: bytes) -> dict:
  import sentencepiece

  model = sentencepiece.SentencePieceProcessor()
  model.LoadFromSerializedProto(data)
  ids = {"bos": model.bos_id(), "eos": model.eos_id(), "unk": model.unk_id()}
  return {
    "tokenizer_class": "LlamaTokenizer",
    "legacy": False,
    "add_bos_token": tokenizer.bos_id is not None,
    "add_eos_token": False,
    "add_prefix_space": model.EncodeAsPieces("a")[0].startswith("\u2581"),
    "clean_up_tokenization_spaces": False,
    **{f"{name}_token": model.IdToPiece(id) for name, id in ids.items() if id >= 0},
  }


def main() -> None:
  args = config_lib.parse(Args, __doc__)
  from prm_jax.pretrained import export
  from prm_jax.scoring import scorer
  from prm_jax.training import trainable

  try:
    export.refuse_existing(args.output)  # before restoring, which is slow
    _, about, tokenizer = scorer.newest(args.checkpoint)
    if args.kind == "token-classification":
      export.refuse_headless(about.contract)
    step, about, params, _ = scorer.restore(args.checkpoint, args.step)
    config = about.config.model
    export.write(
      args.output,
      trainable.merge_lora(params, config),
      dataclasses.replace(config, lora_rank=0),
      about.vocab_size,
      contract=about.contract if args.kind == "token-classification" else None,
      kind=args.kind,
      dtype=args.dtype or None,
      files=tokenizer_files(tokenizer),
      tokens={"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id},
    )
  except (ValueError, OSError) as error:
    raise SystemExit(f"export.py: {error}") from error
  size = sum(path.stat().st_size for path in args.output.iterdir())
  print(f"step {step} of {args.checkpoint}, {size / 1e6:,.1f} MB -> {args.output}")


if __name__ == "__main__":
  main()
