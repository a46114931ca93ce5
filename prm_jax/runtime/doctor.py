"""What is installed, which devices there are, and what is missing for what."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import prm_jax

NAME = "prm_jax"
# What an extra is for; the extras are those of setup.py.
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
  """What the installed project asks for by extra, "" for none."""
  wanted = [*map(Requirement, importlib.metadata.requires(NAME) or ())]
  of = lambda each, extra: not each.marker or each.marker.evaluate({"extra": extra})
  found = {"": [each for each in wanted if of(each, "")]}
  for extra in importlib.metadata.metadata(NAME).get_all("Provides-Extra") or ():
    found[extra] = [each for each in wanted if of(each, extra) and not of(each, "")]
  return found


def missing(wanted: list[Requirement]) -> Iterator[str]:
  """The required packages that are not installed, or are of an unsuitable version."""
  for each in wanted:
    try:
      version = importlib.metadata.version(each.name)
    except importlib.metadata.PackageNotFoundError:
      yield each.name
    else:
      if not each.specifier.contains(version, prereleases=True):
        yield f"{each.name} {version} is not {each.specifier}"


def extras_with(module: str) -> list[str]:
  """The extras that bring the package of a module, the smallest first."""
  start = canonicalize_name(module.split(".")[0])
  named = lambda wanted: any(canonicalize_name(each.name).startswith(start) for each in wanted)
  try:
    found = {extra: packages for extra, packages in requirements().items() if named(packages)}
  except importlib.metadata.PackageNotFoundError:
    return []
  return sorted(found.keys() & PURPOSES.keys(), key=lambda extra: len(found[extra]))


def report() -> str:
  """The findings, as lines for a terminal."""
  lines = [
    f"prm_jax {prm_jax.__version__} in {os.path.dirname(prm_jax.__file__)}",
    f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} CPU cores",
    f"devices: {devices()}",
    f"free disk here: {shutil.disk_usage('.').free / 1e9:.0f} GB",
    "",
  ]
  try:
    wanted = requirements()
  except importlib.metadata.PackageNotFoundError:
    return "\n".join([*lines, "not installed; in the checkout: pip install -e '.[train]'"])
  lines.append("packages of (in a clone: pip install '.[NAME]')")
  for extra, purpose in PURPOSES.items():
    lacking = sorted(missing(wanted.get(extra, [])))
    name = f"[{extra}]" if extra else "prm_jax"
    lines.append(f"{'missing' if lacking else 'ok':8} {name:14} {purpose}")
    if lacking:
      shown = ", ".join(lacking[:6]) + (f" and {len(lacking) - 6} more" if lacking[6:] else "")
      lines.append(f"{'':8} {'':14} pip install 'prm_jax{name if extra else ''}' brings {shown}")
  return "\n".join(lines)


def devices() -> str:
  """The devices that JAX finds, or why it finds none, and what keeps it from looking for others."""
  chosen = os.environ.get("JAX_PLATFORMS")
  only = f"; JAX_PLATFORMS={chosen} is set, so no others are looked for" if chosen else ""
  try:
    import jax

    found = jax.devices()
  except Exception as error:  # whatever a driver or plugin may raise
    return f"none: {type(error).__name__}: {str(error).splitlines()[0]}{only}"
  kinds = {device.device_kind for device in found}
  return (
    f"{len(found)} x {', '.join(sorted(kinds))} (jax {jax.__version__}, {found[0].platform}){only}"
  )
