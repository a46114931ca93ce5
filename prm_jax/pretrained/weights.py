"""Weights of public models: one table of names, read in both directions.

A public checkpoint has one matrix per layer, output by input; here layers are stacked along a first
axis, and heads have an axis of their own.  `load` reads tensor by tensor: a process holds at most
the largest tensor beside its own shards.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import mmap
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from prm_jax import config as config_lib
from prm_jax.pretrained import gguf_files, safetensors_files

DTYPES = ("float32", "bfloat16", "float16")  # of a file
SHOWN = 10  # names in an error
BAND_BYTES = 2**19  # copied at once: fits a core's cache
KEPT_BYTES = 2**26  # of a mapped file


class Tensor(Protocol):
  """A tensor of a file, not read yet."""

  shape: tuple[int, ...]
  dtype: str

  def read(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Row:
  """One parameter: our path, the public name, and the axes of both, a letter each.

  The public layout is in groups: "NH,D" is a matrix whose rows are heads by head size.
  """

  path: str
  name: str  # {} is the layer
  ours: str
  theirs: str

  @property
  def stacked(self) -> bool:
    return "{}" in self.name

  def public_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the public tensor, from ours (of one layer)."""
    sizes = dict(zip(self.ours, shape))
    return tuple(int(np.prod([sizes[axis] for axis in group])) for group in self.theirs.split(","))

  def to_ours(self, tensor: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """A public tensor in our layout, `shape`: a view."""
    sizes, axes = dict(zip(self.ours, shape)), self.theirs.replace(",", "")
    return tensor.reshape([sizes[a] for a in axes]).transpose([axes.index(a) for a in self.ours])

  def to_theirs(self, value: np.ndarray) -> np.ndarray:
    """Our value (of one layer) in the public layout."""
    axes = self.theirs.replace(",", "")
    moved = value.transpose([self.ours.index(a) for a in axes])
    return moved.reshape(self.public_shape(value.shape))


TABLE = (
  Row("embedding", "model.embed_tokens.weight", "VD", "V,D"),
  Row("blocks.attention_norm", "model.layers.{}.input_layernorm.weight", "D", "D"),
  Row("blocks.query", "model.layers.{}.self_attn.q_proj.weight", "DNH", "NH,D"),
  Row("blocks.key", "model.layers.{}.self_attn.k_proj.weight", "DKH", "KH,D"),
  Row("blocks.value", "model.layers.{}.self_attn.v_proj.weight", "DKH", "KH,D"),
  Row("blocks.output", "model.layers.{}.self_attn.o_proj.weight", "NHD", "D,NH"),
  Row("blocks.query_bias", "model.layers.{}.self_attn.q_proj.bias", "NH", "NH"),
  Row("blocks.key_bias", "model.layers.{}.self_attn.k_proj.bias", "KH", "KH"),
  Row("blocks.value_bias", "model.layers.{}.self_attn.v_proj.bias", "KH", "KH"),
  Row("blocks.query_norm", "model.layers.{}.self_attn.q_norm.weight", "H", "H"),
  Row("blocks.key_norm", "model.layers.{}.self_attn.k_norm.weight", "H", "H"),
  Row("blocks.mlp_norm", "model.layers.{}.post_attention_layernorm.weight", "D", "D"),
  Row("blocks.gate", "model.layers.{}.mlp.gate_proj.weight", "DF", "F,D"),
  Row("blocks.up", "model.layers.{}.mlp.up_proj.weight", "DF", "F,D"),
  Row("blocks.down", "model.layers.{}.mlp.down_proj.weight", "FD", "D,F"),
  Row("final_norm", "model.norm.weight", "D", "D"),
  Row("language_model", "lm_head.weight", "DV", "V,D"),
  Row("head", "score.weight", "DC", "C,D"),
  Row("head_bias", "score.bias", "C", "C"),
)
# Gemma 2 and 3 have a norm after each half of a layer too, and name the one before the second anew.
SANDWICH = (
  Row("blocks.mlp_norm", "model.layers.{}.pre_feedforward_layernorm.weight", "D", "D"),
  Row("blocks.post_attention_norm", "model.layers.{}.post_attention_layernorm.weight", "D", "D"),
  Row("blocks.post_mlp_norm", "model.layers.{}.post_feedforward_layernorm.weight", "D", "D"),
)
IGNORED = (  # computed from the config, or of the part that looks at pictures
  "*.rotary_emb.inv_freq",
  "*.attn.masked_bias",
  "vision_tower.*",
  "multi_modal_projector.*",
)
HEADS = ("score.", "v_head.")  # of published reward models; ours is score.weight and score.bias
GGUF = {  # names in a GGUF file; {} is the layer, and .weight or .bias follows
  "token_embd": "model.embed_tokens",
  "output_norm": "model.norm",
  "output": "lm_head",
  "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
  "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
  "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
  "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
  "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
  "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
  "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
  "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
  "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
  "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
  "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
GGUF_SANDWICH = {
  "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
  "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
  "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}


def table(config: config_lib.Model) -> tuple[Row, ...]:
  """The rows of a family's parameters, in the order of the layers' work."""
  if not getattr(config, "post_norms", False):
    return TABLE
  place = next(i for i, row in enumerate(TABLE) if row.path == "blocks.mlp_norm")
  return TABLE[:place] + SANDWICH + TABLE[place + 1 :]


@dataclasses.dataclass(frozen=True)
class _Reordered:
  """A tensor of a GGUF file that llama.cpp stores in another form than the public checkpoint."""

  tensor: gguf_files.Tensor
  heads: int = 0  # rows of these many heads are interleaved
  less_one: bool = False

  shape = property(lambda self: self.tensor.shape)
  dtype = property(lambda self: self.tensor.dtype)

  def read(self) -> np.ndarray:
    x = self.tensor.read()
    if self.heads:
      # llama.cpp turns neighbours against each other, the public layout one half against the other
      # (convert_hf_to_gguf.py, LlamaModel.permute).
      x = x.reshape(self.heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    return x - 1 if self.less_one else x  # Gemma's norms are stored as 1 + weight


def tensors(path: str | pathlib.Path) -> dict[str, Tensor]:
  """The tensors of a safetensors directory or a GGUF file, not read yet, under public names.

  Raises:
    ValueError: what is there is no such thing, or broken; names the file.
    OSError: it cannot be read.
  """
  path = pathlib.Path(path)
  if path.suffix == ".gguf":
    return _gguf_tensors(path)
  found = safetensors_files.read_directory(path)
  names = {name: _plain_name(name) for name in found}
  if "embed_tokens.weight" in names:  # the model without its head was saved
    ours = re.compile(r"(embed_tokens|layers|norm)\.")
    names |= {name: f"model.{name}" for name in names if ours.match(name)}
  return _by_public_name(path, ((name, names[name], tensor) for name, tensor in found.items()))


def _by_public_name(
  path: pathlib.Path, found: Iterable[tuple[str, str, Tensor]]
) -> dict[str, Tensor]:
  """{public name: tensor} of (name in the file, public name, tensor)."""
  stored: dict[str, str] = {}
  out: dict[str, Tensor] = {}
  for name, public, tensor in found:
    if public in out:
      raise ValueError(f"{path}: {stored[public]} and {name} are both {public}: which one counts?")
    stored[public], out[public] = name, tensor
  return out


def _plain_name(name: str) -> str:
  """Without what models of pictures and text put before the text model's names."""
  name = re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", name)
  name = re.sub(r"^language_model\.(?=lm_head\.)", "", name)
  return re.sub(r"^model\.(?=(vision_tower|multi_modal_projector)\.)", "", name)


def _gguf_tensors(path: pathlib.Path) -> dict[str, Tensor]:
  header = gguf_files.read_header(path)
  config = gguf_files.config_of(path, header)
  family = header.metadata["general.architecture"]
  gemma = family.startswith("gemma")
  names = GGUF | (GGUF_SANDWICH if gemma else {})
  heads = {}
  if family == "llama":
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
  found: list[tuple[str, str, Tensor]] = []
  for name, tensor in header.tensors.items():
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    template = f"blk.{{}}.{layer[2]}" if layer else stem
    if name == "rope_freqs.weight":  # part of the configuration
      continue
    public = name
    if template in names and kind in ("weight", "bias"):
      public = f"{names[template].format(layer[1] if layer else '')}.{kind}"
      turned = heads.get(layer[2], 0) if layer else 0
      if turned and tensor.shape[0] % (2 * turned):
        raise ValueError(f"{path}: {name} {list(tensor.shape)} has no {turned} heads of even size")
      tensor = _Reordered(tensor, turned, gemma and stem.endswith("norm"))
    found.append((name, public, tensor))
  return _by_public_name(path, found)


def load(
  path: str | pathlib.Path, abstract: Any, config: config_lib.Model, others: Sequence[str] = ()
) -> Any:
  """Parameters from a public model's directory or GGUF file, each in its dtype and sharding.

  The step head comes back as zeros unless the directory has a `score.weight` of its shape; the
  language-model head too, if the directory is a classifier, which has none.

  Args:
    abstract: tree of `ShapeDtypeStruct` with shardings (sharding_lib.abstract_params).
    others: patterns (as of file names) of tensors that may be there and are left alone.

  Raises:
    ValueError: tensors are missing, unknown, or of a wrong shape or dtype: names them.
    OSError: a file cannot be read.
  """
  source = tensors(path)
  rows = {row.path: row for row in table(config)}
  leaves = flatten(abstract)
  if unknown := sorted(set(leaves) - set(rows)):
    raise ValueError(f"public models have no parameter {', '.join(unknown)}")
  classifier = "score.weight" in source
  absent = {"language_model"} if classifier and "lm_head.weight" not in source else set()
  if "head" in leaves:
    if not classifier or source["score.weight"].shape != leaves["head"].shape[::-1]:
      absent |= {"head", "head_bias"}
      others = (*others, "score.weight", "score.bias")
    elif "score.bias" not in source:
      absent |= {"head_bias"}
  wanted = {p: [n for n, _ in _names(rows[p], x)] for p, x in leaves.items() if p not in absent}
  if "language_model" not in leaves:
    others = (*others, "lm_head.weight")  # tied, or of no use
  _check(path, source, wanted, leaves, rows, (*IGNORED, *others))
  return unflatten(
    {
      p: _read(rows[p], x, [source[n] for n in wanted[p]]) if p in wanted else _zeros(x)
      for p, x in leaves.items()
    }
  )


def _names(row: Row, leaf: Any) -> Iterator[tuple[str, int | None]]:
  """Public names of one of our parameters, with the layer of each."""
  if row.stacked:
    yield from ((row.name.format(i), i) for i in range(leaf.shape[0]))
  else:
    yield row.name, None


def _check(
  path: str | pathlib.Path,
  source: Mapping[str, Tensor],
  wanted: Mapping[str, list[str]],
  leaves: Mapping[str, Any],
  rows: Mapping[str, Row],
  ignored: Sequence[str],
) -> None:
  """One ValueError for all that does not fit."""
  shapes = {
    name: rows[p].public_shape(leaves[p].shape[rows[p].stacked :])
    for p, names in wanted.items()
    for name in names
  }
  present = {n: t for n, t in source.items() if n in shapes}
  extra = [
    n for n in source if n not in shapes and not any(fnmatch.fnmatchcase(n, i) for i in ignored)
  ]
  problems = {
    "missing": [n for n in shapes if n not in source],
    "unknown": extra,
    "of a wrong shape": [
      f"{n} {list(t.shape)}, expected {list(shapes[n])}"
      for n, t in present.items()
      if t.shape != shapes[n]
    ],
    f"of a dtype other than {', '.join(DTYPES)}": [
      f"{n} {t.dtype}" for n, t in present.items() if t.dtype not in DTYPES
    ],
  }
  found = [
    f"{len(names):,} {what}: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
    for what, names in problems.items()
    if names
  ]
  if any(name.startswith(HEADS) for name in extra):
    found.append(
      "a published PRM's own head cannot be started from: take the model that it was trained from "
      "(score.py --readout reads such heads)"
    )
  if found:
    raise ValueError(f"{path}: the tensors are not those of this model: {'; '.join(found)}")


def _read(row: Row, leaf: jax.ShapeDtypeStruct, found: Sequence[Tensor]) -> jax.Array:
  if not row.stacked:
    return _place(row, found[0], leaf.shape, leaf.dtype, leaf.sharding)
  axes = leaf.sharding.spec if isinstance(leaf.sharding, jax.sharding.NamedSharding) else None
  if axes is None or (len(axes) and axes[0] is not None):
    raise ValueError(f"{row.path}: layers must not be split over the mesh: {leaf.sharding}")
  sharding = jax.sharding.NamedSharding(leaf.sharding.mesh, jax.sharding.PartitionSpec(*axes[1:]))
  stack = _zeros(leaf)
  put = _put_layer(leaf.sharding)
  for i, tensor in enumerate(found):
    stack = put(stack, _place(row, tensor, leaf.shape[1:], leaf.dtype, sharding), i)
  return stack


@functools.cache
def _put_layer(sharding: jax.sharding.Sharding) -> Any:
  """One layer into the stack, in place: the stack is never there twice."""
  return jax.jit(
    lambda stack, layer, i: jax.lax.dynamic_update_index_in_dim(stack, layer, i, 0),
    donate_argnums=0,
    out_shardings=sharding,
  )


def _place(
  row: Row, tensor: Tensor, shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding
) -> jax.Array:
  """A tensor on the devices of this process; one shard at a time is in the host's memory."""
  stored = tensor.read()
  value = row.to_ours(stored, shape)
  devices: dict[str, tuple[Any, list[jax.Device]]] = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    devices.setdefault(str(index), (index, []))[1].append(device)
  arrays = []
  for index, copies in devices.values():
    part = _copied(value[index], dtype, _mapped(stored))
    arrays += [jax.device_put(part, device, may_alias=False) for device in copies]
    jax.block_until_ready(arrays[-len(copies) :])
  return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _copied(view: np.ndarray, dtype: Any, file: mmap.mmap | None) -> np.ndarray:
  """A copy in C order and another dtype, in bands along the axis that is the slowest in memory.

  Between them, pages of the file that have been read are given back: a shard of columns reads them
  all.
  """
  out = np.empty(view.shape, dtype)
  if not view.size:
    return out
  axis = int(np.argmax(view.strides))
  band = max(1, BAND_BYTES * view.shape[axis] // view.nbytes)
  view, turned, passed = np.moveaxis(view, axis, 0), np.moveaxis(out, axis, 0), 0
  for start in range(0, len(view), band):
    turned[start : start + band] = view[start : start + band]
    passed += band * view.strides[0]
    if file is not None and passed > KEPT_BYTES:
      file.madvise(mmap.MADV_DONTNEED)
      passed = 0
  return out


def _mapped(array: np.ndarray) -> mmap.mmap | None:
  """The mapped file behind an array, where its pages can be given back."""
  base: Any = array
  while isinstance(base, np.ndarray):
    base = base.base
  return base if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") else None


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
  return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)


def unload(params: Any, config: config_lib.Model) -> Iterator[tuple[str, np.ndarray]]:
  """Public name and value of each tensor, a layer at a time; the inverse of `load`."""
  for name, _, _, value in listing(params, config):
    yield name, value()


def listing(
  params: Any, config: config_lib.Model
) -> Iterator[tuple[str, tuple[int, ...], np.dtype, Any]]:
  """(public name, shape, dtype, function that gives the value) of each tensor, none read yet."""
  leaves = flatten(params)
  rows = [row for row in table(config) if row.path in leaves]
  if unknown := sorted(set(leaves) - {row.path for row in rows}):
    raise ValueError(f"public models have no parameter {', '.join(unknown)}")
  layers = [row for row in rows if row.stacked]
  before = rows.index(layers[0])
  count = leaves[layers[0].path].shape[0]
  plan = [(row, None) for row in rows[:before]]
  plan += [(row, i) for i in range(count) for row in layers]
  plan += [(row, None) for row in rows[before:] if not row.stacked]
  for row, layer in plan:
    leaf = leaves[row.path]
    shape = row.public_shape(leaf.shape[row.stacked :])
    value = functools.partial(_value, row, leaf, layer)
    yield row.name.format(layer), shape, np.dtype(leaf.dtype), value


def _value(row: Row, leaf: jax.Array, layer: int | None) -> np.ndarray:
  return np.ascontiguousarray(row.to_theirs(np.asarray(leaf if layer is None else leaf[layer])))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """A tree of dicts as {"blocks.query": leaf}."""
  out = {}
  for key, value in tree.items():
    if isinstance(value, Mapping):
      out |= flatten(value, f"{prefix}{key}.")
    else:
      out[prefix + key] = value
  return out


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """The inverse of `flatten`."""
  out: dict[str, Any] = {}
  for path, value in leaves.items():
    *parents, name = path.split(".")
    at = out
    for parent in parents:
      at = at.setdefault(parent, {})
    at[name] = value
  return out
