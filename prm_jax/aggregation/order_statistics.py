"""Expectations over the best of N, from the chance that depth d is the best drawn.

A problem's M candidates are sorted best first, so depth 0 is the best.  In a uniform draw of N
without replacement, the best candidate drawn is at depth d with probability

  w_d(N) = C(M-1-d, N-1) / C(M, N)          (negative hypergeometric distribution).

For all M values of N these would be M^2 weights.  Two properties avoid that:

  * w_d(N) <= N/M exp(-d N/M), so N needs only the top REACH M/N depths.  A band covers the values
    of N in an octave, or in several octaves with few values, down to the depth that its smallest N
    needs.  The first octave has all N that need more than half of the depths.
  * w_d(N) is a polynomial in N while d + N < M.  An octave full of values, up to N = M/2, is
    evaluated at a few Chebyshev nodes and interpolated.

All N together take about 75 M weights, 150 M in float64.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

# Depths beyond REACH M/N together weigh e^-REACH: 4e-8 in float32, 9e-17 in float64.
REACH = {np.dtype(np.float32): 17, np.dtype(np.float64): 37}
NODES = {np.dtype(np.float32): 10, np.dtype(np.float64): 22}  # interpolate to the dtype's precision
FEW = 8  # octaves share a band while they have at most this many values together
CHUNK = 128  # depths in one matrix product
MAX_ENTRIES = 2**29  # weights: 2 GiB of float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DrawWeights:
  """The weights w_d(N) of U different numbers of candidates, in bands of ascending N."""

  bands: tuple[np.ndarray, ...]  # [U, J, D] for J values or nodes, depth 0 last
  interpolation: tuple[np.ndarray | None, ...]  # [J, K] from nodes to values; None: no nodes
  row: np.ndarray  # [P] the index of each problem in U; [1] where U is 1
  column: np.ndarray | None  # [K] the column of each requested N; None: in order


def draw_weights(m: int, n: np.ndarray, sizes) -> DrawWeights:
  """Returns the weights of each N in `n` `[K]`, for problems of `m` or `sizes` `[P]` candidates."""
  different, row = np.array([m]), np.zeros(1, int)
  if sizes is not None:
    different, row = np.unique(sizes, return_inverse=True)
  values, column = np.unique(n, return_inverse=True)
  dtype = jax.dtypes.canonicalize_dtype(np.float64)
  octave = np.floor(np.log2(np.maximum(values / REACH[dtype], 1)))
  bands: list[np.ndarray] = []
  for members in np.split(values, np.flatnonzero(np.diff(octave)) + 1):
    if bands and len(bands[-1]) + len(members) <= FEW:
      bands[-1] = np.concatenate([bands[-1], members])
    else:
      bands.append(members)
  nodes, interpolation = [], []
  for band in bands:
    full = len(band) > 2 * NODES[dtype]
    interpolate = full and band[-1] < 2 * band[0] and 2 * band[-1] <= different[0]
    at, matrix = _chebyshev(band, NODES[dtype]) if interpolate else (band, None)
    nodes.append(at)
    interpolation.append(None if matrix is None else matrix.astype(dtype))
  depths = [min(m, int(REACH[dtype] * m // at[0]) + 1) for at in nodes]
  entries = len(different) * sum(len(at) * depth for at, depth in zip(nodes, depths))
  if entries > MAX_ENTRIES:
    raise ValueError(
      f"{len(different)} sizes x {values.size} values of N x {m} candidates: more than "
      f"{MAX_ENTRIES} weights; give fewer values of n"
    )
  tables = (depth_weights(different, at, depth) for at, depth in zip(nodes, depths))
  weights = tuple(table[..., ::-1].astype(dtype) for table in tables)
  column = None if np.array_equal(values, n) else column
  return DrawWeights(weights, tuple(interpolation), row, column)


def _chebyshev(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns Chebyshev nodes `[J]` on the range of `values` `[K]`, and their interpolation matrix.

  The matrix is `[J, K]`, by the barycentric formula: with gap = value - node_j, node j has a weight
  proportional to (-1)^j sin(angle_j) / gap.
  """
  angle = np.pi * (np.arange(count)[::-1] + 0.5) / count
  nodes = (values[0] + values[-1]) / 2 + (values[-1] - values[0]) / 2 * np.cos(angle)
  gap = values - nodes[:, None]
  gap[gap == 0] = 1e-12
  share = ((-1.0) ** np.arange(count) * np.sin(angle))[:, None] / gap
  return nodes, share / share.sum(axis=0)


