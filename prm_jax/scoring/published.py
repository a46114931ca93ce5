"""A published process reward model's directory, read the way its authors read it."""

from __future__ import annotations

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
from prm_jax.input_pipeline import token_tree, tokenizer_json, tokenizers
from prm_jax.model import sharding as sharding_lib
from prm_jax.model.decoder import StepScorer
from prm_jax.pretrained import export, families, weights
from prm_jax.scoring import batching, layouts
from prm_jax.scoring.readouts import ANSWERS, CLASSES, READOUTS, Head, Readout
from prm_jax.training import step as step_lib
from prm_jax.types import Batch, StepContract

TEMPLATE = "chat_template.jinja"
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class PublishedScorer:
  """A model and the readout that its authors describe; `probabilities` as of `score.Scorer`."""

  directory: pathlib.Path
  name: str  # of the readout
  layout: layouts.Layout
  contract: StepContract  # what its probabilities mean
  tokenizer: tokenizers.Tokenizer
  config: config_lib.Model
  vocab_size: int  # rows of the embedding
  params: Any
  head: Head
  mesh: jax.sharding.Mesh
  row_length: int = config_lib.Data().row_length
  merge: bool = True  # as of score.Scorer

  @classmethod
  def load(
    cls,
    directory: str | pathlib.Path,
    name: str,
    dtype: str = "float32",
    separator: str = "",
  ) -> PublishedScorer:
    """Loads a directory of config.json, safetensors and a tokenizer.

    Args:
      name: of the readout, a key of `READOUTS`.
      dtype: of parameters and activations; heads are read in float32.
      separator: between steps; "": the readout's own.

    Raises:
      ValueError: the directory is not a model that this readout can read: says what is missing.
      OSError: a file is missing or cannot be read.
    """
    directory = pathlib.Path(directory)
    if not directory.is_dir():
      raise NotADirectoryError(
        f"{directory}: not a directory; a published model is scored from its directory of "
        "config.json, safetensors and a tokenizer"
      )
    names = ", ".join(READOUTS)
    if not name:
      raise ValueError(
        f"{directory}: no {export.CONTRACT} in it, which says how an exported model is read, so "
        f"--readout=NAME is needed: one of {names}"
      )
    if name not in READOUTS:
      raise ValueError(f"--readout={name}: expected one of {names}")
    readout = READOUTS[name]
    preset = families.read(directory)
    tokenizer = tokenizers.load(directory)
    try:
      layout = readout.layout(tokenizer, _settings(directory), separator)
    except ValueError as error:
      raise ValueError(f"{directory}: not a model for --readout={name}: {error}") from error
    head = _head(directory, name, layout, preset.config)
    contract = StepContract(
      objective="process",
      classes=CLASSES,
      separator=layout.separator,
      separator_ids=tuple(tokenizer.encode(layout.separator)),
      read=layout.read,
      neutral="none",
      tokenizer_hash=tokenizer.hash,
      recipe=name,
    )
    # A language-model head is never run: of its rows, at most the two answers' are wanted.
    config = dataclasses.replace(
      preset.config, tied_embeddings=True, dtype=dtype, param_dtype=dtype
    )
    mesh = sharding_lib.make_mesh(config_lib.Mesh())
    abstract = sharding_lib.abstract_params(config, preset.vocab_size, len(CLASSES), mesh)
    params = weights.load(directory, abstract, config, others=tuple(readout.tensors))
    head = jax.device_put(head, sharding_lib.replicated(mesh))
    return cls(
      directory, name, layout, contract, tokenizer, config, preset.vocab_size, params, head, mesh
    )

  def facts(self) -> dict[str, Any]:
    """What the probabilities mean and which files they come from, for a file beside them."""
    return describe(self.directory, self.contract) | {
      "readout": self.name,
      "prompt": self.layout.prompt,
      "tokens": dict(self.layout.tokens),
      "dtype": self.config.dtype,
    }

  def probabilities(self, solutions: Sequence[tuple[str, Sequence[str]]]) -> list[np.ndarray]:
    """Class probabilities of (problem, steps) pairs: float64 `[steps, 2]`, of "-1" and "1".

    Raises:
      rows.SolutionError: a solution is too long, or the layout cannot hold it.
    """
    return batching.score(solutions, self.encode, self.read)

  def encode(self, problem: str, steps: Sequence[str]) -> token_tree.TokenTree:
    tree = self.layout.encode(problem, steps)
    if (highest := tree.tokens.max()) >= self.vocab_size:
      raise ValueError(
        f"token {highest} is beyond the embedding's {self.vocab_size} rows: the tokenizer in "
        f"{self.directory} is not the model's"
      )
    return tree

  def read(
    self, token_trees: Sequence[token_tree.TokenTree], problems: Sequence[str]
  ) -> list[np.ndarray]:
    """Class probabilities, float64 `[r, 2]`, at the read positions of each token tree."""
    forward = functools.partial(self._forward, self.params, self.head)
    return batching.read(token_trees, problems, forward, self.mesh, self.row_length, self.merge)

  @functools.cached_property
  def _forward(self):
    graphdef = step_lib.graph(self.config, self.vocab_size, len(CLASSES))
    run = functools.partial(
      _log_probs, graphdef=graphdef, readout=READOUTS[self.name], softcap=self.config.logit_softcap
    )
    return jax.jit(run, out_shardings=sharding_lib.replicated(self.mesh))


