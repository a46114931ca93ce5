"""Writes a dataset and its manifest to one folder, either both or neither."""

import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec
import tensorflow_datasets as tfds

from prm_jax.datasets import (
  arithmetic,
  download,
  math_splits,
  prm800k,
  prm_bench,
  process_bench,
  stepwise,
)
from prm_jax.datasets.labelled import MANIFEST
from prm_jax.datasets.prm800k import recipes
from prm_jax.datasets.stepwise import Stepwise
from prm_jax.runtime import exits, json_lines, storage
from prm_jax.runtime.progress import Progress, waiting

PAPER = recipes.RECIPES["paper"]


@dataclasses.dataclass(frozen=True)
class Beam:
  """A runner of Apache Beam, whose workers write the same shards as one process."""

  runner: str = ""  # DirectRunner or another Beam runner; "": this process, without Beam.
  # Runner flags, without dashes: direct_num_workers=4 direct_running_mode=multi_processing.
  options: tuple[str, ...] = ()

  def download_config(self) -> tfds.download.DownloadConfig | None:
    """Returns TFDS's setting for the runner; ValueError if Beam is missing or lacks an option."""
    if not self.runner:
      return None
    try:
      from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
      raise ValueError(
        f"--beam.runner={self.runner} needs Apache Beam ({error}): pip install '.[beam]'"
      ) from error
    options = PipelineOptions([f"--{option}" for option in self.options])
    known = options.get_all_options()
    if unknown := [o for o in self.options if o.partition("=")[0] not in known]:
      raise ValueError(f"--beam.options: Apache Beam has no {', '.join(unknown)}")
    return tfds.download.DownloadConfig(beam_runner=self.runner, beam_options=options)


def prepare_prm800k(
  output: str | pathlib.Path,
  *,
  source: str | pathlib.Path | None,
  config: str = "all",
  recipe: recipes.Recipe = PAPER,
  on_bad_record: str = "fail",
  overwrite: bool = False,
  download_dir: str | pathlib.Path = download.DOWNLOADS,
  beam: Beam = Beam(),
) -> dict[str, Any]:
  """Writes PRM800K and a manifest.json with the counts of `recipe`; returns the manifest.

  The dataset holds every record whole; training applies the recipe when it reads the records.

  Args:
    output: a new folder (see `new_dataset`); `overwrite` replaces an earlier output.
    source: folder with upstream's files; None downloads them to `download_dir`.
    config: "all", "phase1" or "phase2".
    on_bad_record: "fail" or "skip".

  Raises:
    BadLine, ValueError: a bad record or option.
    OSError: a file is missing, or `output` may not be written (see `new_dataset`).
    RuntimeError: a download failed.
  """
  with new_dataset(output, overwrite, source, download_dir) as (temporary, manifest):
    builder = prm800k.Builder(
      source=source, config=config, data_dir=temporary, on_bad_record=on_bad_record
    )
    manifest |= _build(builder, None if source else download_dir, beam)
    if source:
      test_file = math_splits.find_test(source)
    else:
      test_file = math_splits.test_file(None, download_dir)
    if test_file is None:
      print(f"warning: no {math_splits.TEST_FILE} in or beside {source}", file=sys.stderr)
    problems = json_lines.structs(test_file, math_splits.Problem) if test_file else ()
    bad = builder.skipped
    manifest["source"] = download.describe(builder, builder.paths)
    manifest["test_problems_from"] = str(test_file) if test_file else None
    manifest["bad_records"] = _bad_records(bad)
    skipped = {split: len(messages) for split, messages in bad.items()}
    manifest |= summarize(builder, recipe, {p.problem for _, p in problems}, skipped)
  return manifest


def prepare_arithmetic(
  output: str | pathlib.Path,
  generator: arithmetic.Generator,
  *,
  recipe: recipes.Recipe = PAPER,
  overwrite: bool = False,
) -> dict[str, Any]:
  """Like `prepare_prm800k`, for generated records; also writes candidate solutions to rerank."""
  with new_dataset(output, overwrite) as (temporary, manifest):
    builder = arithmetic.Builder(rows=generator.rows(), data_dir=temporary)
    manifest |= _build(builder)
    manifest |= summarize(builder, recipe, test_problems=(), skipped={})
    manifest["generator"] = dataclasses.asdict(generator)
    generator.write_candidates(temporary)
  return manifest


def prepare_stepwise(
  output: str | pathlib.Path,
  options: Stepwise,
  *,
  source: str | pathlib.Path,
  on_bad_record: str = "fail",
  overwrite: bool = False,
  download_dir: str | pathlib.Path = download.DOWNLOADS,
) -> dict[str, Any]:
  """Like `prepare_prm800k`, for labelled solutions in one of the forms of `stepwise.records`.

  Args:
    source: a file, its URL, or a folder with train.jsonl and perhaps test.jsonl, whose problems
      training leaves out.
  """
  with new_dataset(output, overwrite, source, download_dir) as (temporary, manifest):
    files = download.local(source, download_dir)
    builder = stepwise.Builder(
      source=files, options=options, on_bad_record=on_bad_record, data_dir=temporary
    )
    manifest |= _build(builder)
    source_files = {
      split: {"path": str(path), "sha256": storage.sha256_of(path)}
      for split, path in builder.paths.items()
    }
    if files != pathlib.Path(source):
      source_files["train"]["url"] = str(source)
    manifest |= {"source": source_files, "labels": builder.kind, "classes": builder.classes}
    manifest["splits"] = builder.counts
    manifest["bad_records"] = _bad_records({k: v.values() for k, v in builder.skipped.items()})
    manifest["test_problems"] = sorted(builder.test_problems)
  return manifest


BENCHMARKS = {
  each.BENCHMARK.name: each.BENCHMARK for each in (math_splits, process_bench, prm_bench)
}


