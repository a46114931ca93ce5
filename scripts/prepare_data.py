"""Writes a dataset and a manifest.json, from local files or a download.

  python scripts/prepare_data.py --dataset=prm800k --source=DIR --recipe=paper --output=data/prm800k
  python scripts/prepare_data.py --dataset=stepwise --source=labelled.jsonl --output=data/mine
  python scripts/prepare_data.py --dataset=arithmetic --arithmetic.seed=1 --output=data/arithmetic

stepwise reads labelled steps of any source: TRL's rows (prompt, completions, labels), tagged text
of Math-Shepherd, or problem, steps, labels; docs/data.md describes the forms.  process_bench,
prm_bench (evaluate.py judges models on them) and math_splits are checked and copied as they are.

Without --source the script downloads the files (prm800k: 477 MB, kept in --download_dir) and
verifies those that have published checksums, all but process_bench's.  The full PRM800K (101,599
records) should take a minute or two on one core.  docs/data.md shows how Apache Beam writes it in
many processes.
"""

from __future__ import annotations

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import dataclasses
import pathlib
import sys
from typing import Literal

import msgspec

from prm_jax.datasets import arithmetic, download, prepare
from prm_jax.datasets.labelled import MANIFEST
from prm_jax.datasets.prm800k.recipes import RECIPES, Recipe
from prm_jax.runtime import command_line

FROM_FILES = ("prm800k", "stepwise", *prepare.BENCHMARKS)
# Flags that not every dataset takes.
TAKEN_BY = {
  "download_dir": FROM_FILES,
  "source": FROM_FILES,
  "phases": ("prm800k",),
  "recipe": ("prm800k", "arithmetic"),
  "recipe_options": ("prm800k", "arithmetic"),
  "on_bad_record": ("prm800k", "stepwise"),
  "beam": ("prm800k",),
  "arithmetic": ("arithmetic",),
  "stepwise": ("stepwise",),
}
options = [(f.name, f.type | None, None) for f in msgspec.structs.fields(Recipe)[1:]]  # not name
RecipeOptions = dataclasses.make_dataclass("RecipeOptions", options, frozen=True)


@dataclasses.dataclass(frozen=True)
class Args:
  output: pathlib.Path  # New folder for the dataset and manifest.json.
  dataset: Literal[(*FROM_FILES, "arithmetic")] = "prm800k"
  # Folder with upstream's files; if not given, they are downloaded.  For stepwise also a file, or
  # its URL.
  source: str | None = None
  phases: Literal["all", "phase1", "phase2"] = "all"  # Phases of PRM800K to read.
  recipe: Literal[tuple(RECIPES)] = "paper"  # Rules that make labels of records: docs/data.md.
  # Options that differ from the recipe's, e.g. --recipe_options.neutral=positive.
  recipe_options: RecipeOptions = RecipeOptions()
  on_bad_record: Literal["fail", "skip"] = "fail"  # Stop at a bad record, or count and skip it.
  overwrite: bool = False  # Replace an earlier output.
  download_dir: pathlib.Path = download.DOWNLOADS  # Folder that keeps downloaded files.
  beam: prepare.Beam = prepare.Beam()  # Apache Beam, for --dataset=prm800k.
  # Generator options, for --dataset=arithmetic.
  arithmetic: arithmetic.Generator = arithmetic.Generator()
  stepwise: prepare.Stepwise = prepare.Stepwise()  # Reading options, for --dataset=stepwise.


def main() -> None:
  args = command_line.parse(Args, __doc__)
  manifest = prepared(args)
  print(table(manifest))
  if warning := one_sided(manifest, args.stepwise.test_share):
    print(warning, file=sys.stderr)
  print(f"dataset    {args.output / manifest.get('data', '')}")
  print(f"manifest   {args.output / MANIFEST}")
  if args.dataset == "arithmetic":
    print(f"candidates {args.output / arithmetic.CANDIDATES}")


