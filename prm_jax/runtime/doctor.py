"""A report of the installed packages, the devices, and the packages that each extra lacks."""

import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import prm_jax
from prm_jax.runtime import processes

NAME = "prm_jax"
# The purpose of each extra in setup.py.
PURPOSES = {
  "": "the aggregator, reranking, grading, pages",
  "train": "training, scoring, evaluation, generation; datasets and public models",
  "tensorboard": "TensorBoard events of training",
  "gguf": "fetch_model",
  "serve": "serve",
  "tpu": "TPUs, compile_for_tpu, gs:// paths",
  "cuda": "NVIDIA GPUs (never run by us)",
  "wandb": "Weights & Biases",
  "beam": "prepare_data in many processes",
}


def requirements() -> dict[str, list[Requirement]]:
  """Returns the requirements of the installed project by extra; "" has those of every install."""
  extras = importlib.metadata.metadata(NAME).get_all("Provides-Extra") or ()
  return {extra: required(NAME, extra) for extra in ("", *extras)}


def required(name: str, extra: str) -> list[Requirement]:
  """Returns what an extra of an installed package adds; "": what every install requires."""
  wanted = map(Requirement, importlib.metadata.requires(name) or ())
  needed = lambda each, extra: not each.marker or each.marker.evaluate({"extra": extra})
  return [each for each in wanted if needed(each, extra) and not (extra and needed(each, ""))]


def missing(wanted: list[Requirement]) -> Iterator[str]:
  """Yields the required packages that are missing, or installed in an unsuitable version."""
  for each in wanted:
    try:
      version = importlib.metadata.version(each.name)
    except importlib.metadata.PackageNotFoundError:
      yield each.name
    else:
      if not each.specifier.contains(version, prereleases=True):
        yield f"{each.name} {version} is not {each.specifier}"
      for extra in each.extras:  # as in jax[cuda12], which brings the plugin for CUDA
        yield from missing(required(each.name, extra))


def extras_with(module: str) -> list[str]:
  """Returns the extras that install the package of a module, the smallest first."""
  name = canonicalize_name(module.split(".")[0])
  name = {"orbax": "orbax-checkpoint"}.get(name, name)  # the others are named as their modules
  named = lambda wanted: any(canonicalize_name(each.name) == name for each in wanted)
  try:
    extras = {extra: packages for extra, packages in requirements().items() if named(packages)}
  except importlib.metadata.PackageNotFoundError:
    return []
  return sorted(extras.keys() & PURPOSES.keys(), key=lambda extra: len(extras[extra]))


def report() -> str:
  """Returns the report as lines for a terminal."""
  lines = [
    f"prm_jax {prm_jax.__version__} in {os.path.dirname(prm_jax.__file__)}",
    f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} CPU cores",
    f"matrix products on the CPU: {dtypes()}",
    f"devices: {devices()}",
    f"memory allocator: {allocator()}",
    f"free disk here: {shutil.disk_usage('.').free / 1e9:.0f} GB",
    "",
  ]
  try:
    wanted = requirements()
  except importlib.metadata.PackageNotFoundError:
    return "\n".join([*lines, "not installed; in the checkout: pip install -e '.[train]'"])
  lines.append("packages of each extra (in a clone: pip install '.[NAME]')")
  for extra, purpose in PURPOSES.items():
    lacking = sorted(missing(wanted.get(extra, [])))
    name = f"[{extra}]" if extra else "prm_jax"
    lines.append(f"{'missing' if lacking else 'ok':8} {name:14} {purpose}")
    if lacking:
      shown = ", ".join(lacking[:6]) + (f" and {len(lacking) - 6} more" if lacking[6:] else "")
      lines.append(f"{'':8} {'':14} pip install 'prm_jax{name if extra else ''}' brings {shown}")
  return "\n".join(lines)


def dtypes() -> str:
  """Returns the measured speed of matrix products per dtype on the CPU, and the dtype to prefer."""
  try:
    full, half = gflops("float32"), gflops("bfloat16")
  except Exception as error:  # as in `devices`
    return f"not measured: {type(error).__name__}"
  dtype = "bfloat16" if half > 1.2 * full else "float32"
  speeds = f"{full:.0f} GFLOP/s in float32, {half:.0f} in bfloat16"
  return f"{speeds}; to train on it: --config.model.dtype={dtype}"


def gflops(dtype: str) -> float:
  """Returns the speed of a product of 1,024 activations with a matrix, as models compute it."""
  import jax
  import jax.numpy as jnp

  with jax.default_device(jax.devices("cpu")[0]):
    x, weight = jnp.ones((1024, 1024), dtype), jnp.ones((1024, 1024), dtype)
    product = jax.jit(lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32))
    seconds = []
    for _ in range(10):  # the first one compiles
      start = time.perf_counter()
      product(x, weight).block_until_ready()
      seconds.append(time.perf_counter() - start)
  return 2 * 1024**3 / min(seconds) / 1e9


def allocator() -> str:
  """Returns the memory allocator of this process, and how to choose a faster one for training."""
  variables = processes.allocator()
  if not variables or all(os.environ.get(name) == value for name, value in variables.items()):
    return " ".join(variables.values()) or "the system's"
  given = " ".join(f"{name}={value}" for name, value in variables.items())
  better = "" if "LD_PRELOAD" in variables else ", or install jemalloc (Debian: libjemalloc2)"
  return f"the system's; to train on the CPU, put {given} before the command{better}"


def devices() -> str:
  """Returns the devices that JAX finds, or why it finds none; names JAX_PLATFORMS if it is set."""
  chosen = os.environ.get("JAX_PLATFORMS")
  only = f"; JAX_PLATFORMS={chosen} is set, so no others are looked for" if chosen else ""
  try:
    import jax

    found = jax.devices()
  except Exception as error:  # of any class: drivers and plugins have their own
    return f"none: {type(error).__name__}: {str(error).splitlines()[0]}{only}"
  kinds = {device.device_kind for device in found}
  return (
    f"{len(found)} x {', '.join(sorted(kinds))} (jax {jax.__version__}, {found[0].platform}){only}"
  )
