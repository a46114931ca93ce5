"""A Pallas TPU kernel for attention over packed trees, `j <= i < subtree_end[j]`.

This is FlashAttention (arXiv:2205.14135), with a backward pass for the queries and one for the keys
and values.  As in splash attention, the mask decides the grid: its steps are the active block
pairs, listed beforehand, so that a masked block costs no arithmetic, memory traffic or grid step.

Tokens lie along lanes.  Arrays are `[..., H, T]`, so that heads of size 64 also fill registers.
Scores are `[block_kv, block_q]`: maxima, sums and log-sum-exps are then rows `[1, block_q]`, and a
matmul only ever transposes its small operand.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from prm_jax.model import block_mask
from prm_jax.model.block_mask import MASK_VALUE, TreeMask

BLOCK = 512  # maximum number of tokens in a block of queries or keys
LANES = 128  # lanes of a vector register; the tokens of a block are a multiple of it
QUERY_BYTES = 2**19  # maximum size of a query block with its G heads, so that VMEM suffices
ACTIVE, FIRST, LAST = 1, 2, 4  # flags of a grid step: FIRST and LAST step of an outer block


class Settings(NamedTuple):
  """The constants of a compiled kernel."""

  softcap: float
  block_q: int
  block_kv: int
  interpret: bool


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: TreeMask,
  softcap: float,
  *,
  block: int = BLOCK,
  interpret: bool = False,
) -> jax.Array:
  """Computes `blockwise.attention` on a TPU.

  Args:
    q: `[B, K, G, T, H]`, scaled.
    k, v: `[B, K, T, H]`; T is a multiple of LANES.
    mask, softcap: see `blockwise.attention`.
    block: maximum number of tokens in a block; a multiple of LANES.
    interpret: run the kernel without a TPU, for tests.

  Raises:
    ValueError: T is not a multiple of LANES.
  """
  if mask.window is not None:  # scalar prefetch takes an array
    mask = dataclasses.replace(mask, window=jnp.asarray(mask.window, jnp.int32).reshape(1))
  settings = Settings(softcap, *block_sizes(q.shape, q.dtype, block), interpret)
  q, k, v = (x.swapaxes(-1, -2) for x in (q, k, v))
  return _attention(q, k, v, mask, settings).swapaxes(-1, -2)


def multiple(T: int) -> int:
  """Returns the multiple to which rows of T tokens are padded for the kernel.

  Long rows are padded to a multiple of the largest block, so that the kernel can use it.
  """
  return LANES if T < BLOCK else BLOCK


def block_sizes(shape: tuple[int, ...], dtype: Any, block: int = BLOCK) -> tuple[int, int]:
  """Returns the tokens in a query block and in a key block, for queries of shape `[B, K, G, T, H]`.

  Raises:
    ValueError: T is not a multiple of LANES.
  """
  *_, G, T, H = shape
  if T % LANES:
    raise ValueError(f"rows of {T} tokens: the TPU kernel needs a multiple of {LANES}")
  sizes = [size for size in range(LANES, min(block, T) + 1, LANES) if T % size == 0]
  bytes_per_token = G * H * jnp.dtype(dtype).itemsize
  fitting = [size for size in sizes if size * bytes_per_token <= QUERY_BYTES]
  return max(fitting, default=LANES), max(sizes)


def grid_steps(active: jax.Array) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
  """Lists the active pairs of blocks as grid steps, one outer block after another.

  Args:
    active: bool `[B, I, J]`, for I outer and J inner blocks; each outer block has an active pair.

  Returns:
    Tables int32 `[B * I * J]` of outer block, inner block and flags.  After its last active pair a
      row repeats the pair with flags 0, so that nothing new is fetched.
    The number of steps of the row with the most steps, int32 `[]`.
  """
  B, _, inner_blocks = active.shape
  pairs, count = block_mask.active_indices(active.reshape(B, -1))
  outer, inner = pairs // inner_blocks, pairs % inner_blocks
  step, end = jnp.arange(pairs.shape[1]), count[:, None] - 1
  changes, edge = outer[:, 1:] != outer[:, :-1], jnp.ones((B, 1), bool)
  first = jnp.concatenate([edge, changes], 1)
  last = jnp.concatenate([changes, edge], 1) | (step == end)
  flags = jnp.where(step <= end, ACTIVE + FIRST * first + LAST * last, 0).astype(jnp.int32)
  return (outer.reshape(-1), inner.reshape(-1), flags.reshape(-1)), count.max()


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q, k, v, mask: TreeMask, settings: Settings) -> jax.Array:
  return _forward(q, k, v, mask, settings)[0]


def _forward(q, k, v, mask, settings):
  B, K, G, H, T = q.shape
  block_q = settings.block_q
  out, lse = _call(
    _forward_kernel,
    mask,
    settings,
    inputs=[("q", q), ("kv", k), ("kv", v)],
    outputs=[
      ("q", jax.ShapeDtypeStruct(q.shape, v.dtype)),
      ("lse", jax.ShapeDtypeStruct((B, K, G, T), jnp.float32)),
    ],
    scratch=[((G, block_q), MASK_VALUE), ((G, block_q), 0), ((G, H, block_q), 0)],
    matmuls=2,
  )
  # If saved by name (config.Model.saved), the backward pass does not run this kernel again.
  out, lse = (checkpoint_name(x, "attention") for x in (out, lse))
  return out, (q, k, v, mask, out, lse)


def _backward(settings, saved, do):
  q, k, v, mask, out, lse = saved
  G, H = q.shape[2:4]
  delta = (do.astype(jnp.float32) * out.astype(jnp.float32)).sum(-2)  # [B, K, G, T]
  inputs = [("q", q), ("kv", k), ("kv", v), ("q", do), ("lse", lse), ("lse", delta)]
  call = functools.partial(_call, mask=mask, settings=settings, inputs=inputs)
  (dq,) = call(_dq_kernel, outputs=[("q", q)], scratch=[((G, H, settings.block_q), 0)], matmuls=3)
  dk, dv = call(
    _dkv_kernel,
    outputs=[("kv", k), ("kv", v)],
    scratch=[((H, settings.block_kv), 0)] * 2,
    matmuls=4,
    outer_kv=True,
  )
  return dq, dk, dv, None


_attention.defvjp(_forward, _backward)


def _call(
  kernel: Callable,
  mask: TreeMask,
  settings: Settings,
  inputs: list[tuple[str, jax.Array]],
  outputs: list[tuple[str, jax.Array | jax.ShapeDtypeStruct]],
  scratch: list[tuple[tuple[int, ...], float]],  # shapes and initial values, float32
  matmuls: int,  # per block pair and query head
  outer_kv: bool = False,  # the outer blocks are blocks of keys, not of queries
) -> list[jax.Array]:
  """Runs a kernel over the active pairs of blocks of each row, for each of K heads.

  Args:
    kernel: called with the step's flags, a function that returns the pair's mask, the soft cap, and
      references to the blocks of inputs, outputs and scratch.
    inputs, outputs: arrays, each with its key in `_block_specs`; the first input is q.
  """
  B, K, G, H, T = inputs[0][1].shape
  active = block_mask.active_blocks(mask, settings.block_q, settings.block_kv)
  (outer, inner, flags), count = grid_steps(active.swapaxes(1, 2) if outer_kv else active)
  tables = (inner, outer, flags) if outer_kv else (outer, inner, flags)
  steps = flags.size // B  # table entries of a row
  specs = _block_specs(G, H, steps, settings)
  mask_inputs = [("kv index", mask.subtree_end[:, None])]
  if mask.window is not None:
    depth = mask.positions[:, None]
    mask_inputs += [("kv index", depth), ("q index", depth)]

  def body(tables, window, *refs):
    at = pl.program_id(0) * steps + pl.program_id(2)
    i, j, flags = (table[at] for table in tables)
    mask_refs, refs = refs[: len(mask_inputs)], refs[len(mask_inputs) :]
    pair_mask = functools.partial(_pair_mask, i, j, settings, window, *mask_refs)

    @pl.when(flags & FIRST != 0)
    def _():
      for ref, (shape, value) in zip(refs[-len(scratch) :], scratch):
        ref[...] = jnp.full(shape, value, jnp.float32)

    kernel(flags, pair_mask, settings.softcap, *refs)

  arrays, results = [x for _, x in mask_inputs + inputs], [x for _, x in outputs]
  return pl.pallas_call(
    body,
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(B, K, count),
      in_specs=[specs[key] for key, _ in mask_inputs + inputs],
      out_specs=[specs[key] for key, _ in outputs],
      scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape, _ in scratch],
    ),
    cost_estimate=pl.CostEstimate(  # as if each row were one chain: half of all pairs
      flops=matmuls * B * K * G * T * T * H,
      transcendentals=B * K * G * T * T // 2,
      bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays + results),
    ),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    interpret=settings.interpret,
  )(tables, mask.window, *arrays)


def _block_specs(G: int, H: int, steps: int, settings: Settings) -> dict[str, pl.BlockSpec]:
  """Returns how each kind of array is cut into the blocks of a grid step (row, head, step)."""

  def spec(table: int, *shape: int | None) -> pl.BlockSpec:
    def index(b, h, step, tables, _):
      leading = (b, h)[: shape.count(None)]
      zeros = (0,) * (len(shape) - len(leading) - 1)
      return (*leading, *zeros, tables[table][b * steps + step])

    return pl.BlockSpec(shape, index)

  Q, KV = 0, 1  # indices of the tables
  return {
    "q": spec(Q, None, None, G, H, settings.block_q),
    "lse": spec(Q, None, None, G, settings.block_q),
    "kv": spec(KV, None, None, H, settings.block_kv),
    "q index": spec(Q, None, 1, settings.block_q),
    "kv index": spec(KV, None, 1, settings.block_kv),
  }


def _pair_mask(i, j, settings: Settings, window, kv_end, kv_depth=None, q_depth=None) -> jax.Array:
  """Returns the mask of query block i and key block j, bool `[block_kv, block_q]`."""
  column = lambda row: row[...].reshape(-1, 1)
  shape = (settings.block_kv, settings.block_q)
  kv_index = j * settings.block_kv + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
  q_index = i * settings.block_q + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
  end = column(kv_end)
  if q_depth is None:
    return block_mask.attends(q_index, kv_index, end)
  return block_mask.attends(q_index, kv_index, end, q_depth[...] - column(kv_depth), window[0])


def _matmul(a: jax.Array, b: jax.Array, transposed: bool = False) -> jax.Array:
  """Returns a @ b, or a @ b.T, in float32."""
  dimensions = (((1,), (int(transposed),)), ((), ()))
  return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _scores(k, q, mask, softcap: float) -> tuple[jax.Array, jax.Array | float]:
  """Returns masked scores `[block_kv, block_q]`, and the derivative of the soft cap."""
  scores, slope = _matmul(k, q), 1.0
  if softcap:
    scores = softcap * jnp.tanh(scores / softcap)
    slope = 1 - jnp.square(scores / softcap)
  return jnp.where(mask, scores, MASK_VALUE), slope


def _forward_kernel(flags, pair_mask, softcap, q, k, v, out, lse, maximum, total, acc):
  """Writes a query block's output and log-sum-exp, from running maximum, sum and output."""

  @pl.when(flags & ACTIVE != 0)
  def _():
    mask, key, value = pair_mask(), k[...].T, v[...]
    for g in range(q.shape[0]):
      row = slice(g, g + 1)
      scores, _ = _scores(key, q[g], mask, softcap)
      before = maximum[row]
      new = jnp.maximum(before, scores.max(0, keepdims=True))
      weights, decay = jnp.exp(scores - new), jnp.exp(before - new)
      maximum[row] = new
      total[row] = total[row] * decay + weights.sum(0, keepdims=True)
      acc[g] = acc[g] * decay + _matmul(value, weights.astype(value.dtype))

  # The sums hold no masked scores by now: at a query's first unmasked score, `decay` was
  # exp(MASK_VALUE - score) = 0.  There always is one, as every token attends to itself.
  @pl.when(flags & LAST != 0)
  def _():
    for g in range(q.shape[0]):
      out[g] = (acc[g] / total[g : g + 1]).astype(out.dtype)
    lse[...] = maximum[...] + jnp.log(total[...])


