"""Scores candidate solutions with a reward model: class probabilities of their steps.

Candidates of a problem become one prefix tree, and trees are packed into rows as in training.  A
solution longer than the model's rows is scored in a longer row, never cut.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np
from flax import nnx

from prm_jax import config as config_lib
from prm_jax.input_pipeline import token_tree, tokenizers
from prm_jax.model import decoder
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import export, families, weights
from prm_jax.runtime import compiler_options, storage
from prm_jax.runtime.json_lines import show
from prm_jax.scoring import readouts
from prm_jax.scoring.batch_journal import BatchJournal
from prm_jax.scoring.rater import Rater
from prm_jax.scoring.readouts import PUBLISHED, Head, Readout
from prm_jax.training import checkpoint as checkpoint_lib
from prm_jax.training import step as step_lib
from prm_jax.types import TWO_CLASSES, Batch, StepContract


@dataclasses.dataclass(frozen=True)
class Scorer(Rater):
  """A reward model, ready to score."""

  contract: StepContract
  tokenizer: tokenizers.Tokenizer
  readout: Readout
  config: config_lib.Model
  vocab_size: int
  params: Any = dataclasses.field(repr=False)
  mesh: jax.sharding.Mesh
  head: Head = dataclasses.field(default=(), repr=False)  # of a published model
  row_length: int = config_lib.Data().row_length
  step: int | None = None
  directory: pathlib.Path | None = None  # of a published or exported model
  merge: bool = True
  journal: BatchJournal | None = dataclasses.field(default=None, repr=False)

  @classmethod
  def load(
    cls,
    workdir: str | storage.Path,
    step: str | int = "latest",
    devices: Sequence[jax.Device] | None = None,
  ) -> Self:
    """Loads a checkpoint of a training run.

    Args:
      step: "latest", "best" by the run's `train.best_metric`, or a number.
      devices: the devices to load it onto; None: all.

    Raises:
      FileNotFoundError, ValueError: as `newest`; there is no such checkpoint, or it cannot be read;
        or the model was trained on text and has no step probabilities.
    """
    about, tokenizer = newest(workdir)
    if about.contract.objective == "language_model":
      raise ValueError(
        f"{workdir}: trained on text, so it has no step probabilities; start a process model from "
        f"it with --config.init.checkpoint={workdir}"
      )
    mesh = sharding_lib.make_mesh(config_lib.Mesh(), devices=devices)
    number, about, params = checkpoint_lib.restore_params(workdir, mesh, step)
    return cls(
      about.contract,
      tokenizer,
      readouts.trained(tokenizer, about.contract),
      about.config.model,
      about.vocab_size,
      params,
      mesh,
      row_length=about.config.data.row_length,
      step=number,
    )

  @classmethod
  def load_model(
    cls,
    directory: str | pathlib.Path,
    name: str = "",
    dtype: str = "float32",
    separator: str = "",
    benchmark: str = "",
    devices: Sequence[jax.Device] | None = None,
  ) -> Self:
    """Loads a directory of config.json, safetensors and a tokenizer: a public or exported model.

    Args:
      name: of the readout, a key of `readouts.PUBLISHED`; "": the directory is an export, whose
        contract is in it.
      dtype: of parameters and activations; heads are read in float32.
      separator: between steps, of a public model; "": the readout's own.
      benchmark: a benchmark whose code lays out solutions differently for some public models: see
        `readouts`; "": the authors' layout.
      devices: the devices to load it onto; None: all.

    Raises:
      ValueError: this readout cannot read the model in the directory, for the reason in the
        message; or the tokenizer of an export is not the one it was trained with.
      OSError: a file is missing or cannot be read.
    """
    directory = pathlib.Path(directory)
    stored, tokenizer = families.read(directory), tokenizers.load(directory)
    if not name and (directory / export.CONTRACT).is_file():
      contract = export.read_contract(directory)
      check_contract(contract, tokenizer, directory)
      if separator:
        raise ValueError(
          f"--separator={separator!r}: leave it out; {directory / export.CONTRACT} has one"
        )
      readout = readouts.trained(tokenizer, contract)
    else:
      contract, readout = _published(directory, name, tokenizer, separator, benchmark)
    head = _read_head(directory, readout, stored)
    # Scoring runs no language-model head; with tied embeddings none is loaded.  Only a readout that
    # compares two of its logits needs their soft cap.
    softcap = stored.logit_softcap if readout.answers else 0.0
    config = dataclasses.replace(
      stored, tied_embeddings=True, logit_softcap=softcap, dtype=dtype, param_dtype=dtype
    )
    mesh = sharding_lib.make_mesh(config_lib.Mesh(), devices=devices)
    abstract = decoder.abstract_params(
      config, config.vocab_size, len(contract.classes), mesh, contract.heads
    )
    params = weights.load(directory, abstract, config, [f"{layer}.*" for layer in readout.layers])
    return cls(
      contract,
      tokenizer,
      readout,
      config,
      config.vocab_size,
      params,
      mesh,
      head=jax.device_put(head if name else (), sharding_lib.replicated(mesh)),
      directory=directory,
    )

  @property
  def layout(self) -> str:
    return self.readout.prompt

  def lay_out(self, problem: str, steps: Sequence[str]) -> token_tree.TokenTree:
    return self.readout.encode(problem, steps)

  def forward(self, batch: Batch) -> jax.Array:
    return self.program(self.params, self.head, batch)

  def facts(self) -> dict[str, Any]:
    """Returns what the probabilities mean, and the files' sha256, which the hub also shows.

    Only for published and exported models; a trained model's checkpoint has metadata instead.
    """
    facts = {"model": str(self.directory), "sha256": self.hashes}
    facts = dataclasses.asdict(self.contract) | facts
    if self.head:
      facts |= {"readout": self.contract.recipe, "prompt": self.readout.prompt}
      facts["tokens"] = dict(self.readout.tokens)
    return facts | {"dtype": self.config.dtype}

  def identity(self) -> dict[str, Any]:
    if self.directory:
      facts = self.facts()
      del facts["model"]  # the folder may be moved, or given by another name
    else:
      weights = checkpoint_lib.digest(self.params)
      facts = dataclasses.asdict(self.contract) | {"weights": weights}
    return facts | {"config": dataclasses.asdict(self.config)}

  @functools.cached_property
  def hashes(self) -> dict[str, str]:
    return file_hashes(self.directory)

  @functools.cached_property
  def graph(self) -> nnx.GraphDef:
    """The model's structure, which `nnx.merge` joins with `params`."""
    # These devices may lack the attention kernel of the training run.
    config = dataclasses.replace(self.config, attention="auto")
    return step_lib.graph(config, self.vocab_size, len(self.contract.classes), self.contract.heads)

  @functools.cached_property
  def program(self):
    """The compiled program: params, head and batch to class log-probabilities `[B, R, K, C]`."""
    return _program(self.graph, self.mesh)