def prepared(args: Args) -> dict:
  """Writes the dataset; returns its manifest."""
  options = {k: v for k, v in dataclasses.asdict(args.recipe_options).items() if v is not None}
  name = args.recipe
  if options:
    name += "(" + ", ".join(f"{key}={value}" for key, value in options.items()) + ")"
  recipe = msgspec.structs.replace(RECIPES[args.recipe], name=name, **options)
  labels = {"recipe": recipe, "overwrite": args.overwrite}
  files = {"source": args.source, "download_dir": args.download_dir}
  for flag, datasets in TAKEN_BY.items():
    if args.dataset not in datasets and getattr(args, flag) != getattr(Args(args.output), flag):
      raise ValueError(f"--{flag} is for --dataset={' or '.join(datasets)}, not {args.dataset}")
  if args.beam.options and not args.beam.runner:
    raise ValueError("--beam.options needs --beam.runner")
  if args.dataset == "arithmetic":
    return prepare.prepare_arithmetic(args.output, args.arithmetic, **labels)
  if args.dataset == "stepwise":
    if not args.source:
      raise ValueError("--dataset=stepwise takes --source=FILE, URL, or a folder with train.jsonl")
    more = {"overwrite": args.overwrite, "on_bad_record": args.on_bad_record}
    return prepare.prepare_stepwise(args.output, args.stepwise, **more, **files)
  if args.dataset in prepare.BENCHMARKS:
    return prepare.prepare_benchmark(args.output, args.dataset, overwrite=args.overwrite, **files)
  reading = {"config": args.phases, "on_bad_record": args.on_bad_record, "beam": args.beam}
  return prepare.prepare_prm800k(args.output, **reading, **labels, **files)


def table(manifest: dict) -> str:
  """Formats the manifest's main counts."""
  lines = [f"{'':10}{'rows read':>12}{'kept':>10}{'labels':>10}{'+1':>10}{'0':>10}{'-1':>10}"]
  total = {"total": manifest["total"]} if "total" in manifest else {}
  for name, part in (manifest["splits"] | total).items():
    line = f"{name:10}{part['rows']['read']:12,}{part['rows']['kept']:10,}"
    if labels := part.get("labels"):
      line += f"{sum(labels.values()):10,}" + "".join(f"{labels[k]:10,}" for k in ("1", "0", "-1"))
    lines.append(line)
  if kind := manifest.get("labels"):
    lines.append(f"{kind} labels: a head of the classes {', '.join(manifest['classes'])}")
    if "test" not in manifest["splits"]:
      lines.append("no test split: train with --config.data.eval_split=train")
  for name, part in manifest["splits"].items():
    if dropped := part.get("dropped"):
      rules = ", ".join(f"{rule} {count:,}" for rule, count in dropped.items())
      lines.append(f"{name} rows dropped: {rules}")
  if bad := manifest.get("bad_records", {}).get("examples"):
    lines += ["bad records skipped, for example", *(f"  {example}" for example in bad[:3])]
  return "\n".join(lines)


def one_sided(manifest: dict, test_share: float) -> str:
  """Returns a warning if the test split has no label of a right step, or none of a wrong one."""
  if "labels" not in manifest or "test" not in manifest["splits"]:
    return ""
  lacks = {}
  for name, part in manifest["splits"].items():
    wrong, labels = part["labels"]["-1"], sum(part["labels"].values())
    lacks[name] = "" if not labels else "wrong" if not wrong else "right" * (wrong == labels)
  if not lacks["test"]:
    return ""
  rows = manifest["splits"]["test"]["rows"]["kept"]
  text = f"warning: test split: {rows} solution(s), no {lacks['test']} step; AUROC is undefined"
  if "test" in manifest["source"] or lacks["train"] == lacks["test"]:
    return text
  return f"{text}: raise --stepwise.test_share ({test_share:g})"


if __name__ == "__main__":
  exits.run(main)
