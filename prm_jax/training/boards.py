"""Where metrics go beside metrics.jsonl: TensorBoard events, and Weights & Biases."""

import contextlib
import dataclasses
import importlib
import os
import pathlib
import secrets
from types import TracebackType

from prm_jax import config as config_lib
from prm_jax.runtime import storage

RUN_ID = "wandb_run_id"  # file of a work directory


def check(c: config_lib.Train) -> None:
  """Raises ValueError if the run is to be sent to Weights & Biases without its package."""
  if not c.wandb:
    return
  try:  # a folder of that name, which the package makes, can be imported, too
    missing = not hasattr(importlib.import_module("wandb"), "init")
  except ImportError:
    missing = True
  if missing:
    raise ValueError(
      f"train.wandb={c.wandb!r}: the package wandb is not installed: pip install 'prm_jax[wandb]', "
      "or leave the setting out"
    )


class TensorBoard:
  """Events in WORKDIR/tensorboard; ImportError without tensorboardX."""

  def __init__(self, folder: pathlib.Path, step: int, stack: contextlib.ExitStack):
    """Args: `folder`, of the run; `step`, after which earlier events are dropped."""
    import tensorboardX

    self._writer = tensorboardX.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
    stack.callback(self._writer.close)
    self.flush = self._writer.flush

  def write(self, step: int, scalars: dict[str, float]) -> None:
    for name, value in scalars.items():
      self._writer.add_scalar(name, value, step)


class WeightsAndBiases:
  """A run of the project `train.wandb`, which a resumed run continues under the same id.

  The id is in WORKDIR/wandb_run_id.  The x-axis is a metric named `step`, because the service drops
  records whose built-in step does not increase, such as updates repeated after a resume.
  WANDB_MODE=offline keeps everything in WORKDIR/wandb.
  """

  def __init__(
    self,
    c: config_lib.Experiment,
    workdir: storage.Path,
    folder: pathlib.Path,
    stack: contextlib.ExitStack,
  ):
    """Args: `folder`, the local one of `workdir`.  Raises ValueError if no run can be opened."""
    import wandb

    place = workdir / RUN_ID
    if not place.exists():
      with storage.written(place) as file:
        file.write(secrets.token_hex(4) + "\n")
    try:
      self._run = wandb.init(
        project=c.train.wandb,
        id=place.read_text().strip(),
        resume="allow",
        name=workdir.name,
        dir=os.fspath(folder),
        config=dataclasses.asdict(c),
        settings=wandb.Settings(console="off", quiet=True),  # the screen is ours
      )
    except Exception as error:  # of its own classes, for a missing key or network
      raise ValueError(
        f"train.wandb={c.train.wandb!r}: {type(error).__name__}: {error}; log in (wandb login), or "
        "set WANDB_MODE=offline"
      ) from error
    self._run.define_metric("*", step_metric="step")
    stack.push(self._finish)

  def _finish(
    self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
  ) -> None:
    self._run.finish(exit_code=int(kind is not None))

  def write(self, step: int, scalars: dict[str, float]) -> None:
    self._run.log({"step": step} | scalars)

  def flush(self) -> None:
    """Nothing: its own process writes at once."""
