"""A public model's `config.json`: read with suspicion, each value checked as it is taken."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from prm_jax.runtime.json_lines import show

MAX_BYTES = 10 * 2**20  # of a file; real ones have a few thousand
MAX = 2**31 - 1  # of any number in it
# Of sizes, far above any model's, so that no list or table as long as a lie is ever made.
LARGEST = {
  "num_hidden_layers": 1000,
  "num_attention_heads": 2**14,
  "num_key_value_heads": 2**14,
  "head_dim": 2**16,
  "hidden_size": 2**20,
  "intermediate_size": 2**22,
  "vocab_size": 10_000_000,
}


def load(file: pathlib.Path) -> Any:
  """The parsed file.

  Raises:
    ValueError: it is no JSON, or too large.
    OSError: it cannot be read.
  """
  if not file.is_file():
    raise FileNotFoundError(f"{file}: no such file; expected a model's directory or a .gguf file")
  if file.stat().st_size > MAX_BYTES:
    raise ValueError(f"{file}: {file.stat().st_size:,} bytes; no config.json is so large")

  def constant(name: str):
    raise ValueError(f"{name} is no number")

  try:
    return json.loads(file.read_bytes(), parse_constant=constant)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{file}: not JSON: {error}") from error


class File:
  """The keys of a config.json, each checked as it is taken; errors name file, key and value."""

  def __init__(self, path: Any, values: Any, defaults: dict[str, Any] | None = None):
    self.path, self.values, self.defaults = path, values, defaults or {}

  def error(self, key: str, expected: str) -> ValueError:
    return ValueError(f"{self.path}: {key}={show(self.values.get(key))}: {expected}")

  def get(self, key: str) -> Any:
    if key in self.values:
      return self.values[key]
    if key in self.defaults:
      return self.defaults[key]
    raise ValueError(f"{self.path}: {key} is missing")

  def number(self, key: str, kind: type = int, least: float = 0) -> Any:
    value = self.get(key)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not (whole if kind is int else isinstance(value, (int, float))):
      raise self.error(key, f"expected {'a whole number' if kind is int else 'a number'}")
    most = LARGEST.get(key, MAX)
    if not least <= value <= most:
      raise self.error(key, f"expected {least} to {most}")
    return kind(value)

  def flag(self, key: str) -> bool:
    value = self.get(key)
    if not isinstance(value, bool):
      raise self.error(key, "expected true or false")
    return value

  def section(self, key: str) -> File | None:
    """A nested object; None if it is null, empty or not there."""
    value = self.values.get(key)
    if value is not None and not isinstance(value, dict):
      raise self.error(key, "expected an object")
    return File(f"{self.path}: {key}", value) if value else None
