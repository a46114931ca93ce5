"""Published benchmarks: files of JSON lines, downloaded or in a local folder.

prepare_data.py checks and copies the files unchanged, so its output is such a folder too.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from prm_jax.datasets import download
from prm_jax.runtime import json_lines

CHECKSUMS = pathlib.Path(__file__).with_name("checksums.tsv")  # the published ones
Steps = Annotated[list[str], msgspec.Meta(min_length=1)]


class Info(NamedTuple):
  size: int
  checksum: str  # SHA-256


@functools.cache
def url_infos() -> dict[str, Info]:
  """Returns size and SHA-256 by URL."""
  rows = (row.split() for row in CHECKSUMS.read_text().splitlines())
  return {url: Info(int(size), checksum) for url, size, checksum in rows}


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """The files of a benchmark."""

  name: str
  BASE_URL: str  # named as in a TFDS builder, because `download.fetch` takes both
  files: Sequence[str]  # upstream's paths below BASE_URL
  line: type[msgspec.Struct]
  find: Callable[[pathlib.Path], Sequence[pathlib.Path]]  # returns the files that a folder has
  split: str = ""  # the split of all files; "": each file is a split

  @property
  def url_infos(self) -> dict[str, Info]:
    return url_infos()

  def local(self, source: str | pathlib.Path) -> list[pathlib.Path]:
    """Returns the files in a folder; raises FileNotFoundError if none, or as `download.folder`."""
    folder = download.folder(source)
    if not (paths := [*self.find(folder)]):
      also = ", also as .jsonl" if self.files[0].endswith(".json") else ""
      names = "*.jsonl" if len(self.files) > 9 else ", ".join(self.files) + also
      raise FileNotFoundError(f"{source}: no file of {self.name}: expected some of {names}")
    return paths

  def fetch(
    self, files: Sequence[str], download_dir: str | pathlib.Path
  ) -> dict[str, pathlib.Path]:
    """Downloads some of upstream's files, unless downloaded before; returns them by name."""
    return download.fetch(self, files, None, pathlib.Path(download_dir) / self.name)

  def records(self, directory: str | pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields FILE:LINE and the record of each line of the files in a folder."""
    return itertools.chain.from_iterable(map(json_lines.records, self.local(directory)))
