"""Files of a public dataset: find them in a local folder, or download and verify them.

The table of a dataset's files is TFDS's own: `checksums.tsv` beside its builder, one line per
URL with size in bytes and sha256.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import pathlib
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import tqdm


def locate(source: str | pathlib.Path, files: Sequence[str]) -> dict[str, pathlib.Path]:
  """Paths of `files` below the folder `source`.

  Args:
    source: a local folder.  `data/x.jsonl` is found as `source/data/x.jsonl` or `source/x.jsonl`.
    files: paths as upstream lays them out.

  Raises:
    FileNotFoundError: names every file that is missing, and what to do.
  """
  source = pathlib.Path(source).expanduser()
  if not source.is_dir():
    raise FileNotFoundError(f"{source} is not a folder; give the one that holds {', '.join(files)}")
  found = {}
  for file in files:
    for path in (source / file, source / pathlib.PurePath(file).name):
      if path.is_file():
        found[file] = path
        break
  if missing := [file for file in files if file not in found]:
    raise FileNotFoundError(
      f"{source} lacks {', '.join(missing)} (looked there and one folder below). Put the files "
      "there, choose a config that does not need them, or leave the source out to download them"
    )
  return found


def fetch(
  files: Sequence[str],
  source: str | pathlib.Path | None,
  base_url: str,
  url_infos: Mapping,
  download_dir: str | pathlib.Path,
) -> dict[str, pathlib.Path]:
  """Local paths of `files`: from the folder `source`, or downloaded and verified if it is None.

  Args:
    files: paths as upstream lays them out, below `base_url`.
    source: a local folder (`locate`), which may hold a part of upstream's rows.
    url_infos: size and sha256 of each URL, as TFDS reads them from `checksums.tsv`.
    download_dir: files that are there already and right are not downloaded again.

  Raises:
    FileNotFoundError: a file is missing from `source`.
    RuntimeError: a download failed, or is not the file of `url_infos`.
  """
  if source is not None:
    return locate(source, files)
  paths = {file: pathlib.Path(download_dir).expanduser() / file for file in files}
  for file, path in paths.items():
    _download(base_url + file, path, url_infos[base_url + file])
  return paths


def _download(url: str, path: pathlib.Path, info) -> None:
  """TFDS's own downloader retries for minutes where there is no network; this one says so."""
  if path.is_file() and path.stat().st_size == info.size and sha256_of(path) == info.checksum:
    return
  print(f"downloading {url} ({int(info.size):,} bytes)", file=sys.stderr, flush=True)
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f"{path.name}.incomplete-{os.getpid()}")
  hasher, size = hashlib.sha256(), 0
  try:
    with (
      urllib.request.urlopen(url, timeout=60) as response,
      open(temporary, "wb") as f,
      tqdm.tqdm(total=int(info.size), unit="B", unit_scale=True, leave=False, disable=None) as bar,
    ):
      while chunk := response.read(2**20):
        size += len(chunk)
        if size > info.size:
          break  # not that file: do not fill the disk
        hasher.update(chunk)
        f.write(chunk)
        bar.update(len(chunk))
    if (size, hasher.hexdigest()) != (int(info.size), info.checksum):
      raise RuntimeError(
        f"{url} is not upstream's file: got {size:,} bytes{' or more' * (size > info.size)} with "
        f"sha256 {hasher.hexdigest()}, expected {int(info.size):,} with {info.checksum}. The "
        "transfer was cut or the file has changed; run again, or pass a local folder as the source"
      )
    temporary.replace(path)
  except (OSError, http.client.HTTPException) as error:
    raise RuntimeError(
      f"could not download {url}: {error}. Run again later, or fetch the files by hand (git lfs) "
      "and pass their folder as the source"
    ) from error
  finally:
    temporary.unlink(missing_ok=True)


def sha256_of(path: pathlib.Path) -> str:
  with open(path, "rb") as f:
    return hashlib.file_digest(f, "sha256").hexdigest()


def describe(path: pathlib.Path, upstream) -> dict[str, Any]:
  """What a manifest says about a source file; `upstream` is the file's entry of `url_infos`."""
  sha256 = sha256_of(path)
  return {
    "path": str(path),
    "bytes": path.stat().st_size,
    "sha256": sha256,
    "is_upstream": upstream is not None and upstream.checksum == sha256,
  }
