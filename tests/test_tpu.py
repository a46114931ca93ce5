"""prm_jax/tpu: steps compiled for slices, HLO text, and costs against counts by hand."""

import dataclasses
import functools
import json
import os
import re
import runpy

import jax
import jax.numpy as jnp
import pytest
import tiny
from conftest import ROOT, needs_libtpu, run_script, start_script
from jax.sharding import PartitionSpec

from prm_jax import config as config_lib
from prm_jax.model import sharding as sharding_lib
from prm_jax.pretrained import export, families
from prm_jax.runtime import command_line, compiler_options
from prm_jax.tpu import compilation, cost_model, hlo
from prm_jax.training import step

PRICE = "--price_per_chip_hour=1.5"
CONFIG = ("--config=configs/arithmetic.py", "--config.model.layers=1")
TEXT = """HloModule jit_step, is_scheduled=true

%fused_gather (p: bf16[8,64]) -> bf16[64,64] {
  %p = bf16[8,64]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.1 = bf16[64,64]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, \
replica_groups=mesh['axis_0'=8,'axis_1'=2] {'axis_0'}, dimensions={0}
}

%fused_gather.2 (p.2: bf16[8,64]) -> bf16[64,64] {
  %p.2 = bf16[8,64]{1,0:T(8,128)(2,1)} parameter(0)
  %product = bf16[64,64]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
  ROOT %all-gather.2 = bf16[64,64]{1,0:T(8,128)(2,1)} all-gather(%p.2), channel_id=7, \
replica_groups=mesh['axis_0'=8,'axis_1'=2] {'axis_0'}, dimensions={0}
}

%body (arg: (s32[], f32[16])) -> (s32[], f32[16]) {
  %arg = (s32[]{:T(128)}, f32[16]{0:T(128)}) parameter(0)
  %fusion.1 = bf16[64,64]{1,0} fusion(%arg), kind=kCustom, calls=%fused_gather, \
backend_config={"window_config":{"estimated_cycles":"100"}}
  %fusion.2 = bf16[64,64]{1,0} fusion(%arg), kind=kCustom, calls=%fused_gather.2, \
backend_config={"window_config":{"estimated_cycles":"20"}}
  %kernel = f32[16]{0} custom-call(%arg), custom_call_target="tpu_custom_call"
  %all-reduce.3 = (f32[16]{0:T(128)}, /*index=1*/f32[16,2]{0,1}) all-reduce(%a, %b), \
channel_id=8, replica_groups=[4,4]<=[16], to_apply=%add
  ROOT %tuple = (s32[], f32[16]) tuple(%arg)
}

%condition (arg.2: (s32[], f32[16])) -> pred[] {
  %arg.2 = (s32[]{:T(128)}, f32[16]{0:T(128)}) parameter(0)
  %constant.9 = s32[]{:T(128)} constant(28)
  ROOT %lt = pred[] compare(%i, %constant.9), direction=LT
}

ENTRY %main (x: f32[16]) -> f32[16] {
  %x = f32[16]{0} parameter(0)
  %copy.5 = f32[16]{0} copy(%x), backend_config={"estimated_cycles":"3"}
  %while.1 = (s32[], f32[16]) while(%t), condition=%condition, body=%body
  %reduce-scatter.4 = f32[2]{0} reduce-scatter(%x), replica_groups={{0,1,2,3,4,5,6,7}}
  ROOT %out = f32[16]{0} get-tuple-element(%while.1), index=1
}
"""
SCATTER = "  %reduce-scatter.4 = f32[2]{0} reduce-scatter("
GROUP = "replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"
MESH = {"data": 1, "fsdp": 4, "tensor": 2}
CHIP = cost_model.Chip(memory=1.0, flops=1e12, clock=1e9, links=1e9, network=1e8)


def test_a_loop_multiplies_its_instructions():
  """Cycles, kernels and collectives of a loop count once for each trip, if the count is known."""
  found = hlo.read(TEXT)
  assert found.loops == {"while.1": 28} and found.unknown_loops == 0
  assert found.cycles == 3 + 28 * (100 + 20)
  assert found.without_cycles == {"tpu_custom_call": 28}
  assert found.in_loop("while.1") == {"all-gather": 1, "all-reduce": 1}  # two pieces of one gather
  annotated = 'body=%body, backend_config={"known_trip_count":{"n":"5"}}'
  assert hlo.read(TEXT.replace("body=%body", annotated)).loops == {"while.1": 5}
  found = hlo.read(TEXT.replace("constant(28)", "parameter(1)"))
  assert (found.loops, found.unknown_loops, found.cycles) == ({"while.1": 1}, 1, 123)


