"""Memory of the TPU attention kernel beside JAX's splash attention, by the TPU compiler.

No TPU is needed and no time is measured.  Programs are compiled at two row lengths for three
generations: attention alone, forward and backward, and a whole train step in which splash attention
takes the kernel's place.  Target: fewer temporaries than the leaner of splash attention's two
backward passes at every size.  Takes 40 minutes; compilations are kept in --work.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import PartitionSpec

from benchmarks import runner, slices
from prm_jax import config as config_lib
from prm_jax.model import attention as attention_lib
from prm_jax.model import sharding as sharding_lib
from prm_jax.model import tree_kernel
from prm_jax.tpu import compilation

CODE = runner.ROOT / "prm_jax"
ATTENTION = ("block_mask.py", "tree_kernel.py", "attention.py")
FORMS = {
  "kernel": "this project",
  "splash_fused": "splash, one backward kernel",
  "splash_split": "splash, two",
  "dense": "dense",
}
SPLASH = ("splash_fused", "splash_split")
HEADS = {64: (32, 8), 128: (16, 8), 256: (8, 4)}  # by head size: heads of queries and of keys
TOKENS = (4096, 8192)
ALONE = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
STEP = ("v5e:4x4", "v5p:2x2x4", "v6e:4x4")
STEP_CHIPS = 16
MODEL = "Llama-3.2-1B"  # of the whole train step
GEMMA = {"window": 1024, "softcap": 50.0}  # as in Gemma 2; splash attention has neither here
NOT_FITTING = ("out of memory on HBM", "memory space hbm")


@dataclasses.dataclass(frozen=True)
class Args(runner.Common):
  work: pathlib.Path = runner.ROOT / "runs/benchmark_kernel"
  """Figures of finished compilations."""


@dataclasses.dataclass(frozen=True)
class Case:
  """A program to compile: attention alone, or with `step` a whole train step."""

  step: bool
  topology: str
  tokens: int
  heads: int
  kv_heads: int
  head_size: int
  form: str = "kernel"  # of FORMS
  window: int = 0
  softcap: float = 0.0


def run(args: Args) -> dict:
  """Compiles every case and compares the forms of each."""
  checkpoint = slices.write_config(args.work / "models", MODEL)
  asked = cases()[: len(FORMS)] if args.quick else cases()
  done, packages = [], runner.versions(*compilation.PACKAGES)
  for case in asked:
    name = f"{'step' if case.step else 'alone'}_{case.topology}_{case.tokens}_{case.head_size}"
    name = f"{name}_{case.form}{'_windowed' if case.window else ''}".replace(":", "_")
    function, *given = (step, case, checkpoint) if case.step else (alone, case)
    files = [CODE / "model" / file for file in ATTENTION]
    files += [CODE / "model", CODE / "training"] if case.step else []
    figures = runner.kept(
      args.work,
      name,
      [dataclasses.asdict(case), packages],
      files,
      functools.partial(runner.apart, function, *given, **slices.COMPILER),
    )
    done.append(figures | {"case": dataclasses.asdict(case)})
  tables = {}
  for whole, title in (
    (False, "Attention alone, forward and backward: MiB a chip, allocated (temp_size)"),
    (True, "A whole train step: MiB a chip, allocated (temp_size)"),
  ):
    if groups := grouped(done, whole):
      tables[title] = [row(forms) for forms in groups]
  installed = ", ".join(" ".join(each) for each in packages.items())
  return {"runs": done, "targets": targets(done), "tables": tables, "notes": f"{installed}."}


def cases() -> list[Case]:
  """Every size of attention alone, then the train steps."""
  out = []
  for topology in ALONE:
    for tokens in TOKENS:
      for head_size, heads in HEADS.items():
        out += [Case(False, topology, tokens, *heads, head_size, form) for form in FORMS]
      for form in ("kernel", "dense"):
        out.append(Case(False, topology, tokens, *heads, head_size, form, **GEMMA))
  for topology in STEP:
    for tokens in TOKENS:
      out += [Case(True, topology, tokens, 32, 8, 64, form) for form in ("kernel", *SPLASH)]
  return out


def alone(case: Case) -> dict:
  """Bytes a chip for gradients of q, k and v, one row a chip; None where they do not fit.

  The compiler chooses the layouts of all of them, as in a model, where products make and use them.
  """
  T, K, G, H = case.tokens, case.kv_heads, case.heads // case.kv_heads, case.head_size
  mesh = sharding_lib.make_mesh(
    config_lib.Mesh(), compilation.Job(config_lib.Experiment(), case.topology).devices()
  )
  rows, free = (
    sharding_lib.batch_sharding(mesh),
    Format(Layout.AUTO, sharding_lib.batch_sharding(mesh)),
  )
  shapes = ((mesh.size, K, G, T, H), (mesh.size, K, T, H), (mesh.size, K, T, H))
  x = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
  end = jax.ShapeDtypeStruct((mesh.size, T), jnp.int32)
  attend, window = ATTEND[case.form], case.window or None
  split = jax.shard_map(
    # any positions will do for memory
    lambda q, k, v, end: attend(q, k, v, end, end if window else None, window, case.softcap),
    mesh=mesh,
    in_specs=PartitionSpec(attention_lib.ROWS),
    out_specs=PartitionSpec(attention_lib.ROWS),
    check_vma=False,
  )
  loss = lambda q, k, v, end: jnp.square(split(q, k, v, end).astype(jnp.float32)).sum()
  gradients = jax.jit(
    jax.grad(loss, (0, 1, 2)), in_shardings=(free, free, free, rows), out_shardings=free
  )
  try:
    _, gib = compilation.memory_of(gradients.lower(*x, end))
  except jax.errors.JaxRuntimeError as error:
    if not any(words in str(error) for words in NOT_FITTING):  # VMEM would be the kernel's fault
      raise
    return {"temporaries": None, "temp_size": None}
  return {name: size * 2**30 for name, size in gib.items()}


def step(case: Case, checkpoint: str) -> dict:
  """Bytes a chip for a train step, one row a chip, with a form in the kernel's place."""
  tree_kernel.attention = ATTEND[case.form]
  c = config_lib.Experiment(
    data=config_lib.Data(row_length=case.tokens),
    init=config_lib.Init(checkpoint=checkpoint),
    model=config_lib.Model(dtype="bfloat16", remat="full", attention="kernel"),
    train=config_lib.Train(batch_rows=STEP_CHIPS),
  )
  gib = compilation.compile_step(compilation.Job(c, case.topology)).gib
  names = ("arguments", "temporaries", "temp_size")
  return {name: gib and gib[name] * 2**30 for name in names}


