"""Reports how PRM800K's phases and generations were selected, from its own fields.

  python scripts/retrospective.py --source=prm800k/data --output=retrospective.json

--source is a folder with any of upstream's files (phase1_train.jsonl, phase2_train.jsonl and the
like), or one of them.  The script prints counts of records, labels and final answers, and the
scores at selection, by phase and generation, and how many records lack these fields.
"""

from prm_jax.runtime import exits

exits.on_signals()  # before the slow imports

import dataclasses
import itertools
import json
import pathlib

from prm_jax.runtime import command_line


@dataclasses.dataclass(frozen=True)
class Args:
  source: pathlib.Path  # a folder of PRM800K's files, or one of them
  output: pathlib.Path | None = None  # JSON with every number


def main() -> None:
  args = command_line.parse(Args, __doc__)
  from prm_jax.datasets import prm800k
  from prm_jax.runtime import progress, storage
  from prm_jax.supervision import retrospective

  files = [args.source] if args.source.is_file() else sorted(args.source.glob("phase*.jsonl"))
  if not files:
    raise FileNotFoundError(f"{args.source}: no file of PRM800K, such as phase2_train.jsonl")
  storage.refuse_inputs([args.output], files)
  with storage.written_together() as output, progress.waiting(f"reading {len(files)} files"):
    out = output(args.output) if args.output else None
    records = itertools.chain.from_iterable(map(prm800k.read_records, files))
    report = retrospective.report(records)
    if out:
      out.write(json.dumps(report, indent=1) + "\n")
  print("\n".join(retrospective.table(report)))


if __name__ == "__main__":
  exits.run(main)