def test_collectives_are_counted_in_received_bytes():
  """Traffic is that of the ring algorithm: a reduction moves twice the bytes of a gather."""
  gather, reduction, scatter = hlo.read(TEXT).collectives
  assert (gather.dtype, gather.bytes, gather.chips, gather.overlapped) == ("bf16", 8192, 8, True)
  assert gather.traffic == 28 * 8192 * 7 / 8
  assert (reduction.dtype, reduction.bytes, reduction.chips) == ("f32", 4 * (16 + 32), 4)
  assert reduction.traffic == 28 * 2 * 192 * 3 / 4 and not reduction.overlapped
  assert (scatter.bytes, scatter.chips, scatter.loop) == (4 * 2 * 8, 8, None)
  (wide,) = hlo.read(TEXT.replace("f32[2]", "s64[2]")).collectives[2:]
  assert (wide.dtype, wide.bytes) == ("s64", 2 * scatter.bytes)
  assert scatter.traffic == 64 * 7 / 8


def test_fused_collectives_without_arithmetic_are_not_overlapped():
  """A fused all-reduce-scatter counts as a reduce-scatter, also where channels repeat."""
  alone = TEXT.replace(
    "  %product = bf16[64,64]{1,0} convolution(%a, %b), dim_labels=bf_io->bf\n", ""
  )
  assert not hlo.read(alone).collectives[0].overlapped
  fused = "%all-reduce-scatter.1 (p.3: f32[16]) -> f32[2] {\n"
  fused += (
    f"  %all-reduce.9 = f32[16]{{0}} all-reduce(%p.3), channel_id=9, {GROUP}\n}}\n\n%body (arg:"
  )
  called = "  %fusion.3 = f32[2]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1\n"
  explicit = SCATTER.replace("4", "5") + f"%x), channel_id=1, {GROUP}\n"
  explicit += explicit.replace("scatter.5", "scatter.6")
  text = TEXT.replace("%body (arg:", fused).replace(SCATTER, called + explicit + SCATTER)
  scatters = [x for x in hlo.read(text).collectives if x.kind == "reduce-scatter"]
  assert [(x.bytes, x.traffic, x.overlapped) for x in scatters] == [(64, 56, False)] * 4


def test_asynchronous_collectives_and_transfers_between_slices():
  """An all-reduce-start counts once as overlapped; host transfers count as between slices."""
  for shape in ("f32[16]{0}", "(f32[16]{0}, f32[16]{0})"):
    text = TEXT.replace(SCATTER, f"  %start = {shape} all-reduce-start(%x), {GROUP}\n{SCATTER}")
    (start,) = [x for x in hlo.read(text).collectives if x.overlapped and not x.loop]
    assert (start.bytes, start.traffic) == (64, 2 * 64 * 7 / 8)
  several = f"  %start = (f32[16]{{0}}, f32[4]{{0}}) all-reduce-start(%x, %y), {GROUP}\n{SCATTER}"
  (start,) = [x for x in hlo.read(TEXT.replace(SCATTER, several)).collectives if x.overlapped][1:]
  assert start.bytes == 64 + 16  # the type has results only
  start = f"  %start = ((f32[16]{{0}}), f32[2]{{0}}) reduce-scatter-start(%x), {GROUP}\n{SCATTER}"
  (start,) = [x for x in hlo.read(TEXT.replace(SCATTER, start)).collectives if x.overlapped][1:]
  assert (start.bytes, start.traffic) == (64, 64 * 7 / 8)  # as the one that is not asynchronous
  shape = "(bf16[8,4]{1,0:T(8,128)(2,1)}, u32[], token[])"
  received = f"  %recv = {shape} recv(%after-all), channel_id=1, is_host_transfer=true\n"
  found = hlo.read(TEXT.replace(SCATTER, received + SCATTER)).collectives
  (between,) = [each for each in found if each.kind == hlo.BETWEEN_SLICES]
  assert (between.dtype, between.traffic, between.overlapped) == ("bf16", 64, False)


