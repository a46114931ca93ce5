"""Checkpoints: parameters and optimiser state, with the metadata that gives them meaning.

`DIR/checkpoints/STEP` holds two trees, `params` and `optimizer` (scoring reads only the first), and
as metadata the experiment's configuration, the step contract, the hash of the training rows, the
versions of the packages, the evaluation of that step, and a checksum of every array.
`DIR/tokenizer.json` (or `.model`) is the tokenizer.

Storage may return an array with a changed byte as if nothing had happened.  The checksums are
computed from the arrays on the devices, before saving and after reading, so that any change in
between is noticed, on any mesh.

With several hosts, all of them call every method, on a directory that they share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import msgspec
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from prm_jax import config as config_lib
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import distributed, storage
from prm_jax.training.step import TrainState
from prm_jax.types import StepContract

T = TypeVar("T")


class Unreadable(ValueError):
  """A checkpoint cannot be read, or is not what was saved."""


@dataclasses.dataclass(frozen=True)
class Metadata:
  """What the parameters are: the part of a checkpoint's metadata that is the same at every step."""

  config: config_lib.Experiment  # as resolved
  contract: StepContract
  vocab_size: int  # rows of the embedding
  rows_hash: str  # of the packed training rows

  def abstract_params(self, mesh: jax.sharding.Mesh) -> Any:
    """The parameters on a mesh, as `sharding.abstract_params` describes them."""
    classes = len(self.contract.classes)
    return sharding_lib.abstract_params(self.config.model, self.vocab_size, classes, mesh)


def checksums(tree: Any) -> dict[str, int]:
  """A 32-bit checksum of each array of a tree, by its path; the same on every mesh and host."""
  leaves = jax.tree_util.tree_flatten_with_path(jax.device_get(_checksums(tree)))[0]
  return {jax.tree_util.keystr(path, simple=True, separator="/"): int(x) for path, x in leaves}


@jax.jit
def _checksums(tree: Any) -> Any:
  return jax.tree.map(_checksum, tree)