def file_hashes(directory: pathlib.Path) -> dict[str, str]:
  """Returns the sha256 of a public model's files by name: config.json, tokenizer and weights."""
  names = ["config.json", tokenizers.find(directory).name]
  names += sorted({tensor.path.name for tensor in weights.tensors(directory).values()})
  return {name: storage.sha256_of(directory / name) for name in names}


@functools.lru_cache(8)  # scorers with the same architecture share one program
def _program(graph: nnx.GraphDef, mesh: jax.sharding.Mesh):
  def forward(params: Any, head: Head, batch: Batch) -> jax.Array:
    model = nnx.merge(graph, params)
    hidden = model.hidden(batch.tokens, batch.positions, batch.subtree_end)
    return readouts.log_probs(model, head, hidden, batch.read_positions)

  options = compiler_options.of(config_lib.Tpu(), mesh.devices.flat[0], "score")
  everywhere = sharding_lib.replicated(mesh)
  return jax.jit(forward, out_shardings=everywhere, compiler_options=options)


def _published(
  directory: pathlib.Path,
  name: str,
  tokenizer: tokenizers.Tokenizer,
  separator: str,
  benchmark: str,
) -> tuple[StepContract, Readout]:
  """Returns the contract of a public model and the readout `name`."""
  if name not in PUBLISHED:
    raise ValueError(
      f"{directory}: --readout={name}: expected one of {', '.join(PUBLISHED)} (or "
      f"another of docs/models.md); only a directory with {export.CONTRACT} needs none"
    )
  try:
    readout = PUBLISHED[name](tokenizer, separator, benchmark)
  except ValueError as error:
    raise ValueError(f"{directory}: not a model for --readout={name}: {error}") from error
  contract = StepContract(
    objective="process",
    classes=TWO_CLASSES,
    separator=readout.separator,
    separator_ids=tuple(tokenizer.encode(readout.separator)),
    read=readout.read,
    neutral="none",
    tokenizer_hash=tokenizer.hash,
    recipe=name,
  )
  return contract, readout


