"""Checkpoints: parameters and optimiser state, and beside them all that gives them meaning.

`DIR/checkpoints/STEP` holds two trees, `params` and `optimizer` (so that scoring reads only the
first), and as metadata the experiment's configuration, the step contract, the hash of the rows it
was trained on and the versions of the packages.  `DIR/tokenizer.json` (or `.model`) is the
tokenizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import pathlib
import types
from typing import Any, get_args, get_origin, get_type_hints

import jax
from orbax.checkpoint import v1 as ocp

from prm_jax import config as config_lib
from prm_jax.training.step import TrainState
from prm_jax.types import StepContract

PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "prm_jax")


@dataclasses.dataclass(frozen=True)
class Metadata:
  """What is stored beside the weights, as JSON."""

  config: config_lib.Experiment
  contract: StepContract
  vocab_size: int
  rows_hash: str

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self) | {"versions": versions()}

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> Metadata:
    """The inverse of `to_json`; JSON's lists become tuples again."""
    return _typed(cls, {key: value for key, value in values.items() if key != "versions"})


def _typed(kind: Any, value: Any) -> Any:
  """A value read from JSON as the dataclass, tuple or plain value it was written from."""
  if isinstance(kind, types.UnionType) and value is not None:
    kind = next(each for each in get_args(kind) if each is not type(None))
  if isinstance(value, dict) and dataclasses.is_dataclass(kind):
    hints = get_type_hints(kind)
    return kind(**{key: _typed(hints.get(key), each) for key, each in value.items()})
  if isinstance(value, list):
    inner = get_args(kind)[0] if get_origin(kind) is tuple else None
    return tuple(_typed(inner, each) for each in value)
  return value


def versions() -> dict[str, str]:
  found = {}
  for package in PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = "not installed as a package"
  return found


def latest(workdir: str | pathlib.Path) -> tuple[int, Metadata] | None:
  """Step and metadata of the newest checkpoint of a work directory; None: there is none."""
  if not (pathlib.Path(workdir) / "checkpoints").is_dir():
    return None
  with contextlib.closing(Checkpointer(workdir)) as reader:
    return reader.latest()


class Checkpointer:
  """Saves and restores the training state of one work directory."""

  def __init__(self, workdir: str | pathlib.Path, keep: int | None = None):
    """Args: keep: how many checkpoints to keep, for the run that writes them; None: only read.

    A reader leaves unfinished saves alone: they may be another process's, under way.
    """
    policies = ocp.training.preservation_policies
    self._checkpointer = ocp.training.Checkpointer(
      pathlib.Path(workdir).resolve() / "checkpoints",
      preservation_policy=None if keep is None else policies.LatestN(keep),
      cleanup_tmp_directories=keep is not None,
    )

  def latest(self) -> tuple[int, Metadata] | None:
    """Step and metadata of the newest checkpoint; None: there is none."""
    latest = self._checkpointer.latest
    if latest is None:
      return None
    metadata = self._checkpointer.checkpointables_metadata(latest.step).custom_metadata
    return latest.step, Metadata.from_json(metadata)

  def save(self, state: TrainState, metadata: Metadata) -> None:
    """Starts writing the state of this step; returns before it is on disk."""
    self._checkpointer.save_checkpointables_async(
      int(state.step),
      {"params": state.params, "optimizer": state.opt_state},
      force=True,  # the loop decides when
      custom_metadata=metadata.to_json(),
    )

  def restore(self, step: int, abstract: TrainState) -> TrainState:
    loaded = self._checkpointer.load_checkpointables(
      step, {"params": abstract.params, "optimizer": abstract.opt_state}
    )
    array = jax.device_put(jax.numpy.asarray(step, jax.numpy.int32), abstract.step.sharding)
    return TrainState(array, loaded["params"], loaded["optimizer"])

  def restore_params(self, step: int, abstract: Any) -> Any:
    return self._checkpointer.load_checkpointables(step, {"params": abstract})["params"]

  def close(self) -> None:
    """Waits for saves under way."""
    self._checkpointer.close()
