"""Writes a dataset and its manifest to one folder, all or nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds
import tqdm

from prm_jax.datasets import arithmetic, download, math_splits, prm800k
from prm_jax.datasets.labelled import MANIFEST
from prm_jax.datasets.prm800k import recipes

DOWNLOADS = pathlib.Path("~/.cache/prm_jax").expanduser()
TEST_FILE = "math_splits/test.jsonl"


def prepare_prm800k(
  output: str | pathlib.Path,
  *,
  source: str | pathlib.Path | None,
  config: str = "all",
  recipe_name: str = "paper",
  recipe: recipes.Recipe | None = None,
  on_bad_record: str = "fail",
  overwrite: bool = False,
  download_dir: str | pathlib.Path = DOWNLOADS,
  beam: tfds.download.DownloadConfig | None = None,
) -> dict[str, Any]:
  """Writes PRM800K to `output`, and counts of what `recipe` makes of it to its manifest.json.

  The dataset holds every record whole; the recipe is applied when training reads it.

  Args:
    output: a new folder (see `new_directory`).
    source: folder with upstream's files; None downloads them.
    config: "all", "phase1" or "phase2".
    recipe_name: of `recipes.RECIPES`.
    recipe: its options, if they were changed.
    on_bad_record: "fail" or "skip".
    overwrite: replace an earlier output.
    download_dir: where downloaded files are kept.
    beam: of `on_beam.Beam`, if Apache Beam writes the shards; the output is the same.

  Returns:
    the manifest.

  Raises:
    BadLine, ValueError, FileNotFoundError, FileExistsError, RuntimeError: say what is wrong and
      what to do.
  """
  recipe = recipe or recipes.RECIPES[recipe_name]
  with new_directory(output, overwrite) as temporary:
    builder = prm800k.Builder(
      source=source, config=config, data_dir=temporary, on_bad_record=on_bad_record
    )
    _build(builder, download_dir, beam)
    test_file = _test_file(source, download_dir)
    problems = math_splits.read_problems(test_file) if test_file else ()
    bad = [message for messages in builder.skipped.values() for message in messages]
    quoted = [text for messages in builder.skipped.values() for text in messages[:10]]
    manifest = {
      "source": download.describe(builder),
      "test_problems_from": str(test_file) if test_file else None,
      "bad_records": {"count": len(bad), "examples": quoted},
    }
    manifest |= summarize(temporary, builder, recipe_name, recipe, {p.problem for p in problems})
    for split, messages in builder.skipped.items():
      if messages:
        manifest["splits"][split]["rows"]["read"] += len(messages)
        manifest["splits"][split]["dropped"]["bad_record"] = len(messages)
    _write_manifest(temporary, manifest)
  return manifest


def prepare_arithmetic(
  output: str | pathlib.Path,
  generator: arithmetic.Generator,
  *,
  recipe_name: str = "paper",
  recipe: recipes.Recipe | None = None,
  overwrite: bool = False,
) -> dict[str, Any]:
  """As `prepare_prm800k`, for generated records; also writes candidate solutions to rerank."""
  recipe = recipe or recipes.RECIPES[recipe_name]
  with new_directory(output, overwrite) as temporary:
    builder = arithmetic.Builder(rows=generator.rows(), data_dir=temporary)
    _build(builder)
    manifest = summarize(temporary, builder, recipe_name, recipe, set())
    manifest["generator"] = dataclasses.asdict(generator)
    generator.write_candidates(temporary)
    _write_manifest(temporary, manifest)
  return manifest


def prepare_math_splits(
  output: str | pathlib.Path,
  *,
  source: str | pathlib.Path | None,
  overwrite: bool = False,
  download_dir: str | pathlib.Path = DOWNLOADS,
) -> dict[str, Any]:
  """Writes the MATH problems of `math_splits`; of a local `source`, the splits that are there."""
  splits = ("train", "test")
  if source is not None:
    folders = [pathlib.Path(source).expanduser() / name for name in ("math_splits", "")]
    present = tuple(s for s in splits if any((f / f"{s}.jsonl").is_file() for f in folders))
    splits = present or splits
  with new_directory(output, overwrite) as temporary:
    builder = math_splits.Builder(source=source, splits=splits, data_dir=temporary)
    _build(builder, download_dir)
    sizes = {split: info.num_examples for split, info in builder.info.splits.items()}
    manifest = {
      "dataset": "math_splits",
      "data": str(prm800k.find_dataset(temporary).relative_to(temporary)),
      "source": download.describe(builder),
      "splits": {split: {"rows": {"read": n, "kept": n}} for split, n in sizes.items()},
    }
    _write_manifest(temporary, manifest)
  return manifest


def summarize(
  directory: pathlib.Path,
  builder: tfds.core.DatasetBuilder,
  recipe_name: str,
  recipe: recipes.Recipe,
  test_problems: set[str],
) -> dict[str, Any]:
  """What `recipe` keeps of the dataset in `directory`, by split, with both objectives.

  Training records of `test_problems`, and of the problems of the dataset's own test split, are
  dropped and the problems listed.
  """
  print("counting labels", file=sys.stderr, flush=True)
  excluded, leaked, summary = set(test_problems), set(), {}
  splits = sorted(builder.info.splits, reverse=True)  # train, test
  if "test" in splits:
    records = prm800k.stored_records(directory, "test")
    excluded |= {record.solution.question.problem for record in records}
  for split in splits:
    counts = {}
    for objective in recipes.OBJECTIVES:
      records = prm800k.stored_records(directory, split)
      bar = tqdm.tqdm(records, f"{split}, {objective}", leave=False, disable=None)
      problems = excluded if split == "train" else ()
      counts[objective] = recipes.convert_all(bar, recipe, objective, problems)[1]
    process, outcome = counts["process"], counts["outcome"].to_json()
    leaked |= process.test_problems
    summary[split] = process.to_json() | {
      "outcome": {
        "rows": outcome["rows"],
        "right": counts["outcome"].outcomes["right"],
        "wrong": counts["outcome"].outcomes["wrong"],
        "dropped": outcome["dropped"],
      }
    }
  for split, counts in summary.items():
    if not counts["rows"]["kept"]:
      raise ValueError(
        f"recipe {recipe_name} keeps none of the {counts['rows']['read']} records of {split}; "
        f"dropped by rule: {counts['dropped']}"
      )
  return {
    "dataset": builder.name,
    "data": str(prm800k.find_dataset(directory).relative_to(directory)),
    "recipe": {"name": recipe_name, **dataclasses.asdict(recipe)},
    "splits": summary,
    "total": {
      "rows": {k: sum(s["rows"][k] for s in summary.values()) for k in ("read", "kept")},
      "labels": {k: sum(s["labels"][k] for s in summary.values()) for k in ("1", "0", "-1")},
    },
    "test_problems": sorted(leaked),
  }


@contextlib.contextmanager
def new_directory(output: str | pathlib.Path, overwrite: bool) -> Iterator[pathlib.Path]:
  """A temporary folder beside `output` that takes its name when the block succeeds.

  Whatever stops the block, even SIGKILL, `output` is never half written.  The next run removes
  what a killed one left.

  Raises:
    FileExistsError: `output` is there and not empty, and may not or must not be overwritten.
  """
  output = pathlib.Path(output).expanduser().absolute()
  if output.exists() and (not output.is_dir() or any(output.iterdir())):
    if not overwrite:
      raise FileExistsError(f"{output} exists; choose another output or give --overwrite=True")
    if not (output / MANIFEST).is_file():
      raise FileExistsError(
        f"{output} has no {MANIFEST}, so it is not an earlier output and will not be overwritten; "
        "choose another output"
      )
  output.parent.mkdir(parents=True, exist_ok=True)
  prefix = f".{output.name}.incomplete-"
  for stale in output.parent.glob(f"{prefix}*"):
    if not _alive(stale.name.removeprefix(prefix)):
      shutil.rmtree(stale, ignore_errors=True)
  temporary = output.with_name(f"{prefix}{os.getpid()}")
  shutil.rmtree(temporary, ignore_errors=True)
  temporary.mkdir()
  try:
    yield temporary
    replaced = output.with_name(f".{output.name}.replaced-{os.getpid()}")
    if output.exists():  # a folder that is not empty cannot be replaced in one step
      output.rename(replaced)
    temporary.rename(output)
    shutil.rmtree(replaced, ignore_errors=True)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def _alive(pid: str) -> bool:
  try:
    os.kill(int(pid), 0)
  except (ValueError, ProcessLookupError):
    return False
  except PermissionError:  # somebody else's process
    return True
  return True


def _build(
  builder: tfds.core.DatasetBuilder,
  download_dir: str | pathlib.Path = DOWNLOADS,
  beam: tfds.download.DownloadConfig | None = None,
) -> None:
  """Runs a TFDS builder, without what it prints."""
  print(f"writing {builder.name}", file=sys.stderr, flush=True)
  tfds.disable_progress_bar()
  with contextlib.redirect_stdout(io.StringIO()):
    builder.download_and_prepare(download_dir=download_dir, download_config=beam)


def _test_file(
  source: str | pathlib.Path | None, download_dir: str | pathlib.Path
) -> pathlib.Path | None:
  """Upstream's list of the 500 test problems: beside a local source, or downloaded."""
  if source is not None:
    folder = pathlib.Path(source).expanduser().absolute()
    found = [f / TEST_FILE for f in (folder, folder.parent) if (f / TEST_FILE).is_file()]
    if not found:
      print(
        f"warning: no {TEST_FILE} in or beside {source}: training records are checked against the "
        "problems of this dataset's own test split only",
        file=sys.stderr,
      )
    return found[0] if found else None
  return download.fetch(math_splits.Builder, [TEST_FILE], None, download_dir)[TEST_FILE]


def _write_manifest(directory: pathlib.Path, manifest: dict[str, Any]) -> None:
  text = json.dumps(manifest, indent=2, ensure_ascii=False)
  (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")
