"""Exports a trained model to a directory that transformers opens, with a model card.

  python scripts/export.py --checkpoint=runs/prm --output=exported

The directory has config.json, model.safetensors (or shards), the tokenizer, and the step-token
contract in prm_jax.json.  AutoModelForTokenClassification and AutoTokenizer open it.  Lay out a
sequence as "layout" in prm_jax.json says; id2label has the classes of the logits in order.
README.md is a model card: base and licence, data, contract, metrics (including those in
CHECKPOINT/evaluation.json, if evaluate.py judged the same step), and code that scores a step.

--kind=causal-lm exports the trunk and the language-model head instead (a fine-tuned generator).
"""

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import contextlib
import dataclasses
import json
import pathlib
from typing import Literal

from prm_jax import config as config_lib
from prm_jax.runtime import command_line


@dataclasses.dataclass(frozen=True)
class Args:
  checkpoint: str  # work directory of train.py
  output: pathlib.Path  # a new directory
  step: str = "latest"  # checkpoint step: "latest", "best" by train.best_metric, or a number
  kind: Literal["token-classification", "causal-lm"] = "token-classification"
  dtype: Literal["", "float32", "bfloat16"] = ""  # dtype of the tensors; "": the parameters' own


def tokenizer_files(tokenizer) -> dict[str, bytes]:
  """Returns the tokenizer's files by name, with a tokenizer_config.json for AutoTokenizer."""
  import sentencepiece
  import tokenizers

  files = tokenizer.files()
  if "tokenizer_config.json" in files:
    return files
  ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
  if "tokenizer.json" in files:
    name_of = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"]).id_to_token
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
  else:
    model = sentencepiece.SentencePieceProcessor(model_proto=files["tokenizer.model"])
    name_of, ids["unk_token"] = model.IdToPiece, model.unk_id()
    config = {
      "tokenizer_class": "LlamaTokenizer",
      "legacy": False,
      "add_bos_token": tokenizer.bos_id is not None,
      "add_eos_token": False,
      "add_prefix_space": model.EncodeAsPieces("a")[0].startswith("\u2581"),
      "clean_up_tokenization_spaces": False,
    }
  config |= {key: name_of(id) for key, id in ids.items() if id is not None}
  return files | {"tokenizer_config.json": json.dumps(config, indent=2).encode()}


def logged(workdir, step: int, split: str) -> dict | None:
  """Returns the metrics of a split at a step from metrics.jsonl, or None if it has none."""
  from prm_jax.runtime import json_lines

  with contextlib.suppress(OSError, ValueError):  # a kill may leave half a line
    for _, record in json_lines.records(workdir / "metrics.jsonl"):
      if record.get("step") == step and record.get("split") == split:
        return record
  return None


def card(args: Args, step: int, about, tokenizer) -> bytes:
  """Returns the README.md of the export."""
  from prm_jax.pretrained import model_card
  from prm_jax.runtime import json_lines, storage
  from prm_jax.training import checkpoint

  c, workdir = about.config, storage.path(args.checkpoint)
  bases, start = [], c.init.checkpoint
  while start:  # a run may start from another run
    bases.append(model_card.base_model(start))
    latest = checkpoint.latest(start) if len(bases) < 8 else None
    start = latest[1].config.init.checkpoint if latest else ""
  judged = json_lines.document_or_empty(workdir / "evaluation.json")
  model = judged.get("model")
  same_step = isinstance(model, dict) and model.get("checkpoint_step") == step
  data = {}
  if c.data.directory:
    data = json_lines.document_or_empty(storage.path(c.data.directory) / "manifest.json")
  text = pathlib.Path(c.data.text_train).name
  with contextlib.closing(checkpoint.Checkpointer(args.checkpoint)) as reader:
    info = reader.info(step)
  facts = model_card.Facts(
    name=args.output.absolute().name,
    kind=args.kind,
    step=step,
    config=c,
    contract=about.contract,
    bos_id=tokenizer.bos_id,
    tokenizer=tokenizer.kind,
    bases=bases,
    dataset=str(data.get("dataset", "") or text),
    manifest=json_lines.document_or_empty(workdir / "manifest.json"),
    # A preempted run saves first, and evaluates the step when it resumes.
    evaluation=info["evaluation"] or logged(workdir, step, c.data.eval_name),
    judged=judged if same_step else None,
    versions=info["versions"],
  )
  return model_card.write(facts).encode()


def main() -> None:
  args = command_line.parse(Args, __doc__)
  from prm_jax.model import sharding
  from prm_jax.pretrained import export
  from prm_jax.runtime import progress, storage
  from prm_jax.scoring import scorer
  from prm_jax.training import checkpoint, trainable

  # Refuse what cannot be exported before restoring it, which is slow.
  storage.refuse_existing(args.output)
  about, tokenizer = scorer.newest(args.checkpoint)
  contract = about.contract if args.kind == "token-classification" else None
  export.config_json(about.config.model, about.vocab_size, contract, args.kind, args.dtype, {})
  mesh = sharding.make_mesh(config_lib.Mesh())
  with progress.waiting(f"loading {args.checkpoint}"):
    step, about, params = checkpoint.restore_params(args.checkpoint, mesh, args.step)
  config = about.config.model
  with progress.waiting(f"writing {args.output}"):
    export.write(
      args.output,
      trainable.merge_lora(params, config, args.dtype or None),
      dataclasses.replace(config, lora_rank=0),
      about.vocab_size,
      contract=contract,
      kind=args.kind,
      dtype=args.dtype or None,
      files=tokenizer_files(tokenizer) | {"README.md": card(args, step, about, tokenizer)},
      tokens={"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id},
    )
  size = sum(path.stat().st_size for path in args.output.iterdir())
  print(f"step {step} of {args.checkpoint}, {size / 1e6:,.1f} MB -> {args.output}")


if __name__ == "__main__":
  exits.run(main)
