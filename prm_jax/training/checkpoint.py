"""Checkpoints: parameters and optimiser state, with the metadata that gives them meaning.

`DIR/checkpoints/STEP` holds the trees `params` and `optimizer`.  Its metadata are the fields of
`Metadata`, the versions of the packages, the evaluation, and a checksum of every array.  Storage
may silently return changed bytes, so the devices compute the checksums before saving and after
reading.  With several hosts, every host must call every method.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from prm_jax import config as config_lib
from prm_jax.model import decoder
from prm_jax.runtime import distributed, storage
from prm_jax.training import evaluations
from prm_jax.training.step import TrainState
from prm_jax.types import StepContract


class Unreadable(ValueError):
  """A checkpoint cannot be read, or is not what was saved."""


@dataclasses.dataclass(frozen=True)
class Metadata:
  """The metadata that all checkpoints of a run share: settings, step contract, data."""

  config: config_lib.Experiment  # as resolved
  contract: StepContract
  vocab_size: int  # rows of the embedding
  rows_hash: str  # of the packed training rows
  evaluation_hash: str = ""  # of the packed evaluation rows

  def facts(self, leave_out: str) -> dict[str, Any]:
    """Returns all fields by name, except settings marked `leave_out`, to compare runs or hosts."""
    facts = config_lib.settings(self.config, leave_out)
    contract = dataclasses.asdict(self.contract)
    facts |= {f"step contract, {name}": value for name, value in contract.items()}
    facts |= {"vocabulary size": self.vocab_size, "hash of the training rows": self.rows_hash}
    return facts | {"hash of the evaluation rows": self.evaluation_hash}


def checksums(tree: Any) -> dict[str, int]:
  """Returns the 32-bit checksum of each array of a tree by path, the same on any mesh or host."""
  leaves = jax.tree_util.tree_flatten_with_path(jax.device_get(_checksums(tree)))[0]
  return {jax.tree_util.keystr(path, simple=True, separator="/"): int(x) for path, x in leaves}


def digest(tree: Any) -> str:
  """Returns the SHA-256 of `checksums`, which identifies the contents of a tree."""
  return _digest(checksums(tree))


def _checksum(x: jax.Array) -> jax.Array:
  """Returns the sum, modulo 2**32, of each element's bits times an odd number made from its index.

  The sum does not depend on the order of addition, and every change of one element changes it.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
  index = jnp.zeros(x.shape, jnp.uint32)
  for axis, size in enumerate(x.shape):
    index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
  return jnp.sum(bits.astype(jnp.uint32) * (2 * index + 1), dtype=jnp.uint32)


_checksums = jax.jit(functools.partial(jax.tree.map, _checksum))


