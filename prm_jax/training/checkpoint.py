"""Checkpoints: parameters and optimiser state, and beside them all that gives them meaning.

`DIR/checkpoints/STEP` holds two trees, `params` and `optimizer` (so that scoring reads only the
first), and as metadata the experiment's configuration, the step contract, the hash of the rows it
was trained on, the versions of the packages, and a checksum of every array.  `DIR/tokenizer.json`
(or `.model`) is the tokenizer.

Storage checks little of what it gives back: a changed byte in an array's chunk is read as another
number.  The checksums are of the numbers on the devices, before they are saved and after they are
read, so whatever happened in between is noticed, on any mesh.

With several processes every method is called by all of them, on a directory that they share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from prm_jax import config as config_lib
from prm_jax.runtime import distributed, storage
from prm_jax.training.step import TrainState
from prm_jax.types import StepContract

Read = TypeVar("Read")


class Unreadable(ValueError):
  """A checkpoint is not what was saved, or cannot be read."""


@dataclasses.dataclass(frozen=True)
class Metadata:
  """What is stored beside the weights, as JSON."""

  config: config_lib.Experiment
  contract: StepContract
  vocab_size: int
  rows_hash: str

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self) | {"versions": distributed.versions()}

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> Metadata:
    """The inverse of `to_json`; JSON's lists become tuples again."""
    return config_lib.from_json(
      cls, {field.name: values[field.name] for field in dataclasses.fields(cls)}
    )


def checksums(tree: Any) -> dict[str, int]:
  """A 32-bit checksum of each array of a tree, by its path; the same on every mesh and process."""
  leaves = jax.tree_util.tree_flatten_with_path(jax.device_get(_checksums(tree)))[0]
  return {jax.tree_util.keystr(path, simple=True, separator="/"): int(x) for path, x in leaves}


@jax.jit
def _checksums(tree: Any) -> Any:
  return jax.tree.map(_checksum, tree)