def prepare_benchmark(
  output: str | pathlib.Path,
  name: str,
  *,
  source: str | pathlib.Path | None,
  overwrite: bool = False,
  download_dir: str | pathlib.Path = download.DOWNLOADS,
) -> dict[str, Any]:
  """Checks and copies one of `BENCHMARKS`; a local `source` may hold only some of its files."""
  benchmark, sizes = BENCHMARKS[name], Counter()
  with new_dataset(output, overwrite, source, download_dir) as (temporary, manifest):
    if source is None:
      paths = benchmark.fetch(benchmark.files, download_dir)
    else:
      paths = {path.name: path for path in benchmark.local(source)}
    for path in Progress(paths.values(), desc="checking", unit="files", leave=False):
      split = benchmark.split or path.name.partition(".")[0]
      sizes[split] += sum(1 for _ in json_lines.structs(path, benchmark.line))
      shutil.copyfile(path, temporary / path.name)
    manifest |= {"dataset": name, "source": download.describe(benchmark, paths)}
    manifest["splits"] = {split: {"rows": {"read": n, "kept": n}} for split, n in sizes.items()}
  return manifest


def _bad_records(skipped: Mapping[str, Collection[str]]) -> dict[str, Any]:
  """Returns the manifest's entry for bad records, from their messages by split."""
  examples = [text for messages in skipped.values() for text in [*messages][:10]]
  return {"count": sum(map(len, skipped.values())), "examples": examples}


def summarize(
  builder: tfds.core.DatasetBuilder,
  recipe: recipes.Recipe,
  test_problems: Collection[str],
  skipped: Mapping[str, int],
) -> dict[str, Any]:
  """Counts what `recipe` keeps of the written dataset, by split, for both objectives.

  Drops training records of `test_problems` and of the problems of the dataset's test split, and
  lists these problems, so that a dataset that is trained on beside this one leaves them out too.

  Args:
    skipped: number of bad records of each split, which were read and not written.
  """
  print("counting labels", file=sys.stderr, flush=True)
  test = prm800k.stored_records(builder.data_dir, "test")
  excluded = {*test_problems} | {record.solution.question.problem for record in test}
  summary = {}
  for split, problems in (("train", excluded), ("test", ())):
    records = prm800k.stored_records(builder.data_dir, split)
    bar = functools.partial(Progress, records, unit="records", leave=False)
    _, counts = recipes.convert_all(bar(f"{split}, process"), recipe, "process", problems)
    if not counts["rows"]["kept"]:
      read = f"{counts['rows']['read']} records of {split}; dropped by rule: {counts['dropped']}"
      raise ValueError(f"recipe {recipe.name} keeps none of the {read}")
    trees, outcome = recipes.convert_all(bar(f"{split}, outcome"), recipe, "outcome", problems)
    right = sum(tree.outcome for tree in trees)
    answers = {"right": right, "wrong": len(trees) - right, "dropped": outcome["dropped"]}
    if bad := skipped.get(split):
      counts["rows"]["read"] += bad
      counts["dropped"]["bad_record"] = bad
    summary[split] = counts | {"outcome": {"rows": outcome["rows"]} | answers}
  return {
    "recipe": msgspec.structs.asdict(recipe),
    "splits": summary,
    "total": {
      key: {k: n + summary["test"][key][k] for k, n in summary["train"][key].items()}
      for key in ("rows", "labels")
    },
    "test_problems": sorted(excluded),
  }


@contextlib.contextmanager
def new_dataset(
  output: str | pathlib.Path,
  overwrite: bool,
  source: str | pathlib.Path | None = None,
  download_dir: str | pathlib.Path | None = None,
) -> Iterator[tuple[pathlib.Path, dict[str, Any]]]:
  """Yields a folder that takes the name `output` if the block succeeds, and a manifest to fill.

  Raises:
    FileExistsError: `output` is not empty, and is not an earlier dataset or `overwrite` is False.
    ValueError: `source` or `download_dir` is inside `output`, which would be replaced.
  """
  earlier = pathlib.Path(output).expanduser().resolve()
  for flag, folder in (("source", source), ("download_dir", download_dir)):
    if folder and pathlib.Path(folder).expanduser().resolve().is_relative_to(earlier):
      raise ValueError(f"--{flag}={folder} is in --output={output}, which would be replaced")
  if (earlier / MANIFEST).is_file():
    if "dataset" not in json_lines.document_or_empty(earlier / MANIFEST):
      raise FileExistsError(f"{output}: its {MANIFEST} is not a dataset's; choose another --output")
    if not overwrite:
      raise FileExistsError(
        f"{output} has a {MANIFEST}: choose another --output, or add --overwrite"
      )
  manifest = {}
  with storage.written_directory(output, replaces=MANIFEST) as folder:
    yield folder, manifest
    text = json.dumps(manifest, indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _build(
  builder: tfds.core.DatasetBuilder,
  download_dir: str | pathlib.Path | None = None,
  beam: Beam = Beam(),
) -> dict[str, str]:
  """Runs a TFDS builder and hides its output; returns the first entries of the manifest.

  Args:
    download_dir: TFDS makes folders in it even if nothing is downloaded; None: a temporary one.
  """
  tfds.disable_progress_bar()
  with (
    waiting(f"writing {builder.name}"),
    contextlib.redirect_stdout(io.StringIO()),
    exits.scratch_directory() as scratch,
  ):
    builder.download_and_prepare(
      download_dir=download_dir or scratch, download_config=beam.download_config()
    )
  if empty := [split for split, info in builder.info.splits.items() if not info.num_examples]:
    raise ValueError(f"{builder.name}: no example in the split {', '.join(empty)}")
  return {"dataset": builder.name, "data": builder.info.full_name}
