"""w_d(N): the chance that depth d is drawn and nothing above it is, and sums weighted by it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# w_d(N) <= N/M exp(-d N/M): depths beyond REACH M/N together weigh e^-REACH, 4e-8 or 9e-17.
REACH = {np.dtype(np.float32): 17, np.dtype(np.float64): 37}
# Chebyshev nodes in place of all N of an octave: as exact as the rest.
NODES = {np.dtype(np.float32): 10, np.dtype(np.float64): 22}
CHUNK = 128  # depths in one matrix product
UNROLLED = 16  # up to so many products stand in the program one by one, which is faster
MAX_ENTRIES = 2**29  # weights: 2 GiB of float32
KEPT_ENTRIES = 2**22  # weights small enough to be kept for the next call


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("bands", "interpolate", "row", "column"),
  meta_fields=("spans",),
)
@dataclasses.dataclass(frozen=True)
class DrawWeights:
  """w_d(N) of each different number of candidates U, at nodes J from which all N follow.

  Two things keep all M values of N from taking M^2 weights.  The larger N, the fewer depths from
  the top matter: nodes stand in bands of few or many depths.  And E(N) is smooth: where N doubles,
  ten nodes say as much as all N between.  Together some 90 M weights for M values of N.
  """

  bands: tuple[np.ndarray, ...]  # [U, J_b, D_b], N ascending, depth descending to 0
  interpolate: tuple[np.ndarray | None, ...]  # [J_s, K_s] of each span; None: nodes are values
  row: np.ndarray  # [P] row of each problem in bands; [1] for all
  column: np.ndarray | None  # [K] where each N asked for stands, unless in order
  spans: tuple[tuple[int, int], ...]  # from which node to which


def check_n(n: Sequence[int] | None, m: int) -> np.ndarray:
  """The values of N as an array, or a ValueError."""
  n = np.arange(1, m + 1) if n is None else np.asarray(n)
  if n.ndim != 1 or not n.size or n.dtype.kind not in "iu" or n.min() < 1 or n.max() > m:
    raise ValueError(f"n={n}: expected whole numbers in 1..{m}, the number of candidates")
  return n


def draw_weights(m: int, n: np.ndarray, sizes=None) -> DrawWeights:
  """The weights of every N in `n`, for problems of `m` candidates, or `sizes` `[P]` of them."""
  different, row = (
    (np.array([m]), np.zeros(1, int)) if sizes is None else np.unique(sizes, return_inverse=True)
  )
  values, column = np.unique(n, return_inverse=True)
  dtype = jax.dtypes.canonicalize_dtype(np.float64)
  bands, interpolate, spans = _weights(m, tuple(different.tolist()), values, dtype)
  column = None if np.array_equal(values, n) else column
  return DrawWeights(bands, interpolate, row, column, spans)


def _weights(m: int, different: tuple[int, ...], values: np.ndarray, dtype):
  """The bands, interpolations and spans of ascending `values`; small ones are kept."""
  nodes, spans, interpolate = _nodes(values, min(different), NODES[dtype])
  reach = np.minimum(m, REACH[dtype] * m // nodes + 1).astype(int).tolist()
  edges = _edges(nodes, reach)
  depths = [reach[i] for i in edges[:-1]]
  entries = len(different) * sum(d * k for d, k in zip(depths, np.diff(edges)))
  if entries > MAX_ENTRIES:
    raise ValueError(
      f"{len(different)} sizes x {values.size} values of N x {m} candidates: more than "
      f"{MAX_ENTRIES} weights; give fewer values of n"
    )
  tables = _kept_tables if entries <= KEPT_ENTRIES else _tables
  bands = tables(tuple(nodes.tolist()), different, edges, tuple(depths), dtype)
  return bands, tuple(None if x is None else x.astype(dtype) for x in interpolate), spans


def _nodes(values: np.ndarray, smallest: int, count: int):
  """Where to evaluate E: the ascending `values`, or Chebyshev nodes of octaves full of them.

  w_d is a polynomial in N as long as d + N stays below the number of candidates, `smallest`: up to
  half of it, with the few depths that matter there.

  Returns:
    Nodes `[J]` float64; spans of them; for each span its interpolation `[J_s, K_s]`, or None.
  """
  octave = np.floor(np.log2(values))
  nodes, spans, interpolate, start = [], [], [], 0
  for some in np.split(values, np.flatnonzero(np.diff(octave)) + 1):
    if len(some) > 2 * count and 2 * some[-1] <= smallest:
      angle = np.pi * (np.arange(count)[::-1] + 0.5) / count
      x = (some[0] + some[-1]) / 2 + (some[-1] - some[0]) / 2 * np.cos(angle)
      gap = some - x[:, None]
      gap[gap == 0] = 1e-12
      share = ((-1.0) ** np.arange(count) * np.sin(angle))[:, None] / gap  # barycentric
      interpolate.append(share / share.sum(axis=0))
    else:
      x = some
      interpolate.append(None)
    nodes.append(x)
    spans.append((start, start + len(x)))
    start += len(x)
  return np.concatenate(nodes).astype(np.float64), tuple(spans), interpolate


def _edges(nodes: np.ndarray, reach: list[int]) -> tuple[int, ...]:
  """Where bands begin in the ascending `nodes`, and the end: the cheapest cut at half octaves.

  A band of J nodes with depth D costs (J + 16) D: its products, and its share of handling.
  """
  half_octave = np.floor(2 * np.log2(nodes))
  cuts = [*np.flatnonzero(np.diff(half_octave, prepend=-1)).tolist(), len(nodes)]
  best = {0: (0.0, (0,))}  # cost and edges up to each cut
  for j, end in enumerate(cuts[1:], 1):
    best[end] = min((best[i][0] + (end - i + 16) * reach[i], (*best[i][1], end)) for i in cuts[:j])
  return best[len(nodes)][1]


def _tables(nodes, different, edges, depths, dtype) -> tuple[np.ndarray, ...]:
  tables = []
  for start, end, depth in zip(edges, edges[1:], depths):
    table = np.zeros((len(different), end - start, depth), dtype)
    for u, size in enumerate(different):
      weights = depth_weights(size, np.array(nodes[start:end]), min(depth, size))
      table[u, :, depth - weights.shape[1] :] = weights[:, ::-1]
    tables.append(table)
  return tuple(tables)


_kept_tables = functools.lru_cache(maxsize=16)(_tables)


def depth_weights(m: int, n: np.ndarray, depths: int) -> np.ndarray:
  """float64 w_d(N) `[K, depths]`, by w_0 = N/M and w_{d+1} = w_d (M-d-N) / (M-1-d).

  On the host in float64: exact to 1e-13, where differences of float32 log-gammas are off by 1e-3
  at M = 1860 and meaningless at 1e6.
  """
  drawn = np.minimum(n, m)[:, None].astype(np.float64)
  d = np.arange(depths - 1)
  weights = np.empty((n.size, depths))
  weights[:, :1] = drawn / m
  np.subtract(m - d, drawn, out=weights[:, 1:])
  np.maximum(weights[:, 1:], 0, out=weights[:, 1:])
  weights[:, 1:] /= m - 1 - d
  return np.cumprod(weights, axis=1, out=weights)


@jax.jit
def weighted_sum(values, weights: DrawWeights):
  """sum_d values w_d(N): `[P, M]`, depth 0 last, -> `[P, K]`."""

  def at_nodes(values, row):
    return jnp.concatenate([_dot(values, jnp.asarray(band)[row]) for band in weights.bands], axis=1)

  if len(weights.bands[0]) == 1:
    sums = at_nodes(values, 0)
  else:  # one problem at a time, so that no more than one problem's weights are copied
    sums = jax.lax.map(lambda x: at_nodes(x[0][None], x[1])[0], (values, weights.row))
  parts = [
    sums[:, start:end]
    if matrix is None
    else jnp.einsum("PJ,JK->PK", sums[:, start:end], matrix, precision="highest")
    for (start, end), matrix in zip(weights.spans, weights.interpolate)
  ]
  # Rounding may leave a sum a hair outside.  A NaN stays a NaN.
  result = jnp.clip(jnp.concatenate(parts, axis=1), 0, 1)
  return result if weights.column is None else result[:, weights.column]


def _dot(values, weights):
  """`[P, M]` x `[K, D]`, D <= M -> `[P, K]`, small terms first, in chunks.

  A float32 matrix product may add M terms in a row: off by 1e-2 at M = 1e6, 1.4e-6 at 1860.
  From the deepest, least likely depth up, and by chunks, it stays at 3e-7.
  """
  depth = weights.shape[1]
  values = values[:, values.shape[1] - depth :].astype(weights.dtype)

  def product(start, length):
    some = (jax.lax.dynamic_slice_in_dim(x, start, length, axis=1) for x in (values, weights))
    return jnp.einsum("Pd,Kd->PK", *some, precision="highest")

  rest = depth % CHUNK
  starts = np.arange(rest, depth, CHUNK)
  sums = [product(0, rest)[None]]
  if len(starts) <= UNROLLED:
    sums += [product(start, CHUNK)[None] for start in starts]
  else:
    sums.append(jax.lax.map(lambda start: product(start, CHUNK), jnp.asarray(starts)))
  sums = jnp.concatenate(sums)
  while len(sums) > 1:
    sums = jnp.pad(sums, ((-len(sums) % 8, 0), (0, 0), (0, 0)))
    sums = sums.reshape(-1, 8, *sums.shape[1:]).sum(axis=1)
  return sums[0]
