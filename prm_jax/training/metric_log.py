"""The metrics and the goodput of a run, written to metrics.jsonl, boards and a progress bar."""

import collections
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
from flax import traverse_util

from prm_jax import config as config_lib
from prm_jax.runtime import distributed, progress, storage, workdir_lock
from prm_jax.training import boards

AHEAD = 2  # updates that the host may dispatch ahead of the devices; a save waits for them
DATA_BOUND = 0.1  # warn if this share of the time is spent waiting for rows
BRIEF = 0.1  # seconds; shorter updates (toy models) never warn: every host is too slow for them
# Keys of a goodput record that are not parts of the time.
NO_PART = {"step", "split", "goodput", "total", "unix", "updates"}


class Goodput:
  """The seconds that a run spent on each part of its work, over all its processes."""

  def __init__(self):
    self._began, self._began_unix = time.perf_counter(), time.time()
    self.seconds: collections.Counter[str] = collections.Counter(away=0.0)
    self.last: collections.Counter[str] = collections.Counter()  # the latest block of each part

  @contextlib.contextmanager
  def spent_on(self, part: str) -> Iterator[None]:
    """Adds the time of the block to `part`, without the time of nested blocks."""
    start, before = time.perf_counter(), self.seconds.total()
    try:
      yield
    finally:
      inside = self.seconds.total() - before
      self.last[part] = time.perf_counter() - start - inside
      self.seconds[part] += self.last[part]

  def resume(self, last: dict[str, float]) -> None:
    """Adds the time of earlier processes, whose `summary` at the resumed step is `last`.

    The time since then is "away": nothing ran, or a kill undid the work.
    """
    away = max(self._began_unix - last["unix"], 0.0)  # host clocks may differ
    self.seconds.update({part: x for part, x in last.items() if part not in NO_PART}, away=away)
    self._began -= last["total"] + away

  def summary(self) -> dict[str, float]:
    """Returns the seconds of each part, and the "total" since the run first began.

    "updates" is the time that no other part claims, and "goodput" its share in the total.  "unix"
    is the present time in seconds since 1970.
    """
    total = time.perf_counter() - self._began
    updates = total - self.seconds.total()
    about = {"goodput": updates / total, "total": total, "unix": time.time(), "updates": updates}
    return {**about, **self.seconds}


def seconds_left(c: config_lib.Train, step: int, step_seconds: float, goodput: Goodput) -> float:
  """Estimates the seconds left after update `step`, before its own evaluation and save.

  Each evaluation or save counts as long as the last one took, and as nothing before the first.
  """
  due = lambda every: c.steps // every - (step - 1) // every + (c.steps % every > 0)
  left = (c.steps - step) * step_seconds
  left += due(c.eval_every) * goodput.last["evaluation"]
  return left + due(c.save_every) * goodput.last["checkpoint"]


class Log:
  """Writes one JSON line per record: `{"step": 50, "split": "train", "loss": 0.61, ...}`.

  Only the first host writes.  Files of a bucket are uploaded by `sync` and at the end.
  """

  def __init__(
    self,
    lock: workdir_lock.WorkdirLock,
    c: config_lib.Experiment,
    step: int,
    stack: contextlib.ExitStack,
  ):
    """Opens the log of a run at `step`, and deletes later records.  `stack` closes it.

    Once another run has taken over the work directory of `lock`, nothing more is uploaded.
    """
    self._writes, self._workdir = distributed.is_first(), lock.workdir
    self.last: dict[str, dict[str, Any]] = {}  # by split, the last record that was kept
    self._path, self._boards = os.devnull, []
    if self._writes:
      self._folder = stack.enter_context(storage.local(lock.workdir, unless=lock.taken_by))
      self._path = self._folder / "metrics.jsonl"
      self._keep_until(step)
      with contextlib.suppress(ImportError):
        self._boards.append(boards.tensorboard(self._folder, step, stack))
      if c.train.wandb:
        self._boards.append(boards.weights_and_biases(c, lock.workdir, self._folder, stack))
    self._file = stack.enter_context(open(self._path, "a", encoding="utf-8"))  # noqa: SIM115
    self.bar = progress.Progress(
      desc="training", total=c.train.steps, initial=step, unit="steps", disable=not self._writes
    )
    stack.callback(self.bar.close)

  def _keep_until(self, step: int) -> None:
    """Drops the records after `step` from metrics.jsonl, and a line that a kill cut short."""
    stored, kept = self._workdir / "metrics.jsonl", []
    for line in stored.read_text().splitlines(keepends=True) if stored.exists() else ():
      with contextlib.suppress(ValueError):  # half a line
        record = json.loads(line) if line.endswith("\n") else {"step": math.inf}
        if record["step"] <= step:
          kept.append(line)
          self.last[record["split"]] = record
    with storage.written(self._path) as file:
      file.writelines(kept)

  def has(self, step: int, split: str) -> bool:
    """Returns whether the last kept record of `split` is of `step`.  All hosts call it."""
    missing = distributed.is_first() and self.last.get(split, {}).get("step") != step
    return not distributed.somewhere(missing)

  def sync(self) -> None:
    """Waits until all records are on disk, or in the bucket."""
    if self._writes:
      os.fsync(self._file.fileno())
      if storage.in_bucket(self._workdir):
        storage.upload(self._folder, self._workdir)

  def write(self, step: int, split: str, values: dict[str, Any]) -> None:
    """Records metrics of `split` at `step`; boards get nested metrics as `name/key`.

    NaN and infinity, which JSON lacks, become null.
    """
    finite = lambda x: x if not isinstance(x, float) or math.isfinite(x) else None
    record = {"step": step, "split": split} | {k: finite(x) for k, x in values.items()}
    try:
      self._file.write(json.dumps(record, allow_nan=False) + "\n")
      self._file.flush()
    except OSError as error:  # it does not name the file
      raise OSError(f"{self._path}: {error}") from error
    scalars = traverse_util.flatten_dict(values, sep="/")
    scalars = {name: x for name, x in scalars.items() if x is not None}
    for write in self._boards:
      write(step, {f"{split}/{name}": value for name, value in scalars.items()})
    if split == "train":
      short = f"loss {values['loss']:.3f}  tokens/s {values['tokens_per_second']:.0f}"
      self.bar.set_postfix_str(short, refresh=sys.stderr.isatty())
      if not sys.stderr.isatty():
        self.say(f"step {step} of {self.bar.total}: {short}, {self.bar.left(step)} left")
    elif split != "goodput" or step == self.bar.total:  # goodput is printed only at the end
      unit = " s" if split == "goodput" else ""
      shown = (item for item in scalars.items() if "count" not in item[0] and item[0] != "unix")
      texts = (f"{k} {v:.1%}" if k == "goodput" else f"{k} {v:.4g}{unit}" for k, v in shown)
      self.say(f"step {step} {split}: " + "  ".join(texts))

  def say(self, text: str) -> None:
    """Prints text above the progress bar, on the first host."""
    if self._writes:
      with contextlib.suppress(BrokenPipeError):  # SIGTERM may have ended `| tee`; still save
        self.bar.write(text, file=sys.stderr)
      self.bar.said()


