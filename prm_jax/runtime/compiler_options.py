"""Options of the TPU compiler, the same for a run and for compile_for_tpu.py.

They were chosen by the compiler's own estimates for the production configs (docs/benchmarks.md).
All but `WHOLE_EINSUMS` are in MaxText's list (its benchmarks/xla_flags_library.py).
"""

from typing import Literal

import jax

from prm_jax import config as config_lib

# A windowed einsum gathers a matrix slice by slice and adds each product to the whole output.  On
# v5p the slices have 112 columns, and the einsum takes nine times the cycles of one product.
WHOLE_EINSUMS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
# Overlaps gathers of weights and reductions of gradients with matrix products.
BESIDE_PRODUCTS = {
  "xla_tpu_enable_async_collective_fusion": "true",
  "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
  "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
  "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
  "xla_tpu_overlap_compute_collective_tc": "true",
  "xla_enable_async_all_gather": "true",
  "xla_enable_async_all_reduce": "true",
}
COMMON = WHOLE_EINSUMS | BESIDE_PRODUCTS
VMEM = "xla_tpu_scoped_vmem_limit_kib"
Program = Literal["train", "score", "sample"]
# On-chip memory of an operation, in KiB.  More allows larger tiles, but compiles longer.  With
# these, a step takes 0.9 to 1.6 times as long to compile as without.  Long runs gain from more,
# most of all on v6e: with 65536 the 7B train step takes 11 % less time.
VMEM_LIMITS: dict[str, dict[Program, int]] = {
  "TPU v5 lite": {"train": 20480, "score": 20480, "sample": 20480},  # v5e
  "TPU v5": {"train": 18432, "score": 18432, "sample": 32768},  # v5p
  "TPU v6 lite": {"train": 32768, "score": 45056, "sample": 32768},  # v6e
}


def of(c: config_lib.Tpu, device: jax.Device, program: Program) -> dict[str, str] | None:
  """Returns the `compiler_options` of `jax.jit` for a device; None if it is not a TPU."""
  if device.platform != "tpu":
    return None
  options = COMMON | {VMEM: str(VMEM_LIMITS.get(device.device_kind, {}).get(program, ""))}
  options |= dict(option.split("=", 1) for option in c.compiler_options)
  return {name: value for name, value in options.items() if value}
