"""Flags of the scripts that say which reward model scores."""

import dataclasses
from typing import Literal

from prm_jax import config as config_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModel(config_lib.Checked):
  checkpoint: str = ""  # work directory of train.py
  step: str = "latest"  # of the checkpoint: "latest", "best" by train.best_metric, or a number
  model: str = ""  # or directory of a published or exported model
  readout: str = ""  # of a published model; of score.py also "implicit"
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
    """ValueError unless there is one model."""
    if bool(self.checkpoint) == bool(self.model) or (self.checkpoint and self.of_model):
      raise ValueError(
        "give one of --checkpoint=DIR and --model=DIR; --readout, --separator and --dtype "
        "go with --model"
      )

  def load(self, benchmark: str = ""):
    """The `Scorer`; arguments and errors as of its `load_model` and `load`."""
    from prm_jax.scoring.scorer import Scorer

    if self.model:
      return Scorer.load_model(self.model, self.readout, self.dtype, self.separator, benchmark)
    return Scorer.load(self.checkpoint, self.step)