def test_a_compiled_program_is_read():
  """The compiled program of a scan with five sums over eight devices has five all-reduces."""
  mesh = sharding_lib.make_mesh(config_lib.Mesh())

  def body(total, _):
    return jax.lax.psum(jnp.tanh(total), "fsdp"), None

  def scan(x):
    return jax.lax.scan(body, x, length=5)[0]

  specs = {"in_specs": PartitionSpec("fsdp"), "out_specs": PartitionSpec()}
  split = jax.shard_map(scan, mesh=mesh, **specs, check_vma=False)
  text = jax.jit(split).lower(jnp.ones((8, 16))).compile().as_text()
  (found,) = hlo.read(text).collectives
  assert (found.kind, found.times, found.bytes, found.chips) == ("all-reduce", 5, 4 * 16, 8)


def test_text_without_a_program_is_an_error():
  with pytest.raises(ValueError, match="no ENTRY computation"):
    hlo.read("HloModule jit_step")


@pytest.fixture
def tokenizer(arithmetic_data):
  """Returns the path of a trained tokenizer."""
  return str(arithmetic_data / "tokenizer.model")


def compile_for_tpu(tokenizer, output, *options, refused=False):
  """Returns the finished run of compile_for_tpu.py on a small config.

  The script sets variables that JAX reads on import, so a run that compiles is a new process.
  """
  flags = (*CONFIG, f"--config.data.tokenizer={tokenizer}", f"--output={output}", *options)
  if refused:
    return run_script("compile_for_tpu.py", *flags, code=1)
  return start_script("compile_for_tpu.py", *flags)


@needs_libtpu
def test_a_step_compiles_for_a_slice_without_one(tokenizer, tmp_path):
  """A report has the memory of a chip's shards, the collectives, the time and the cost of a run."""
  path = tmp_path / "compile.json"
  rows = "--config.train.batch_rows=8"
  done = compile_for_tpu(tokenizer, path, "--topology=v5e:2x2", rows, PRICE)
  found = json.loads(path.read_text())
  assert found["chips"] == 4 and found["fits"]
  # parameters and two moments, float32, most of them split four ways
  gib = found["gib_per_chip"]
  assert 12 * found["parameters"] / 4 < gib["arguments"] * 2**30 < 12 * found["parameters"]
  assert gib["needed"] == gib["arguments"] + gib["temporaries"] and gib["temporaries"] > 0
  assert found["headroom"] == 1 - gib["needed"] / 15.75
  assert found["involuntary_rematerialisations"] == 0
  limit = {"xla_tpu_scoped_vmem_limit_kib": "20480"}
  assert found["compiler_options"] == compiler_options.COMMON | limit
  assert found["estimate"]["parts"]["compiled_code"] > 0
  kinds = {row["kind"] for row in found["collectives"]["by_kind"]}
  assert "all-gather" in kinds and kinds & {"all-reduce", "reduce-scatter"}
  seconds = found["estimate"]["seconds_per_step"]
  assert found["run"]["chip_hours"] == pytest.approx(4 * 5000 * seconds / 3600)
  assert found["run"]["dollars"] == pytest.approx(1.5 * found["run"]["chip_hours"])
  for key in ("hours", "chip_hours", "dollars"):
    assert found["run"][f"{key}_low"] <= found["run"][key] <= found["run"][f"{key}_high"]
  assert re.search(
    r"5000 steps of 8 rows = 40,000 rows .*: [\d.]+ minutes \([\d.]+ to .* chip-hours .* dollars",
    done.stdout,
  )
  assert "% (attention's operations counted, its time and that of collectives not)" in done.stdout


@needs_libtpu
def test_the_samplers_step_compiles_for_a_slice(tokenizer, tmp_path):
  """The key-value cache is sharded: slots over the axis data, heads over the axis tensor."""
  path = tmp_path / "decode.json"
  ring = 2**17  # so that nearly all arguments are the cache
  options = ("--topology=v5e:2x2", "--decode_batch=16", f"--decode_ring={ring}")
  mesh = ("--config.mesh.fsdp=1", "--config.mesh.data=2", "--config.mesh.tensor=2")
  done = compile_for_tpu(tokenizer, path, *options, *mesh)
  found = json.loads(path.read_text())
  assert found["fits"] and found["estimate"]["tokens_per_second"] > 0
  c = command_line.read(str(ROOT / "configs/arithmetic.py")).model
  position = 2 * 16 * c.kv_heads * max(c.head_size, 1) * 4  # bytes: keys and values, one layer
  arguments = found["gib_per_chip"]["arguments"] * 2**30
  assert arguments == pytest.approx(position * ring / 4, rel=0.05)
  assert "ms a step" in done.stdout


