"""Options of the TPU compiler, the same for a run and for compile_for_tpu.py.

Chosen by the compiler's own estimates of the production configs; docs/benchmarks.md has those of
each option.  All but `WHOLE_EINSUMS` are in MaxText's list (its benchmarks/xla_flags_library.py).
"""

import jax

from prm_jax import config as config_lib

# A windowed einsum gathers a matrix slice by slice and adds each product to the whole output: on
# v5p in slices of 112 columns, with nine times the cycles of one product.
WHOLE_EINSUMS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
# Gathers of weights and reductions of gradients run in pieces beside matrix products.
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
# KiB of on-chip memory for one operation: with more of it, products have larger tiles.
VMEM = "xla_tpu_scoped_vmem_limit_kib"
DEFAULTS = {
  "TPU v5 lite": COMMON | {VMEM: "32768"},  # v5e
  "TPU v5": COMMON | {VMEM: "32768"},  # v5p
  "TPU v6 lite": COMMON | {VMEM: "65536"},  # v6e
}


def of(c: config_lib.Tpu, device: jax.Device) -> dict[str, str] | None:
  """The options of programs for a device, for `jax.jit`; None on other platforms."""
  if device.platform != "tpu":
    return None
  given = dict(option.split("=", 1) for option in c.compiler_options)
  options = DEFAULTS.get(device.device_kind, COMMON) | given
  return {name: value for name, value in options.items() if value}
