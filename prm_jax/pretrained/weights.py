"""Weights of public models: one table of names and axes, used to load and to export.

A public checkpoint has one matrix per layer, outputs by inputs.  Here layers are stacked along a
leading axis, and attention heads have an axis of their own.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from prm_jax import config as config_lib
from prm_jax.pretrained import safetensors_files
from prm_jax.pretrained.safetensors_files import DTYPES, Tensor

SHOWN = 10  # names in an error
BAND_BYTES = 2**19  # read and reordered at once: fits a core's cache


@dataclasses.dataclass(frozen=True)
class Layout:
  """A parameter's public name, and its axes here and there, one letter each.

  Public axes are in groups: "NH,D" is a matrix whose rows are heads (N) by head size (H).
  """

  name: str  # {} stands for the layer
  ours: str
  theirs: str

  @property
  def stacked(self) -> bool:
    return "{}" in self.name

  @property
  def axes(self) -> str:
    """Our axes in the public order."""
    return self.theirs.replace(",", "")

  def names(self, leaf: Any) -> list[str]:
    """Public names of our parameter, one per layer."""
    return [self.name.format(i) for i in range(leaf.shape[0])] if self.stacked else [self.name]

  def public_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the public tensor, from the shape of ours (of one layer)."""
    sizes = dict(zip(self.ours, shape))
    return tuple(math.prod(sizes[axis] for axis in group) for group in self.theirs.split(","))

  def to_theirs(self, value: np.ndarray) -> np.ndarray:
    """Our value (of one layer) as the public tensor."""
    moved = value.transpose([self.ours.index(axis) for axis in self.axes])
    return moved.reshape(self.public_shape(value.shape))

  def read(
    self, tensor: Tensor, shape: Sequence[int], dtype: Any, index: Sequence[slice]
  ) -> np.ndarray:
    """A slice of our parameter (of one layer), `shape`, from the public tensor.

    Only what the slice needs is read, in bands of rows that fit in a core's cache.
    """
    sizes = dict(zip(self.ours, shape))
    spans = {axis: span.indices(sizes[axis])[:2] for axis, span in zip(self.ours, index)}
    out = np.empty([stop - start for start, stop in spans.values()], dtype)
    public = out.transpose([self.ours.index(axis) for axis in self.axes])
    first = self.axes[0]
    start, stop = spans[first]
    band = max(1, BAND_BYTES * len(public) // out.nbytes)
    for at in range(start, stop, band):
      end = min(at + band, stop)
      public[at - start : end - start] = self._slice(tensor, sizes, spans | {first: (at, end)})
    return out

  def _slice(
    self, tensor: Tensor, sizes: Mapping[str, int], spans: Mapping[str, tuple[int, int]]
  ) -> np.ndarray:
    """A slice of the public tensor, one axis for each letter."""
    wanted, shape, inside = [], [], []
    for major, *minor in self.theirs.split(","):
      start, stop = spans[major]
      inner = math.prod(sizes[axis] for axis in minor)
      wanted.append(slice(start * inner, stop * inner))
      shape += [stop - start, *(sizes[axis] for axis in minor)]
      inside += [slice(None), *(slice(*spans[axis]) for axis in minor)]
    return tensor.read(tuple(wanted)).reshape(shape)[tuple(inside)]


# Axes: V vocabulary, D width, F feed-forward width, N heads, K key-value heads, H head size,
# C classes.
LAYOUTS = {
  "embedding": Layout("model.embed_tokens.weight", "VD", "V,D"),
  "blocks.attention_norm": Layout("model.layers.{}.input_layernorm.weight", "D", "D"),
  "blocks.query": Layout("model.layers.{}.self_attn.q_proj.weight", "DNH", "NH,D"),
  "blocks.key": Layout("model.layers.{}.self_attn.k_proj.weight", "DKH", "KH,D"),
  "blocks.value": Layout("model.layers.{}.self_attn.v_proj.weight", "DKH", "KH,D"),
  "blocks.output": Layout("model.layers.{}.self_attn.o_proj.weight", "NHD", "D,NH"),
  "blocks.query_bias": Layout("model.layers.{}.self_attn.q_proj.bias", "NH", "NH"),
  "blocks.key_bias": Layout("model.layers.{}.self_attn.k_proj.bias", "KH", "KH"),
  "blocks.value_bias": Layout("model.layers.{}.self_attn.v_proj.bias", "KH", "KH"),
  "blocks.query_norm": Layout("model.layers.{}.self_attn.q_norm.weight", "H", "H"),
  "blocks.key_norm": Layout("model.layers.{}.self_attn.k_norm.weight", "H", "H"),
  "blocks.mlp_norm": Layout("model.layers.{}.post_attention_layernorm.weight", "D", "D"),
  "blocks.gate": Layout("model.layers.{}.mlp.gate_proj.weight", "DF", "F,D"),
  "blocks.up": Layout("model.layers.{}.mlp.up_proj.weight", "DF", "F,D"),
  "blocks.down": Layout("model.layers.{}.mlp.down_proj.weight", "FD", "D,F"),
  "final_norm": Layout("model.norm.weight", "D", "D"),
  "language_model": Layout("lm_head.weight", "DV", "V,D"),
  "head": Layout("score.weight", "DC", "C,D"),
  "head_bias": Layout("score.bias", "C", "C"),
}
# Gemma 2 and 3 have a norm after each half of a layer too, and other names for the norms.
GEMMA = {
  "blocks.mlp_norm": "model.layers.{}.pre_feedforward_layernorm.weight",
  "blocks.post_attention_norm": "model.layers.{}.post_attention_layernorm.weight",
  "blocks.post_mlp_norm": "model.layers.{}.post_feedforward_layernorm.weight",
}
IGNORED = (  # computed from the configuration, or of the vision half of a model
  "*.rotary_emb.inv_freq",
  "*.attn.masked_bias",
  "vision_tower.*",
  "multi_modal_projector.*",
)
HEADS = ("score.", "v_head.")  # of published reward models; ours is score.weight and score.bias


def layouts(config: config_lib.Model) -> dict[str, Layout]:
  """The layout of each parameter that a family with this configuration may have."""
  if not config.post_norms:
    return LAYOUTS
  return LAYOUTS | {path: Layout(name, "D", "D") for path, name in GEMMA.items()}


def tensors(directory: str | pathlib.Path) -> dict[str, Tensor]:
  """The tensors of a model's directory, not read yet, under the names of `layouts`.

  Raises:
    ValueError: the directory is broken, or has a tensor under two names.
    OSError: it cannot be read.
  """
  found = safetensors_files.read_directory(directory)
  headless = any(_text_name(name) == "embed_tokens.weight" for name in found)
  out: dict[str, Tensor] = {}
  for name, tensor in found.items():
    public = _text_name(name)
    if headless and re.match(r"(embed_tokens|layers|norm)\.", public):
      public = f"model.{public}"  # the model was saved without its language-model head
    if public in out:
      raise ValueError(
        f"{directory}: {out[public].name} and {name} are both {public}: which one counts?"
      )
    out[public] = tensor
  return out


def _text_name(name: str) -> str:
  """A tensor's name without the prefixes that models of images and text add."""
  name = re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", name)
  name = re.sub(r"^language_model\.(?=lm_head\.)", "", name)
  return re.sub(r"^model\.(?=(vision_tower|multi_modal_projector)\.)", "", name)


def load(
  path: str | pathlib.Path, abstract: Any, config: config_lib.Model, others: Sequence[str] = ()
) -> Any:
  """Parameters from a public model's directory, each in its dtype and sharding.

  A process reads only the slices that its devices hold, a layer of a parameter at a time: it needs
  memory for its shards and one tensor more.

  The step head is zeros unless the directory has a `score.weight` of its shape.  The language-model
  head is zeros if the directory is a classifier, which has none.

  Args:
    abstract: tree of `ShapeDtypeStruct` with shardings (sharding.abstract_params).
    others: patterns (as of file names) of tensors that may be there and are not read.

  Raises:
    ValueError: tensors are missing, unknown, or of a wrong shape or dtype: names them.
    OSError: a file cannot be read.
  """
  source, table, leaves = (
    tensors(path),
    layouts(config),
    traverse_util.flatten_dict(abstract, sep="."),
  )
  _check_known(leaves, table)
  absent: set[str] = set()
  classifier = "score.weight" in source
  if classifier and "lm_head.weight" not in source:
    absent.add("language_model")
  if "head" in leaves:
    if not classifier or source["score.weight"].shape != leaves["head"].shape[::-1]:
      absent |= {"head", "head_bias"}
      others = (*others, "score.weight", "score.bias")
    elif "score.bias" not in source:
      absent.add("head_bias")
  if "language_model" not in leaves:
    others = (*others, "lm_head.weight")  # the embedding again, or not used
  shapes = {
    name: table[p].public_shape(leaf.shape[table[p].stacked :])
    for p, leaf in leaves.items()
    if p not in absent
    for name in table[p].names(leaf)
  }
  _check(path, source, shapes, (*IGNORED, *others))
  params = {
    p: _zeros(leaf) if p in absent else _read(p, table[p], leaf, source)
    for p, leaf in leaves.items()
  }
  return traverse_util.unflatten_dict(params, sep=".")


def _check_known(leaves: Mapping[str, Any], table: Mapping[str, Layout]) -> None:
  if unknown := sorted(leaves.keys() - table.keys()):
    raise ValueError(f"public models have no parameter {', '.join(unknown)}")


def _check(
  path: str | pathlib.Path,
  source: Mapping[str, Tensor],
  shapes: Mapping[str, tuple[int, ...]],
  ignored: Sequence[str],
) -> None:
  """One ValueError for everything that differs from the tensors expected."""
  present = {name: source[name] for name in shapes if name in source}
  extra = [
    name
    for name in source
    if name not in shapes and not any(fnmatch.fnmatchcase(name, each) for each in ignored)
  ]
  problems = {
    "missing": [name for name in shapes if name not in source],
    "unknown": extra,
    "of a wrong shape": [
      f"{name} {list(tensor.shape)}, expected {list(shapes[name])}"
      for name, tensor in present.items()
      if tensor.shape != shapes[name]
    ],
    f"of a dtype other than {', '.join(DTYPES.values())}": [
      f"{name} {tensor.dtype}"
      for name, tensor in present.items()
      if tensor.dtype not in DTYPES.values()
    ],
  }
  found = [
    f"{len(names):,} {problem}: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
    for problem, names in problems.items()
    if names
  ]
  if any(name.startswith(HEADS) for name in extra):
    found.append(
      "a published PRM's own head cannot be started from: take the model that it was trained from "
      "(score.py --readout reads such heads)"
    )
  if found:
    raise ValueError(f"{path}: the tensors are not those of this model: {'; '.join(found)}")


def _read(
  path: str, layout: Layout, leaf: jax.ShapeDtypeStruct, source: Mapping[str, Tensor]
) -> jax.Array:
  """A parameter on its devices; of a stack, one layer at a time is in the host's memory."""

  def place(name: str, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    read = functools.partial(layout.read, source[name], shape, leaf.dtype)
    return jax.make_array_from_callback(shape, sharding, read)

  if not layout.stacked:
    return place(layout.name, leaf.shape, leaf.sharding)
  layers, *axes = (*leaf.sharding.spec, *[None] * len(leaf.shape))
  if layers is not None:
    raise ValueError(f"{path}: layers must not be split over the mesh: {leaf.sharding}")
  sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*axes[: len(leaf.shape) - 1]))
  stack, put = _zeros(leaf), _put_layer(leaf.sharding)
  for i, name in enumerate(layout.names(leaf)):
    stack = put(stack, place(name, leaf.shape[1:], sharding), i)
  return stack


@functools.cache
def _put_layer(sharding: jax.sharding.Sharding) -> Any:
  """Writes one layer into the stack, in place: the stack is donated."""
  return jax.jit(
    lambda stack, layer, i: jax.lax.dynamic_update_index_in_dim(stack, layer, i, 0),
    donate_argnums=0,
    out_shardings=sharding,
  )


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
  return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)


def unload(params: Any, config: config_lib.Model) -> Iterator[tuple[str, np.ndarray]]:
  """Public name and value of each tensor, one at a time: the inverse of `load`.

  Raises:
    ValueError: public models have no such parameter.
  """
  table, leaves = layouts(config), traverse_util.flatten_dict(params, sep=".")
  _check_known(leaves, table)
  for path, leaf in leaves.items():
    for i, name in enumerate(table[path].names(leaf)):
      value = np.asarray(leaf[i] if table[path].stacked else leaf)
      yield name, np.ascontiguousarray(table[path].to_theirs(value))
