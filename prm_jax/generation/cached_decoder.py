"""The decoder with a cache: each token is encoded once, however many tokens follow it.

A slot is a sequence that grows by a token a step.  Its keys and values are in two parts.  The
context is what came before, such as the prompt: it is stored once and read by all slots that share
it.  The slot's own tokens are in a ring of T places, with one place to write for all slots, so that
a step writes a slice and scatters nothing.

Layers are unrolled, so that each cache is written in place, and matrices are `[outputs, inputs]`,
which XLA's CPU backend multiplies faster in bfloat16.

Letters: B slots, G contexts, C tokens of a context, T of a ring, S of a prompt; the others as in
`prm_jax`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from prm_jax import config as config_lib
from prm_jax.model import attention as attention_lib
from prm_jax.model import decoder
from prm_jax.model.block_mask import MASK_VALUE, TreeMask
from prm_jax.model.decoder import PROJECTION_EINSUMS, Attention
from prm_jax.model.sharding import ROWS, constrain

Weights = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
  """Keys and values of every layer, rotated."""

  context_k: list[jax.Array]  # [G, K, C, H]
  context_v: list[jax.Array]
  own_k: list[jax.Array]  # [B, K, T, H]
  own_v: list[jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
  """What the slots are at, one step."""

  tokens: jax.Array  # int32 [B], to be read now
  positions: jax.Array  # int32 [B], of these tokens
  groups: jax.Array  # int32 [B], the slot's context
  context_length: jax.Array  # int32 [B], tokens of the context that the slot has
  own_length: jax.Array  # int32 [B], tokens read by the slot itself before this one


class Layer(decoder.Block):
  """A layer whose matrices are `[outputs, inputs]`."""

  def project(self, x: jax.Array, name: str) -> jax.Array:
    """As `Block.project`, without low-rank factors: they are merged."""
    B, T, *_ = x.shape
    # Products are float32 and then rounded: XLA's CPU backend is slow at bfloat16 products.
    y = jnp.einsum(
      "SI,OI->SO",
      x.reshape(B * T, -1),
      getattr(self, name)[...],
      preferred_element_type=jnp.float32,
    )
    y = y.astype(x.dtype)
    heads = {"query": self.config.heads, "key": self.config.kv_heads, "value": self.config.kv_heads}
    y = y.reshape(B, T, *((heads[name], -1) if name in heads else (-1,)))
    bias = getattr(self, f"{name}_bias", None)
    return y if bias is None else y + bias[...].astype(y.dtype)


def prepare(params: Any, c: config_lib.Model) -> Weights:
  """Weights of a step from those of `StepScorer`, in `c.dtype`; low-rank factors are merged."""
  blocks, layers = params["blocks"], []
  for i in range(c.layers):
    layer = {name: x[i] for name, x in blocks.items() if "_lora_" not in name}
    for name in PROJECTION_EINSUMS:
      matrix = layer[name]
      if name in c.lora_targets and c.lora_rank:
        low, high = (blocks[f"{name}_lora_{end}"][i] for end in ("in", "out"))
        change = jnp.tensordot(low, high, 1, precision="highest")
        matrix = matrix.astype(jnp.float32) + c.lora_alpha / c.lora_rank * change
      inputs = PROJECTION_EINSUMS[name].index(",") - 1
      size = functools.reduce(lambda a, b: a * b, matrix.shape[:inputs])
      layer[name] = matrix.reshape(size, -1).T.astype(c.dtype)
    layers.append(layer)
  out = {name: x for name, x in params.items() if name not in ("blocks", "language_model")}
  out["embedding"] = out["embedding"].astype(c.dtype)
  if "language_model" in params:
    out["language_model"] = params["language_model"].T.astype(c.dtype)
  return out | {"layers": layers}


def empty(c: config_lib.Model, B: int, G: int, C: int, T: int) -> Cache:
  """A cache of zeros."""
  of = lambda rows, tokens: [
    jnp.zeros((rows, c.kv_heads, tokens, c.head_size), c.dtype) for _ in range(c.layers)
  ]
  return Cache(of(G, C), of(G, C), of(B, T), of(B, T))


def prefill(
  weights: Weights, cache: Cache, group: jax.Array, tokens: jax.Array, *, c: config_lib.Model
) -> Cache:
  """The cache with the keys and values of a prompt as the context `group`.

  Args:
    group: int32 `[]`.
    tokens: int32 `[S]`, at most C; what pads a prompt at its end is not seen by its own tokens,
      and later by no slot (`Slots.context_length`).
  """
  (S,) = tokens.shape
  found, positions = [], jnp.arange(S)[None]
  attend = decoder.tree_attention(TreeMask(jnp.full((1, S), S), positions), c)

  def keep(layer: int) -> Attention:
    def attention(q, k, v, window):
      found.append((k, v))
      return attend(q, k, v, window)

    return attention

  hidden(weights, tokens[None], positions, keep, c)  # XLA drops what only its result needs
  put = lambda cached, new: jax.lax.dynamic_update_slice(
    cached, new.transpose(0, 2, 1, 3).astype(cached.dtype), (group, 0, 0, 0)
  )
  return dataclasses.replace(
    cache,
    context_k=[put(old, k) for old, (k, _) in zip(cache.context_k, found)],
    context_v=[put(old, v) for old, (_, v) in zip(cache.context_v, found)],
  )


def step(
  weights: Weights, cache: Cache, index: jax.Array, slots: Slots, *, c: config_lib.Model
) -> tuple[jax.Array, Cache]:
  """Logits of each slot's next token, float32 `[B, V]`, and the cache with the present ones.

  Args:
    index: int32 `[]`, place of the rings to write to: the step's number modulo T.
  """
  C, T = cache.context_k[0].shape[2], cache.own_k[0].shape[2]
  back = (index - jnp.arange(T)) % T  # steps since each place was written
  own = back[None] <= slots.own_length[:, None]
  context = jnp.arange(C)[None] < slots.context_length[:, None]
  distance = jnp.concatenate(
    [slots.positions[:, None] - jnp.arange(C), jnp.broadcast_to(back, own.shape)], axis=1
  )
  visible = jnp.concatenate([context, own], axis=1)
  own_k, own_v = list(cache.own_k), list(cache.own_v)

  def cached(layer: int) -> Attention:
    def attention(q, k, v, window):
      put = lambda old, new: jax.lax.dynamic_update_slice(
        old, new.transpose(0, 2, 1, 3), (0, 0, index, 0)
      )
      own_k[layer], own_v[layer] = put(own_k[layer], k), put(own_v[layer], v)
      seen = visible if window is None else visible & (distance < window)
      keys = (cache.context_k[layer][slots.groups], own_k[layer])
      values = (cache.context_v[layer][slots.groups], own_v[layer])
      return _attend(q, keys, values, seen, c)

    return attention

  x = hidden(weights, slots.tokens[:, None], slots.positions[:, None], cached, c)
  cache = dataclasses.replace(cache, own_k=own_k, own_v=own_v)
  return logits(weights, x[:, 0], c), cache


def hidden(
  weights: Weights,
  tokens: jax.Array,
  positions: jax.Array,
  attention_of: Any,
  c: config_lib.Model,
) -> jax.Array:
  """Final hidden states `[B, S, D]` of tokens `[B, S]`; `attention_of` a layer's number."""
  x = decoder.embed(weights["embedding"], tokens, c)
  if c.scale_embeddings:
    x = x * jnp.asarray(c.width**0.5, x.dtype)
  x = constrain(x, ROWS, None, None)
  layer = nnx.split(nnx.eval_shape(lambda: Layer(_without_lora(c), nnx.Rngs(0))))[0]
  for i, (values, sliding) in enumerate(zip(weights["layers"], decoder.sliding_layers(c))):
    x = nnx.merge(layer, values)(x, positions, attention_of(i), bool(sliding))
  return decoder.rms_norm(x, weights["final_norm"], c)


