"""Files of a public dataset: found in a local folder, or downloaded and verified.

`builder` below is a TFDS builder or its class.  Its `url_infos` is TFDS's own table of sizes and
sha256, `checksums.tsv` beside the builder; its files lie below its `BASE_URL`.
"""

import hashlib
import http.client
import pathlib
import shutil
import sys
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

from prm_jax.runtime import storage
from prm_jax.runtime.progress import Progress


def folder(source: str | pathlib.Path) -> pathlib.Path:
  """The folder `source`; FileNotFoundError or NotADirectoryError, naming it, if it is none."""
  path = pathlib.Path(source).expanduser()
  if not path.exists():
    raise FileNotFoundError(f"{source}: no such folder")
  if not path.is_dir():
    raise NotADirectoryError(f"{source}: a file: give the folder that it is in")
  return path


def find(source: str | pathlib.Path, file: str) -> pathlib.Path | None:
  """`source/data/x.jsonl` or `source/x.jsonl`, for the file `data/x.jsonl`; None: no such file."""
  source = pathlib.Path(source).expanduser()
  places = (source / file, source / pathlib.PurePath(file).name)
  return next(filter(pathlib.Path.is_file, places), None)


def fetch(
  builder: Any,
  files: Sequence[str],
  source: str | pathlib.Path | None,
  download_dir: str | pathlib.Path,
) -> dict[str, pathlib.Path]:
  """Local paths of `files`: from the folder `source`, or downloaded and verified if it is None.

  Args:
    files: paths as upstream lays them out, below `builder.BASE_URL`.
    source: a local folder, which may hold a part of upstream's records: see `find`.

  Raises:
    FileNotFoundError: names every file that is missing from `source`.
    RuntimeError: a download failed, or is not the file of `url_infos`.  (Of a file that is not in
      that table upstream has published no checksum; describe() records the one it has.)
  """
  if source is None:
    paths = {file: pathlib.Path(download_dir).expanduser() / file for file in files}
    for file, path in paths.items():
      url = builder.BASE_URL + file
      _download(url, path, _published(builder, file))
    return paths
  found = {file: find(source, file) for file in files}
  if missing := [file for file, path in found.items() if path is None]:
    advice = "add them or leave the source out to download them"
    raise FileNotFoundError(f"{source} lacks {', '.join(missing)}; {advice}")
  return found


def local(source: str | pathlib.Path, download_dir: str | pathlib.Path) -> pathlib.Path:
  """A local path as it is; of a URL, its download, which is kept.

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
  _download(source, path, None)
  return path


def _download(url: str, path: pathlib.Path, info: Any | None) -> None:
  """Unlike TFDS's own downloader, fails at once where there is no network."""
  if path.is_file() and (info is None or sha256_of(path) == info.checksum):
    return
  size = int(info.size) if info else None
  told = f" ({size:,} bytes)" if size else ""
  print(f"downloading {url}{told}", file=sys.stderr, flush=True)
  bar = {"desc": path.name, "total": size, "leave": False}
  try:
    with (
      urllib.request.urlopen(url, timeout=60) as response,
      Progress.wrapattr(response, "read", **bar) as reader,
      storage.written(path, "wb") as f,
    ):
      shutil.copyfileobj(reader, f, 2**20)
      f.flush()
      if info and (sha256 := sha256_of(f.name)) != info.checksum:
        raise OSError(f"not upstream's {info}, but {f.tell():,} bytes of sha256 {sha256}")
  except (OSError, http.client.HTTPException) as error:
    advice = "Run again, or fetch the files by hand (git lfs) and pass their folder as source"
    raise RuntimeError(f"could not download {url}: {error}. {advice}") from error


def _published(builder: Any, file: str) -> Any | None:
  """Size and checksum that upstream published of a file, if it did."""
  return (builder.url_infos or {}).get(builder.BASE_URL + file)


def sha256_of(path: str | pathlib.Path) -> str:
  with open(path, "rb") as f:
    return hashlib.file_digest(f, "sha256").hexdigest()


def describe(builder: Any) -> dict[str, dict[str, Any]]:
  """Manifest entry of each file: path, size, sha256, `is_upstream` (None: no known checksum)."""
  return {
    file: {
      "path": str(path),
      "bytes": path.stat().st_size,
      "sha256": (sha256 := sha256_of(path)),
      "is_upstream": (info := _published(builder, file)) and sha256 == info.checksum,
    }
    for file, path in builder.paths.items()
  }
