"""A checkpoint and candidate solutions to probabilities: one forward per distinct solution.

Candidates that say the same are scored once, and packed into rows like training examples.  A
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
from prm_jax.input_pipeline import packing, tokenizers, trees
from prm_jax.training import checkpoint as checkpoint_lib
from prm_jax.training import mesh as mesh_lib
from prm_jax.training import step as step_lib
from prm_jax.types import StepContract

BATCH_TOKENS = 16_384  # token slots of one forward
READS = 16  # reads of a row are rounded up to a multiple of this, to keep shapes few
MAX_TOKENS = 16_384  # of a solution; attention over a row takes memory with its square


class ContractError(ValueError):
  """The model would be read under another step-token contract than it was trained under."""


class TooLongError(ValueError):
  """A solution is too long to score; `index` is its place among those given."""

  def __init__(self, index: int, tokens: int):
    super().__init__(f"a solution of {tokens} tokens; at most {MAX_TOKENS} can be scored")
    self.index = index


@dataclasses.dataclass(frozen=True)
class Scorer:
  """A trained model, ready to score."""

  contract: StepContract  # what its probabilities mean
  tokenizer: tokenizers.Tokenizer
  config: config_lib.Experiment
  params: Any
  mesh: jax.sharding.Mesh
  step: int  # of the checkpoint

  @classmethod
  def load(cls, workdir: str | pathlib.Path) -> Scorer:
    """Loads the newest checkpoint of a training run onto whatever devices there are.

    Raises:
      FileNotFoundError: there is no finished checkpoint.
      ContractError: the tokenizer beside it is not the one it was trained with.
    """
    workdir = pathlib.Path(workdir)
    if not (workdir / "checkpoints").is_dir():
      raise FileNotFoundError(f"{workdir}: no checkpoints/ in it; give the --workdir of train.py")
    with contextlib.closing(checkpoint_lib.Checkpointer(workdir)) as checkpointer:
      latest = checkpointer.latest()
      if latest is None:
        raise FileNotFoundError(f"{workdir}/checkpoints: no finished checkpoint")
      step, metadata = latest
      tokenizer = tokenizers.SentencePiece(workdir / checkpoint_lib.TOKENIZER)
      check_contract(metadata.contract, tokenizer, workdir)
      mesh = mesh_lib.make_mesh(config_lib.Mesh())
      abstract = mesh_lib.abstract_params(
        metadata.config.model, metadata.vocab_size, len(metadata.contract.classes), mesh
      )
      params = checkpointer.restore_params(step, abstract)
    return cls(metadata.contract, tokenizer, metadata.config, params, mesh, step)

  def probabilities(self, solutions: Sequence[tuple[str, Sequence[str]]]) -> list[np.ndarray]:
    """Class probabilities of (problem, steps) pairs.

    Returns:
      float64 arrays in the order of the solutions, each `[steps, C]` for a process model, `[1, C]`
      for an outcome model, in the class order of the contract.

    Raises:
      TooLongError: a solution has more than `MAX_TOKENS` tokens.
    """
    distinct: dict[tuple[str, tuple[str, ...]], int] = {}
    index = [distinct.setdefault((p, tuple(steps)), len(distinct)) for p, steps in solutions]
    encoded = [
      trees.encode_candidate(problem, steps, self.tokenizer, self.contract)
      for problem, steps in distinct
    ]
    for i, tree in enumerate(encoded):
      if len(tree) > MAX_TOKENS:
        raise TooLongError(index.index(i), len(tree))
    read = self.read(encoded)
    return [read[i] for i in index]

  def read(self, token_trees: Sequence[trees.TokenTree]) -> list[np.ndarray]:
    """Class probabilities, float64 `[r, C]`, at the read positions of each token tree."""
    by_length: dict[int, list[int]] = {}
    for i, tree in enumerate(token_trees):
      length = self.config.data.row_length
      while length < len(tree):
        length *= 2
      by_length.setdefault(length, []).append(i)
    out: list[np.ndarray] = [np.zeros(0)] * len(token_trees)
    for length, members in by_length.items():
      rows = packing.PackedRows([token_trees[i] for i in members], length, READS)
      log_probs = self._run(rows)
      for row, packed in enumerate(rows.plan):
        ends = np.cumsum([len(rows.trees[i].read_positions) for i in packed])
        parts = np.split(log_probs[row], ends)
        for i, part in zip(packed, parts):
          out[members[i]] = np.exp(part.astype(np.float64))
    return out

  def _run(self, rows: packing.PackedRows) -> np.ndarray:
    """Class log-probabilities, float32 `[rows, R, C]`."""
    spread = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
    batch_rows = max(BATCH_TOKENS // rows.row_length // spread, 1) * spread
    sharding = mesh_lib.batch_sharding(self.mesh)
    with jax.set_mesh(self.mesh):
      results = [
        self._forward(self.params, jax.device_put(batch, sharding))
        for batch in packing.eval_batches(rows, batch_rows)
      ]
    return np.concatenate([np.asarray(r) for r in results])

  @functools.cached_property
  def _forward(self):
    graphdef = step_lib.graph(
      self.config.model, self.tokenizer.vocab_size, len(self.contract.classes)
    )
    return jax.jit(
      functools.partial(step_lib.read_log_probs, graphdef=graphdef),
      out_shardings=mesh_lib.replicated(self.mesh),
    )


def check_contract(
  contract: StepContract, tokenizer: tokenizers.Tokenizer, where: str | pathlib.Path
) -> None:
  """Raises ContractError if `tokenizer` is not the one the contract was made with."""
  if tokenizer.hash != contract.tokenizer_hash:
    raise ContractError(
      f"{where}: the tokenizer's hash is {tokenizer.hash[:16]}..., the model was trained with "
      f"{contract.tokenizer_hash[:16]}...; put back the {checkpoint_lib.TOKENIZER} of that run"
    )
  separator = tuple(tokenizer.encode(contract.separator))
  if separator != contract.separator_ids:
    raise ContractError(
      f"{where}: the separator {contract.separator!r} encodes to {separator}, in training it was "
      f"{contract.separator_ids}"
    )
