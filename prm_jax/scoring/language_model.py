"""Language models from a public directory or a run of train.py, and token log-probabilities."""

import dataclasses
import functools
import pathlib
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from prm_jax import config as config_lib
from prm_jax.input_pipeline import tokenizers
from prm_jax.model import decoder
from prm_jax.pretrained import families, weights
from prm_jax.runtime import storage
from prm_jax.scoring import scorer
from prm_jax.training import checkpoint as checkpoint_lib
from prm_jax.training import loss as loss_lib
from prm_jax.training import step as step_lib
from prm_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class LanguageModel:
  """A language model and its tokenizer."""

  source: str  # the directory that it was loaded from
  tokenizer: tokenizers.Tokenizer
  config: config_lib.Model
  vocab_size: int  # rows of the embedding
  params: Any = dataclasses.field(repr=False)
  step: int | None = None  # of the checkpoint; None: a public model

  @classmethod
  def load(
    cls,
    place: str | storage.Path,
    mesh: jax.sharding.Mesh,
    dtype: str = "float32",
    step: str | int = "latest",
  ) -> Self:
    """Loads a public or exported model, if `place` has a config.json, otherwise a run on text.

    Args:
      dtype: of a public or exported model's parameters and activations.
      step: of a run's checkpoint, as in `Scorer.load`.

    Raises:
      ValueError, OSError: there is no language model, or `step` is given for a public one.
    """
    directory = pathlib.Path(place)
    if not (directory / "config.json").is_file():
      if not (storage.path(place) / "checkpoints").is_dir():
        raise FileNotFoundError(f"{place}: neither a model's config.json nor a run's checkpoints/")
      return cls._of_run(place, mesh, step)
    if step != "latest":
      raise ValueError(f"--step={step}: {place} is a public model, which has no steps")
    config, tokenizer = families.read(directory), tokenizers.load(directory)
    if "score.weight" in weights.tensors(directory):
      raise ValueError(f"{directory}: a classifier, which predicts no text")
    config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    abstract = decoder.abstract_params(config, config.vocab_size, 1, mesh)
    params = weights.load(directory, abstract, config)
    return cls(str(directory), tokenizer, config, config.vocab_size, params)

  @classmethod
  def _of_run(cls, workdir: str | storage.Path, mesh: jax.sharding.Mesh, step: str | int) -> Self:
    about, tokenizer = scorer.newest(workdir)
    if about.contract.objective != "language_model":
      raise ValueError(
        f"{workdir}: trained as a reward model ({about.contract.objective}), which predicts no text"
      )
    number, about, params = checkpoint_lib.restore_params(workdir, mesh, step)
    # These devices may lack the attention kernel of the training run.
    config = dataclasses.replace(about.config.model, attention="auto")
    return cls(str(workdir), tokenizer, config, about.vocab_size, params, number)

  def facts(self) -> dict[str, Any]:
    """Returns the directory, and a run's step or the sha256 of a public model's files."""
    if self.step is not None:
      return {"directory": self.source, "step": self.step}
    return {"directory": self.source, "sha256": self.hashes, "dtype": self.config.dtype}

  @functools.cached_property
  def hashes(self) -> dict[str, str]:
    return scorer.file_hashes(pathlib.Path(self.source))

  def identity(self) -> dict[str, Any]:
    """Returns what determines the log-probabilities: weights and architecture."""
    if self.step is None:
      facts = self.facts()
      del facts["directory"]  # the folder may be moved, or given by another name
    else:
      facts = {"weights": checkpoint_lib.digest(self.params)}
    return facts | {"config": dataclasses.asdict(self.config)}

  def read_log_probs(self, batch: Batch) -> jax.Array:
    """Returns `token_log_probs` of a batch; models of one architecture share the program."""
    return token_log_probs(self.params, batch, step_lib.graph(self.config, self.vocab_size, 1))


@functools.partial(jax.jit, static_argnames="graph")
def token_log_probs(params: Any, batch: Batch, graph: nnx.GraphDef) -> jax.Array:
  """Returns the log-probability of the token at each read position, float32 `[B, R]`.

  The model predicts a token at its parent.
  """
  model = nnx.merge(graph, params)
  hidden = model.hidden(batch.tokens, batch.positions, batch.subtree_end)
  at_reads = functools.partial(jnp.take_along_axis, indices=batch.read_positions, axis=1)
  parents, tokens = jnp.maximum(at_reads(batch.previous), 0), at_reads(batch.tokens)
  before = jnp.take_along_axis(hidden, parents[..., None], axis=1)
  return -loss_lib.token_nll(model, before, tokens)
