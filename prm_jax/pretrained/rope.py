"""The rotary positions of a hub's `config.json`, in the keys of transformers 4 and 5."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1, lt=2**31)]
Positive = Annotated[float, Meta(gt=0, lt=2**31)]
Theta = Annotated[float, Meta(ge=1, lt=2**31)]
RopeType = Literal["default", "linear", "llama3"]
# Keys of a scaling of rotary positions, and our fields.
ROPE_KEYS = {
  "linear": {"factor": "rope_factor"},
  "llama3": {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_factor",
    "high_freq_factor": "rope_high_factor",
    "original_max_position_embeddings": "rope_original_length",
  },
}


class Rope(msgspec.Struct, forbid_unknown_fields=True):
  """`rope_parameters` of transformers 5, or `rope_scaling` of version 4."""

  rope_type: RopeType | None = None
  type: RopeType | None = None  # the key's older name
  rope_theta: Theta | None = None
  partial_rotary_factor: Annotated[float, Meta(ge=1, le=1)] | None = None
  factor: Positive | None = None
  low_freq_factor: Positive | None = None
  high_freq_factor: Positive | None = None
  original_max_position_embeddings: Count | None = None

  def theta(self, key: str, outside: float | None, default: float | None) -> float:
    """Theta from here or from `key` outside, where older files have it."""
    if self.rope_theta and outside and self.rope_theta != outside:
      raise ValueError(f"{key}={outside}, but rope_theta is {self.rope_theta} in rope_parameters")
    if theta := self.rope_theta or outside or default:
      return theta
    raise ValueError(f"{key} is missing; write it there (transformers would take 10000.0)")

  def scaling(self) -> dict[str, Any]:
    """Our fields of the scaling."""
    kind = self.rope_type or self.type or "default"
    keys = ROPE_KEYS.get(kind, {})
    for key in ROPE_KEYS["llama3"].keys() - keys.keys():
      if getattr(self, key) is not None:
        raise ValueError(f"{key}={getattr(self, key)}: not supported with rope_type={kind!r}")
    fields = {field: getattr(self, key) for key, field in keys.items()}
    if missing := [key for key, field in keys.items() if fields[field] is None]:
      raise ValueError(f"rope_scaling: {missing[0]} is missing")
    return fields | {"rope_scaling": kind} if keys else {}


class RopeByLayer(msgspec.Struct, forbid_unknown_fields=True):
  """`rope_parameters` of Gemma 3 in transformers 5."""

  full_attention: Rope
  sliding_attention: Rope