def _checksum(x: jax.Array) -> jax.Array:
  """uint32 []: each number's bits times an odd number of its place, added modulo 2**32.

  Such sums do not depend on the order of adding; a single changed number always changes them.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
  place = jnp.zeros(x.shape, jnp.uint32)
  for axis, size in enumerate(x.shape):
    place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
  return jnp.sum(bits.astype(jnp.uint32) * (2 * place + 1), dtype=jnp.uint32)


def _digest(values: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _anywhere(problem: str | None) -> str | None:
  """The problem; if only other processes have one, a sentence that says so."""
  somewhere = distributed.somewhere(problem is not None)
  return problem or ("another host could not read it" if somewhere else None)


def latest(workdir: str | storage.Path) -> tuple[int, Metadata] | None:
  """Step and metadata of the newest checkpoint of a work directory; None: there is none."""
  if not (storage.path(workdir) / "checkpoints").is_dir():
    return None
  with contextlib.closing(Checkpointer(workdir)) as reader:
    return reader.latest()


@dataclasses.dataclass
class Best:
  """Preserves the checkpoints with the best evaluations, for orbax.

  Its own policy of that name reads a file of metrics for each checkpoint when a directory is
  opened, and a damaged one ends the run.
  """

  keep: int
  values: dict[int, float]  # by step, the higher the better; steps without evaluation are not there

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    known = [c.step for c in checkpoints if c.step in self.values]
    ranked = sorted(known, key=lambda step: (self.values[step], step), reverse=True)
    return [c.step in ranked[: self.keep] for c in checkpoints]


class Checkpointer:
  """Saves and restores the training state of one work directory."""

  def __init__(self, workdir: str | storage.Path, c: config_lib.Train | None = None):
    """Args: c: says which checkpoints to keep, for the run that writes them; None: only read.

    A reader leaves unfinished saves alone: they may be another process's, under way.
    """
    policies = ocp.training.preservation_policies
    self._c = c
    self._best = Best(c.keep_best if c else 0, {})
    policy = None if c is None else [policies.LatestN(c.keep), self._best]
    self._checkpointer = ocp.training.Checkpointer(
      storage.absolute(workdir) / "checkpoints",
      preservation_policy=policy and policies.AnyPreservationPolicy(policy),
      cleanup_tmp_directories=c is not None,
    )
    self._saving: tuple[int, Any] | None = None  # the step of the save under way, and its future
    self._read: dict[int, dict[str, Any]] = {}  # metadata by step
    for step in self.steps() if c else ():
      values, problem = self._stored_here(step)  # a problem is said when it is to be used
      if not problem:
        self._rank(step, values["evaluation"])

  def steps(self) -> list[int]:
    """Of the finished checkpoints, ascending."""
    return [each.step for each in self._checkpointer.checkpoints]

  def latest(self) -> tuple[int, Metadata] | None:
    """Step and metadata of the newest checkpoint whose metadata is whole; None: there is none.

    What it describes may still not read back; `newest` looks.
    """
    found, _ = self._newest(lambda step, metadata: None)
    return found and found[:2]

  def newest(
    self, read: Callable[[int, Metadata], Read], which: str = "latest"
  ) -> tuple[int, Metadata, Read] | None:
    """The newest checkpoint that can be read: step, metadata and what `read` makes of them.

    A warning names each later one that cannot.  The run that writes the directory renames these to
    STEP.unreadable, so that their steps can be saved again.

    Args:
      read: may raise Unreadable (`restore` does): then the checkpoint before is tried.
      which: "best": the best of those that were evaluated, by the run's `train.best_metric`, and
        the next best if it cannot be read; a number: the checkpoint of that step and no other.

    Returns:
      None: there is no checkpoint.

    Raises:
      Unreadable: there are checkpoints, but none that can be read; they stay as they are.
      ValueError: there are checkpoints, but not what `which` asks for.
    """
    found, problems = self._newest(read, which)
    for step, problem in problems.items():
      print(f"warning: {problem}; step {found[0]} is used instead", file=sys.stderr, flush=True)
      if self._c is not None:
        self._set_aside(step)
    return found

  def _newest(self, read, which="latest"):
    """What `newest` returns, and by step the errors of those that could not be read."""
    distributed.check_same({f"steps of the checkpoints in {self._directory}": self.steps()})
    problems = {}
    for step in self._ordered(which):
      try:
        metadata = Metadata.from_json(self._stored(step))
        return (step, metadata, read(step, metadata)), problems
      except Unreadable as error:
        problems[step] = error
    if not problems:
      return None, problems
    raise Unreadable(
      "\n".join(map(str, problems.values()))
      + f"\nno checkpoint is left to go on from; put one back, or move {self._directory} away to "
      "begin again from step 0"
    )

  def _ordered(self, which: str) -> list[int]:
    """The steps of `newest`, in the order in which they are tried."""
    steps = self.steps()[::-1]
    if which == "latest" or not steps:
      return steps
    if which != "best":
      if which not in map(str, steps):
        raise ValueError(
          f"{self._directory}: no checkpoint of step {which}; expected latest, best or one of "
          f"{', '.join(map(str, steps))}"
        )
      return [int(which)]
    metric, merits = None, {}
    for step in steps:
      with contextlib.suppress(Unreadable):
        stored = self._stored(step)
        metric = metric or stored["config"]["train"]["best_metric"]  # as the run has it by now
        merits[step] = _merit(stored["evaluation"], metric)
    merits = {step: merit for step, merit in merits.items() if merit is not None}
    if not merits:
      raise ValueError(f"{self._directory}: no checkpoint there was evaluated, so none is the best")
    return sorted(merits, key=merits.get, reverse=True)

  def evaluation(self, step: int) -> dict[str, Any] | None:
    """What was saved with a checkpoint of the evaluation at its step; None: there was none."""
    return self._stored(step)["evaluation"]

  def versions(self, step: int) -> dict[str, str]:
    """The packages that wrote a checkpoint, as `hosts.versions`."""
    return self._stored(step)["versions"]

  def save(
    self, state: TrainState, metadata: Metadata, evaluation: dict[str, Any] | None = None
  ) -> None:
    """Starts writing the state of this step; returns before it is on disk.

    Args:
      evaluation: of this state, if there was one; it decides whether the checkpoint is the best.

    Raises:
      OSError: this save cannot begin, or the one before failed.
    """
    self.finish()
    step, tree = int(state.step), {"params": state.params, "optimizer": state.opt_state}
    values = metadata.to_json() | {"evaluation": evaluation, "checksums": checksums(tree)}
    self._rank(step, evaluation)
    try:
      future = self._checkpointer.save_checkpointables_async(
        step,
        tree,
        force=True,  # the loop decides when
        custom_metadata=values | {"sha256": _digest(values)},
      )
    except Exception as error:  # of orbax, tensorstore or the file system, in whatever class
      raise self._failed(step, error) from error
    self._saving = step, future

  def check(self) -> None:
    """OSError if the save under way has failed by now."""
    self._wait(timeout=0)

  def finish(self) -> None:
    """Waits for the save under way; OSError if it fails."""
    self._wait(timeout=None)

  def _wait(self, timeout: float | None) -> None:
    if self._saving is None:
      return
    step, future = self._saving
    try:
      future.result(timeout)
    except TimeoutError as error:
      if timeout is None:
        raise self._failed(step, error) from error
      return  # not done yet
    except Exception as error:  # as in `save`
      self._saving = None
      raise self._failed(step, error) from error
    self._saving = None

  def restore(self, step: int, abstract: TrainState) -> TrainState:
    """The state as saved, on the mesh of `abstract`; Unreadable if it is not what was saved."""
    wanted = {"params": abstract.params, "optimizer": abstract.opt_state}
    loaded = self._load(step, wanted)
    array = jax.device_put(jax.numpy.asarray(step, jax.numpy.int32), abstract.step.sharding)
    return TrainState(array, loaded["params"], loaded["optimizer"])

  def restore_params(self, step: int, abstract: Any) -> Any:
    """The parameters alone; Unreadable if they are not what was saved."""
    return self._load(step, {"params": abstract})["params"]

  def close(self) -> None:
    """Waits for the save under way; OSError if it fails."""
    try:
      self.finish()
    finally:
      with contextlib.suppress(Exception):  # it repeats the error of a save that failed
        self._checkpointer.close()

  @property
  def _directory(self):
    return self._checkpointer.directory

  def _rank(self, step: int, evaluation: dict[str, Any] | None) -> None:
    merit = _merit(evaluation, self._c.best_metric)
    if merit is not None:
      self._best.values[step] = merit

  def _stored(self, step: int) -> dict[str, Any]:
    """The metadata of a checkpoint, as in `save`; Unreadable if that is not what it is."""
    values, problem = self._stored_here(step)
    if problem := _anywhere(problem):
      raise self._unreadable(step, problem)
    return values

  def _stored_here(self, step: int) -> tuple[dict[str, Any], str | None]:
    """The same for this process alone, and what is wrong with it."""
    if step not in self._read:
      try:
        # orbax's own reader opens every array for it, and of half a checkpoint, which a run that
        # was killed while it deleted one leaves, prints what is no error
        text = (self._directory / str(step) / "_CHECKPOINT_METADATA").read_text()
        values = dict(json.loads(text)["custom_metadata"])
      except Exception as error:  # whatever damaged files lead to
        return {}, _brief(error)
      if values.pop("sha256", None) != _digest(values):
        return {}, "its metadata has been changed, or is from an older version"
      self._read[step] = values
    return self._read[step], None

  def _load(self, step: int, wanted: dict[str, Any]) -> dict[str, Any]:
    expected, problem = self._stored(step)["checksums"], None
    # Each process reads its parts without waiting for the others: one that cannot would leave them
    # waiting.  They agree right after.
    alone = ocp.Context()
    alone.multiprocessing.primary_host = jax.process_index()
    alone.multiprocessing.active_processes = {jax.process_index()}
    try:
      with alone:
        loaded = ocp.load_checkpointables(self._directory / str(step), wanted)
      jax.block_until_ready(loaded)
    except Exception as error:  # whatever damaged files lead to
      problem = _brief(error)
    if problem := _anywhere(problem):
      raise self._unreadable(step, problem)
    changed = [name for name, found in checksums(loaded).items() if found != expected.get(name)]
    if changed:
      raise self._unreadable(step, f"the numbers of {', '.join(changed)} are not those saved")
    return loaded

  def _unreadable(self, step: int, problem: str) -> Unreadable:
    return Unreadable(f"{self._directory / str(step)} does not read back: {problem}")

  def _failed(self, step: int, error: Exception) -> OSError:
    return OSError(
      f"{self._directory}: saving step {step} failed: {_brief(error)}; the checkpoints before it "
      "are as they were.  Is there room, and may it be written?  Then run the same command again"
    )

  def _set_aside(self, step: int) -> None:
    if distributed.is_first():
      source, number = self._directory / str(step), 0
      while (target := self._directory / f"{step}.unreadable{number or ''}").exists():
        number += 1
      source.rename(target)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices(f"{step} is set aside")
    self._checkpointer.reload()


def _merit(evaluation: dict[str, Any] | None, metric: str) -> float | None:
  """The higher the better; None: not evaluated, or not finite."""
  value = (evaluation or {}).get(metric)
  if value is None or not math.isfinite(value):
    return None
  return -value if metric in config_lib.LOWER_IS_BETTER else value


def _brief(error: Exception, limit: int = 300) -> str:
  """The class and first line of an error's first cause, which may run over pages."""
  while error.__cause__ is not None:  # orbax wraps what storage says
    error = error.__cause__
  line = next(iter(str(error).splitlines()), "").partition(" [tensorstore_spec")[0]
  line = line if len(line) <= limit else f"{line[: limit - 3]}..."
  return f"{type(error).__name__}: {line}" if line else type(error).__name__
