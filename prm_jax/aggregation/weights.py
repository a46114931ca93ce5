"""w_d(N): the chance that depth d is drawn and nothing above it is, and sums weighted by it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# w_d(N) <= N/M exp(-d N/M): depths beyond REACH M/N together weigh e^-REACH, 4e-8 or 9e-17.
REACH = {np.dtype(np.float32): 17, np.dtype(np.float64): 37}
CHUNK = 512  # depths in one matrix product
MAX_ENTRIES = 2**29  # weights: 2 GiB of float32
KEPT_ENTRIES = 2**22  # weights small enough to be kept for the next call


class DrawWeights(NamedTuple):
  """w_d(N) of each different number of candidates U, in bands of neighbouring N.

  The larger N, the fewer depths from the top matter: all M values of N take some
  17 M log2(M/17) weights in bands, where one table would take M^2.
  """

  bands: tuple[jax.Array, ...]  # [U, K_b, D_b], N ascending, depth descending to 0
  row: jax.Array  # [P] row of each problem in them; [1] for all
  column: jax.Array  # [K] where each N asked for stands


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
  reach = np.minimum(m, REACH[dtype] * m // values + 1).tolist()
  edges = _edges(values, reach)
  depths = [reach[i] for i in edges[:-1]]
  entries = different.size * sum(d * k for d, k in zip(depths, np.diff(edges)))
  if entries > MAX_ENTRIES:
    raise ValueError(
      f"{different.size} sizes x {values.size} values of N x {m} candidates: more than "
      f"{MAX_ENTRIES} weights; give fewer values of n"
    )
  tables = _kept_tables if entries <= KEPT_ENTRIES else _tables
  bands = tables(m, tuple(values.tolist()), tuple(different.tolist()), edges, tuple(depths), dtype)
  return DrawWeights(tuple(map(jnp.asarray, bands)), jnp.asarray(row), jnp.asarray(column))


def _edges(values: np.ndarray, reach: list[int]) -> tuple[int, ...]:
  """Where bands begin in the ascending `values`, and the end: the cheapest cut at half octaves.

  A band of k values with depth D costs (k + 16) D: its products, and its share of handling.
  """
  half_octave = np.floor(2 * np.log2(values))
  cuts = [*np.flatnonzero(np.diff(half_octave, prepend=-1)).tolist(), len(values)]
  best = {0: (0.0, (0,))}  # cost and edges up to each cut
  for j, end in enumerate(cuts[1:], 1):
    best[end] = min((best[i][0] + (end - i + 16) * reach[i], (*best[i][1], end)) for i in cuts[:j])
  return best[len(values)][1]


def _tables(m, values, different, edges, depths, dtype) -> list[np.ndarray]:
  tables = []
  for start, end, depth in zip(edges, edges[1:], depths):
    table = np.zeros((len(different), end - start, depth), dtype)
    for u, size in enumerate(different):
      weights = depth_weights(size, np.array(values[start:end]), min(depth, size))
      table[u, :, depth - weights.shape[1] :] = weights[:, ::-1]
    tables.append(table)
  return tables


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

  def of_row(values, row):
    return jnp.concatenate([_dot(values, band[row]) for band in weights.bands], axis=1)

  if len(weights.bands[0]) == 1:
    result = of_row(values, 0)
  else:  # one problem at a time, so that no more than one problem's weights are copied
    result = jax.lax.map(lambda x: of_row(x[0][None], x[1])[0], (values, weights.row))
  # Rounding may leave a sum a hair outside.  A NaN stays a NaN.
  return jnp.clip(result, 0, 1)[:, weights.column]


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
  sums = product(0, rest)[None]
  if depth >= CHUNK:
    chunks = jax.lax.map(lambda i: product(i, CHUNK), jnp.arange(rest, depth, CHUNK))
    sums = jnp.concatenate([sums, chunks])
  while len(sums) > 1:
    sums = jnp.pad(sums, ((-len(sums) % 8, 0), (0, 0), (0, 0)))
    sums = sums.reshape(-1, 8, *sums.shape[1:]).sum(axis=1)
  return sums[0]