def _weights(g, mask, softcap, q, key, value, do, lse, delta):
  """Returns attention weights `[block_kv, block_q]` of query head g, and the scores' gradient."""
  row = slice(g, g + 1)
  scores, slope = _scores(key, q[g], mask, softcap)
  weights = jnp.exp(scores - lse[row])
  return weights, weights * (_matmul(value, do[g]) - delta[row]) * slope


def _dq_kernel(flags, pair_mask, softcap, q, k, v, do, lse, delta, dq, acc):
  """Writes the gradient of a block of queries."""

  @pl.when(flags & ACTIVE != 0)
  def _():
    mask, key, value = pair_mask(), k[...].T, v[...].T
    for g in range(q.shape[0]):
      _, ds = _weights(g, mask, softcap, q, key, value, do, lse, delta)
      acc[g] += _matmul(k[...], ds.astype(key.dtype))

  @pl.when(flags & LAST != 0)
  def _():
    for g in range(q.shape[0]):
      dq[g] = acc[g].astype(dq.dtype)


def _dkv_kernel(flags, pair_mask, softcap, q, k, v, do, lse, delta, dk, dv, acc_k, acc_v):
  """Writes the gradients of a block of keys and values, summed over their G query heads."""

  @pl.when(flags & ACTIVE != 0)
  def _():
    mask, key, value = pair_mask(), k[...].T, v[...].T
    for g in range(q.shape[0]):
      weights, ds = _weights(g, mask, softcap, q, key, value, do, lse, delta)
      acc_k[...] += _matmul(q[g], ds.astype(q.dtype), transposed=True)
      acc_v[...] += _matmul(do[g], weights.astype(do.dtype), transposed=True)

  @pl.when(flags & LAST != 0)
  def _():
    dk[...] = acc_k[...].astype(dk.dtype)
    dv[...] = acc_v[...].astype(dv.dtype)
