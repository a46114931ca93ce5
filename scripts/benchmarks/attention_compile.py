"""Memory of attention on a TPU, as its compiler lays it out, in a process of its own.

  python attention_compile.py SETTINGS.json

Either attention alone, forward and backward, or a whole train step around it.  In a step, the
project's kernel is replaced by a peer's at the one place where it is called.  Figures are bytes a
chip, or null where the program does not fit on it.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
import time

# libtpu asks for a machine's metadata and for its chips, unless told that there are none
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import PartitionSpec

from prm_jax import config as config_lib
from prm_jax.model import attention as attention_lib
from prm_jax.model import mesh_axes, tree_kernel
from prm_jax.model import sharding as sharding_lib
from prm_jax.model.block_mask import TreeMask
from prm_jax.runtime import json_lines
from prm_jax.tpu import compile

SIZES = ("arguments", "temporaries", "temp_size")  # of ahead_of_time.measured


def main() -> None:
  settings = json.loads(pathlib.Path(sys.argv[1]).read_text())
  start, cpu = time.perf_counter(), time.process_time()
  try:
    figures = {"alone": alone, "step": step}[settings["what"]](settings)
  except jax.errors.JaxRuntimeError as error:
    full = any(words in str(error) for words in ("out of memory on HBM", "memory space hbm"))
    if not full:  # what does not fit in VMEM is a mistake of a kernel
      raise
    figures = dict.fromkeys(SIZES)
  figures |= {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
  with json_lines.written(settings["output"]) as file:
    file.write(json.dumps(figures) + "\n")


def alone(settings: dict) -> dict:
  """Gradients of q, k and v, one row a chip; they count as temporaries.

  All are laid out as the compiler likes, which in a model has a choice, too: they come from
  products and go to them.
  """
  sizes = settings["sizes"]
  T, N, K, H = sizes["tokens"], sizes["heads"], sizes["kv_heads"], sizes["head_size"]
  devices = topologies.get_topology_desc(platform="tpu", topology_name=settings["topology"]).devices
  mesh = sharding_lib.make_mesh(config_lib.Mesh(), devices)
  B, rows = len(devices), sharding_lib.batch_sharding(mesh)
  shapes = ((B, K, N // K, T, H), (B, K, T, H), (B, K, T, H))
  free = Format(Layout.AUTO, rows)
  x = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
  end = jax.ShapeDtypeStruct((B, T), jnp.int32)
  attend = FORMS[settings["form"]]
  window, softcap = sizes.get("window"), sizes.get("softcap", 0.0)
  split = jax.shard_map(
    # for memory, any positions will do
    lambda q, k, v, end: attend(q, k, v, TreeMask(end, end, window), softcap),
    mesh=mesh,
    in_specs=PartitionSpec(mesh_axes.ROWS),
    out_specs=PartitionSpec(mesh_axes.ROWS),
    check_vma=False,
  )

  def loss(q, k, v, end):
    return jnp.square(split(q, k, v, end).astype(jnp.float32)).sum()

  shardings = {"in_shardings": (free, free, free, rows), "out_shardings": free}
  gradients = jax.jit(jax.grad(loss, (0, 1, 2)), **shardings)
  _, gib = compile.measured(gradients.lower(*x, end))
  return {name: size * 2**30 for name, size in gib.items()}


def step(settings: dict) -> dict:
  """A train step of a model, one row a chip."""
  tree_kernel.attention = FORMS[settings["form"]]
  c = config_lib.Experiment(
    data=config_lib.Data(row_length=settings["sizes"]["tokens"]),
    init=config_lib.Init(checkpoint=settings["checkpoint"]),
    model=config_lib.Model(dtype="bfloat16", remat="full", attention="kernel"),
    train=config_lib.Train(batch_rows=settings["chips"]),
  )
  found = compile.compile_step(c, settings["topology"])
  if not found["fits"]:
    return dict.fromkeys(SIZES)
  return {name: found["gib_per_chip"][name] * 2**30 for name in SIZES} | {
    "parameters": found["parameters"],
    "chips": found["chips"],
  }


def splash(q, k, v, mask, softcap, *, fused: bool):
  """JAX's splash attention over the trees of a row, each as one sequence.

  Which tokens of its own tree one sees, it cannot be told: segments only tell trees apart.
  """
  assert mask.window is None and not softcap
  _, K, G, T, _ = q.shape
  block = min(tree_kernel.BLOCK, T)
  forward = {"block_q": block, "block_kv": block}
  backward = {"block_q_dkv": block, "block_kv_dkv": block}
  if not fused:
    backward |= {"block_q_dq": block, "block_kv_dq": block}
  attend = splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask([splash_attention.CausalMask((T, T))] * (K * G)),
    block_sizes=splash_attention.BlockSizes(**forward, **backward, use_fused_bwd_kernel=fused),
    head_shards=1,
    q_seq_shards=1,
  )
  segments = jax.lax.cummax(mask.subtree_end, axis=1)

  def of_row(q, k, v, segments):
    out = attend(
      q.reshape(K * G, *q.shape[2:]), k, v, splash_attention.SegmentIds(segments, segments)
    )
    return out.reshape(q.shape)

  return jax.vmap(of_row)(q, k, v, segments)


def dense(q, k, v, mask, softcap):
  """This project's own, in its own order of axes."""
  B, K, G, T, H = q.shape
  q = jnp.moveaxis(q, 3, 1).reshape(B, T, K * G, H)
  k, v = jnp.moveaxis(k, 2, 1), jnp.moveaxis(v, 2, 1)
  out = attention_lib.attention(q, k, v, mask, scale=1.0, softcap=softcap, implementation="dense")
  return jnp.moveaxis(out.reshape(B, T, K, G, H), 1, 3)


FORMS = {
  "kernel": tree_kernel.attention,
  "splash_fused": functools.partial(splash, fused=True),
  "splash_split": functools.partial(splash, fused=False),
  "dense": dense,
}

if __name__ == "__main__":
  main()
