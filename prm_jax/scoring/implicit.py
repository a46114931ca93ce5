"""The implicit process reward: P(right) of steps, from two language models.

The reward of a token is beta * (log pi - log pi_ref), with the policy pi and a reference model
pi_ref.  The reward of a step is the sum over its tokens, and P(right) is its sigmoid.  Yuan et al.
2024 (arXiv 2412.01981) train the sigmoid of a whole solution's reward with a cross-entropy loss;
PRIME (Cui et al. 2025, arXiv 2502.01456) uses the rewards online.

A solution is laid out as for this project's own models: the problem, a separator, then each step
and a separator.  The separator after a step counts as a token of the step.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np
from scipy import special

from prm_jax import config as config_lib
from prm_jax.input_pipeline import token_tree
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import storage
from prm_jax.scoring.batch_journal import BatchJournal
from prm_jax.scoring.language_model import LanguageModel
from prm_jax.scoring.rater import Rater
from prm_jax.scoring.rewards import BETA
from prm_jax.types import TWO_CLASSES, Batch, StepContract

SEPARATOR = "\n"


@dataclasses.dataclass(frozen=True)
class ImplicitScorer(Rater):
  """Two language models that score solutions as a `Scorer` does.

  Raises:
    ValueError: the models have different tokenizers, beta is not positive, or the separator has no
      tokens.
  """

  policy: LanguageModel
  reference: LanguageModel
  mesh: jax.sharding.Mesh
  beta: float = BETA
  separator: str = SEPARATOR
  row_length: int = config_lib.Data().row_length
  merge: bool = True
  journal: BatchJournal | None = dataclasses.field(default=None, repr=False)
  contract: StepContract = dataclasses.field(init=False)
  # The policy's, with the smaller of the two context lengths.
  config: config_lib.Model = dataclasses.field(init=False)
  layout = "problem, steps"

  def __post_init__(self):
    policy, reference, beta = self.policy, self.reference, self.beta
    if policy.tokenizer.hash != reference.tokenizer.hash:
      raise ValueError(
        f"{policy.source} and {reference.source} have different tokenizers (sha256 "
        f"{policy.tokenizer.hash[:12]} and {reference.tokenizer.hash[:12]}), so their "
        "log-probabilities cannot be compared: give two models with one tokenizer"
      )
    if not 0 < beta < np.inf:
      raise ValueError(f"--beta={beta}: expected a positive number")
    contract = token_tree.step_contract(
      policy.tokenizer, self.separator, "process", "implicit", "none", TWO_CLASSES
    )
    read = f"sigmoid of {beta} * log(pi / pi_ref), summed over the step's tokens and separator"
    object.__setattr__(self, "contract", dataclasses.replace(contract, read=read))
    lengths = filter(None, (model.config.context_length for model in (policy, reference)))
    config = dataclasses.replace(policy.config, context_length=min(lengths, default=0))
    object.__setattr__(self, "config", config)

  @classmethod
  def load(
    cls,
    policy: str | storage.Path,
    reference: str | storage.Path,
    beta: float = BETA,
    separator: str = SEPARATOR,
    dtype: str = "float32",
    step: str | int = "latest",
  ) -> Self:
    """Loads two language models, each a public model's directory or a run of train.py on text.

    Args:
      dtype: of a public model's parameters and activations.
      step: of the policy's checkpoint, as in `Scorer.load`, if it is a run.

    Raises:
      ValueError, OSError: as the class; or there is no language model.
    """
    mesh = sharding_lib.make_mesh(config_lib.Mesh())
    models = (
      LanguageModel.load(policy, mesh, dtype, step),
      LanguageModel.load(reference, mesh, dtype),
    )
    return cls(*models, mesh, beta, separator)

  @property
  def step(self) -> int | None:
    """The step of the policy's checkpoint; None for a public model."""
    return self.policy.step

  @property
  def vocab_size(self) -> int:
    return min(self.policy.vocab_size, self.reference.vocab_size)

  def lay_out(self, problem: str, steps: Sequence[str]) -> token_tree.TokenTree:
    """Returns the solution with a read at every token from the first step on.

    `read_solutions` holds the number of each token's step.
    """
    by_step = token_tree.encode_candidate(problem, steps, self.policy.tokenizer, self.contract)
    first = int(np.flatnonzero(by_step.previous >= 0)[0])
    tree = token_tree.chain(by_step.tokens, np.arange(first, len(by_step)), first)
    numbers = np.searchsorted(by_step.read_positions, tree.read_positions)
    return dataclasses.replace(tree, read_solutions=numbers)

  def forward(self, batch: Batch) -> jax.Array:
    """Returns log pi - log pi_ref of the tokens at a batch's read positions, `[B, R, 1, 1]`."""
    models = (self.policy, self.reference)
    return _log_ratios(*(model.read_log_probs(batch) for model in models), mesh=self.mesh)

  def of_steps(self, tree: token_tree.TokenTree, ratios: np.ndarray) -> np.ndarray:
    """Returns P(wrong) and P(right) of steps, float64 `[steps, 1, 2]`.

    Args:
      ratios: log pi - log pi_ref of the tokens, `[tokens, 1, 1]`.
    """
    reward = self.beta * np.bincount(tree.read_solutions, ratios[:, 0, 0])
    return special.expit(np.stack([-reward, reward], axis=-1))[:, None]

  def facts(self) -> dict[str, Any]:
    """Returns what the probabilities mean and which two models they come from."""
    models = {"model": self.policy.facts(), "reference": self.reference.facts()}
    return dataclasses.asdict(self.contract) | models | {"beta": self.beta}

  def identity(self) -> dict[str, Any]:
    return {"model": self.policy.identity(), "reference": self.reference.identity()}


@functools.partial(jax.jit, static_argnames="mesh")
def _log_ratios(policy: jax.Array, reference: jax.Array, *, mesh: jax.sharding.Mesh) -> jax.Array:
  ratios = (policy - reference)[..., None, None]
  return jax.lax.with_sharding_constraint(ratios, sharding_lib.replicated(mesh))