def _checksum(x: jax.Array) -> jax.Array:
  """The sum, modulo 2**32, of each element's bits times an odd number given by its index.

  The sum does not depend on the order of addition, and every change of one element changes it.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
  index = jnp.zeros(x.shape, jnp.uint32)
  for axis, size in enumerate(x.shape):
    index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
  return jnp.sum(bits.astype(jnp.uint32) * (2 * index + 1), dtype=jnp.uint32)


def _digest(values: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def latest(workdir: str | storage.Path) -> tuple[int, Metadata] | None:
  """Step and metadata of the newest checkpoint of a work directory; None: there is none."""
  if not (storage.path(workdir) / "checkpoints").is_dir():
    return None
  with contextlib.closing(Checkpointer(workdir)) as reader:
    return reader.latest()


def restore_params(
  workdir: str | storage.Path, mesh: jax.sharding.Mesh, which: str = "latest"
) -> tuple[int, Metadata, Any]:
  """Step, metadata and parameters of a checkpoint; arguments and errors as in `newest` below."""
  with contextlib.closing(Checkpointer(workdir)) as reader:
    return reader.newest(
      lambda step, metadata: reader.restore_params(step, metadata.abstract_params(mesh)), which
    )


class Checkpointer:
  """Saves and restores the training state of one work directory."""

  def __init__(self, workdir: str | storage.Path, c: config_lib.Train | None = None):
    """Opens a work directory.

    Args:
      c: which checkpoints to keep, for the run that writes them.  None: the directory is only read,
        and unfinished saves, which another process may be writing, are left alone.
    """
    self._writes = c is not None
    self._info: dict[int, dict[str, Any]] = {}  # metadata read or written so far, by step
    self._saving: tuple[int, Any] | None = None  # step and future of the save under way
    self._directory = storage.absolute(workdir) / "checkpoints"
    policies, keep = ocp.training.preservation_policies, None
    if c is not None:
      best = _Best(c.keep_best, functools.partial(self._ranked, metric=c.best_metric))
      keep = policies.AnyPreservationPolicy([policies.LatestN(c.keep), best])
    self._checkpointer = ocp.training.Checkpointer(
      self._directory, preservation_policy=keep, cleanup_tmp_directories=self._writes
    )

  def steps(self) -> list[int]:
    """Steps of the finished checkpoints, ascending."""
    return [each.step for each in self._checkpointer.checkpoints]

  def latest(self) -> tuple[int, Metadata] | None:
    """Step and metadata of the newest checkpoint with undamaged metadata; None: there is none.

    Its arrays may be damaged; `newest` finds out.
    """
    found, _ = self._newest(lambda step, metadata: None, "latest")
    return found and found[:2]

  def newest(
    self, read: Callable[[int, Metadata], T], which: str = "latest"
  ) -> tuple[int, Metadata, T] | None:
    """The newest checkpoint that can be read: its step, its metadata, and what `read` returns.

    A warning names each newer one that cannot.  The run that writes the directory renames these to
    STEP.unreadable, so that their steps can be saved again.

    Args:
      read: raises Unreadable (as `restore` does) to have the checkpoint before it tried.
      which: "latest"; "best", by the run's `train.best_metric`, or the next best if that cannot be
        read; or a step, of which there is no alternative.

    Returns:
      None if there is no checkpoint at all.

    Raises:
      Unreadable: there are checkpoints, but none can be read.  They stay as they are.
      ValueError: there are checkpoints, but not the one that `which` asks for.
    """
    found, errors = self._newest(read, which)
    for step, error in errors.items():
      print(f"warning: {error}; step {found[0]} is used instead", file=sys.stderr, flush=True)
      if self._writes:
        self._set_aside(step)
    return found

  def _newest(self, read: Callable[[int, Metadata], T], which: str):
    """What `newest` returns, and by step the errors of the checkpoints that cannot be read."""
    distributed.check_same({f"steps of the checkpoints in {self._directory}": self.steps()})
    candidates, errors = self._candidates(which), {}
    distributed.check_same({f"readable checkpoints in {self._directory}": candidates})
    for step in candidates:
      try:
        metadata = msgspec.convert(self.info(step), Metadata)
        return (step, metadata, read(step, metadata)), errors
      except Unreadable as error:
        errors[step] = error
    if not errors:
      return None, errors
    raise Unreadable(
      "\n".join(map(str, errors.values()))
      + f"\nno checkpoint is left to go on from; put one back, or move {self._directory} away to "
      "begin again from step 0"
    )

  def _candidates(self, which: str) -> list[int]:
    """The steps that `newest` tries, in order."""
    steps = self.steps()[::-1]
    if which == "latest" or not steps:
      return steps
    if which == "best":
      if not (ranked := self._ranked(steps)):
        raise ValueError(f"{self._directory}: no checkpoint was evaluated, so none is the best")
      return ranked
    if which in map(str, steps):
      return [int(which)]
    raise ValueError(
      f"{self._directory}: no checkpoint of step {which}; expected latest, best or one of "
      f"{', '.join(map(str, steps))}"
    )

  def _ranked(self, steps: Sequence[int], metric: str = "") -> list[int]:
    """The steps that were evaluated, best first; by the run's latest `best_metric` if not given."""
    ranked = []
    for step in sorted(steps, reverse=True):
      with contextlib.suppress(Exception):  # a damaged one is reported when it is to be used
        info = self._read_info(step)
        metric = metric or info["config"]["train"]["best_metric"]
        value = (info["evaluation"] or {}).get(metric)
        if value is not None and math.isfinite(value):
          ranked.append((-value if metric in config_lib.LOWER_IS_BETTER else value, step))
    return [step for _, step in sorted(ranked, reverse=True)]

  def info(self, step: int) -> dict[str, Any]:
    """The fields of `Metadata` as JSON, and "evaluation" (or None), "versions" and "checksums".

    Raises:
      Unreadable: they cannot be read, or are not what was saved.
    """
    return self._on_all_hosts(step, lambda: self._read_info(step))

  def _read_info(self, step: int) -> dict[str, Any]:
    """`info` on this host alone."""
    if step not in self._info:
      # orbax's own reader opens every array as well, and reports errors for a checkpoint that was
      # being deleted when its run was killed.
      text = (self._directory / str(step) / "_CHECKPOINT_METADATA").read_text()
      values = dict(json.loads(text)["custom_metadata"])
      if values.pop("sha256", None) != _digest(values):
        raise ValueError("its metadata has been changed, or is from an older version")
      self._info[step] = values
    return self._info[step]

  def save(
    self, state: TrainState, metadata: Metadata, evaluation: dict[str, Any] | None = None
  ) -> None:
    """Starts to write the state of this step, and returns before it is on disk.

    Args:
      evaluation: metrics of this state, if it was evaluated; they decide whether it is the best.

    Raises:
      OSError: this save cannot begin, or the one before failed.
    """
    self.finish()
    step, tree = int(state.step), {"params": state.params, "optimizer": state.opt_state}
    values = dataclasses.asdict(metadata) | {"versions": distributed.versions()}
    values |= {"evaluation": evaluation, "checksums": checksums(tree)}
    self._info[step] = values
    try:
      future = self._checkpointer.save_checkpointables_async(
        step,
        tree,
        force=True,  # the loop decides when to save
        custom_metadata=values | {"sha256": _digest(values)},
      )
    except Exception as error:  # of any class: from orbax, tensorstore or the file system
      raise self._failed(step, error) from error
    self._saving = step, future

  def check(self) -> None:
    """OSError if the save under way has failed by now."""
    if not self._checkpointer.is_saving_in_progress():
      self.finish()

  def finish(self) -> None:
    """Waits for the save under way; OSError if it fails."""
    if self._saving is None:
      return
    (step, future), self._saving = self._saving, None
    try:
      future.result()
    except Exception as error:  # as in `save`
      raise self._failed(step, error) from error

  def restore(self, step: int, abstract: TrainState) -> TrainState:
    """The state that was saved, on the mesh of `abstract`; Unreadable if it cannot be had."""
    loaded = self._load(step, {"params": abstract.params, "optimizer": abstract.opt_state})
    array = jax.device_put(jnp.asarray(step, jnp.int32), abstract.step.sharding)
    return TrainState(array, loaded["params"], loaded["optimizer"])

  def restore_params(self, step: int, abstract: Any) -> Any:
    """The parameters that were saved, without the optimiser; Unreadable if they cannot be had."""
    return self._load(step, {"params": abstract})["params"]

  def _load(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
    # Each host reads its shards without waiting for the others, which would wait for ever for one
    # that fails.  The hosts agree right afterwards.
    alone = ocp.Context()
    alone.multiprocessing.primary_host = jax.process_index()
    alone.multiprocessing.active_processes = {jax.process_index()}

    def load() -> dict[str, Any]:
      with alone:
        return jax.block_until_ready(
          ocp.load_checkpointables(self._directory / str(step), abstract)
        )

    loaded, expected = self._on_all_hosts(step, load), self.info(step)["checksums"]
    changed = [name for name, found in checksums(loaded).items() if found != expected.get(name)]
    if changed:
      raise self._unreadable(step, f"the numbers of {', '.join(changed)} are not those saved")
    return loaded

  def _on_all_hosts(self, step: int, read: Callable[[], T]) -> T:
    """What `read` returns; Unreadable on every host if it fails on any."""
    value, problem = None, None
    try:
      value = read()
    except Exception as error:  # of any class: damaged files lead to all kinds of errors
      problem = _brief(error)
    if distributed.somewhere(problem is not None):
      raise self._unreadable(step, problem or "another host could not read it")
    return value

  def _unreadable(self, step: int, problem: str) -> Unreadable:
    return Unreadable(f"{self._directory / str(step)} does not read back: {problem}")

  def _failed(self, step: int, error: Exception) -> OSError:
    return OSError(
      f"{self._directory}: saving step {step} failed: {_brief(error)}; the checkpoints before it "
      "are as they were.  Is there room, and may it be written?  Then run the same command again"
    )

  def _set_aside(self, step: int) -> None:
    if distributed.is_first():
      name = f"{step}.unreadable"
      count = sum(path.name.startswith(name) for path in self._directory.iterdir())
      (self._directory / str(step)).rename(self._directory / f"{name}{count or ''}")
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices(f"{step} is set aside")
    self._checkpointer.reload()

  def close(self) -> None:
    """Waits for the save under way; OSError if it fails."""
    try:
      self.finish()
    finally:
      with contextlib.suppress(Exception):  # the error of a failed save, once more
        self._checkpointer.close()


@dataclasses.dataclass
class _Best:
  """An orbax preservation policy that keeps the checkpoints with the best evaluations.

  orbax's own `BestN` reads a file of metrics for each checkpoint when a directory is opened, and
  fails on a damaged one.
  """

  keep: int
  ranked: Callable[[list[int]], list[int]]

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    best = self.ranked([each.step for each in checkpoints])[: self.keep]
    return [each.step in best for each in checkpoints]


def _brief(error: Exception, limit: int = 300) -> str:
  """Class and first line of an error's innermost cause; orbax's own text may fill pages."""
  while error.__cause__ is not None:
    error = error.__cause__
  line = next(iter(str(error).splitlines()), "").partition(" [tensorstore_spec")[0]
  line = line if len(line) <= limit else f"{line[: limit - 3]}..."
  if type(error) is ValueError:
    return line
  return f"{type(error).__name__}: {line}" if line else type(error).__name__
