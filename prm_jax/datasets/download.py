"""Finds the files of a public dataset in a local folder, or downloads and verifies them.

`builder` below is a TFDS builder or its class, or a `benchmarks.Benchmark`.  Its files lie below
`builder.BASE_URL`, and `builder.url_infos` has their sizes and SHA-256, if published: TFDS reads
them from the `checksums.tsv` beside the builder.
"""

import datetime
import hashlib
import http.client
import pathlib
import shutil
import sys
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from prm_jax.runtime import storage
from prm_jax.runtime.progress import Progress

DOWNLOADS = storage.CACHE  # keeps downloaded files


def folder(source: str | pathlib.Path) -> pathlib.Path:
  """Returns the folder `source`; raises FileNotFoundError or NotADirectoryError if it is none."""
  path = pathlib.Path(source).expanduser()
  if not path.exists():
    raise FileNotFoundError(f"{source}: no such folder")
  if not path.is_dir():
    raise NotADirectoryError(f"{source}: is a file; give the folder that it is in")
  return path


def find(source: str | pathlib.Path, file: str) -> pathlib.Path | None:
  """Finds `data/x.jsonl` as `source/data/x.jsonl` or `source/x.jsonl`; None if neither exists."""
  source = pathlib.Path(source).expanduser()
  places = (source / file, source / pathlib.PurePath(file).name)
  return next(filter(pathlib.Path.is_file, places), None)


def first_files(
  directory: pathlib.Path, names: Sequence[str], endings: Sequence[str]
) -> dict[str, pathlib.Path]:
  """Returns the file of each name in a directory: the first NAME+ENDING that exists, if any."""
  paths = {}
  for name in names:
    candidates = [directory / f"{name}{ending}" for ending in endings]
    if path := next(filter(pathlib.Path.is_file, candidates), None):
      paths[name] = path
  return paths


def fetch(
  builder: Any,
  files: Sequence[str],
  source: str | pathlib.Path | None,
  download_dir: str | pathlib.Path,
) -> dict[str, pathlib.Path]:
  """Returns local paths of `files`: in the folder `source`, or downloaded if it is None.

  Args:
    files: paths as upstream lays them out, below `builder.BASE_URL`.
    source: a local folder (see `find`).  Its files may hold a part of upstream's records.

  Raises:
    FileNotFoundError: names every file that is missing from `source`; or see `folder`.
    RuntimeError: a download failed, or is not the file of `url_infos`.  (Files outside that table
      have no published checksum, and are not verified; `describe` records their SHA-256.)
  """
  if source is None:
    paths = {file: pathlib.Path(download_dir).expanduser() / file for file in files}
    for file, path in paths.items():
      _download(builder.BASE_URL + file, path, _published(builder, file))
    return paths
  paths = {file: find(folder(source), file) for file in files}
  if missing := [file for file, path in paths.items() if path is None]:
    advice = "add them or leave the source out to download them"
    raise FileNotFoundError(f"{source} lacks {', '.join(missing)}; {advice}")
  return paths


def local(source: str | pathlib.Path, download_dir: str | pathlib.Path) -> pathlib.Path:
  """Returns the path `source`; if it is a URL, the path of its download, which is kept.

  Raises:
    RuntimeError: the download failed.
    ValueError: the URL names no file.
  """
  if not str(source).startswith(("https://", "http://")):
    return pathlib.Path(source)
  name = pathlib.PurePosixPath(urllib.parse.urlsplit(source).path).name
  if not name:
    raise ValueError(f"{source}: expected the URL of a file")
  folder = hashlib.sha256(source.encode()).hexdigest()[:16]
  path = pathlib.Path(download_dir).expanduser() / "sources" / folder / name
  _download(source, path, None, "the file by hand and pass its path")
  return path


def _download(
  url: str,
  path: pathlib.Path,
  info: Any | None,
  instead: str = "the files by hand (git lfs) and pass their folder",
) -> None:
  """Downloads a file.  Unlike TFDS's downloader, it fails at once if there is no network.

  Args:
    instead: what the error message advises to fetch and to pass.
  """
  if path.is_file() and info is None:
    when = datetime.date.fromtimestamp(path.stat().st_mtime)
    print(f"using {path}, downloaded on {when}; delete it to download it again", file=sys.stderr)
    return
  if path.is_file() and storage.sha256_of(path) == info.checksum:
    return
  size = int(info.size) if info else None
  shown_size = f" ({size:,} bytes)" if size else ""
  print(f"downloading {url}{shown_size}", file=sys.stderr, flush=True)
  bar = {"desc": path.name, "total": size, "leave": False}
  try:
    with (
      urllib.request.urlopen(url, timeout=60) as response,
      Progress.wrapattr(response, "read", **bar) as reader,
      storage.written(path, "wb", compress=False) as f,  # a .gz file is compressed already
    ):
      shutil.copyfileobj(reader, f, 2**20)
      f.flush()
      if response.length:
        raise OSError(f"the connection ended {response.length:,} bytes early")
      if info and (sha256 := storage.sha256_of(f.name)) != info.checksum:
        raise OSError(f"not upstream's {info}, but {f.tell():,} bytes of sha256 {sha256}")
  except (OSError, http.client.HTTPException) as error:
    advice = f"Run again, or fetch {instead} as source"
    raise RuntimeError(f"could not download {url}: {error}. {advice}") from error


def _published(builder: Any, file: str) -> Any | None:
  """Returns the size and checksum that upstream published for a file, if any."""
  return (builder.url_infos or {}).get(builder.BASE_URL + file)


def describe(builder: Any, paths: Mapping[str, pathlib.Path]) -> dict[str, dict[str, Any]]:
  """Returns each file's path, size, sha256 and `is_upstream` (None: no published checksum)."""
  return {
    file: {
      "path": str(path),
      "bytes": path.stat().st_size,
      "sha256": (sha256 := storage.sha256_of(path)),
      "is_upstream": (info := _published(builder, file)) and sha256 == info.checksum,
    }
    for file, path in paths.items()
  }
