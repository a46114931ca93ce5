"""The key-value cache of a decoder that reads or writes many sequences at once.

A slot is a sequence that grows by a token a step.  Its keys and values are in two parts.  A context
holds the tokens that slots may share, such as a prompt, or the steps that solutions in a search
have in common: each token is stored once, at a place, and a slot attends to the places of its own
past.  A ring of T places holds the slot's latest tokens.  All slots write to the same place of
their rings, so that a step writes one slice and needs no scatter.  `keep` copies tokens from the
rings to the contexts.

Letters: B slots, G contexts, C places of a context, T of a ring; the others as in `prm_jax`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prm_jax import config as config_lib
from prm_jax.generation.places import size
from prm_jax.model.sharding import HEADS, ROWS, Axis, constrain, fitting


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
  """Keys and values of every layer, after the rotation of RoPE."""

  context_k: list[jax.Array]  # [G, K, C, H]
  context_v: list[jax.Array]
  positions: jax.Array  # int32 [G, C], of the token at each place of a context
  own_k: list[jax.Array]  # [B, K, T, H], the rings
  own_v: list[jax.Array]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def empty(c: config_lib.Model, B: int, G: int, C: int, T: int) -> Cache:
  """Returns a cache of zeros.

  Slots are sharded over the mesh's row axes and heads over `tensor`, where the axes divide them.
  """

  def zeros(rows: int, axis: Axis, places: int) -> list[jax.Array]:
    shape = (rows, c.kv_heads, places, c.head_size)
    axes = fitting((axis, HEADS), shape, jax.sharding.get_abstract_mesh())
    return [constrain(jnp.zeros(shape, c.dtype), *axes, None, None) for _ in range(c.layers)]

  # Contexts are sharded over heads only: any slot may read any of them.
  context = functools.partial(zeros, G, None, C)
  ring = functools.partial(zeros, B, ROWS, T)
  return Cache(context(), context(), jnp.zeros((G, C), jnp.int32), ring(), ring())


@functools.partial(jax.jit, static_argnames="C")
def grown(cache: Cache, C: int) -> Cache:
  """Returns the cache with its contexts padded to C places."""
  pad = lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, C - x.shape[2]), (0, 0)])
  return dataclasses.replace(
    cache,
    context_k=[pad(x) for x in cache.context_k],
    context_v=[pad(x) for x in cache.context_v],
    positions=jnp.pad(cache.positions, [(0, 0), (0, C - cache.positions.shape[1])]),
  )


@jax.jit
def lengthened(cache: Cache) -> Cache:
  """Returns the cache with rings of 2T places, tiled: step i's entry is also at i modulo 2T."""
  double = lambda rings: [jnp.tile(x, (1, 1, 2, 1)) for x in rings]
  return dataclasses.replace(cache, own_k=double(cache.own_k), own_v=double(cache.own_v))


def moves(group: int, place: Any, row: Any, column: Any, first: int) -> np.ndarray:
  """Returns int32 `[5, M]`: M consecutive tokens that `keep` copies to places of a context.

  Args:
    group: the context.
    place: `[M]`.
    row, column: where their keys and values are now, each `[M]` or the same for all.
    first: the position of the first token.
  """
  position = np.arange(first, first + len(place))
  return np.array(np.broadcast_arrays(group, place, row, column, position), np.int32)


def keep(cache: Cache, moved: Sequence[np.ndarray], new: Any = None) -> Cache:
  """Returns the cache with some tokens of its rings, or of `new`, copied to its contexts.

  Args:
    cache: donated.
    moved: from `moves`.  Tokens that move to the same place are equal.
    new: keys and values from `cached_decoder.extend`; None: those of the rings.
  """
  if not moved:
    return cache
  tokens = np.concatenate(moved, axis=1)
  _, first = np.unique(tokens[0].astype(np.int64) << 32 | tokens[1], return_index=True)
  # Padded to one of a few sizes, as each is compiled; the padding is out of bounds and dropped.
  extra = size(len(first), 64) - len(first)
  tokens = np.pad(tokens[:, first], [(0, 0), (0, extra)], constant_values=np.iinfo(np.int32).max)
  return _copied(cache, tokens, new)


@functools.partial(jax.jit, donate_argnames="cache")
def _copied(cache: Cache, tokens: jax.Array, new: Any) -> Cache:
  group, place, row, column, position = tokens
  keys, values = new or (cache.own_k, cache.own_v)
  copy = lambda old, new: old.at[group, :, place].set(
    new[row, :, column].astype(old.dtype), mode="drop"
  )
  return dataclasses.replace(
    cache,
    context_k=[copy(*each) for each in zip(cache.context_k, keys)],
    context_v=[copy(*each) for each in zip(cache.context_v, values)],
    positions=cache.positions.at[group, place].set(position, mode="drop"),
  )