@pytest.mark.slow
def test_a_sweep_lists_the_fastest_first(tokenizer, tmp_path):
  """A sweep doubles the rows while they fit; its list begins with the most tokens per second."""
  path = tmp_path / "sweep.json"
  options = ("--topology=v5e:2x2", "--config.train.batch_rows=8", "--sweep", "--compiles=2")
  compile_for_tpu(tokenizer, path, *options)
  reports = json.loads(path.read_text())
  assert sorted(report["rows"] for report in reports) == [8, 16]
  speeds = [report["estimate"]["tokens_per_second"] for report in reports]
  assert speeds == sorted(speeds, reverse=True)


@pytest.mark.parametrize(
  ("topology", "message"),
  [
    ("v5e:4x5", "v5e has slices of .*2x2"),
    ("v6e:16x8", "v6e has slices of .*2x2"),
    *((f"v5p:{shape}", "v5p has slices of .*2x2") for shape in ("8x4x4", "4x4x6", "4x4")),
    ("v9:2x2", r"expected v5e or v6e and one of 1x1.* v5e-64 is v5e:8x8 \(64 chips\)"),
  ],
)
def test_slices_that_cloud_tpu_does_not_offer_are_refused(topology, message):
  """The error names the wrong shape, lists those there are, and translates Cloud TPU's names."""
  with pytest.raises(ValueError, match=f"{topology}: {message}"):
    compilation.Job(config_lib.Experiment(), topology).shape()


def test_a_config_with_a_shape_needs_no_checkpoint(tmp_path):
  """A config's model shape needs no checkpoint, but must agree with one that exists."""
  c = command_line.read(str(ROOT / "configs/prm800k_qwen2.5_math_1.5b.py"))
  assert compilation.resolved(c) == (c, 151_936)
  bare = dataclasses.replace(c, model=config_lib.Model())
  with pytest.raises(FileNotFoundError, match=r"config\.json, or set the model's shape"):
    compilation.resolved(bare)
  hub = families.write(c.model, c.model.vocab_size, "qwen2") | {"max_position_embeddings": 4096}
  existing = dataclasses.replace(c, init=config_lib.Init(checkpoint=str(tmp_path)))
  export.write_json(tmp_path / "config.json", hub)
  found, rows = compilation.resolved(existing)
  assert rows == 151_936 and found.model.width == 1536 and found.model.context_length == 4096
  for key, name in (("intermediate_size", "mlp_width"), ("vocab_size", "vocab_size")):
    export.write_json(tmp_path / "config.json", hub | {key: 27})
    with pytest.raises(ValueError, match=rf"model\.{name}=.*but .* has 27"):
      compilation.resolved(existing)


@needs_libtpu
def test_compiler_options_are_those_of_the_generation_and_the_config():
  """The config changes or removes a TPU generation's options; other devices have none."""
  given = ("xla_tpu_scoped_vmem_limit_kib=20000", "xla_enable_async_all_reduce=")
  common = compiler_options.COMMON
  expected = {k: v for k, v in common.items() if k != "xla_enable_async_all_reduce"}
  expected |= {"xla_tpu_scoped_vmem_limit_kib": "20000"}
  for slice_, limits in (("v5e:2x2", (20480, 20480, 20480)), ("v6e:2x2", (32768, 45056, 32768))):
    device = compilation.Job(config_lib.Experiment(), slice_).devices()[0]
    for program, limit in zip(("train", "score", "sample"), limits):
      assert compiler_options.of(config_lib.Tpu(given), device, program) == expected
      own = compiler_options.of(config_lib.Tpu(), device, program)
      assert own == common | {"xla_tpu_scoped_vmem_limit_kib": str(limit)}
  assert compiler_options.of(config_lib.Tpu(given), jax.devices()[0], "train") is None
  with pytest.raises(ValueError, match=r"compiler_options=.*regex"):
    config_lib.Tpu(("--xla_flag=1",))


@needs_libtpu
def test_an_unknown_compiler_option_is_named(tokenizer, tmp_path):
  """The error names an option that the compiler does not know; no file is written."""
  options = ("--config.train.batch_rows=8", "--config.tpu.compiler_options", "xla_tpu_no_such=1")
  path = tmp_path / "compile.json"
  done = compile_for_tpu(tokenizer, path, "--topology=v5e:2x2", *options, refused=True)
  assert "No such compile option: 'xla_tpu_no_such'" in done.stderr
  assert not path.exists()


