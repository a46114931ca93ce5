"""A reward model and candidate solutions -> class probabilities of their steps.

Candidates of a problem become one prefix tree, and trees are packed into rows as in training.  A
solution longer than the model's rows is scored in a longer row, never cut.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from prm_jax import config as config_lib
from prm_jax.input_pipeline import token_tree, tokenizers
from prm_jax.model import sharding as sharding_lib
from prm_jax.model.decoder import StepScorer
from prm_jax.pretrained import export, families, weights
from prm_jax.runtime import json_lines, storage
from prm_jax.scoring import batching, readouts
from prm_jax.scoring.readouts import ANSWERS, CLASSES, PUBLISHED, Head, Readout
from prm_jax.training import checkpoint as checkpoint_lib
from prm_jax.training import step as step_lib
from prm_jax.types import Batch, StepContract

TEMPLATE = "chat_template.jinja"
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class ContractError(ValueError):
  """The model would be read under another step-token contract than it was trained under."""


@dataclasses.dataclass(frozen=True)
class Scorer:
  """A reward model, ready to score."""

  contract: StepContract  # what its probabilities mean
  tokenizer: tokenizers.Tokenizer
  readout: Readout
  config: config_lib.Model
  vocab_size: int  # rows of the embedding
  params: Any
  mesh: jax.sharding.Mesh
  head: Head = dataclasses.field(default_factory=dict)  # of a published model
  row_length: int = config_lib.Data().row_length  # tokens; longer solutions get longer rows
  step: int | None = None  # of a checkpoint
  directory: pathlib.Path | None = None  # of a published or exported model
  merge: bool = True  # encode what solutions of a problem share once

  @classmethod
  def load(cls, workdir: str | storage.Path, which: str = "latest") -> Scorer:
    """Loads a checkpoint of a training run onto all devices.

    Args:
      which: as in `checkpoint.Checkpointer.newest`.

    Raises:
      FileNotFoundError: there is no finished checkpoint.
      ValueError: there is no checkpoint as `which` asks for, or it cannot be read.
      ContractError: the tokenizer beside it is not the one it was trained with, or it was trained
        on text and has no step probabilities.
    """
    _, about, tokenizer = newest(workdir)
    if about.contract.objective == "language_model":
      raise ContractError(
        f"{workdir}: trained on text, so it has no step probabilities; start a process model from "
        f"it with --config.init.checkpoint={workdir}"
      )
    step, about, params, mesh = restore(workdir, which)
    return cls(
      about.contract,
      tokenizer,
      readouts.trained(tokenizer, about.contract),
      about.config.model,
      about.vocab_size,
      params,
      mesh,
      row_length=about.config.data.row_length,
      step=step,
    )

  @classmethod
  def load_export(cls, directory: str | pathlib.Path, dtype: str = "float32") -> Scorer:
    """Loads a directory that was exported for transformers, with its own contract.

    Raises:
      ValueError: the directory is no such model, or has no step head of the contract's classes.
      ContractError: its tokenizer is not the one it was trained with.
      OSError: a file is missing or cannot be read.
    """
    directory = pathlib.Path(directory)
    contract, preset = export.read_contract(directory), families.read(directory)
    tokenizer = tokenizers.load(directory)
    check_contract(contract, tokenizer, directory)
    readout = readouts.trained(tokenizer, contract)
    _read_head(directory, readout, preset.config)  # an export without the step head has none
    model = _load_weights(directory, preset, len(contract.classes), dtype)
    return cls(contract, tokenizer, readout, *model, directory=directory)

  @classmethod
  def load_published(
    cls, directory: str | pathlib.Path, name: str, dtype: str = "float32", separator: str = ""
  ) -> Scorer:
    """Loads a public model's directory of config.json, safetensors and a tokenizer.

    Args:
      name: of the readout, a key of `readouts.PUBLISHED`.
      dtype: of parameters and activations; heads are read in float32.
      separator: between steps; "": the readout's own.

    Raises:
      ValueError: the directory is not a model that this readout can read; says what is missing.
      OSError: a file is missing or cannot be read.
    """
    directory = pathlib.Path(directory)
    if not directory.is_dir():
      raise NotADirectoryError(
        f"{directory}: not a directory; a published model is scored from its directory of "
        "config.json, safetensors and a tokenizer"
      )
    known = ", ".join(PUBLISHED)
    if not name:
      raise ValueError(
        f"{directory}: no {export.CONTRACT} in it, so --readout=NAME is needed: one of {known}"
      )
    if name not in PUBLISHED:
      raise ValueError(f"--readout={name}: expected one of {known}")
    preset, tokenizer = families.read(directory), tokenizers.load(directory)
    try:
      readout = PUBLISHED[name](tokenizer, _settings(directory), separator)
    except ValueError as error:
      raise ValueError(f"{directory}: not a model for --readout={name}: {error}") from error
    head = _read_head(directory, readout, preset.config)
    contract = StepContract(
      objective="process",
      classes=CLASSES,
      separator=readout.separator,
      separator_ids=tuple(tokenizer.encode(readout.separator)),
      read=readout.read,
      neutral="none",
      tokenizer_hash=tokenizer.hash,
      recipe=name,
    )
    model = _load_weights(directory, preset, len(CLASSES), dtype, tuple(readout.tensors))
    head = jax.device_put(head, sharding_lib.replicated(model[-1]))
    return cls(contract, tokenizer, readout, *model, head=head, directory=directory)

  def probabilities(self, solutions: Sequence[tuple[str, Sequence[str]]]) -> list[np.ndarray]:
    """Class probabilities of (problem, steps) pairs.

    Returns:
      float64 arrays in the order of the solutions, each `[steps, C]` for a process model, `[1, C]`
      for an outcome model, in the class order of the contract.

    Raises:
      batching.SolutionError: a solution is too long, or the readout cannot lay it out.
    """
    return batching.score(solutions, self.encode, self.read)

  def encode(self, problem: str, steps: Sequence[str]) -> token_tree.TokenTree:
    """The tokens of a solution and where they are read; ValueError if it cannot be laid out."""
    tree = self.readout.encode(problem, steps)
    if (highest := tree.tokens.max()) >= self.vocab_size:
      raise ValueError(
        f"token {highest} is beyond the embedding's {self.vocab_size} rows: the tokenizer is not "
        "the model's"
      )
    return tree

  def read(
    self, token_trees: Sequence[token_tree.TokenTree], problems: Sequence[str]
  ) -> list[np.ndarray]:
    """Class probabilities, float64 `[r, C]`, at the read positions of each token tree."""
    forward = functools.partial(self._forward, self.params, self.head)
    return batching.read(token_trees, problems, forward, self.mesh, self.row_length, self.merge)

  def facts(self) -> dict[str, Any]:
    """What the probabilities mean, and the sha256 of the model's files as the hub shows them.

    Of a published or exported model; a checkpoint's metadata says the same of a trained one.
    """
    names = ["config.json", tokenizers.find(self.directory).name]
    names += sorted({tensor.path.name for tensor in weights.tensors(self.directory).values()})
    hashes = {}
    for name in names:
      with (self.directory / name).open("rb") as file:
        hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    facts = dataclasses.asdict(self.contract)
    facts |= {"model": str(self.directory), "sha256": hashes}
    if self.readout.head:
      facts |= {"readout": self.contract.recipe, "prompt": self.readout.prompt}
      facts["tokens"] = dict(self.readout.tokens)
    return facts | {"dtype": self.config.dtype}

  @functools.cached_property
  def _forward(self):
    # Scoring may be on other devices than training was, where its kernel does not run.
    config = dataclasses.replace(self.config, attention="auto")
    graphdef = step_lib.graph(config, self.vocab_size, len(self.contract.classes))

    def log_probs(params: Any, head: Head, batch: Batch) -> jax.Array:
      model: StepScorer = nnx.merge(graphdef, params)
      hidden = model.hidden(batch.tokens, batch.positions, batch.subtree_end)
      if self.readout.head is None:
        return jax.nn.log_softmax(model.class_logits(hidden, batch.read_positions))
      at = jnp.take_along_axis(hidden, batch.read_positions[..., None], axis=1)
      return self.readout.head(head, at.astype(jnp.float32), config.logit_softcap)

    return jax.jit(log_probs, out_shardings=sharding_lib.replicated(self.mesh))


def _load_weights(
  directory: pathlib.Path,
  preset: families.Preset,
  num_classes: int,
  dtype: str,
  others: Sequence[str] = (),
) -> tuple[config_lib.Model, int, Any, jax.sharding.Mesh]:
  """Config, rows of the embedding and parameters of a hub directory, on a mesh of all devices.

  Args:
    others: tensors of the directory that are not parameters.
  """
  # Tied, so that no language-model head is loaded: scoring never runs one.
  config = dataclasses.replace(preset.config, tied_embeddings=True, dtype=dtype, param_dtype=dtype)
  mesh = sharding_lib.make_mesh(config_lib.Mesh())
  abstract = sharding_lib.abstract_params(config, preset.vocab_size, num_classes, mesh)
  return config, preset.vocab_size, weights.load(directory, abstract, config, others=others), mesh


def _read_head(
  directory: pathlib.Path, readout: Readout, config: config_lib.Model
) -> dict[str, np.ndarray]:
  """The tensors of a readout's head, float32.

  Raises:
    ValueError: a tensor is missing or of another shape.
  """
  source = weights.tensors(directory)
  if missing := [n for n in readout.tensors if n not in source]:
    raise ValueError(f"{directory}: its weights lack {', '.join(missing)}")
  head = {}
  for name, letters in readout.tensors.items():
    found, expected = source[name].shape, readouts.shape_of(letters, config.width)
    if found != expected:
      raise ValueError(f"{directory}: {name} is {list(found)}, expected {list(expected)}")
    head[name] = source[name].read().astype(np.float32)
  if readout.answers:
    matrix = EMBEDDING if config.tied_embeddings else LM_HEAD
    if matrix not in source:
      raise ValueError(f"{directory}: its weights lack {matrix}")
    if (highest := max(readout.answers)) >= source[matrix].shape[0]:
      raise ValueError(f"{directory}: {matrix} has no row for the answer, token {highest}")
    head[ANSWERS] = source[matrix].read()[list(readout.answers)].astype(np.float32)
  return head


def _settings(directory: pathlib.Path) -> Mapping[str, Any]:
  """tokenizer_config.json, with the settings that have files of their own: chat template, ..."""
  settings: dict[str, Any] = {}
  for path in (directory / "special_tokens_map.json", directory / tokenizers.CONFIG):
    if path.is_file():
      settings |= json_lines.parse(path.read_bytes(), str(path))
  if (template := directory / TEMPLATE).is_file():
    settings["chat_template"] = template.read_bytes().decode(errors="replace")
  return settings


def newest(
  workdir: str | storage.Path,
) -> tuple[int, checkpoint_lib.Metadata, tokenizers.Tokenizer]:
  """Step, metadata and tokenizer of the newest checkpoint of a run, of any objective.

  Raises:
    FileNotFoundError: there is no finished checkpoint.
    ContractError: the tokenizer beside it is not the one it was trained with.
  """
  if not (storage.path(workdir) / "checkpoints").is_dir():
    raise FileNotFoundError(f"{workdir}: no checkpoints/ in it; give the --workdir of train.py")
  latest = checkpoint_lib.latest(workdir)
  if latest is None:
    raise FileNotFoundError(f"{workdir}/checkpoints: no finished checkpoint")
  step, about = latest
  tokenizer = tokenizers.load(workdir)
  check_contract(about.contract, tokenizer, workdir)
  return step, about, tokenizer


def restore(
  workdir: str | storage.Path, which: str = "latest"
) -> tuple[int, checkpoint_lib.Metadata, Any, jax.sharding.Mesh]:
  """Step, metadata and parameters of a readable checkpoint, and its mesh of all devices.

  A warning names each checkpoint that is passed over because it cannot be read.

  Args:
    which: as in `checkpoint.Checkpointer.newest`.

  Raises:
    ValueError: none can be read, or there is none as `which` asks for.
  """
  mesh = sharding_lib.make_mesh(config_lib.Mesh())
  with contextlib.closing(checkpoint_lib.Checkpointer(workdir)) as checkpointer:

    def params(step: int, about: checkpoint_lib.Metadata) -> Any:
      shape = (about.vocab_size, len(about.contract.classes))
      abstract = sharding_lib.abstract_params(about.config.model, *shape, mesh)
      return checkpointer.restore_params(step, abstract)

    return *checkpointer.newest(params, which), mesh


def check_contract(
  contract: StepContract, tokenizer: tokenizers.Tokenizer, where: str | storage.Path
) -> None:
  """Raises ContractError if `tokenizer` is not the one the contract was made with."""
  if tokenizer.hash != contract.tokenizer_hash:
    raise ContractError(
      f"{where}: the tokenizer's hash is {tokenizer.hash[:16]}..., the model was trained with "
      f"{contract.tokenizer_hash[:16]}...; put back the tokenizer of that run"
    )
  separator = tuple(tokenizer.encode(contract.separator))
  if separator != contract.separator_ids:
    raise ContractError(
      f"{where}: the separator {contract.separator!r} encodes to {separator}, in training it was "
      f"{contract.separator_ids}"
    )
