"""Writers of metrics to TensorBoard and to Weights & Biases."""

import contextlib
import dataclasses
import importlib
import os
import pathlib
import secrets

from prm_jax import config as config_lib
from prm_jax.runtime import storage

RUN_ID = "wandb_run_id"  # a file in the work directory


def check(c: config_lib.Train) -> None:
  """Raises ValueError if `train.wandb` is set and the package wandb is not installed."""
  if not c.wandb:
    return
  try:  # the folder wandb/ of an earlier run can be imported too, as an empty module
    missing = not hasattr(importlib.import_module("wandb"), "init")
  except ImportError:
    missing = True
  if missing:
    raise ValueError(
      f"train.wandb={c.wandb!r}: the package wandb is not installed: pip install 'prm_jax[wandb]', "
      "or leave the setting out"
    )


class TensorBoard:
  """Writes events to WORKDIR/tensorboard; raises ImportError without tensorboardX."""

  def __init__(self, folder: pathlib.Path, step: int, stack: contextlib.ExitStack):
    """Opens the event files of the run in `folder`, and drops its events after `step`."""
    import tensorboardX

    self._writer = tensorboardX.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
    stack.callback(self._writer.close)
    self.flush = self._writer.flush

  def write(self, step: int, scalars: dict[str, float]) -> None:
    for name, value in scalars.items():
      self._writer.add_scalar(name, value, step)


class WeightsAndBiases:
  """Writes to a run of the project `train.wandb`; a resumed run continues it by its id.

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
    """Opens the run; raises ValueError if that fails.  `folder` is the local copy of `workdir`."""
    import wandb

    id_file = workdir / RUN_ID
    if not id_file.exists():
      with storage.written(id_file) as file:
        file.write(secrets.token_hex(4) + "\n")
    try:
      self._run = wandb.init(
        project=c.train.wandb,
        id=id_file.read_text().strip(),
        resume="allow",
        name=workdir.name,
        dir=os.fspath(folder),
        config=dataclasses.asdict(c),
        settings=wandb.Settings(console="off", quiet=True),  # the progress bar has the screen
      )
    except Exception as error:  # wandb has its own classes for a missing key or network
      raise ValueError(
        f"train.wandb={c.train.wandb!r}: {type(error).__name__}: {error}; log in (wandb login), or "
        "set WANDB_MODE=offline"
      ) from error
    self._run.define_metric("*", step_metric="step")
    stack.push(lambda kind, *_: self._run.finish(exit_code=int(kind is not None)))

  def write(self, step: int, scalars: dict[str, float]) -> None:
    self._run.log({"step": step} | scalars)

  def flush(self) -> None:
    """Does nothing: wandb's own process writes at once."""