class UpdateMetrics:
  """Collects the metrics of updates, and writes their means as records.

  Reading a metric waits for its update, so each record is written one update late, when the devices
  are busy with the next one.  The host stays at most `AHEAD` updates ahead of the devices.
  """

  def __init__(self, log: Log, goodput: Goodput, c: config_lib.Train, tokens: float):
    """Starts without records; `tokens` is the mean number of tokens per update."""
    self._log, self._goodput, self._config, self._tokens = log, goodput, c, tokens
    self._warned = False  # whether it has said that data is the bottleneck
    self._pending: list[dict[str, jax.Array]] = []
    # The record to write next: its last step and its updates.
    self._due: tuple[int, list[dict[str, jax.Array]]] | None = None
    self._start: tuple[float, float] | None = None  # of the record: time, seconds waited for data

  def add(self, metrics: dict[str, jax.Array]) -> None:
    """Adds the update that has just been dispatched, and writes the record that is due."""
    if self._start is None:  # the first update: its compilation does not count
      self.restart()
    self._log.bar.update()
    self.write()
    self._pending.append(metrics)
    if len(self._pending) > AHEAD:
      jax.block_until_ready(self._pending[-1 - AHEAD])

  def close_record(self, step: int) -> None:
    """Ends a record at this step; the next `add` or `write` writes it."""
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
    means = {key: float(np.mean([update[key] for update in values])) for key in values[0]}
    start, waited = self._start
    self.restart()
    seconds, waited = self._start[0] - start, self._start[1] - waited
    means["learning_rate"] = float(values[-1]["learning_rate"])  # of the last one
    means["tokens_per_second"] = len(values) * self._tokens / seconds
    means["step_seconds"] = seconds / len(values)
    means["data_wait_seconds"] = waited / len(values)
    c, step_seconds, goodput = self._config, means["step_seconds"], self._goodput
    left = lambda done: seconds_left(c, done, step_seconds, goodput)
    self._log.bar.estimate(left, at_most=c.stop_patience > 0)
    self._log.write(step, "train", means)
    slow = step_seconds >= BRIEF and waited / seconds >= DATA_BOUND
    if slow and not self._warned:  # on every host: one machine may be slower than the others
      self._warned = True
      text = (
        f"data is the bottleneck: {waited / seconds:.0%} of the time was spent waiting for rows, "
        "which the host's CPU builds; give it more cores, or use more hosts"
      )
      self._log.bar.write(distributed.of_this(text), file=sys.stderr)
    if not (math.isfinite(means["loss"]) and math.isfinite(means["gradient_norm"])):
      raise ValueError(
        f"loss {means['loss']}, gradient norm {means['gradient_norm']} in the steps up to {step}: "
        "lower optim.learning_rate or raise optim.warmup_steps; the last checkpoint predates this"
      )

  def restart(self) -> None:
    """Excludes the time until now, such as that of a save, from the next record."""
    self._start = time.perf_counter(), self._goodput.seconds["data"]
