"""Options of the TPU compiler, the same for a run and for compile_for_tpu.py.

Chosen by the compiler's own estimates of the production configs; docs/benchmarks.md has those of
each option.  They are options that MaxText uses too (its benchmarks/xla_flags_library.py).
"""

import jax

from prm_jax import config as config_lib

# A windowed einsum gathers a matrix slice by slice and adds each product to the whole output: on
# v5p in slices of 112 columns, with nine times the cycles of one product.
WHOLE_EINSUMS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
# Reductions of gradients run in pieces beside matrix products, as gathers of weights do anyway.
ALL_REDUCE_BESIDE_PRODUCTS = {
  "xla_tpu_enable_async_collective_fusion": "true",
  "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
  "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
  "xla_tpu_overlap_compute_collective_tc": "true",
  "xla_enable_async_all_reduce": "true",
}
# Twice the on-chip memory for one operation: larger tiles of matrix products.
LARGER_TILES = {"xla_tpu_scoped_vmem_limit_kib": "32768"}
DEFAULTS = {
  "TPU v5 lite": WHOLE_EINSUMS | ALL_REDUCE_BESIDE_PRODUCTS | LARGER_TILES,  # v5e
  "TPU v5": WHOLE_EINSUMS,  # v5p
  "TPU v6 lite": WHOLE_EINSUMS,  # v6e
}


def of(c: config_lib.Tpu, device: jax.Device) -> dict[str, str] | None:
  """The options of programs for a device, for `jax.jit`; None on other platforms."""
  if device.platform != "tpu":
    return None
  given = dict(option.split("=", 1) for option in c.compiler_options)
  options = DEFAULTS.get(device.device_kind, WHOLE_EINSUMS) | given
  return {name: value for name, value in options.items() if value}
