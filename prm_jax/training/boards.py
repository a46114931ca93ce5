"""Writers of metrics to TensorBoard and to Weights & Biases."""

import contextlib
import dataclasses
import os
import pathlib
import secrets
from collections.abc import Callable

from prm_jax import config as config_lib
from prm_jax.runtime import storage

RUN_ID = "wandb_run_id"  # a file in the work directory
Board = Callable[[int, dict[str, float]], None]  # writes the values of a step by name


def check(c: config_lib.Train) -> None:
  """Raises ValueError if `train.wandb` is set and the package wandb is not installed."""
  if not c.wandb:
    return
  try:  # `import wandb` would succeed without the package, on the folder wandb/ of an earlier run
    from wandb import init  # noqa: F401
  except ImportError as error:
    raise ValueError(
      f"train.wandb={c.wandb!r}: the package wandb is not installed: pip install 'prm_jax[wandb]', "
      "or leave the setting out"
    ) from error


def tensorboard(folder: pathlib.Path, step: int, stack: contextlib.ExitStack) -> Board:
  """Returns a writer of events to the folder tensorboard/ in `folder`; `stack` closes it.

  Events that an earlier process wrote for steps after `step` are dropped.  Raises ImportError
  without tensorboardX.
  """
  import tensorboardX

  writer = tensorboardX.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
  stack.callback(writer.close)

  def write(step: int, scalars: dict[str, float]) -> None:
    for name, value in scalars.items():
      writer.add_scalar(name, value, step)
    writer.flush()

  return write


def weights_and_biases(
  c: config_lib.Experiment,
  workdir: storage.Path,
  folder: pathlib.Path,
  stack: contextlib.ExitStack,
) -> Board:
  """Returns a writer to a W&B run of the project `train.wandb`; `stack` ends the run.

  Resuming continues the same W&B run, whose id is in WORKDIR/wandb_run_id.  The x-axis is a metric
  named `step`, because the service drops records whose built-in step does not increase, such as
  updates repeated after a resume.  WANDB_MODE=offline keeps everything in WORKDIR/wandb.

  Args:
    folder: the local copy of `workdir`.

  Raises:
    ValueError: the run cannot be opened.
  """
  import wandb

  id_file = workdir / RUN_ID
  if not id_file.exists():
    with storage.written(id_file) as file:
      file.write(secrets.token_hex(4) + "\n")
  try:
    run = wandb.init(
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
  run.define_metric("*", step_metric="step")
  stack.push(lambda kind, *_: run.finish(exit_code=int(kind is not None)))
  return lambda step, scalars: run.log({"step": step} | scalars)
