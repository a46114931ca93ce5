"""The decoder with a key-value cache: each token is encoded once, however many tokens follow it.

A slot is a sequence that grows by a token a step; `cache` says where its keys and values are.

Layers are unrolled, so that the cache of each is written in place.  Matrices are
`[outputs, inputs]`, which XLA's CPU backend multiplies faster in bfloat16.

Letters: as in `cache`; E slots of a context; B also blocks, P places of a past, S tokens of a
prompt or of a block, W blocks that a block attends to.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from prm_jax import config as config_lib
from prm_jax.generation.cache import Cache
from prm_jax.model import attention as attention_lib
from prm_jax.model import decoder
from prm_jax.model.block_mask import MASK_VALUE, TreeMask
from prm_jax.model.embedding import residual_stream
from prm_jax.model.normalization import rms_norm
from prm_jax.model.rotary import tables

Weights = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
  """The input of a decoding step; an empty slot reads token 0, and its output has no meaning."""

  tokens: jax.Array  # int32 [B]
  # The places of the context that hold the slot's past: bool [B, C]; or int32 [B], their number,
  # counted from place 0.
  seen: jax.Array
  own_length: jax.Array  # int32 [B], tokens of the past that are in the ring
  # int32 [G, E], the slots of each context, padded with B; None: slots are sorted by context, B / G
  # for each.
  members: jax.Array | None
  # The random number of the next token follows from these, int32 [B] each.
  seed: jax.Array
  sample: jax.Array
  place: jax.Array  # the token's, in its sample
  likeliest: jax.Array | None = None  # bool [B], whether to choose the likeliest token; None: never


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
  """New tokens: trees in preorder, each of which continues a path of a context.

  Trees are cut into blocks of few tokens, so that trees of any size are encoded together.
  """

  tokens: jax.Array  # int32 [B, S]
  positions: jax.Array  # int32 [B, S]
  subtree_end: jax.Array  # int32 [B, S], just past the last descendant, tokens counted over blocks
  # int32 [B, W], the block itself and the blocks with ancestors of its tokens, padded with B
  ancestors: jax.Array
  group: jax.Array  # int32 [B], the context
  past: jax.Array  # int32 [B, P], the places of the path before the tree, from position 0 on
  past_length: jax.Array  # int32 [B]
  reads: jax.Array  # int32 [R], the tokens whose hidden states are returned, counted over blocks


class Layer(decoder.Block):
  """A layer whose matrices are `[outputs, inputs]`."""

  def project(self, x: jax.Array, name: str) -> jax.Array:
    """Projects as `Block.project`."""
    c, (B, T, *_) = self.config, x.shape
    y = self.with_low_rank(x.reshape(B * T, -1), name)
    if name not in ("gate", "up"):  # the activation is faster, and exact, in float32
      y = y.astype(c.dtype)
    heads = {"query": c.heads, "key": c.kv_heads, "value": c.kv_heads}
    y = y.reshape(B, T, *((heads[name], -1) if name in heads else (-1,)))
    bias = getattr(self, f"{name}_bias", None)
    return y if bias is None else y + bias[...].astype(y.dtype)

  def product(self, x: jax.Array, name: str) -> jax.Array:
    """Multiplies as `Block.product`."""
    # Products are float32 and then rounded: XLA's CPU backend is slow at products that return
    # bfloat16.
    x, matrix = x.astype(self.config.dtype), getattr(self, name)[...]
    return jnp.einsum("SI,OI->SO", x, matrix, preferred_element_type=jnp.float32)


@functools.partial(jax.jit, static_argnames=("c", "vocabulary"))
def prepare(params: Any, c: config_lib.Model, vocabulary: int | None = None) -> Weights:
  """Returns the decoder's weights in `c.dtype`.

  Low-rank factors stay apart, as in training: bfloat16 sums would lose most of a small update.

  Args:
    params: of a `StepScorer`.
    vocabulary: rows of the embedding that are kept, from the first; None: all.
  """
  layers = []
  for i in range(c.layers):
    layer = {name: x[i] for name, x in params["blocks"].items()}
    for name, x in layer.items():
      projection, _, side = name.partition("_lora_")
      if projection in config_lib.PROJECTIONS:
        inputs = 1 if side == "out" else decoder.input_axes(projection)
        layer[name] = x.reshape(math.prod(x.shape[:inputs]), -1).T.astype(c.dtype)
    layers.append(layer)
  out = {name: x for name, x in params.items() if name not in ("blocks", "language_model")}
  out["embedding"] = out["embedding"][:vocabulary].astype(c.dtype)
  if "language_model" in params:
    out["language_model"] = params["language_model"].T[:vocabulary].astype(c.dtype)
  return out | {"layers": layers}


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="c")
def prefill(
  weights: Weights, cache: Cache, group: jax.Array, tokens: jax.Array, *, c: config_lib.Model
) -> Cache:
  """Returns the cache with the keys and values of a prompt in the context `group`.

  Args:
    cache: donated.
    group: int32 `[]`.
    tokens: int32 `[S]`, S <= C, stored at places 0 to S - 1.  Padding at the end is masked: the
      prompt's tokens precede it, and `Slots.seen` excludes it later.
  """
  (S,) = tokens.shape
  positions = jnp.arange(S, dtype=jnp.int32)[None]
  attend = decoder.tree_attention(TreeMask(jnp.full((1, S), S), positions), c)
  # XLA removes the last layer's attention and MLP, whose output is unused.
  _, keys, values = hidden(
    weights, tokens[None], positions, lambda layer, *given: attend(*given), c
  )
  put = lambda old, new: jax.lax.dynamic_update_slice(
    old, new.astype(old.dtype), (group, *[0] * (old.ndim - 1))
  )
  return dataclasses.replace(
    cache,
    context_k=[put(*each) for each in zip(cache.context_k, keys)],
    context_v=[put(*each) for each in zip(cache.context_v, values)],
    positions=put(cache.positions, positions),
  )


def step(
  weights: Weights, cache: Cache, index: jax.Array, slots: Slots, *, c: config_lib.Model
) -> tuple[jax.Array, Cache]:
  """Returns the logits of each slot's next token, float32 `[B, V]`, and the updated cache.

  Args:
    index: int32 `[]`, the place of the rings to write to: the step's number modulo T.
  """
  B, T, C = len(slots.tokens), cache.own_k[0].shape[2], cache.positions.shape[1]
  seen = slots.seen if slots.seen.ndim == 2 else jnp.arange(C) < slots.seen[:, None]
  positions = seen.sum(1, dtype=jnp.int32) + slots.own_length
  back = (index - jnp.arange(T)) % T  # steps since each place was written
  own = back <= slots.own_length[:, None]
  grid = _Grid.of(slots.members, B, len(cache.positions))
  distance = positions[:, None] - cache.positions[grid.place // grid.E]
  own_k, own_v = list(cache.own_k), list(cache.own_v)

  def attend(layer, q, k, v, window):
    own_k[layer] = _written(own_k[layer], k.swapaxes(1, 2), index)
    own_v[layer] = _written(own_v[layer], v.swapaxes(1, 2), index)
    in_window = lambda seen, far: seen if window is None else seen & (far < window)
    context = (cache.context_k[layer], cache.context_v[layer])
    parts = [
      (*context, in_window(seen, distance)[:, None], grid),
      (own_k[layer], own_v[layer], in_window(own, back)[:, None], None),
    ]
    return _attend(q, parts, c)

  x, _, _ = hidden(weights, slots.tokens[:, None], positions[:, None], attend, c)
  cache = dataclasses.replace(cache, own_k=own_k, own_v=own_v)
  matrix = weights.get("language_model", weights["embedding"])
  logits = jnp.einsum("BD,VD->BV", x[:, 0], matrix, preferred_element_type=jnp.float32)
  return attention_lib.soft_cap(logits, c.logit_softcap), cache


def extend(
  weights: Weights, cache: Cache, new: Blocks, *, c: config_lib.Model
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
  """Encodes new tokens of contexts without storing them.

  Returns:
    Hidden states at the reads, `[R, D]`; and for `cache.keep` the keys and values of the new
    tokens, `[B, K, S, H]` for each layer.
  """
  B, S = new.tokens.shape
  index = jnp.arange(B * S).reshape(B, S, 1)
  key = (new.ancestors[..., None] * S + jnp.arange(S)).reshape(B, 1, -1)
  of_key = lambda x: x.reshape(-1).at[key].get(mode="clip")
  descends = (key <= index) & (index < of_key(new.subtree_end))
  at = jnp.arange(new.past.shape[1])
  in_past = jnp.broadcast_to(at < new.past_length[:, None, None], (B, S, len(at)))
  seen = jnp.concatenate([in_past, descends], axis=2)
  positions = jnp.broadcast_to(at, (B, 1, len(at)))
  positions = jnp.concatenate([positions, of_key(new.positions)], axis=2)
  distance = new.positions[..., None] - positions

  def attend(layer, q, k, v, window):
    pair = []
    for context, x in ((cache.context_k[layer], k), (cache.context_v[layer], v)):
      past = context[new.group[:, None], :, new.past]  # [B, P, K, H]
      x = x.at[new.ancestors].get(mode="clip")  # [B, W, S, K, H]
      x = x.reshape(B, -1, *x.shape[3:]).astype(past.dtype)
      pair.append(jnp.concatenate([past, x], axis=1).swapaxes(1, 2))
    return _attend(q, [(*pair, seen if window is None else seen & (distance < window), None)], c)

  x, keys, values = hidden(weights, new.tokens, new.positions, attend, c)
  return x.reshape(B * S, -1)[new.reads], keys, values


def hidden(
  weights: Weights,
  tokens: jax.Array,
  positions: jax.Array,
  attend: Callable[..., jax.Array],
  c: config_lib.Model,
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
  """Returns the final hidden states `[B, S, D]` of tokens `[B, S]`.

  Also returns their keys and values, `[B, K, S, H]` for each layer.

  Args:
    attend: a `decoder.Attention` that takes the layer's number as an additional first argument.
  """
  x = residual_stream(weights["embedding"], tokens, c)
  layer = _layer(c)
  rotations, keys, values = tables(positions, c), [], []
  for i, (params, sliding) in enumerate(zip(weights["layers"], decoder.sliding_layers(c))):

    def attention(q, k, v, window, i=i):
      keys.append(k.swapaxes(1, 2))
      values.append(v.swapaxes(1, 2))
      return attend(i, q, k, v, window)

    x = nnx.merge(layer, params)(x, rotations, attention, bool(sliding))
  return rms_norm(x, weights["final_norm"], c), keys, values


@functools.cache
def _layer(c: config_lib.Model) -> nnx.GraphDef:
  return nnx.split(nnx.eval_shape(lambda: Layer(c, nnx.Rngs(0))))[0]


@dataclasses.dataclass(frozen=True)
class _Grid:
  """Slots grouped by the context that they share, so that contexts are not copied for slots."""

  members: jax.Array | None  # int32 [G * E]; None: slots are sorted and fill the grid
  place: jax.Array  # int32 [B], of each slot in the grid
  E: int

  @classmethod
  def of(cls, members: jax.Array | None, B: int, G: int) -> "_Grid":
    if members is None:
      return cls(None, jnp.arange(B), max(B // G, 1))
    members, E = members.reshape(-1), members.shape[1]
    place = jnp.zeros(B, jnp.int32).at[members].set(jnp.arange(len(members)), mode="drop")
    return cls(members, place, E)

  def join(self, x: jax.Array) -> jax.Array:
    """Gathers slots by context, `[B, K, M, _]` -> `[G, K, E * M, _]`: a matrix for each context."""
    x = x if self.members is None else jnp.take(x, self.members, axis=0, mode="clip")
    x = x.reshape(-1, self.E, *x.shape[1:]).swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])

  def split(self, x: jax.Array) -> jax.Array:
    """Inverts `join`."""
    G, K, _, H = x.shape
    x = x.reshape(G, K, self.E, -1, H).swapaxes(1, 2).reshape(G * self.E, K, -1, H)
    return x if self.members is None else x[self.place]


def _written(ring: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
  """Returns a ring with new keys or values at the place `index`."""
  write = lambda old, new: jax.lax.dynamic_update_slice(old, new, (0, 0, index, 0))
  if ring.dtype != jnp.bfloat16:
    return write(ring, new)
  bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint16)
  as_bits = lambda old, new: jax.lax.bitcast_convert_type(write(bits(old), bits(new)), old.dtype)
  # XLA's CPU backend converts a whole bfloat16 ring to float32 and back unless it is written as
  # bits; a TPU copies the ring if it is.
  return jax.lax.platform_dependent(ring, new, cpu=as_bits, default=write)


def _products(q: jax.Array, k: jax.Array) -> jax.Array:
  """Returns scores, float32 `[G, K, Q, T]`, of queries `[G, K, Q, H]` and keys `[G, K, T, H]`."""
  if q.dtype == jnp.float32 and q.shape[2] < 16:
    # XLA's CPU backend multiplies many rows by few columns twice as fast as few rows by many
    # columns; the barrier keeps it from transposing the product.
    transposed = jax.lax.optimization_barrier(jnp.einsum("GKTH,GKQH->GKTQ", k, q))
    return transposed.swapaxes(2, 3)
  return jnp.einsum("GKQH,GKTH->GKQT", q, k, preferred_element_type=jnp.float32)


def _attend(
  q: jax.Array,
  parts: list[tuple[jax.Array, jax.Array, jax.Array, _Grid | None]],
  c: config_lib.Model,
) -> jax.Array:
  """Returns the attention of new tokens, `[B, S, N, H]`, to several parts of their past.

  Each part has a softmax of its own; the parts are combined by their maxima and sums.

  Args:
    parts: keys and values, `[G, K, _, H]`; a mask of the keys that each token sees, bool
      `[B, S, _]`; and the grid of the slots that share each of the G, or None if each has its own.
  """
  B, S, N, H = q.shape
  K = parts[0][0].shape[1]
  Q = N // K
  q = q.reshape(B, S, K, Q, H).transpose(0, 2, 1, 3, 4) * decoder.scale(c)
  q = q.reshape(B, K, S * Q, H)
  results = []
  for k, v, seen, grid in parts:
    grid = grid or _Grid(None, jnp.arange(B), 1)
    scores = _products(grid.join(q), k)
    scores = attention_lib.soft_cap(scores, c.attention_softcap)
    seen = jnp.repeat(grid.join(seen[:, None]), Q, axis=2)
    scores += jnp.where(seen, 0, MASK_VALUE)  # XLA's CPU backend is slower at selects
    highest = scores.max(-1, keepdims=True)
    scores = jnp.exp(scores - highest)
    total = scores.sum(-1, keepdims=True)
    out = jnp.einsum(
      "GKQT,GKTH->GKQH", scores.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    results.append([grid.split(x) for x in (highest, total, out)])
  maxima, totals, outs = zip(*results)
  highest = functools.reduce(jnp.maximum, maxima)
  weights = [jnp.exp(x - highest) for x in maxima]
  out = sum(weight * out for weight, out in zip(weights, outs))
  out = out / sum(weight * total for weight, total in zip(weights, totals))
  return out.astype(q.dtype).reshape(B, K, S, Q, H).swapaxes(1, 2).reshape(B, S, N, H)