def _digest(values: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def latest(workdir: str | storage.Path) -> tuple[int, Metadata] | None:
  """Returns step and metadata of the newest checkpoint with undamaged metadata, or None.

  Its arrays are not read, and may be damaged.
  """
  if not (storage.path(workdir) / "checkpoints").is_dir():
    return None
  with contextlib.closing(Checkpointer(workdir)) as reader:
    newest = reader.newest(lambda step, metadata: None)
  return newest and newest[:2]


def restore_params(
  workdir: str | storage.Path, mesh: jax.sharding.Mesh, which: str | int = "latest"
) -> tuple[int, Metadata, Any]:
  """Returns step, metadata and parameters of a checkpoint, chosen as by `Checkpointer.newest`.

  Prints to standard error if the latest is used although a better one exists.
  """
  with contextlib.closing(Checkpointer(workdir)) as reader:

    def read(step: int, metadata: Metadata) -> Any:
      contract, model = metadata.contract, metadata.config.model
      shape = (metadata.vocab_size, len(contract.classes))
      params = decoder.abstract_params(model, *shape, mesh, contract.heads)
      return reader.load(step, {"params": params})["params"]

    newest = reader.newest(read, which)
    steps = reader.steps()
    ranked = reader._ranked(steps) if which == "latest" else []
    if newest and newest[0] == steps[-1] and newest[0] in ranked[1:] and distributed.is_first():
      text = f"{workdir}: using step {newest[0]} (latest); step {ranked[0]} (best) has a better "
      print(text + reader._best_metric(steps), file=sys.stderr, flush=True)
    return newest


def check_same_run(now: Metadata, then: Metadata, workdir: storage.Path) -> None:
  """Raises ValueError if a run would be resumed with other settings or on other rows."""
  old, new = (metadata.facts(leave_out=config_lib.CHANGEABLE) for metadata in (then, now))
  changed = [f"{key}: {old[key]!r} then, {new[key]!r} now" for key in new if old[key] != new[key]]
  if changed:
    raise ValueError(
      f"{workdir} holds a run with other settings or data; give this one its own --workdir, or "
      "restore the old values:\n  " + "\n  ".join(changed)
    )


class Checkpointer:
  """Saves and restores the training state of one work directory."""

  def __init__(self, workdir: str | storage.Path, c: config_lib.Train | None = None):
    """Opens a work directory.

    Args:
      c: which checkpoints to keep, for the run that writes them.  None: read only; unfinished saves
        are left alone, as another process may be writing them.
    """
    self._policy = c
    self.evaluations: dict[int, dict[str, Any]] = {}  # by step, of the run that writes
    self._info: dict[int, dict[str, Any]] = {}  # metadata read or written so far, by step
    self._saving: tuple[int, Any] | None = None  # step and future of the save under way
    self._directory = storage.absolute(workdir) / "checkpoints"
    try:
      self._checkpointer = ocp.training.Checkpointer(
        self._directory, preservation_policy=c and self, cleanup_tmp_directories=c is not None
      )
    except OSError:
      raise
    except Exception as error:  # of any class: orbax reads even damaged metadata
      raise Unreadable(f"{self._directory}: damaged metadata: {_brief(error)}") from error

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    """Tells orbax to keep the newest and the best.  (Its own `BestN` fails on damaged metadata.)"""
    steps = sorted(each.step for each in checkpoints)
    kept = steps[-self._policy.keep :]
    kept += self._ranked(steps, self._policy.best_metric)[: self._policy.keep_best]
    return [each.step in kept for each in checkpoints]

  def steps(self) -> list[int]:
    """Returns the steps of the finished checkpoints, ascending."""
    return [each.step for each in self._checkpointer.checkpoints]

  def newest(
    self, read: Callable[[int, Metadata], Any], which: str | int = "latest"
  ) -> tuple[int, Metadata, Any] | None:
    """Returns step and metadata of the newest readable checkpoint, and the result of `read` for it.

    A warning names each newer one that cannot be read.  The run that writes the directory renames
    these to STEP.unreadable, so that their steps can be saved again.  Returns None if there is no
    checkpoint at all.

    Args:
      read: called with step and metadata; if it raises Unreadable (as `restore` does), the
        previous checkpoint is tried.
      which: "latest"; "best", by the run's `train.best_metric`, or the next best if that cannot be
        read; or a step, which has no fallback.

    Raises:
      Unreadable: there are checkpoints, but none can be read.  They stay as they are.
      ValueError: there are checkpoints, but not the one that `which` asks for.
    """
    candidates, errors = self._candidates(which), {}
    distributed.check_same({f"checkpoints in {self._directory}": candidates})
    for step in candidates:
      try:
        metadata = msgspec.convert(self._on_all_hosts(step, self.info, step), Metadata)
        result = step, metadata, read(step, metadata)
      except Unreadable as error:
        errors[step] = error
        continue
      for damaged, error in errors.items():
        print(f"warning: {error}; step {step} is used instead", file=sys.stderr, flush=True)
        if self._policy:
          self._set_aside(damaged)
      return result
    if not candidates:
      return None
    if untried := [str(step) for step in self.steps() if step not in candidates]:
      advice = f"the other checkpoints are {', '.join(untried)}: choose one with --step"
    else:
      advice = "no checkpoint is left to resume from; restore one from a copy, or move "
      advice += f"{self._directory} away to start again from step 0"
    raise Unreadable("\n".join([*map(str, errors.values()), advice]))

  def _candidates(self, which: str | int) -> list[int]:
    """Returns the steps that `newest` tries, in order."""
    steps = self.steps()[::-1]
    if which == "latest" or not steps:
      return steps
    best = which == "best"
    candidates = self._ranked(steps) if best else [s for s in steps if str(s) == str(which)]
    if not candidates:
      why, expected = "", "latest, best (of those that were evaluated)"
      if best:
        metric, expected = self._best_metric(steps), "latest"
        why = (
          f": {metric} (train.best_metric) was not evaluated at any checkpoint, or never defined"
        )
        why += " (it needs right and wrong steps)" if metric == "auroc" else ""
      raise ValueError(
        f"{self._directory}: no checkpoint is {which}{why}; expected {expected} or one of "
        f"{', '.join(map(str, steps))}"
      )
    return candidates

  def _ranked(self, steps: Sequence[int], metric: str = "") -> list[int]:
    """Returns the evaluated steps, best first; without a metric, by the run's `best_metric`."""
    known: dict[int, dict[str, Any]] = {}
    for step in sorted(steps, reverse=True):
      with contextlib.suppress(Exception):  # `newest` reports a damaged one when it tries it
        known = self.evaluations_until(step) | known
    ranked = evaluations.ranked(known | self.evaluations, metric or self._best_metric(steps))
    return [step for step in ranked if step in steps]

  def _best_metric(self, steps: Sequence[int]) -> str:
    """Returns `train.best_metric` of the latest of these checkpoints with readable metadata."""
    for step in sorted(steps, reverse=True):
      with contextlib.suppress(Exception):
        return self.info(step)["config"]["train"]["best_metric"]
    return ""

  def evaluations_until(self, step: int) -> dict[int, dict[str, float | None]]:
    """Returns the evaluations up to this step, by step, from its checkpoint."""
    return {int(key): values for key, values in self.info(step).get("evaluations", {}).items()}

  def info(self, step: int) -> dict[str, Any]:
    """Returns the metadata of a checkpoint as JSON.

    Its keys are the fields of `Metadata`, and "versions", "checksums", "evaluation" (of this step,
    or None) and "evaluations" (the metrics of this and earlier steps, by step).
    """
    if step not in self._info:
      # Orbax's own reader opens every array as well, and raises errors for a checkpoint that was
      # being deleted when its run was killed.
      text = (self._directory / str(step) / "_CHECKPOINT_METADATA").read_text()
      values = dict(json.loads(text)["custom_metadata"])
      if values.pop("sha256", None) != _digest(values):
        raise ValueError("its metadata has been changed, or is from an older version")
      self._info[step] = values
    return self._info[step]

  def save(self, state: TrainState, metadata: Metadata) -> None:
    """Starts an asynchronous save of the state of this step, with the run's evaluations.

    Raises:
      OSError: this save cannot begin, or the one before failed.
    """
    self.finish()
    step, tree = int(state.step), {"params": state.params, "optimizer": state.opt_state}
    values = dataclasses.asdict(metadata) | {"versions": distributed.versions()}
    values |= {"evaluation": self.evaluations.get(step), "checksums": checksums(tree)}
    values["evaluations"] = {str(k): evaluations.brief(x) for k, x in self.evaluations.items()}
    self._info[step] = values
    custom = values | {"sha256": _digest(values)}
    start = self._checkpointer.save_checkpointables_async
    with self._named(step):  # force: the loop decides when to save, not orbax
      self._saving = step, start(step, tree, force=True, custom_metadata=custom)

  def finish(self, wait: bool = True) -> None:
    """Waits for the save under way (`wait=False`: only if it is done); OSError if it failed."""
    if self._saving and (wait or not self._checkpointer.is_saving_in_progress()):
      (step, future), self._saving = self._saving, None
      with self._named(step):
        future.result()

  @contextlib.contextmanager
  def _named(self, step: int) -> Iterator[None]:
    """Turns any error of a save, from orbax, tensorstore or the file system, into an OSError."""
    try:
      yield
    except Exception as error:
      raise OSError(
        f"{self._directory}: saving step {step} failed: {_brief(error)}; earlier checkpoints are "
        "intact.  Check free space and write permission, then run the same command again"
      ) from error

  def restore(self, step: int, abstract: TrainState) -> TrainState:
    """Returns the saved state, on the mesh of `abstract`; raises Unreadable on failure."""
    loaded = self.load(step, {"params": abstract.params, "optimizer": abstract.opt_state})
    array = jax.device_put(jnp.asarray(step, jnp.int32), abstract.step.sharding)
    return TrainState(array, loaded["params"], loaded["optimizer"])

  def load(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
    """Returns the trees "params" and "optimizer", or one of them; raises Unreadable on failure."""
    # Each host reads its shards without orbax's barriers, in which the other hosts would hang if
    # one failed.  `_on_all_hosts` then compares the outcomes.
    alone = ocp.Context()
    alone.multiprocessing.primary_host = jax.process_index()
    alone.multiprocessing.active_processes = {jax.process_index()}
    path = self._directory / str(step)
    with alone:
      loaded = self._on_all_hosts(step, ocp.load_checkpointables, path, abstract)
    expected = self.info(step)["checksums"]
    changed = [name for name, value in checksums(loaded).items() if value != expected.get(name)]
    if changed:
      raise Unreadable(
        f"{path} does not read back: the values of {', '.join(changed)} are not those saved"
      )
    return loaded

  def _on_all_hosts(self, step: int, read: Callable[..., Any], *args: Any) -> Any:
    """Returns `read(*args)`; raises Unreadable on every host if it fails on any."""
    value, problem = None, ""
    for _ in range(2):  # a file system may fail once
      try:
        value, problem = jax.block_until_ready(read(*args)), ""
        break
      except Exception as error:  # of any class: so are the errors of damaged files
        problem = _brief(error)
    if distributed.somewhere(bool(problem)):
      problem = problem or "another host could not read it"
      raise Unreadable(f"{self._directory / str(step)} does not read back: {problem}")
    return value

  def _set_aside(self, step: int) -> None:
    """Renames a damaged checkpoint, and waits until all hosts see it."""
    if distributed.is_first():
      name = f"{step}.unreadable"
      count = sum(path.name.startswith(name) for path in self._directory.iterdir())
      (self._directory / str(step)).rename(self._directory / f"{name}{count or ''}")
    multihost_utils.sync_global_devices(f"{step} is set aside")
    self._checkpointer.reload()

  def close(self) -> None:
    """Waits for the save under way; raises OSError if it fails."""
    try:
      self.finish()
    finally:
      with contextlib.suppress(Exception):  # orbax raises the error of a failed save once more
        self._checkpointer.close()


def _brief(error: Exception) -> str:
  """Returns class and first line of an error's innermost cause; orbax's own text may fill pages."""
  while error.__cause__ is not None:
    error = error.__cause__
  line = f"{type(error).__name__}: {error}".partition("\n")[0]
  return line.partition(" [tensorstore_spec")[0][:300]
