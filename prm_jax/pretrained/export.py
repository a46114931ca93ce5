"""Writes a trained model as a directory that transformers opens; vLLM documents the same layout.

The directory holds `config.json`, `model.safetensors` (or shards) and the tokenizer's files.  The
step-token contract is in `prm_jax.json`, and in config.json under "prm_jax".
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from prm_jax import config as config_lib
from prm_jax.model import decoder
from prm_jax.pretrained import families, safetensors_files, weights
from prm_jax.runtime import json_lines, storage
from prm_jax.types import StepContract

CONTRACT = "prm_jax.json"
Kind = Literal["token-classification", "causal-lm"]
CLASSES = {"token-classification": "ForTokenClassification", "causal-lm": "ForCausalLM"}
# token_tree.encode_candidate in words, for readers without this package.
_PARTS = (
  "token ids: bos_token_id (if the model has one), the problem, separator_ids, then each step "
  "followed by separator_ids; problem and steps are encoded apart, without special tokens; "
)
LAYOUTS = {
  "process": _PARTS + "softmax of the logits at the last of the separator_ids after each step",
  "outcome": _PARTS + "softmax of the logits at the last token of all",
}


def config_json(
  config: config_lib.Model,
  vocab_size: int,
  contract: StepContract | None,
  kind: Kind,
  dtype: str,
  tokens: Mapping[str, int | None],
) -> dict[str, Any]:
  """Returns the config.json of an export, of the first family that can express the configuration.

  Its arguments are those of `write`.

  Raises:
    ValueError: the model has no step head, no family has this configuration, or transformers has no
      class of this kind for it.
  """
  if contract is not None and contract.objective not in LAYOUTS:
    raise ValueError(
      f"objective {contract.objective!r} has no step head; export it with --kind=causal-lm"
    )
  problems = []
  for family in families.FAMILIES:
    try:
      out = families.write(config, vocab_size, family)
      break
    except ValueError as error:
      problems.append(str(error))
  else:
    raise ValueError("no public family has this architecture: " + "; ".join(problems))
  if (family, kind) == ("gemma3", "token-classification"):
    raise ValueError(f"transformers has no {kind} class for {family}; use --kind=causal-lm")
  # The class name follows transformers (models/auto/modeling_auto.py).
  out |= {"architectures": [family.title() + CLASSES[kind]], "torch_dtype": dtype, **tokens}
  if kind == "token-classification":
    names = contract.classes
    if contract.heads > 1:
      names = [f"{name} of head {k}" for k in range(contract.heads) for name in contract.classes]
    labels = dict(enumerate(names))
    out |= {
      "num_labels": len(labels),
      "id2label": {str(i): label for i, label in labels.items()},
      "label2id": {label: i for i, label in labels.items()},
      "classifier_dropout": 0.0,
    }
  if contract is not None:
    out["prm_jax"] = dataclasses.asdict(contract)
  return out


def write(
  directory: str | pathlib.Path,
  params: Any,
  config: config_lib.Model,
  vocab_size: int,
  *,
  contract: StepContract | None,
  kind: Kind = "token-classification",
  dtype: str | None = None,
  files: Mapping[str, bytes] | None = None,
  tokens: Mapping[str, int | None] | None = None,
) -> None:
  """Writes the whole directory or nothing, with one shard in memory at a time.

  Args:
    contract: None only for a language model.
    dtype: dtype of the tensors, "float32" or "bfloat16"; None: the parameters' own.
    files: the tokenizer's files, and others, by name.
    tokens: bos_token_id and the like, for config.json; None: the model has none.

  Raises:
    ValueError: see `config_json`; or a language model has a head of zeros.
    OSError: the directory exists already, or cannot be written.
  """
  trunk = np.dtype(params["embedding"].dtype).name
  values = config_json(config, vocab_size, contract, kind, dtype or trunk, tokens or {})
  # `weights.load` fills the language-model head with zeros if the directory is a classifier.
  if kind == "causal-lm" and "language_model" in params and not params["language_model"].any():
    raise ValueError("no language-model head: the run started from a model without one")
  left_out = decoder.is_head if kind == "causal-lm" else lambda name: name == "language_model"
  exported = {name: x for name, x in params.items() if not left_out(name)}
  tensors = (
    (name, value.astype(dtype or value.dtype)) for name, value in weights.unload(exported, config)
  )
  with storage.written_directory(directory) as new:
    safetensors_files.write_directory(new, tensors)
    for name, data in (files or {}).items():
      (new / name).write_bytes(data)
    if contract is not None:
      layout = LAYOUTS[contract.objective]
      if contract.heads > 1:
        layout += f"; of each of {contract.heads} heads, whose mean is the probability"
      write_json(new / CONTRACT, dataclasses.asdict(contract) | {"layout": layout})
    write_json(new / "config.json", values)


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a value as indented JSON."""
  path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_contract(directory: str | pathlib.Path) -> StepContract:
  """Reads the step-token contract of an exported directory.

  Raises:
    ValueError: a field is missing or has a wrong type.
    OSError: the file cannot be read.
  """
  path = pathlib.Path(directory) / CONTRACT
  return json_lines.decode(json_lines.contents(path), StepContract, str(path))
