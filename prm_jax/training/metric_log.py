"""Where a run's metrics go: metrics.jsonl, TensorBoard events if installed, and a progress bar."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import tqdm

from prm_jax.runtime import distributed, json_lines, storage, workdir_lock
from prm_jax.training import goodput as goodput_lib

AHEAD = 2  # updates that the host may be ahead of the devices
DATA_BOUND = 0.1  # share of the time spent waiting for rows from which on there is a warning


class Log:
  """Writes one JSON line per record: `{"step": 50, "split": "train", "loss": 0.61, ...}`.

  Only the first host writes.  In a bucket, the files are updated by `sync` and `close`.
  """

  def __init__(
    self, lock: workdir_lock.WorkdirLock, steps: int, step: int, again: str | None = None
  ):
    """Opens the log of a run of `steps` updates at `step`, and deletes the records after it.

    Args:
      lock: on the work directory; if another run takes that over, nothing more is uploaded.
      again: a split whose record at `step` is deleted as well, to be written again.
    """
    self._writes = distributed.is_first()
    self._workdir = lock.workdir
    self._stack = contextlib.ExitStack()
    self.last: dict[str, dict[str, Any]] = {}  # by split, the last record that was kept
    self._path, self._board = os.devnull, None
    if self._writes:
      self._folder = self._stack.enter_context(storage.local(lock.workdir, unless=lock.taken_by))
      self._path = self._folder / "metrics.jsonl"
      self._keep_until(step, again)
      with contextlib.suppress(ImportError):
        import tensorboardX

        events = str(self._folder / "tensorboard")
        self._board = tensorboardX.SummaryWriter(events, purge_step=step + 1)
        self._stack.callback(self._board.close)
    self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - closed by the stack
    self._stack.enter_context(self._file)
    self._bar = tqdm.tqdm(
      total=steps,
      initial=step,
      unit="step",
      disable=not (self._writes and sys.stderr.isatty()),
      dynamic_ncols=True,
    )
    self._stack.callback(self._bar.close)

  def _keep_until(self, step: int, again: str | None) -> None:
    stored = self._workdir / "metrics.jsonl"
    kept = []
    for line in stored.read_text().splitlines(keepends=True) if stored.exists() else ():
      try:
        record = json.loads(line) if line.endswith("\n") else {"step": math.inf}
        if record["step"] < step or (record["step"] == step and record["split"] != again):
          kept.append(line)
          self.last[record["split"]] = record
      except (ValueError, KeyError):
        pass  # half a line, from a run that was killed
    with json_lines.written(self._path) as file:
      file.writelines(kept)

  def sync(self) -> None:
    """Waits until all records are on disk, or in the bucket."""
    if self._writes:
      os.fsync(self._file.fileno())
    if self._writes and storage.in_bucket(self._workdir):
      if self._board is not None:
        self._board.flush()
      storage.upload(self._folder, self._workdir)

  def advance(self) -> None:
    """Moves the progress bar on by a step."""
    self._bar.update()

  def write(self, step: int, split: str, values: dict[str, Any]) -> None:
    """Records metrics of `split` at `step`; names of nested ones are joined in TensorBoard."""
    record = {"step": step, "split": split} | {k: _finite_or_none(v) for k, v in values.items()}
    try:
      self._file.write(json.dumps(record, allow_nan=False) + "\n")
      self._file.flush()
    except OSError as error:  # which names no file
      raise OSError(f"{self._path}: {error}") from error
    scalars = dict(_scalars(values))
    if self._board is not None:
      for name, value in scalars.items():
        self._board.add_scalar(f"{split}/{name}", value, step)
    if split == "train":
      short = {"loss": f"{values['loss']:.3f}", "tokens/s": f"{values['tokens_per_second']:.0f}"}
      self._bar.set_postfix(short)
      if self._bar.disable:  # else the bar shows it
        self.say(f"step {step}: " + "  ".join(f"{k} {v}" for k, v in short.items()))
    elif split != "goodput" or step == self._bar.total:  # goodput is shown at the end
      shown = (item for item in scalars.items() if "count" not in item[0] and item[0] != "unix")
      self.say(f"step {step} {split}: " + "  ".join(f"{k} {v:.4g}" for k, v in shown))

  def say(self, text: str) -> None:
    """Prints a line for people, on the first host."""
    if self._writes:
      self._bar.write(text, file=sys.stderr)

  def warn(self, text: str) -> None:
    """Prints a line about this host, on every host that calls it."""
    self._bar.write(distributed.of_this(text), file=sys.stderr)

  def close(self) -> None:
    self._stack.close()


class UpdateMetrics:
  """Metrics of the updates since the last record, which are means over these updates.

  Reading a metric waits for its update.  So a record is written one update late, when the devices
  have the next one to work on.  The host stays at most `AHEAD` updates ahead, so that a save never
  waits for many.
  """

  def __init__(
    self,
    log: Log,
    goodput: goodput_lib.Goodput,
    learning_rates: np.ndarray,
    tokens_per_update: float,
  ):
    self._log, self._goodput = log, goodput
    self._rates, self._tokens = learning_rates, tokens_per_update
    self._pending: list[dict[str, jax.Array]] = []
    self._due: tuple[int, list[dict[str, jax.Array]]] | None = None  # a record to be written
    self._start: tuple[float, float] | None = None  # time, and seconds spent waiting for data

  def add(self, metrics: dict[str, jax.Array]) -> None:
    """Adds the update that has just been dispatched, and writes the record that is due."""
    if self._start is None:  # the first update, whose compilation does not count
      self.restart()
    self._log.advance()
    self.write()
    self._pending.append(metrics)
    if len(self._pending) > AHEAD:
      jax.block_until_ready(self._pending[-1 - AHEAD])

  def close_record(self, step: int) -> None:
    """Ends a record at this step; it is written by the next `add` or `write`."""
    self._due, self._pending = (step, self._pending), []

  def write(self) -> None:
    """Writes the record that is due, if any.

    Raises:
      ValueError: loss or gradient norm is not finite.
    """
    if self._due is None:
      return
    (step, updates), self._due = self._due, None
    values = jax.device_get(updates)
    means = {key: float(np.mean([each[key] for each in values])) for key in values[0]}
    (start, waited), _ = self._start, self.restart()
    seconds = self._start[0] - start
    means["learning_rate"] = self._rates[step - 1].item()
    means["tokens_per_second"] = len(values) * self._tokens / seconds
    means["step_seconds"] = seconds / len(values)
    means["data_wait_seconds"] = (self._start[1] - waited) / len(values)
    self._log.write(step, "train", means)
    self._warn_if_data_bound(means["data_wait_seconds"] / means["step_seconds"])
    if not (math.isfinite(means["loss"]) and math.isfinite(means["gradient_norm"])):
      raise ValueError(
        f"loss {means['loss']}, gradient norm {means['gradient_norm']} in the steps up to {step}: "
        "lower optim.learning_rate or raise optim.warmup_steps; the last checkpoint is from before"
      )

  def _warn_if_data_bound(self, share: float) -> None:
    if share >= DATA_BOUND:  # on each host: one machine may be slower than the others
      self._log.warn(
        f"data is the bottleneck: {share:.0%} of the time went to waiting for rows, which the "
        "host's processor builds; give it more cores, or each host fewer rows of a batch (more "
        "hosts)"
      )

  def restart(self) -> None:
    """Leaves the time until now, such as of an evaluation or a save, out of the next record."""
    self._start = time.perf_counter(), self._goodput.seconds["data"]


def _scalars(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
  """(name, number) of nested metrics, such as accuracy_by_class/-1, without those that are None."""
  for key, value in values.items():
    if isinstance(value, dict):
      yield from _scalars(value, f"{prefix}{key}/")
    elif value is not None:
      yield prefix + key, value


def _finite_or_none(value: Any) -> Any:
  """The value, with None in place of NaN and infinity, which JSON does not have."""
  return None if isinstance(value, float) and not math.isfinite(value) else value