def logits(weights: Weights, x: jax.Array, c: config_lib.Model) -> jax.Array:
  """Vocabulary logits, float32 `[B, V]`, of hidden states `[B, D]`."""
  matrix = weights.get("language_model", weights["embedding"])
  out = jnp.einsum("BD,VD->BV", x, matrix, preferred_element_type=jnp.float32)
  return attention_lib.soft_cap(out, c.logit_softcap)


def _without_lora(c: config_lib.Model) -> config_lib.Model:
  return dataclasses.replace(c, lora_rank=0)


def _attend(
  q: jax.Array,
  keys: tuple[jax.Array, ...],
  values: tuple[jax.Array, ...],
  visible: jax.Array,
  c: config_lib.Model,
) -> jax.Array:
  """Attention of one query a slot, `[B, 1, N, H]`, to the parts of its cache.

  Args:
    keys, values: `[B, K, _, H]` of each part.
    visible: bool `[B, _]`, over all parts.
  """
  B, _, N, H = q.shape
  K = keys[0].shape[1]
  q = q.reshape(B, K, N // K, H) * decoder.scale(c)
  scores = [jnp.einsum("BKGH,BKTH->BKGT", q, k, preferred_element_type=jnp.float32) for k in keys]
  scores = attention_lib.soft_cap(jnp.concatenate(scores, axis=-1), c.attention_softcap)
  scores = jnp.where(visible[:, None, None], scores, MASK_VALUE)
  weights = jax.nn.softmax(scores, axis=-1).astype(values[0].dtype)
  parts = jnp.split(weights, [keys[0].shape[2]], axis=-1)
  out = sum(
    jnp.einsum("BKGT,BKTH->BKGH", w, v, preferred_element_type=jnp.float32)
    for w, v in zip(parts, values)
  )
  return out.astype(q.dtype).reshape(B, 1, N, H)
