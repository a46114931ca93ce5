"""The record of a run: metrics.jsonl, TensorBoard events where installed, and a progress bar."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from typing import Any, ClassVar

import tqdm

from prm_jax.runtime import distributed, json_lines, storage, workdir_lock


class Log:
  """Writes one JSON line per record; `{"step": 50, "split": "train", "loss": 0.61, ...}`.

  In a bucket the files are as they were at the last `sync`.
  """

  def __init__(
    self, hold: workdir_lock.WorkdirLock, steps: int, step: int, again: str | None = None
  ):
    """Opens the log of a run of `steps` updates at `step`; later records of a killed run go.

    Args:
      hold: of the work directory; once it is lost, nothing is copied to a bucket.
      again: a split whose record at `step` goes as well: it will be written again.
    """
    self._workdir = workdir = hold.workdir
    self._stack = contextlib.ExitStack()
    self._folder = self._stack.enter_context(storage.local(workdir, unless=hold.taken_by))
    self._path = self._folder / "metrics.jsonl"
    if storage.in_bucket(workdir) and (workdir / self._path.name).exists():
      self._path.write_bytes((workdir / self._path.name).read_bytes())
    self.last: dict[str, dict[str, Any]] = {}  # record of each split, of those kept
    self._forget_after(step, again)
    self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run
    self._terminal = sys.stderr.isatty()
    self._bar = tqdm.tqdm(
      total=steps, initial=step, unit="step", disable=not self._terminal, dynamic_ncols=True
    )
    try:
      import tensorboardX

      events = str(self._folder / "tensorboard")
      self._board = tensorboardX.SummaryWriter(events, purge_step=step + 1)
    except ImportError:
      self._board = None

  def _forget_after(self, step: int, again: str | None) -> None:
    if not self._path.exists():
      return
    kept = []
    for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True):
      try:
        record = json.loads(line) if line.endswith("\n") else {"step": math.inf}
        if record["step"] < step or (record["step"] == step and record["split"] != again):
          kept.append(line)
          self.last[record["split"]] = record
      except (ValueError, KeyError):
        pass  # a line half written when the run was killed
    with json_lines.written(self._path) as file:
      file.writelines(kept)

  def sync(self) -> None:
    """Waits until all records are on disk, or in the bucket."""
    os.fsync(self._file.fileno())
    if storage.in_bucket(self._workdir):
      if self._board is not None:
        self._board.flush()
      storage.upload(self._folder, self._workdir)

  def advance(self) -> None:
    self._bar.update()

  def write(self, step: int, split: str, values: dict[str, Any]) -> None:
    """Records metrics of `split` at `step`; nested ones are joined by "/" in TensorBoard."""
    stored = {k: finite_or_none(v) for k, v in values.items()}
    try:
      self._file.write(json.dumps({"step": step, "split": split, **stored}, allow_nan=False) + "\n")
      self._file.flush()
    except OSError as error:  # which names no file
      raise OSError(f"{self._path}: {error}") from error
    scalars = dict(flat(values))
    if self._board is not None:
      for name, value in scalars.items():
        self._board.add_scalar(f"{split}/{name}", value, step)
    if split == "train":
      short = {"loss": f"{values['loss']:.3f}", "tokens/s": f"{values['tokens_per_second']:.0f}"}
      self._bar.set_postfix(short)
      self.say(f"step {step}: " + "  ".join(f"{k} {v}" for k, v in short.items()), bar_says_it=True)
    elif split != "goodput" or step == self._bar.total:  # shown once, at the end
      said = (item for item in scalars.items() if "count" not in item[0] and item[0] != "unix")
      text = "  ".join(f"{k} {v:.4g}" for k, v in said)
      self.say(f"step {step} {split}: {text}")

  def say(self, text: str, bar_says_it: bool = False) -> None:
    """A line for people; what the progress bar shows already only where there is no bar."""
    if self._terminal and bar_says_it:
      return
    self._bar.write(text, file=sys.stderr)

  def warn(self, text: str) -> None:
    """A line about this host."""
    self.say(distributed.of_this(text))

  def close(self) -> None:
    self._bar.close()
    self._file.close()
    if self._board is not None:
      self._board.close()
    self._stack.close()


class Silent:
  """What a host that is not the first has in place of a log."""

  last: ClassVar[dict[str, dict[str, Any]]] = {}

  def sync(self) -> None:
    pass

  def advance(self) -> None:
    pass

  def write(self, step: int, split: str, values: dict[str, Any]) -> None:
    pass

  def say(self, text: str) -> None:
    pass

  def warn(self, text: str) -> None:
    print(distributed.of_this(text), file=sys.stderr, flush=True)

  def close(self) -> None:
    pass


def flat(values: dict[str, Any], prefix: str = ""):
  """(name, number) of nested metrics: accuracy_by_class/-1 and so on; what is None is left out."""
  for key, value in values.items():
    if isinstance(value, dict):
      yield from flat(value, f"{prefix}{key}/")
    elif value is not None:
      yield prefix + key, value


def finite_or_none(value: Any) -> Any:
  """JSON has no NaN."""
  return None if isinstance(value, float) and not math.isfinite(value) else value
