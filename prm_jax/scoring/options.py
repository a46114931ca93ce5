"""The flags that choose the reward model of a script."""

import dataclasses
from typing import Literal

from prm_jax import config as config_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModel(config_lib.Checked):
  checkpoint: str = ""  # work directory of a run of train.py
  step: str = "latest"  # checkpoint to load: "latest", "best" by train.best_metric, or a number
  model: str = ""  # instead of --checkpoint: directory of a published or exported model
  readout: str = ""  # how a published model is read, or "implicit" for two language models
  reference: str = ""  # directory of the reference language model of --readout=implicit
  beta: float | None = None  # weight of the log-ratio of --readout=implicit; default 0.05
  dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of a published or exported model
  separator: config_lib.Escaped = ""  # between a published model's steps; "": the authors' own

  @property
  def name(self) -> str:
    """The directory of the model or run."""
    return self.model or self.checkpoint

  def check_model(self) -> None:
    """Raises ValueError unless there is one model, with the flags that go with it."""
    # --readout=implicit also reads runs of train.py, whose dtype is their own.
    implicit = self.readout == "implicit"
    of_model = self.dtype != "float32" or (not implicit and (self.readout or self.separator))
    if bool(self.checkpoint) == bool(self.model) or (self.checkpoint and of_model):
      raise ValueError(
        "give one of --checkpoint=DIR and --model=DIR; --readout, --separator and --dtype "
        "go with --model"
      )
    if self.model and self.step != "latest":
      raise ValueError(f"--step={self.step} goes with --checkpoint")
    if bool(self.reference) != implicit or (self.beta is not None and not implicit):
      raise ValueError(
        f"--readout={self.readout} --reference={self.reference} --beta={self.beta}: "
        "--readout=implicit needs --reference=DIR, and only it takes --reference and --beta"
      )

  def load(self, benchmark: str = ""):
    """Loads the `Rater`.

    Args:
      benchmark: as in `Scorer.load_model`.

    Raises:
      ValueError, OSError: as `Scorer.load`, `Scorer.load_model` or `ImplicitScorer.load`.
    """
    from prm_jax.scoring import implicit
    from prm_jax.scoring.scorer import Scorer

    if self.readout == "implicit":
      beta = implicit.BETA if self.beta is None else self.beta
      separator = self.separator or implicit.SEPARATOR
      return implicit.ImplicitScorer.load(
        self.name, self.reference, beta, separator, self.dtype, self.step
      )
    if self.model:
      return Scorer.load_model(self.model, self.readout, self.dtype, self.separator, benchmark)
    return Scorer.load(self.checkpoint, self.step)
