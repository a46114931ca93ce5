"""Files of a public dataset: found in a local folder, or downloaded and verified.

`builder` below is a TFDS builder or its class.  Its `url_infos` is TFDS's own table of sizes and
sha256, `checksums.tsv` beside the builder; its files lie below its `BASE_URL`.
"""

from __future__ import annotations

import hashlib
import http.client
import pathlib
import sys
import urllib.request
from collections.abc import Sequence
from typing import Any

import tqdm

from prm_jax.runtime import json_lines


def fetch(
  builder: Any,
  files: Sequence[str],
  source: str | pathlib.Path | None,
  download_dir: str | pathlib.Path,
) -> dict[str, pathlib.Path]:
  """Local paths of `files`: from the folder `source`, or downloaded and verified if it is None.

  Args:
    files: paths as upstream lays them out, below `builder.BASE_URL`.
    source: a local folder, which may hold a part of upstream's records.  `data/x.jsonl` is found
      as `source/data/x.jsonl` or `source/x.jsonl`.
    download_dir: files that are there already and right are not downloaded again.

  Raises:
    FileNotFoundError: names every file that is missing from `source`.
    RuntimeError: a download failed, or is not the file of `url_infos`.
  """
  if source is None:
    paths = {file: pathlib.Path(download_dir).expanduser() / file for file in files}
    for file, path in paths.items():
      url = builder.BASE_URL + file
      _download(url, path, builder.url_infos[url])
    return paths
  source = pathlib.Path(source).expanduser()
  if not source.is_dir():
    raise FileNotFoundError(f"{source} is not a folder; give the one that holds {', '.join(files)}")
  places = {file: (source / file, source / pathlib.PurePath(file).name) for file in files}
  found = {file: next(filter(pathlib.Path.is_file, each), None) for file, each in places.items()}
  if missing := [file for file, path in found.items() if path is None]:
    raise FileNotFoundError(
      f"{source} lacks {', '.join(missing)} (looked there and one folder below). Put the files "
      "there, choose a config that does not need them, or leave the source out to download them"
    )
  return found


def _download(url: str, path: pathlib.Path, info: Any) -> None:
  """Unlike TFDS's own downloader, fails at once where there is no network."""
  if path.is_file() and path.stat().st_size == info.size and sha256_of(path) == info.checksum:
    return
  print(f"downloading {url} ({int(info.size):,} bytes)", file=sys.stderr, flush=True)
  hasher, size = hashlib.sha256(), 0
  try:
    with (
      urllib.request.urlopen(url, timeout=60) as response,
      json_lines.written(path, "wb") as f,
      tqdm.tqdm(total=int(info.size), unit="B", unit_scale=True, leave=False, disable=None) as bar,
    ):
      while size <= info.size and (chunk := response.read(2**20)):  # do not fill the disk
        size += len(chunk)
        hasher.update(chunk)
        f.write(chunk)
        bar.update(len(chunk))
      if (size, hasher.hexdigest()) != (int(info.size), info.checksum):
        raise RuntimeError(
          f"{url} is not upstream's file: got {size:,} bytes{' or more' * (size > info.size)} with "
          f"sha256 {hasher.hexdigest()}, expected {int(info.size):,} with {info.checksum}. The "
          "transfer was cut or the file has changed; run again, or pass a local folder as source"
        )
  except (OSError, http.client.HTTPException) as error:
    raise RuntimeError(
      f"could not download {url}: {error}. Run again later, or fetch the files by hand (git lfs) "
      "and pass their folder as the source"
    ) from error


def sha256_of(path: pathlib.Path) -> str:
  with open(path, "rb") as f:
    return hashlib.file_digest(f, "sha256").hexdigest()


def describe(builder: Any) -> dict[str, dict[str, Any]]:
  """What a manifest says about each of `builder.paths`: is it upstream's own file?"""
  described = {}
  for file, path in builder.paths.items():
    sha256, upstream = sha256_of(path), builder.url_infos.get(builder.BASE_URL + file)
    described[file] = {
      "path": str(path),
      "bytes": path.stat().st_size,
      "sha256": sha256,
      "is_upstream": upstream is not None and upstream.checksum == sha256,
    }
  return described
