"""Attention over packed trees on a TPU: a Pallas kernel for `j <= i < subtree_end[j]`.

The arithmetic is that of arXiv:2205.14135: a running maximum and sum over blocks of keys, and a
backward pass that computes weights anew from the logarithm of that sum, once for the queries and
once for keys and values.  What is skipped is decided by the grid: its steps are the live pairs of
blocks, listed beforehand, so that a pair in which no token sees another costs no arithmetic, no
memory traffic and no step.

Tokens lie along lanes throughout.  Arrays are `[..., H, T]`, so that heads of 64 fill registers and
memory, too.  Scores have keys along sublanes and queries along lanes; maxima, sums and normalisers
are then rows `[1, queries]`, and of a product's operands only a small one is ever transposed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from prm_jax.model import block_mask

BLOCK = 512  # tokens of a block of queries or of keys, at most
LANES = 128  # of a vector register: tokens of a block are a multiple
QUERY_BYTES = 2**19  # of a block of queries with its G heads, so that everything fits in VMEM
MASK_VALUE = -1e30  # finite: a block without a visible key must not make nan of the running maximum
LIVE, FIRST, LAST = 1, 2, 4  # flags of a step: it counts; it begins, it ends an outer block


class Rule(NamedTuple):
  """Who sees whom."""

  subtree_end: jax.Array  # int32 [B, T]
  positions: jax.Array | None  # int32 [B, T]; only with a window
  window: jax.Array | None  # int32 [1]


class Settings(NamedTuple):
  """What a kernel is compiled for."""

  softcap: float
  queries: int  # tokens of a block
  keys: int
  interpret: bool


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  subtree_end: jax.Array,
  positions: jax.Array | None,
  window: jax.Array | int | None,
  softcap: float,
  *,
  block: int = BLOCK,
  interpret: bool = False,
) -> jax.Array:
  """Grouped-query attention under the tree rule.

  Args:
    q: `[B, K, G, T, H]`, scaled; k, v: `[B, K, T, H]`; T a multiple of LANES.
    subtree_end, positions: int32 `[B, T]`; positions are needed only with a window.
    window: tokens seen, by depth; None: all.
    softcap: scores become `softcap * tanh(scores / softcap)`; 0: they stay.
    block: tokens of a block, at most; a multiple of LANES.
    interpret: for tests, which run anywhere.

  Returns:
    `[B, K, G, T, H]` in v's dtype; sums are float32.

  Raises:
    ValueError: T is not a multiple of LANES.
  """
  rule = Rule(subtree_end, None, None)
  if window is not None:
    rule = Rule(subtree_end, positions, jnp.asarray(window, jnp.int32).reshape(1))
  settings = Settings(softcap, *block_sizes(q.shape, q.dtype, block), interpret)
  q, k, v = (x.swapaxes(-1, -2) for x in (q, k, v))
  return _attention(q, k, v, rule, settings).swapaxes(-1, -2)


def block_sizes(shape: tuple[int, ...], dtype: Any, block: int = BLOCK) -> tuple[int, int]:
  """Tokens of a block of queries, for queries `[B, K, G, T, H]`, and of a block of keys.

  Raises:
    ValueError: T is not a multiple of LANES.
  """
  *_, G, T, H = shape
  if T % LANES:
    raise ValueError(f"rows of {T} tokens: the TPU kernel needs a multiple of {LANES}")
  sizes = [size for size in range(LANES, min(block, T) + 1, LANES) if T % size == 0]
  bytes_a_token = G * H * jnp.dtype(dtype).itemsize
  fitting = [size for size in sizes if size * bytes_a_token <= QUERY_BYTES]
  return max(fitting, default=LANES), max(sizes)


def steps(seen: jax.Array) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
  """The steps of the grid: the pairs of blocks that are live, one outer block after another.

  Args:
    seen: bool `[B, I, J]`; each of the I outer blocks has a live one among the J inner blocks.

  Returns:
    Tables int32 `[B * I * J]`, as long as a row could need: outer block, inner block, flags.  After
    its last pair a row stays there, where nothing new is fetched, with flags 0.
    How many of its I * J steps the longest row needs, int32 `[]`.
  """
  B, _, inner_blocks = seen.shape
  pairs, count = block_mask.listed(seen.reshape(B, -1))
  outer, inner = pairs // inner_blocks, pairs % inner_blocks
  step, end = jnp.arange(pairs.shape[1]), count[:, None] - 1
  changes, edge = outer[:, 1:] != outer[:, :-1], jnp.ones((B, 1), bool)
  first = jnp.concatenate([edge, changes], 1)
  last = jnp.concatenate([changes, edge], 1) | (step == end)
  flags = jnp.where(step <= end, LIVE + FIRST * first + LAST * last, 0).astype(jnp.int32)
  return (outer.reshape(-1), inner.reshape(-1), flags.reshape(-1)), count.max()


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q, k, v, rule: Rule, settings: Settings) -> jax.Array:
  return _forward(q, k, v, rule, settings)[0]


def _forward(q, k, v, rule, settings):
  B, K, G, H, T = q.shape
  queries = settings.queries
  out, normaliser = _call(
    _forward_kernel,
    rule,
    settings,
    [("queries", q), ("keys", k), ("keys", v)],
    [
      ("queries", jax.ShapeDtypeStruct(q.shape, v.dtype)),
      ("sums", jax.ShapeDtypeStruct((B, K, G, T), jnp.float32)),
    ],
    [(G, queries), (G, queries), (G, H, queries)],
    products=2,
  )
  # Kept by name (config.Model.saved), they spare recomputation this kernel.
  out, normaliser = (checkpoint_name(x, "attention") for x in (out, normaliser))
  return out, (q, k, v, rule, out, normaliser)


def _backward(settings, saved, gradient):
  q, k, v, rule, out, normaliser = saved
  G, H = q.shape[2:4]
  # of the softmax's own derivative, float32 [B, K, G, T]
  along = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(-2)
  inputs = [("queries", q), ("keys", k), ("keys", v)]
  inputs += [("queries", gradient), ("sums", normaliser), ("sums", along)]
  call = functools.partial(_call, rule=rule, settings=settings, inputs=inputs)
  (dq,) = call(
    _queries_kernel, outputs=[("queries", q)], scratch=[(G, H, settings.queries)], products=3
  )
  dk, dv = call(
    _keys_kernel,
    outputs=[("keys", k), ("keys", v)],
    scratch=[(H, settings.keys)] * 2,
    products=4,
    by_keys=True,
  )
  return dq, dk, dv, None


_attention.defvjp(_forward, _backward)


def _call(
  kernel: Callable,
  rule: Rule,
  settings: Settings,
  inputs: list[tuple[str, jax.Array]],
  outputs: list[tuple[str, jax.Array | jax.ShapeDtypeStruct]],
  scratch: list[tuple[int, ...]],
  products: int,
  by_keys: bool = False,
) -> list[jax.Array]:
  """Runs a kernel over the live pairs of blocks of each row, for each head of keys.

  Args:
    kernel: of the step's flags; a function that gives who sees whom of the pair, bool `[keys,
      queries]`; the soft cap; and references to the blocks of inputs, outputs and scratch.
    inputs: of which the first is q; and outputs, described: each with the way in which it is cut.
    scratch: shapes, float32.
    products: of matrices, for each pair of blocks and head.
    by_keys: the outer blocks are those of keys, not of queries.
  """
  B, K, G, H, T = inputs[0][1].shape
  queries, keys = settings.queries, settings.keys
  seen = block_mask.live(*rule, queries, keys)
  (outer, inner, flags), count = steps(seen.swapaxes(1, 2) if by_keys else seen)
  tables = (inner, outer, flags) if by_keys else (outer, inner, flags)
  longest = flags.size // B

  def query(b, s, tables):
    return tables[0][b * longest + s]

  def key(b, s, tables):
    return tables[1][b * longest + s]

  cut = {
    "queries": pl.BlockSpec(
      (None, None, G, H, queries), lambda b, h, s, t, _: (b, h, 0, 0, query(b, s, t))
    ),
    "sums": pl.BlockSpec((None, None, G, queries), lambda b, h, s, t, _: (b, h, 0, query(b, s, t))),
    "keys": pl.BlockSpec((None, None, H, keys), lambda b, h, s, t, _: (b, h, 0, key(b, s, t))),
    "of query": pl.BlockSpec((None, 1, queries), lambda b, h, s, t, _: (b, 0, query(b, s, t))),
    "of key": pl.BlockSpec((None, 1, keys), lambda b, h, s, t, _: (b, 0, key(b, s, t))),
  }
  ruling = [("of key", rule.subtree_end[:, None])]
  if rule.window is not None:
    depths = rule.positions[:, None]
    ruling += [("of key", depths), ("of query", depths)]

  def body(tables, window, *refs):
    at = pl.program_id(0) * longest + pl.program_id(2)
    i, j, flags = (table[at] for table in tables)
    (end, *depths), refs = refs[: len(ruling)], refs[len(ruling) :]

    def seen():
      shape = (keys, queries)
      key = j * keys + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
      query = i * queries + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
      if not depths:
        return block_mask.sees(query, key, _column(end))
      of_key, of_query = depths
      return block_mask.sees(query, key, _column(end), of_query[...] - _column(of_key), window[0])

    kernel(flags, seen, settings.softcap, *refs)

  arrays, results = [x for _, x in ruling + inputs], [x for _, x in outputs]
  return pl.pallas_call(
    body,
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(B, K, count),
      in_specs=[cut[how] for how, _ in ruling + inputs],
      out_specs=[cut[how] for how, _ in outputs],
      scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
    ),
    cost_estimate=pl.CostEstimate(  # of a row that is one chain: half of all pairs
      flops=products * B * K * G * T * T * H,
      transcendentals=B * K * G * T * T // 2,
      bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays + results),
    ),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    interpret=settings.interpret,
  )(tables, rule.window, *arrays)


def _column(row) -> jax.Array:
  """A block `[1, n]` as `[n, 1]`."""
  return row[...].reshape(-1, 1)


def _product(a: jax.Array, b: jax.Array, transposed: bool = False) -> jax.Array:
  """a @ b, or a @ b.T, in float32."""
  dimensions = (((1,), (int(transposed),)), ((), ()))
  return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _scores(key, query, seen, softcap: float) -> tuple[jax.Array, jax.Array | float]:
  """Masked scores `[keys, queries]`, of a transposed key, and the soft cap's derivative."""
  scores, slope = _product(key, query), 1.0
  if softcap:
    scores = softcap * jnp.tanh(scores / softcap)
    slope = 1 - jnp.square(scores / softcap)
  return jnp.where(seen, scores, MASK_VALUE), slope


def _forward_kernel(flags, seen, softcap, q, k, v, out, normaliser, most, total, sums):
  """Values of a block of queries; `sums` is `[G, H, queries]`, `most` and `total` one of each."""

  @pl.when(flags & FIRST != 0)
  def _():
    most[...] = jnp.full(most.shape, MASK_VALUE, jnp.float32)
    total[...] = jnp.zeros(total.shape, jnp.float32)
    sums[...] = jnp.zeros(sums.shape, jnp.float32)

  @pl.when(flags & LIVE != 0)
  def _():
    visible, key, value = seen(), k[...].T, v[...]
    for g in range(q.shape[0]):
      row = slice(g, g + 1)
      scores, _ = _scores(key, q[g], visible, softcap)
      before = most[row]
      new = jnp.maximum(before, scores.max(0, keepdims=True))
      weights, kept = jnp.exp(scores - new), jnp.exp(before - new)
      most[row] = new
      total[row] = total[row] * kept + weights.sum(0, keepdims=True)
      sums[g] = sums[g] * kept + _product(value, weights.astype(value.dtype))

  # A token sees itself, so its own block leaves nothing of what MASK_VALUE put into the sums.
  @pl.when(flags & LAST != 0)
  def _():
    for g in range(q.shape[0]):
      out[g] = (sums[g] / total[g : g + 1]).astype(out.dtype)
    normaliser[...] = most[...] + jnp.log(total[...])


def _weights(g, visible, softcap, q, key, value, outer, normaliser, along):
  """Weights `[keys, queries]` of a head, and the gradient of the scores before the soft cap.

  Key and value are transposed, `[keys, H]`.
  """
  row = slice(g, g + 1)
  scores, slope = _scores(key, q[g], visible, softcap)
  weights = jnp.exp(scores - normaliser[row])
  return weights, weights * (_product(value, outer[g]) - along[row]) * slope


def _queries_kernel(flags, seen, softcap, q, k, v, outer, normaliser, along, dq, sums):
  """Gradient of a block of queries: `sums` is `[G, H, queries]`."""

  @pl.when(flags & FIRST != 0)
  def _():
    sums[...] = jnp.zeros(sums.shape, jnp.float32)

  @pl.when(flags & LIVE != 0)
  def _():
    visible, key, value = seen(), k[...].T, v[...].T
    for g in range(q.shape[0]):
      _, ds = _weights(g, visible, softcap, q, key, value, outer, normaliser, along)
      sums[g] += _product(k[...], ds.astype(key.dtype))

  @pl.when(flags & LAST != 0)
  def _():
    for g in range(q.shape[0]):
      dq[g] = sums[g].astype(dq.dtype)


def _keys_kernel(
  flags, seen, softcap, q, k, v, outer, normaliser, along, dk, dv, for_key, for_value
):
  """Gradients of a block of keys and values, over the G heads of queries that share them."""

  @pl.when(flags & FIRST != 0)
  def _():
    for_key[...] = jnp.zeros(for_key.shape, jnp.float32)
    for_value[...] = jnp.zeros(for_value.shape, jnp.float32)

  @pl.when(flags & LIVE != 0)
  def _():
    visible, key, value = seen(), k[...].T, v[...].T
    for g in range(q.shape[0]):
      weights, ds = _weights(g, visible, softcap, q, key, value, outer, normaliser, along)
      for_key[...] += _product(q[g], ds.astype(q.dtype), transposed=True)
      for_value[...] += _product(outer[g], weights.astype(outer.dtype), transposed=True)

  @pl.when(flags & LAST != 0)
  def _():
    dk[...] = for_key[...].astype(dk.dtype)
    dv[...] = for_value[...].astype(dv.dtype)