def depth_weights(sizes: np.ndarray, n: np.ndarray, depths: int) -> np.ndarray:
  """Returns w_d(N), float64 `[U, K, depths]`, by w_0 = N/M and w_{d+1} = w_d (M-d-N) / (M-1-d).

  An N above the size M draws all M.  Depths beyond M, and all depths of N = 0, have weight 0.
  The recurrence is exact to 1e-13 in float64.  Differences of float32 log-gammas would be off by
  1e-3 at M = 1860, and meaningless at 1e6.
  """
  m, d = sizes[:, None, None], np.arange(depths - 1)
  drawn = np.minimum(n[:, None], m).astype(np.float64)
  weights = np.empty((sizes.size, n.size, depths))
  weights[..., :1] = drawn / np.maximum(m, 1)
  factors = weights[..., 1:]
  np.subtract(m - d, drawn, out=factors)
  np.maximum(factors, 0, out=factors)
  factors /= np.maximum(m - 1 - d, 1)
  return np.cumprod(weights, axis=-1, out=weights)


@jax.jit
def expectation(values, weights: DrawWeights) -> jax.Array:
  """Returns sum_d values_d w_d(N), `[P, K]`, for values `[P, M]` in 0..1, depth 0 last."""

  def at_nodes(values, row):
    return [_dot(values, jnp.asarray(band)[row]) for band in weights.bands]

  if len(weights.bands[0]) == 1:
    sums = at_nodes(values, 0)
  else:  # one problem at a time, so that the weights are copied for only one
    one = lambda x: [each[0] for each in at_nodes(x[0][None], x[1])]
    sums = jax.lax.map(one, (values, weights.row))
  parts = [
    x if matrix is None else jnp.einsum("PJ,JK->PK", x, matrix, precision="highest")
    for x, matrix in zip(sums, weights.interpolation)
  ]
  # Rounding may leave a sum just outside of 0..1.  A NaN stays a NaN.
  result = jnp.clip(jnp.concatenate(parts, axis=1), 0, 1)
  return result if weights.column is None else result[:, weights.column]


def _dot(values, weights):
  """Multiplies `[P, M]` by `[K, D]`, D <= M, to `[P, K]`: adds products of CHUNK depths as a tree.

  A float32 matrix product may add M terms in a row, which errs by 1e-2 at M = 1e6 and by 1.4e-6
  at 1860.  In chunks, with the deepest and least likely depths first, the error is 3e-7.
  """
  depth = weights.shape[1]
  values = values[:, values.shape[1] - depth :].astype(weights.dtype)

  def product(start, length):
    chunk = (jax.lax.dynamic_slice_in_dim(x, start, length, axis=1) for x in (values, weights))
    return jnp.einsum("Pd,Kd->PK", *chunk, precision="highest")

  rest = depth % CHUNK
  starts = np.arange(rest, depth, CHUNK)
  sums = product(0, rest)[None]
  if len(starts):
    chunks = jax.lax.map(lambda start: product(start, CHUNK), jnp.asarray(starts))
    sums = jnp.concatenate([sums, chunks])
  while len(sums) > 1:
    sums = jnp.pad(sums, ((-len(sums) % 8, 0), (0, 0), (0, 0)))
    sums = sums.reshape(-1, 8, *sums.shape[1:]).sum(axis=1)
  return sums[0]
