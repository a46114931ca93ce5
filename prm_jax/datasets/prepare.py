"""Writes a dataset and its manifest under one folder, all or nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow_datasets as tfds
import tqdm

from prm_jax.datasets import download, math_splits, on_beam, prm800k
from prm_jax.datasets.prm800k import recipes

MANIFEST = "manifest.json"
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
  beam: on_beam.Beam | None = None,
) -> dict[str, Any]:
  """Writes PRM800K to `output`, and what `recipe` makes of it to `output/manifest.json`.

  The dataset holds every row whole: a recipe is applied when training reads it
  (`conversion.recipe_of` the manifest).

  Args:
    output: a new folder (see `new_directory`).
    source: folder with upstream's files; None downloads them.
    config: "all", "phase1" or "phase2".
    recipe_name: of `conversion.RECIPES`.
    recipe: its options, if they were changed.
    on_bad_record: "fail" or "skip".
    overwrite: replace an earlier output.
    download_dir: where downloaded files are kept.
    beam: rows are read, written and counted there; the output is the same.

  Returns:
    the manifest.

  Raises:
    BadRecord, FileNotFoundError, FileExistsError, RuntimeError: say what is wrong and what to do.
  """
  recipe = recipe or recipes.RECIPES[recipe_name]
  with new_directory(output, overwrite) as temporary:
    with _progress("reading", "B") as advance:
      builder = prm800k.Builder(
        source=source,
        config=config,
        data_dir=temporary,
        on_bad_record=on_bad_record,
        **({} if beam else {"on_bytes": advance}),
      )
      _build(builder, download_dir, beam)
    test_file = _test_file(source, download_dir)
    test_problems = set() if test_file is None else _problems(test_file)
    manifest = {
      "source": {
        file: download.describe(path, file, builder.BASE_URL, builder.url_infos)
        for file, path in builder.paths.items()
      },
      "test_problems_from": None if test_file is None else str(test_file),
      "bad_records": {
        "count": sum(bad.count for bad in builder.skipped.values()),
        "examples": [text for bad in builder.skipped.values() for text in bad.examples],
      },
    }
    manifest |= summarize(temporary, builder, recipe_name, recipe, test_problems, beam)
    for split, bad in builder.skipped.items():
      if bad.count:
        manifest["splits"][split]["rows"]["read"] += bad.count
        manifest["splits"][split]["dropped"]["bad_record"] = bad.count
    _write_manifest(temporary, manifest)
  return manifest


def prepare_rows(
  output: str | pathlib.Path,
  builder: type[prm800k.RowsBuilder],
  rows,
  *,
  recipe_name: str = "paper",
  recipe: recipes.Recipe | None = None,
  overwrite: bool = False,
  generator: dict[str, Any] | None = None,
  beside: Callable[[pathlib.Path], Any] = lambda directory: None,
) -> dict[str, Any]:
  """As `prepare_prm800k`, for generated rows: `builder(rows=rows)`, `rows` by split.

  `generator` says how they were made, for the manifest.  `beside(directory)` writes further files
  into the output, such as candidates to rerank.
  """
  recipe = recipe or recipes.RECIPES[recipe_name]
  with new_directory(output, overwrite) as temporary:
    writer = builder(rows=rows, data_dir=temporary)
    _build(writer, DOWNLOADS)
    manifest = summarize(temporary, writer, recipe_name, recipe, set())
    manifest["generator"] = generator
    beside(temporary)
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
    manifest = {
      "dataset": "math_splits",
      "data": str(prm800k.find_dataset(temporary).relative_to(temporary)),
      "source": {
        file: download.describe(path, file, builder.BASE_URL, builder.url_infos)
        for file, path in builder.paths.items()
      },
      "splits": {
        split: {"rows": {"read": info.num_examples, "kept": info.num_examples}}
        for split, info in builder.info.splits.items()
      },
    }
    _write_manifest(temporary, manifest)
  return manifest


def summarize(
  directory: pathlib.Path,
  builder,
  recipe_name: str,
  recipe: recipes.Recipe,
  test_problems: set[str],
  beam: on_beam.Beam | None = None,
) -> dict[str, Any]:
  """What `recipe` keeps of the dataset in `directory`, by split, with both objectives.

  Training rows of `test_problems`, and of the problems of the dataset's own test split, are dropped
  and the problems listed.
  """
  splits = sorted(builder.info.splits, reverse=True)  # train, test
  excluded = set(test_problems)
  if "test" in splits:
    excluded |= {r.row["question"]["problem"] for r in prm800k.read_rows(directory, "test")}
  out = {split: excluded if split == "train" else set() for split in splits}
  if beam:
    sizes = {split: builder.info.splits[split].num_examples for split in splits}
    counted = on_beam.count(beam, directory, sizes, recipe, out)
  else:
    counted = _count(directory, recipe, out)
  leaked: set[str] = set()
  summary: dict[str, Any] = {}
  for split in splits:
    counts, outcomes = (counted[split][objective] for objective in recipes.OBJECTIVES)
    leaked |= counts.test_problems
    summary[split] = counts.to_json() | {
      "outcome": {
        "rows": {"read": outcomes.rows_read, "kept": outcomes.rows_kept},
        "right": outcomes.outcomes["right"],
        "wrong": outcomes.outcomes["wrong"],
        "dropped": dict(sorted(outcomes.rows_dropped.items())),
      }
    }
  for split, counts in summary.items():
    if not counts["rows"]["kept"]:
      raise ValueError(
        f"recipe {recipe_name} keeps none of the {counts['rows']['read']} rows of {split}; dropped "
        f"by rule: {counts['dropped']}"
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


def _count(
  directory: pathlib.Path, recipe: recipes.Recipe, excluded: dict[str, set[str]]
) -> dict[str, dict[str, recipes.Counts]]:
  """As `on_beam.count`, in this process."""
  counted = {}
  with _progress("counting labels", "row") as advance:
    for split, problems in excluded.items():
      converters = {o: recipes.Converter(recipe, o, problems) for o in recipes.OBJECTIVES}
      for record in prm800k.read_rows(directory, split):
        for converter in converters.values():
          converter(record)
        advance(1)
      counted[split] = {objective: c.counts for objective, c in converters.items()}
  return counted


@contextlib.contextmanager
def new_directory(output: str | pathlib.Path, overwrite: bool) -> Iterator[pathlib.Path]:
  """A temporary folder beside `output` that takes its name when the block succeeds.

  Whatever stops the block, even SIGKILL, `output` is never half written; what a killed run left
  is removed by the next.

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
    if output.exists():
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