@pytest.mark.parametrize(
  "flags",
  [
    ("--decode_batch=-1",),
    ("--decode_batch=8", "--decode_ring=0"),
    ("--decode_batch=8", "--sweep"),
    ("--decode_context=8",),
    ("--decode_ring=8",),
    ("--compiles=2",),
    ("--step=score", "--price_per_chip_hour=4"),
  ],
)
def test_flags_of_steps_and_sweeps_are_checked(tokenizer, tmp_path, flags):
  """Sizes out of range, and flags that a step does not use, are errors in one line."""
  output = tmp_path / "decode.json"
  done = compile_for_tpu(tokenizer, output, "--topology=v5e:2x2", *flags, refused=True)
  assert "Traceback" not in done.stderr
  assert flags[-1].partition("=")[0] in done.stderr and not output.exists()


def abort_at_more_rows(job):
  """Stands for a compiler that aborts its process at more than 16 rows."""
  if job.config.train.batch_rows > 16:
    os.abort()
  return {"rows": 16, "saved": [], "fits": True, "gib_per_chip": {"needed": 1.0}}


def test_a_sweep_outlives_an_abort_of_the_compiler(tokenizer, monkeypatch, capfd):
  """A sweep keeps the reports of other variants if the compiler aborts its process at one."""
  sweep = runpy.run_path(str(ROOT / "scripts" / "compile_for_tpu.py"))["sweep"]
  monkeypatch.setattr(compilation, "compiled_report", abort_at_more_rows)
  c = config_lib.Experiment(data=config_lib.Data(tokenizer=tokenizer))
  job = compilation.Job(c, "v5e:2x2")
  assert [report["rows"] for report in sweep(job, compiles=2)] == [16]
  assert "variant 2 is left out: the compiler aborted" in capfd.readouterr().err


def test_a_sweep_saves_what_norms_read():
  """A sweep saves projections if norms read them, and otherwise the arrays that follow."""
  saved = runpy.run_path(str(ROOT / "scripts" / "compile_for_tpu.py"))["saved_activations"]
  most = lambda **norms: saved(dataclasses.replace(tiny.MODEL, **norms))[0]
  assert most() == ("attention", "attention_inputs", "residual", "gate", "up")
  both = most(query_key_norm=True, post_norms=True)
  assert both == ("attention", "query", "key", "value", "output", "gate", "up")


def test_two_classes_are_those_of_the_class_weights():
  """A config with two class weights, for data with two labels, is compiled for two classes."""
  c = config_lib.Experiment(loss=config_lib.Loss(class_weights=(5.0, 1.0)))
  batch = compilation.abstract_batch(c, sharding_lib.make_mesh(config_lib.Mesh()))
  assert batch.read_targets.shape[-1] == compilation.classes(c) == 2


def test_reports_without_a_program_or_its_text(tokenizer):
  """Without HLO text a report has no estimate, and collectives are unknown instead of none."""
  data = config_lib.Data(tokenizer=tokenizer)
  c, vocab_size = compilation.resolved(config_lib.Experiment(data=data, model=tiny.MODEL))
  job, state = compilation.Job(c, "v5e:2x2"), tiny.described(c, vocab_size, chips=4)
  found = compilation.report(job, c, state, {"gib_per_chip": {"needed": None}}, None)
  assert not found["fits"] and "estimate" not in found
  gib = {"arguments": 1.0, "temporaries": 2.0, "needed": 3.0}
  found = compilation.report(job, c, state, {"gib_per_chip": gib}, None)
  assert found["fits"] and found["collectives"] is None and "estimate" not in found


def test_links_that_close_no_ring_have_half_the_bandwidth():
  """Only whole v5p cubes, and axes of 16 on v5e and v6e, count as rings."""
  for topology, links in (("v5p:4x4x8", 600), ("v5p:2x4x4", 300), ("v5e:8x16", 100)):
    assert compilation.Job(config_lib.Experiment(), topology).chip().links == links * 1e9
  assert compilation.Job(config_lib.Experiment(), "v5e:8x16").rings() == (False, True)


