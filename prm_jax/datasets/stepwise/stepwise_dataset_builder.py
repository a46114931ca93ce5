"""Labelled solutions of any source as a TFDS dataset; needs no TensorFlow."""

import dataclasses
import hashlib
import itertools
import pathlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import tensorflow_datasets as tfds

from prm_jax import config as config_lib
from prm_jax.datasets import download, stored
from prm_jax.datasets.stepwise import records
from prm_jax.runtime import json_lines
from prm_jax.types import CLASSES, TWO_CLASSES, StepTree, problem_key

ENDINGS = (".jsonl", ".jsonl.gz", ".json")  # endings of a split's file in a folder


@dataclasses.dataclass(frozen=True)
class Stepwise(config_lib.Checked):
  """Options of the dataset `stepwise`."""

  # Kind of labels: true or false (1 or 0); 1, 0 or -1; a probability; or k of n; auto: inferred.
  labels: Literal["auto", records.Kind] = "auto"
  # Share of the problems to hold out for evaluation, if the source has no test.jsonl.
  test_share: config_lib.Decay = 0.05


class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Labelled solutions (`records`), each stored as JSON with labels as in `StepTree`."""

  VERSION = tfds.core.Version("1.1.0")  # 1.0.0 listed fewer `test_problems`

  def __init__(
    self,
    *,
    source: str | pathlib.Path,
    options: Stepwise,
    on_bad_record: str = "fail",
    **kwargs,
  ):
    """Takes the arguments of TFDS's builders and three more.

    Args:
      source: a folder with train.jsonl and perhaps test.jsonl (or .jsonl.gz), or one file.
      options: the kind of the labels, and the share of the problems to hold out.
      on_bad_record: "fail" raises BadLine at the first line without a labelled solution; "skip"
        lists it in `skipped`.

    Raises:
      ValueError: there is a test.jsonl, and a share is given.
    """
    self.paths = _files(pathlib.Path(source).expanduser())
    if "test" in self.paths and options.test_share not in (0, Stepwise.test_share):
      raise ValueError(f"stepwise.test_share has no effect: {self.paths['test']} is the test split")
    self._options, self._skip = options, on_bad_record == "skip"
    # The message of each bad line, by the split of its file and by FILE:LINE.
    self.skipped: dict[str, dict[str, str]] = {split: {} for split in self.paths}
    self.kind: records.Kind | None = None  # kind of the labels; None before the build
    self.counts: dict[str, dict[str, Counter]] = {}  # each split's part of manifest.json
    self.test_problems: set[str] = set()  # keys of the problems that are held out
    super().__init__(file_format="array_record", **kwargs)

  @property
  def classes(self) -> tuple[str, ...]:
    """Returns the classes of a head for these labels; neutral only if a label is neutral."""
    neutral = any(split["labels"]["0"] for split in self.counts.values())
    return CLASSES["process"] if neutral else TWO_CLASSES

  def _info(self) -> tfds.core.DatasetInfo:
    names = ("json", "source", "problem")
    return stored.info(self, {name: tfds.features.Text() for name in names})

  def _split_generators(self, dl_manager):
    problems = {split: set() for split in self.paths}  # their keys
    known = set()  # of problems with a label or is_correct

    def first_pass():
      for split in self.paths:
        for solution, zero_is_wrong, where in self._solutions(split):
          problems[split].add(key := problem_key(solution.problem))
          if solution.is_correct is not None or any(x is not None for x in solution.labels):
            known.add(key)
          yield solution, zero_is_wrong, where
      bad = [text for messages in self.skipped.values() for text in messages.values()]
      if bad and not any(problems.values()):
        raise ValueError(f"no line holds a labelled solution; {bad[0]}")

    self.kind = records.kind_of(first_pass(), self._options.labels)
    if "test" in self.paths:
      rows = {split: self._solutions(split) for split in self.paths}
      self.test_problems = problems["test"]
    else:
      # The problems with the smallest hashes, so that added or moved lines change few of them.
      # At least one problem is left to train on.
      count = min(round(self._options.test_share * len(known)), len(known) - 1)
      digest = lambda problem: hashlib.sha256(problem.encode()).digest()
      self.test_problems = {*sorted(known, key=digest)[: max(count, 0)]}
      is_tested = lambda row: problem_key(row[0].problem) in self.test_problems
      rows = {"train": itertools.filterfalse(is_tested, self._solutions("train"))}
      if self.test_problems:
        rows["test"] = filter(is_tested, self._solutions("train"))
    return {split: self._generate_examples(split, lines) for split, lines in rows.items()}

  def _solutions(self, split: str) -> Iterator[tuple[records.Labelled, bool, str]]:
    """Yields what `records.parse` returns for each line of the split's file, and FILE:LINE."""

    def skip(where: str, error: json_lines.BadLine) -> None:
      if not self._skip:
        raise error
      self.skipped[split][where] = str(error)

    for where, record in json_lines.records(self.paths[split], skip):
      try:
        solution = records.parse(record, where)
      except json_lines.BadLine as error:
        skip(where, error)
      else:
        yield *solution, where

  def _generate_examples(self, split, rows):
    counts = self.counts[split] = {
      "rows": Counter(read=0, kept=0),
      "labels": Counter({"1": 0, "0": 0, "-1": 0}),
      "dropped": Counter(),
    }
    path = self.paths.get(split, self.paths["train"])
    if bad := len(self.skipped.get(split, ())):
      counts["rows"]["read"] = counts["dropped"]["bad_record"] = bad
    for key, (solution, _, where) in enumerate(rows):
      converted = records.stored(solution, self.kind)
      known = [label for label in converted.labels if label is not None]
      counts["rows"]["read"] += 1
      if not known and solution.is_correct is None:
        counts["dropped"]["no_labels"] += 1
        continue
      if split == "train" and problem_key(solution.problem) in self.test_problems:
        counts["dropped"]["test_problem"] += 1  # training drops these: `labelled.step_trees`
      else:
        counts["rows"]["kept"] += 1
        counts["labels"].update(str(_rating(label)) for label in known)
      data, source = msgspec.json.encode(converted), where.removeprefix(f"{path.parent}/")
      yield key, {"json": data, "source": source, "problem": solution.problem}
    if not counts["rows"]["kept"]:
      dropped = ", ".join(f"{count} by {rule}" for rule, count in counts["dropped"].items())
      raise ValueError(
        f"{path}: split {split!r} keeps no solution: "
        f"{counts['rows']['read']} rows were read, dropped {dropped} (no_labels: neither a label "
        "nor is_correct)"
      )


def _rating(label: int | tuple[float, float]) -> int:
  """Returns the class that a label counts for: the likelier one of a soft label."""
  return label if isinstance(label, int) else 1 if label[1] >= label[0] else -1


def _files(source: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns the file of each split; FileNotFoundError if train has none."""
  if source.is_file():
    return {"train": source}
  paths = download.first_files(source, ("train", "test"), ENDINGS)
  if "train" not in paths:
    raise FileNotFoundError(f"{source}: expected a file, or a folder with train.jsonl")
  return paths


def stored_trees(directory: str | pathlib.Path, split: str) -> Sequence[StepTree]:
  """Returns the solutions of a split below a prepare_data output; raises as `stored.Examples`."""

  def decode(example):
    solution = msgspec.json.decode(example["json"], type=records.Stored)
    return records.tree(solution, example["source"].decode())

  return stored.Examples(directory, split, decode)
