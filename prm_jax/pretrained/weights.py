"""Loads and exports weights of public models, with one table of names and axes.

A public checkpoint has one matrix per layer, outputs by inputs.  Our parameters stack the layers
along a leading axis, and give attention heads an axis of their own.
"""

import dataclasses
import fnmatch
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from prm_jax import config as config_lib
from prm_jax.model import decoder
from prm_jax.pretrained import safetensors_files
from prm_jax.pretrained.safetensors_files import DTYPES, Tensor

SHOWN = 10  # maximum number of names in an error
CACHED_BYTES = 2**18  # bytes of a tensor copied at a time


@dataclasses.dataclass(frozen=True)
class Layout:
  """A parameter's public name, and its axes in both layouts, one letter each.

  Public axes come in groups: "NH,D" is a matrix whose rows are heads (N) by head size (H).  Our
  axis L counts the layers, each of which is a public tensor of its own.
  """

  name: str  # {} stands for the layer
  ours: str
  theirs: str

  def public_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of each public tensor, from the shape of our parameter."""
    sizes = dict(zip(self.ours, shape))
    public = tuple(math.prod(sizes[axis] for axis in group) for group in self.theirs.split(","))
    return {self.name.format(i): public for i in range(sizes.get("L", 1))}

  def public_order(self, value: np.ndarray) -> np.ndarray:
    """Returns a view of one layer of our value with the axes in the public order."""
    ours = self.ours.lstrip("L")
    return value.transpose([ours.index(axis) for axis in self.theirs if axis != ","])

  def read(
    self, source: Mapping[str, Tensor], leaf: jax.ShapeDtypeStruct, index: Sequence[slice]
  ) -> np.ndarray:
    """Reads a slice of our parameter, and only that slice of the public tensors."""
    sizes = dict(zip(self.ours, leaf.shape))
    spans = {axis: span.indices(sizes[axis])[:2] for axis, span in zip(self.ours, index)}
    wanted, shape, inside = [], [], []
    for major, *minor in self.theirs.split(","):
      start, stop = spans[major]
      inner = math.prod(sizes[axis] for axis in minor)
      wanted.append(slice(start * inner, stop * inner))
      shape += [stop - start, *(sizes[axis] for axis in minor)]
      inside += [slice(None), *(slice(*spans[axis]) for axis in minor)]
    out = np.empty([stop - start for start, stop in spans.values()], leaf.dtype)
    for i, layer in enumerate(range(*spans.get("L", (0, 1)))):
      public = source[self.name.format(layer)].read(*wanted).reshape(shape)[tuple(inside)]
      ours = self.public_order(out[i] if "L" in spans else out)
      step = max(CACHED_BYTES // public[0].nbytes, 1)
      for at in range(0, len(public), step):  # a transposing copy is slow outside the cache
        ours[at : at + step] = public[at : at + step]
    return out


# Axes: L layers, V vocabulary, D width, F feed-forward width, N heads, K key-value heads, H head
# size, C classes.
LAYOUTS = {
  "embedding": Layout("model.embed_tokens.weight", "VD", "V,D"),
  "blocks.attention_norm": Layout("model.layers.{}.input_layernorm.weight", "LD", "D"),
  "blocks.query": Layout("model.layers.{}.self_attn.q_proj.weight", "LDNH", "NH,D"),
  "blocks.key": Layout("model.layers.{}.self_attn.k_proj.weight", "LDKH", "KH,D"),
  "blocks.value": Layout("model.layers.{}.self_attn.v_proj.weight", "LDKH", "KH,D"),
  "blocks.output": Layout("model.layers.{}.self_attn.o_proj.weight", "LNHD", "D,NH"),
  "blocks.query_bias": Layout("model.layers.{}.self_attn.q_proj.bias", "LNH", "NH"),
  "blocks.key_bias": Layout("model.layers.{}.self_attn.k_proj.bias", "LKH", "KH"),
  "blocks.value_bias": Layout("model.layers.{}.self_attn.v_proj.bias", "LKH", "KH"),
  "blocks.query_norm": Layout("model.layers.{}.self_attn.q_norm.weight", "LH", "H"),
  "blocks.key_norm": Layout("model.layers.{}.self_attn.k_norm.weight", "LH", "H"),
  "blocks.mlp_norm": Layout("model.layers.{}.post_attention_layernorm.weight", "LD", "D"),
  "blocks.gate": Layout("model.layers.{}.mlp.gate_proj.weight", "LDF", "F,D"),
  "blocks.up": Layout("model.layers.{}.mlp.up_proj.weight", "LDF", "F,D"),
  "blocks.down": Layout("model.layers.{}.mlp.down_proj.weight", "LFD", "D,F"),
  "final_norm": Layout("model.norm.weight", "D", "D"),
  "language_model": Layout("lm_head.weight", "DV", "V,D"),
  "head": Layout("score.weight", "DC", "C,D"),
  "head_bias": Layout("score.bias", "C", "C"),
}
# Gemma 2 and 3 also have a norm after each half of a layer, and name the norms differently.
GEMMA = {
  "blocks.mlp_norm": Layout("model.layers.{}.pre_feedforward_layernorm.weight", "LD", "D"),
  "blocks.post_attention_norm": LAYOUTS["blocks.mlp_norm"],
  "blocks.post_mlp_norm": Layout("model.layers.{}.post_feedforward_layernorm.weight", "LD", "D"),
}
# Tensors that follow from the configuration, or belong to a model's vision half.
IGNORED = ("*.rotary_emb.inv_freq", "*.attn.masked_bias")
IGNORED += ("*vision_tower.*", "*multi_modal_projector.*")
HEADS = ("score.", "v_head.")  # heads of published reward models; ours has score.weight and .bias


def tensors(directory: str | pathlib.Path) -> dict[str, Tensor]:
  """Returns the tensors of a model's directory, not read yet, under the names of `LAYOUTS`.

  Names lose the prefixes that vision-language models add, and get the usual prefix if the trunk was
  saved without its language-model head.

  Raises:
    ValueError: the directory is broken, or has a tensor under two names.
    OSError: it cannot be read.
  """
  stored = safetensors_files.read_directory(directory)
  headless = "embed_tokens.weight" in stored
  out: dict[str, Tensor] = {}
  for name, tensor in stored.items():
    public = re.sub(r"^(model\.)?language_model\.(model\.)?(?!lm_head)", "model.", name)
    public = public.removeprefix("language_model.")
    if headless and re.match(r"(embed_tokens|layers|norm)\.", public):
      public = f"model.{public}"
    if public in out:
      raise ValueError(f"{directory}: {out[public].name} and {name} are both {public}")
    out[public] = tensor
  return out


def load(
  path: str | pathlib.Path, abstract: Any, config: config_lib.Model, others: Sequence[str] = ()
) -> Any:
  """Loads parameters from a public model's directory, each in its dtype and sharding.

  A process reads only the slices that its devices hold.  It needs memory for its shards, one slice
  of a parameter, and the mapped part of a file (`safetensors_files.MAPPED_BYTES`).

  The step head is zeros unless the directory has a `score.weight` of its shape; head parameters
  that `LAYOUTS` lacks are always zeros.  The language-model head is zeros if the directory is a
  classifier, which has none.

  Args:
    abstract: tree of `ShapeDtypeStruct` with shardings (`decoder.abstract_params`).
    others: name patterns (as in `fnmatch`) of further tensors to ignore.

  Raises:
    ValueError: tensors are missing, unknown, or of a wrong shape or dtype; the message names them.
    OSError: a file cannot be read.
  """
  source, leaves = tensors(path), traverse_util.flatten_dict(abstract, sep=".")
  zeros = {name for name in leaves if decoder.is_head(name)} - LAYOUTS.keys()
  classifier = source.get("score.weight")
  if classifier and "lm_head.weight" not in source:
    zeros.add("language_model")
  if "head" in leaves:
    if not classifier or classifier.shape != leaves["head"].shape[::-1]:
      zeros |= {"head", "head_bias"}
      others = (*others, "score.weight", "score.bias")
    elif "score.bias" not in source:
      zeros.add("head_bias")
  if "language_model" not in leaves:
    others = (*others, "lm_head.weight")  # a copy of the embedding, or not used
  public = _with_layouts({name: x for name, x in leaves.items() if name not in zeros}, config)
  shapes: dict[str, tuple[int, ...]] = {}
  for layout, leaf in public.values():
    shapes |= layout.public_shapes(leaf.shape)
  _check(path, source, shapes, (*IGNORED, *others))
  params = {}
  for name, leaf in leaves.items():
    if name in zeros:
      params[name] = jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
      continue
    # Shard by shard, as `jax.make_array_from_callback` would hold all of them on the host.
    layout, spans = public[name][0], leaf.sharding.addressable_devices_indices_map(leaf.shape)
    shards = [jax.device_put(layout.read(source, leaf, s), device) for device, s in spans.items()]
    params[name] = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
  return traverse_util.unflatten_dict(params, sep=".")


def _with_layouts(params: Any, config: config_lib.Model) -> dict[str, tuple[Layout, Any]]:
  """Returns (layout, parameter) by path; raises ValueError for one that public models lack."""
  leaves = traverse_util.flatten_dict(params, sep=".")
  table = layouts(config)
  if unknown := sorted(leaves.keys() - table.keys()):
    raise ValueError(f"public models have no parameter {', '.join(unknown)}")
  return {path: (table[path], leaf) for path, leaf in leaves.items()}


def layouts(config: config_lib.Model) -> dict[str, Layout]:
  """Returns the layout of each parameter that a family with this configuration may have."""
  return LAYOUTS | GEMMA if config.post_norms else LAYOUTS


def _check(
  path: str | pathlib.Path,
  source: Mapping[str, Tensor],
  shapes: Mapping[str, tuple[int, ...]],
  ignored: Sequence[str],
) -> None:
  """Raises one ValueError that names every difference from the expected tensors."""
  known = lambda name: name in shapes or any(fnmatch.fnmatchcase(name, each) for each in ignored)
  problems = {
    "missing": [name for name in shapes if name not in source],
    "unknown": [name for name in source if not known(name)],
    "of a wrong shape or dtype": [
      f"{name} {list(tensor.shape)} {tensor.dtype}, expected {list(shapes[name])} {DTYPES}"
      for name, tensor in source.items()
      if name in shapes and (tensor.shape != shapes[name] or tensor.dtype not in DTYPES)
    ],
  }
  messages = [
    f"{len(names):,} {problem}: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
    for problem, names in problems.items()
    if names
  ]
  if any(name.startswith(HEADS) for name in problems["unknown"]):
    messages.append(
      "training cannot start from a published PRM's own head: start from the PRM's base model "
      "(score.py --readout reads such heads)"
    )
  if messages:
    raise ValueError(f"{path}: the tensors do not match the model: {'; '.join(messages)}")


def unload(params: Any, config: config_lib.Model) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the public name and value of each tensor: the inverse of `load`.

  Raises:
    ValueError: public models have no such parameter.
  """
  for layout, leaf in _with_layouts(params, config).values():
    for i, (name, shape) in enumerate(layout.public_shapes(leaf.shape).items()):
      value = np.asarray(leaf[i] if "L" in layout.ours else leaf)
      yield name, np.ascontiguousarray(layout.public_order(value).reshape(shape))