def _log_probs(
  params: Any,
  head: Head,
  batch: Batch,
  *,
  graphdef: nnx.GraphDef,
  readout: Readout,
  softcap: float,
) -> jax.Array:
  """Class log-probabilities, float32 `[B, R, 2]`, at the batch's read positions."""
  model: StepScorer = nnx.merge(graphdef, params)
  hidden = model.hidden(batch.tokens, batch.positions, batch.subtree_end)
  at = jnp.take_along_axis(hidden, batch.read_positions[..., None], axis=1)
  return readout.log_probs(head, at.astype(jnp.float32), softcap)


def _head(
  directory: pathlib.Path, name: str, layout: layouts.Layout, config: config_lib.Model
) -> dict[str, np.ndarray]:
  """The tensors that the readout needs, float32."""
  source, wanted = weights.tensors(directory), READOUTS[name].tensors
  if missing := [n for n in wanted if n not in source]:
    raise ValueError(
      f"{directory}: not a model for --readout={name}: its weights lack {', '.join(missing)}"
    )
  head = {}
  for tensor, letters in wanted.items():
    shape = tuple(config.width if letter == "D" else int(letter) for letter in letters)
    if source[tensor].shape != shape:
      raise ValueError(
        f"{directory}: not a model for --readout={name}: {tensor} is "
        f"{list(source[tensor].shape)}, expected {list(shape)}"
      )
    head[tensor] = source[tensor].read().astype(np.float32)
  if layout.answers:
    matrix = EMBEDDING if config.tied_embeddings else LM_HEAD
    if matrix not in source:
      raise ValueError(f"{directory}: not a model for --readout={name}: its weights lack {matrix}")
    if (highest := max(layout.answers)) >= source[matrix].shape[0]:
      raise ValueError(f"{directory}: {matrix} has no row for the answer, token {highest}")
    head[ANSWERS] = source[matrix].read()[list(layout.answers)].astype(np.float32)
  return head


def _settings(directory: pathlib.Path) -> Mapping[str, Any]:
  """tokenizer_config.json, with what stands in files of its own: first token, chat template."""
  settings: dict[str, Any] = {}
  template = directory / TEMPLATE
  for path in (directory / "special_tokens_map.json", directory / tokenizer_json.CONFIG):
    if path.is_file():
      settings |= tokenizer_json.parse(tokenizer_json.read_bytes(path), str(path))
  if template.is_file():
    settings["chat_template"] = tokenizer_json.read_bytes(template).decode(errors="replace")
  return settings


def describe(directory: str | pathlib.Path, contract: StepContract) -> dict[str, Any]:
  """A contract and the model it is of: the sha256 of its files, as the hub shows them."""
  directory = pathlib.Path(directory)
  names = ["config.json", tokenizers.find(directory).name]
  names += sorted({tensor.path.name for tensor in weights.tensors(directory).values()})
  found = {}
  for name in names:
    with (directory / name).open("rb") as file:
      found[name] = hashlib.file_digest(file, "sha256").hexdigest()
  return dataclasses.asdict(contract) | {"model": str(directory), "sha256": found}
