"""A checkpoint and candidate solutions to probabilities: every distinct token is encoded once.

Candidates of a problem become one prefix tree, and trees are packed into rows as in training.  A
solution longer than the model's rows is scored in a longer row, never cut.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from prm_jax import config as config_lib
from prm_jax.input_pipeline import token_tree, tokenizers
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import export, families, weights
from prm_jax.runtime import storage
from prm_jax.scoring import batching
from prm_jax.training import checkpoint as checkpoint_lib
from prm_jax.training import step as step_lib
from prm_jax.types import StepContract


class ContractError(ValueError):
  """The model would be read under another step-token contract than it was trained under."""


@dataclasses.dataclass(frozen=True)
class Scorer:
  """A trained model, ready to score."""

  contract: StepContract  # what its probabilities mean
  tokenizer: tokenizers.Tokenizer
  config: config_lib.Experiment
  vocab_size: int  # rows of the embedding
  params: Any
  mesh: jax.sharding.Mesh
  step: int | None  # of the checkpoint; None: an export
  merge: bool = True  # what solutions of a problem share is encoded once

  @classmethod
  def load(cls, workdir: str | storage.Path, which: str = "latest") -> Scorer:
    """Loads a checkpoint of a training run onto whatever devices there are.

    Args:
      which: as in `checkpoint.Checkpointer.newest`.

    Raises:
      FileNotFoundError: there is no finished checkpoint.
      ValueError: there is not what `which` asks for, or it cannot be read.
      ContractError: the tokenizer beside it is not the one it was trained with, or it was trained
        on text, so that there is nothing to read.
    """
    _, about, tokenizer = newest(workdir)
    if about.contract.objective == "language_model":
      raise ContractError(
        f"{workdir}: trained on text, so it has no step probabilities; start a process model from "
        f"it with --config.init.checkpoint={workdir}"
      )
    step, about, params, mesh = restore(workdir, which)
    return cls(about.contract, tokenizer, about.config, about.vocab_size, params, mesh, step)

  @classmethod
  def load_export(cls, directory: str | pathlib.Path, dtype: str = "float32") -> Scorer:
    """Loads a directory that was exported for transformers, with its own contract.

    Raises:
      ValueError: the directory is no such model, or has no step head of the contract's classes.
      ContractError: its tokenizer is not the one it was trained with.
      OSError: a file is missing or cannot be read.
    """
    contract = export.read_contract(directory)
    source, preset = weights.tensors(directory), families.read(directory)
    if "score.weight" not in source:
      raise ValueError(f"{directory}: no score.weight: exported without the step head")
    shape = (len(contract.classes), preset.config.width)
    if source["score.weight"].shape != shape:
      raise ValueError(
        f"{directory}: score.weight is {list(source['score.weight'].shape)}, expected "
        f"{list(shape)}: the contract's classes by the model's width"
      )
    tokenizer = tokenizers.load(directory)
    check_contract(contract, tokenizer, directory)
    # Tied, so that no language-model head is looked for: scoring has no use for one.
    model = dataclasses.replace(preset.config, tied_embeddings=True, dtype=dtype, param_dtype=dtype)
    mesh = sharding_lib.make_mesh(config_lib.Mesh())
    abstract = sharding_lib.abstract_params(model, preset.vocab_size, len(contract.classes), mesh)
    params = weights.load(directory, abstract, model)
    config = config_lib.Experiment(model=model)
    return cls(contract, tokenizer, config, preset.vocab_size, params, mesh, None)

  def probabilities(self, solutions: Sequence[tuple[str, Sequence[str]]]) -> list[np.ndarray]:
    """Class probabilities of (problem, steps) pairs.

    Returns:
      float64 arrays in the order of the solutions, each `[steps, C]` for a process model, `[1, C]`
      for an outcome model, in the class order of the contract.

    Raises:
      rows.TooLongError: a solution has more than `rows.MAX_TOKENS` tokens.
    """
    return batching.score(solutions, self._encode, self.read)

  def read(
    self, token_trees: Sequence[token_tree.TokenTree], problems: Sequence[str]
  ) -> list[np.ndarray]:
    """Class probabilities, float64 `[r, C]`, at the read positions of each token tree."""
    forward = functools.partial(self._forward, self.params)
    length = self.config.data.row_length
    return batching.read(token_trees, problems, forward, self.mesh, length, self.merge)

  def _encode(self, problem: str, steps: Sequence[str]) -> token_tree.TokenTree:
    return token_tree.encode_candidate(problem, steps, self.tokenizer, self.contract)

  @functools.cached_property
  def _forward(self):
    # Scoring may be on other devices than training was, where its kernel does not run.
    model = dataclasses.replace(self.config.model, attention="auto")
    graphdef = step_lib.graph(model, self.vocab_size, len(self.contract.classes))
    return jax.jit(
      functools.partial(step_lib.read_log_probs, graphdef=graphdef),
      out_shardings=sharding_lib.replicated(self.mesh),
    )


def newest(
  workdir: str | storage.Path,
) -> tuple[int, checkpoint_lib.Metadata, tokenizers.Tokenizer]:
  """Step, metadata and tokenizer of a run's newest checkpoint, whatever it was trained for.

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
  """A checkpoint of a run that reads back as saved, on a mesh of all devices.

  Args:
    which: as in `checkpoint.Checkpointer.newest`.

  Returns:
    Its step, metadata and parameters, and the mesh.  A warning names those that should have been
    used and do not read back.

  Raises:
    ValueError: none does, or there is not what `which` asks for.
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
