"""Loads samplers: from a public model's directory, or from a run of train.py."""

import pathlib

import jax

from prm_jax import config as config_lib
from prm_jax.generation.sampler import Sampler
from prm_jax.model import sharding as sharding_lib
from prm_jax.runtime import json_lines
from prm_jax.scoring.language_model import LanguageModel


def load(
  directory: str | pathlib.Path,
  dtype: str = "float32",
  batch: int = 64,
  tensor: int = 1,
  run: bool = False,
) -> Sampler:
  """Loads a public or exported language model, or the newest checkpoint of a run on text.

  Args:
    dtype: of a public or exported model.
    tensor: devices of this host that share a copy of the model.
    run: whether the directory is a work directory of train.py.

  Raises:
    ValueError, OSError: as `LanguageModel.of_directory` or `of_run`; or `tensor` does not divide
      the devices.
  """
  devices = jax.local_devices()
  if len(devices) % tensor:
    raise ValueError(f"--tensor={tensor} does not divide the {len(devices)} devices of this host")
  mesh = sharding_lib.make_mesh(config_lib.Mesh(data=-1, fsdp=1, tensor=tensor), devices=devices)
  if run:
    model = LanguageModel.of_run(directory, mesh)
  else:
    model = LanguageModel.of_directory(directory, mesh, dtype)
  ends = frozenset(_end_tokens(pathlib.Path(directory)) | {model.tokenizer.eos_id} - {None})
  return Sampler.of(model.params, model.config, model.tokenizer, ends, mesh, batch, model.step)


def _end_tokens(directory: pathlib.Path) -> set[int]:
  """Returns the `eos_token_id`s of generation_config.json and config.json."""
  ends: set[int] = set()
  for name in ("generation_config.json", "config.json"):
    if (directory / name).is_file():
      value = json_lines.document(directory / name).get("eos_token_id")
      ends |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
  return ends
