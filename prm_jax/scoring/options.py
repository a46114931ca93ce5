"""Flags of the scripts that say which reward model scores."""

import dataclasses
from typing import Literal

from prm_jax import config as config_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModel(config_lib.Checked):
  checkpoint: str = ""  # work directory of train.py
  step: str = "latest"  # of the checkpoint: "latest", "best" by train.best_metric, or a number
  model: str = ""  # or directory of a published or exported model
  readout: str = ""  # of a published model, or "implicit": two language models
  reference: str = ""  # of --readout=implicit: directory of the reference language model
  beta: float | None = None  # of --readout=implicit: weight of the log-ratio; default 0.05
  dtype: Literal["float32", "bfloat16"] = "float32"  # of a published or exported model
  separator: config_lib.Escaped = ""  # of a published model, between steps; "": its authors'

  @property
  def name(self) -> str:
    """Of the model, for people."""
    return self.model or self.checkpoint

  @property
  def of_model(self) -> bool:
    """Whether a flag is given that goes with --model."""
    return bool(self.readout or self.separator or self.dtype != "float32")

  def check_model(self) -> None:
    """Raises ValueError unless there is one model, with the flags that go with it."""
    implicit = self.readout == "implicit"  # also of runs of train.py, which have no dtype
    of_model = self.dtype != "float32" if implicit else self.of_model
    if bool(self.checkpoint) == bool(self.model) or (self.checkpoint and of_model):
      raise ValueError(
        "give one of --checkpoint=DIR and --model=DIR; --readout, --separator and --dtype "
        "go with --model"
      )
    if self.model and self.step != "latest":
      raise ValueError(f"--step={self.step} is of a --checkpoint")
    if bool(self.reference) != implicit or (self.beta is not None and not implicit):
      raise ValueError(
        f"--readout={self.readout} --reference={self.reference} --beta={self.beta}: "
        "--readout=implicit needs --reference=DIR, and only it has --reference and --beta"
      )

  def load(self, benchmark: str = ""):
    """The `Rater`; arguments and errors as of `load_model` and `load` of `Scorer`, or of
    `ImplicitScorer`."""
    from prm_jax.scoring import implicit
    from prm_jax.scoring.scorer import Scorer

    if self.readout == "implicit":
      beta = implicit.BETA if self.beta is None else self.beta
      given = (self.reference, beta, self.separator or implicit.SEPARATOR, self.dtype, self.step)
      return implicit.ImplicitScorer.load(self.name, *given)
    if self.model:
      return Scorer.load_model(self.model, self.readout, self.dtype, self.separator, benchmark)
    return Scorer.load(self.checkpoint, self.step)
