"""Problems with answers for an experiment: a half to report on, the others for every choice.

  python scripts/split_problems.py --source=DIR --output=data/problems

Writes OUTPUT/reported.jsonl, half of the 500 MATH test problems of PRM800K's split, by level;
OUTPUT/own.jsonl, the other half and, if DIR holds PRM800K's records, their problems with an answer;
and OUTPUT/manifest.json: counts, hashes, and that no problem is in both.  Labels, settings and
thresholds are made on the second file; the first is for the figures.  generate.py reads both.

DIR is as for prepare_data.py; without it the list of test problems is downloaded.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before what takes time to import

import collections
import dataclasses
import json
import pathlib

from prm_jax import config as config_lib
from prm_jax.datasets import download, prepare, problem_halves
from prm_jax.runtime import command_line, storage


@dataclasses.dataclass(frozen=True)
class Args(config_lib.Checked):
  output: pathlib.Path  # new folder
  source: pathlib.Path | None = None  # folder with PRM800K's files, or a part of them
  seed: config_lib.Whole = 0  # of the halves
  levels: tuple[config_lib.Whole, ...] = ()  # of the test problems; none: all
  reported: config_lib.Whole = 0  # problems to report on, at most; 0: the half
  own: config_lib.Whole = 0  # other test problems, at most; 0: the other half
  training: config_lib.Whole | None = None  # problems of PRM800K's records, at most; None: all
  download_dir: pathlib.Path = prepare.DOWNLOADS


def main() -> None:
  args = command_line.parse(Args, __doc__)
  test, others = problem_halves.read(args.source, args.download_dir)
  chosen = [each for each in test if not args.levels or each.level in args.levels]
  if len(chosen) < 2:
    raise ValueError(f"--levels={args.levels}: {len(chosen)} of {len(test)} problems")
  reported, own = problem_halves.halves(chosen, args.seed)
  files = {
    "reported": reported[: args.reported or None],
    "own": own[: args.own or None] + others[: args.training],
  }
  if shared := problem_halves.overlap(files["own"], files["reported"]):
    raise ValueError(f"{len(shared)} problems are in both files, for example {shared[0]!r}")
  about = {
    "seed": args.seed,
    "levels": sorted({each.level for each in chosen}),
    "in_both": len(shared),
  }
  with storage.written_directory(args.output) as folder:
    for name, problems in files.items():
      path = folder / f"{name}.jsonl"
      path.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in problems))
      levels = collections.Counter(str(each.get("level", "none")) for each in problems)
      about[name] = {
        "problems": len(problems),
        "by_level": dict(sorted(levels.items())),
        "sha256": download.sha256_of(path),
      }
    (folder / "manifest.json").write_text(json.dumps(about, indent=2) + "\n")
  for name in files:
    levels = ", ".join(f"{level}: {n}" for level, n in about[name]["by_level"].items())
    print(f"{about[name]['problems']:4} problems -> {args.output / name}.jsonl (by level {levels})")


if __name__ == "__main__":
  exits.run(main)