def splash(q, k, v, subtree_end, positions, window, softcap, *, fused: bool):
  """JAX's splash attention over the trees of a row, each as one sequence.

  Segment ids only tell trees apart, so tokens of other branches are seen: good for memory only.
  """
  assert window is None and not softcap
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

  def of_row(q, k, v, trees):
    segments = splash_attention.SegmentIds(trees, trees)
    return attend(q.reshape(K * G, *q.shape[2:]), k, v, segments).reshape(q.shape)

  return jax.vmap(of_row)(q, k, v, jax.lax.cummax(subtree_end, axis=1))


def dense(q, k, v, subtree_end, positions, window, softcap):
  """This project's dense attention, with axes in the kernel's order."""
  B, K, G, T, H = q.shape
  q = jnp.moveaxis(q, 3, 1).reshape(B, T, K * G, H)
  k, v = jnp.moveaxis(k, 2, 1), jnp.moveaxis(v, 2, 1)
  out = attention_lib.attention(
    q, k, v, subtree_end, positions, window, 1.0, softcap, implementation="dense"
  )
  return jnp.moveaxis(out.reshape(B, T, K, G, H), 1, 3)


ATTEND = {
  "kernel": tree_kernel.attention,
  "splash_fused": functools.partial(splash, fused=True),
  "splash_split": functools.partial(splash, fused=False),
  "dense": dense,
}


def grouped(done: list[dict], whole: bool) -> list[dict[str, dict]]:
  """Figures by form, for each slice and size."""
  out = {}
  for each in done:
    case = each["case"]
    if case["step"] == whole:
      key = tuple(value for name, value in case.items() if name != "form")
      out.setdefault(key, {})[case["form"]] = each
  return list(out.values())


def targets(done: list[dict]) -> list[dict]:
  """The largest ratio of the kernel's temporaries to the leaner splash attention's."""
  size = lambda figures, which: math.inf if figures[which] is None else figures[which]
  rows = []
  for whole, words in ((False, "attention alone"), (True, "whole train step")):
    several = [forms for forms in grouped(done, whole) if "splash_split" in forms]
    for which, how in (("temporaries", "allocated"), ("temp_size", "by temp_size")):
      ratios = [
        size(forms["kernel"], which) / min(size(forms[name], which) for name in SPLASH)
        for forms in several
      ]
      if ratios:
        what = f"temporaries {how} / the leaner splash's, {words}, largest of {len(ratios)}"
        rows.append(runner.target(what, "<", 1, max(ratios)))
  return rows


def row(forms: dict[str, dict]) -> dict:
  """The forms of one size beside each other."""
  case = forms["kernel"]["case"]
  heads = f"{case['heads']}/{case['kv_heads']} of {case['head_size']}"
  if case["window"]:
    heads += f", window {case['window']:,}, soft cap {case['softcap']:.0f}"
  out = {"slice": case["topology"], "tokens of a row": case["tokens"], "heads": heads}
  for name, label in FORMS.items():
    if figures := forms.get(name):
      sizes = (figures["temporaries"], figures["temp_size"])
      fits = None not in sizes
      out[label] = "{:.1f} ({:.1f})".format(*(x / 2**20 for x in sizes)) if fits else "does not fit"
  return out