def multiply_adds(weight=0.0, untied=False, text=False, rank=0, **optim):
  """Returns `step_flops` as multiply-adds of a token: 3 layers, rows of 10 tokens, 50 ids."""
  data = {"text_train": "a", "text_eval": "b"} if text else {}
  sizes = {"layers": 3, "tied_embeddings": not untied, "lora_rank": rank}
  c = config_lib.Experiment(
    model=dataclasses.replace(tiny.MODEL, lora_targets=("gate",), **sizes),
    data=config_lib.Data(row_length=10, **data),
    train=config_lib.Train(batch_rows=2),
    loss=config_lib.Loss("language_model" if text else "process", weight),
    optim=config_lib.Optim(**optim),
  )
  init = functools.partial(step.init_params, config=c.model, vocab_size=50, num_classes=3)
  params = jax.eval_shape(init, jax.random.key(0))
  return cost_model.step_flops(c, params) / (2 * 2 * 10)


WEIGHTS = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24  # query and output, key and value, feed-forward
SCORES = 2 * 5 * 16  # scores and sums of values: over half of the row, 4 heads of 4
VOCABULARY = 50 * 16


@pytest.mark.parametrize(
  ("choice", "expected"),
  [
    ({}, 3 * 3 * (WEIGHTS + SCORES)),
    ({"trained": "head"}, 3 * (WEIGHTS + SCORES)),
    ({"trained": "lora", "rank": 2}, 3 * (2 * WEIGHTS + 3 * SCORES + 3 * 2 * (16 + 24))),
  ],
)
def test_operations_of_a_step_agree_with_counts_by_hand(choice, expected):
  """Forward and backward passes count as far as gradients are needed; embeddings do not."""
  assert multiply_adds(**choice) == expected
  assert multiply_adds(**choice, untied=True) == expected


@pytest.mark.parametrize(
  ("choice", "passes"),
  [
    ({}, 3),
    ({"untied": True}, 3),
    ({"embedding_scale": 0.0}, 2),
    ({"trained": "lora", "rank": 2, "untied": True}, 2),
    ({"trained": "head"}, 1),
    ({"trained": "head", "untied": True}, 2),  # forward and to its own weights
  ],
)
def test_the_vocabulary_counts_only_where_the_loss_uses_it(choice, passes):
  """A next-token loss adds the vocabulary's logits, and their gradients where weights train."""
  assert multiply_adds(0.5, **choice) - multiply_adds(**choice) == passes * VOCABULARY
  assert multiply_adds(text=True) == multiply_adds(0.5)


def experiment(saved=("attention",), row_length=1024, **optim):
  """Returns a tiny experiment in bfloat16 that recomputes all but `saved`."""
  return config_lib.Experiment(
    data=config_lib.Data(row_length=row_length),
    model=dataclasses.replace(tiny.MODEL, dtype="bfloat16", remat="full", saved=saved),
    optim=config_lib.Optim(**optim),
    train=config_lib.Train(batch_rows=16),
  )


def test_the_kernel_is_counted_by_live_blocks():
  """The kernel's operations count pairs of blocks that are not masked, with padded heads."""
  # Two blocks of 512: three of four pairs; heads of 4 are padded to 128.
  once = 2 * 128 * 4 * 2 * 3 * 512 * 512 * (2 + 7)
  assert cost_model.kernel_flops(experiment(), training=True) == once
  assert cost_model.kernel_flops(experiment(()), training=True) == once * 11 / 9
  assert cost_model.kernel_flops(experiment(), training=False) == once * 2 / 9
  assert cost_model.kernel_flops(experiment(trained="head"), training=True) == once * 2 / 9
  # Attention pads a row of 600 to two blocks of 512.
  assert cost_model.kernel_flops(experiment(row_length=600), training=True) == once


def test_the_seconds_of_a_step_add_up():
  """Overlapped collectives count only as far as they last longer than the arithmetic."""
  c = experiment(row_length=64)  # too short for the kernel
  alone, overlapped = (
    hlo.Collective(kind, "f32", size, 2, 1, None, hidden)
    for kind, size, hidden in (("all-reduce", 10**9, False), ("all-gather", 10**10, True))
  )
  between = hlo.Collective(hlo.BETWEEN_SLICES, "f32", 10**8, None, 1, None, False)
  program = hlo.Program(2 * 10**9, {}, (alone,), {}, 0)
  estimate = functools.partial(cost_model.estimate, c, CHIP, MESH, 1.2e13)
  found = estimate(program)
  assert found["seconds_per_step"] == 2 + 1
  assert found["mfu"] == pytest.approx(1.2e13 / (3 * 8 * 1e12))
  found = estimate(program._replace(collectives=(between,)))
  assert found["seconds_per_step"] == 2 + 1 and found["parts"]["between_slices"] == 1
  slow = program._replace(collectives=(alone, overlapped))
  assert estimate(slow)["seconds_per_step"] == 5 + 1