def _read_head(
  directory: pathlib.Path, readout: Readout, config: config_lib.Model
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Reads the layers of a readout's head in float32.

  Raises:
    ValueError: a tensor is missing, or has another shape.
  """
  width, shapes = config.width, {}
  for layer in readout.layers:
    size = readout.outputs if layer == readout.layers[-1] else width
    shapes |= {f"{layer}.weight": (size, width), f"{layer}.bias": (size,)}
  if readout.answers:
    matrix = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    shapes[matrix] = (config.vocab_size, width)
  source = weights.tensors(directory)
  for name, expected in shapes.items():
    shape = list(source[name].shape) if name in source else "missing"
    if shape != list(expected):
      hint = "; a language model has no reward head" if shape == "missing" else ""
      raise ValueError(f"{directory}: {name} is {shape}, expected {list(expected)}{hint}")
  if readout.answers:  # only two rows: the matrix may take a gigabyte
    rows = [source[matrix].read(slice(token, token + 1)) for token in readout.answers]
    return [(np.concatenate(rows).astype(np.float32), np.zeros(2, np.float32))]
  values = [source[name].read().astype(np.float32) for name in shapes]
  return list(zip(values[::2], values[1::2]))


def newest(workdir: str | storage.Path) -> tuple[checkpoint_lib.Metadata, tokenizers.Tokenizer]:
  """Returns the metadata and the tokenizer of a run's newest checkpoint, of any objective.

  Raises:
    FileNotFoundError: there is no finished checkpoint.
    ValueError: the tokenizer beside it is not the one it was trained with.
  """
  latest = checkpoint_lib.latest(workdir)
  if latest is None:
    exported = (storage.path(workdir) / "config.json").exists()
    hint = "give the --workdir of train.py, which may not have saved yet"
    hint = "a public or exported model: --model or Scorer.load_model reads it" if exported else hint
    raise FileNotFoundError(f"{workdir}: no finished checkpoint in checkpoints/; {hint}")
  tokenizer = tokenizers.load(workdir)
  check_contract(latest[1].contract, tokenizer, workdir)
  return latest[1], tokenizer


def check_contract(
  contract: StepContract, tokenizer: tokenizers.Tokenizer, where: str | storage.Path
) -> None:
  """Raises ValueError if `tokenizer` is not the one the contract was made with."""
  expected = (contract.tokenizer_hash, contract.separator_ids)
  actual = (tokenizer.hash, tuple(tokenizer.encode(contract.separator)))
  if actual != expected:
    raise ValueError(
      f"{where}: the tokenizer's hash and its ids of {show(contract.separator)} are "
      f"{show(actual, 200)}, in training they were {show(expected, 200)}; restore that run's "
      "tokenizer"
    )
