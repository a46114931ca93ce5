"""Which parameters a run trains.

The tree of parameters is cut in two: what is trained, and the rest.  Gradients are taken of the
first alone, so that none is computed for the rest, and the optimiser knows of nothing else.

What is trained is kept in float32: `model.param_dtype` bfloat16 would lose updates smaller than
1/256 of a parameter, and fine-tuning makes hardly any others.  So where any of it is not float32,
the optimiser's state has a float32 master copy of all that is trained, of which the parameters are
the rounded form (as in arXiv:1710.03740).  Step head and low-rank factors are float32 whatever the
dtype, so those who train only them have no copy; a language-model head is not.  Bytes for each
parameter: 4 + 8 (moments) if trained in float32, 2 + 4 + 8 in bfloat16; 4 or 2 if not trained.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from prm_jax import config as config_lib
from prm_jax.model.decoder import lora_einsums

HEAD = ("head", "head_bias")
Params = dict[str, Any]  # nested, of arrays or of their descriptions


@dataclasses.dataclass(frozen=True)
class Choice:
  """What is trained of a tree of parameters."""

  trained: str = "all"  # config.Optim.trained
  last_layers: int = 0  # how many, if that is the choice
  never: frozenset[str] = frozenset()  # parameters that are not trained whatever the choice

  @classmethod
  def of(cls, c: config_lib.Experiment) -> Choice:
    """The choice of an experiment, as resolved.

    Raises:
      ValueError: it asks for more layers than there are.
    """
    if c.optim.trained == "last_layers" and c.optim.last_layers > c.model.layers:
      raise ValueError(
        f"optim.last_layers={c.optim.last_layers}, but the model has {c.model.layers} layers"
      )
    never = set()
    if c.loss.objective == "language_model":  # what has no part in the loss is not trained
      never |= {*HEAD}
    elif not c.loss.language_model_weight:
      never |= {"language_model"}
    if c.optim.trained == "lora":  # the factors are what is trained of the language model
      never |= {"language_model"}
    if not c.optim.head_scale:
      never |= {"language_model", *HEAD}
    if not c.optim.embedding_scale:
      never |= {"embedding"}
    return cls(
      trained=c.optim.trained,
      last_layers=c.optim.last_layers if c.optim.trained == "last_layers" else 0,
      never=frozenset(never),
    )

  def cut(self, params: Params) -> Params:
    """The part that is trained: whole arrays, but for the last layers of the stacked ones.

    Raises:
      ValueError: that is nothing.
    """
    out = {name: value for name, value in params.items() if self._trains(name)}
    if self.trained == "last_layers":
      out["blocks"] = jax.tree.map(self._last, params["blocks"])
    if self.trained == "lora":
      out["blocks"] = {name: x for name, x in params["blocks"].items() if "_lora_" in name}
    if not out:
      raise ValueError(f"optim.trained={self.trained!r}: with this loss that is nothing")
    return out

  def has_master(self, params: Params) -> bool:
    """Whether the optimiser's state has a float32 copy of what is trained."""
    return any(x.dtype != jnp.float32 for x in jax.tree.leaves(self.cut(params)))

  def _trains(self, name: str) -> bool:
    if name in self.never:
      return False
    if name in (*HEAD, "language_model"):
      return True
    return self.trained == "all" or (self.trained == "last_layers" and name == "final_norm")

  def _last(self, x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
      shape = (self.last_layers, *x.shape[1:])
      return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)
    return x[-self.last_layers :]

  def put(self, params: Params, trained: Params) -> Params:
    """All parameters, with what is trained in its place, in the dtypes of `params`."""
    old, new = params.get("blocks", {}), trained.get("blocks", {})
    if self.trained == "last_layers":
      start = -self.last_layers
      blocks = {name: x.at[start:].set(new[name].astype(x.dtype)) for name, x in old.items()}
    else:
      blocks = _replaced(old, new)
    return _replaced(params, trained) | {"blocks": blocks}

  def for_loss(self, params: Params, trained: Params) -> tuple[Params, Params | None]:
    """As `put`, but with the last layers apart: see `StepScorer.hidden`.

    Returns:
      All parameters, and the weights of the last layers, if only those are trained.
    """
    if self.trained != "last_layers":
      return self.put(params, trained), None
    blocks = params["blocks"]
    last = {name: x.astype(blocks[name].dtype) for name, x in trained["blocks"].items()}
    return _replaced(params, trained) | {"blocks": blocks}, last


EVERYTHING = Choice()


def _replaced(params: Params, trained: Params) -> Params:
  """`params` with the arrays of `trained`, in the dtypes they have there."""
  new = {
    name: value.astype(params[name].dtype)
    for name, value in trained.items()
    if not isinstance(value, dict)
  }
  return params | new


def in_float32(params: Params) -> Params:
  return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def merge(params: Params, c: config_lib.Model) -> Params:
  """Parameters without low-rank factors: their product is added to the weights.

  They are those of the architecture `without_factors(c)`.  Without factors, nothing changes.
  """
  if not c.lora_rank:
    return params
  blocks = {name: x for name, x in params["blocks"].items() if "_lora_" not in name}
  for name in c.lora_targets:
    low, high = (params["blocks"][f"{name}_lora_{side}"] for side in ("in", "out"))
    update = jnp.einsum(lora_einsums(name)[2], low, high)
    weight = blocks[name] + c.lora_alpha / c.lora_rank * update
    blocks[name] = weight.astype(blocks[name].dtype)
  return params | {"blocks": blocks}


def without_factors(c: config_lib.Model) -> config_lib.Model:
  """The architecture of `merge(params, c)`."""
  default = config_lib.Model()
  names = [field.name for field in dataclasses.fields(c) if field.name.startswith("lora_")]
  return dataclasses.replace(c, **{name: getattr(default, name) for name in names})
