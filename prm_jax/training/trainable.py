"""Decides which parameters a run trains, and merges low-rank factors (LoRA) into weights.

Only trained parameters have gradients and optimiser moments.  They are updated in float32, because
bfloat16 loses updates smaller than 1/256 of a parameter.  If any of them is stored in bfloat16, the
optimiser's state holds a float32 master copy of all trained parameters, and the stored ones are
that copy rounded (arXiv:1710.03740).  Bytes per parameter: 4 + 8 (moments) if trained in float32,
2 + 4 + 8 if trained in bfloat16, 4 or 2 if not trained.
"""

from typing import Any

import jax
import jax.numpy as jnp

from prm_jax import config as config_lib
from prm_jax.model import decoder

Params = dict[str, Any]  # nested, of arrays or `ShapeDtypeStruct`s


def group(name: str) -> str:
  """Returns the group of a top-level parameter: "head", or the name of the parameter itself."""
  return "head" if decoder.is_head(name) else name


def select(params: Params, loss: config_lib.Loss, optim: config_lib.Optim) -> Params:
  """Returns the trained parameters, nested as in `params`; ValueError if there are none.

  A parameter that the loss does not use is not trained.
  """
  text, groups = loss.objective == "language_model", {"head", "language_model"}
  if optim.trained == "all":
    groups |= {*map(group, params)}
  if text or not optim.head_scale:
    groups -= {"head"}
  used = text or loss.language_model_weight
  if not used or optim.trained == "lora" or not optim.head_scale:
    groups -= {"language_model"}
  if not optim.embedding_scale:
    groups -= {"embedding"}
  selected = {name: x for name, x in params.items() if group(name) in groups}
  if optim.trained == "lora":
    selected["blocks"] = {name: x for name, x in params["blocks"].items() if "_lora_" in name}
  if not selected:
    raise ValueError(
      f"optim.trained={optim.trained!r}: with this loss and these scales, no parameter is trained"
    )
  return selected


def merge(params: Params, trained: Params) -> Params:
  """Returns `params` with the arrays of `trained` in place, cast to the dtypes of `params`."""
  return params | {
    name: merge(params[name], x) if isinstance(x, dict) else x.astype(params[name].dtype)
    for name, x in trained.items()
  }


def merge_lora(params: Params, c: config_lib.Model, dtype: str | None = None) -> Params:
  """Adds the products of the low-rank factors to the weights; returns parameters without factors.

  Args:
    dtype: of the sums; None: that of the weights.  Sums are rounded once: bfloat16 loses most of an
      update that is a thousandth of its weight.
  """
  if not c.lora_rank:
    return params
  blocks = {name: x for name, x in params["blocks"].items() if "_lora_" not in name}
  for name in c.lora_targets:
    low, high = (params["blocks"][f"{name}_lora_{side}"] for side in ("in", "out"))
    update = jax.vmap(lambda low, high: jnp.tensordot(low, high, 1, precision="highest"))(low, high)
    weight = blocks[name] + c.lora_alpha / c.lora_rank * update
    blocks[name] = weight.astype(dtype or blocks[name].dtype)
  return params | {"blocks": blocks}
