"""Measures the memory of the TPU attention kernel beside JAX's splash attention.

The TPU compiler reports the memory, so no TPU is needed and no time is measured.  The benchmark
compiles the gradients of attention alone, at two row lengths for three TPU generations.  Target:
less temporary memory at every size than the leaner of splash attention's two backward passes.
Takes up to 7 minutes; --work stores the compilations.
"""

import dataclasses
import functools
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import PartitionSpec

from benchmarks import runner
from prm_jax import config as config_lib
from prm_jax.model import attention as attention_lib
from prm_jax.model import sharding as sharding_lib
from prm_jax.model import tree_kernel
from prm_jax.model.block_mask import TreeMask
from prm_jax.runtime import distributed
from prm_jax.tpu import compilation

FILES = [runner.ROOT / "prm_jax/model" / name for name in ("block_mask.py", "tree_kernel.py")]
FILES += [runner.ROOT / "prm_jax/tpu/compilation.py", runner.ROOT / "benchmarks/kernel.py"]
COMPILER = {  # environment of a compilation
  "JAX_PLATFORMS": "cpu",
  "JAX_ENABLE_COMPILATION_CACHE": "false",  # a cached program has no memory report
  "XLA_FLAGS": "",
  "LIBTPU_INIT_ARGS": "",
}
FORMS = ("this project", "splash, one backward kernel", "splash, two")
HEADS = ((32, 8, 64), (16, 8, 128), (8, 4, 256))  # query heads, key heads, head size
TOKENS = (4096, 8192)
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  work: pathlib.Path = runner.ROOT / "runs/benchmark_kernel"  # figures of finished compilations


def run(args: Args) -> dict:
  """Compiles every form of each case."""
  runs, rows = [], []
  packages = distributed.versions()
  cases = list(itertools.product(TOPOLOGIES, TOKENS, HEADS))
  for topology, tokens, heads in cases[:1] if args.quick else cases:
    size = "{}/{} of {}".format(*heads)
    row = {"slice": topology, "tokens of a row": tokens, "heads": size}
    for form in FORMS:
      name = re.sub(r"\W+", "_", f"{topology} {tokens} {size} {form}")
      call = functools.partial(runner.apart, memory, topology, tokens, heads, form, **COMPILER)
      runs.append(runner.kept(args.work, name, [name, packages], FILES, call))
      row[form] = runs[-1]["temporaries"] / 2**20
    rows.append(row)
  largest = max(row[FORMS[0]] / min(row[form] for form in FORMS[1:]) for row in rows)
  name = f"temporaries / the leaner splash's, largest of {len(rows)}"
  return {
    "runs": runs,
    "targets": [runner.target(name, "<", 1, largest)],
    "tables": {"Attention, forward and backward: MiB a chip beside the arguments": rows},
    "notes": f"{runner.listed(packages)}.",
  }


def memory(topology: str, T: int, heads: tuple[int, int, int], form: str = FORMS[0]) -> dict:
  """Returns bytes per chip, arguments and temporaries, of the gradients of q, k, v; a row per chip.

  The compiler chooses all layouts, as in a model, where products make and use these arrays.
  """
  (queries, K, H), devices = heads, compilation.Job(config_lib.Experiment(), topology).devices()
  G = queries // K
  mesh = sharding_lib.make_mesh(config_lib.Mesh(), devices)
  rows = sharding_lib.batch_sharding(mesh)
  free = Format(Layout.AUTO, rows)
  shapes = ((mesh.size, K, G, T, H), (mesh.size, K, T, H), (mesh.size, K, T, H))
  x = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
  end = jax.ShapeDtypeStruct((mesh.size, T), jnp.int32)
  attend = functools.partial(splash, fused=form == FORMS[1])
  if form == FORMS[0]:
    attend = lambda q, k, v, end: tree_kernel.attention(q, k, v, TreeMask(end), 0.0)
  spec = PartitionSpec(attention_lib.ROWS)
  split = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
  loss = lambda q, k, v, end: jnp.square(split(q, k, v, end).astype(jnp.float32)).sum()
  gradients = jax.jit(
    jax.grad(loss, (0, 1, 2)), in_shardings=(free, free, free, rows), out_shardings=free
  )
  _, gib = compilation.memory_of(gradients.lower(*x, end))
  return {name: size * 2**30 for name, size in gib.items()}


def splash(q, k, v, subtree_end, *, fused: bool):
  """Returns JAX's splash attention over the trees of a row, each as one sequence.

  Segment ids separate trees but not branches, so the values are wrong and only the memory counts.
  """
  _, K, G, T, _ = q.shape
  block = min(tree_kernel.BLOCK, T)
  sizes = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv"), block)
  if not fused:
    sizes |= {"block_q_dq": block, "block_kv_dq": block}
  attend = splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask([splash_attention.CausalMask((T, T))] * (K * G)),
    block_sizes=splash_attention.BlockSizes(**sizes, use_fused_bwd_kernel=fused),
    head_shards=1,
    q_seq_shards=1,
  )

  def attend_row(q, k, v, trees):
    segments = splash_attention.SegmentIds(trees, trees)
    return attend(q.reshape(K * G, *q.shape[2:]), k, v, segments).reshape(q.shape)

  return jax.vmap(attend_row)(q, k, v, jax.lax.cummax(subtree_end, axis=1))
