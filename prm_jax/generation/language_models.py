"""Loads samplers: from a public model's directory, or from a run of train.py."""

import dataclasses
import pathlib

import jax

from prm_jax import config as config_lib
from prm_jax.generation.sampler import Sampler
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import json_lines
from prm_jax.scoring.language_model import LanguageModel


def load_model(
  directory: str | pathlib.Path, dtype: str = "float32", batch: int = 64, tensor: int = 1
) -> Sampler:
  """Loads a public or exported language model from its directory.

  Args:
    tensor: devices of this host that share a copy of the model.

  Raises:
    ValueError: the directory is not a language model that the decoder can run, or `tensor` does
      not divide the devices.
    OSError: a file is missing or cannot be read.
  """
  mesh = _mesh(tensor)
  model = LanguageModel.of_directory(directory, mesh, dtype)
  ends = _end_tokens(pathlib.Path(directory)) | {model.tokenizer.eos_id} - {None}
  return Sampler.of(model.params, model.config, model.tokenizer, frozenset(ends), mesh, batch)


def load_checkpoint(workdir: str, batch: int = 64, tensor: int = 1) -> Sampler:
  """Loads the newest checkpoint of a run of train.py on text.

  Raises:
    ValueError, FileNotFoundError: as `Scorer.load`; or the run was not on text.
  """
  mesh = _mesh(tensor)
  model = LanguageModel.of_run(workdir, mesh)
  ends = frozenset({model.tokenizer.eos_id} - {None})
  sampler = Sampler.of(model.params, model.config, model.tokenizer, ends, mesh, batch)
  return dataclasses.replace(sampler, step=model.step)


def _mesh(tensor: int) -> jax.sharding.Mesh:
  """Returns a mesh of this host's devices, `tensor` of them for each copy of the model."""
  devices = jax.local_devices()
  if len(devices) % tensor:
    raise ValueError(f"--tensor={tensor} does not divide the {len(devices)} devices of this host")
  return sharding_lib.make_mesh(config_lib.Mesh(data=-1, fsdp=1, tensor=tensor), devices=devices)


def _end_tokens(directory: pathlib.Path) -> set[int]:
  """Returns the `eos_token_id`s of generation_config.json and config.json."""
  ends: set[int] = set()
  for name in ("generation_config.json", "config.json"):
    if (directory / name).is_file():
      value = json_lines.document(directory / name).get("eos_token_id")
      ends |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
  return ends
