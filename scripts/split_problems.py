"""Splits problems with answers: a half for reported results, the rest for labels and settings.

  python scripts/split_problems.py --source=DIR --output=data/problems

Writes three files:

  OUTPUT/reported.jsonl  half of the 500 MATH test problems of PRM800K's split, half of each level
  OUTPUT/own.jsonl       the other half and, if DIR holds PRM800K's records, their problems with an
                         answer
  OUTPUT/manifest.json   counts and hashes of both; they share no problem

Use own.jsonl for labels, settings and thresholds, and reported.jsonl for reported figures.
generate.py reads both.  DIR is as for prepare_data.py; without it the script downloads the test
problems.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

from prm_jax import config as config_lib
from prm_jax.datasets import download, math_splits
from prm_jax.runtime import command_line, json_lines, storage
from prm_jax.types import problem_key

TRAIN = ("data/phase1_train.jsonl", "data/phase2_train.jsonl")


@dataclasses.dataclass(frozen=True)
class Args(config_lib.Checked):
  output: pathlib.Path  # new folder
  source: pathlib.Path | None = None  # folder with PRM800K's files, or a part of them
  seed: config_lib.Whole = 0  # for the split into halves
  levels: tuple[config_lib.Whole, ...] = ()  # levels of the test problems to take; none: all
  reported: config_lib.Whole = 0  # limit of problems to report on; 0: the whole half
  own: config_lib.Whole = 0  # limit of problems of the other half; 0: all of it
  training: config_lib.Whole | None = None  # limit of problems of PRM800K's records; default: all
  download_dir: pathlib.Path = download.DOWNLOADS


def main() -> None:
  args = command_line.parse(Args, __doc__)
  if args.training is not None and not args.source:
    raise ValueError("--training limits the problems of PRM800K's records: give their --source=DIR")
  path = math_splits.test_file(args.source, args.download_dir)
  test = [problem for _, problem in json_lines.structs(path, math_splits.Problem)]
  others = solved(args.source, {problem_key(each.problem) for each in test}) if args.source else []
  chosen = [each for each in test if not args.levels or each.level in args.levels]
  if len(chosen) < 2:
    raise ValueError(f"--levels={args.levels}: {len(chosen)} test problems; at least 2 are needed")
  reported, own = halves(chosen, args.seed)
  files = {
    "reported": reported[: args.reported or None],
    "own": own[: args.own or None] + others[: args.training],
  }
  # No reported problem may be in the other file.
  keys = [{problem_key(each["problem"]) for each in problems} for problems in files.values()]
  if shared := set.intersection(*keys):
    raise ValueError(f"{len(shared)} problems are in both files, for example {min(shared)!r}")
  about = {"seed": args.seed, "levels": sorted({each.level for each in chosen})}
  with storage.written_directory(args.output) as folder:
    for name, problems in files.items():
      path = folder / f"{name}.jsonl"
      text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in problems)
      path.write_text(text, encoding="utf-8")
      levels = collections.Counter(str(each.get("level", "none")) for each in problems)
      about[name] = {
        "problems": len(problems),
        "by_level": dict(sorted(levels.items())),
        "sha256": storage.sha256_of(path),
      }
    (folder / "manifest.json").write_text(json.dumps(about, indent=2) + "\n")
  for name in files:
    levels = ", ".join(f"{level}: {n}" for level, n in about[name]["by_level"].items())
    print(f"{about[name]['problems']:4} problems -> {args.output / name}.jsonl (by level {levels})")


def solved(source: pathlib.Path, excluded: Collection[str]) -> list[dict[str, Any]]:
  """Returns the other problems of PRM800K's training records that have an answer.

  Args:
    excluded: keys of the problems to leave out.
  """
  from prm_jax.datasets import prm800k  # imports TFDS

  problems = {}
  for path in filter(None, (download.find(source, file) for file in TRAIN)):
    for record in prm800k.read_records(path):
      question = record.solution.question
      key = problem_key(question.problem)
      if question.ground_truth_answer and key not in excluded:
        answer = {"ground_truth_answer": question.ground_truth_answer}
        problems.setdefault(key, {"problem": question.problem} | answer)
  return [*problems.values()]


def halves(problems: Sequence[math_splits.Problem], seed: int) -> tuple[list[dict], list[dict]]:
  """Returns two halves of the problems, each with half of every level, as lines for generate.py.

  Every prefix of a half has the levels in proportion, so a caller may take fewer problems.
  """
  key = lambda each: hashlib.sha256(f"{seed} {each.problem}".encode()).digest()
  parts: tuple[list, list] = [], []
  for level in sorted({each.level for each in problems}):
    members = sorted((each for each in problems if each.level == level), key=key)
    for i, each in enumerate(members):
      quantile = (i // 2 + 0.5) / (len(members) / 2)  # among its level's problems in the half
      line = {
        "problem": each.problem,
        "ground_truth_answer": each.answer,
        "level": each.level,
        "subject": each.subject,
        "unique_id": each.unique_id,
      }
      parts[i % 2].append((quantile, key(each), line))
  first, second = ([line for *_, line in sorted(part, key=lambda x: x[:2])] for part in parts)
  return first, second


if __name__ == "__main__":
  exits.run(main)
