"""Reading compiled programs: what loops multiply, what counts once."""

import pytest

from prm_jax.tpu import hlo

TEXT = """HloModule jit_step, is_scheduled=true

%fused_gather (p: bf16[8,64]) -> bf16[64,64] {
  %p = bf16[8,64]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.1 = bf16[64,64]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, \
replica_groups=mesh['axis_0'=8,'axis_1'=2] {'axis_0'}, dimensions={0}
}

%fused_gather.2 (p.2: bf16[8,64]) -> bf16[64,64] {
  %p.2 = bf16[8,64]{1,0:T(8,128)(2,1)} parameter(0)
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


GROUP = "replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"


def test_a_loop_multiplies_what_is_in_it():
  """Cycles, kernels and collectives of 28 trips; the condition says how many."""
  found = hlo.read(TEXT)
  assert found.loops == (28,) and found.unknown_loops == 0
  assert found.cycles == 3 + 28 * (100 + 20)
  assert found.without_cycles == {"tpu_custom_call": 28}
  assert found.in_loop(0) == {"all-gather": 1, "all-reduce": 1}  # pieces are of one gather


def test_collectives_are_counted_in_bytes_that_arrive():
  """By the ring: a reduction twice what a gather or a scatter takes."""
  gather, reduction, scatter = hlo.read(TEXT).collectives
  assert (gather.dtype, gather.bytes, gather.chips, gather.hidden) == ("bf16", 8192, 8, True)
  assert gather.traffic == 28 * 8192 * 7 / 8
  assert (reduction.dtype, reduction.bytes, reduction.chips) == ("f32", 4 * (16 + 32), 4)
  assert reduction.traffic == 28 * 2 * 192 * 3 / 4 and not reduction.hidden
  assert (scatter.bytes, scatter.chips, scatter.loop) == (4 * 2 * 8, 8, None)
  assert scatter.traffic == 64 * 7 / 8


def test_an_asynchronous_reduction_takes_as_many_bytes():
  """Its type is the result, or operands and results."""
  line = "  %reduce-scatter.4 = f32[2]{0} reduce-scatter("
  for shape in ("f32[16]{0}", "(f32[16]{0}, f32[16]{0})"):
    text = TEXT.replace(line, f"  %start = {shape} all-reduce-start(%x), {GROUP}\n{line}")
    (start,) = [each for each in hlo.read(text).collectives if each.hidden and each.loop != 0]
    assert (start.bytes, start.traffic) == (64, 2 * 64 * 7 / 8)


def test_what_other_slices_send_is_counted():
  """It comes through the hosts, as a transfer and not as a collective."""
  line = "  %reduce-scatter.4 = f32[2]{0} reduce-scatter("
  shape = "(bf16[8,4]{1,0:T(8,128)(2,1)}, u32[], token[])"
  received = f"  %recv = {shape} recv(%after-all), channel_id=1, is_host_transfer=true\n"
  (found,) = [
    each
    for each in hlo.read(TEXT.replace(line, received + line)).collectives
    if each.kind == hlo.BETWEEN
  ]
  assert (found.dtype, found.traffic, found.hidden) == ("bf16", 64, False)


def test_an_annotated_loop_needs_no_condition():
  """What the compiler wrote down itself comes first."""
  text = TEXT.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
  assert hlo.read(text).loops == (5,)


def test_a_loop_of_unknown_length_is_said():
  """And counted once: a number would be a guess."""
  found = hlo.read(TEXT.replace("constant(28)", "parameter(1)"))
  assert found.loops == (1,) and found.unknown_loops == 1 and found.cycles == 123


def test_what_is_no_program_is_refused():
  """An empty answer of the compiler must not read as a program without collectives."""
  with pytest.raises(ValueError, match="no ENTRY computation"):
    hlo.read("HloModule jit_step")