def _build(builder, download_dir, beam: on_beam.Beam | None = None) -> None:
  """Runs a TFDS builder without its chatter: progress is told by `_progress` and the download."""
  tfds.disable_progress_bar()
  config = beam.download_config() if beam else None
  with contextlib.redirect_stdout(io.StringIO()):
    builder.download_and_prepare(download_dir=download_dir, download_config=config)


@contextlib.contextmanager
def _progress(what: str, unit: str):
  """A function to call with work done: a bar on a terminal, a plain line now and then elsewhere."""
  bar = tqdm.tqdm(desc=what, unit=unit, unit_scale=True, leave=False, disable=None)
  done, last = 0, time.monotonic()

  def advance(n: int) -> None:
    nonlocal done, last
    bar.update(n)
    done += n
    if bar.disable and time.monotonic() - last > 10:
      last = time.monotonic()
      print(f"{what}: {done:,} {unit}", file=sys.stderr, flush=True)

  with bar:
    yield advance


def _test_file(source, download_dir) -> pathlib.Path | None:
  """Upstream's list of the 500 test problems: beside a local source, or downloaded."""
  if source is not None:
    folder = pathlib.Path(source).expanduser().absolute()
    found = [f / TEST_FILE for f in (folder, folder.parent) if (f / TEST_FILE).is_file()]
    if not found:
      print(
        f"warning: no {TEST_FILE} in or beside {source}: training rows are checked against the "
        "problems of this dataset's own test split only",
        file=sys.stderr,
      )
    return found[0] if found else None
  builder = math_splits.Builder
  files = download.fetch([TEST_FILE], None, builder.BASE_URL, builder.url_infos, download_dir)
  return files[TEST_FILE]


def _problems(path: pathlib.Path) -> set[str]:
  return {row["problem"] for row in math_splits.read_problems(path)}


def _write_manifest(directory: pathlib.Path, manifest: dict[str, Any]) -> None:
  text = json.dumps(manifest, indent=2, ensure_ascii=False)
  (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")
