"""The MATH problems as PRM800K splits them: 12,000 to train, 500 to test; array_record."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import numpy as np
import tensorflow_datasets as tfds

from prm_jax.datasets import download

_TEXTS = ("problem", "solution", "answer", "subject", "unique_id")
_KINDS = dict.fromkeys(_TEXTS, str) | {"level": int}


class Builder(tfds.core.GeneratorBasedBuilder):
  """MATH problems with solutions and answers (Lightman et al. 2023, appendix C)."""

  VERSION = tfds.core.Version("1.0.0")
  BASE_URL = "https://media.githubusercontent.com/media/openai/prm800k/main/prm800k/"

  def __init__(
    self,
    *,
    source: str | pathlib.Path | None = None,
    splits: tuple[str, ...] = ("train", "test"),
    **kwargs,
  ):
    """Args as of TFDS's builders, and

    source: folder with `math_splits/test.jsonl` or `test.jsonl`; None: download and verify.
    splits: which to write.
    """
    self.source = source
    self._splits = splits
    self.paths: dict[str, pathlib.Path] = {}
    super().__init__(file_format="array_record", **kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    features = {key: tfds.features.Text() for key in _TEXTS} | {"level": np.int32}
    return self.dataset_info_from_configs(
      features=tfds.features.FeaturesDict(features), disable_shuffling=True
    )

  def _split_generators(self, dl_manager):
    files = {split: f"math_splits/{split}.jsonl" for split in self._splits}
    self.paths = download.fetch(
      list(files.values()), self.source, self.BASE_URL, self.url_infos, dl_manager.download_dir
    )
    return {split: self._generate_examples(self.paths[file]) for split, file in files.items()}

  def _generate_examples(self, path):
    yield from enumerate(read_problems(path))


def read_problems(path: str | pathlib.Path) -> Iterator[dict]:
  """The problems of a `math_splits` file: problem, solution, answer, subject, level, unique_id.

  Raises:
    ValueError: names file, line and what is wrong.
  """
  with open(path, "rb") as f:
    for number, line in enumerate(f, 1):
      if number == 1 and line.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path}: this is a Git LFS pointer, not the data; run `git lfs pull`")
      try:
        row = json.loads(line.decode("utf-8"))
      except (ValueError, RecursionError) as error:  # not UTF-8 and not JSON among them
        raise ValueError(f"{path}:{number}: not a JSON line: {error}") from None
      for key, kind in _KINDS.items():
        value = row.get(key) if isinstance(row, dict) else None
        if not isinstance(value, kind):
          raise ValueError(f"{path}:{number}: {key} is {value!r}; expected {kind.__name__}")
      yield {key: row[key] for key in _KINDS}
